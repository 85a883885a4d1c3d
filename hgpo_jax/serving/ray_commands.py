"""The commands that play episodes, on the nodes of a Ray cluster (`rollout/ray_workers.py`)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import ray

from hgpo_jax.rollout.ray_workers import Actor, connect
from hgpo_jax.serving.commands import Launcher, command_of
from hgpo_jax.utils.errors import ConfigError

START = 600.0  # timeout in seconds for an actor to be placed, or to start a command, and to import what commands need
ANSWER = 60.0  # the least timeout in seconds for an answer of an actor, which itself waits MOMENT for its command


class RayLauncher:
    """A `commands.Launcher` whose commands run on a cluster, each started by an actor, which starts one at a time.

    Args:
      text: the command.
      preload: modules that each actor's fork server imports.
      number: actors, the most commands at a time.
      time_limit: timeout in seconds for an actor's answer, after which it counts as dead.

    Raises ConfigError for a command that cannot be started, and if there is no cluster.
    """

    def __init__(self, text: str, preload: Sequence[str], number: int, time_limit: float):
        try:
            connect()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.host = ray.util.get_node_ip_address()
        arguments = text, tuple(preload), self.host, os.getcwd()
        self._places = [_Place(arguments, time_limit) for _ in range(number)]
        self._free: SimpleQueue[_Place] = SimpleQueue()
        for place in self._places:
            try:
                wrong = place.begin()
            except OSError as error:
                wrong = f"env.workers=ray:{number}: {error.strerror} as it was to start commands"
            if wrong:
                self.close()
                raise ConfigError(wrong)
            self._free.put(place)

    def revive(self) -> None:
        """Does nothing: an actor that has died is replaced by the next command."""

    def start(self, variables: dict[str, str]) -> _Place:
        """Starts the command with these environment variables; returns its `commands.Running`. Raises OSError."""
        place = self._free.get()
        try:
            place.start(variables)
        except OSError:
            self._free.put(place)
            raise
        place.ended = self._free.put
        return place

    def close(self) -> None:
        """Ends the actors; commands end with their rollout."""
        for place in self._places:
            place.close()


class _Place:
    """An actor that starts commands, which is replaced when it dies, and like a `commands.Running` while one runs there.

    ended: called with the place when its command has ended.
    """

    def __init__(self, arguments: tuple, time_limit: float):
        self._arguments, self._time_limit = arguments, max(time_limit, ANSWER)
        self.ended: Callable[[_Place], None]
        self._actor: Actor | None = Actor(_Commands, *arguments)

    def begin(self) -> str:
        """Waits until the actor can start commands; returns why it cannot, "" if it can. Raises OSError."""
        return self._receive(START)

    def start(self, variables: dict[str, str]) -> None:
        """Starts a command. Raises OSError."""
        if self._actor is None:
            self._actor = Actor(_Commands, *self._arguments)
            if wrong := self.begin():
                self.close()
                raise OSError(errno.ECHILD, wrong)
        if wrong := self._ask(START, "start", variables):
            raise OSError(errno.ECHILD, wrong)

    def wait(self) -> tuple[int | None, int]:
        """Waits a moment, as `commands.Running.wait` does. Raises OSError."""
        return self._ask(self._time_limit, "wait")

    def end(self) -> str:
        """Ends the command, as `commands.Running.end` does."""
        try:
            return self._ask(self._time_limit, "end") if self._actor else ""
        except OSError:  # it has ended with its node
            return ""
        finally:
            self.ended(self)

    def _ask(self, seconds: float, method: str, *arguments: Any) -> Any:
        assert self._actor is not None
        self._actor.ask(method, *arguments)
        return self._receive(seconds)

    def _receive(self, seconds: float) -> Any:
        assert self._actor is not None
        try:
            if self._actor.poll(seconds):
                return self._actor.receive()
            wrong = f"its worker process gave no answer in {seconds:g} s"
        except EOFError:
            wrong = "its worker process died"
        self.close()
        raise ConnectionError(errno.ECONNRESET, wrong)

    def close(self) -> None:
        """Ends the actor."""
        if self._actor:
            self._actor.close()
            self._actor = None


class _Commands:
    """Runs in an actor: starts commands on its node, one at a time."""

    def __init__(self, text: str, preload: tuple[str, ...], host: str, folder: str):
        self._text, self._preload, self._host, self._folder = text, preload, host, folder

    def begin(self) -> str:
        """Prepares the command; returns why it cannot be started, "" if it can."""
        try:
            os.chdir(self._folder)
            self._launcher = Launcher(command_of(self._text), self._preload, self._host)
        except (OSError, ConfigError) as error:
            return str(error)
        return ""

    def start(self, variables: dict[str, str]) -> str:
        """Starts the command; returns why it did not start, "" if it did."""
        try:
            self._launcher.revive()
            self._running = self._launcher.start(variables)
        except (OSError, ConfigError) as error:
            return getattr(error, "strerror", None) or str(error)
        return ""

    def wait(self) -> tuple[int | None, int]:
        """As `Running.wait`."""
        return self._running.wait()

    def end(self) -> str:
        """As `Running.end`."""
        return self._running.end()
