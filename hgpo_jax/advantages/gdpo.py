"""GDPO: the reward and each further signal normalized by itself, then added (reward-decoupled normalization)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages.grpo import compare_episodes, normalized
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import whitened


def gdpo(
    batch: Batch,
    *,
    signals: jax.Array,
    signal_weights: tuple[float, ...] = (),
    statistics: str = "per_step",
    invalid_penalty: float = 0.1,
) -> Estimate:
    """Weighted sum of GRPO's advantages of the reward and of each signal, whitened over the batch.

    signals: f32[B, T, S], further rewards of each step; what padding holds is ignored.
    signal_weights: one for each signal, negative for a cost; the reward's own weight is 1. Default: 1 each.
    statistics, invalid_penalty: as in `grpo`. The penalty belongs to the reward.

    A stream whose scores are equal in a prompt group says nothing there, and one with a wide range does not drown the others.
    The description followed here is that of a paper which compares with GDPO. It leaves the std open; here it is the sample
    std + 1e-6, as in `grpo`. Where all groups count the same number of steps, whitening removes the difference between the
    two kinds of std.
    """
    weights = signal_weights or (1.0,) * signals.shape[-1]
    if len(weights) != signals.shape[-1]:
        raise ValueError(f"signal_weights={weights}: give {signals.shape[-1]} numbers, one for each signal")
    rewards = compare_episodes(batch, statistics, invalid_penalty)
    scores = rewards.scores
    total = normalized(rewards, "mean_std")
    magnitudes = jnp.abs(total)
    for index, weight in enumerate(weights):
        stream = batch._replace(rewards=jnp.where(batch.mask, signals[..., index], 0.0))
        episodes = compare_episodes(stream, statistics, 0.0)
        scores += weight * episodes.scores
        advantages = weight * normalized(episodes, "mean_std")
        total += advantages
        magnitudes += jnp.abs(advantages)
    return Estimate(whitened(total, batch.mask, magnitudes), scores)
