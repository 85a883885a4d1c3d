"""Figures of a run and of its advantages, for notebooks. Each function returns a matplotlib Figure of its own."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.ticker import MaxNLocator

from hgpo_jax.advantages import Estimate
from hgpo_jax.analysis.dumps import Dump
from hgpo_jax.analysis.steps import transitions
from hgpo_jax.trainer.metrics import flatten, read_metrics

COLORS = "RdBu"  # negative red, 0 white, positive blue


def _tidy(axis, title: str) -> None:
    axis.set_title(title, fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


def plot_learning(runs: dict[str, str | Path | list[dict]], metrics=("success", "turns", "entropy")) -> Figure:
    """Plots curves of some metrics, one line per run. runs: name -> the run's folder, or its rows of metrics."""
    figure = Figure(figsize=(3.6 * len(metrics), 2.5), layout="constrained")
    axes = figure.subplots(1, len(metrics), squeeze=False)[0]
    for name, run in runs.items():
        rows = [flatten(row) for row in (run if isinstance(run, list) else read_metrics(Path(run)))]
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
    """Draws heat maps of a prompt group, one per estimator: a row is an episode (* if it succeeds), a column a turn.

    Each map has its own scale, because estimators' scales differ. A cross marks an invalid action; if there are several roles,
    a number shows which one acts.
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
        if len(dump.roles) > 1:
            for y, x in np.argwhere(steps).tolist():
                axis.text(x - 0.42, y, str(e.agents[rows[y], x]), fontsize=5, ha="left", va="center", alpha=0.7)
        names = [f"{b} {'*' if e.success[b] else ' '}" for b in rows]
        axis.set_yticks(range(len(rows)), names, fontsize=8, family="monospace")
        axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axis.set_xlabel("turn", fontsize=9)
        axis.set_title(name, fontsize=10, loc="left")
        figure.colorbar(shown, ax=axis, pad=0.02, shrink=0.9).ax.tick_params(labelsize=8)
    roles = ", ".join(f"{index} {role}" for index, role in enumerate(dump.roles)) if len(dump.roles) > 1 else ""
    title = f"{dump.goal(int(rows[0]))}{roles and f' ({roles})'}"
    figure.suptitle(title, fontsize=10, parse_math=False)  # a price in dollars is not a formula
    return figure


BOX, GAP = (1.46, 0.56), (0.85, 0.3)  # in the graph: a state's width and height, and the gaps between two; inches


def plot_transitions(dump: Dump, record: Estimate, group: int, states: int = 12) -> Figure:
    """Draws the graph that a prompt group walked: arrows from state to next state, their width the number of steps, their
    colour the mean advantage. Columns are ordered by the distance from the start; success is the last.

    Only the `states` visited most are drawn, always with the start and success; the title says how much is left out.
    """
    edges = transitions(dump, record, group)
    played = np.flatnonzero((dump.episodes.groups == group) & dump.episodes.mask[:, 0])
    if not len(played):
        raise ValueError(f"group {group}: no step of it happened")
    arrows = list(zip(*(edges[name].tolist() for name in ("state", "next_state", "count", "advantage")), strict=True))
    # All episodes of a group begin in one state; hand-made ones may not.
    starts = dict.fromkeys(dump.episodes.states[played, 0].tolist())
    goals = {int(b) for b in edges["next_state"][edges["ends"] > 0]}
    depth = _depths(starts, arrows)
    depth |= dict.fromkeys(goals, max(depth.values()) + 1)  # a separate column at the end
    visits = {s: sum(c for a, b, c, _ in arrows if s in (a, b)) for s in depth}
    first = sorted(visits, key=lambda s: (s not in starts and s not in goals, -visits[s]))
    drawn = set(first[: max(states, len(starts) + len(goals))])
    kept = [arrow for arrow in arrows if arrow[0] in drawn and arrow[1] in drawn]
    place = _places(drawn, depth, kept)

    wide, high = (1 + max(place[s][axis] for s in drawn) for axis in (0, 1))
    size = wide * (BOX[0] + GAP[0]), high * (BOX[1] + GAP[1])
    # The axes are as large as the graph, so that a unit is an inch and a name fits its box at any size of the graph.
    margin, head, bar = 0.15, 0.6, 1.0
    figure = Figure(figsize=(size[0] + 2 * margin + bar, size[1] + head + margin), dpi=90)
    total = figure.get_size_inches()
    axis = figure.add_axes((margin / total[0], margin / total[1], size[0] / total[0], size[1] / total[1]))
    axis.set(xlim=(0, size[0]), ylim=(size[1], 0))
    axis.set_axis_off()
    norm = CenteredNorm(halfrange=max(float(np.abs(edges["advantage"]).max()), 1e-9))
    color = ScalarMappable(norm, "coolwarm_r")  # grey in the middle, so that an advantage of 0 is visible on white, too
    middle = {s: ((place[s][0] + 0.5) * (BOX[0] + GAP[0]), (place[s][1] + 0.5) * (BOX[1] + GAP[1])) for s in drawn}
    boxes = {}
    for s in drawn:
        x, y = middle[s]
        style: Any = {"boxstyle": "round,pad=0,rounding_size=0.08", "linewidth": 2 if s in starts or s in goals else 1}
        face, edge = ("#e3f2e6", "#2b7a3d") if s in goals else ("#f6f6f3", "#555555")
        corner = x - BOX[0] / 2, y - BOX[1] / 2
        boxes[s] = axis.add_patch(FancyBboxPatch(corner, *BOX, facecolor=face, edgecolor=edge, zorder=3, **style))
        name = dump.state_name(s).replace("_", " ")
        name = "success" if s in goals else textwrap.fill(name, 18, max_lines=3, placeholder=" …")
        stays = sum(c for a, b, c, _ in kept if a == b == s)
        axis.text(x, y, name, fontsize=8.5, ha="center", va="center", parse_math=False, zorder=4)
        if stays:  # an arrow back to its own start would be invisible
            axis.text(x + BOX[0] / 2, y - BOX[1] / 2, f"↻ {stays}", fontsize=8, ha="right", va="bottom", zorder=4)
    most = max((c for a, b, c, _ in kept if a != b), default=1)
    for a, b, count, advantage in sorted(kept, key=lambda arrow: arrow[2]):
        if a != b:
            axis.add_patch(
                FancyArrowPatch(
                    middle[a],
                    middle[b],
                    patchA=boxes[a],
                    patchB=boxes[b],
                    arrowstyle="-|>",
                    mutation_scale=11,
                    zorder=2,
                    color=color.to_rgba(advantage),
                    linewidth=1 + 4 * count / most,
                    connectionstyle=f"arc3,rad={0.12 if place[b][0] > place[a][0] else 0.3}",
                )
            )
    side = figure.add_axes(((margin + size[0] + 0.15) / total[0], margin / total[1], 0.14 / total[0], 0.9 * size[1] / total[1]))
    figure.colorbar(color, cax=side, label="mean advantage")
    share = sum(c for *_, c, _ in kept) / sum(c for *_, c, _ in arrows)
    few = len(drawn) < len(depth)
    left = f"; the {len(drawn)} most visited of {len(depth)} states, {share:.0%} of the steps" if few else ""
    goal = textwrap.fill(dump.goal(int(played[0])), 100, max_lines=2)
    title = f"{goal}\nleft to right: away from the start{left}"
    figure.text(margin / total[0], 1 - 0.1 / total[1], title, fontsize=10, va="top", parse_math=False)
    return figure


def _depths(starts, arrows: list[tuple]) -> dict[int, int]:
    """Returns state -> the least number of steps to it, breadth first from `starts`."""
    frontier, depth = list(starts), dict.fromkeys(starts, 0)
    while frontier:
        reached = dict.fromkeys(b for a, b, *_ in arrows if a in frontier and b not in depth)
        depth |= {b: depth[frontier[0]] + 1 for b in reached}
        frontier = list(reached)
    return depth


def _places(drawn: set[int], depth: dict[int, int], arrows: list[tuple]) -> dict[int, tuple[int, float]]:
    """State -> (column, row): a column for each depth that is drawn, in it each state near those that lead to it."""
    columns = [sorted(s for s in drawn if depth[s] == d) for d in sorted({depth[s] for s in drawn})]
    high = max(map(len, columns))
    place: dict[int, tuple[int, float]] = {}
    for i, column in enumerate(columns):
        wish = {s: np.mean([place[a][1] for a, b, *_ in arrows if b == s and a in place] or [0.0]) for s in column}
        for row, s in enumerate(sorted(column, key=lambda s: (wish[s], s))):
            place[s] = i, row + (high - len(column)) / 2
    return place


def plot_sizes(sizes: dict[str, dict[int, int]]) -> Figure:
    """Plots the share of steps by group size, one panel per level. sizes: name -> (group size -> number of groups)."""
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
    """Plots squared bias and variance against the Oracle groups, one bar per estimator. errors: name -> `against_oracle`."""
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
