"""The output of a long job: lines, warnings, and progress; a live line on a terminal, plain lines elsewhere, as in a log file.

Nothing is printed inside `with quiet():`, for programs that train through the API; warnings are then Python's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TextIO

from tqdm import tqdm

PLAIN_EVERY = 5.0  # seconds between plain lines
listeners: list[Callable[[str], None]] = []  # functions that get every line, also one that is not printed
_quiet = 0  # how many callers want the whole process quiet, because threads print, too


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Stops `say` and progress from printing in the whole process, and turns `warn` into Python's warnings."""
    global _quiet
    _quiet += 1
    try:
        yield
    finally:
        _quiet -= 1


def is_quiet() -> bool:
    return bool(_quiet)


def note(text: str) -> None:
    """Gives the listeners a line that is not printed here: a live line shows it, or somebody else prints it."""
    for listener in listeners:
        listener(text)


def say(text: str) -> None:
    """Prints a line, above a live line if there is one."""
    note(text)
    if not _quiet:
        _print(text, sys.stdout)


def _print(text: str, stream: TextIO) -> None:
    """Prints a line. Once nobody reads the stream any more, as after `| head` or a closed terminal, a long job goes on."""
    try:
        with tqdm.external_write_mode(stream):
            print(text, file=stream, flush=True)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def warn(text: str) -> None:
    """Prints a warning to standard error."""
    note(f"warning: {text}")
    if _quiet:
        # With a registry of its own: Python would show a text only once for each place.
        warnings.warn_explicit(text, UserWarning, __file__, 0, module=__name__, registry={})
    else:
        _print(f"warning: {text}", sys.stderr)


class Progress:
    """A counter to `total`, from `done`.

    Args:
      name: name in the live line; plain lines begin with it unless `plain` is given.
      unit: unit of the live line's rate, as in `it`.
    """

    def __init__(self, name: str, total: int, unit: str, done: int = 0, plain: str | None = None):
        self._plain, self._printed = plain or name, 0.0
        self._bar = tqdm(total=total, initial=done, desc=name, unit=unit, disable=is_quiet() or None, dynamic_ncols=True)
        self._done = done

    def update(self, count: int, numbers: dict[str, str], seconds: float | None = None) -> None:
        """Adds `count` and shows `numbers`. seconds: expected time per item, for the time left."""
        self._done += count
        self._bar.set_postfix(numbers, refresh=False)
        self._bar.update(count)
        total, now = self._bar.total, time.perf_counter()
        if self._done >= total or now - self._printed > PLAIN_EVERY:
            self._printed = now
            shown = [f"{name} {value}" for name, value in numbers.items()]
            left = [] if seconds is None else [f"left {(total - self._done) * seconds:.0f}s"]
            line = "  ".join([f"{self._plain} {self._done}/{total}", *shown, *left])
            (say if self._bar.disable else note)(line)

    def close(self) -> None:
        self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self.close()
