"""Who steps the environments of a host rollout: this process (`LocalPlayers`) or worker processes (`WorkerPlayers`).

Both take requests (slot, task, actions so far) and answer with what is seen after the last of the actions. An
environment is any object like those of `envs/*/text.py`: `max_turns`, `task_types`, `reset(task) -> (observation,
commands)`, `step(action) -> (observation, commands, reward, done, info)`, after a reset `goal` and `task_type`, and
`len(env)` if its tasks are numbered from 0 to an end. It must be deterministic, because a worker that takes over an
episode plays its actions again.
"""

from __future__ import annotations

import math
import multiprocessing
import numbers
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from typing import NamedTuple

import numpy as np

from envs.cli import one_line

Request = tuple[int, int, tuple[str, ...]]  # slot, task, actions so far
# Characters of one answer at most. A prompt holds far fewer, but what is cut there has passed through pipes and tokenizer.
MAX_TEXT = 4_000_000
LARGEST = float(np.finfo(np.float32).max)  # the Episodes' type of rewards


class Seen(NamedTuple):
    """What an environment shows after a reset or a step."""

    observation: str
    commands: list[str]
    goal: str
    task_type: int
    reward: float = 0.0
    done: bool = False
    won: bool = False
    admissible: bool = True
    score: float = 0.0


class About(NamedTuple):
    """An environment's task types, number of tasks (None if it generates them) and turns at most."""

    task_types: tuple[str, ...]
    tasks: int | None
    max_turns: int


class Failed(NamedTuple):
    """Why an episode cannot go on."""

    reason: str


class LocalPlayers:
    """Environments in this process, one per slot. An exception or a wrong type ends only its own episode."""

    def __init__(self, make_env: Callable):
        self._make_env = make_env
        self._slots: dict[int, tuple] = {}  # slot -> (environment, task, actions done)
        env = make_env()
        self.about = About(tuple(env.task_types), len(env) if hasattr(env, "__len__") else None, int(env.max_turns))

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Seen | Failed]]:
        """Answers each request."""
        for slot, task, actions in requests:
            try:
                yield slot, self._answer(slot, task, actions)
            except (Exception, SystemExit) as error:  # the environment may be in any state now, and is dropped
                # The message may be anything, too, or fail itself.
                yield slot, Failed(one_line("".join(traceback.format_exception_only(error))[:2000])[:500])

    def _answer(self, slot: int, task: int, actions: tuple[str, ...]) -> Seen:
        env, known, done = self._slots.pop(slot, None) or (self._make_env(), None, 0)
        if not actions or (known, done) != (task, len(actions) - 1):
            seen = _checked(env, env.reset(task), 2)
            done = 0
        for action in actions[done:]:
            seen = _checked(env, env.step(action), 5)
        self._slots[slot] = env, task, len(actions)
        return seen

    def close(self) -> None:
        """Drops the environments."""
        self._slots.clear()


def _checked(env, result, length: int) -> Seen:
    """What `reset` or `step` returned, as plain Python values. Raises TypeError or ValueError for anything else."""
    observation, commands, *rest = result
    if len(result) != length:
        raise TypeError(f"{len(result)} values were returned instead of {length}")
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
    seen = Seen(str(observation), [str(command) for command in commands], str(env.goal), int(env.task_type))
    if not rest:
        return seen
    reward, done, info = rest
    _expect("info", info, dict)
    score = info.get("score", float(info["won"]))
    for name, number in (("reward", reward), ("score", score)):
        _expect(name, number, numbers.Real)
        if not abs(float(number)) <= LARGEST:
            raise ValueError(f"{name} is {number}")
    flags = {"done": done, "won": info["won"], "admissible": info["admissible"]}
    for name, flag in flags.items():
        _expect(name, flag, bool | np.bool_)
    flags = {name: bool(flag) for name, flag in flags.items()}
    return seen._replace(reward=float(reward), score=float(score), **flags)


def _expect(name: str, value, kind) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {type(value).__name__}, not {getattr(kind, '__name__', kind)}")


class _Worker:
    """One process, its pipe, and what it has to do."""

    def __init__(self, context, make_env):
        self.queue: deque[Request] = deque()
        self.current: Request | None = None
        self.deadline, self.ready = math.inf, False
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, make_env), daemon=True)
        # A worker never needs the accelerator; jax reads this when it is imported.
        before = os.environ.get("JAX_PLATFORMS")
        os.environ["JAX_PLATFORMS"] = "cpu"
        try:
            self.process.start()
        finally:
            os.environ.pop("JAX_PLATFORMS")
            if before is not None:
                os.environ["JAX_PLATFORMS"] = before
        theirs.close()

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


class WorkerPlayers:
    """Environments in worker processes, which are replaced when they die or take too long.

    Args:
      make_env: makes one environment; must be picklable.
      workers: processes. Slots are dealt to them in blocks, so that a prompt group's episodes share what they load.
      slots: episodes at most.
      time_limit: seconds that one answer may take.
      start_limit: seconds that a process may take to make its first environment.

    Raises:
      ValueError: the first environment cannot be made.
    """

    def __init__(self, make_env: Callable, workers: int, slots: int, time_limit: float = 60.0, start_limit: float = 600.0):
        self._context = multiprocessing.get_context("spawn")
        self._make_env, self._slots = make_env, slots
        self._time_limit, self._start_limit = time_limit, start_limit
        self.replaced = 0
        self._workers = [self._start() for _ in range(min(workers, slots))]
        for worker in self._workers:
            try:
                self.about = self._begin(worker)
            except ValueError:
                self.close()
                raise

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Seen | Failed]]:
        """Answers each request, in the order in which the workers are done with them."""
        for request in requests:
            self._workers[request[0] * len(self._workers) // self._slots].queue.append(request)
        for worker in self._workers:
            self._next(worker)
        while busy := [worker for worker in self._workers if worker.current or worker.queue]:
            patience = min(worker.deadline for worker in busy) - time.monotonic()
            wait([worker.pipe for worker in busy], max(0.0, patience))
            for worker in busy:
                yield from self._look_at(worker)

    def _look_at(self, worker: _Worker) -> Iterator[tuple[int, Seen | Failed]]:
        """Takes a worker's answer if there is one, and replaces the worker if there will be none."""
        if not worker.ready:
            if worker.pipe.poll() or time.monotonic() > worker.deadline:
                self._begin(worker)
                self._next(worker)
            return
        try:
            if worker.pipe.poll():
                answer = worker.pipe.recv()
                worker.current = None
                self._next(worker)
                yield answer
                return
            if time.monotonic() <= worker.deadline:
                return
            failure = f"no answer in {self._time_limit:g} s"
        except (EOFError, OSError):
            failure = "its worker process died"
        worker.stop()
        fresh = self._start()
        fresh.queue = worker.queue
        self._workers[self._workers.index(worker)] = fresh
        self.replaced += 1
        yield worker.current[0], Failed(failure)

    def _start(self) -> _Worker:
        worker = _Worker(self._context, self._make_env)
        worker.deadline = time.monotonic() + self._start_limit
        return worker

    def _begin(self, worker: _Worker) -> About:
        """Waits until a new worker is ready."""
        try:
            if not worker.pipe.poll(max(0.0, worker.deadline - time.monotonic())):
                raise ValueError(f"environment: not made in {self._start_limit:g} s; give it more time")
            said = worker.pipe.recv()
        except EOFError:
            raise ValueError("environment: its worker process died while it was made; try it with workers=0") from None
        if isinstance(said, str):
            raise ValueError(said)
        worker.ready, worker.deadline = True, math.inf
        return said

    def _next(self, worker: _Worker) -> None:
        """Gives a worker that has nothing to do its next request."""
        if not worker.ready or worker.current:
            return
        worker.deadline = math.inf
        if worker.queue:
            worker.current = worker.queue.popleft()
            worker.deadline = time.monotonic() + self._time_limit
            try:
                worker.pipe.send(worker.current)
            except OSError:
                worker.deadline = -math.inf  # it died; its pipe reads as ended, too

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.stop()
        self._workers = []


def _work(pipe, make_env) -> None:
    """A worker's life: makes its environments, answers requests, ends with the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # control-C is the parent's to handle
    try:
        players = LocalPlayers(make_env)
    except Exception as error:
        pipe.send(" ".join(f"environment: {error}".split()))
        return
    pipe.send(players.about)
    try:
        while True:
            for answer in players.run([pipe.recv()]):
                pipe.send(answer)
    except (EOFError, OSError):
        return
