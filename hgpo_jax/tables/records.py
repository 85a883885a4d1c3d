"""All results of a plan's runs: from their folders, and from records that `collect` kept of runs that may be gone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hgpo_jax.tables import bias, gradients, results, truth
from hgpo_jax.tables.in_runs import Kind, of_plan, when
from hgpo_jax.tables.plan import Cell, Plan
from hgpo_jax.tables.results import Result
from hgpo_jax.utils.errors import ConfigError

MEASURED = (truth.KIND, gradients.KIND)


class Known(NamedTuple):
    """cells: each with its result, None if its run has not begun. bias: see `bias.read_bias`. measured: in single runs."""

    cells: dict[Cell, Result | None]
    bias: dict[str, list[dict]]
    measured: dict[Kind, list]


def read_runs(plan: Plan, runs: Path) -> Known:
    """Reads the run folders. Raises ConfigError for a damaged file."""
    measured = {kind: of_plan(plan, kind.read(runs)) for kind in MEASURED}
    return Known(results.read_all(plan, runs), bias.read_bias(runs), measured)


def read_record(plan: Plan, file: Path) -> Known:
    """Reads a plan's cells from NAME.json, as `collect` kept them. Raises ConfigError."""
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; give the .json that `collect` wrote")
    cells = results.read_record(plan, file)
    measured = {kind: kind.read_record(plan, file) for kind in MEASURED}
    try:
        return Known(cells, bias.checked(json.loads(file.read_text()).get("bias", {})), measured)
    except ValueError:
        raise ConfigError(f'{file}: its "bias" is not what `tables bias` measures now; put {{}} in its place') from None


def merged(here: Known, there: Known) -> Known:
    """Merges both; of equal entries `here` counts, unless `there` is of a run that ended and was not shorter."""

    def of_cell(cell: Cell) -> Result | None:
        ours, theirs = here.cells[cell], there.cells[cell]
        if ours and theirs:
            return theirs if theirs.done > ours.done and theirs.iterations >= ours.iterations else ours
        return ours or theirs

    def united(ours: list, theirs: list, place: Callable) -> list:
        places = {place(one) for one in ours}
        return [*ours, *(one for one in theirs if place(one) not in places)]

    settings = dict.fromkeys([*here.bias, *there.bias])
    return Known(
        {cell: of_cell(cell) for cell in here.cells},
        {name: united(here.bias.get(name, []), there.bias.get(name, []), lambda one: one["seed"]) for name in settings},
        {
            kind: united(ours, there.measured[kind], lambda one: (one.cell, one.iteration))
            for kind, ours in here.measured.items()
        },
    )


def lost(old: str, new: str) -> list[str]:
    """Lists results in the text of one record that are missing from, or shorter in, another: ended runs and measurements.

    A text that is not a record has no results to lose.
    """
    try:
        before, after = _extent(json.loads(old), ended=True), _extent(json.loads(new), ended=False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return [name for name, extent in before.items() if after.get(name, -1) < extent]


def _extent(record: dict, ended: bool) -> dict[str, int]:
    """Returns name -> iterations of everything in a record, whatever its plan has become. ended: only runs that have ended."""
    extent = {cell["cell"]: cell["iterations"] for cell in record["cells"] if cell["done"] or not ended}
    extent |= {f"bias of {name} under seed {m['seed']}": 0 for name, some in record.get("bias", {}).items() for m in some}
    return extent | {
        f"{kind.name} of {one['cell']} {when(one['iteration'])}": 0 for kind in MEASURED for one in record.get(kind.name, [])
    }
