"""Checks of a text environment: its members, its answers, and the equality of equal tasks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hgpo_jax.check.play import GROUP, Play, Report
from hgpo_jax.envs.protocol import BegunTextEnv, TextEnv, TextExpert
from hgpo_jax.policy.answers import find_action
from hgpo_jax.rollout.chat_prompts import PromptInput
from hgpo_jax.rollout.requirements import Hangs, deadline, member_faults
from hgpo_jax.rollout.scripted_play import prompt_inputs
from hgpo_jax.rollout.state_keys import key_numbers
from hgpo_jax.rollout.workers import EnvOutput, read_output
from hgpo_jax.utils.errors import one_line
from hgpo_jax.utils.untraceable import untraceable

REPLAYED = 8  # tasks with an episode that is replayed
NONSENSE = "no such command"
_NUMBER = re.compile(r"\d{1,15}")
Measure = Callable[[list[PromptInput]], tuple[list[int], int]]  # inputs -> (prompt lengths, number that do not fit)
Episode = tuple[list[EnvOutput], list[str]]  # the outputs, that of the reset first, and the actions


class _Fault(Exception):
    """The reason why an episode cannot continue; the text is the fault's line."""


class _Checked:
    """An environment whose answers are checked and timed."""

    def __init__(self, env):
        self._env, self.max_turns, self.steps, self.seconds = env, env.max_turns, 0, 0.0

    def reset(self, task: int) -> EnvOutput:
        return self._answer(f"reset({task})", self._env.reset, task, "(observation, commands)")

    def step(self, action: str) -> EnvOutput:
        self.steps += 1
        return self._answer(f"step({action!r:.80})", self._env.step, action, "(observation, commands, reward, done, info)")

    def expert(self, history_length: int) -> str:
        call = f"expert({history_length})"
        with deadline(call):
            try:
                action = self._env.expert(history_length)
            except (Exception, SystemExit) as error:
                raise _Fault(one_line(f"{call}: {untraceable(type(self._env).expert, error)}; see to it")) from None
        if not isinstance(action, str):
            raise _Fault(f"{call}: returns {action!r:.80}, a {type(action).__name__}; return the action as a text")
        return action

    def _answer(self, call: str, method: Callable, argument, form: str) -> EnvOutput:
        began = time.perf_counter()
        with deadline(call):
            try:
                result = method(argument)
            except (Exception, SystemExit) as error:
                raise _Fault(one_line(f"{call}: fails with {type(error).__name__}: {error!s:.300}; let it take this")) from None
        self.seconds += time.perf_counter() - began
        for fault in member_faults(self._env, BegunTextEnv):
            raise _Fault(fault)
        try:
            return read_output(self._env, result, form.count(",") + 1)
        except (TypeError, ValueError) as error:
            raise _Fault(one_line(f"{call}: {error}; return {form}, texts and finite numbers")) from None


def check(
    make: Callable, env, tasks: Sequence[int], seed: int, history_length: int, measure: Measure, state_key: str = ""
) -> Report:
    """Plays an episode of each task with random commands, and one with the environment's own player, if it has one.

    Args:
      make: makes a further environment.
      env: an environment.
      tasks: [B], with the members of a group side by side.
      measure: measures prompts.
      state_key: `env.state_key`.
    """
    if missing := list(member_faults(env, TextEnv)):
        return Report(missing)
    used, episodes = _Checked(env), dict[int, Episode]()
    faults: dict[str, str] = {}  # by kind
    for number, task in enumerate(tasks):
        random = np.random.default_rng([seed, number])
        first = number % GROUP == 0 and number // GROUP < REPLAYED
        try:
            episodes[number] = _play(_Checked(make()) if first else used, task, functools.partial(_random_command, random))
            in_replay = _replay_faults(make, used, task, *episodes[number]) if first else ()
            for kind, line in itertools.chain(_episode_faults(*episodes[number], env.max_turns), in_replay):
                faults.setdefault(kind, line)
        except (_Fault, Hangs) as fault:
            faults.setdefault(str(fault).partition("(")[0], str(fault))
            if isinstance(fault, Hangs):  # other episodes would hang, too, for as long
                break
            used = _Checked(make())
    if not episodes:
        return Report(list(faults.values()))
    by_player = {"random commands": episodes}
    if isinstance(env, TextExpert) and not faults:
        by_player["expert"] = by_expert = dict[int, Episode]()
        player = _Checked(make())
        try:
            for number, task in enumerate(tasks):
                by_expert[number] = _play(player, task, lambda _: player.expert(history_length))
        except (_Fault, Hangs) as fault:
            faults["expert"] = str(fault)
    plays, lengths, too_long = {}, list[int](), 0
    for name, played in by_player.items():
        if played:
            inputs = [each for episode in played.values() for each in prompt_inputs(*episode, history_length)]
            of_player, cut = measure(inputs)
            plays[name] = _as_play(played, of_player, env.max_turns, state_key)
            lengths, too_long = lengths + of_player, too_long + cut
    if too_long:
        faults["prompt"] = (
            f"rollout.prompt_limit: {too_long} of {len(lengths)} prompts are longer, and lose history or more; raise it, lower "
            "rollout.history_length, or shorten observations or env.template"
        )
    return Report(list(faults.values()), plays, used.steps / max(used.seconds, 1e-9))


def _play(env: _Checked, task: int, choose: Callable[[list[str]], str]) -> Episode:
    outputs = [env.reset(task)]
    actions: list[str] = []
    while not outputs[-1].done and len(actions) < env.max_turns:
        actions.append(choose(outputs[-1].commands))
        outputs.append(env.step(actions[-1]))
    return outputs, actions


def _random_command(random: np.random.Generator, commands: list[str]) -> str:
    return str(random.choice(commands)) if commands else ""


def _episode_faults(outputs: list[EnvOutput], actions: list[str], max_turns: int) -> Iterator[tuple[str, str]]:
    """Yields the kind and the line of each fault."""
    if not outputs[-1].done:
        yield "end", f"step(action): an episode goes on after max_turns={max_turns} actions; count them, and return done"
    for before, action, after in zip(outputs, actions, outputs[1:], strict=False):
        if before.commands and not after.admissible:
            fault = "info calls this inadmissible, but the commands before it list it; let both agree"
            yield "inadmissible", f"step({action!r:.80}): {fault}"
    for command in (command for output in outputs for command in output.commands):
        if "\n" in command:
            yield "unread", f"commands: {command!r:.80} has a line break, and prompts list one a line; leave it out"
        if find_action(f"<action>{command}</action>", len(command))[0] != command:
            fault = "is read from no answer: blanks at its ends and tags get lost; leave them out"
            yield "unread", f"commands: {command!r:.80} {fault}"


def _replay_faults(make: Callable, used: _Checked, task: int, outputs, actions) -> Iterator[tuple[str, str]]:
    for fault, again in _replays(make, used, task, actions):
        if difference := _difference(outputs, again):
            yield fault, fault.format(task=task, diff=difference)
            return
    if outputs[0].commands and used.step(NONSENSE).admissible:
        yield "admissible", f"step({NONSENSE!r}): info calls it admissible, and the commands do not list it; say False"


def _replays(make: Callable, used: _Checked, task: int, actions: list[str]) -> Iterator[tuple[str, list[EnvOutput]]]:
    """Plays an episode again, and yields outputs that should be the same, with what is wrong if they differ.

    used: an environment that has played other episodes before. It is left in the task's beginning.
    """
    again, _ = _play(_Checked(make()), task, _script(actions))
    fault = "reset(task), step(action): a second play of task {task} differs ({diff}); draw everything random from the task"
    yield fault, again
    _play(used, task, _script(actions[::-1]))  # to leave some state behind
    after, _ = _play(used, task, _script(actions))
    yield "reset(task): something of earlier episodes is left in task {task} ({diff}); set everything anew", after
    with contextlib.suppress(_Fault):  # a step after the end may do anything but touch the next episode
        used.step(actions[-1])
    beginning = used.reset(task)
    yield "reset(task): a step after the end of an episode changes the next one ({diff}); set everything anew", [beginning]


def _script(actions: list[str]) -> Callable[[list[str]], str]:
    """Returns a player that performs these actions, then repeats the last one."""
    remaining = iter(actions)
    return lambda commands: next(remaining, actions[-1] if actions else "")


def _difference(first: list[EnvOutput], second: list[EnvOutput]) -> str:
    """Describes the first difference between two plays as far as both go; empty if there is none."""
    for turn, (a, b) in enumerate(zip(first, second, strict=False)):
        plain = ([value.tolist() if isinstance(value, np.ndarray) else value for value in output] for output in (a, b))
        for name, one, other in zip(EnvOutput._fields, *plain, strict=True):
            if one != other:
                return one_line(f"{name} after {turn} actions: {one!r:.60} and {other!r:.60}")
    return ""


def _as_play(episodes: dict[int, Episode], lengths: list[int], max_turns: int, state_key: str) -> Play:
    plays = list(episodes.values())
    observations = [[output.observation for output in outputs] for outputs, _ in plays]
    ends = [outputs[-1] for outputs, _ in plays]
    mask = np.arange(max_turns) < np.array([len(actions) for _, actions in plays])[:, None]
    texts = [text for row in observations for text in row[:-1]]
    pictures = [output.picture for outputs, _ in plays for output in outputs[:-1]]
    shown = [b"" if picture is None else picture.tobytes() for picture in pictures]
    number: dict[tuple[str, bytes], int] = {}

    def placed(steps: np.ndarray | list) -> np.ndarray:
        """Places one value a step, i32[B, T]."""
        array = np.zeros(mask.shape, np.int32)
        array[mask] = steps
        return array

    return Play(
        mask,
        placed(
            key_numbers(texts, state_key)
            if state_key
            else [number.setdefault(seen, len(number)) for seen in zip(texts, shown, strict=True)]
        ),
        placed([not output.admissible for outputs, _ in plays for output in outputs[1:]]).astype(bool),
        placed(lengths),
        success=np.array([np.nan if end.won is None else end.won for end in ends], np.float32),
        groups=np.array(list(episodes)) // GROUP,
        rewards=np.array([sum(output.reward for output in outputs) for outputs, _ in plays]),
        says_truncated=any(end.truncated is not None for end in ends),
        counts=not state_key and _counts(observations),
    )


def _counts(episodes: list[list[str]]) -> bool:
    """Whether a number in the same place, counted from either end of every observation, rises, or falls, with every step."""
    long = [[list(map(int, _NUMBER.findall(text))) for text in texts] for texts in episodes if len(texts) > 3]
    fewest = min((len(numbers) for texts in long for numbers in texts), default=0)
    for place in range(-fewest, fewest) if len(long) >= GROUP else ():
        steps = np.concatenate([np.sign(np.diff([float(numbers[place]) for numbers in texts])) for texts in long])
        if (steps == steps[0]).all() and steps[0]:
            return True
    return False
