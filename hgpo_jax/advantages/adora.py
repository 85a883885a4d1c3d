"""ADORA: prompt groups whose successes are no longer than their failures count little (authors' code, ShadeCloak/ADORA)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.grpo import compare_episodes, normalized
from hgpo_jax.advantages.record import Batch, Estimate

LITTLE = 0.1


def adora(
    batch: Batch,
    *,
    success: jax.Array,
    lengths: jax.Array,
    length_limit: int | None = None,
    statistics: str = "per_step",
    normalize: str = "mean_std",
    invalid_penalty: float = 0.1,
) -> Estimate:
    """GRPO's advantage, times 0.1 in prompt groups whose longest success is no longer than their failures on average.

    success: bool[B]; in the authors' code a score above 1.01. lengths: i32[B, T], tokens of each step's response; an
        episode's length is their sum.
    length_limit: failures of so many tokens or more are not counted, because they were probably cut; None: all are. In the
        authors' code 3900, of answers of 4096 at most; episodes of many turns are longer, and few of them are cut.
    A group without success counts little, and one without failures below the limit that has a success counts in full.
    Other options as in `grpo`. The rule is that of the code for language models; the one for vision differs without failures.
    """
    happened = batch.mask[:, :1]
    total = jnp.sum(jnp.where(batch.mask, lengths, 0), axis=1, keepdims=True).astype(jnp.float32)
    trajectories = grouping.sort_steps([batch.groups[:, None]], happened)
    segment = trajectories.segments[0]

    def least(values: jax.Array, of: jax.Array) -> jax.Array:
        return grouping.group_min(grouping.steps_in_order(jnp.where(of & happened, values, jnp.inf), trajectories), segment)

    failed = happened & ~success[:, None] & (total < (jnp.inf if length_limit is None else length_limit))
    failures = grouping.group_sum(grouping.steps_in_order(failed.astype(jnp.float32), trajectories), segment)
    tokens = grouping.group_sum(grouping.steps_in_order(jnp.where(failed, total, 0.0), trajectories), segment)
    mean = jnp.where(failures > 0, tokens / jnp.maximum(failures, 1), -jnp.inf)
    explores = -least(-total, success[:, None]) > mean
    weight = grouping.steps_in_place(jnp.where(explores, 1.0, LITTLE), trajectories, happened.shape)
    episodes = compare_episodes(batch, statistics, invalid_penalty)
    return Estimate(weight * normalized(episodes, normalize), episodes.scores)
