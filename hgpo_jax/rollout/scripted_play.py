"""Play of a text environment without a policy: by its own scripted player, or with random commands.

The warm start clones it, and it provides a small policy's vocabulary.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hgpo_jax.envs.protocol import TextExpert
from hgpo_jax.rollout.chat_prompts import PastTurn, PromptInput
from hgpo_jax.rollout.requirements import deadline
from hgpo_jax.rollout.turn_budgets import goal_of, with_budget
from hgpo_jax.rollout.workers import EnvOutput, opened, read_output
from hgpo_jax.utils.errors import one_line
from hgpo_jax.utils.untraceable import untraceable


class ScriptedEpisode(NamedTuple):
    """The inputs before each turn, the role that acts, and the player's command."""

    inputs: list[PromptInput]
    roles: list[int]
    commands: list[str]
    won: bool


def play(
    make_env: Callable,
    tasks: Iterable[int],
    *,
    noise: float,
    history_length: int,
    seed: int,
    time_limit: float | None = None,
    budgets: Sequence[int] = (),
) -> Iterator[ScriptedEpisode]:
    """Plays an episode of each task in one environment, in this process.

    With probability `noise` a random command is executed instead of the player's own, which is recorded nevertheless. The play
    then also visits states that a clumsy policy gets into. An environment without a scripted player (`protocol.TextExpert`) is
    played with random commands. `time_limit` is that of `requirements.deadline`, `budgets` those of `with_budget`.

    Raises ValueError, in one line, for an episode that cannot be played.
    """
    with opened(make_env) as env:
        for number, task in enumerate(tasks):
            random = np.random.default_rng([seed, task])
            budgeted = functools.partial(with_budget, episode=number, budgets=budgets)
            try:
                yield _episode(env, task, noise, history_length, random, time_limit, budgeted)
            except Exception as error:  # any error of an environment or its player
                what = error if type(error) is ValueError else f"{type(error).__name__}: {error}"
                raise ValueError(one_line(f"task {task} cannot be played: {what}")) from None


def _episode(
    env, task: int, noise: float, history_length: int, random: np.random.Generator, time_limit: float | None, budgeted: Callable
) -> ScriptedEpisode:
    with deadline(f"reset({task})", time_limit):
        outputs, labels = [budgeted(read_output(env, env.reset(task), 2))], list[str]()
    actions: list[str] = []
    while not outputs[-1].done and len(actions) < env.max_turns:
        output = outputs[-1]
        labels.append(_by_expert(env, history_length) if isinstance(env, TextExpert) else _random_command(output, random))
        actions.append(_random_command(output, random) if random.random() < noise and output.commands else labels[-1])
        with deadline(f"step({actions[-1]!r:.80})", time_limit):
            outputs.append(budgeted(read_output(env, env.step(actions[-1]), 5)))
    inputs, roles = prompt_inputs(outputs, actions, history_length), [output.role for output in outputs[: len(actions)]]
    return ScriptedEpisode(inputs, roles, labels, bool(outputs[-1].won))


def _by_expert(env: TextExpert, history_length: int) -> str:
    try:
        return env.expert(history_length)
    except Exception as error:  # any error of a user's code
        raise ValueError(f"expert({history_length}): {untraceable(type(env).expert, error)}") from None


def prompt_inputs(outputs: list[EnvOutput], actions: list[str], history_length: int) -> list[PromptInput]:
    """Returns the information before each action: of the past, only the last K turns of the same role.

    outputs: an environment's outputs, that of the reset first.

    A chat has all turns of the role, since no prompt is built here that could drop some. So one beyond the prompt limit is cut
    anew at each turn, where a rollout's is cut once and then grows.
    """
    past: dict[int, list[PastTurn]] = defaultdict(list)  # by role
    inputs = []
    for output, action in zip(outputs, actions, strict=False):
        turns = past[output.role]
        history = [(turn.observation, turn.action) for turn in turns[max(0, len(turns) - history_length) :]]
        inputs.append(PromptInput(goal_of(output), history, len(turns), output.observation, output.commands, tuple(turns)))
        turns.append(PastTurn(output.observation, output.commands, action))
    return inputs


def _random_command(output: EnvOutput, random: np.random.Generator) -> str:
    if not output.commands:
        missing = "it lists no commands to choose from, and has no expert(history_length)"
        raise ValueError(f"{missing}; give policy= and warm_start=none")
    return output.commands[random.integers(len(output.commands))]
