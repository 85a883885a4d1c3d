"""Figures of a run and of its advantages, for notebooks. Each function returns a matplotlib Figure of its own."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.ticker import MaxNLocator

from hgpo_jax.advantages import Estimate
from hgpo_jax.analysis.dumps import Dump
from hgpo_jax.analysis.steps import transitions
from hgpo_jax.trainer.metrics import flatten, read_metrics
from hgpo_jax.utils.figures import by_iteration, by_name, panels, styled

COLORS = "RdBu"  # negative red, 0 white, positive blue


@styled
def plot_learning(runs: dict[str, str | Path | list[dict]], metrics=("success", "turns", "entropy")) -> Figure:
    """Plots curves of some metrics, one line per run. runs: name -> the run's folder, or its rows of metrics."""
    figure, [axes] = panels([len(metrics)], 3.6, 2.5)
    for name, run in runs.items():
        rows = [flatten(row) for row in (run if isinstance(run, list) else read_metrics(Path(run)))]
        for axis, metric in zip(axes, metrics, strict=True):
            points = [(row["iteration"], row[metric]) for row in rows if row.get(metric) is not None]
            axis.plot(*zip(*points, strict=True), label=name)
    for axis, metric in zip(axes, metrics, strict=True):
        axis.set_title(metric)
        axis.set_xlabel("iteration")
        by_iteration(axis)
    if len(runs) > 1:
        axes[0].legend()
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
        image = axis.imshow(values, cmap=colors, norm=CenteredNorm(), aspect="auto", interpolation="none")
        row, turn = np.nonzero((e.invalid[rows] & steps)[:, :longest])
        axis.plot(turn, row, "x", color="black", markersize=4, markeredgewidth=0.8)
        if len(dump.roles) > 1:
            for y, x in np.argwhere(steps).tolist():
                axis.text(x - 0.42, y, str(e.agents[rows[y], x]), fontsize=5, ha="left", va="center", alpha=0.7)
        names = [f"{b} {'*' if e.success[b] else ' ' if e.judged[b] else '?'}" for b in rows]
        axis.set_yticks(range(len(rows)), names, fontsize=8, family="monospace")
        axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axis.set_xlabel("turn", fontsize=9)
        axis.set_title(name, fontsize=10, loc="left")
        figure.colorbar(image, ax=axis, pad=0.02, shrink=0.9).ax.tick_params(labelsize=8)
    roles = ", ".join(f"{index} {role}" for index, role in enumerate(dump.roles)) if len(dump.roles) > 1 else ""
    title = f"{dump.goal(int(rows[0]))}{roles and f' ({roles})'}"
    figure.suptitle(title, fontsize=10, parse_math=False)  # a price in dollars is not a formula
    return figure


BOX, GAP = np.array([1.46, 0.56]), np.array([0.85, 0.3])  # in the graph: a state's size, the gaps between two; inches
MARGIN, HEAD, BAR = 0.15, 0.6, 1.0  # around the graph, above it for the title, beside it for the colours; inches


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
    arcs = [arrow for arrow in arrows if arrow[0] in drawn and arrow[1] in drawn]
    place = _places(drawn, depth, arcs)
    middle = {s: (np.array(place[s]) + 0.5) * (BOX + GAP) for s in drawn}

    figure, axis, side = _graph_axes((1 + np.array(list(place.values())).max(0)) * (BOX + GAP))
    boxes = {s: _box(axis, middle[s], dump.state_name(s), s in starts, s in goals) for s in drawn}
    for s, _, stays, _ in (arrow for arrow in arcs if arrow[0] == arrow[1]):  # an arrow back to its start would be invisible
        right, top = middle[s] + BOX * (0.5, -0.5)
        axis.text(right, top, f"↻ {stays}", fontsize=8, ha="right", va="bottom", zorder=4)
    norm = CenteredNorm(halfrange=max(float(np.abs(edges["advantage"]).max()), 1e-9))
    color = ScalarMappable(norm, "coolwarm_r")  # grey in the middle, so that an advantage of 0 is visible on white, too
    moves = sorted((arrow for arrow in arcs if arrow[0] != arrow[1]), key=lambda arrow: arrow[2])
    for a, b, count, advantage in moves:
        curvature = 0.12 if place[b][0] > place[a][0] else 0.3
        arrow = FancyArrowPatch(
            middle[a],
            middle[b],
            patchA=boxes[a],
            patchB=boxes[b],
            arrowstyle="-|>",
            mutation_scale=11,
            zorder=2,
            color=color.to_rgba(advantage),
            linewidth=1 + 4 * count / moves[-1][2],
            connectionstyle=f"arc3,rad={curvature}",
        )
        axis.add_patch(arrow)
    figure.colorbar(color, cax=side, label="mean advantage")
    share = sum(c for *_, c, _ in arcs) / sum(c for *_, c, _ in arrows)
    few = len(drawn) < len(depth)
    left = f"; the {len(drawn)} most visited of {len(depth)} states, {share:.0%} of the steps" if few else ""
    goal = textwrap.fill(dump.goal(int(played[0])), 100, max_lines=2)
    axis.set_title(f"{goal}\nleft to right: away from the start{left}", fontsize=10, loc="left", parse_math=False)
    return figure


def _graph_axes(size: np.ndarray) -> tuple[Figure, Axes, Axes]:
    """Makes a figure with axes as large as the graph, so that a unit is an inch and a name fits its box at any size of the
    graph; returns it, these axes, and those of the colours."""
    figure = Figure(figsize=(size[0] + 2 * MARGIN + BAR, size[1] + HEAD + MARGIN), dpi=90)
    inches = np.tile(figure.get_size_inches(), 2)
    axis = figure.add_axes((MARGIN, MARGIN, *size) / inches)
    axis.set(xlim=(0, size[0]), ylim=(size[1], 0))
    axis.set_axis_off()
    return figure, axis, figure.add_axes((2 * MARGIN + size[0], MARGIN, 0.14, 0.9 * size[1]) / inches)


def _box(axis: Axes, middle: np.ndarray, name: str, starts: bool, ends: bool) -> FancyBboxPatch:
    """Draws a state and its name."""
    face, edge = ("#e3f2e6", "#2b7a3d") if ends else ("#f6f6f3", "#555555")
    corner, width = (middle - BOX / 2).tolist(), 2 if starts or ends else 1
    shape: Any = "round,pad=0,rounding_size=0.08"
    box = FancyBboxPatch(corner, BOX[0], BOX[1], boxstyle=shape, facecolor=face, edgecolor=edge, linewidth=width, zorder=3)
    axis.add_patch(box)
    text = "success" if ends else textwrap.fill(name.replace("_", " "), 18, max_lines=3, placeholder=" …")
    axis.text(middle[0], middle[1], text, fontsize=8.5, ha="center", va="center", parse_math=False, zorder=4)
    return box


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


@styled
def plot_sizes(sizes: dict[str, dict[int, int]]) -> Figure:
    """Plots the share of steps by group size, one panel per level. sizes: name -> (group size -> number of groups)."""
    figure, [axes] = panels([len(sizes)], 2.9, 2.3, sharey=True)
    for axis, (name, counts) in zip(axes, sizes.items(), strict=True):
        axis.set_title(f"{name}: no steps")
        if not counts:  # as at a level that is deeper than the episodes
            continue
        steps = np.array([[n, n * c] for n, c in counts.items()])
        share = steps[:, 1] / steps[:, 1].sum()
        largest = np.log2(steps[:, 0].max())
        axis.hist(np.log2(steps[:, 0]), bins=np.arange(-0.25, max(largest, 11) + 1, 0.5).tolist(), weights=share)
        axis.set_xticks(range(0, 11, 2), [2**n for n in range(0, 11, 2)])
        axis.set_xlim(-0.5, max(largest, 3) + 0.5)
        axis.set_xlabel("group size")
        axis.set_title(f"{name}: {share[steps[:, 0] == 1].sum():.0%} alone")
    return figure


@styled
def plot_errors(errors: dict[str, dict[str, float]]) -> Figure:
    """Plots squared bias and variance against the Oracle groups, one bar per estimator. errors: name -> `against_oracle`."""
    figure, [[axis]] = panels([1], 7.5, 0.8 + 0.3 * len(errors))
    places, left = range(len(errors)), np.zeros(len(errors))
    for label, widths in (
        ("bias²", [error["bias"] ** 2 for error in errors.values()]),
        ("variance", [error["variance"] for error in errors.values()]),
    ):
        axis.barh(places, widths, left=left, label=label)
        left = left + widths
    for place, total in enumerate(left):
        axis.annotate(f" {total:.2f}", (total, place), va="center", fontsize=8)
    by_name(axis, places, list(errors))
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    axis.set_title("mean squared distance from the Oracle's advantage", loc="left")
    return figure
