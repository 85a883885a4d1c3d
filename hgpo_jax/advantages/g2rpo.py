"""G2RPO: ranks of scores, mapped to a normal distribution in each prompt group, and again in each task type.

The rule is that of the authors' code (github.com/uclanlp/openvlthinker), without its optional parts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtri

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import episode_scores, penalties


def g2rpo(batch: Batch, *, task: jax.Array, invalid_penalty: float = 0.1) -> Estimate:
    """Normal scores of the episodes' scores among their prompt group, then normal scores of these among their task type.

    task: i32[B], 0 or more, the type of each trajectory's task. A trajectory counts once, and its steps share its advantage.
    Any monotone map of the rewards of a prompt group leaves the advantages as they are. A prompt group of equal scores takes
    its place in the middle of its task type; the authors drop it, as `keep="informative"` does.
    The penalty is subtracted from the advantage of the invalid step itself.
    """
    happened = batch.mask[:, 0]
    scores, sizes = jnp.sum(batch.rewards, axis=1), jnp.sum(jnp.abs(batch.rewards), axis=1)
    in_group = normal_scores(scores, sizes, batch.groups, happened)
    in_task = normal_scores(in_group, jnp.abs(in_group), task, happened)
    penalty = penalties(batch, invalid_penalty)
    advantages = jnp.where(batch.mask, in_task[:, None], 0.0) - penalty
    return Estimate(advantages, episode_scores(batch) - penalty)


def normal_scores(values: jax.Array, magnitudes: jax.Array, groups: jax.Array, counted: jax.Array) -> jax.Array:
    """Maps each value to the quantile of its rank j of N in its group, `Phi^-1((j - 1/2) / N)`; all f32[B], 0 if not counted.

    Equal values share the mean of their quantiles, and equal are those within the rounding of sums of such `magnitudes`.
    groups: i32[B], counted: bool[B].
    """
    keys = jnp.where(counted, groups, grouping.PADDING_KEY), jnp.where(counted, values, 0.0)
    rows = jnp.arange(values.size, dtype=jnp.int32)
    group, ordered, order = jax.lax.sort((*keys, rows), num_keys=2)
    begins = jnp.pad(group[1:] != group[:-1], (1, 0), constant_values=True)
    segment = jnp.cumsum(begins, dtype=jnp.int32) - 1
    size = grouping.group_size(segment)
    rank = rows - jax.lax.cummax(jnp.where(begins, rows, 0))
    step = jnp.diff(ordered, prepend=ordered[:1])
    differs = grouping.significant(step, segment, magnitudes[order]) != 0
    tie = jnp.cumsum(begins | differs, dtype=jnp.int32) - 1
    ties = grouping.group_size(tie)
    quantiles = grouping.group_mean(ndtri((rank + 0.5) / size), tie, ties)
    quantiles = jnp.where(ties == size, 0.0, quantiles)  # the rounding of quantiles that add up to 0
    return jnp.where(counted, jnp.zeros_like(values).at[order].set(quantiles, unique_indices=True), 0.0)
