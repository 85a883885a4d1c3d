"""DVAO: the reward and each further signal centred by itself, and their sum divided by the sum of their spreads."""

from __future__ import annotations

import jax

from hgpo_jax.advantages.gdpo import streams, total
from hgpo_jax.advantages.grouping import EPSILON
from hgpo_jax.advantages.record import Batch, Estimate


def dvao(
    batch: Batch,
    *,
    signals: jax.Array,
    signal_weights: tuple[float, ...] = (),
    statistics: str = "per_step",
    invalid_penalty: float = 0.1,
) -> Estimate:
    """`A = sum_k w_k (R_k - mean_k) / (sum_k |w_k| std_k + 1e-6)` over the reward and the signals, in each prompt group.

    This is `gdpo` before it whitens, with each weight multiplied by the share of its stream in the group's spread: what varies
    more among these episodes counts more, and what does not vary drops out. Options as in `gdpo`.

    The description followed here is that of notes on the paper. They leave the std open; here it is the sample std, as in
    `grpo`. Weights below 0 are ours, and so is 0 for what has nothing to be compared with.
    """
    compared = streams(batch, signals, signal_weights, statistics, invalid_penalty)
    deviations = total(weight * episodes.deviations for weight, episodes in compared)
    spread = total(abs(weight) * episodes.stds for weight, episodes in compared)
    return Estimate(deviations / (spread + EPSILON), total(weight * episodes.scores for weight, episodes in compared))
