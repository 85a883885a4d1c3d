"""GDPO: the reward and each further signal normalized by itself, then added (reward-decoupled normalization)."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from hgpo_jax.advantages.grpo import Comparison, compare_episodes, normalized
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
    compared = streams(batch, signals, signal_weights, statistics, invalid_penalty)
    advantages = [weight * normalized(episodes, "mean_std") for weight, episodes in compared]
    magnitudes = total(jnp.abs(part) for part in advantages)
    scores = total(weight * episodes.scores for weight, episodes in compared)
    return Estimate(whitened(total(advantages), batch.mask, magnitudes), scores)


def streams(
    batch: Batch, signals: jax.Array, signal_weights: tuple[float, ...], statistics: str, invalid_penalty: float
) -> list[tuple[float, Comparison]]:
    """Compares the episodes' rewards, and their sums of each signal: [(weight, comparison)]. Arguments as in `gdpo`."""
    weights = signal_weights or (1.0,) * signals.shape[-1]
    if len(weights) != signals.shape[-1]:
        raise ValueError(f"signal_weights={weights}: give {signals.shape[-1]} numbers, one for each signal")
    result = [(1.0, compare_episodes(batch, statistics, invalid_penalty))]
    for index, weight in enumerate(weights):
        stream = batch._replace(rewards=jnp.where(batch.mask, signals[..., index], 0.0))
        result.append((weight, compare_episodes(stream, statistics, invalid_penalty=0.0)))
    return result


def total(parts: Iterable[jax.Array]) -> jax.Array:
    """Returns the sum of arrays of one shape; there is at least one."""
    return functools.reduce(jnp.add, parts)
