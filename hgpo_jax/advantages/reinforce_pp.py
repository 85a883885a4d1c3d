"""REINFORCE++: advantages whitened over the whole batch (Hu et al., 2025, arXiv 2501.03262)."""

from __future__ import annotations

from hgpo_jax.advantages.grpo import compare_episodes, normalized
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import episode_magnitudes, return_magnitudes, step_returns, whitened


def reinforce_pp(batch: Batch, *, gamma: float = 0.95, invalid_penalty: float = 0.1) -> Estimate:
    """Discounted returns, whitened over the batch. A step's whole response is one action here, discounted as one."""
    returns = step_returns(batch, gamma, invalid_penalty)
    return Estimate(whitened(returns, batch.mask, return_magnitudes(batch, gamma, invalid_penalty)), returns)


def reinforce_pp_baseline(batch: Batch, *, statistics: str = "per_step", invalid_penalty: float = 0.1) -> Estimate:
    """Episode score minus the prompt group's mean, whitened over the batch. Options as in `grpo`."""
    episodes = compare_episodes(batch, statistics, invalid_penalty)
    magnitudes = episode_magnitudes(batch, invalid_penalty)
    return Estimate(whitened(normalized(episodes, "mean"), batch.mask, magnitudes), episodes.scores)
