"""EB-GAE: generalised advantages from a value that empirical Bayes shrinks along HGPO's hierarchy of groups.

Our own estimator. A deep context tells more about a step and has fewer members, so each level's mean is shrunk to its
parent's by how much the levels vary (tau2) against how noisy their members are (s2), both estimated from the batch.
"""

from __future__ import annotations

import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import generalized_advantages, penalties, step_returns


def eb_gae(
    batch: Batch,
    *,
    history_length: int = 2,
    gamma: float = 0.95,
    lam: float = 0.65,
    invalid_penalty: float = 0.1,
) -> Estimate:
    """GAE(lam) on the shrunken value; never divided by a standard deviation.

    Levels j = -1 (the prompt group), 0..K; steps with t < k carry a null observation. N steps, M_j groups, n_j members:
    s2_j   = SSW_j / max(N - M_j, 1), the within-group sum of squares over its degrees of freedom;
    tau2_j = max(0, (SSW_{j-1} - SSW_j - (M_j - M_{j-1}) s2_j) / D_j), D_j = N - sum n_j / n_{j-1}, and 0 if D_j = 0;
    b_{-1} = mean_{-1}, b_j = w_j mean_j + (1 - w_j) b_{j-1}, w_j = n_j tau2_j / (n_j tau2_j + s2_j), V = b_K.
    A prompt group whose returns are all equal gives exactly 0: equal values have exact means, and
    `generalized_advantages` drops what rounding leaves. The penalty is subtracted from the advantage last.

    level_advantages are `R - mean_j` and level_weights each mean's share in V. stats: `s2` f32[K + 2],
    `tau2` f32[K + 1], and `rho = sum_{k >= 1} tau2_k / s2_K`, what depth can add (s2 floored at 1e-12).
    """
    shape = batch.mask.shape
    returns = step_returns(batch, gamma, invalid_penalty=0.0)
    steps = grouping.sort_contexts(batch, history_length)
    ordered = grouping.steps_in_order(returns, steps)
    happened = steps.mask

    def total(x):
        return jnp.sum(jnp.where(happened, x, 0.0))

    sizes = [grouping.group_size(segment) for segment in steps.segments]
    means = [
        grouping.group_mean(ordered, segment, size) for segment, size in zip(steps.segments, sizes, strict=True)
    ]
    counts = [jnp.max(jnp.where(happened, segment, -1)) + 1 for segment in steps.segments]
    s2 = [
        total((ordered - mean) ** 2) / jnp.maximum(jnp.sum(happened) - count, 1)
        for mean, count in zip(means, counts, strict=True)
    ]
    value, tau2, shares = means[0], [], [jnp.ones_like(ordered)]
    for j in range(1, len(means)):
        # SSW_{j-1} - SSW_j as the sum of squares between the nested means: no cancellation.
        between = total((means[j] - means[j - 1]) ** 2)
        spare = total(1 - sizes[j] / sizes[j - 1])
        excess = between - (counts[j] - counts[j - 1]) * s2[j]
        tau2.append(jnp.where(spare > 0, jnp.maximum(excess / jnp.where(spare > 0, spare, 1), 0), 0.0))
        signal = sizes[j] * tau2[-1]
        weight = jnp.where(signal > 0, signal / jnp.where(signal > 0, signal + s2[j], 1), 0.0)
        value = value + weight * (means[j] - value)
        shares = [share * (1 - weight) for share in shares] + [weight]

    values = grouping.steps_in_place(value, steps, shape)
    advantages = generalized_advantages(batch.rewards, values, batch.mask, gamma, lam)
    penalty = penalties(batch, invalid_penalty)
    return Estimate(
        advantages=advantages - penalty,
        returns=returns - penalty,
        level_advantages=grouping.steps_in_place(ordered - jnp.stack(means), steps, shape),
        level_sizes=grouping.steps_in_place(jnp.stack(sizes), steps, shape),
        level_weights=grouping.steps_in_place(jnp.stack(shares), steps, shape),
        stats={
            "rho": sum(tau2[1:], jnp.zeros(())) / jnp.maximum(s2[-1], 1e-12),
            "tau2": jnp.stack(tau2),
            "s2": jnp.stack(s2),
        },
        levels=tuple(range(-1, history_length + 1)),
    )
