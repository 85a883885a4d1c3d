"""Environment workers of a host rollout: they step its environments, in this process or others (`process_workers.py`).

A worker receives requests (episode, task, actions so far), and answers with the environment's output after the last of the
actions. An environment is any object like those of `envs/*/text.py`: `max_turns`, `task_types`, `reset(task) ->
(observation, commands)`, `step(action) -> (observation, commands, reward, done, info)`, after a reset `goal` and
`task_type`, `len(env)` if it has a fixed number of tasks, and `roles` and `role` if its turns belong to several. It must be
deterministic, because a worker that takes over an episode replays its actions.
"""

from __future__ import annotations

import contextlib
import logging
import numbers
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from hgpo_jax.rollout.requirements import check_text, missing_info, picture_of, roles_of
from hgpo_jax.rollout.signals import declared, in_order
from hgpo_jax.utils.errors import one_line

log = logging.getLogger(__name__)

Request = tuple[int, int, tuple[str, ...]]  # number of the episode in its batch, task, actions so far
# Maximum characters of one answer. A prompt holds far fewer, but is cut only after pipes and tokenizer have processed it all.
MAX_TEXT = 4_000_000
MAX_REWARD = float(np.finfo(np.float32).max)  # rewards of Episodes are float32


class EnvOutput(NamedTuple):
    """The output of an environment's reset or step."""

    observation: str
    commands: list[str]
    goal: str
    task_type: int
    reward: float = 0.0
    done: bool = False
    won: bool | None = False  # None: unknown
    admissible: bool = True
    score: float | None = 0.0  # None: the environment has none, and success is unknown
    role: int = 0  # the role that acts next
    truncated: bool | None = None  # whether a time limit ended the episode; None: the environment does not report it
    signals: list[float] | None = None  # one for each name in EnvSpec; None after a reset and without names
    picture: np.ndarray | None = None  # uint8[H, W, 3], what is shown beside the observation; None without pictures
    budget: int | None = None  # the turns that it should take at most, as its prompts say (`turn_budgets.py`)


class EnvSpec(NamedTuple):
    """An environment's task types, number of tasks (None if it generates them), maximum turns, roles, signals, and
    the height and width of its pictures (None without any)."""

    task_types: tuple[str, ...]
    num_tasks: int | None
    max_turns: int
    roles: tuple[str, ...]
    signals: tuple[str, ...]
    picture_size: tuple[int, int] | None = None


class EnvFailure(NamedTuple):
    """The reason why an episode cannot continue."""

    reason: str


class LocalWorkers:
    """Environments in this process, one per episode. An exception or a wrong type ends only its own episode.

    close: ends the environments; it is called once.
    """

    limit = "env.time_limit"  # the field that sets a worker process's timeout for an answer

    def __init__(self, make_env: Callable, time_limit: float | None = None):
        self._make_env = make_env
        self._envs: dict[int, tuple] = {}  # episode -> (environment, task, actions done)
        self.close = weakref.finalize(self, _end_all, self._envs)  # which also runs when the interpreter ends
        self.discard_answers()
        with opened(make_env) as env:
            check_text(env, time_limit)
            tasks = len(env) if hasattr(env, "__len__") else None
            self.spec = EnvSpec(
                tuple(env.task_types),
                tasks,
                int(env.max_turns),
                roles_of(env),
                declared(env),
                getattr(env, "picture_size", None),
            )

    def discard_answers(self) -> None:
        """Discards answers that have not been received."""
        self._answers: list[tuple[int, EnvOutput | EnvFailure]] = []

    def send(self, requests: Iterable[Request]) -> None:
        """Computes the answer to each request, for `receive`."""
        for episode, task, actions in requests:
            try:
                answer: EnvOutput | EnvFailure = self._answer(episode, task, actions)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # also a SystemExit, or an asyncio.CancelledError
                answer = EnvFailure(described(error))
            self._answers.append((episode, answer))

    def receive(self, minimum: int) -> list[tuple[int, EnvOutput | EnvFailure]]:
        """Returns (episode, answer) for all requests, which in this process are already answered."""
        answers, self._answers = self._answers, []
        return answers

    @staticmethod
    def describe(request: Request) -> str:
        """Describes a request, to follow the description of its failure."""
        _, task, actions = request
        return f": action {actions[-1]!r:.80} in task {task}" if actions else f": reset of task {task}"

    def _answer(self, episode: int, task: int, actions: tuple[str, ...]) -> EnvOutput:
        env, current_task, done = self._envs.pop(episode, None) or (self._make_env(), None, 0)
        try:
            if not actions or (current_task, done) != (task, len(actions) - 1):
                output = read_output(env, env.reset(task), 2)
                done = 0
            for action in actions[done:]:
                output = read_output(env, env.step(action), 5)
            if output.role >= len(self.spec.roles):
                raise ValueError(f"role is {output.role}, there were {len(self.spec.roles)} before the first reset")
        except BaseException:
            end(env)  # it may be in any state now
            raise
        self._envs[episode] = env, task, len(actions)
        return output


def _end_all(envs: dict[int, tuple]) -> None:
    while envs:
        env, *_ = envs.popitem()[1]
        end(env)


@contextlib.contextmanager
def opened(make: Callable[[], Any]) -> Iterator[Any]:
    """Makes an environment for the block, and closes it at its end."""
    env = make()
    try:
        yield env
    finally:
        end(env)


def end(env) -> None:
    """Calls the `close` of an environment that has one, whatever comes of it."""
    try:
        if callable(close := getattr(env, "close", None)):
            close()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        log.info("an environment's close() fails: %s", described(error))


def described(error: BaseException) -> str:
    """Describes an error of a user's code in a line."""
    # Its message may be any object, and formatting it may fail.
    return one_line("".join(traceback.format_exception_only(error))[:2000])[:500]


def made(make: Callable) -> tuple[Any, EnvSpec | str]:
    """Makes the workers inside a process; returns them and their spec, or None and why there are none."""
    try:
        workers = make()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, " ".join(f"environment: {error}".split())
    return workers, workers.spec


def read_output(env, result, length: int) -> EnvOutput:
    """Converts the result of `reset` (2 values) or `step` (5) to plain Python values. Raises TypeError or ValueError."""
    _expect("what was returned", result, tuple | list)  # an iterator might never end
    if len(result) != length:
        raise TypeError(f"{len(result)} values were returned instead of {length}")
    observation, commands, *rest = result
    _expect("observation", observation, str)
    _expect("commands", commands, list | tuple)
    for command in commands:
        _expect("a command", command, str)
    _expect("goal", env.goal, str)
    _expect("task_type", env.task_type, numbers.Integral)
    if not 0 <= env.task_type < len(env.task_types):
        raise ValueError(f"task_type is {env.task_type}, there are {len(env.task_types)}")
    size = len(observation) + len(env.goal) + len(commands) + sum(map(len, commands))
    if size > MAX_TEXT:
        raise ValueError(f"observation, commands and goal have {size:,} characters, more than {MAX_TEXT:,}")
    output = EnvOutput(str(observation), [str(command) for command in commands], str(env.goal), int(env.task_type))
    output = output._replace(picture=picture_of(env))
    if not rest:
        return output._replace(role=_read_role(env))
    reward, done, info = rest
    _expect("info", info, dict)
    for missing in missing_info(info):
        raise ValueError(f"info lacks {missing}")
    won = info["won"]
    score = info.get("score", won if won is None else float(won))
    names = declared(env)
    signals = in_order(names, info.get("signals", {}))
    finite = {"reward": reward} | ({} if score is None else {"score": score})
    for name, number in (finite | {f"signal {name}": value for name, value in zip(names, signals, strict=True)}).items():
        _expect(name, number, numbers.Real)
        if not abs(float(number)) <= MAX_REWARD:
            raise ValueError(f"{name} is {number}")
    flags = {"done": done, "admissible": info["admissible"]} | ({} if won is None else {"won": won})
    flags |= {"truncated": info["truncated"]} if "truncated" in info else {}
    for name, flag in flags.items():
        _expect(name, flag, bool | np.bool_)
    flags = {name: bool(flag) for name, flag in flags.items()}
    if flags.get("truncated") and not flags["done"]:
        raise ValueError("truncated is true where done is not; a time limit ends the episode")
    # After the end it is nobody's turn, but after a time limit that of whom a prompt would have asked.
    role = 0 if flags["done"] and not flags.get("truncated") else _read_role(env)
    score = None if score is None else float(score)
    if names:
        output = output._replace(signals=[float(value) for value in signals])
    return output._replace(reward=float(reward), score=score, role=role, **{"won": None} | flags)


def _read_role(env) -> int:
    """Reads the role that acts next; 0 if the environment has one role."""
    if not hasattr(env, "roles"):
        return 0
    _expect("role", env.role, numbers.Integral)
    if not 0 <= env.role < len(env.roles):
        raise ValueError(f"role is {env.role}, there are {len(env.roles)}")
    return int(env.role)


def _expect(name: str, value, kind) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {type(value).__name__}, not {getattr(kind, '__name__', kind)}")
