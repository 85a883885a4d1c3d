"""What episodes were like: how long, how long their prompts, and how many peers HGPO finds in groups of equal tasks."""

from __future__ import annotations

import dataclasses

import numpy as np

from hgpo_jax import advantages
from hgpo_jax.diagnostics import peer_share

GROUP = 8  # episodes of a task


@dataclasses.dataclass(frozen=True)
class Play:
    """B episodes of at most T turns by one player, as in Episodes.

    mask bool[B, T], states i32[B, T], invalid bool[B, T], prompts i32[B, T] (their lengths), success bool[B], groups i32[B].
    """

    mask: np.ndarray
    states: np.ndarray
    invalid: np.ndarray
    prompts: np.ndarray
    success: np.ndarray
    groups: np.ndarray


def table(plays: dict[str, Play], history_length: int, unit: str) -> str:
    """A line for each player. unit: of the prompts' lengths. Shares of steps with a peer are those of levels 0 to K."""
    header = ("player", "success", "invalid", "turns: least, median, most", f"prompt: median, longest ({unit})")
    levels = "".join(f"{f'level {level}':>9s}" for level in range(history_length + 1))
    lines = [f"{header[0]:16s}{header[1]:>8s}{header[2]:>9s}{header[3]:>28s}{header[4]:>38s}   peers:{levels}"]
    for name, play in plays.items():
        turns, prompts = play.mask.sum(1), play.prompts[play.mask]
        lengths = f"{turns.min()}, {np.median(turns):g}, {turns.max()}"
        shown = f"{np.median(prompts):.0f}, {prompts.max()}"
        shares = "".join(f"{share:>9.1%}" for share in peers(play, history_length))
        lines.append(
            f"{name:16s}{play.success.mean():>8.1%}{play.invalid[play.mask].mean():>9.1%}{lengths:>28s}{shown:>38s}{'':10s}{shares}"
        )
    return "\n".join(lines)


def peers(play: Play, history_length: int) -> np.ndarray:
    """f64[K + 1]: share of steps with another of the same task and the same last k + 1 observations, k = 0..K."""
    estimate = advantages.estimate(
        "hgpo", rewards=np.zeros(play.mask.shape, np.float32), mask=play.mask, states=play.states, groups=play.groups,
        history_length=history_length,
    )  # fmt: skip
    assert estimate.level_sizes is not None  # HGPO's has levels
    return peer_share(estimate.level_sizes, play.mask)
