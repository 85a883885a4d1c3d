"""Environment workers in separate processes, which are replaced when they die or time out.

They are processes of this machine, or actors on a Ray cluster (`ray_workers.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing.connection
import multiprocessing.util  # so that its handler at exit, which joins all processes, runs after ours
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

from hgpo_jax.config.workers import workers_of
from hgpo_jax.rollout.workers import EnvFailure, EnvOutput, EnvSpec, LocalWorkers, Request, made
from hgpo_jax.utils.errors import RunError

START_LIMIT = 600.0  # seconds for a process to make its first environment
MOMENT = 1.0  # seconds between looks whether a process lives
IDLE = 0.2  # seconds in which a thread notices that it should end
AT_END = 5.0  # seconds for environments to end what they have started


class _Hung(EnvFailure):
    """The failure of an episode whose worker timed out."""


class LocalProcess:
    """A process of this machine, which first sends its spec, or why it has none, and then an answer to each request."""

    _starting = threading.Lock()

    def __init__(self, make: Callable):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # Not as a daemon, which may have no processes of its own: `ProcessWorkers.close`, or the pipe's end, ends it.
        self._process = context.Process(target=_serve, args=(theirs, make))
        with self._starting:
            # A worker never needs the accelerator; jax reads this when it is imported.
            before = os.environ.get("JAX_PLATFORMS")
            os.environ["JAX_PLATFORMS"] = "cpu"
            try:
                self._process.start()
            finally:
                os.environ.pop("JAX_PLATFORMS")
                if before is not None:
                    os.environ["JAX_PLATFORMS"] = before
        assert self._process.pid  # it has begun
        self.pid = self._process.pid
        theirs.close()

    def send(self, request: tuple) -> None:
        """Sends a request. Raises OSError if the process has died."""
        self._pipe.send(request)

    def poll(self, seconds: float) -> bool:
        """Waits for an answer, or the end of the process, at most for so long; returns whether there is one."""
        end = time.monotonic() + seconds
        # What the process has forked may hold the pipe open after its end.
        while not self._pipe.poll(min(MOMENT, max(0.0, end - time.monotonic()))):
            if self._process.exitcode is not None:
                return True
            if time.monotonic() >= end:
                return False
        return True

    def receive(self) -> Any:
        """Returns the answer. Raises EOFError or OSError if the process has died."""
        if self._process.exitcode is not None and not self._pipe.poll():
            raise EOFError
        return self._pipe.recv()

    def kill(self) -> None:
        """Ends the process and what it has started at once; a thread that waits for its answer finds that out."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it may not lead a group yet
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()

    def leave(self) -> None:
        """Asks the process to end; nobody may wait for its answer."""
        with contextlib.suppress(OSError):  # it may have ended, or have been asked
            self._pipe.send(None)
        self._pipe.close()

    def close(self, seconds: float = 0.0) -> None:
        """Ends the process, and waits until it has ended; nobody may wait for its answer.

        seconds: for its environments to end what they have started. Then it is killed.
        """
        self.leave()
        multiprocessing.connection.wait([self._process.sentinel], seconds)
        self.kill()
        self._process.join()


class _Worker:
    """A process, and the thread that hands it one request at a time and replaces it when it dies or times out."""

    def __init__(self, start: Callable[[], Any], describe: Callable[[tuple], str], time_limit: float):
        self._start, self._describe, self._time_limit = start, describe, time_limit
        self.stepped = False  # whether it has ever answered a step, not just a reset
        self._last: dict[int, tuple] = {}  # the request that its process answered last, by episode
        self.queue: SimpleQueue[tuple[Request, SimpleQueue] | None] = SimpleQueue()  # a request, and the queue for its answer
        self._ended = False
        self.process: Any = None  # a LocalProcess or a ray_workers.RayProcess
        self._thread = threading.Thread(target=self._answer_all, daemon=True)
        self._spawn()

    def _spawn(self) -> None:
        self._deadline = time.monotonic() + START_LIMIT
        self.process = self._start()
        if self._ended:
            self.process.kill()

    def read_spec(self) -> EnvSpec:
        """Receives the first message of a new process. Raises ValueError if it cannot make its environment."""
        try:
            if not self.process.poll(max(0.0, self._deadline - time.monotonic())):
                raise ValueError(f"environment: not made in {START_LIMIT:g} s; see why it hangs")
            spec = self.process.receive()
        except (EOFError, OSError) as error:
            why = f": {error}" if str(error) else ""
            raise ValueError(f"environment: its worker process died while it was made; try it with workers=0{why}") from None
        if isinstance(spec, str):  # the error
            raise ValueError(spec)
        return spec

    def begin(self) -> None:
        """Starts the thread that answers; the process must have made its environment."""
        self._thread.start()

    def _answer_all(self) -> None:
        for request, answers in iter(self.queue.get, None):
            if self._ended:
                break
            answers.put(self._request(request))

    def _request(self, request: Request) -> tuple[int, EnvOutput | EnvFailure] | RunError:
        """Returns the answer to a request; an error if no process could answer."""
        try:
            if self.process is None:
                self._spawn()
                self.read_spec()
        except Exception as error:  # whatever it is, the rollout waits for an answer
            self._stop()
            return RunError(f"{error}; a worker that died or took too long cannot be replaced")
        try:
            self.process.send(request)
            if self.process.poll(self._time_limit * self._calls(request)):
                answer = self.process.receive()
                self.stepped |= request[-1] != ()
                if len(request) > 2:  # not that of a reward, which holds an episode's texts
                    self._last[request[0]] = request
                return answer
            failure: EnvFailure = _Hung(f"no answer in {self._time_limit:g} s{self._describe(request)}")
        except (EOFError, OSError):
            failure = EnvFailure(f"its worker process died{self._describe(request)}")
        except Exception as error:  # an answer may not be a pickle: the environment can write into the pipe
            failure = EnvFailure(f"no answer: {error!r:.200}")
        self._stop()
        return request[0], failure

    def _calls(self, request: tuple) -> int:
        """Returns how many answers a request needs: a process that does not hold an episode replays it from its reset on."""
        episode, *task, actions = request
        held = not task or not actions or self._last.get(episode) == (episode, *task, actions[:-1])  # rewards have no task
        return 1 if held else 1 + len(actions)

    def _stop(self, seconds: float = 0.0) -> None:
        self._last.clear()
        if self.process:
            self.process.close(seconds)
            self.process = None

    def leave(self) -> None:
        """Asks the thread to end, which it does unless it waits for an answer."""
        self._ended = True
        self.queue.put(None)

    def end_thread(self, until: float) -> None:
        """Ends the thread, and the process too if it gives no answer until then; else asks the process to end."""
        if self._thread.is_alive():
            self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            if process := self.process:
                process.kill()
            self._thread.join()
        if self.process:
            self.process.leave()

    def end(self, until: float) -> None:
        """Ends the process, whose environments have until then to end what they have started."""
        self._stop(max(0.0, until - time.monotonic()))


def env_workers(make_env: Callable, workers: int | str, episodes: int, time_limit: float) -> LocalWorkers | ProcessWorkers:
    """Starts the workers of `env.workers=workers`; 0: environments in this process.

    Other arguments and errors as those of `ProcessWorkers`.
    """
    count, ray = workers_of(workers)
    if not count:
        return LocalWorkers(make_env, time_limit)
    start: Callable[[Callable], Any] = LocalProcess
    if ray:
        from hgpo_jax.rollout.ray_workers import RayProcess, connect  # who needs no cluster needs no ray

        connect()
        start = RayProcess
    return ProcessWorkers(make_env, count, episodes, time_limit, start=start)


class ProcessWorkers:
    """Environments in worker processes, which are replaced when they die or time out.

    If every worker times out again and again with no answer in between, all remaining requests would, too, and a RunError ends
    the run.

    Args:
      make_env: makes one environment; must be picklable.
      workers: processes. Each has a block of the episodes, so that a prompt group's episodes share what they load.
      episodes: of a batch.
      time_limit: timeout in seconds for one answer.
      local: the workers inside each process; with `reward_workers.LocalReward`, `make_env` loads a reward function.
      start: starts a process with a function that makes its workers.

    Raises:
      ValueError: the first environment cannot be made.
    """

    def __init__(
        self,
        make_env: Callable,
        workers: int,
        episodes: int,
        time_limit: float = 60.0,
        local: Any = LocalWorkers,
        start: Callable[[Callable], Any] = LocalProcess,
    ):
        self._episodes, self._limit, self._hung_in_a_row = episodes, f"{local.limit}={time_limit:g}", 0
        self.discard_answers()
        self._workers = []
        atexit.register(self.close)  # otherwise a thread would replace the processes that the exiting interpreter ends
        for _ in range(min(workers, episodes)):
            begin = functools.partial(start, functools.partial(local, make_env))
            self._workers.append(_Worker(begin, local.describe, time_limit))
        for worker in self._workers:
            try:
                self.spec = worker.read_spec()
            except ValueError:
                self.close()
                raise
        for worker in self._workers:
            worker.begin()

    def discard_answers(self) -> None:
        """Discards answers that have not been received, including those still to come."""
        self._answers: SimpleQueue[tuple[int, Any] | RunError] = SimpleQueue()

    def send(self, requests: Iterable[tuple]) -> None:
        """Sends requests to the workers."""
        for request in requests:
            worker = self._workers[request[0] * len(self._workers) // self._episodes]
            worker.queue.put((request, self._answers))

    def receive(self, minimum: int) -> Iterator[tuple[int, Any]]:
        """Yields (episode, answer) in order of arrival; waits for at least `minimum` answers. An answer is an EnvOutput, the
        rewards of a function, or an EnvFailure.

        Raises RunError if the replacement of a worker cannot make its environment, and if all of them hang.
        """
        while minimum > 0 or not self._answers.empty():
            answer = self._answers.get()
            if isinstance(answer, RunError):
                raise answer
            self._check_hung(answer[1])
            minimum -= 1
            yield answer

    def _check_hung(self, answer) -> None:
        self._hung_in_a_row = self._hung_in_a_row + 1 if isinstance(answer, _Hung) else 0
        stepped = any(worker.stepped for worker in self._workers)
        if self._hung_in_a_row >= max(2, len(self._workers)) * (1 + stepped):  # once each; twice if they have worked before
            raise RunError(
                f"{self._limit}: {answer.reason}, and {self._hung_in_a_row - 1} times before with nothing answered in "
                "between; see why it hangs, or give it more time"
            )

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.leave()
        until = time.monotonic() + IDLE
        for worker in self._workers:
            worker.end_thread(until)
        until = time.monotonic() + AT_END
        for worker in self._workers:
            worker.end(until)
        self._workers = []
        atexit.unregister(self.close)  # after what may be interrupted


def _end_with_parent() -> None:
    """Kills the group of a worker that has not ended AT_END seconds after its parent: nobody else would."""
    parent = multiprocessing.parent_process()
    assert parent
    multiprocessing.connection.wait([parent.sentinel])
    time.sleep(AT_END)
    os.killpg(0, signal.SIGKILL)


def _serve(pipe, make) -> None:
    """Runs in a worker process, the first of its group: makes its environments, answers requests, ends with the pipe."""
    # The parent handles signals; it may finish its iteration before it exits. They do nothing here, but are not ignored, as
    # programs that an environment starts would ignore them, too, and could not be terminated.
    os.setsid()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    usual = lambda: [signal.signal(number, signal.SIG_DFL) for number in numbers]  # noqa: E731
    os.register_at_fork(after_in_child=usual)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    workers, spec = made(make)
    pipe.send(spec)
    asked = False
    try:
        while workers and (request := pipe.recv()):
            workers.send([request])
            pipe.send(*workers.receive(1))
        asked = True
    except (EOFError, OSError):  # the parent is gone, and will not kill what is left
        pass
    if workers:
        workers.close()
    if not asked:
        os.killpg(0, signal.SIGKILL)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(0)  # ending the interpreter takes a second
