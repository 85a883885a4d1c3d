"""Environment workers for several processes that run as one program: process 0 steps the environments for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hgpo_jax.rollout.workers import EnvFailure, EnvOutput, EnvSpec, Request
from hgpo_jax.utils import distributed
from hgpo_jax.utils.errors import ConfigError


class SharedWorkers:
    """The environment workers of process 0, for all processes.

    A timeout or a failure must not occur in one process alone. All processes must make the same calls.

    Raises:
      ConfigError: in all processes if `make_workers` raises ValueError or OSError.
    """

    def __init__(self, make_workers: Callable):
        self._workers: Any = None

        def make() -> EnvSpec:
            try:
                self._workers = make_workers()
            except (ValueError, OSError) as error:
                raise ConfigError(str(error)) from None
            return self._workers.spec

        task_types, tasks, turns, roles, signals, picture_size = distributed.broadcast_from_process_0(make)
        if picture_size:
            raise ConfigError("pictures of a text environment are seen in one process; leave --distributed out")
        self.spec = EnvSpec(tuple(task_types), tasks, turns, tuple(roles), tuple(signals))

    def discard_answers(self) -> None:
        """Discards answers that have not been received."""
        if self._workers:
            self._workers.discard_answers()

    def send(self, requests: Iterable[Request]) -> None:
        """Sends requests to the workers."""
        if self._workers:
            self._workers.send(requests)

    def receive(self, minimum: int) -> list[tuple[int, EnvOutput | EnvFailure]]:
        """Returns (episode, answer) for the answers that have arrived; waits for at least `minimum`."""
        answers = distributed.broadcast_from_process_0(lambda: list(self._workers.receive(minimum)))
        failed = lambda answer: len(answer) == len(EnvFailure._fields)  # noqa: E731
        return [(episode, (EnvFailure if failed(answer) else EnvOutput)(*answer)) for episode, answer in answers]

    def close(self) -> None:
        """Ends the workers."""
        if self._workers:
            self._workers.close()
