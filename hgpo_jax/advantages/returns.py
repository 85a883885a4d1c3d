"""Sums along a trajectory: discounted returns, generalised advantages, episode scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages.record import Batch


def discounted_sum(values: jax.Array, discount: float) -> jax.Array:
    """f32[B, T] -> f32[B, T]: `y_t = values_t + discount * y_{t+1}`, zero after the last column."""

    def step(later, value):
        now = value + discount * later
        return now, now

    _, sums = jax.lax.scan(step, jnp.zeros_like(values[:, 0]), values.T, reverse=True)
    return sums.T


def step_returns(batch: Batch, gamma: float, invalid_penalty: float) -> jax.Array:
    """f32[B, T]: `sum_{j>=t} gamma^(j-t) r_j`, less the penalty on the invalid step itself.

    The penalty is subtracted after discounting, so an invalid action never lowers the return of the steps before it.
    """
    return discounted_sum(batch.rewards, gamma) - penalties(batch, invalid_penalty)


def penalties(batch: Batch, invalid_penalty: float) -> jax.Array:
    """f32[B, T]: the penalty on the steps whose action was invalid, else 0."""
    return invalid_penalty * batch.invalid.astype(jnp.float32)


def episode_scores(batch: Batch) -> jax.Array:
    """f32[B, T]: the sum of the trajectory's rewards on each of its steps, before penalties."""
    return jnp.where(batch.mask, jnp.sum(batch.rewards, axis=1, keepdims=True), 0.0)


def following(values: jax.Array, mask: jax.Array) -> jax.Array:
    """f32[B, T]: each step's successor value in its trajectory, 0 after the last step."""
    values = jnp.where(mask, values, 0.0)
    return jnp.pad(values[:, 1:], ((0, 0), (0, 1)))


def generalized_advantages(
    rewards: jax.Array, values: jax.Array, mask: jax.Array, gamma: float, lam: float
) -> jax.Array:
    """GAE (Schulman et al., 2016, eq. 16), f32[B, T]; the value after the last step is 0.

    Serves tokens as well as steps: the rows may be responses and the columns their tokens.
    """
    deltas = rewards + gamma * following(values, mask) - values
    return discounted_sum(jnp.where(mask, deltas, 0.0), gamma * lam)
