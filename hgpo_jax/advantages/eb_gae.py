"""EB-GAE: generalised advantages from a value that empirical Bayes shrinks along HGPO's hierarchy of groups.

Our own estimator. A deep context tells more about a step and has fewer members, so each level's mean is shrunk to its
parent's by how much the levels vary (tau2) against how noisy their members are (s2), both estimated from the batch.
"""

from __future__ import annotations

import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.gae import generalized_advantages
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import penalties, step_returns
from hgpo_jax.advantages.shrinkage import shrink


def eb_gae(
    batch: Batch,
    *,
    history_length: int = 2,
    gamma: float = 0.95,
    lam: float = 0.65,
    invalid_penalty: float = 0.1,
) -> Estimate:
    """GAE(lam) on the shrunken value of the returns, V = b_K of `shrink`; never divided by a standard deviation.

    Steps with t < k carry a null observation. A prompt group whose returns are all equal gives exactly 0: equal values have
    exact means, and `generalized_advantages` drops what rounding leaves. The penalty is subtracted from the advantage last.

    level_advantages are `R - mean_j` and level_weights each mean's share in V. stats: `s2` f32[K + 2],
    `tau2` f32[K + 1], and `rho = sum_{k >= 1} tau2_k / s2_K`, what depth can add (s2 floored at 1e-12).
    """
    returns = step_returns(batch, gamma, invalid_penalty=0.0)
    steps = grouping.sort_contexts(batch, history_length)
    ordered = grouping.steps_in_order(returns, steps)
    shrunken, shape = shrink(ordered, steps), batch.mask.shape
    values = grouping.steps_in_place(shrunken.value, steps, shape)
    advantages = generalized_advantages(batch.rewards, values, batch.mask, gamma, lam)
    penalty = penalties(batch, invalid_penalty)
    return Estimate(
        advantages=advantages - penalty,
        returns=returns - penalty,
        level_advantages=grouping.steps_in_place(ordered - shrunken.means, steps, shape),
        level_sizes=grouping.steps_in_place(shrunken.sizes, steps, shape),
        level_weights=grouping.steps_in_place(shrunken.shares, steps, shape),
        stats={
            "rho": jnp.sum(shrunken.tau2[1:]) / jnp.maximum(shrunken.s2[-1], 1e-12),
            "tau2": shrunken.tau2,
            "s2": shrunken.s2,
        },
        levels=tuple(range(-1, history_length + 1)),
    )
