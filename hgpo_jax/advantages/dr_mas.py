"""Dr. MAS: GRPO for teams of agents, each compared with itself only (Feng et al., 2026, arXiv 2602.08847)."""

from __future__ import annotations

import jax

from hgpo_jax.advantages.grouping import by_role
from hgpo_jax.advantages.grpo import grpo
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
    return grpo(by_role(batch, agents), statistics=statistics, normalize=normalize, invalid_penalty=invalid_penalty)
