"""A plan's tables as documents: Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import itertools
import math

from hgpo_jax.tables.advantage_errors import bias_table, of_plan, truth_table
from hgpo_jax.tables.compare import CHANCE, FEWEST, Row, detectable, pairs_for, select_comparisons, unlike
from hgpo_jax.tables.plan import Plan
from hgpo_jax.tables.plan_results import AllResults
from hgpo_jax.utils.markdown_table import table

POINTS = 2.0  # a difference worth knowing of
FEW = 6  # pairs


def _mean(row: Row) -> str:
    return "-" if row.mean is None else f"{row.mean:.1f}" + ("" if row.std is None else f" ± {row.std:.1f}")


def _state(row: Row) -> str:
    if not row.done and not row.begun:
        return "missing"
    return f"{row.done} of {row.wanted}" + (f", {row.begun} begun" if row.begun else "")


def _versus(row: Row) -> str:
    if not row.versus:
        return ""
    low, high = row.versus.interval
    if math.isinf(high):
        return f"{row.versus.mean:+.1f} in all {row.versus.n}"
    mean = f"{row.versus.mean:+.1f} ± {row.versus.error:.1f} ({low:+.1f} to {high:+.1f})"
    return f"{mean}, {row.versus.positive} of {row.versus.n}"


def _comparison(plan: Plan, row: Row) -> str:
    return f"{plan.methods[row.method].title} minus {plan.methods[row.baseline or ''].title}, {row.column}"


def layout(plan: Plan, rows: list[Row]) -> list[tuple[str, str, list[str], list[list[str]]]]:
    """Returns (title of the table, title of the setting, heading, lines), for Markdown and LaTeX."""
    parts = []
    for (title, name), group in itertools.groupby(rows, lambda row: (row.table, row.setting)):
        of_setting, setting, heading, lines = list(group), plan.settings[name], ["method", "runs"], []
        published = any(row.published for row in of_setting)
        for column in setting.columns:
            heading += [column, *(["published", "difference"] if published else [])]
            heading += [f"minus {plan.methods[of_setting[0].baseline].title}"] if of_setting[0].baseline else []
        for method, of_method in itertools.groupby(of_setting, lambda row: row.method):
            line = [plan.methods[method].title]
            for row in of_method:
                line += [_state(row)] if len(line) == 1 else []
                line.append(_mean(row))
                if published:  # with all its digits
                    line.append(" ± ".join(f"{x:g}" for x in row.published or () if x is not None))
                    line.append("" if row.difference is None else f"{row.difference:+.1f}")
                line += [_versus(row)] if row.baseline else []
            lines.append(line)
        parts.append((title, setting.title, heading, lines))
    return parts


def outside(plan: Plan, rows: list[Row]) -> list[str]:
    """Lists the paired differences outside the noise, and the number expected without any effect."""
    compared = select_comparisons(plan, rows)
    nonzero = [row for row in compared if row.leaves_out_zero]
    if not compared:
        return []
    note = (
        f"The 95 % interval leaves out 0 in {len(nonzero)} of {len(compared)} different comparisons of {FEWEST} pairs or more. "
        f"Without any effect about {CHANCE * len(compared):.1f} would be expected, in clusters, because a run's numbers are "
        "correlated."
    )
    text = ["", "## Outside the noise", "", note, *([""] if nonzero else [])]
    for row in nonzero:
        assert row.versus
        where = f"{row.table}, {plan.settings[row.setting].title}"
        text.append(f"* {where}: {_comparison(plan, row)} {_versus(row)}, p = {row.versus.p:.2g}")
    return text


def power(plan: Plan, rows: list[Row]) -> list[str]:
    """Estimates the differences that each setting's first number can show, and the number of pairs that would show `POINTS`."""
    lines = []
    for row in rows:
        setting = plan.settings[row.setting]
        if row.versus and row.versus.n >= FEW and row.column == next(iter(setting.columns)):
            pairs, std = row.versus.n, row.versus.error * math.sqrt(row.versus.n)
            numbers = [f"{pairs}", f"{std:.1f}", f"{detectable(pairs, std):.1f}", f"{pairs_for(POINTS, std)}"]
            lines.append([row.table, setting.title, _comparison(plan, row), *numbers])
    if not lines:
        return []
    note = "The smallest true difference that a t-test at 5 % finds in four of five repetitions, if pairs spread as these do. "
    note += f"Fewer than {FEW} pairs are left out: they do not say how pairs spread."
    heading = ["table", "setting", "difference", "pairs", "their std", "smallest found", f"pairs for {POINTS:g} points"]
    return ["", "## What more seeds would show", "", note, "", *table(heading, lines)]


def warm_starts(plan: Plan, results: AllResults, rows: list[Row]) -> list[str]:
    """Formats what `bias` measured, beside the first paired difference of each setting."""
    if not any(of_plan(plan, setting, results.bias) for setting in plan.settings):
        return []
    first = next((row for row in rows if row.versus), None)
    title = _comparison(plan, first) if first else ""
    same = [row for row in rows if first and (row.table, row.method, row.column) == (first.table, first.method, first.column)]
    gains = {row.setting: _versus(row) for row in same if row.versus}
    note = "HGPO's advantages against the Oracle groups': squared bias and variance in shares of the returns' variance."
    text = ["", "## Oracle bias at the warm start", "", note, "", *bias_table(plan, results.bias, title, gains)]
    note = "Cosine to the true advantages of an iteration's steps; mean square of the difference as a share of theirs. "
    note += "Below, the mean square of the difference to Oracle groups as a share of the returns' variance: these compare "
    note += "Monte Carlo returns and favour estimators that do; bootstrapped ones they do not rank. One policy, one batch."
    return [*text, "", "## Against true advantages at the warm start", "", note, "", *truth_table(plan, results.bias)]


def markdown(plan: Plan, results: AllResults, rows: list[Row]) -> str:
    """Formats all tables, the differences outside the noise, then the other measurements."""
    note = "Percent; mean ± standard deviation over the runs that have ended, for a single one over its evaluation seeds."
    if any(row.baseline for row in rows):
        note += " Differences (points) are paired by seed: mean ± standard error (95 % interval by Student's t), pairs above 0."
    if any(setting.pools for setting in plan.settings.values()):
        note += " Where settings are pooled each pair weighs the same, and what is found holds for these settings."
    text = [f"# {plan.title}", "", note]
    if plan.published:
        text += ["", f"Published: {plan.published.source}"]
    for title, parts in itertools.groupby(layout(plan, rows), lambda part: part[0]):
        text += ["", f"## {title}"]
        for _, setting, heading, lines in parts:
            text += ["", f"### {setting}", "", *table(heading, lines)]
    text += outside(plan, rows) + power(plan, rows) + warm_starts(plan, results, rows)
    for kind, some in results.measured.items():
        text += ["", f"## {kind.title}", "", kind.note, "", *kind.lines(some)] if some else []
    if changed := [f"* {cell.name}: {', '.join(r.changed)}" for cell, r in results.cells.items() if r and r.changed]:
        text += ["", "## Runs with other settings than the plan's", "", *changed]
    if apart := unlike(plan, results.cells):
        title = "## Pairs left out, which did not start from equal weights or had not the same settings"
        text += ["", title, "", *(f"* {a.name}, {b.name}" for a, b in apart)]
    return "\n".join(text) + "\n"


SPECIAL = str.maketrans(
    {letter: f"\\{letter}" for letter in "${}&%_#"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$", "²": "$^2$", "α": r"$\alpha$"}
)


def latex(plan: Plan, rows: list[Row]) -> str:
    """Formats the tables as `tabular`s that need no package."""
    source = f"; published: {' '.join(plan.published.source.split())}" if plan.published else ""
    text = [f"% {plan.title}{source}"]
    for title, setting, heading, lines in layout(plan, rows):
        first, *others = (" & ".join(cell.translate(SPECIAL) for cell in line) + r" \\" for line in (heading, *lines))
        text += ["", f"% {title}: {setting}", rf"\begin{{tabular}}{{ll{'r' * (len(heading) - 2)}}}", r"\hline", first]
        text += [r"\hline", *others, r"\hline", r"\end{tabular}"]
    return "\n".join(text) + "\n"


def table_csv(rows: list[Row]) -> str:
    """Formats one line per number."""

    def format_value(value) -> str:
        return f"{value:.4f}" if isinstance(value, float) else value

    fields = ("table", "setting", "method", "column", "wanted", "done", "begun", "n", "mean", "std")
    heading = [*fields, "published", "published_std", "difference"]
    heading += [f"paired_{name}" for name in ("mean", "error", "low", "high", "n", "positive", "negative", "p")]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(heading)
    for row in rows:
        numbers = [*(getattr(row, name) for name in fields), *(row.published or (None, None)), row.difference]
        if v := row.versus:
            numbers += [v.mean, v.error, *v.interval, v.n, v.positive, v.negative, f"{v.p:.4g}"]
        writer.writerow([*map(format_value, numbers), *[""] * (len(heading) - len(numbers))])
    return out.getvalue()
