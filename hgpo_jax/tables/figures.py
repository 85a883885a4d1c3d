"""The pictures of a table: success by iteration, a forest plot of paired differences, estimators against the truth."""

from __future__ import annotations

import itertools
import math
import textwrap
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import special

from hgpo_jax.tables.compare import CHANCE, FEWEST, Row, select_comparisons
from hgpo_jax.tables.plan import Plan, Table, cells_of
from hgpo_jax.tables.plan_results import AllResults
from hgpo_jax.tables.run_measurements import InRun, by_setting, moment
from hgpo_jax.tables.run_results import Results
from hgpo_jax.utils import figures
from hgpo_jax.utils.figures import COLORS, DARK, PALE, panels, smooth, smoothing_window, styled
from hgpo_jax.utils.files import atomic_write

FEW = 3  # methods; a table of more names some of them and omits the bands, which would hide each other


def band(curves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and half the 95 % interval (Student's t), [iterations] each, of curves [seeds >= 2, iterations]."""
    n = len(curves)
    return curves.mean(0), special.stdtrit(n - 1, 0.975) * curves.std(0, ddof=1) / np.sqrt(n)


def highlighted_methods(table: Table) -> list[str]:
    """Lists the methods that a picture names, the baseline first: all of a small table, else those in its field `highlight`."""
    names = table.highlight or table.methods[:FEW]
    first = [table.baseline] if table.baseline else []
    return [*first, *(method for method in names if method != table.baseline)]


def _curves_of(plan: Plan, table: Table, setting: str, results: Results) -> dict[str, np.ndarray]:
    """Returns method -> curves [seeds, iterations] of a panel, for each method with two runs or more."""
    curves = {}
    for method in table.methods:
        runs = [results.get(cell) for cell in cells_of(plan, table, setting, method)]
        curves[method] = [r.curve for r in runs if r and r.done and "train/auc" in r.numbers]
    return {method: np.array(some, float) for method, some in curves.items() if len(some) > 1}  # None becomes nan


@styled
def draw_curves(plan: Plan, results: Results) -> Figure | None:
    """Draws success by iteration, a panel for each setting of each table with a baseline; None if nothing can be compared.

    Each line is the mean over a method's runs, averaged over neighbouring iterations and drawn where it has all of these. A
    panel needs two methods. Pools are not shown: their runs may come from settings in different shares, which their pairs do
    not.
    """
    rows: list[tuple[Table, dict[str, dict[str, np.ndarray]]]] = []
    for table in plan.tables:
        settings = [setting for setting in table.settings if plan.settings[setting].config and table.baseline]
        if of_settings := {s: curves for s in settings if len(curves := _curves_of(plan, table, s, results)) > 1}:
            rows.append((table, of_settings))
    if not rows:
        return None
    named = dict.fromkeys(method for table, _ in rows for method in highlighted_methods(table)[1:])
    colors = dict(zip(named, itertools.cycle(COLORS)))
    figure, axes = panels([len(of_settings) for _, of_settings in rows], 5.6, 3.7)
    for line, (table, of_settings) in zip(axes, rows, strict=True):
        for axis, (setting, curves) in zip(line, of_settings.items(), strict=True):
            _curves(axis, plan, table, curves, colors | {table.baseline or "": DARK})
            axis.set_title(f"{table.title}\n{plan.settings[setting].title}")
    return figure


def _curves(axis: Axes, plan: Plan, table: Table, curves: dict[str, np.ndarray], colors: dict[str, str]) -> None:
    named = [method for method in highlighted_methods(table) if method in curves]
    others = [method for method in curves if method not in named]
    window = smoothing_window(max(c.shape[1] for c in curves.values()))
    ends = []
    for method in [*others, *reversed(named)]:  # the baseline on top
        mean, half = band(curves[method])
        whole = slice(window // 2, len(mean) - window // 2)  # where the smoothed line is
        x, y = np.arange(len(mean))[whole], smooth(mean, window)[whole]
        if method in others:
            axis.plot(x, y, color=PALE, linewidth=1)
            continue
        axis.plot(x, y, color=colors[method], linewidth=2)
        known = np.flatnonzero(np.isfinite(y))
        if not len(known):
            continue
        last = known[-1]
        ends.append(
            (float(y[last]), int(x[last]), f"{plan.methods[method].title} ({len(curves[method])} runs)", colors[method])
        )
        if not others:
            low, high = smooth(mean - half, window)[whole], smooth(mean + half, window)[whole]
            axis.fill_between(x, low, high, color=colors[method], alpha=0.13, linewidth=0)
    figures.in_percent(axis)
    figures.by_iteration(axis)
    axis.set_xlabel("iteration")
    axis.set_ylabel("success in training")
    bottom, top = axis.get_ylim()
    axis.set_ylim(max(0, bottom), min(1, top))
    _name_ends(axis, ends)
    notes = [f"mean over {window} iterations"] if window > 1 else []
    notes += ["band: 95 % interval" if not others else "grey: " + ", ".join(plan.methods[m].title for m in others)]
    text = textwrap.fill("; ".join(notes), 45)
    axis.text(0.99, 0.02, text, transform=axis.transAxes, fontsize=7.5, color="#555555", ha="right", va="bottom")


def _name_ends(axis: Axes, ends: list[tuple[float, int, str, str]]) -> None:
    """Writes each line's name beside its end, with enough room between the names."""
    low, high = axis.get_ylim()
    least, at = (high - low) * 0.07, -np.inf
    for y, x, name, color in sorted(ends):
        at = max(y, at + least)
        axis.annotate(
            name,
            (x, y),
            xytext=(1.02, at),
            textcoords=("axes fraction", "data"),
            fontsize=8.5,
            color=color,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkB": 0},
        )


@styled
def draw_differences(plan: Plan, rows: list[Row]) -> Figure | None:
    """Draws a forest plot of the paired differences to each table's baseline, in points; None if there are none.

    A row of panels for each setting, a panel for each of its numbers; methods of a table are sorted by their first number, so
    that one place is one method in all panels. A filled mark is an interval that leaves out 0.
    """
    rows = [row for row in rows if row.versus and row.versus.n >= FEWEST]
    blocks: dict[str, dict[str, dict[str, float]]] = {}  # setting -> table -> method -> its first number
    for row in rows:
        first = blocks.setdefault(row.setting, {}).setdefault(row.table, {})
        first.setdefault(row.method, row.versus.mean if row.versus else 0)
    if not rows:
        return None
    heights = [sum(len(methods) + 1 for methods in tables.values()) + 2 for tables in blocks.values()]
    columns = [list(plan.settings[setting].columns) for setting in blocks]
    figure, axes = panels([len(names) for names in columns], 1, 1, sharex="col", height_ratios=heights)
    figure.set_size_inches(3 + 2.5 * max(map(len, columns)), 1.2 + sum(0.27 * height + 0.16 for height in heights))
    for line, names, (setting, tables) in zip(axes, columns, blocks.items(), strict=True):
        for axis, column in zip(line, names, strict=True):
            _forest(axis, plan, tables, [row for row in rows if (row.setting, row.column) == (setting, column)])
            axis.set_title(column)
            axis.set_xlabel("difference (points)")
            axis.tick_params(labelbottom=True, labelleft=axis is line[0])
        letters = 3 * sum(len(methods) + 1 for methods in tables.values()) + 6  # which stand beside panels of this height
        line[0].set_ylabel(textwrap.fill(plan.settings[setting].title, letters), fontsize=10, fontweight="bold")
    different = select_comparisons(plan, rows)
    figure.suptitle(
        "Paired differences with their 95 % intervals; filled where the interval leaves out 0: "
        f"{sum(row.leaves_out_zero for row in different)} of {len(different)} different ones, "
        f"about {CHANCE * len(different):.1f} expected by chance",
        fontsize=10,
    )
    return figure


def _forest(axis: Axes, plan: Plan, tables: dict[str, dict[str, float]], rows: list[Row]) -> None:
    names: list[str] = []
    for title, first in tables.items():
        of_table = {row.method: row for row in rows if row.table == title}
        pairs = sorted({row.versus.n for row in of_table.values() if row.versus})
        counts = " to ".join(map(str, dict.fromkeys((pairs[0], pairs[-1])))) if pairs else "0"
        baseline = next(table.baseline or "" for table in plan.tables if table.title == title)
        names.append(f"{title}: minus {plan.methods[baseline].title} ({counts} pairs)")
        for method in sorted(first, key=first.__getitem__, reverse=True):
            if (row := of_table.get(method)) and row.versus:
                mean, (low, high) = row.versus.mean, row.versus.interval
                face = COLORS[0] if row.leaves_out_zero else "white"
                bar = None if math.isinf(high) else [[mean - low], [high - mean]]
                axis.errorbar(mean, len(names), xerr=bar, fmt="o", c=COLORS[0], markerfacecolor=face)
            names.append(plan.methods[method].title)
    axis.axvline(0, color=DARK, linewidth=0.9)
    figures.by_name(axis, range(len(names)), names)
    for text in axis.get_yticklabels():
        if text.get_text().endswith("pairs)"):
            text.set(color="#666666", fontstyle="italic")


@styled
def draw_measured(plan: Plan, kind: type[InRun], measured: list) -> Figure | None:
    """Draws two panels, one for each number, for each setting and iteration; None without data. Faint marks are runs, coloured
    by the method that trained them, with standard errors if they have any; a bar is their mean. A line in the second panel
    marks 1: the error of advantages of 0, or no bias."""
    if not measured:
        return None
    groups, names = by_setting(measured), kind.estimators
    methods = sorted({one.cell.split("/")[1] for one in measured}, key=list(plan.methods).index)
    colors = dict(zip(methods, itertools.cycle(COLORS)))
    places = [i + (0.8 if name in kind.apart else 0) for i, name in enumerate(names)]
    figure, axes = panels([len(kind.labels)] * len(groups), 5, 0.8 + 0.32 * len(names), sharey=True)
    for row, ((setting, iteration), ours) in zip(axes, groups.items(), strict=True):
        for axis, (what, label) in zip(row, kind.labels.items(), strict=True):
            values, errors = (
                np.array([[one.numbers[name].get(key, np.nan) for name in names] for one in ours])
                for key in (what, f"{what}_error")
            )
            for one, value, error in zip(ours, values, errors, strict=True):
                color = colors[one.cell.split("/")[1]]
                axis.errorbar(value, places, xerr=error, fmt="o", color=color, alpha=0.35, markeredgewidth=0, capsize=0)
            axis.plot(values.mean(0), places, "|", color=DARK, markersize=13, markeredgewidth=2.2, label="mean")
            axis.set_xscale("log" if what == "mse" else "linear")
            axis.set_xlabel(label)
            figures.by_name(axis, places, names)
        runs = f"{len(ours)} runs" if len(ours) > 1 else "1 run"
        title = f"{plan.settings[setting].title}: {kind.about}, {runs} {moment(iteration)}"
        row[0].set_title(title, loc="left")
        row[0].set_xlim(left=min(0, row[0].get_xlim()[0]))
        row[1].axvline(1, color=DARK, linewidth=0.9)
    for method, color in colors.items():
        axes[0][0].plot([], [], "o", color=color, label=f"a run by {plan.methods[method].title}")
    axes[0][0].legend()
    return figure


def draw(plan: Plan, results: AllResults, rows: list[Row], name: str, to: Path) -> list[Path]:
    """Writes NAME.png, NAME-differences.png and those of the measurements that exist; returns the files."""
    drawn = {"": draw_curves(plan, results.cells), "-differences": draw_differences(plan, rows)}
    drawn |= {f"-{kind.name}": draw_measured(plan, kind, some) for kind, some in results.measured.items()}
    files = {to / f"{name}{suffix}.png": figure for suffix, figure in drawn.items() if figure}
    for path, figure in files.items():
        with atomic_write(path, "wb") as file:
            figure.savefig(file, dpi=100, format="png")
    return list(files)
