"""Figures of a run and of its advantages, for notebooks. Each function returns a matplotlib Figure of its own."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hgpo_jax.advantages import Estimate
from hgpo_jax.inspect.dumps import Dump
from hgpo_jax.inspect.steps import transitions
from hgpo_jax.metrics import flatten, read_metrics

COLORS = "RdBu"  # negative red, 0 white, positive blue


def _tidy(axis, title: str) -> None:
    axis.set_title(title, fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


def plot_learning(runs: dict[str, str | Path | list[dict]], metrics=("success", "turns", "entropy")) -> Figure:
    """Curves of some metrics, a line a run. runs: name -> the run's folder, or its rows of metrics."""
    figure = Figure(figsize=(3.6 * len(metrics), 2.5), layout="constrained")
    axes = figure.subplots(1, len(metrics), squeeze=False)[0]
    for name, run in runs.items():
        rows = [flatten(row) for row in (run if isinstance(run, list) else read_metrics(run))]
        for axis, metric in zip(axes, metrics, strict=True):
            known = [(row["iteration"], row[metric]) for row in rows if row.get(metric) is not None]
            axis.plot(*zip(*known, strict=True), linewidth=1.5, label=name)
    for axis, metric in zip(axes, metrics, strict=True):
        _tidy(axis, metric)
        axis.set_xlabel("iteration", fontsize=9)
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.grid(alpha=0.25)
    if len(runs) > 1:
        axes[0].legend(fontsize=8, frameon=False)
    return figure


def plot_group(dump: Dump, records: dict[str, Estimate], group: int) -> Figure:
    """Heat maps of a prompt group, an estimator each: a row is an episode (* if it succeeds), a column a turn.

    Each map has its own scale, because those of estimators differ. A cross marks an invalid action.
    """
    e = dump.episodes
    rows = [b for b in np.flatnonzero(e.groups == group) if e.mask[b].any()]
    if not rows:
        raise ValueError(f"group {group}: no step of it happened")
    steps = e.mask[rows]
    longest = int(steps.sum(1).max())
    figure = Figure(figsize=(0.9 + 3.7 * len(records), 0.9 + 0.26 * len(rows)), layout="constrained")
    for axis, (name, record) in zip(figure.subplots(1, len(records), squeeze=False)[0], records.items(), strict=True):
        values = np.where(steps, record.advantages[rows], np.nan)[:, :longest]
        colors = matplotlib.colormaps[COLORS].with_extremes(bad="#e4e4e4")  # grey: the episode is over
        shown = axis.imshow(values, cmap=colors, norm=CenteredNorm(), aspect="auto", interpolation="none")
        row, turn = np.nonzero((e.invalid[rows] & steps)[:, :longest])
        axis.plot(turn, row, "x", color="black", markersize=4, markeredgewidth=0.8)
        names = [f"{b} {'*' if e.success[b] else ' '}" for b in rows]
        axis.set_yticks(range(len(rows)), names, fontsize=8, family="monospace")
        axis.set_xlabel("turn", fontsize=9)
        axis.set_title(name, fontsize=10, loc="left")
        figure.colorbar(shown, ax=axis, pad=0.02, shrink=0.9).ax.tick_params(labelsize=8)
    figure.suptitle(dump.goal(rows[0]), fontsize=10, parse_math=False)  # a price is no formula
    return figure


def plot_transitions(dump: Dump, record: Estimate, group: int, labels: int = 20) -> Figure:
    """The graph that a prompt group walked: an arrow from state to next state, its width the steps that took it, its colour
    their mean advantage. Left to right by the distance from the start; the `labels` most visited states are named.
    A star is success.
    """
    edges = transitions(dump, record, group)
    played = np.flatnonzero((dump.episodes.groups == group) & dump.episodes.mask[:, 0])
    if not len(played):
        raise ValueError(f"group {group}: no step of it happened")
    arrows = list(zip(*(edges[name].tolist() for name in ("state", "next_state", "count", "advantage")), strict=True))
    # All episodes of a group begin in one state; made by hand, they may not.
    frontier = list(dict.fromkeys(dump.episodes.states[played, 0].tolist()))
    layer = dict.fromkeys(frontier, 0)
    while frontier:  # breadth first
        reached = [b for a, b, *_ in arrows if a in frontier and b not in layer]
        layer |= {b: max(layer.values()) + 1 for b in reached}
        frontier = list(dict.fromkeys(reached))
    columns = [[s for s in layer if layer[s] == depth] for depth in range(max(layer.values()) + 1)]
    height = {s: float(place) for place, s in enumerate(columns[0])}
    for column in columns[1:]:  # each state near those that lead to it
        wish = {s: np.mean([height[a] for a, b, *_ in arrows if b == s and a in height] or [0.0]) for s in column}
        for place, s in enumerate(sorted(column, key=lambda s: (wish[s], s))):
            height[s] = place - (len(column) - 1) / 2
    norm = CenteredNorm(halfrange=max(float(np.abs(edges["advantage"]).max()), 1e-9))
    color = ScalarMappable(norm, COLORS)
    figure = Figure(figsize=(11, 1.2 + 0.62 * max(map(len, columns))), dpi=80, layout="constrained")
    axis = figure.subplots()
    axis.set_facecolor("#d9d9d9")  # white, an advantage of 0, must be seen
    most = max(edges["count"])
    for a, b, count, advantage in sorted(arrows, key=lambda arrow: arrow[2]):
        bend = 0.15 if layer[b] > layer[a] else 0.35
        style = {"arrowstyle": "-|>", "color": color.to_rgba(advantage), "lw": 0.8 + 3.5 * count / most}
        where = {"xytext": (layer[a], height[a]), "xy": (layer[b], height[b])}
        axis.annotate("", **where, arrowprops=style | {"connectionstyle": f"arc3,rad={bend}", "shrinkA": 5, "shrinkB": 6})
    visits = {s: sum(c for a, b, c, _ in arrows if s in (a, b)) for s in layer}
    goals = {int(b) for b in edges["next_state"][edges["ends"] > 0]}
    named = sorted(visits, key=visits.get)[-labels:]
    for s in layer:
        axis.plot(layer[s], height[s], "*" if s in goals else "o", color="#222222", markersize=11 if s in goals else 6)
        if s in named:
            text = "" if s in goals else textwrap.fill(dump.state_name(s).replace("_", " "), 24, max_lines=3)
            box = {"facecolor": "#eeeeee", "alpha": 0.75, "edgecolor": "none", "pad": 0.8}
            below = {"xytext": (0, -7), "textcoords": "offset points", "ha": "center", "va": "top"}
            axis.annotate(text, (layer[s], height[s]), **below, fontsize=7, bbox=box, parse_math=False)
    axis.margins(0.09, 0.1)
    axis.set_yticks([])
    axis.set_xticks(range(len(columns)))
    axis.set_xlabel("steps from the start", fontsize=9)
    axis.spines[["left", "top", "right"]].set_visible(False)
    figure.colorbar(color, ax=axis, label="mean advantage", pad=0.01, shrink=0.8)
    figure.suptitle(dump.goal(int(played[0])), fontsize=10, parse_math=False)
    return figure


def plot_sizes(sizes: dict[str, dict[int, int]]) -> Figure:
    """Share of the steps by the size of their group, a panel a level. sizes: name -> (group size -> number of groups)."""
    figure = Figure(figsize=(2.9 * len(sizes), 2.3), layout="constrained")
    for axis, (name, counts) in zip(figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0], sizes.items(), strict=True):
        steps = np.array([[n, n * c] for n, c in counts.items()])
        share = steps[:, 1] / steps[:, 1].sum()
        axis.hist(np.log2(steps[:, 0]), bins=np.arange(-0.25, 12, 0.5), weights=share, color="#4878a8")
        axis.set_xticks(range(0, 11, 2), [2**n for n in range(0, 11, 2)], fontsize=8)
        axis.set_xlim(-0.5, max(np.log2(steps[:, 0].max()), 3) + 0.5)
        alone = share[steps[:, 0] == 1].sum()
        axis.set_xlabel("group size", fontsize=9)
        _tidy(axis, f"{name}: {alone:.0%} alone")
    return figure


def plot_errors(errors: dict[str, dict[str, float]]) -> Figure:
    """Squared bias and variance against the Oracle groups, a bar an estimator. errors: name -> `against_oracle`'s result."""
    figure = Figure(figsize=(7.5, 0.8 + 0.3 * len(errors)), layout="constrained")
    axis, names = figure.subplots(), list(errors)
    bias = np.array([errors[name]["bias"] ** 2 for name in names])
    variance = np.array([errors[name]["variance"] for name in names])
    axis.barh(names, bias, color="#4878a8", label="bias²")
    axis.barh(names, variance, left=bias, color="#e0a458", label="variance")
    for place, total in enumerate(bias + variance):
        axis.annotate(f" {total:.2f}", (total, place), va="center", fontsize=8)
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=9, length=0)
    axis.legend(fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    _tidy(axis, "mean squared distance from the Oracle's advantage")
    return figure
