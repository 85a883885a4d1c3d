"""REINFORCE++: advantages whitened over the whole batch (Hu et al., 2025, arXiv 2501.03262)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.grpo import compare_episodes, normalized
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import MAX_WHITENED, episode_magnitudes, return_magnitudes, step_returns, whitened


def reinforce_pp(batch: Batch, *, gamma: float = 0.95, invalid_penalty: float = 0.1) -> Estimate:
    """Discounted returns, whitened over the batch, with `by_role` over each role's steps in it.

    A step's whole response is one action here, discounted as one.
    """
    returns, magnitudes = step_returns(batch, gamma, invalid_penalty), return_magnitudes(batch, gamma, invalid_penalty)
    if batch.roles is None:
        return Estimate(whitened(returns, batch.mask, magnitudes), returns)
    return Estimate(_whitened_by_role(returns, batch.roles, batch.mask, magnitudes), returns)


def _whitened_by_role(values: jax.Array, roles: jax.Array, mask: jax.Array, magnitudes: jax.Array) -> jax.Array:
    """`whitened` over the steps of each role, i32[B, T]."""
    steps = grouping.sort_steps([roles], mask)
    segment = steps.segments[0]
    ordered, magnitudes = (grouping.steps_in_order(array, steps) for array in (values, magnitudes))
    size = grouping.group_size(segment)
    centred = grouping.group_deviations(ordered, segment, size, magnitudes)
    variance = grouping.group_std(centred, segment, size - 1) ** 2
    advantages = jnp.clip(centred * jax.lax.rsqrt(variance + 1e-8), -MAX_WHITENED, MAX_WHITENED)
    return grouping.steps_in_place(advantages, steps, mask.shape)


def reinforce_pp_baseline(batch: Batch, *, statistics: str = "per_step", invalid_penalty: float = 0.1) -> Estimate:
    """Episode score minus the prompt group's mean, whitened over the batch. Options as in `grpo`."""
    episodes = compare_episodes(batch, statistics, invalid_penalty)
    magnitudes = episode_magnitudes(batch, invalid_penalty)
    return Estimate(whitened(normalized(episodes, "mean"), batch.mask, magnitudes), episodes.scores)
