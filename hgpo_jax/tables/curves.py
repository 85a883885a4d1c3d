"""Success by iteration of a table's methods, with bands over seeds, and the paired difference to its baseline."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from scipy import stats

from hgpo_jax.tables.plan import Cell, Plan

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def band(curves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean [T] and half the 95 % interval [T] (Student's t) of curves [N, T]; N >= 2."""
    n = len(curves)
    return curves.mean(0), stats.t.ppf(0.975, n - 1) * curves.std(0, ddof=1) / np.sqrt(n)


def plot(plan: Plan, found: dict, file: Path) -> bool:
    """Draws the tables that have a baseline: the curves, below them the differences. False where nothing has two seeds."""
    tables = [table for table in plan.tables if table.baseline]
    curves = {
        (i, setting, method): {
            seed: np.array(r.curve)
            for seed in table.seeds
            if (r := found.get(Cell(setting, method, seed))) and r.done and "train/auc" in r.numbers
        }
        for i, table in enumerate(tables) for setting in table.settings for method in table.methods
    }  # fmt: skip
    shown = [table for i, table in enumerate(tables) if any(len(c) > 1 for (j, *_), c in curves.items() if i == j)]
    if not shown:
        return False
    wide = max(len(table.settings) for table in shown)
    size = 5.2 * wide, 5.6 * len(shown)
    figure, axes = plt.subplots(2 * len(shown), wide, figsize=size, squeeze=False, layout="constrained")
    for row, table in enumerate(shown):
        i = tables.index(table)
        for column in range(wide):
            upper, lower = axes[2 * row, column], axes[2 * row + 1, column]
            if column >= len(table.settings):
                upper.set_visible(False)
                lower.set_visible(False)
                continue
            setting = table.settings[column]
            base = curves[i, setting, table.baseline]
            for method in table.methods:
                title, own = plan.methods[method].title, curves[i, setting, method]
                color = f"C{list(plan.methods).index(method) % 10}"  # the same in every table
                if len(own) > 1:
                    _draw(upper, np.stack(list(own.values())), f"{title} ({len(own)})", color, len(table.methods))
                both = sorted(own.keys() & base.keys())
                if method != table.baseline and len(both) > 1:
                    differences = np.stack([own[seed] - base[seed] for seed in both])
                    _draw(lower, differences, f"{title} ({len(both)})", color, len(table.methods))
            upper.set_title(f"{table.title}\n{plan.settings[setting].title}", fontsize=9)
            upper.set_ylabel("success")
            upper.set_ylim(0, 1)  # an interval of two or three seeds reaches far beyond
            most = max([0.02, *(float(abs(line.get_ydata()).max()) for line in lower.lines)])
            lower.set_ylim(-3 * most, 3 * most)
            lower.set_ylabel(f"minus {plan.methods[table.baseline].title}")
            lower.axhline(0, color="0.4", linewidth=0.8)
            lower.set_xlabel("iteration")
            lower.set_xlim(upper.get_xlim())
            for axis in (upper, lower):
                axis.grid(alpha=0.25)
                axis.spines[["top", "right"]].set_visible(False)
                if axis.get_legend_handles_labels()[0]:
                    axis.legend(fontsize=7, frameon=False, ncols=2, title="mean, 95 % band (seeds)", title_fontsize=7)
    figure.savefig(file, dpi=100)
    plt.close(figure)
    return True


def _draw(axis, curves: np.ndarray, label: str, color: str, beside: int) -> None:
    middle, half = band(curves)
    x = np.arange(len(middle))
    axis.plot(x, middle, color=color, linewidth=1.3, label=label)
    axis.fill_between(x, middle - half, middle + half, color=color, alpha=0.2 if beside < 4 else 0.06, linewidth=0)
