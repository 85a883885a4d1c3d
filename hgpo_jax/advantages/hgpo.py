"""HGPO: a step against the steps that share its last k observations, for every k at once (arXiv 2602.22817)."""

from __future__ import annotations

import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.grpo import compare_episodes, normalized
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import return_magnitudes, step_returns


def hgpo(
    batch: Batch,
    *,
    history_length: int = 2,
    gamma: float = 0.95,
    alpha: float = 1.0,
    normalize: str = "mean_std",
    weight_offset: float = 2,
    base_group: bool = False,
    invalid_penalty: float = 0.1,
) -> Estimate:
    """`A = sum_k w_k A_k / (sum_k w_k + 1e-6)` over the levels whose `A_k` is not 0, `w_k = (k + weight_offset)^alpha`.

    history_length: K. Level k = 0..K compares the return with those of the steps of the same prompt group with the same
        (s_{t-k}, ..., s_t); steps with t < k have no level k.
    normalize: `mean_std` divides by (population std + 1e-6), as released for ALFWorld; `mean` only centres, as released for
        WebShop, and as training does by default (`advantage.normalize`).
    weight_offset: 2 in the released code, 1 in the paper.
    base_group: adds GRPO's advantage over the step rows as one more level (-1), of weight `(weight_offset - 1)^alpha`.
    """
    shape = batch.mask.shape
    returns = step_returns(batch, gamma, invalid_penalty)
    steps = grouping.sort_contexts(batch, history_length)
    ordered = grouping.steps_in_order(returns, steps)
    magnitudes = grouping.steps_in_order(return_magnitudes(batch, gamma, invalid_penalty), steps)
    time = steps.order % shape[1]
    advantages, sizes = [], []
    for level in range(history_length + 1):
        segment = steps.segments[level + 1]
        size = grouping.group_size(segment)
        advantage = grouping.group_deviations(ordered, segment, size, magnitudes)
        if normalize == "mean_std":
            advantage = advantage / (grouping.group_std(advantage, segment, size) + grouping.EPSILON)
        # A step with fewer than `level` predecessors has no such history and takes no part in the level.
        advantages.append(jnp.where(time >= level, advantage, 0.0))
        sizes.append(jnp.where(time >= level, size, 0))
    level_advantages = grouping.steps_in_place(jnp.stack(advantages), steps, shape)
    level_sizes = grouping.steps_in_place(jnp.stack(sizes), steps, shape)
    levels, scores = tuple(range(history_length + 1)), None
    if base_group:
        episodes = compare_episodes(batch, "per_step", invalid_penalty)
        base = normalized(episodes, normalize)
        level_advantages = jnp.concatenate([base[..., None], level_advantages], axis=-1)
        level_sizes = jnp.concatenate([episodes.sizes[..., None], level_sizes], axis=-1)
        levels, scores = (-1, *levels), episodes.scores
    weights = jnp.array([float(level + weight_offset) ** alpha for level in levels], jnp.float32)
    # A level without a peer, or where the step equals its group's mean, gets no weight: the others share it.
    weights = jnp.where(level_advantages != 0, weights, 0.0)
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + grouping.EPSILON)
    return Estimate(
        advantages=jnp.sum(weights * level_advantages, axis=-1),
        returns=returns,
        level_advantages=level_advantages,
        level_sizes=level_sizes,
        level_weights=weights,
        scores=scores,
        levels=levels,
    )
