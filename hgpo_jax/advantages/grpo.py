"""GRPO: an episode's score against its prompt group (Shao et al., 2024, arXiv 2402.03300)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import episode_magnitudes, episode_scores, penalties


def grpo(batch: Batch, *, statistics: str = "per_step", normalize: str = "mean_std", invalid_penalty: float = 0.1) -> Estimate:
    """Episode score minus the prompt group's mean, over (sample std + 1e-6) with `mean_std`.

    statistics: what mean and std are taken over. `per_step`: every step counts once, so that long trajectories weigh more
        (the released code's default). `per_trajectory`: every trajectory counts once, shared out equally among its steps.
        (The released code lets its first step stand for it. A penalty on a later step is then outside the statistics, and
        is divided by epsilon where the episodes score the same.)
    invalid_penalty: subtracted from the score of the steps whose action was invalid, before the statistics are taken.
    A group that counts one step or trajectory has mean 0 and std 1.

    Every step is part of the std that divides it, so with `mean_std` |A| is at most the square root of the group's number
    of steps (`per_step`), or of its trajectories times their longest (`per_trajectory`), whatever the scores.
    """
    episodes = compare_episodes(batch, statistics, invalid_penalty)
    return Estimate(normalized(episodes, normalize), episodes.scores)


class Comparison(NamedTuple):
    """Each step's episode compared with its group, all [B, T].

    scores:     f32, the episode's score less the step's penalty.
    sizes:      i32, steps or trajectories counted in the group's statistics.
    deviations: f32, score minus the group's mean.
    stds:       f32, the group's sample standard deviation, 0 for a group of one.
    """

    scores: jax.Array
    sizes: jax.Array
    deviations: jax.Array
    stds: jax.Array


def compare_episodes(batch: Batch, statistics: str, invalid_penalty: float) -> Comparison:
    """Compare the episode scores of each step's peers."""
    shape = batch.mask.shape
    scores = episode_scores(batch) - penalties(batch, invalid_penalty)
    if statistics == "per_step":
        steps = grouping.sort_steps([batch.peers], batch.mask)
        segment = steps.segments[-1]
        size = grouping.group_size(segment)
        weights: jax.Array | float = 1.0
    else:
        trajectories = jnp.broadcast_to(jnp.arange(shape[0], dtype=jnp.int32)[:, None], shape)
        steps = grouping.sort_steps([batch.peers, trajectories], batch.mask)
        segment, trajectory = steps.segments
        # 1 on the first step of each trajectory in each group.
        size = grouping.group_sum(jnp.diff(trajectory, prepend=-1), segment)
        weights = 1 / grouping.group_size(trajectory)
    ordered = grouping.steps_in_order(scores, steps)
    magnitudes = grouping.steps_in_order(episode_magnitudes(batch, invalid_penalty), steps)
    deviations = grouping.group_deviations(ordered, segment, size, magnitudes, weights)
    std = grouping.group_std(deviations, segment, size - 1, weights)
    return Comparison(scores, *(grouping.steps_in_place(x, steps, shape) for x in (size, deviations, std)))


def normalized(episodes: Comparison, normalize: str) -> jax.Array:
    """Returns GRPO's advantage from the comparison, f32[B, T]."""
    alone = episodes.sizes == 1
    centred = jnp.where(alone, episodes.scores, episodes.deviations)
    if normalize == "mean":
        return centred
    return centred / (jnp.where(alone, 1.0, episodes.stds) + grouping.EPSILON)
