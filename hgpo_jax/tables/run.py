"""Runs the cells of a plan here, one after another or a few at once; called again, it continues where it stopped."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hgpo_jax.tables.plan import Cell, Plan, Step, steps
from hgpo_jax.utils.errors import ConfigError

VARIABLE = re.compile(r"\$(\w+)")


def expanded(step: Step, environment=os.environ) -> list[str]:
    """Returns the command for a process, with `$NAME` replaced. Raises ConfigError if a variable is not set."""
    words = []
    for word in step.arguments:
        for name in VARIABLE.findall(word):
            if not environment.get(name):
                raise ConfigError(f"{word}: set the variable {name} first, as in {name}=FOLDER")
        words.append(VARIABLE.sub(lambda name: environment[name[1]], word))
    return [sys.executable, "-m", f"hgpo_jax.{step.module}", *words]


def run_cells(plan: Plan, wanted: list[Cell], runs: Path, source: Path, *, jobs: int, more: tuple[str, ...]) -> list[Cell]:
    """Runs the wanted cells that are unfinished to their ends; returns those that failed.

    The output of each goes into its folder's name with .log. `source`, the plan's file, is kept as RUNS/plan.yaml.
    The cells' processes inherit the lock: one that outlives a killed parent keeps a second run out.

    Raises:
      ConfigError: an invalid cell, or another process that works in the folder.
    """
    todo = [(cell, steps(plan, cell, runs, more)) for cell in wanted]
    for _, parts in todo:
        for step in parts:
            expanded(step)
    todo = [(cell, parts) for cell, parts in todo if not all(step.done for step in parts)]
    runs.mkdir(parents=True, exist_ok=True)
    lock = os.open(runs / ".lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(f"{runs}: another process runs cells here; wait for it or end it") from None
    if source.resolve() != (runs / "plan.yaml").resolve():
        shutil.copyfile(source, runs / "plan.yaml")
    print(f"{len(wanted) - len(todo)} of {len(wanted)} cells are done; {jobs} at once, in {runs}", flush=True)
    stop, began, ended = threading.Event(), time.monotonic(), []

    def bring(item) -> Cell | None:
        cell, parts = item
        log = runs / f"{cell.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        for step in parts:
            if stop.is_set():
                return None
            if step.done:
                continue
            with open(log, "a") as file:
                code = subprocess.run(
                    expanded(step),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    pass_fds=(lock,),
                    env=os.environ | plan.variables,
                ).returncode
            if code:
                print(f"{cell.name}: {step.module} ended with code {code}; {log} says why", flush=True)
                return cell
            if not step.done:  # fields other than the plan's, in an earlier call
                missing = next(file for file in step.proofs if not file.is_file())
                print(f"{cell.name}: {step.module} left no {missing}; remove {runs / cell.name} to begin again", flush=True)
                return cell
        ended.append(cell)
        minutes = (time.monotonic() - began) / 60
        print(f"{cell.name}: done, {len(ended)} of {len(todo)} after {minutes:.1f} minutes", flush=True)
        return None

    try:
        with ThreadPoolExecutor(jobs) as pool:
            try:
                return [cell for cell in pool.map(bring, todo) if cell]
            except BaseException:
                stop.set()  # no further process starts; those that run were interrupted too, or end
                raise
    finally:
        os.close(lock)
