"""PPO's advantages from a learned value (Schulman et al., 2016, arXiv 1506.02438)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages.grouping import ROUNDING
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import discounted_sum, following, last_steps, penalties, whitened


def gae(
    batch: Batch,
    *,
    values: jax.Array,
    final_values: jax.Array,
    gamma: float = 0.95,
    lam: float = 0.95,
    whiten: bool = True,
    invalid_penalty: float = 0.1,
) -> Estimate:
    """Generalised advantages, whitened over the batch unless `whiten` is False; groups and states are ignored.

    values: f32[B, T], the value head's prediction before each step.
    final_values: f32[B], its prediction after the last step of a trajectory that a time limit cut off, 0 where the task ended.
    The penalty is subtracted from the advantage of the invalid step. `returns` are the value targets: advantage before
    whitening, plus value.
    """
    advantages = generalized_advantages(batch.rewards, values, batch.mask, gamma, lam, final_values)
    advantages = advantages - penalties(batch, invalid_penalty)
    returns = jnp.where(batch.mask, advantages + values, 0.0)
    return Estimate(whitened(advantages, batch.mask) if whiten else advantages, returns)


def generalized_advantages(
    rewards: jax.Array, values: jax.Array, mask: jax.Array, gamma: float, lam: float, final_values: jax.Array | None = None
) -> jax.Array:
    """GAE (Schulman et al., 2016, eq. 16), f32[B, T]: `A_t = d_t + gamma lam A_{t+1}` with `d_t = r_t + gamma V_{t+1} - V_t`.

    values: V, f32[B, T]. final_values: f32[B], the value after the last step, by default 0.
    Serves tokens as well as steps: the rows may be responses and the columns their tokens.
    Temporal differences below rounding are 0, so that a later division by their spread cannot blow them up: where all
    trajectories of a prompt group are the same, group means as values leave nothing else.
    """
    after = following(values, mask)
    if final_values is not None:
        after = jnp.where(last_steps(mask), final_values[:, None], after)
    after = gamma * after
    deltas = rewards + after - values
    scale = jnp.maximum(jnp.abs(rewards), jnp.maximum(jnp.abs(after), jnp.abs(values)))
    deltas = jnp.where(~mask | (jnp.abs(deltas) <= ROUNDING * scale), 0.0, deltas)
    return discounted_sum(deltas, gamma * lam)
