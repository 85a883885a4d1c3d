"""The numbers of a plan's tables, and their differences to a table's baseline, paired by seed."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from hgpo_jax.tables.plan import Cell, Plan, Table, cells_of
from hgpo_jax.tables.run_results import Results

EQUAL = 2.5e-3  # below it, differences of percent points are rounding: before 0.14.0, records had three digits
CHANCE = 0.05  # probability that a 95 % interval excludes 0 without any effect
FEWEST = 3  # pairs of a difference that is drawn and counted: the interval of two would hide the others


class Paired(NamedTuple):
    """A paired difference. error: the standard error. interval: 95 % by Student's t. positive, negative: numbers of pairs that
    favour either side. p: of the two-sided t-test."""

    n: int
    mean: float
    error: float
    interval: tuple[float, float]
    positive: int
    negative: int
    p: float


@dataclasses.dataclass(frozen=True)
class Row:
    """A number of a method in a setting, over the seeds of a table that have it.

    mean and std in percent; std over training seeds, for a single one over its evaluation seeds. published: mean and std.
    baseline: the table's. versus: `paired_difference` to it.
    """

    table: str
    setting: str
    method: str
    column: str
    wanted: int
    done: int
    begun: int
    n: int
    mean: float | None
    std: float | None
    published: tuple[float, float | None] | None
    baseline: str | None
    versus: Paired | None

    @property
    def difference(self) -> float | None:
        return None if self.mean is None or not self.published else self.mean - self.published[0]

    @property
    def leaves_out_zero(self) -> bool:
        """Whether the interval of the paired difference excludes 0."""
        return self.versus is not None and (self.versus.interval[0] > 0 or self.versus.interval[1] < 0)


def table_rows(plan: Plan, results: Results) -> list[Row]:
    """Returns every number of every table, in order of appearance."""
    apart = set(unlike(plan, results))
    return [
        row
        for table in plan.tables
        for setting, method in itertools.product(table.settings, table.methods)
        for row in _rows(plan, table, setting, method, results, apart)
    ]


def _rows(plan: Plan, table: Table, setting: str, method: str, results: Results, apart: set) -> Iterator[Row]:
    cells = cells_of(plan, table, setting, method)
    base = cells_of(plan, table, setting, table.baseline) if table.baseline not in (None, method) else []
    base = [theirs for ours, theirs in zip(cells, base, strict=False) if (ours, theirs) not in apart]
    ended = [result.done for cell in cells if (result := results[cell])]
    published = plan.published.numbers.get(setting, {}).get(method, {}) if plan.published else {}
    for column, number in plan.settings[setting].columns.items():
        have, others = by_run(cells, number, results), by_run(base, number, results)
        means = {at: mean for at, (mean, _) in have.items()}
        pairs = have.keys() & others.keys()
        few = any(sum(at[0] == member for at in pairs) < 2 for member in plan.settings[setting].pools)
        yield Row(
            table=table.title,
            setting=setting,
            method=method,
            column=column,
            wanted=len(cells),
            done=sum(ended),
            begun=len(ended) - sum(ended),
            n=len(have),
            mean=float(np.mean(list(means.values()))) if have else None,
            std=float(np.std(list(means.values()), ddof=1)) if len(have) > 1 else next((s for _, s in have.values()), None),
            published=published.get(column),
            baseline=table.baseline,
            versus=None if few else paired_difference(means, {at: mean for at, (mean, _) in others.items()}),
        )


def by_run(cells: list[Cell], number: str, results: Results) -> dict[tuple[str, int], tuple]:
    """Returns (setting, seed) -> (mean, std) of a number, for the cells that have ended."""
    ended = {(cell.setting, cell.seed): results.get(cell) for cell in cells}
    return {at: r.numbers[number] for at, r in ended.items() if r and r.done and number in r.numbers}


def unlike(plan: Plan, results: Results) -> list[tuple[Cell, Cell]]:
    """Returns pairs of cells that a table would compare, but whose runs began with different weights or differ from the plan in
    different ways."""
    pairs: dict[tuple[Cell, Cell], None] = {}
    for table in plan.tables:
        for setting, method in itertools.product(table.settings, table.methods if table.baseline else ()):
            sides = (cells_of(plan, table, setting, name) for name in (method, table.baseline or ""))
            for pair in zip(*sides, strict=True):
                both = [result for cell in pair if (result := results.get(cell))]
                starts = {result.start for result in both if result.start}
                if len(starts) > 1 or len({frozenset(result.changed) for result in both}) > 1:
                    pairs[pair] = None
    return list(pairs)


def select_comparisons(plan: Plan, rows: list[Row]) -> list[Row]:
    """Selects the rows whose paired differences count: with at least FEWEST pairs, of no pool, whose pairs its settings already
    have, and of comparisons in several tables the one with the most pairs."""
    widest: dict[tuple, tuple[int, Row]] = {}
    for row in rows:
        if row.versus and row.versus.n >= FEWEST and not plan.settings[row.setting].pools:
            what = row.setting, row.column, row.method, row.baseline
            if what not in widest or row.versus.n > widest[what][0]:
                widest[what] = row.versus.n, row
    return [row for _, row in widest.values()]


def paired_difference(ours: dict[Any, float], theirs: dict[Any, float]) -> Paired | None:
    """Computes the difference ours - theirs over the seeds, or other keys, that both have; None with fewer than two of them.

    Equal differences, as numbers of few tasks may have by chance, say nothing of their spread: the interval then holds every
    number, and p is 1. Those that only rounding tells apart are equal.
    """
    d = np.array([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])
    d = np.where(np.abs(d) < EQUAL, 0.0, d)
    if len(d) < 2:
        return None
    mean, error = float(d.mean()), float(d.std(ddof=1) / math.sqrt(len(d)))
    if np.ptp(d) < EQUAL:
        error = 0.0
    half = float(special.stdtrit(len(d) - 1, 0.975)) * error
    p = float(2 * special.stdtr(len(d) - 1, -abs(mean) / error)) if error else 1.0
    if not error and mean:
        half = math.inf
    return Paired(len(d), mean, error, (mean - half, mean + half), int((d > 0).sum()), int((d < 0).sum()), p)


def detectable(pairs: int, std: float) -> float:
    """Returns the smallest mean difference that a two-sided t-test at 5 % with these pairs finds in four of five repetitions.

    std: of the differences. From the noncentral t distribution; the chance of an answer of the wrong sign is left out.
    """
    found_from = special.stdtrit(pairs - 1, 0.975)
    return float(special.nctdtrinc(pairs - 1, 0.2, found_from)) * std / math.sqrt(pairs)


def pairs_for(difference: float, std: float) -> int:
    """Returns the number of pairs that make a difference `detectable`."""
    return next(pairs for pairs in itertools.count(2) if detectable(pairs, std) <= difference)
