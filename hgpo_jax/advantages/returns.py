"""Sums along a trajectory: discounted returns, generalised advantages, episode scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages.grouping import ROUNDING
from hgpo_jax.advantages.record import Batch


def discounted_sum(values: jax.Array, discount: float) -> jax.Array:
    """f32[B, T] -> f32[B, T]: `y_t = values_t + discount * y_{t+1}`, zero after the last column."""

    def step(later: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        now = value + discount * later
        return now, now

    sums: jax.Array
    _, sums = jax.lax.scan(step, jnp.zeros_like(values[:, 0]), values.T, reverse=True)
    return sums.T


def step_returns(batch: Batch, gamma: float, invalid_penalty: float) -> jax.Array:
    """Returns f32[B, T]: `sum_{j>=t} gamma^(j-t) r_j`, less the penalty on the invalid step itself.

    The penalty is subtracted after discounting, so an invalid action never lowers the return of the steps before it.
    """
    return discounted_sum(batch.rewards, gamma) - penalties(batch, invalid_penalty)


def penalties(batch: Batch, invalid_penalty: float) -> jax.Array:
    """Returns the penalty on the steps whose action was invalid, else 0, f32[B, T]."""
    return invalid_penalty * batch.invalid.astype(jnp.float32)


def return_magnitudes(batch: Batch, gamma: float, invalid_penalty: float) -> jax.Array:
    """Returns the sum of the absolute terms of each step's return, by which its rounding is measured, f32[B, T]."""
    return discounted_sum(jnp.abs(batch.rewards), gamma) + penalties(batch, invalid_penalty)


def episode_magnitudes(batch: Batch, invalid_penalty: float) -> jax.Array:
    """Returns the sum of the absolute rewards of each step's trajectory, and the step's penalty, f32[B, T]."""
    return jnp.sum(jnp.abs(batch.rewards), axis=1, keepdims=True) + penalties(batch, invalid_penalty)


def episode_scores(batch: Batch) -> jax.Array:
    """Returns the sum of the trajectory's rewards on each of its steps, before penalties, f32[B, T]."""
    return jnp.where(batch.mask, jnp.sum(batch.rewards, axis=1, keepdims=True), 0.0)


def following(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns each step's successor value in its trajectory, 0 after the last step, f32[B, T]."""
    values = jnp.where(mask, values, 0.0)
    return jnp.pad(values[:, 1:], ((0, 0), (0, 1)))


def last_steps(mask: jax.Array) -> jax.Array:
    """Marks the last step of each trajectory, bool[B, T]."""
    return mask & ~jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))


# Whitened values stay within this; without it a single outlier among N equal values would become sqrt(N).
MAX_WHITENED = 100.0


def whitened(values: jax.Array, mask: jax.Array, magnitudes: jax.Array | float = 0.0) -> jax.Array:
    """f32[B, T] with mean 0 and variance 1 over the batch's steps (sample variance + 1e-8), 0 elsewhere.

    Equal values give exactly 0: the mean is taken of the distances to the smallest value, as in the groups, and what is
    within the rounding of sums with absolute terms of `magnitudes` f32[B, T] is no difference. The result is clipped to
    [-100, 100], which no batch of fewer than 10,000 steps reaches.
    """
    count = jnp.sum(mask)
    least = jnp.min(jnp.where(mask, values, jnp.inf))
    above = jnp.where(mask, values - least, 0.0)
    centred = above - jnp.sum(above) / jnp.maximum(count, 1)
    rounding = ROUNDING * jnp.max(jnp.where(mask, magnitudes, 0.0))
    centred = jnp.where(~mask | (jnp.abs(centred) <= rounding), 0.0, centred)
    variance = jnp.sum(centred**2) / jnp.maximum(count - 1, 1)
    return jnp.clip(centred * jax.lax.rsqrt(variance + 1e-8), -MAX_WHITENED, MAX_WHITENED)
