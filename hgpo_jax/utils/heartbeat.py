"""What a command is doing, and for how long: a line at least every half minute, on the terminal and in the run's log.

    with Heartbeat("training"), phase("loading the weights"):
        ...

says `loading the weights: 0:30 (last time 1:10)` while the block runs and `loading the weights took 1:05` at its end, unless it
takes only seconds. A terminal shows what is running in its live line, and gets only the ends as lines. Every compilation by jax
is a phase of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO

from tqdm import tqdm

from hgpo_jax.utils import progress
from hgpo_jax.utils.errors import one_line
from hgpo_jax.utils.files import atomic_write

LOOK_EVERY = 1.0  # seconds between two looks at what is running
FIRST = 5.0  # seconds of a phase before it is reported, and before a command's first line; shorter phases are not mentioned
NEW = 10.0  # seconds without a line before a phase that is new is reported
EVERY = 25.0  # seconds without a line before the same is reported again; with LOOK_EVERY, less than 30
LOG = "log.txt"  # in a run's folder: the lines of its commands, with their times
COMPILING = ".compiling"  # in a run's folder: the programs that its process is compiling
DURATIONS = "durations.json"  # in `cache_dir`: work -> phase -> seconds that it took last time
MAX_WORKS = 100  # in that file, the most recent ones
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

_current: Heartbeat | None = None


class Phase:
    """Something that the thread which makes this does.

    program: what is compiled, if it is a compilation.
    """

    def __init__(self, name: str, program: str = ""):
        self.name, self.program = name, program
        self.thread, self.began = threading.get_ident(), time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self.began


@contextlib.contextmanager
def phase(name: str, says_end: bool = True) -> Iterator[None]:
    """Names what the block does, or the function that this decorates, for the Heartbeat that is entered, if any.

    says_end: whether its duration is said; it is noise where another line tells of the same.
    """
    beat = _current
    if beat is None:
        yield
        return
    one = beat.begin(Phase(name))
    try:
        yield
    except BaseException:
        beat.drop(one)
        raise
    beat.end(one, says_end)


def current() -> Heartbeat:
    """Returns the Heartbeat that is entered."""
    assert _current
    return _current


class Heartbeat(contextlib.ContextDecorator):
    """Reports, while entered, the innermost phase of every thread, and its own name where there is none."""

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> Heartbeat:
        global _current
        self._whole = Phase(self._name)
        self._running: list[Phase] = []  # in the order of their beginnings
        self._last_line, self._silent = time.perf_counter(), True
        self._reported: set[str] = set()  # names of phases that are no news
        self._bar: tqdm | None = None
        self._log: IO[str] | None = None
        self._early: list[str] = []  # lines from before the log was opened
        self._compiling: Path | None = None
        self._durations, self._work = Path(), ""
        self._last_time: dict[str, float] = {}
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._outer, _current = _current, self
        progress.listeners.append(self._hear)
        self._thread.start()
        import jax  # takes seconds

        jax.monitoring.register_scalar_listener(self._begin_compiling)
        jax.monitoring.register_event_duration_secs_listener(self._end_compiling)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        global _current
        import jax

        jax.monitoring.unregister_scalar_listener(self._begin_compiling)
        jax.monitoring.unregister_event_duration_listener(self._end_compiling)
        self._stop.set()
        self._thread.join()
        self._show_live("")
        if isinstance(error, Exception):
            progress.note(f"error: {one_line(error)}")
        progress.listeners.remove(self._hear)
        _current = self._outer
        self._keep_durations()
        with contextlib.suppress(OSError):
            if self._log:
                self._log.close()
            if self._compiling:
                self._compiling.unlink()

    def seconds(self) -> float:
        """Returns the seconds since this was entered."""
        return self._whole.seconds()

    def remember(self, cache_dir: str, work: str) -> None:
        """Shows what phases took last time on this machine in equal work, and keeps in `cache_dir` what they take now.

        work: a text that differs where durations do.
        """
        machine = f"{platform.node()} {os.environ.get('JAX_PLATFORMS', '')}"
        self._durations, self._work = Path(cache_dir, DURATIONS), hashlib.sha256(f"{machine}\0{work}".encode()).hexdigest()[:16]
        self._last_time = _read_durations(self._durations).get(self._work, {}) | self._last_time

    def write_to(self, folder: Path) -> None:
        """Appends this command's lines to the log in a run's folder, and lists there what is being compiled until the end.

        XLA ends the process for some programs that it cannot compile, and then the list is all there is to say which.
        """
        self._compiling = folder / COMPILING
        with self._lock, contextlib.suppress(OSError):  # a full disk is reported by what the run needs to write
            self._log = open(folder / LOG, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open until the end
            self._log.writelines(self._early)

    def begin(self, one: Phase) -> Phase:
        with self._lock:
            self._running.append(one)
            self._list_compilations(one)
        return one

    def drop(self, one: Phase) -> None:
        with self._lock:
            self._running.remove(one)
            self._list_compilations(one)

    def end(self, one: Phase, says_end: bool = True) -> None:
        self.drop(one)
        if (seconds := one.seconds()) >= FIRST:  # a program out of jax's cache is not remembered, nor its compilation forgotten
            self._last_time[one.name] = round(seconds, 1)
            if says_end:
                progress.say(f"{one.name} took {clock(seconds)}")
                self._keep_durations()

    def report(self) -> None:
        """Says what is running, if a report is due; on a terminal the live line shows it at once."""
        now = time.perf_counter()
        with self._lock:
            shown = self._innermost(now)
            names = {one.name for one in shown}
            known = names <= self._reported
            due = bool(shown) and now - self._last_line >= (EVERY if known else FIRST if self._silent else NEW)
            self._reported |= names if due else set()
        line = ", ".join(self._describe(one) for one in shown)
        self._show_live(line)
        if due:
            (progress.note if self._is_live() else progress.say)(line)

    def _innermost(self, now: float) -> list[Phase]:
        """Returns the phases to show, the earliest first: those that take long, or after a silence what there is."""
        innermost = sorted({one.thread: one for one in self._running}.values(), key=lambda one: one.began)
        shown = [one for one in innermost if now - one.began >= FIRST]
        if not shown and now - self._last_line >= (FIRST if self._silent else EVERY):
            shown = innermost or [self._whole]
        return list({one.name: one for one in reversed(shown)}.values())[::-1]

    def _describe(self, one: Phase) -> str:
        last = self._last_time.get(one.name)
        return f"{one.name}: {clock(one.seconds())}" + (f" (last time {clock(last)})" if last else "")

    def _is_live(self) -> bool:
        return sys.stderr.isatty() and not progress.is_quiet()

    def _show_live(self, line: str) -> None:
        if line and self._is_live():
            if self._bar is None:
                self._bar = tqdm(bar_format="{desc}", leave=False)
            self._bar.set_description_str(line[: shutil.get_terminal_size().columns - 1])
        elif self._bar is not None:
            self._bar.close()
            self._bar = None

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_EVERY):
            self.report()

    def _hear(self, text: str) -> None:
        lines = [f"{datetime.now():%Y-%m-%d %H:%M:%S}  {line}\n" for line in text.splitlines() if line]
        with self._lock, contextlib.suppress(OSError):
            self._last_line, self._silent = time.perf_counter(), False
            self._log.writelines(lines) if self._log else self._early.extend(lines)

    def _begin_compiling(self, event: str, value: float | int, **kwargs: str | int) -> None:
        if event == COMPILE:
            function = str(kwargs.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
            program = PROGRAMS.get(function, f"a small program ({function})")
            self.begin(Phase(f"compiling {program}", program))

    def _end_compiling(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILE:
            with self._lock:
                mine = [one for one in self._running if one.program and one.thread == threading.get_ident()]
            if mine:
                self.end(mine[-1])

    def _list_compilations(self, one: Phase) -> None:
        if one.program and self._compiling:
            with contextlib.suppress(OSError):
                self._compiling.write_text("".join(f"{other.program}\n" for other in self._running if other.program))

    def _keep_durations(self) -> None:
        if self._work and self._last_time:
            with contextlib.suppress(OSError):
                works = _read_durations(self._durations)
                last_time = works.pop(self._work, {}) | self._last_time
                works = dict(list(works.items())[1 - MAX_WORKS :]) | {self._work: last_time}
                self._durations.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(self._durations) as file:
                    json.dump(works, file)


def _read_durations(file: Path) -> dict[str, dict[str, float]]:
    """Reads a file of durations; one that is missing or damaged holds none."""
    try:
        works = json.loads(file.read_text())
        return {work: {name: float(max(0, min(s, 1e7))) for name, s in phases.items()} for work, phases in works.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def clock(seconds: float) -> str:
    """Writes a duration as 0:05, 1:30 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
