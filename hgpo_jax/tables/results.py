"""The results in a cell's run folder: its numbers, its curve, and whether it has ended."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from hgpo_jax.policy import huggingface_folder
from hgpo_jax.tables.plan import Cell, Plan, cells, config_of, overrides, steps
from hgpo_jax.trainer.folder import FREE_TO_CHANGE, differing
from hgpo_jax.trainer.metrics import read_metrics
from hgpo_jax.utils.errors import ConfigError

# Fields of paths and of sizes, which do not affect results.
PLACES = ("env.data", *(name for name in FREE_TO_CHANGE if name not in ("iterations", "evaluation.")))


@dataclasses.dataclass(frozen=True)
class Result:
    """The current state of a cell.

    done: all its commands have ended. iterations: made so far. numbers: name -> (mean, std over evaluation seeds or None),
    shares in percent: `SPLIT/success` and `SPLIT/score` of evaluations under seeds; `final/sampled` and `final/greedy`
    of the one that ends training; `train/auc`, the mean success over all iterations, and `train/last`, over the last ones.
    curve: success by iteration. seconds: of rollouts and updates. changed: `field=value` of differences from the plan, because
      the plan was changed since or the run had overrides. start: a digest of the weights that training began with, "" if there
      are none.
    """

    done: bool
    iterations: int
    numbers: dict[str, tuple[float, float | None]]
    curve: list[float]
    seconds: float
    changed: tuple[str, ...] = ()
    start: str = ""


def _json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: is damaged; delete it and run the cell again") from None


def read_cell(plan: Plan, cell: Cell, runs: Path) -> Result | None:
    """Reads a cell's result; None if its run has not begun. Raises ConfigError for a damaged file."""
    folder, parts, config = runs / cell.name, steps(plan, cell, runs), config_of(plan, cell)
    rows = read_metrics(folder)
    if not rows and not any(step.proofs[0].is_file() for step in parts):
        return None
    numbers: dict[str, tuple[float, float | None]] = {}
    for step in parts:
        if not step.done:
            continue
        found = _json(step.proofs[0])
        try:
            if step.module == "train":
                numbers |= {f"final/{mode}": (100 * share, None) for mode, share in found["success"].items()}
                continue
            for name in ("success", "score"):
                if over := found["over_seeds"].get(name):
                    std = None if over["std"] is None else 100 * over["std"]
                    numbers[f"{found['split']}/{name}"] = 100 * over["mean"], std
        except (KeyError, TypeError, AttributeError):
            raise ConfigError(f"{step.proofs[0]}: is not an evaluation; delete it and run the cell again") from None
    found = differing(config, folder) if (folder / "config.yaml").is_file() else {}
    changed = {name: before for name, (before, _) in found.items() if not name.startswith(PLACES)}
    try:
        curve = [float(row["success"]) for row in rows]
        seconds = sum(sum(row["seconds"].values()) for row in rows)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(f"{folder}/metrics.jsonl: is damaged; delete the folder and run the cell again") from None
    if parts[0].done and len(curve) < changed.get("iterations", config.iterations):
        raise ConfigError(
            f"{folder}/metrics.jsonl: is damaged, it holds {len(curve)} of {config.iterations} iterations; "
            "delete the folder and run the cell again"
        )
    if len(curve) == config.iterations:
        numbers["train/auc"] = 100 * float(np.mean(curve)), None
        numbers["train/last"] = 100 * float(np.mean(curve[-plan.window :])), None
    return Result(
        done=all(step.done for step in parts),
        iterations=len(rows),
        numbers=numbers,
        curve=curve,
        seconds=seconds,
        changed=tuple(f"{name}={value}" for name, value in changed.items()),
        start=_digest(folder / "start"),
    )


def _digest(policy: Path) -> str:
    """Returns the beginning of a policy's digest, or of each of its sets of weights."""
    folders = sorted({file.parent for file in policy.rglob("*.safetensors")})
    return " ".join(huggingface_folder.digest(folder)[:16] for folder in folders)


def read_all(plan: Plan, runs: Path) -> dict[Cell, Result | None]:
    """Reads every cell of a plan with its result."""
    return {cell: read_cell(plan, cell, runs) for cell in cells(plan)}


def read_record(plan: Plan, file: Path) -> dict[Cell, Result | None]:
    """Reads the cells of a plan from NAME.json, as `collect` kept them.

    Raises:
      ConfigError: it is not a record, or one of another plan.
    """
    try:
        found = json.loads(file.read_text())
        fields = {name: list(before) for name, before in found["fields"].items()}
        kept = {
            cell["cell"]: Result(
                done=cell["done"],
                iterations=cell["iterations"],
                curve=[float(value) for value in cell["curve"]],
                numbers={name: (float(mean), std) for name, (mean, std) in cell["numbers"].items()},
                seconds=cell["seconds"],
                changed=tuple(cell.get("changed", ())),
                start=str(cell.get("start", "")),
            )
            for cell in found["cells"]
        }
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise ConfigError(f"{file}: is not a record of runs; give the .json that `collect` wrote") from None
    known = cells(plan)
    if kept and not any(cell.name in kept for cell in known):
        raise ConfigError(f"{file}: is a record of another plan, {found.get('title')!r:.100}; this is {plan.title!r}")

    def of_this_plan(cell: Cell, result: Result) -> Result:
        changed = changed_fields(fields[f"{cell.setting}/{cell.method}"], overrides(plan, cell)[:-1])
        numbers = result.numbers
        if any("iterations=" in field for field in changed):
            numbers = {name: number for name, number in numbers.items() if not name.startswith("train/")}
        return dataclasses.replace(result, numbers=numbers, changed=tuple(dict.fromkeys([*result.changed, *changed])))

    return {cell: of_this_plan(cell, kept[cell.name]) if cell.name in kept else None for cell in known}


def changed_fields(before: list[str], now: list[str]) -> list[str]:
    """Compares two lists of `field=value`, in which later entries count; paths and sizes are left out.

    Returns: the first list's `field=value` where they differ, and `without field=value` for fields that only the second has.
    """
    old, new = (dict(field.split("=", 1) for field in fields) for fields in (before, now))
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name) and not name.startswith(PLACES))
    return [f"{name}={old[name]}" if name in old else f"without {name}={new[name]}" for name in names]


def spread(values: list[float]) -> float | None:
    """Computes the sample standard deviation; None for one value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def paired(ours: dict[Any, float], theirs: dict[Any, float]) -> dict | None:
    """Computes the difference ours - theirs over the seeds, or other keys, that both have; None with fewer than two of them.

    Returns: n; mean; error, the standard error; interval, 95 % by Student's t; positive and negative, the numbers of seeds that
    favour either side; p, the two-sided t-test.
    """
    d = np.array([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])
    if len(d) < 2:
        return None
    mean, error = float(d.mean()), float(d.std(ddof=1) / math.sqrt(len(d)))
    half = float(special.stdtrit(len(d) - 1, 0.975)) * error
    p = float(2 * special.stdtr(len(d) - 1, -abs(mean) / error)) if error else float(mean == 0)
    return {
        "n": len(d),
        "mean": mean,
        "error": error,
        "interval": [mean - half, mean + half],
        "positive": int((d > 0).sum()),
        "negative": int((d < 0).sum()),
        "p": p,
    }


def detectable(pairs: int, std: float) -> float:
    """Returns the smallest mean difference that a two-sided t-test at 5 % with these pairs finds in four of five repetitions.

    std: of the differences. From the noncentral t distribution; the chance of an answer of the wrong sign is left out.
    """
    found_from = special.stdtrit(pairs - 1, 0.975)
    return float(special.nctdtrinc(pairs - 1, 0.2, found_from)) * std / math.sqrt(pairs)


def pairs_for(difference: float, std: float) -> int:
    """Returns the number of pairs that make a difference `detectable`."""
    pairs = 2
    while detectable(pairs, std) > difference:
        pairs += 1
    return pairs
