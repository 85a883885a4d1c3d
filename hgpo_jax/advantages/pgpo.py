"""PGPO: GiGPO with a potential difference added to the step's advantage."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.gagpo import state_values
from hgpo_jax.advantages.gigpo import step_advantages, with_episode
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import following, step_returns


def pgpo(
    batch: Batch,
    *,
    success: jax.Array,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    statistics: str = "per_step",
    normalize: str = "mean_std",
    invalid_penalty: float = 0.1,
) -> Estimate:
    """GiGPO whose step part is `step + (1 - success rate)^2 * z`; options as in `gigpo`.

    success: bool[B]; the rate is that of the trajectory's prompt group.
    z: z-score of `gamma Phi(s') - Phi(s)` among the visits of s in the prompt group (sample std + 1e-6), where Phi is
        the mean return of the state's visits. After the last step Phi is that step's own reward: the outcome, known
        without a group. Were it 0, as after an episode in potential-based shaping, the step that succeeds would score
        below its alternatives.
    """
    returns = step_returns(batch, gamma, invalid_penalty)
    step, sizes = step_advantages(batch, returns, normalize)
    potential, _ = state_values(batch, gamma)
    last = batch.mask & ~jnp.pad(batch.mask[:, 1:], ((0, 0), (0, 1)))
    gain = gamma * jnp.where(last, batch.rewards, following(potential, batch.mask)) - potential
    z, _ = step_advantages(batch, gain, "mean_std")
    difficulty = (1 - success_rates(batch, success)) ** 2
    return with_episode(
        batch, returns, step + difficulty[:, None] * z, sizes, step_weight, statistics, normalize, invalid_penalty
    )


def success_rates(batch: Batch, success: jax.Array) -> jax.Array:
    """f32[B]: share of successes among the prompt group's trajectories; those without a step are not counted."""
    happened = batch.mask[:, :1]
    trajectories = grouping.sort_steps([batch.groups[:, None]], happened)
    ordered = grouping.steps_in_order(success[:, None].astype(jnp.float32), trajectories)
    segment = trajectories.segments[0]
    rates = grouping.group_sum(ordered, segment) / grouping.group_size(segment)
    return grouping.steps_in_place(rates, trajectories, success.shape)
