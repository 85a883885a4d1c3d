"""SIGTERM, SIGINT and SIGHUP during training: the first one saves and exits, a second SIGINT exits at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

# SIGHUP where a terminal or a connection is closed; Windows has none.
SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread. It is not an Exception, so code that catches every error of an environment lets it pass."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interruption:
    """`with Interruption() as stop:` turns the signals into Interrupted, except inside `with stop.defer_signals():`.

    `saved` is how many iterations a checkpoint holds, for the final message.

    Several processes must exit at the same place: a SIGTERM to any of them takes effect at `agreed`.

    exits: whether a second SIGINT ends the process at once, as it should a command; else it raises KeyboardInterrupt at once.
    """

    def __init__(self, exits: bool = True):
        self.saved = 0
        self._exits = exits
        self._number: int | None = None
        self._deferred = False
        self._places = 0

    def __enter__(self) -> Interruption:
        self._alone = jax.process_count() == 1
        # With several processes jax itself listens to SIGTERM; and only the main thread may listen to signals.
        listens = self._alone and threading.current_thread() is threading.main_thread()
        numbers = [number for number in SIGNALS if listens and not self._is_ignored(number)]
        self._before = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    @staticmethod
    def _is_ignored(number: int) -> bool:
        """Whether this process is to outlive its terminal, as under nohup."""
        return number not in (signal.SIGINT, signal.SIGTERM) and signal.getsignal(number) == signal.SIG_IGN

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame) -> None:
        if self._number is not None:
            if number == signal.SIGINT and not self._exits:
                raise KeyboardInterrupt
            if number == signal.SIGINT:
                os.write(sys.stderr.fileno(), b"exiting at once; what was not saved is lost\n")
                os._exit(128 + number)
            return
        self._number = number
        self._raise()

    def _raise(self) -> None:
        if self._number is not None and not self._deferred:
            raise Interrupted(self._number)

    @contextlib.contextmanager
    def defer_signals(self) -> Iterator[None]:
        """Delays signals to the end of the block, or of the outermost one if blocks are nested."""
        outer, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = outer
        self._raise()

    def agreed(self) -> None:
        """Raises Interrupted in all processes at the same call once one of them received SIGTERM."""
        self._places += 1
        if not self._alone and multihost_utils.reached_preemption_sync_point(self._places):
            raise Interrupted(signal.SIGTERM)
