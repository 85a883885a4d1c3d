"""GBPO: GRPO's advantage, and how far each episode is above the median of its prompt group, for the loss of that name."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.grpo import compare_episodes, normalized
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import episode_magnitudes, episode_scores


def gbpo(batch: Batch, *, statistics: str = "per_step", invalid_penalty: float = 0.1) -> Estimate:
    """GRPO's advantage with mean and sample std; its margins are `(score - median) / (std + 1e-6)`.

    The median counts every episode of the prompt group once; of an even number it is the mean of the middle two. A group that
    counts one step has a median of 0 and a std of 1. Options as in `grpo`. The formulas are those of the authors' code
    (github.com/bounded-ratio-rl/bounded_ratio_rl); that an invalid step's penalty counts in its margin is ours.
    """
    episodes = compare_episodes(batch, statistics, invalid_penalty)
    keys = jnp.where(batch.mask[:, 0], batch.groups, grouping.PADDING_KEY), episode_scores(batch)[:, 0]
    group, ordered = jax.lax.sort(keys, num_keys=2)
    first = jnp.searchsorted(group, batch.groups)
    size = jnp.searchsorted(group, batch.groups, side="right") - first
    median = (ordered[first + jnp.maximum(size - 1, 0) // 2] + ordered[first + size // 2]) / 2
    alone = episodes.sizes == 1
    distance = episodes.scores - jnp.where(alone, 0.0, median[:, None])
    differs = jnp.abs(distance) > grouping.ROUNDING * episode_magnitudes(batch, invalid_penalty)
    std = jnp.where(alone, 1.0, episodes.stds) + grouping.EPSILON
    margins = jnp.where(batch.mask & differs, distance / std, 0.0)
    return Estimate(normalized(episodes, "mean_std"), episodes.scores, margins=margins)
