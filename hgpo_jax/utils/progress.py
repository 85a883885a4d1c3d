"""The output of a long job: lines, warnings, and progress; a live line on a terminal, plain lines elsewhere, as in a log file.

Nothing is printed inside `with quiet():`, for programs that train through the API; warnings are then Python's.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
from tqdm import tqdm

PLAIN_EVERY = 5.0  # seconds between plain lines
SAY_AFTER = 5.0  # seconds of compiling before the first message
COMPILE = "/jax/core/compile/backend_compile_duration"  # of `jax.monitoring`: a scalar at the start, a duration at the end
# Readable names for jax's programs, by the names of their functions.
PROGRAMS = {
    "train_step": "the update",
    "rollout": "the rollout",
    "episodes": "the warm start's play",
    "some_steps": "the warm start's update",
    "mapped": "the warm start's held-out loss",
    "_prefill": "the reading of prompts",
    "_decode": "decoding",
    "<lambda>": "a program",
}


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


def say(text: str) -> None:
    """Prints a line, above a live line if there is one."""
    if not _quiet:
        with tqdm.external_write_mode():
            print(text, flush=True)


def warn(text: str) -> None:
    """Prints a warning to standard error."""
    if _quiet:
        # With a registry of its own: Python would show a text only once for each place.
        warnings.warn_explicit(text, UserWarning, __file__, 0, module=__name__, registry={})
    else:
        with tqdm.external_write_mode(sys.stderr):
            print(f"warning: {text}", file=sys.stderr, flush=True)


class Progress:
    """A counter to `total`, from `done`.

    Args:
      name: name in the live line; plain lines begin with it unless `plain` is given.
      unit: unit of the live line's rate, as in `it`.
    """

    def __init__(self, name: str, total: int, unit: str, done: int = 0, plain: str | None = None):
        self._plain, self._printed = plain or name, 0.0
        self._bar = tqdm(total=total, initial=done, desc=name, unit=unit, disable=bool(_quiet) or None, dynamic_ncols=True)
        self._done = done

    def update(self, count: int, numbers: dict[str, str], seconds: float | None = None) -> None:
        """Adds `count` and shows `numbers`. seconds: expected time per item, for the time left."""
        self._done += count
        self._bar.set_postfix(numbers, refresh=False)
        self._bar.update(count)
        total, now = self._bar.total, time.perf_counter()
        if self._bar.disable and (self._done >= total or now - self._printed > PLAIN_EVERY):
            self._printed = now
            shown = [f"{name} {value}" for name, value in numbers.items()]
            left = [] if seconds is None else [f"left {(total - self._done) * seconds:.0f}s"]
            say("  ".join([f"{self._plain} {self._done}/{total}", *shown, *left]))

    def close(self) -> None:
        self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class CompileWatch:
    """Reports, while entered, what is being compiled in any thread and for how long: on a terminal in a live line, elsewhere in
    lines after 5, 10, 20, 40 s and so on, and one at the end. Shorter compilations are not mentioned.

    file: once set, it holds the names of what is being compiled, one a line, until the watch is left. XLA ends the process for
    some programs that it cannot compile, and then these are all there is to say which.
    """

    file: Path | None = None

    def __init__(self) -> None:
        self._began: dict[int, tuple[str, float]] = {}  # for each thread that compiles
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._bar: tqdm | None = None
        self._due = SAY_AFTER  # compile time in seconds at which the next plain line is due

    def _begin(self, event: str, value: float | int, **kwargs: str | int) -> None:
        if event == COMPILE:
            function = str(kwargs.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
            with self._lock:
                self._began[threading.get_ident()] = PROGRAMS.get(function, function), time.perf_counter()
                self._write()

    def _end(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILE:
            with self._lock:
                name, _began = self._began.pop(threading.get_ident(), ("", 0.0))
                self._write()
            if name and duration_secs >= SAY_AFTER and not self._live():
                say(f"compiled {name} in {duration_secs:.0f} s")

    def _write(self) -> None:
        if self.file:
            with contextlib.suppress(OSError):  # a full disk is reported by what the run needs to write
                self.file.write_text("".join(f"{name}\n" for name, _ in self._began.values()))

    def show(self) -> None:
        """Reports compilations that have been running for long, if a report is due."""
        now = time.perf_counter()
        with self._lock:
            since = [(now - began, name) for name, began in self._began.values() if now - began >= SAY_AFTER]
        if not since:
            self._due = SAY_AFTER
            self._close_bar()
            return
        line = "compiling " + ", ".join(f"{name} {seconds:.0f} s" for seconds, name in sorted(since, reverse=True))
        if self._live():
            if self._bar is None:
                self._bar = tqdm(bar_format="{desc}", leave=False)
            self._bar.set_description_str(line)
        elif max(since)[0] >= self._due:
            self._due = 2 * max(since)[0]
            say(line)

    def _live(self) -> bool:
        return sys.stderr.isatty() and not _quiet

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _watch(self) -> None:
        while not self._stop.wait(1.0):
            self.show()

    def __enter__(self) -> CompileWatch:
        jax.monitoring.register_scalar_listener(self._begin)
        jax.monitoring.register_event_duration_secs_listener(self._end)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()
        self._close_bar()
        jax.monitoring.unregister_scalar_listener(self._begin)
        jax.monitoring.unregister_event_duration_listener(self._end)
        if self.file:
            with contextlib.suppress(OSError):
                self.file.unlink()
