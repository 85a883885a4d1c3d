"""Runs the cells of a plan here, one after another or a few at once; called again, it continues where it stopped."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hgpo_jax.tables.cards import Cards, there
from hgpo_jax.tables.plan import Cell, Plan, Step, steps
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.heartbeat import phase
from hgpo_jax.utils.progress import say

VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def expand(step: Step, environment: Mapping[str, str]) -> list[str]:
    """Returns the command for a process, with `$NAME` and `${NAME}` replaced. Raises ConfigError if a variable is not set."""
    words = []
    for word in step.arguments:
        for name in map("".join, VARIABLE.findall(word)):
            if not environment.get(name):
                raise ConfigError(f"{word}: set the variable {name} first, as in {name}=FOLDER")
        words.append(VARIABLE.sub(lambda found: environment[found[1] or found[2]], word))
    return [sys.executable, "-m", f"hgpo_jax.{step.module}", *words]


@contextlib.contextmanager
def _locked(runs: Path) -> Iterator[int]:
    """Keeps other processes from running cells in a folder; yields the lock, which the cells' processes inherit: one that
    outlives a killed parent keeps a second run out. Raises ConfigError."""
    runs.mkdir(parents=True, exist_ok=True)
    lock = os.open(runs / ".lock", os.O_CREAT | os.O_RDWR)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{runs}: another process runs cells here; wait for it or end it") from None
        yield lock
    finally:
        os.close(lock)


def _fault(parts: list[Step], log: Path, stop: threading.Event, **options) -> str | None:
    """Runs the commands of a cell that are not done; returns what went wrong, "" if nothing, None if it was stopped."""
    log.parent.mkdir(parents=True, exist_ok=True)
    for step in parts:
        if stop.is_set():
            return None
        if step.done:
            continue
        with open(log, "a") as file:
            done = subprocess.run(expand(step, options["env"]), stdin=subprocess.DEVNULL, stdout=file, stderr=file, **options)
        if done.returncode:
            return f"{step.module} ended with code {done.returncode}; {log} says why"
        if not step.done:  # fields other than the plan's, in an earlier call
            missing = next(file for file in step.proofs if not file.is_file())
            mend = f"remove {log.with_suffix('')} to begin again" if step.module == "train" else f"{log} says what it wrote"
            return f"{step.module} left no {missing}; {mend}"
    return ""


def run_cells(plan: Plan, cells: list[Cell], runs: Path, source: Path, *, jobs: int, more: tuple[str, ...]) -> list[Cell]:
    """Runs the wanted cells that are unfinished to their ends; returns those that failed.

    The output of each goes into its folder's name with .log. `source`, the plan's file, is kept as RUNS/plan.yaml.

    Raises:
      ConfigError: an invalid cell, one that needs more GPUs than there are, or another process that works in the folder.
    """
    commands = {cell: steps(plan, cell, runs, more) for cell in cells}
    for step in itertools.chain(*commands.values()):
        expand(step, os.environ | plan.variables)
    todo = {cell: parts for cell, parts in commands.items() if not all(step.done for step in parts)}
    cards = Cards(there(os.environ | plan.variables), jobs)
    needed = {cell: cards.needed(plan, cell, more) for cell in todo}
    stop, began = threading.Event(), time.monotonic()
    ended: list[Cell] = []

    def bring(cell: Cell) -> bool:
        with cards.dealt(needed[cell]) as dealt, phase(cell.name, says_end=False):
            options = {"pass_fds": (lock,), "env": os.environ | plan.variables | dealt}
            fault = _fault(todo[cell], runs / f"{cell.name}.log", stop, **options)
        if fault == "":
            ended.append(cell)
            fault = f"done, {len(ended)} of {len(todo)} after {(time.monotonic() - began) / 60:.1f} minutes"
        if fault:
            say(f"{cell.name}: {fault}")
        return cell in ended

    with _locked(runs) as lock, ThreadPoolExecutor(jobs) as pool:
        if source.resolve() != (runs / "plan.yaml").resolve():
            shutil.copyfile(source, runs / "plan.yaml")
        say(f"{len(cells) - len(todo)} of {len(cells)} cells are done; {jobs} at once, in {runs}")
        try:
            return [cell for cell, done in zip(todo, pool.map(bring, todo), strict=True) if not done]
        except BaseException:
            stop.set()  # no further process starts; those that run were interrupted too, or end
            raise
