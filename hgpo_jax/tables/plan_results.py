"""All results of a plan's runs: from their folders, and from records, a NAME.json each, of runs that may be gone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pydantic

from hgpo_jax.tables import advantage_errors
from hgpo_jax.tables.advantage_errors_in_runs import Measured
from hgpo_jax.tables.compare import Row
from hgpo_jax.tables.gradients import Directions
from hgpo_jax.tables.plan import Cell, Plan, cells, overrides
from hgpo_jax.tables.run_measurements import InRun, moment, of_plan
from hgpo_jax.tables.run_results import Result, Results, changed_fields, read_all
from hgpo_jax.utils.errors import ConfigError

DIGITS = 6  # after the point, of a record's numbers; `compare.EQUAL` is more than they lose
MEASURED: tuple[type[InRun], ...] = (Measured, Directions)


class AllResults(NamedTuple):
    """cells: each with its result, None if its run has not begun. bias: by setting. measured: in single runs."""

    cells: Results
    bias: advantage_errors.BySetting
    measured: dict[type[InRun], list]


def read_runs(plan: Plan, runs: Path) -> AllResults:
    """Reads the run folders. Raises ConfigError for a damaged file."""
    measured = {kind: of_plan(plan, kind.read(runs)) for kind in MEASURED}
    return AllResults(read_all(plan, runs), advantage_errors.read_bias(runs), measured)


def read_record(plan: Plan, file: Path) -> AllResults:
    """Reads a plan's cells from a record. Raises ConfigError if it is none, or one of another plan."""
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; give the .json that `collect` wrote")
    try:
        record = json.loads(file.read_text())
        before = {name: list(fields) for name, fields in record["fields"].items()}
        by_name = {cell.pop("cell"): Result.model_validate(cell) for cell in record["cells"]}
        of_settings = pydantic.TypeAdapter(advantage_errors.BySetting).validate_python(record.get("bias", {}))
        measured = {kind: [kind.model_validate(one) for one in record.get(kind.name, [])] for kind in MEASURED}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise ConfigError(f"{file}: is not a record of runs, or an old one; give the .json that `collect` wrote") from None
    plan_cells = cells(plan)
    if by_name and not any(cell.name in by_name for cell in plan_cells):
        raise ConfigError(f"{file}: is a record of another plan, {record.get('title')!r:.100}; this is {plan.title!r}")

    def of_this_plan(cell: Cell, result: Result) -> Result:
        changed = changed_fields(before[f"{cell.setting}/{cell.method}"], overrides(plan, cell)[:-1])
        other_length = any("iterations=" in field for field in changed)
        numbers = {name: n for name, n in result.numbers.items() if not (other_length and name.startswith("train/"))}
        return result.model_copy(update={"numbers": numbers, "changed": tuple(dict.fromkeys([*result.changed, *changed]))})

    of_cells = {cell: of_this_plan(cell, by_name[cell.name]) if cell.name in by_name else None for cell in plan_cells}
    return AllResults(of_cells, of_settings, {kind: of_plan(plan, some) for kind, some in measured.items()})


def merge(here: AllResults, there: AllResults) -> AllResults:
    """Merges both; of equal entries `here` counts, unless `there` is of a run that ended and was not shorter."""

    def of_cell(ours: Result | None, theirs: Result | None) -> Result | None:
        if ours and theirs and ours.done == theirs.done and ours.iterations == theirs.iterations:
            return ours.model_copy(update={"numbers": theirs.numbers | ours.numbers})
        if ours and theirs:
            return theirs if theirs.done > ours.done and theirs.iterations >= ours.iterations else ours
        return ours or theirs

    def unite(ours: list, theirs: list, place: Callable) -> list:
        places = {place(one) for one in ours}
        return [*ours, *(one for one in theirs if place(one) not in places)]

    settings = dict.fromkeys([*here.bias, *there.bias])
    return AllResults(
        {cell: of_cell(ours, there.cells[cell]) for cell, ours in here.cells.items()},
        {name: unite(here.bias.get(name, []), there.bias.get(name, []), lambda one: one.seed) for name in settings},
        {k: unite(ours, there.measured[k], lambda one: (one.cell, one.iteration)) for k, ours in here.measured.items()},
    )


def record_text(plan: Plan, results: AllResults, rows: list[Row]) -> str:
    """Writes a record: one line per cell, with its curve, and one line per paired difference.

    fields: those of each setting and method, to distinguish a later plan from this one.
    """
    lines = []
    for cell, result in results.cells.items():
        if result:
            short = {
                "seconds": round(result.seconds, 1),
                "numbers": {
                    name: (round(m, DIGITS), s if s is None else round(s, DIGITS)) for name, (m, s) in result.numbers.items()
                },
                "curve": [value if value is None else round(value, 4) for value in result.curve],
            }
            lines.append({"cell": cell.name} | result.model_copy(update=short).model_dump(exclude_defaults=True))
    names = ("table", "setting", "method", "column")
    paired = [{name: getattr(row, name) for name in names} | row.versus._asdict() for row in rows if row.versus]
    for pair in paired:  # JSON has no infinity
        pair["interval"] = [end if math.isfinite(end) else None for end in pair["interval"]]
    one_a_line = lambda items: "[\n  " + ",\n  ".join(map(json.dumps, items)) + "\n ]" if items else "[]"  # noqa: E731
    parts = {
        "title": json.dumps(plan.title),
        "fields": json.dumps({f"{c.setting}/{c.method}": overrides(plan, c)[:-1] for c in results.cells}),  # without the seed
        "cells": one_a_line(lines),
        "missing": json.dumps([cell.name for cell, result in results.cells.items() if not result]),
        "paired": one_a_line(paired),
        "bias": json.dumps(advantage_errors.as_dicts(results.bias)),
    } | {kind.name: one_a_line([one.model_dump(by_alias=True) for one in some]) for kind, some in results.measured.items()}
    return "{" + ",\n ".join(f'"{name}": {text}' for name, text in parts.items()) + "}\n"


def lost_results(old: str, new: str) -> list[str]:
    """Lists results in the text of one record that are missing from another: ended runs and measurements.

    A run's are missing, too, where it is shorter there, or as long without all of its numbers.

    A text that is not a record has no results to lose.
    """
    try:
        before, after = _extent(json.loads(old), ended=True), _extent(json.loads(new), ended=False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    lost = []
    for name, (iterations, numbers) in before.items():
        others, kept = after.get(name, (-1, set()))
        if others < iterations or (others == iterations and not numbers <= kept):
            lost.append(name)
    return lost


def _extent(record: dict, ended: bool) -> dict[str, tuple[int, set[str]]]:
    """Returns name -> iterations and names of numbers of everything in a record, whatever its plan has become.

    ended: only runs that have ended.
    """
    nothing: tuple[int, set[str]] = 0, set()
    extent = {cell["cell"]: (cell["iterations"], set(cell["numbers"])) for cell in record["cells"] if cell["done"] or not ended}
    extent |= {f"bias of {name} under seed {m['seed']}": nothing for name, some in record.get("bias", {}).items() for m in some}
    return extent | {
        f"{kind.name} of {one['cell']} {moment(one['iteration'])}": nothing
        for kind in MEASURED
        for one in record.get(kind.name, [])
    }
