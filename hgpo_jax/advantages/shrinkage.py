"""Empirical Bayes along HGPO's hierarchy of groups: each level's mean shrunk to its parent's."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import grouping


class Shrunken(NamedTuple):
    """The result of `shrink` for N values; levels j = -1 (the prompt group), 0..K."""

    value: jax.Array  # f32[N], b_K
    means: jax.Array  # f32[K + 2, N], mean_j
    sizes: jax.Array  # f32[K + 2, N], n_j
    shares: jax.Array  # f32[K + 2, N], each mean's share in the value; they add up to 1
    s2: jax.Array  # f32[K + 2], within the groups of each level
    tau2: jax.Array  # f32[K + 1], between the groups of levels 0..K in their parents


def shrink(values: jax.Array, steps: grouping.Sorted) -> Shrunken:
    """Shrinks the means of values f32[N], in the steps' order, by how much levels vary against how noisy their members are.

    N steps, M_j groups, n_j members:
    s2_j   = SSW_j / max(N - M_j, 1), the within-group sum of squares over its degrees of freedom;
    tau2_j = max(0, (SSW_{j-1} - SSW_j - (M_j - M_{j-1}) s2_j) / D_j), D_j = N - sum n_j / n_{j-1}, and 0 if D_j = 0;
    b_{-1} = mean_{-1}, b_j = w_j mean_j + (1 - w_j) b_{j-1}, w_j = n_j tau2_j / (n_j tau2_j + s2_j).
    """
    happened = steps.mask

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(happened, x, 0.0))

    sizes = [grouping.group_size(segment) for segment in steps.segments]
    means = [grouping.group_mean(values, segment, size) for segment, size in zip(steps.segments, sizes, strict=True)]
    counts = [jnp.max(jnp.where(happened, segment, -1)) + 1 for segment in steps.segments]
    s2 = [
        total((values - mean) ** 2) / jnp.maximum(jnp.sum(happened) - count, 1)
        for mean, count in zip(means, counts, strict=True)
    ]
    value, tau2, shares = means[0], [], [jnp.ones_like(values)]
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
    return Shrunken(value, jnp.stack(means), jnp.stack(sizes), jnp.stack(shares), jnp.stack(s2), jnp.stack(tau2))
