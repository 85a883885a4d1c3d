"""Checks of a text environment: its members, its answers, and the equality of equal tasks."""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable, Sequence

import numpy as np

from hgpo_jax.check.statistics import GROUP, Play
from hgpo_jax.envs.protocol import INFO
from hgpo_jax.policy.answers import find_action
from hgpo_jax.rollout.chat_prompts import PromptInput
from hgpo_jax.rollout.episode_buffer import matched
from hgpo_jax.rollout.requirements import TEXT, TEXT_RESET, TEXT_TEAM, Hangs, deadline, roles_of
from hgpo_jax.rollout.scripted_play import prompt_inputs
from hgpo_jax.rollout.state_keys import key_numbers
from hgpo_jax.rollout.workers import EnvOutput, read_output
from hgpo_jax.utils.errors import one_line

REPLAYED = 8  # tasks with an episode that is replayed
NONSENSE = "no such command"
_NUMBER = re.compile(r"\d{1,15}")
Measure = Callable[[list[PromptInput]], tuple[list[int], int]]  # inputs -> (prompt lengths, number that do not fit)


class _Fault(Exception):
    """The reason why an episode cannot continue; the text is the fault's line."""


class _Hung(_Fault):
    """A timeout, which other episodes would meet, too, after as long a wait."""


class _Checked:
    """An environment whose answers are checked and timed."""

    def __init__(self, env):
        self._env, self.max_turns, self.steps, self.seconds = env, env.max_turns, 0, 0.0

    def reset(self, task: int) -> EnvOutput:
        return self._answer(f"reset({task})", self._env.reset, task, 2)

    def step(self, action: str) -> EnvOutput:
        self.steps += 1
        return self._answer(f"step({action!r:.80})", self._env.step, action, 5)

    def _answer(self, call: str, method: Callable, argument, count: int) -> EnvOutput:
        began = time.perf_counter()
        try:
            with deadline(call):
                result = method(argument)
        except Hangs as error:
            raise _Hung(str(error)) from None
        except (Exception, SystemExit) as error:
            raise _Fault(one_line(f"{call}: fails with {type(error).__name__}: {error!s:.300}; let it take this")) from None
        self.seconds += time.perf_counter() - began
        for member, meaning in (TEXT_RESET | (TEXT_TEAM if hasattr(self._env, "roles") else {})).items():
            if not hasattr(self._env, member):
                raise _Fault(f"{member}: is missing after {call}; set it there: {meaning}")
        if count == 5 and isinstance(result, tuple | list) and len(result) == 5 and isinstance(result[4], dict):
            for name, meaning in INFO.items():
                if name not in result[4]:
                    raise _Fault(f"{call}: its info lacks {name}; add it: {meaning}")
        try:
            return read_output(self._env, result, count)
        except (TypeError, ValueError) as error:
            kind = "(observation, commands)" if count == 2 else "(observation, commands, reward, done, info)"
            raise _Fault(one_line(f"{call}: {error}; return {kind}, texts and finite numbers")) from None


def check(make: Callable, env, tasks: Sequence[int], seed: int, history_length: int, measure: Measure, state_key: str = ""):
    """Plays an episode of each task with random commands.

    Args:
      make: makes a further environment.
      env: an environment.
      tasks: [B], with the members of a group side by side.
      measure: measures prompts.
      state_key: `env.state_key`.

    Returns: the faults, the play (None if no episode could be played), and steps per second.
    """
    faults = [f"{name}: is missing; add it: {meaning}" for name, meaning in TEXT.items() if not hasattr(env, name)]
    if not faults and (not isinstance(env.max_turns, int | np.integer) or env.max_turns < 1):
        faults = [f"max_turns: is {env.max_turns!r}; make it a whole number above 0"]
    try:
        roles_of(env)
    except ValueError as error:
        faults.append(str(error).partition(": ")[2])
    if faults:
        return faults, None, 0.0
    used, episodes = _Checked(env), []
    found: dict[str, str] = {}
    for number, task in enumerate(tasks):
        random = np.random.default_rng([seed, number])
        first = number % GROUP == 0 and number // GROUP < REPLAYED
        player = _Checked(make()) if first else used
        try:
            outputs, actions = _play(player, task, functools.partial(_random_command, random))
            episodes.append((number, outputs, actions))
            found = _episode_faults(outputs, actions, env.max_turns) | found
            if first:
                found = _replay_faults(make, used, task, outputs, actions) | found
        except _Fault as fault:
            found.setdefault(str(fault).partition("(")[0], str(fault))
            if isinstance(fault, _Hung):
                break
            used = _Checked(make()) if player is used else used
    if not episodes:
        return list(found.values()), None, 0.0
    inputs = [prompt_inputs(outputs, actions, history_length) for _, outputs, actions in episodes]
    lengths, too_long = measure([each for episode in inputs for each in episode])
    if too_long:
        found["prompt"] = (
            f"rollout.prompt_limit: {too_long} of {len(lengths)} prompts are longer, and lose history or more; raise it, lower "
            "rollout.history_length, or shorten observations or env.template"
        )
    return list(found.values()), _as_play(episodes, lengths, env.max_turns, state_key), used.steps / max(used.seconds, 1e-9)


def _play(env: _Checked, task: int, choose: Callable[[list[str]], str]) -> tuple[list[EnvOutput], list[str]]:
    """Plays an episode; returns the outputs, that of the reset first, and the actions."""
    outputs = [env.reset(task)]
    actions: list[str] = []
    while not outputs[-1].done and len(actions) < env.max_turns:
        actions.append(choose(outputs[-1].commands))
        outputs.append(env.step(actions[-1]))
    return outputs, actions


def _random_command(random: np.random.Generator, commands: list[str]) -> str:
    return str(random.choice(commands)) if commands else ""


def _episode_faults(outputs: list[EnvOutput], actions: list[str], max_turns: int) -> dict[str, str]:
    found = {}
    if not outputs[-1].done:
        found["end"] = f"step(action): an episode goes on after max_turns={max_turns} actions; count them, and return done"
    for output in outputs:
        found = _command_faults(output.commands) | found
    for before, action, after in zip(outputs[:-1], actions, outputs[1:], strict=True):
        if before.commands and not after.admissible:
            found["commands"] = (
                f"step({action!r:.80}): info calls this inadmissible, but the commands before it list it; let both agree"
            )
    return found


def _command_faults(commands: list[str]) -> dict[str, str]:
    """Finds a command that no answer can contain, or that a prompt cannot list."""
    for command in commands:
        if "\n" in command:
            return {"unreadable": f"commands: {command!r:.80} has a line break, and prompts list one a line; leave it out"}
        read, _ = find_action(f"<action>{command}</action>", len(command))
        if matched(read, commands) == command:
            continue
        why = "is read from no answer: blanks at its ends and tags get lost; leave them out"
        return {"unreadable": f"commands: {command!r:.80} {why}"}
    return {}


def _replay_faults(make: Callable, used: _Checked, task: int, outputs, actions) -> dict[str, str]:
    """Checks that an episode repeats itself in a new environment, and in one that has played other episodes before."""
    again = _play(_Checked(make()), task, _script(actions))[0]
    if again != outputs:
        call = "reset(task)" if again[0] != outputs[0] else "step(action)"
        seen = _difference(outputs, again)
        return {"differs": f"{call}: a second play of task {task} differs ({seen}); draw everything random from the task"}
    _play(used, task, _script(actions[::-1]))  # to leave some state behind
    after = _play(used, task, _script(actions))[0]
    if after != outputs:
        seen = _difference(outputs, after)
        return {"leak": f"reset(task): something of earlier episodes is left in task {task} ({seen}); set everything anew"}
    with contextlib.suppress(_Fault):  # a step after the end may do anything but touch the next episode
        used.step(actions[-1])
    begun = used.reset(task)
    if begun != outputs[0]:
        seen = _difference(outputs, [begun])
        return {"leak": f"reset(task): a step after the end of an episode changes the next one ({seen}); set everything anew"}
    if begun.commands and used.step(NONSENSE).admissible:
        return {"admissible": f"step({NONSENSE!r}): info calls it admissible, and the commands do not list it; say False"}
    return {}


def _script(actions: list[str]) -> Callable[[list[str]], str]:
    """Returns a player that performs these actions, then repeats the last one."""
    left = iter(actions)
    return lambda commands: next(left, actions[-1] if actions else "")


def _difference(first: list[EnvOutput], second: list[EnvOutput]) -> str:
    """Describes the first difference between two plays."""
    for turn, (a, b) in enumerate(zip(first, second, strict=False)):
        for name, one, other in zip(EnvOutput._fields, a, b, strict=True):
            if one != other:
                return one_line(f"{name} after {turn} actions: {one!r:.60} and {other!r:.60}")
    return f"{len(first) - 1} and {len(second) - 1} actions"


def _as_play(episodes: list[tuple], lengths: list[int], max_turns: int, state_key: str) -> Play:
    shape, measured = (len(episodes), max_turns), iter(lengths)
    texts: dict[str, int] = {}
    ends = [outputs[-1] for _, outputs, _ in episodes]
    mask, invalid, states, prompts = (np.zeros(shape, kind) for kind in (bool, bool, np.int32, np.int32))
    for row, (_, outputs, actions) in enumerate(episodes):
        for turn in range(len(actions)):
            mask[row, turn], invalid[row, turn] = True, not outputs[turn + 1].admissible
            states[row, turn] = texts.setdefault(outputs[turn].observation, len(texts))
            prompts[row, turn] = next(measured)
    seen = [[output.observation for output in outputs] for _, outputs, _ in episodes]
    return Play(
        mask,
        key_numbers(list(texts), state_key)[states] if state_key else states,
        invalid,
        prompts,
        success=np.array([bool(end.won) for end in ends]),
        groups=np.array([number // GROUP for number, *_ in episodes]),
        rewards=np.array([sum(output.reward for output in outputs) for _, outputs, _ in episodes]),
        judged=np.array([end.won is not None for end in ends]),
        says_truncated=any(end.truncated is not None for end in ends),
        counts=not state_key and _counts(seen),
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
