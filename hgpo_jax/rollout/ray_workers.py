"""Workers as actors on a Ray cluster: processes on any of its nodes.

Every node needs this package and the files that the run names, at the places where the trainer has them. An actor is placed
where a processor is free, the nodes in turn, and then reserves nothing, as a process that waits for answers most of the time.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from hgpo_jax.rollout.workers import EnvFailure, EnvOutput, EnvSpec, Request, made
from hgpo_jax.utils.errors import one_line

STORE = 2**28  # bytes of the object store of a cluster of our own; answers are small
STARTS = 3  # of one actor, at most


def connect() -> None:
    """Connects to the cluster of RAY_ADDRESS, or starts one on this machine, unless this process has done so.

    Raises ValueError if there is no such cluster.
    """
    if ray.is_initialized():
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = os.environ.get("RAY_ADDRESS")
    if address:
        options |= {"address": "auto"}
    else:  # which nobody else needs to reach
        options |= {"address": "local", "_node_ip_address": "127.0.0.1", "include_dashboard": False}
        options |= {"object_store_memory": STORE}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"RAY_ADDRESS={address}: no such cluster" if address else "no Ray cluster could be started"
        raise ValueError(one_line(f"{where}: {error}")[:500]) from None
    finally:  # Ray's would end the run at once, with nothing saved
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


_remote = functools.cache(ray.remote)


class Actor:
    """An actor that is asked for one thing at a time; one that dies as it begins, most likely with its node, is started again.

    kind: its class; its method `begin` is called first. arguments: those of the class.
    """

    def __init__(self, kind: type, *arguments: Any):
        # A worker never needs the accelerator; jax reads this when it is imported.
        environment = {"env_vars": {"JAX_PLATFORMS": "cpu"}}
        self._make = _remote(kind).options(scheduling_strategy="SPREAD", runtime_env=environment)
        self._arguments, self._starts = arguments, STARTS
        self._begin()

    def _begin(self) -> None:
        self._starts -= 1
        self._actor: Any = self._make.remote(*self._arguments)
        self._answer = self._actor.begin.remote()

    def ask(self, method: str, *arguments: Any) -> None:
        """Calls a method."""
        self._starts = 0
        self._answer = getattr(self._actor, method).remote(*arguments)

    def poll(self, seconds: float) -> bool:
        """Waits for the answer, or the actor's end, at most for so long; returns whether there is one."""
        deadline = time.monotonic() + seconds
        while ray.wait([self._answer], timeout=max(0.0, deadline - time.monotonic()))[0]:
            if not self._starts or not self._died():
                return True
            self._begin()
        return False

    def _died(self) -> bool:
        try:
            self.receive()
        except EOFError:
            return True
        return False

    def receive(self) -> Any:
        """Returns the answer. Raises EOFError, which says why, if the actor has died."""
        try:
            return ray.get(self._answer)
        except ray.exceptions.RayTaskError:  # our own fault
            raise
        except ray.exceptions.RayError as error:  # it died, ran out of memory, could not be placed, lost its answer, ...
            raise EOFError(str(error).strip().split("\n")[-1].strip()[:200]) from None

    def kill(self) -> None:
        """Ends the actor at once; a thread that waits for its answer finds that out."""
        self._starts = 0
        if ray.is_initialized():  # otherwise it has ended with its cluster, and Ray would start another
            ray.kill(self._actor)

    close = kill


class RayProcess(Actor):
    """A `process_workers.LocalProcess`, somewhere on the cluster."""

    def __init__(self, make: Callable):
        super().__init__(_Environments, ray.cloudpickle.dumps(make), os.getcwd(), sys.path)

    def send(self, request: tuple) -> None:
        """Sends a request."""
        self.ask("answer", request)

    def leave(self) -> None:
        """Asks the actor to end its environments; nobody may wait for its answer."""
        with contextlib.suppress(Exception):  # of an actor or a cluster that has ended
            self.ask("close")

    def close(self, seconds: float = 0.0) -> None:  # type: ignore[override]
        """Ends the actor; seconds: for its environments to end what they have started, if it was asked to."""
        with contextlib.suppress(Exception):
            if seconds:
                self.poll(seconds)
        self.kill()


class _Environments:
    """Runs in an actor: makes its environments, and answers requests."""

    def __init__(self, make: bytes, folder: str, paths: list[str]):
        self._make, self._folder, self._paths = make, folder, paths

    def begin(self) -> EnvSpec | str:
        """Makes the environments; returns their spec, or why there is none."""
        try:
            os.chdir(self._folder)  # what a run names may be relative to it
        except OSError as error:
            return f"environment: a node of the cluster cannot enter {self._folder}: {error.strerror}"
        sys.path.extend(path for path in self._paths if path not in sys.path)
        self._workers, spec = made(lambda: pickle.loads(self._make)())
        return spec

    def answer(self, request: Request) -> tuple[int, EnvOutput | EnvFailure]:
        """Answers a request."""
        self._workers.send([request])
        (answer,) = self._workers.receive(1)
        return answer

    def close(self) -> None:
        """Ends the environments."""
        self._workers.close()
