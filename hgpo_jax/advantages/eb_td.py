"""EB-TD: EB-GAE's shrunken value, of targets that bootstrap from that value itself, around a trend in time.

Our own estimator. EB-GAE shrinks means of Monte Carlo returns, whose noise grows with the turns that are left. Here the
targets are those of temporal-difference learning, and what is shrunk is only what a trend in time leaves over: in tasks
that are won in the end, later steps have larger discounted returns.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.gae import generalized_advantages
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import penalties, step_returns
from hgpo_jax.advantages.shrinkage import shrink

ROUNDS = 3


def eb_td(
    batch: Batch,
    *,
    history_length: int = 2,
    gamma: float = 0.95,
    lam: float = 0.35,
    invalid_penalty: float = 0.1,
) -> Estimate:
    """GAE(lam) on V, after three rounds of V from targets y and y from V; never divided by a standard deviation.

    x_t = t mean_{-1}(R), the turn times the prompt group's mean return; o = beta x with beta = sum(x~ R~) / sum(x~^2), where ~
    is centred in the groups of level 0 and the sums run over the batch (0 where the denominator is 0). First y = R; then, each
    time, V = o + shrink(y - o), A = GAE(V, lam), y = V + A. A prompt group without any reward gives exactly 0. The
    penalty is subtracted from the advantage last.
    """
    returns, shape = step_returns(batch, gamma, invalid_penalty=0.0), batch.mask.shape
    steps = grouping.sort_contexts(batch, history_length)
    ordered = grouping.steps_in_order(returns, steps)
    trend = _trend(ordered, grouping.steps_in_order(jnp.broadcast_to(jnp.arange(shape[1]), shape), steps), steps)
    targets = ordered
    for _ in range(ROUNDS):
        values = grouping.steps_in_place(trend + shrink(targets - trend, steps).value, steps, shape)
        advantages = generalized_advantages(batch.rewards, values, batch.mask, gamma, lam)
        targets = grouping.steps_in_order(values + advantages, steps)
    penalty = penalties(batch, invalid_penalty)
    return Estimate(advantages - penalty, returns - penalty)


def _trend(returns: jax.Array, turns: jax.Array, steps: grouping.Sorted) -> jax.Array:
    """o f32[N] of returns f32[N] at turns i32[N], in the steps' order."""

    def mean(values: jax.Array, segment: jax.Array) -> jax.Array:
        return grouping.group_mean(values, segment, grouping.group_size(segment))

    prompt_group, state = steps.segments[:2]
    x = turns * mean(returns, prompt_group)
    x_left, left = (jnp.where(steps.mask, values - mean(values, state), 0.0) for values in (x, returns))
    spread = jnp.sum(x_left**2)
    return x * jnp.where(spread > 0, jnp.sum(x_left * left) / jnp.where(spread > 0, spread, 1), 0.0)
