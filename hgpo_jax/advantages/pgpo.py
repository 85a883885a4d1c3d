"""PGPO: a step against the visits of its state, by its return and by where it leads (Zheng et al., 2026, arXiv 2609.02236)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.gagpo import state_values
from hgpo_jax.advantages.gigpo import step_advantages
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import following, last_steps, return_magnitudes, step_returns


def pgpo(
    batch: Batch,
    *,
    success: jax.Array,
    gamma: float = 0.95,
    normalize: str = "mean_std",
    invalid_penalty: float = 0.1,
) -> Estimate:
    """`A = A_S + (1 - success rate)^2 A_phi` (eq. 11, with the paper's alpha = 2 and beta = 1); no episode part.

    success: bool[B]; the rate is that of the trajectory's prompt group.
    gamma: of the return; the potential is not discounted, as in the paper.
    normalize: of A_S, GiGPO's step advantage; `mean_std` in the paper.
    A_phi: z-score (sample std + 1e-6) of `Phi(s') - Phi(s)` among the visits of s in the prompt group. Phi is the mean
        return of a state's visits, and after the last step that step's reward. Returns and rewards are the environment's:
        the penalty for an invalid action is in A_S alone.
    The record's only level is 0, with advantage A_S; the rest of the advantage is the weighted A_phi.
    """
    returns = step_returns(batch, gamma, invalid_penalty)
    step, sizes = step_advantages(batch, returns, return_magnitudes(batch, gamma, invalid_penalty), normalize)
    potential, _ = state_values(batch, gamma)
    after = jnp.where(last_steps(batch.mask), batch.rewards, following(potential, batch.mask))
    # Rounding may separate means that are equal in theory.
    magnitudes = return_magnitudes(batch, gamma, 0.0) + jnp.abs(after) + jnp.abs(potential)
    z, _ = step_advantages(batch, after - potential, magnitudes, "mean_std")
    difficulty = (1 - success_rates(batch, success)) ** 2
    return Estimate(
        advantages=step + difficulty[:, None] * z,
        returns=returns,
        level_advantages=step[..., None],
        level_sizes=sizes[..., None],
        level_weights=batch.mask[..., None].astype(jnp.float32),
        levels=(0,),
    )


def success_rates(batch: Batch, success: jax.Array) -> jax.Array:
    """Returns f32[B]: share of successes among the prompt group's trajectories; those without a step are not counted."""
    happened = batch.mask[:, :1]
    trajectories = grouping.sort_steps([batch.groups[:, None]], happened)
    ordered = grouping.steps_in_order(success[:, None].astype(jnp.float32), trajectories)
    segment = trajectories.segments[0]
    rates = grouping.group_sum(ordered, segment) / grouping.group_size(segment)
    return grouping.steps_in_place(rates, trajectories, success.shape)
