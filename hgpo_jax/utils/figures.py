"""What all figures share: their style, colours, grids of panels, smoothing. What is drawn stands with what is drawn."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

COLORS = ("#1f6fd1", "#d9660f", "#17936a", "#b0429d", "#8b6b00", "#c23b3b", "#1b9db3", "#777777")
DARK, PALE = "#333333", "#c4c4c4"  # of what others are compared with, and of context
# A decorator of functions that draw: matplotlib reads some of it when axes are made, the rest when they are filled.
styled = matplotlib.rc_context(
    {
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.labelsize": 9,
        "axes.prop_cycle": cycler(color=COLORS),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": 10,
        "errorbar.capsize": 2.5,
        "figure.constrained_layout.use": True,
        "figure.titlesize": 11,
        "grid.alpha": 0.25,
        "legend.fontsize": 7.5,
        "legend.frameon": False,
        "lines.markersize": 5,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
    }
)


def panels(rows: Sequence[int], width: float, height: float, **options) -> tuple[Figure, list[list[Axes]]]:
    """Makes a figure with `rows[i]` panels of this size, in inches, in its row i; returns it with the axes of each row.

    options: of `Figure.subplots`.
    """
    figure = Figure(figsize=(width * max(rows), height * len(rows)))
    axes = figure.subplots(len(rows), max(rows), squeeze=False, **options)
    for row, count in zip(axes, rows, strict=True):
        for axis in row[count:]:
            axis.remove()
    return figure, [list(row[:count]) for row, count in zip(axes, rows, strict=True)]


def by_iteration(axis: Axes) -> None:
    """Puts ticks at whole iterations."""
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))


def in_percent(axis: Axes) -> None:
    """Shows shares on the y axis in percent."""
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def by_name(axis: Axes, places: Sequence[float], names: Sequence[str]) -> None:
    """Lists names on the y axis, the first on top."""
    axis.set_yticks(places, names)
    axis.set_ylim(max(places) + 0.6, min(places) - 0.6)
    axis.tick_params(axis="y", length=0)
    axis.grid(visible=False, axis="y")
    axis.spines["left"].set_visible(False)


def smoothing_window(count: int) -> int:
    """Iterations over which a curve of `count` points is averaged: about an eighth of them, odd, 51 at most."""
    return min(51, max(1, count // 8) | 1)


def smooth(values, window: int) -> np.ndarray:
    """Returns the centred moving mean f64[iterations] of values [iterations] over `window`, an odd number.

    The mean is NaN where the window reaches beyond an end, because a mean of fewer values would bend the curve there. NaN
    values are left out and stay NaN.
    """
    values = np.asarray(values, float)
    half = window // 2
    padded = np.pad(values, half, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, window)
    finite = np.isfinite(windows)
    means = np.where(finite, windows, 0).sum(1) / np.maximum(finite.sum(1), 1)
    place = np.arange(len(values))
    return np.where(np.isfinite(values) & (place >= half) & (place < len(values) - half), means, np.nan)
