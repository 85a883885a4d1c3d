"""GiGPO: the episode's advantage plus the step's among the visits of its state (Feng et al., arXiv 2505.10978)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.grpo import compare_episodes, normalized
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import return_magnitudes, step_returns


def gigpo(
    batch: Batch,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    statistics: str = "per_step",
    normalize: str = "mean_std",
    invalid_penalty: float = 0.1,
) -> Estimate:
    """GRPO's advantage plus `step_weight` times the step advantage.

    The record's two levels are the prompt group (-1), whose advantage is the episode's, and the state's group (0).
    """
    returns = step_returns(batch, gamma, invalid_penalty)
    step, step_sizes = step_advantages(batch, returns, return_magnitudes(batch, gamma, invalid_penalty), normalize)
    return with_episode(batch, returns, step, step_sizes, step_weight, statistics, normalize, invalid_penalty)


def step_advantages(batch: Batch, returns: jax.Array, magnitudes: jax.Array, normalize: str) -> tuple[jax.Array, jax.Array]:
    """Returns f32[B, T] against the other visits of the state in the prompt group: (f32[B, T], group sizes i32[B, T]).

    magnitudes: f32[B, T], the sums of the returns' absolute terms.
    `mean_std` divides by (sample std + 1e-6). A state visited once gives 0.
    """
    steps = grouping.sort_contexts(batch, history_length=0)
    return compare_in(steps.segments[1], steps, returns, magnitudes, normalize)


def compare_in(
    segment: jax.Array, steps: grouping.Sorted, values: jax.Array, magnitudes: jax.Array, normalize: str
) -> tuple[jax.Array, jax.Array]:
    """Returns f32[B, T] against the others of their groups, `segment` i32[B T] of the ordered steps: as `step_advantages`."""
    size = grouping.group_size(segment)
    ordered = grouping.steps_in_order(values, steps)
    advantages = grouping.group_deviations(ordered, segment, size, grouping.steps_in_order(magnitudes, steps))
    if normalize == "mean_std":
        advantages = advantages / (grouping.group_std(advantages, segment, size - 1) + grouping.EPSILON)
    return grouping.steps_in_place(advantages, steps, values.shape), grouping.steps_in_place(size, steps, values.shape)


def with_episode(
    batch: Batch,
    returns: jax.Array,
    step: jax.Array,
    step_sizes: jax.Array,
    step_weight: float,
    statistics: str,
    normalize: str,
    invalid_penalty: float,
) -> Estimate:
    """Returns the record of GRPO's advantage plus `step_weight` times the advantage `step` f32[B, T]."""
    episodes = compare_episodes(batch, statistics, invalid_penalty)
    episode = normalized(episodes, normalize)
    return Estimate(
        advantages=episode + step_weight * step,
        returns=returns,
        level_advantages=jnp.stack([episode, step], axis=-1),
        level_sizes=jnp.stack([episodes.sizes, step_sizes], axis=-1),
        level_weights=jnp.where(batch.mask[..., None], jnp.array([1.0, step_weight]), 0.0),
        scores=episodes.scores,
        levels=(-1, 0),
    )
