"""BEACON: each step against those that work towards the same milestone (arXiv 2605.06078; its code calls it MiGPO)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from hgpo_jax.advantages.gigpo import step_advantages, with_episode
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import penalties

MILESTONE_REWARD = 10.0


def beacon(
    batch: Batch,
    *,
    signals: jax.Array,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    statistics: str = "per_step",
    normalize: str = "mean",
    invalid_penalty: float = 0.1,
) -> Estimate:
    """GRPO's advantage plus `step_weight` times that of a step among the steps of its prompt group towards the same milestone.

    signals: f32[B, T, S]; the first is how many milestones the state after the step fulfils, a whole number. One that is lost
        and reached again counts once; one that is fulfilled from the start counts for the first step.
    The return of a step is `10 gamma^d`, d steps before the next milestone is reached, and 0 after the last one that is; less
    the penalty. It is compared where as many milestones were reached before. Other options as in `gigpo`.

    The record's two levels are the prompt group (-1) and that group of steps (0). Formulas and scale are those of the authors'
    code (github.com/ZJU-REAL/BEACON). Its milestones are an expert's actions, or pages; here the signal says them.
    """
    fulfilled = jnp.where(batch.mask, signals[..., 0], 0.0).astype(jnp.int32)
    reached = jax.lax.cummax(jnp.maximum(fulfilled, 0), axis=1)
    before = jnp.pad(reached[:, :-1], ((0, 0), (1, 0)))
    returns = _towards_milestones(batch.mask & (reached > before), gamma) - penalties(batch, invalid_penalty)
    magnitudes = jnp.abs(returns)
    step, sizes = step_advantages(batch._replace(states=before), returns, magnitudes, normalize)
    record = with_episode(batch, returns, step, sizes, step_weight, statistics, normalize, invalid_penalty)
    return dataclasses.replace(record, states=before)


def _towards_milestones(milestones: jax.Array, gamma: float) -> jax.Array:
    """Returns 10 at a milestone, gamma times the next step's before it, 0 where none follows, f32[B, T]; from bool[B, T]."""

    def step(later: jax.Array, milestone: jax.Array) -> tuple[jax.Array, jax.Array]:
        now = jnp.where(milestone, MILESTONE_REWARD, gamma * later)
        return now, now

    returns: jax.Array
    _, returns = jax.lax.scan(step, jnp.zeros(len(milestones)), milestones.T, reverse=True)
    return returns.T
