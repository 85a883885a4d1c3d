"""Fills a plan's tables with the results of runs, beside published numbers: Markdown, CSV, LaTeX, JSON and curves."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hgpo_jax.tables.bias import bias_table, of_plan, truth_table
from hgpo_jax.tables.curves import CHANCE, FEWEST, distinct, draw, leaves_out_zero
from hgpo_jax.tables.plan import Cell, Plan, cells_of, overrides
from hgpo_jax.tables.records import Known, lost, merged, read_record, read_runs
from hgpo_jax.tables.results import Result, detectable, paired, pairs_for, spread
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.files import atomic_write

Results = dict[Cell, Result | None]


@dataclasses.dataclass(frozen=True)
class Row:
    """A number of a method in a setting, over the seeds of a table that have it.

    mean and std in percent; std over training seeds, for a single one over its evaluation seeds. published: mean and std.
    versus: `results.paired` with the table's baseline.
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
    versus: dict | None

    @property
    def difference(self) -> float | None:
        return None if self.mean is None or not self.published else self.mean - self.published[0]


def by_run(cells: list[Cell], number: str, found: Results) -> dict[tuple[str, int], tuple]:
    """Returns (setting, seed) -> (mean, std) of a number, for the cells that have ended."""
    ended = {(cell.setting, cell.seed): found.get(cell) for cell in cells}
    return {at: r.numbers[number] for at, r in ended.items() if r and r.done and number in r.numbers}


def rows(plan: Plan, found: Results) -> list[Row]:
    """Returns every number of every table, in order of appearance."""
    made, apart = [], set(unlike(plan, found))
    for table in plan.tables:
        for setting in table.settings:
            for method in table.methods:
                mine = cells_of(plan, table, setting, method)
                base = cells_of(plan, table, setting, table.baseline) if table.baseline not in (None, method) else []
                base = [theirs for ours, theirs in zip(mine, base, strict=False) if (ours, theirs) not in apart]
                results = [found[cell] for cell in mine]
                done = sum(r is not None and r.done for r in results)
                for column, number in plan.settings[setting].columns.items():
                    have = by_run(mine, number, found)
                    means = {at: mean for at, (mean, _) in have.items()}
                    std = spread(list(means.values())) if len(means) > 1 else next((s for _, s in have.values()), None)
                    others = {at: mean for at, (mean, _) in by_run(base, number, found).items()}
                    pairs = means.keys() & others.keys()
                    few = any(sum(at[0] == member for at in pairs) < 2 for member in plan.settings[setting].pools)
                    published = plan.published.numbers.get(setting, {}).get(method, {}) if plan.published else {}
                    made.append(
                        Row(
                            table=table.title,
                            setting=setting,
                            method=method,
                            column=column,
                            wanted=len(results),
                            done=done,
                            begun=sum(r is not None and not r.done for r in results),
                            n=len(means),
                            mean=float(np.mean(list(means.values()))) if means else None,
                            std=std,
                            published=published.get(column),
                            versus=None if few else paired(means, others),
                        )
                    )
    return made


def _pair(mean: float | None, std: float | None) -> str:
    return "-" if mean is None else f"{mean:.1f}" + ("" if std is None else f" ± {std:.1f}")


def _published(numbers: tuple[float, float | None] | None) -> str:
    """Formats published numbers with all their digits."""
    return " ± ".join(f"{x:g}" for x in numbers or () if x is not None)


def _state(row: Row) -> str:
    if not row.done and not row.begun:
        return "missing"
    return f"{row.done} of {row.wanted}" + (f", {row.begun} begun" if row.begun else "")


def _versus(versus: dict | None) -> str:
    if not versus:
        return ""
    low, high = versus["interval"]
    return f"{versus['mean']:+.1f} ± {versus['error']:.1f} ({low:+.1f} to {high:+.1f}), {versus['positive']} of {versus['n']}"


def layout(plan: Plan, made: list[Row]) -> list[tuple[str, str, list[list[str]]]]:
    """Returns (title of the table, title of the setting, lines of cells with the heading first), for Markdown and LaTeX."""
    parts = []
    for table in plan.tables:
        for setting in table.settings:
            mine = [row for row in made if (row.table, row.setting) == (table.title, setting)]
            columns = list(plan.settings[setting].columns)
            compared = any(row.published for row in mine)
            heading = ["method", "runs"]
            for column in columns:
                heading += [column, *(["published", "difference"] if compared else [])]
                heading += [f"minus {plan.methods[table.baseline].title}"] if table.baseline else []
            lines = [heading]
            for method in table.methods:
                line = [plan.methods[method].title]
                for row in (row for row in mine if row.method == method):
                    line += [_state(row)] if len(line) == 1 else []
                    line.append(_pair(row.mean, row.std))
                    if compared:
                        difference = "" if row.difference is None else f"{row.difference:+.1f}"
                        line += [_published(row.published), difference]
                    line += [_versus(row.versus)] if table.baseline else []
                lines.append(line)
            parts.append((table.title, plan.settings[setting].title, lines))
    return parts


def outside(plan: Plan, made: list[Row]) -> list[str]:
    """Lists the paired differences outside the noise, and the number expected without any effect."""
    compared = distinct(plan, made)
    if not compared:
        return []
    found = list(filter(leaves_out_zero, compared))
    text = [
        "",
        "## Outside the noise",
        "",
        f"The 95 % interval leaves out 0 in {len(found)} of {len(compared)} different comparisons of {FEWEST} pairs or more. "
        f"Without any effect about {CHANCE * len(compared):.1f} would be expected, in clusters, because a run's numbers are "
        "correlated.",
    ]
    text += [""] if found else []
    baselines = {table.title: table.baseline for table in plan.tables if table.baseline}
    for row in found:
        assert row.versus
        pair = f"{plan.methods[row.method].title} minus {plan.methods[baselines[row.table]].title}"
        numbers = f"{_versus(row.versus)}, p = {row.versus['p']:.2g}"
        text.append(f"* {row.table}, {plan.settings[row.setting].title}: {pair}, {row.column} {numbers}")
    return text


def unlike(plan: Plan, found: Results) -> list[tuple[Cell, Cell]]:
    """Returns pairs of cells that a table would compare, but whose runs began with different weights or differ from the plan in
    different ways."""
    pairs: dict[tuple[Cell, Cell], None] = {}
    for table in plan.tables:
        for setting, method in itertools.product(table.settings, table.methods if table.baseline else ()):
            sides = (cells_of(plan, table, setting, name) for name in (method, table.baseline or ""))
            for pair in zip(*sides, strict=True):
                both = [result for cell in pair if (result := found.get(cell))]
                starts = {result.start for result in both if result.start}
                if len(starts) > 1 or len({frozenset(result.changed) for result in both}) > 1:
                    pairs[pair] = None
    return list(pairs)


POINTS = 2.0  # a difference worth knowing of
FEW = 6  # pairs


def power(plan: Plan, made: list[Row]) -> list[str]:
    """Estimates the differences that each setting's first number can show, and the number of pairs that would show `POINTS`."""
    lines, baselines = [], {table.title: table.baseline for table in plan.tables if table.baseline}
    for row in made:
        if row.versus and row.versus["n"] >= FEW and row.column == next(iter(plan.settings[row.setting].columns)):
            pairs, std = row.versus["n"], row.versus["error"] * math.sqrt(row.versus["n"])
            pair = f"{plan.methods[row.method].title} minus {plan.methods[baselines[row.table]].title}"
            wanted = [f"{pairs}", f"{std:.1f}", f"{detectable(pairs, std):.1f}", f"{pairs_for(POINTS, std)}"]
            cells = [row.table, plan.settings[row.setting].title, f"{pair}, {row.column}", *wanted]
            lines.append("| " + " | ".join(cells) + " |")
    if not lines:
        return []
    note = "The smallest true difference that a t-test at 5 % finds in four of five repetitions, if pairs spread as these do. "
    note += f"Fewer than {FEW} pairs are left out: they do not say how pairs spread."
    heading = f"| table | setting | difference | pairs | their std | smallest found | pairs for {POINTS:g} points |"
    return ["", "## What more seeds would show", "", note, "", heading, "|---|---|---|---|---|---|---|", *lines]


def gains(plan: Plan, made: list[Row]) -> tuple[str, dict[str, str]]:
    """Returns a column for the table of Oracle bias: title, and by setting the first paired difference."""
    for table in plan.tables:
        rows = [row for row in made if row.table == table.title and row.versus]
        if rows and table.baseline:
            method = rows[0].method
            title = f"{plan.methods[method].title} minus {plan.methods[table.baseline].title}, {rows[0].column}"
            first = [row for row in rows if (row.method, row.column) == (method, rows[0].column)]
            return title, {row.setting: _versus(row.versus) for row in first}
    return "", {}


def markdown(plan: Plan, known: Known, made: list[Row]) -> str:
    """Formats all tables, the differences outside the noise, then the other measurements."""
    found, bias, measured = known
    note = "Percent; mean ± standard deviation over the runs that have ended, for a single one over its evaluation seeds."
    if any(table.baseline for table in plan.tables):
        note += " Differences (points) are paired by seed: mean ± standard error (95 % interval by Student's t), pairs above 0."
    if any(setting.pools for setting in plan.settings.values()):
        note += " Where settings are pooled each pair weighs the same, and what is found holds for these settings."
    text = [f"# {plan.title}", "", note]
    if plan.published:
        text += ["", f"Published: {plan.published.source}"]
    last = None
    for title, setting, lines in layout(plan, made):
        text += ["", f"## {title}"] if title != last else []
        text += ["", f"### {setting}", ""]
        last = title
        text += ["| " + " | ".join(line) + " |" for line in lines]
        text.insert(-len(lines) + 1, "|" + "---|" * len(lines[0]))
    text += outside(plan, made)
    text += power(plan, made)
    if any(of_plan(plan, setting, bias) for setting in plan.settings):
        note = "HGPO's advantages against the Oracle groups': squared bias and variance in shares of the returns' variance."
        text += ["", "## Oracle bias at the warm start", "", note, "", *bias_table(plan, bias, *gains(plan, made))]
        note = "Cosine to the true advantages of an iteration's steps; mean square of the difference as a share of theirs. "
        note += "Below, the mean square of the difference to Oracle groups as a share of the returns' variance: these compare "
        note += "Monte Carlo returns and favour estimators that do; bootstrapped ones they do not rank. One policy, one batch."
        text += ["", "## Against true advantages at the warm start", "", note, "", *truth_table(plan, bias)]
    for kind, some in measured.items():
        text += ["", f"## {kind.title}", "", kind.note, "", *kind.lines(some)] if some else []
    changed = [f"* {cell.name}: {', '.join(r.changed)}" for cell, r in found.items() if r and r.changed]
    if changed:
        text += ["", "## Runs with other settings than the plan's", "", *changed]
    if apart := unlike(plan, found):
        title = "## Pairs left out, which did not start from equal weights or had not the same settings"
        text += ["", title, "", *(f"* {a.name}, {b.name}" for a, b in apart)]
    return "\n".join(text) + "\n"


SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "$": r"\$",
    "{": r"\{",
    "}": r"\}",
    "&": r"\&",
    "%": r"\%",
    "_": r"\_",
    "#": r"\#",
    "±": r"$\pm$",
    "²": "$^2$",
    "α": r"$\alpha$",
}


def latex(plan: Plan, made: list[Row]) -> str:
    """Formats the tables as `tabular`s that need no package."""
    escape = lambda text: "".join(SPECIAL.get(letter, letter) for letter in text)  # noqa: E731
    source = f"; published: {' '.join(plan.published.source.split())}" if plan.published else ""
    text = [f"% {plan.title}{source}"]
    for title, setting, (heading, *lines) in layout(plan, made):
        text += ["", f"% {title}: {setting}", rf"\begin{{tabular}}{{ll{'r' * (len(heading) - 2)}}}", r"\hline"]
        text += [" & ".join(map(escape, heading)) + r" \\", r"\hline"]
        text += [" & ".join(map(escape, line)) + r" \\" for line in lines]
        text += [r"\hline", r"\end{tabular}"]
    return "\n".join(text) + "\n"


def table_csv(made: list[Row]) -> str:
    """Formats one line per number."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    versus = ("mean", "error", "low", "high", "n", "positive", "negative", "p")
    writer.writerow(
        [
            "table",
            "setting",
            "method",
            "column",
            "wanted",
            "done",
            "begun",
            "n",
            "mean",
            "std",
            "published",
            "published_std",
            "difference",
            *(f"paired_{name}" for name in versus),
        ]
    )
    shown = lambda value: "" if value is None else f"{value:.4f}" if isinstance(value, float) else value  # noqa: E731
    exact = lambda name, value: f"{value:.4g}" if name == "p" else value  # noqa: E731
    for row in made:
        v = row.versus and row.versus | dict(zip(("low", "high"), row.versus["interval"], strict=True))
        writer.writerow(
            map(
                shown,
                [
                    row.table,
                    row.setting,
                    row.method,
                    row.column,
                    row.wanted,
                    row.done,
                    row.begun,
                    row.n,
                    row.mean,
                    row.std,
                    *(row.published or (None, None)),
                    row.difference,
                    *(exact(name, v[name]) if v else None for name in versus),
                ],
            )
        )
    return out.getvalue()


def record(plan: Plan, known: Known, made: list[Row]) -> str:
    """Writes all results as JSON, to be kept: one line per cell, with its curve, and one line per paired difference.

    fields: those of each setting and method, to distinguish a later plan from this one. `known.read_record` reads it.
    """
    cells, (found, bias, measured) = [], known
    for cell, result in found.items():
        if result:
            numbers = {name: [round(m, 3), s if s is None else round(s, 3)] for name, (m, s) in result.numbers.items()}
            curve = [round(value, 4) for value in result.curve]
            cells.append(
                {
                    "cell": cell.name,
                    "done": result.done,
                    "iterations": result.iterations,
                    "seconds": round(result.seconds, 1),
                    "numbers": numbers,
                    "curve": curve,
                }
                | {name: value for name, value in (("changed", result.changed), ("start", result.start)) if value}
            )
    differences = [
        {"table": r.table, "setting": r.setting, "method": r.method, "column": r.column} | r.versus for r in made if r.versus
    ]
    one_a_line = lambda items: "[\n  " + ",\n  ".join(map(json.dumps, items)) + "\n ]" if items else "[]"  # noqa: E731
    missing = [cell.name for cell, result in found.items() if not result]
    fields = {cell.name.rpartition("/")[0]: overrides(plan, cell)[:-1] for cell in found}  # without the seed
    kept = "".join(f',\n "{kind.name}": {one_a_line([one._asdict() for one in some])}' for kind, some in measured.items())
    return (
        f'{{"title": {json.dumps(plan.title)},\n "fields": {json.dumps(fields)},\n'
        f' "cells": {one_a_line(cells)},\n "missing": {json.dumps(missing)},\n'
        f' "paired": {one_a_line(differences)},\n "bias": {json.dumps(bias)}{kept}}}\n'
    )


def collect(plan: Plan, name: str, runs: Path, to: Path, records: Sequence[Path] = ()) -> str:
    """Reads RUNS and writes NAME.md, .csv, .tex, .json and the pictures; returns the Markdown.

    records: a NAME.json each of runs that may be gone, such as those of another machine; it fills gaps in RUNS.

    Raises:
      ConfigError: damaged files; or overwriting a NAME.json would lose results.
    """
    known = functools.reduce(merged, (read_record(plan, file) for file in records), read_runs(plan, runs))
    made = rows(plan, known.cells)
    text = markdown(plan, known, made)
    kept = record(plan, known, made)
    old = to / f"{name}.json"
    if old.is_file() and (missing := lost(old.read_text(), kept)):
        mend = f"add --record {old} to keep what the plan has, or move the file away"
        raise ConfigError(f"{old}: {len(missing)} results would be lost, as {missing[0]}; {mend}")
    to.mkdir(parents=True, exist_ok=True)
    for suffix, content in ((".md", text), (".csv", table_csv(made)), (".tex", latex(plan, made)), (".json", kept)):
        with atomic_write(to / f"{name}{suffix}") as file:
            file.write(content)
    draw(plan, known.cells, made, known.measured, name, to)
    return text
