"""PPO's advantages from a learned value (Schulman et al., 2016, arXiv 1506.02438)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import generalized_advantages, penalties, whitened


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
