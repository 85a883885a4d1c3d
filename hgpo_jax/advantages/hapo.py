"""HAPO's advantage: GRPO's, with statistics in which every response counts with its tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.grpo import compare_episodes, normalized
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import episode_magnitudes

LARGEST = 5.0


def hapo(batch: Batch, *, lengths: jax.Array, statistics: str = "per_step", invalid_penalty: float = 0.1) -> Estimate:
    """Episode score minus the mean, over (std + 1e-6), both over the tokens of the prompt group; the std is the population's.

    lengths: i32[B, T], tokens of each step's response.
    A prompt group with an advantage of 5 or more in absolute value has GRPO's, with mean and std, in place of it; `statistics`
    and the penalty are as in `grpo`. The rule is that of the authors' code (github.com/starriver030515/HAPO).
    """
    plain = compare_episodes(batch, statistics, invalid_penalty)
    steps = grouping.sort_steps([batch.peers], batch.mask)
    segment = steps.segments[-1]
    scores, tokens, magnitudes, of_grpo = (
        grouping.steps_in_order(values, steps)
        for values in (
            plain.scores,
            jnp.where(batch.mask, lengths, 0).astype(jnp.float32),
            episode_magnitudes(batch, invalid_penalty),
            normalized(plain, "mean_std"),
        )
    )
    size = jnp.maximum(grouping.group_sum(tokens, segment), 1)
    deviations = grouping.group_deviations(scores, segment, size, magnitudes, tokens)
    advantages = deviations / (grouping.group_std(deviations, segment, size, tokens) + grouping.EPSILON)
    least = grouping.group_min(-jnp.abs(advantages), segment)
    advantages = jnp.where(least <= -LARGEST, of_grpo, advantages)
    return Estimate(grouping.steps_in_place(advantages, steps, batch.mask.shape), plain.scores)
