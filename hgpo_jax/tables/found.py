"""Everything that is known of a plan's runs: from their folders, from what `collect` kept of them, or from both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from hgpo_jax.errors import ConfigError
from hgpo_jax.tables import bias, gradients, results, truth
from hgpo_jax.tables.in_runs import Kind, of_plan, when
from hgpo_jax.tables.plan import Cell, Plan
from hgpo_jax.tables.results import Result

MEASURED = (truth.KIND, gradients.KIND)


class Found(NamedTuple):
    """results: of every cell, None where its run has not begun. bias: see `bias.read_bias`. measured: in single runs."""

    results: dict[Cell, Result | None]
    bias: dict[str, list[dict]]
    measured: dict[Kind, list]


def in_runs(plan: Plan, runs: Path) -> Found:
    """What the run folders hold. Raises ConfigError for a damaged file."""
    measured = {kind: of_plan(plan, kind.read(runs)) for kind in MEASURED}
    return Found(results.read_all(plan, runs), bias.read_bias(runs), measured)


def in_record(plan: Plan, file: Path) -> Found:
    """What `collect` kept of a plan's cells in NAME.json. Raises ConfigError."""
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; give the .json that `collect` wrote")
    kept = results.read_record(plan, file)
    measured = {kind: kind.read_record(plan, file) for kind in MEASURED}
    try:
        return Found(kept, bias.checked(json.loads(file.read_text()).get("bias", {})), measured)
    except ValueError:
        raise ConfigError(f"{file}: is not a record of runs; give the .json that `collect` wrote") from None


def merged(here: Found, there: Found) -> Found:
    """Both; where both have something, `here` counts, unless its run has not ended and the other has."""

    def of_cell(cell: Cell) -> Result | None:
        ours, theirs = here.results[cell], there.results[cell]
        return theirs if theirs and (not ours or theirs.done > ours.done) else ours

    settings = dict.fromkeys([*here.bias, *there.bias])
    return Found(
        {cell: of_cell(cell) for cell in here.results},
        {name: _united(here.bias.get(name, []), there.bias.get(name, []), lambda one: one["seed"]) for name in settings},
        {kind: _united(ours, there.measured[kind], _place) for kind, ours in here.measured.items()},
    )


def lost(old: Found, new: Found) -> list[str]:
    """Names of what `old` has and `new` has not."""
    return [name for name in _names(old) if name not in set(_names(new))]


def _names(found: Found) -> list[str]:
    return [
        *(cell.name for cell, result in found.results.items() if result and result.done),
        *(f"bias of {name} under seed {one['seed']}" for name, some in found.bias.items() for one in some),
        *(f"{kind.name} of {one.cell} {when(one.iteration)}" for kind, some in found.measured.items() for one in some),
    ]


def _place(one) -> tuple[str, int]:
    return one.cell, one.iteration


def _united(ours: list, theirs: list, key) -> list:
    known = {key(one) for one in ours}
    return [*ours, *(one for one in theirs if key(one) not in known)]
