"""The pictures of a table: success by iteration, a forest plot of paired differences, estimators against the truth."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from scipy import special

from hgpo_jax.tables.bias import ESTIMATORS
from hgpo_jax.tables.gradients import NAMES, Directions
from hgpo_jax.tables.in_runs import Kind, by_setting, when
from hgpo_jax.tables.plan import Plan, Table, cells_of
from hgpo_jax.tables.truth import PARTS, Measured
from hgpo_jax.trainer.curves import smooth, smoothing_window

FEW = 3  # methods; a table of more names some of them and omits the bands, which would hide each other
BASELINE, CONTEXT = "#333333", "#c4c4c4"
COLORS = ("#1f6fd1", "#d9660f", "#17936a", "#b0429d", "#8b6b00")
CHANCE = 0.05  # probability that a 95 % interval excludes 0 without any effect
FEWEST = 3  # pairs of a difference that is drawn and counted: the interval of two would hide the others


def band(curves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and half the 95 % interval (Student's t), [iterations] each, of curves [seeds >= 2, iterations]."""
    n = len(curves)
    return curves.mean(0), special.stdtrit(n - 1, 0.975) * curves.std(0, ddof=1) / np.sqrt(n)


def highlighted(table: Table) -> list[str]:
    """Lists the methods that a picture names, the baseline first: all of a small table, else those in its field `highlight`."""
    chosen = table.highlight or (table.methods if len(table.methods) <= FEW else table.methods[:FEW])
    first = [table.baseline] if table.baseline else []
    return [*first, *(method for method in chosen if method != table.baseline)]


def draw_curves(plan: Plan, found: dict) -> Figure | None:
    """Draws success by iteration, a panel for each setting of each table with a baseline; None if nothing can be compared.

    found: cell -> `results.Result` or None. Each line is the mean over a method's runs, averaged over neighbouring iterations
    and drawn where it has all of these. A method needs two runs, and a panel two methods. Pools are not shown: their runs may
    come from settings in different shares, which their pairs do not.
    """
    panels = {
        (table.title, setting): {
            method: np.array(curves)
            for method in table.methods
            if len(
                curves := [
                    r.curve
                    for cell in cells_of(plan, table, setting, method)
                    if (r := found.get(cell)) and r.done and "train/auc" in r.numbers
                ]
            )
            > 1
        }
        for table in plan.tables
        if table.baseline
        for setting in table.settings
        if plan.settings[setting].config
    }
    shown = {t.title: [s for s in t.settings if len(panels.get((t.title, s), ())) > 1] for t in plan.tables}
    tables = [table for table in plan.tables if shown[table.title]]
    if not tables:
        return None
    named = dict.fromkeys(method for table in tables for method in highlighted(table)[1:])
    colors = dict(zip(named, itertools.cycle(COLORS)))
    wide = max(len(shown[table.title]) for table in tables)
    figure = Figure(figsize=(5.6 * wide, 3.7 * len(tables)), layout="constrained")
    axes = figure.subplots(len(tables), wide, squeeze=False)
    for row, table in zip(axes, tables, strict=True):
        for axis, setting in zip(row, shown[table.title], strict=False):
            _curves(axis, plan, table, panels[table.title, setting], colors)
            axis.set_title(f"{table.title}\n{plan.settings[setting].title}", fontsize=10)
        for axis in row[len(shown[table.title]) :]:
            axis.remove()
    return figure


def _curves(axis: Axes, plan: Plan, table: Table, curves: dict[str, np.ndarray], colors: dict[str, str]) -> None:
    named = [method for method in highlighted(table) if method in curves]
    window = smoothing_window(max((c.shape[1] for c in curves.values()), default=1))
    others = [method for method in curves if method not in named]
    ends = []
    for method in [*others, *reversed(named)]:  # the baseline on top
        mean, half = band(curves[method])
        color = BASELINE if method == table.baseline else colors[method] if method in named else CONTEXT
        whole = slice(window // 2, len(mean) - window // 2)  # where the smoothed line is
        x, y = np.arange(len(mean))[whole], smooth(mean, window)[whole]
        axis.plot(x, y, color=color, linewidth=2 if method in named else 1)
        if method in named:
            ends.append((float(y[-1]), x[-1], f"{plan.methods[method].title} ({len(curves[method])} runs)", color))
            if not others:
                low, high = smooth(mean - half, window)[whole], smooth(mean + half, window)[whole]
                axis.fill_between(x, low, high, color=color, alpha=0.13, linewidth=0)
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axis.set_xlabel("iteration", fontsize=9)
    axis.set_ylabel("success in training", fontsize=9)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    bottom, top = axis.get_ylim()
    axis.set_ylim(max(0, bottom), min(1, top))
    _name_ends(axis, ends)
    notes = [f"mean over {window} iterations" if window > 1 else ""]
    notes += ["band: 95 % interval" if not others else "grey: " + ", ".join(plan.methods[m].title for m in others)]
    text = textwrap.fill("; ".join(filter(None, notes)), 45)
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


def draw_differences(plan: Plan, made: list) -> Figure | None:
    """Draws a forest plot of the paired differences to each table's baseline, in points; None if there are none.

    made: `collect.Row`s. A row of panels for each setting, a panel for each of its numbers; methods of a table are sorted by
    their first number, so that one place is one method in all panels. A filled mark is an interval that leaves out 0.
    """
    rows = [row for row in made if row.versus and row.versus["n"] >= FEWEST]
    settings = list(dict.fromkeys(row.setting for row in rows))
    if not rows:
        return None
    blocks: dict[str, list[tuple[str, list[str]]]] = {}  # setting -> (table, its methods from the top down)
    for setting in settings:
        for title in dict.fromkeys(row.table for row in rows if row.setting == setting):
            first: dict[str, float] = {}
            for row in rows:
                if (row.table, row.setting) == (title, setting):
                    first.setdefault(row.method, row.versus["mean"])
            blocks.setdefault(setting, []).append((title, sorted(first, key=first.__getitem__, reverse=True)))
    heights = [sum(len(methods) + 1 for _, methods in blocks[setting]) for setting in settings]
    wide = max(len(plan.settings[setting].columns) for setting in settings)
    figure = Figure(figsize=(3 + 2.5 * wide, 1.2 + sum(0.27 * h + 0.7 for h in heights)), layout="constrained")
    axes = figure.subplots(len(settings), wide, squeeze=False, sharex="col", height_ratios=[h + 2 for h in heights])
    for line, setting in zip(axes, settings, strict=True):
        columns = list(plan.settings[setting].columns)
        for axis, column in zip(line, columns, strict=False):
            mine = {(row.table, row.method): row for row in rows if (row.setting, row.column) == (setting, column)}
            _forest(axis, plan, blocks[setting], mine, named=column == columns[0])
            axis.set_title(column, fontsize=9.5)
            axis.tick_params(labelbottom=True, labelsize=8.5)
            axis.set_xlabel("difference (points)", fontsize=8.5)
        line[0].set_ylabel(plan.settings[setting].title, fontsize=10, fontweight="bold")
        for axis in line[len(columns) :]:
            axis.remove()
    different = distinct(plan, made)
    outside = sum(map(leaves_out_zero, different))
    figure.suptitle(
        f"Paired differences with their 95 % intervals; filled where the interval leaves out 0: {outside} of {len(different)} "
        f"different ones, about {CHANCE * len(different):.1f} expected by chance",
        fontsize=10,
    )
    return figure


def distinct(plan: Plan, made: list) -> list:
    """Selects the `collect.Row`s whose paired differences count: with at least FEWEST pairs, of no pool, whose pairs its
    settings already have, and of comparisons in several tables the one with the most pairs."""
    baselines = {table.title: table.baseline for table in plan.tables}
    widest: dict = {}
    for row in made:
        if row.versus and row.versus["n"] >= FEWEST and not plan.settings[row.setting].pools:
            what = row.setting, row.column, row.method, baselines[row.table]
            widest[what] = max(widest.get(what, row), row, key=lambda row: row.versus["n"])
    return list(widest.values())


def leaves_out_zero(row) -> bool:
    """Whether the interval of a row's paired difference excludes 0."""
    low, high = row.versus["interval"]
    return low > 0 or high < 0


def _forest(axis: Axes, plan: Plan, blocks: list, mine: dict, named: bool) -> None:
    place, ticks = 0, []
    baselines = {table.title: plan.methods[table.baseline].title for table in plan.tables if table.baseline}
    for title, methods in blocks:
        pairs = {row.versus["n"] for (table, _), row in mine.items() if table == title} or {0}
        shown = f"{min(pairs)} to {max(pairs)}" if len(pairs) > 1 else f"{min(pairs)}"
        ticks.append((place, f"{title}: minus {baselines[title]} ({shown} pairs)"))
        for method in methods:
            place += 1
            ticks.append((place, plan.methods[method].title))
            if row := mine.get((title, method)):
                low, high = row.versus["interval"]
                mean, sure = row.versus["mean"], leaves_out_zero(row)
                axis.errorbar(
                    mean,
                    place,
                    xerr=[[mean - low], [high - mean]],
                    fmt="o",
                    color=COLORS[0],
                    markersize=5,
                    capsize=2,
                    linewidth=1.3,
                    markerfacecolor=COLORS[0] if sure else "white",
                )
        place += 1
    axis.axvline(0, color="#333333", linewidth=0.9)
    axis.set_ylim(place - 0.4, -0.6)  # the first on top
    axis.set_yticks([y for y, _ in ticks], [name for _, name in ticks] if named else [], fontsize=8.5)
    for text in axis.get_yticklabels():
        if text.get_text().endswith("pairs)"):
            text.set_color("#666666")
            text.set_fontstyle("italic")
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", alpha=0.25)
    axis.spines[["top", "right", "left"]].set_visible(False)


def draw_truth(plan: Plan, measured: list[Measured]) -> Figure | None:
    """Draws cosine to true advantages and mean square error, a line per estimator and part of HGPO; None without data."""
    figure = _draw_marks(
        plan,
        measured,
        (*ESTIMATORS, *PARTS),
        PARTS,
        "advantages against true ones",
        lambda one, name: one.errors[name],
        {"cosine": "cosine", "mse": "mean square error, as a share of theirs"},
    )
    for axis in figure.axes[1::2] if figure else ():
        axis.set_xscale("log")
    return figure


def draw_gradients(plan: Plan, measured: list[Directions]) -> Figure | None:
    """Draws cosines to the true gradient, of one batch's and of the expected one, a line per estimator; None without data."""
    labels = {"batch": "cosine of one batch's: noise and bias", "expected": "cosine of the expectation: bias alone"}
    return _draw_marks(
        plan,
        measured,
        NAMES,
        NAMES[len(ESTIMATORS) :],
        "gradients against the true one",
        lambda one, name: one.cosines[name],
        labels,
    )


def _draw_marks(
    plan: Plan, measured: list, names: Sequence[str], apart: Sequence[str], what: str, numbers: Callable, labels: dict[str, str]
) -> Figure | None:
    """Draws two panels, one for each of `labels`, for each setting and iteration. Faint marks are runs, coloured by the method
    that trained them, with standard errors if known; a bar is their mean. A line in the second panel marks 1: the error of
    advantages of 0, or no bias.

    apart: the names below a gap. numbers: (a measurement, a name) -> the values of both labels.
    """
    if not measured:
        return None
    groups = by_setting(measured)
    methods = sorted({one.cell.split("/")[1] for one in measured}, key=list(plan.methods).index)
    colors = dict(zip(methods, itertools.cycle(COLORS)))
    places = [i + (0.8 if name in apart else 0) for i, name in enumerate(names)]
    figure = Figure(figsize=(10, (0.8 + 0.32 * len(names)) * len(groups)), layout="constrained")
    axes = figure.subplots(len(groups), 2, sharey=True, squeeze=False)
    for row, ((setting, iteration), ours) in zip(axes, groups.items(), strict=True):
        for axis, (key, label) in zip(row, labels.items(), strict=True):
            values, errors = np.array(
                [[[numbers(one, name).get(key + end, 0.0) for name in names] for one in ours] for end in ("", "_error")]
            )
            for one, line, error in zip(ours, values, errors, strict=True):
                color = colors[one.cell.split("/")[1]]
                axis.errorbar(
                    line, places, xerr=error, fmt="o", color=color, alpha=0.35, markersize=4.5, markeredgewidth=0, linewidth=1.2
                )
            axis.plot(values.mean(0), places, "|", color=BASELINE, markersize=13, markeredgewidth=2.2, label="mean")
            axis.set_xlabel(label, fontsize=9)
            axis.grid(axis="x", alpha=0.25)
            axis.spines[["top", "right", "left"]].set_visible(False)
            axis.tick_params(axis="y", length=0)
        runs = f"{len(ours)} runs" if len(ours) > 1 else "1 run"
        about = f"{plan.settings[setting].title}: {what}, {runs} {when(iteration)}"
        row[0].set_title(about, fontsize=10, loc="left")
        row[0].set_xlim(left=min(0, row[0].get_xlim()[0]))
        row[1].axvline(1, color="#333333", linewidth=0.9)
        row[0].set_yticks(places, names, fontsize=9)
        row[0].set_ylim(places[-1] + 0.6, -0.6)
    for method, color in colors.items():
        axes[0, 0].plot([], [], "o", color=color, markersize=4.5, label=f"a run by {plan.methods[method].title}")
    axes[0, 0].legend(fontsize=8, frameon=False, loc="best")
    return figure


def draw(plan: Plan, found: dict, made: list, measured: dict[Kind, list], name: str, to: Path) -> list[Path]:
    """Writes NAME.png, NAME-differences.png and those of the measurements that exist; returns the files."""
    written, figures = [], {"": draw_curves(plan, found), "-differences": draw_differences(plan, made)}
    calls: dict[str, Callable] = {"truth": draw_truth, "gradients": draw_gradients}
    figures |= {f"-{kind.name}": calls[kind.name](plan, some) for kind, some in measured.items()}
    for suffix, figure in figures.items():
        if figure:
            written.append(to / f"{name}{suffix}.png")
            figure.savefig(written[-1], dpi=100)
    return written
