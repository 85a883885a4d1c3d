"""Environment workers in separate processes, which are replaced when they die or time out."""

from __future__ import annotations

import atexit
import functools
import multiprocessing.util  # so that its handler at exit, which joins all processes, runs after ours
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

from hgpo_jax.rollout.workers import EnvFailure, EnvOutput, EnvSpec, LocalWorkers, Request
from hgpo_jax.utils.errors import RunError


class _Hung(EnvFailure):
    """The failure of an episode whose worker timed out."""


class _WorkerProcess:
    """A process, and the thread that hands it one request at a time and replaces it when it dies or times out."""

    _starting = threading.Lock()

    def __init__(self, make: Callable, describe: Callable[[tuple], str], time_limit: float, start_limit: float):
        self._make, self._describe, self._time_limit, self._start_limit = make, describe, time_limit, start_limit
        self.stepped = False  # whether it has ever answered a step, not just a reset
        self.queue: SimpleQueue[tuple[Request, SimpleQueue] | None] = SimpleQueue()  # a request, and the queue for its answer
        self._ended = False
        self.process: BaseProcess | None = None
        self._thread = threading.Thread(target=self._answer_all, daemon=True)
        self._spawn()

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._deadline = time.monotonic() + self._start_limit
        self.pipe, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._make), daemon=True)
        with self._starting:
            # A worker never needs the accelerator; jax reads this when it is imported.
            before = os.environ.get("JAX_PLATFORMS")
            os.environ["JAX_PLATFORMS"] = "cpu"
            try:
                process.start()
            finally:
                os.environ.pop("JAX_PLATFORMS")
                if before is not None:
                    os.environ["JAX_PLATFORMS"] = before
        self.process = process
        theirs.close()
        if self._ended:
            process.kill()

    def read_spec(self) -> EnvSpec:
        """Receives the first message of a new process. Raises ValueError if it cannot make its environment."""
        try:
            if not self.pipe.poll(max(0.0, self._deadline - time.monotonic())):
                raise ValueError(f"environment: not made in {self._start_limit:g} s; give it more time")
            spec = self.pipe.recv()
        except (EOFError, OSError):
            raise ValueError("environment: its worker process died while it was made; try it with workers=0") from None
        if isinstance(spec, str):  # the error
            raise ValueError(spec)
        return spec

    def start(self) -> None:
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
        except (ValueError, OSError) as error:
            self._stop()
            return RunError(f"{error}; a worker that died or took too long cannot be replaced")
        try:
            self.pipe.send(request)
            if self.pipe.poll(self._time_limit):
                answer = self.pipe.recv()
                self.stepped |= request[-1] != ()
                return answer
            failure: EnvFailure = _Hung(f"no answer in {self._time_limit:g} s{self._describe(request)}")
        except (EOFError, OSError):
            failure = EnvFailure(f"its worker process died{self._describe(request)}")
        except Exception as error:  # an answer may not be a pickle: the environment can write into the pipe
            failure = EnvFailure(f"no answer: {error!r:.200}")
        self._stop()
        return request[0], failure

    def _stop(self) -> None:
        self.pipe.close()
        if self.process:
            self.process.kill()
            self.process.join()
            self.process = None

    def end(self) -> None:
        """Ends the process and the thread."""
        self._ended = True
        self.queue.put(None)
        if process := self.process:
            process.kill()  # a thread that waits for an answer then finds the pipe closed
        if self._thread.is_alive():
            self._thread.join()
        self._stop()


class ProcessWorkers:
    """Environments in worker processes, which are replaced when they die or time out.

    If every worker times out again and again with no answer in between, all remaining requests would, too, and a RunError ends
    the run.

    Args:
      make_env: makes one environment; must be picklable.
      workers: processes. Each has a block of the episodes, so that a prompt group's episodes share what they load.
      episodes: of a batch.
      time_limit: timeout in seconds for one answer.
      start_limit: timeout in seconds for a process to make its first environment.
      local: the workers inside each process; with `reward_workers.LocalReward`, `make_env` loads a reward function.

    Raises:
      ValueError: the first environment cannot be made.
    """

    def __init__(
        self,
        make_env: Callable,
        workers: int,
        episodes: int,
        time_limit: float = 60.0,
        start_limit: float = 600.0,
        local: Any = LocalWorkers,
    ):
        self._episodes, self._limit, self._hung_in_a_row = episodes, f"{local.limit}={time_limit:g}", 0
        self.discard_answers()
        self._workers = []
        atexit.register(self.close)  # otherwise a thread would replace the processes that the exiting interpreter ends
        for _ in range(min(workers, episodes)):
            self._workers.append(_WorkerProcess(functools.partial(local, make_env), local.describe, time_limit, start_limit))
        for worker in self._workers:
            try:
                self.spec = worker.read_spec()
            except ValueError:
                self.close()
                raise
        for worker in self._workers:
            worker.start()

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
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.end()
        self._workers = []


def _serve(pipe, make) -> None:
    """Runs in a worker process: makes its environments, answers requests, ends with the pipe."""
    # The parent handles signals; it may finish its iteration before it exits.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        workers = make()
    except Exception as error:
        pipe.send(" ".join(f"environment: {error}".split()))
        return
    pipe.send(workers.spec)
    try:
        while True:
            workers.send([pipe.recv()])
            pipe.send(*workers.receive(1))
    except (EOFError, OSError):
        return
