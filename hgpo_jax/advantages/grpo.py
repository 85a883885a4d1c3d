"""GRPO: an episode's score against its prompt group (Shao et al., 2024, arXiv 2402.03300)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import episode_scores, penalties


def grpo(
    batch: Batch, *, statistics: str = "per_step", normalize: str = "mean_std", invalid_penalty: float = 0.1
) -> Estimate:
    """Episode score minus the prompt group's mean, over (sample std + 1e-6) with `mean_std`.

    statistics: the rows that mean and std are taken over. `per_step`: every step counts, so that long trajectories
        weigh more (the released code's default). `per_trajectory`: every trajectory counts once, unpenalised.
    invalid_penalty: subtracted from the score of the rows whose action was invalid.
    A group of a single row has mean 0 and std 1.
    """
    episodes = compare_episodes(batch, statistics, invalid_penalty)
    return Estimate(normalized(episodes, normalize), episodes.scores)


class Episodes(NamedTuple):
    """Each step's episode beside its group, all [B, T].

    scores:     f32, the episode's score less the step's penalty.
    sizes:      i32, rows counted in the group's statistics.
    deviations: f32, score minus the group's mean.
    stds:       f32, the group's sample standard deviation, 0 for a group of one.
    """

    scores: jax.Array
    sizes: jax.Array
    deviations: jax.Array
    stds: jax.Array


def compare_episodes(
    batch: Batch, statistics: str, invalid_penalty: float, agents: jax.Array | None = None
) -> Episodes:
    """Compare the episode scores inside each prompt group, or each (prompt group, agent) with `agents` i32[B, T]."""
    shape = batch.mask.shape
    scores, penalty = episode_scores(batch), penalties(batch, invalid_penalty)
    keys = [jnp.broadcast_to(batch.groups[:, None], shape)] + ([] if agents is None else [agents])
    if statistics == "per_step":
        values = scores - penalty
        steps = grouping.sort_steps(keys, batch.mask)
        counted = jnp.ones_like(steps.order)
    else:
        values = scores
        trajectories = jnp.broadcast_to(jnp.arange(shape[0], dtype=jnp.int32)[:, None], shape)
        steps = grouping.sort_steps([*keys, trajectories], batch.mask)
        counted = jnp.diff(steps.segments[-1], prepend=-1)  # 1 on the first row of each trajectory in each group
    segment = steps.segments[len(keys) - 1]
    ordered = grouping.steps_in_order(values, steps)
    size = grouping.group_sum(counted, segment)
    deviations = ordered - grouping.group_mean(ordered, segment, size, counted)
    std = grouping.spread(deviations, segment, size - 1, counted)
    sizes, deviations, stds = (grouping.steps_in_place(x, steps, shape) for x in (size, deviations, std))
    if statistics == "per_trajectory":
        deviations = deviations - penalty
    return Episodes(scores - penalty, sizes, deviations, stds)


def normalized(episodes: Episodes, normalize: str) -> jax.Array:
    """f32[B, T]: GRPO's advantage from the comparison."""
    alone = episodes.sizes == 1
    centred = jnp.where(alone, episodes.scores, episodes.deviations)
    if normalize == "mean":
        return centred
    return centred / (jnp.where(alone, 1.0, episodes.stds) + grouping.EPSILON)
