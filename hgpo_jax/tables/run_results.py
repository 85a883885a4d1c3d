"""The results in a cell's run folder: its numbers, its curve, and whether it has ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hgpo_jax.config import Section
from hgpo_jax.policy import huggingface_folder
from hgpo_jax.tables.plan import Cell, Plan, Step, cells, config_of, steps
from hgpo_jax.trainer.metrics import read_metrics
from hgpo_jax.trainer.resume import FREE_TO_CHANGE, differing
from hgpo_jax.utils.errors import ConfigError

# Fields of paths and of sizes, which do not affect results.
PLACES = ("env.data", *(name for name in FREE_TO_CHANGE if name not in ("iterations", "evaluation.")))


class Result(Section):
    """The current state of a cell.

    done: all its commands have ended. iterations: made so far. seconds: of rollouts and updates. numbers: name -> (mean, std
    over evaluation seeds or None), shares in percent: `SPLIT/success` and `SPLIT/score` of evaluations under seeds;
    `final/sampled` and `final/greedy` of the one that ends training; `train/auc`, the mean success over all iterations, and
    `train/last`, over the last ones. curve: success by iteration, None where it is unknown. changed: `field=value` of
    differences from the plan, because the plan was changed since or the run had overrides. start: a digest of the weights that
    training began with, "" if there are none.
    """

    done: bool
    iterations: int
    seconds: float
    numbers: dict[str, tuple[float, float | None]]
    curve: list[float | None]
    changed: tuple[str, ...] = ()
    start: str = ""


Results = dict[Cell, Result | None]


def read_all(plan: Plan, runs: Path) -> Results:
    """Reads every cell of a plan with its result. Raises ConfigError for a damaged file."""
    return {cell: read_cell(plan, cell, runs) for cell in cells(plan)}


def read_cell(plan: Plan, cell: Cell, runs: Path) -> Result | None:
    """Reads a cell's result; None if its run has not begun. Raises ConfigError for a damaged file."""
    folder, parts, config = runs / cell.name, steps(plan, cell, runs), config_of(plan, cell)
    rows = read_metrics(folder)
    if not rows and not any(step.proofs[0].is_file() for step in parts):
        return None
    numbers: dict[str, tuple[float, float | None]] = {}
    for step in parts:
        numbers |= _evaluated(step) if step.done else {}
    differences = differing(config, folder) if (folder / "config.yaml").is_file() else {}
    changed = {name: before for name, (before, _) in differences.items() if not name.startswith(PLACES)}
    damaged, again = f"{folder}/metrics.jsonl: is damaged", "delete the folder and run the cell again"
    try:
        curve = [None if row["success"] is None else float(row["success"]) for row in rows]
        seconds = sum(sum(row["seconds"].values()) for row in rows)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(f"{damaged}; {again}") from None
    if parts[0].done and len(curve) < changed.get("iterations", config.iterations):
        raise ConfigError(f"{damaged}, it holds {len(curve)} of {config.iterations} iterations; {again}")
    for name, part in (("train/auc", curve), ("train/last", curve[-plan.window :])):
        said = [value for value in part if value is not None]
        if len(curve) == config.iterations and said:
            numbers[name] = 100 * float(np.mean(said)), None
    return Result(
        done=all(step.done for step in parts),
        iterations=len(rows),
        seconds=seconds,
        numbers=numbers,
        curve=curve,
        changed=tuple(f"{name}={value}" for name, value in changed.items()),
        start=_digest(folder / "start"),
    )


def _evaluated(step: Step) -> dict[str, tuple[float, float | None]]:
    """Reads the numbers that a command left. Raises ConfigError."""
    file = step.proofs[0]
    try:
        record = json.loads(file.read_text())
        if step.module == "train":
            return {f"final/{mode}": (100 * share, None) for mode, share in record["success"].items() if share is not None}
        over = {name: numbers for name in ("success", "score") if (numbers := record["over_seeds"].get(name))}
        return {
            f"{record['split']}/{name}": (100 * numbers["mean"], None if numbers["std"] is None else 100 * numbers["std"])
            for name, numbers in over.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise ConfigError(f"{file}: is not an evaluation; delete it and run the cell again") from None


def _digest(policy: Path) -> str:
    """Returns the beginning of a policy's digest, or of each of its sets of weights."""
    folders = sorted({file.parent for file in policy.rglob("*.safetensors")})
    return " ".join(huggingface_folder.digest(folder)[:16] for folder in folders)


def changed_fields(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Compares two lists of `field=value`, in which later entries count; paths and sizes are left out.

    Returns: the first list's `field=value` where they differ, and `without field=value` for fields that only the second has.
    """
    old, new = (dict(field.split("=", 1) for field in fields) for fields in (before, now))
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name) and not name.startswith(PLACES))
    return [f"{name}={old[name]}" if name in old else f"without {name}={new[name]}" for name in names]
