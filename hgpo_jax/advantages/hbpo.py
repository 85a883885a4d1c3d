"""HBPO: episodes of one task under different turn budgets, which their prompts tell (authors' code, ZJU-REAL/HBPO)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.grpo import compare_episodes, normalized
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import penalties

BEST = 4.0  # what a success would score that took no turn


def hbpo(
    batch: Batch, *, signals: jax.Array, success: jax.Array, statistics: str = "per_step", invalid_penalty: float = 0.1
) -> Estimate:
    """GRPO's advantage, with mean and std, of `budget_score`; plus the subgroup's mean score less the best of its budget.

    signals: f32[B, T, S]; the first is the episode's budget of turns, the same in all its steps. A subgroup has the episodes
        of a prompt group with one budget.
    success: bool[B]. The environment's own rewards are not used. The most turns of an episode are T.
    Other options as in `grpo`. The penalty is subtracted in the first term; the paper has tokens for turns, and a score of -1
    for an answer without the right format. Its code adds the second term twice, the paper once, as here.
    """
    limit = batch.mask.shape[1]
    budget = jnp.where(batch.mask, signals[:, :1, 0], 0.0)
    turns = batch.mask.sum(axis=1, keepdims=True)
    scores = jnp.where(success[:, None], budget_score(turns, budget[:, :1], limit), 0.0)
    scored = batch._replace(rewards=jnp.where(jnp.arange(limit) == 0, scores, 0.0) * batch.mask)
    episodes = compare_episodes(scored, statistics, invalid_penalty)
    columns = jnp.stack([batch.peers, jax.lax.bitcast_convert_type(budget, jnp.int32)], axis=-1)
    subgroups = scored._replace(peers=grouping.state_ids(columns, batch.mask))
    of_subgroup = compare_episodes(subgroups, statistics, invalid_penalty=0.0)
    mean = jnp.where(batch.mask, scores - of_subgroup.deviations, 0.0)
    best = jnp.where(batch.mask, budget_score(budget, budget, limit), 0.0)
    advantages = normalized(episodes, "mean_std") + mean - best
    return Estimate(advantages, jnp.where(batch.mask, scores, 0.0) - penalties(batch, invalid_penalty))


def budget_score(length: jax.Array, budget: jax.Array, limit: float) -> jax.Array:
    """Returns the score of a success of this length, f32: that of the budget's own length if it was kept, else less.

    `4 cos(pi max(length, budget) / (2 limit))`, minus 1 / limit for each turn, or token, beyond the budget.
    """
    beyond = jnp.maximum(length - budget, 0)
    return BEST * jnp.cos(jnp.pi * jnp.maximum(length, budget) / (2 * limit)) - beyond / limit
