"""Dr. MAS: GRPO for teams of agents, each compared with itself only (Feng et al., 2026, arXiv 2602.08847)."""

from __future__ import annotations

import jax

from hgpo_jax.advantages.grpo import compare_episodes, normalized
from hgpo_jax.advantages.record import Batch, Estimate


def dr_mas(
    batch: Batch,
    *,
    agents: jax.Array,
    statistics: str = "per_step",
    normalize: str = "mean_std",
    invalid_penalty: float = 0.1,
) -> Estimate:
    """GRPO with mean and std over each (prompt group, agent) instead of each prompt group.

    agents: i32[B, T], 0 or more, the agent that acted in each step. Options as in `grpo`; with `per_trajectory` a
        trajectory counts once for every agent that acted in it, shared out among that agent's steps. A score is of the whole
        episode, whichever agent earned its rewards.
    """
    episodes = compare_episodes(batch, statistics, invalid_penalty, agents)
    return Estimate(normalized(episodes, normalize), episodes.scores)
