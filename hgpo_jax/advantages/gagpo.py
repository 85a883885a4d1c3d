"""GAGPO: generalised advantages from group means as values (Zhu et al., 2026, arXiv 2605.13217)."""

from __future__ import annotations

import jax

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.gae import generalized_advantages
from hgpo_jax.advantages.gigpo import compare_in
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import penalties, return_magnitudes, step_returns


def gagpo(
    batch: Batch,
    *,
    gamma: float = 0.95,
    lam: float = 0.95,
    normalize: str = "mean_std",
    invalid_penalty: float = 0.1,
) -> Estimate:
    """GAE(lam) on `V(s)`, the mean return of the state's visits in the prompt group, normalised over the prompt group.

    normalize: over the prompt group's steps, `mean` subtracts the mean and `mean_std` divides by (sample std + 1e-6)
        also. The penalty is subtracted from the invalid step's advantage before.
    """
    values, _ = state_values(batch, gamma)
    advantages = generalized_advantages(batch.rewards, values, batch.mask, gamma, lam)
    advantages = advantages - penalties(batch, invalid_penalty)
    magnitudes = return_magnitudes(batch, gamma, invalid_penalty)
    advantages = among_peers(batch, advantages, magnitudes, normalize)
    return Estimate(advantages, step_returns(batch, gamma, invalid_penalty))


def state_values(batch: Batch, gamma: float) -> tuple[jax.Array, jax.Array]:
    """Mean unpenalised return of each state's visits in its prompt group: (f32[B, T], visits i32[B, T])."""
    returns = step_returns(batch, gamma, invalid_penalty=0.0)
    steps = grouping.sort_contexts(batch, history_length=0)
    size = grouping.group_size(steps.segments[1])
    mean = grouping.group_mean(grouping.steps_in_order(returns, steps), steps.segments[1], size)
    shape = batch.mask.shape
    return grouping.steps_in_place(mean, steps, shape), grouping.steps_in_place(size, steps, shape)


def among_peers(batch: Batch, values: jax.Array, magnitudes: jax.Array, normalize: str) -> jax.Array:
    """Returns f32[B, T] against all steps of the prompt group (of a role), f32[B, T]; options as in `step_advantages`."""
    steps = grouping.sort_steps([batch.peers], batch.mask)
    return compare_in(steps.segments[0], steps, values, magnitudes, normalize)[0]
