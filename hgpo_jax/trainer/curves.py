"""A run's curves: the metrics to plot and their units, and the picture curves.png.

The HTML report shows the same panels. The policy plays iteration i before its update. So iteration 0 shows the policy that
training starts from, and the evaluation that ends a run of N iterations stands at N.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hgpo_jax import config as configuration
from hgpo_jax.trainer.metrics import flatten, read_metrics
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.figures import COLORS, by_iteration, in_percent, panels, smooth, smoothing_window, styled
from hgpo_jax.utils.files import atomic_write


@dataclasses.dataclass(frozen=True)
class Panel:
    """One chart.

    metric: a name, or a prefix of several names if it ends in `.`, `/` or `_`. unit: of the y axis. extent: range of the y
    axis, `share` (0 to 100 %), `zero` (0 to the largest value) or `free`.
    """

    title: str
    metric: str
    unit: str
    extent: str

    def names(self, metrics) -> list[str]:
        """Returns those of `metrics` that the panel shows."""
        group = self.metric[-1] in "./_"
        return [name for name in metrics if name == self.metric or (group and name.startswith(self.metric))]

    def label(self, name: str) -> str:
        """Labels one metric among several: `level2` -> `level 2`, `level-1` -> `prompt group`."""
        part = name.removeprefix(self.metric)
        return part.replace("level-1", "prompt group").replace("level", "level ").replace("_", " ")


LEARNING = (
    Panel("Success", "success", "share of episodes", "share"),
    Panel("Return", "return", "discounted rewards", "zero"),
    Panel("Episode length", "turns", "turns", "zero"),
    Panel("Valid actions", "valid", "share of actions", "share"),
    Panel("KL to the reference policy", "kl", "nats per token", "zero"),
    Panel("Entropy", "entropy", "nats per token", "zero"),
    Panel("Gradient norm", "grad_norm", "norm, before clipping", "zero"),
    Panel("Log-probabilities, sampler against trainer", "logp_difference", "largest difference", "zero"),
    Panel("Clipped tokens", "clip_fraction_", "share of tokens", "zero"),
    Panel("Time per iteration", "seconds.", "seconds", "zero"),
)
GROUPS = (
    Panel("Steps with a peer, by level", "peers/", "share of steps", "share"),
    Panel("Steps with advantage 0", "advantage_zero", "share of steps", "share"),
    Panel("Mean size of an advantage", "advantage_abs", "absolute advantage", "zero"),
    Panel("Cosine to the advantages of level 0", "cosine_to_level0", "cosine", "free"),
    Panel("Variance between groups, by level", "hierarchy/tau2_", "tau² (return²)", "zero"),
    Panel("Variance within groups, by level", "hierarchy/s2_", "s² (return²)", "zero"),
    Panel("What depth can add", "hierarchy/rho", "rho", "zero"),
)
AGENTS = (
    Panel("Failed episodes, by cause", "failed/", "share of episodes", "share"),
    Panel("Branches of an episode", "branches", "branches", "zero"),
)
ROLES = (
    Panel("Turns by role", "by_role/turns/", "turns per episode", "zero"),
    Panel("Success where a role acted", "by_role/success/", "share of episodes", "share"),
    Panel("Invalid actions by role", "by_role/invalid/", "share of actions", "share"),
    Panel("Length of a response by role", "by_role/response_length/", "tokens", "zero"),
    Panel("Mean advantage by role", "by_role/advantage_mean/", "advantage", "free"),
    Panel("Spread of advantages by role", "by_role/advantage_std/", "standard deviation", "zero"),
    Panel("KL to the reference policy by role", "by_role/kl/", "nats per token", "zero"),
    Panel("Entropy by role", "by_role/entropy/", "nats per token", "zero"),
    Panel("Whose tokens the loss pulls on", "by_role/logp_gradient_share/", "share of squared slopes", "share"),
)
DRAWN = (
    "success",
    "turns",
    "valid",
    "return",
    "kl",
    "entropy",
    "grad_norm",
    "peers/",
    "by_role/entropy/",
    "by_role/logp_gradient_share/",
    "seconds.",
)  # in curves.png
MODES = ("sampled", "greedy")
LARGEST = sys.float_info.max
RAW = 0.3  # opacity of the raw line
FIRST, HELD_OUT = "#8a5a00", "#a3262a"  # colours of the end of the warm start and of held-out tasks


def read_rows(folder: Path) -> list[dict]:
    """Reads a run's rows of metrics by dotted name, with `valid` (1 - invalid). Raises ConfigError."""
    rows = [flatten(row) for row in read_metrics(folder)]
    for number, row in enumerate(rows, 1):
        # An integer of hundreds of digits is no float.
        if not all(isinstance(x, float | None) or (isinstance(x, int) and abs(x) <= LARGEST) for x in row.values()):
            raise ConfigError(
                f"{folder / 'metrics.jsonl'}: line {number} is not a row of metrics: a value is not a number; remove the line"
            )
        for part in ("", "validation/"):
            if row.get(f"{part}invalid") is not None:
                row[f"{part}valid"] = 1 - row[f"{part}invalid"]
    return rows


def read_held_out(folder: Path) -> dict[str, dict] | None:
    """Reads the evaluation that ended a run: mode -> turns, valid and, if known, success and interval (its 95 % interval).

    Returns None before there is one.

    Raises:
      ConfigError: evaluation.json is damaged.
    """
    file = folder / "evaluation.json"
    if not file.is_file():
        return None
    try:
        evaluation = json.loads(file.read_text())
        result: dict[str, dict] = {mode: {} for mode in MODES}
        for mode in MODES:
            if evaluation["success"][mode] is not None:
                result[mode]["success"] = float(evaluation["success"][mode])
                result[mode]["interval"] = tuple(float(end) for end in evaluation["interval"][mode])
            result[mode] |= {"turns": float(evaluation["turns"][mode]), "valid": 1 - float(evaluation["invalid"][mode])}
        return result
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ConfigError(f"{file}: not an evaluation: {error!r}; run hgpo_jax.evaluate again") from None


@styled
def draw(rows: list[dict], title: str = "", held_out: dict | None = None, warm_start: bool = False) -> Figure:
    """Draws the rows of `read_rows`.

    Args:
      held_out: the result of `read_held_out`, drawn where training ended.
      warm_start: whether iteration 0 shows the result of a warm start, which is then marked.
    """
    metrics = dict.fromkeys(name for row in rows for name in row)
    by_metric = {panel.metric: panel for panel in (*LEARNING, *GROUPS, *ROLES)}
    charts = [panel for metric in DRAWN if (panel := by_metric[metric]).names(metrics)]
    columns = min(3, len(charts))
    figure, axes = panels([min(columns, len(charts) - first) for first in range(0, len(charts), columns)], 4.3, 2.9)
    window = smoothing_window(len(rows))
    for place, (axis, panel) in enumerate(zip(itertools.chain(*axes), charts, strict=True)):
        names = panel.names(metrics)
        _panel(axis, panel, rows, names, window)
        _held_out(axis, panel, rows, held_out)
        _range(axis, panel)
        if place + columns >= len(charts):  # no chart below it
            axis.set_xlabel("iteration")
        if panel.metric == "success" and warm_start and rows[0]["iteration"] == 0 and rows[0].get("success") is not None:
            reached = rows[0]["success"]
            axis.plot(0, reached, "D", color=FIRST, label=f"the warm start ends at {reached:.0%}", zorder=3)
        if panel.metric == "success" or len(names) > 1:
            axis.legend()
    note = f"bold: mean over {window} iterations" if window > 1 else ""
    figure.suptitle("; ".join(part for part in (title, note) if part))
    return figure


def _panel(axis: Axes, panel: Panel, rows: list[dict], names: list[str], window: int) -> None:
    x = [row["iteration"] for row in rows]
    for name, color in zip(names, itertools.cycle(COLORS)):
        y = np.array([math.nan if row.get(name) is None else row[name] for row in rows], float)
        label = panel.label(name) if len(names) > 1 else "in training"
        marker = "." if np.isfinite(y).sum() == 1 else ""  # a line through one point is invisible
        axis.plot(x, smooth(y, window), color=color, linewidth=1.8, marker=marker, label=label)
        if window > 1:
            axis.plot(x, y, color=color, linewidth=0.8, alpha=RAW)
    axis.set_title(panel.title)
    axis.set_ylabel(panel.unit)


def _held_out(axis: Axes, panel: Panel, rows: list[dict], final: dict | None) -> None:
    """Draws validations on held-out tasks as dots on a line, the final evaluation as markers with the interval of success."""
    points = [(row["iteration"], row[name]) for row in rows if row.get(name := f"validation/{panel.metric}") is not None]
    if points:
        axis.plot(*zip(*points, strict=True), ".-", color=HELD_OUT, linewidth=1, label="held-out, while training")
    end = rows[-1]["iteration"] + 1
    for mode, face, aside in zip(MODES, (HELD_OUT, "white"), (0.0, 0.02 * end), strict=True):
        if not final or panel.metric not in final[mode]:
            continue
        y = final[mode][panel.metric]
        spread, label = None, f"held-out, {mode}"
        if panel.metric == "success":
            low, high = final[mode]["interval"]
            spread, label = [[max(y - low, 0.0)], [max(high - y, 0.0)]], f"held-out, {mode}: {y:.1%} ({low:.1%} to {high:.1%})"
        axis.errorbar(end + aside, y, spread, fmt="o", color=HELD_OUT, markerfacecolor=face, label=label, zorder=3)


def _range(axis: Axes, panel: Panel) -> None:
    """Sets axis ranges that do not magnify a flat curve, ticks at whole iterations, and tick labels without an offset."""
    by_iteration(axis)
    low, high = axis.get_xlim()
    if high - low < 1:
        axis.set_xlim(-0.5, max(high, 1.5))
    if panel.extent == "share":
        axis.set_ylim(-0.02, 1.02)
        in_percent(axis)
        return
    axis.yaxis.set_major_formatter("{x:.6g}")
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axis.lines] or [np.zeros(1)])
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if panel.extent == "zero" and low >= 0:
        axis.set_ylim(0, 1.06 * high or 1)
    elif high - low < 1e-3 * max(abs(low), abs(high)):
        room = 0.5 * max(abs(low), abs(high))
        axis.set_ylim(low - room, high + room)


def plot_curves(folder: Path) -> None:
    """Draws a run's curves.png from config.yaml, metrics.jsonl and, if it exists, evaluation.json. Raises ConfigError."""
    rows = read_rows(folder)
    if not rows:
        return
    config = configuration.load(str(folder / "config.yaml"), [])
    title = f"{config.name}, {config.method}, seed {config.seed}"
    figure = draw(rows, title, read_held_out(folder), warm_start=config.warm_start != "none")
    with atomic_write(folder / "curves.png", "wb") as file:
        figure.savefig(file, dpi=110, format="png")
