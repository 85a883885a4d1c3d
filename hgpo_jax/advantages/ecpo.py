"""ECPO: the actions of a state compared as far as there is evidence for it (Li et al., 2026, arXiv 2606.05885)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.gigpo import with_episode
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import return_magnitudes, step_returns


def ecpo(
    batch: Batch,
    *,
    actions: jax.Array,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    prior_count: float = 2.0,
    gate_count: float = 4.0,
    statistics: str = "per_step",
    normalize: str = "mean_std",
    invalid_penalty: float = 0.1,
) -> Estimate:
    """GRPO's advantage plus `step_weight` rho(s) A(s, u), which all visits of state s with action u share.

    actions: i32[B, T], 0 or more; equal ids within a state exactly where the actions are the same one. All invalid actions
        count as one, whatever their ids.
    With n_u visits of mean return m_u among the n visits of s in the prompt group, of mean return m:
        A = (m'_u - m) / (sample std of the n returns + 1e-6), m'_u = (n_u m_u + kappa m) / (n_u + kappa): an action that was
        tried rarely is shrunk to the state's mean. Without `mean_std` it is not divided.
        rho = tanh(n / tau) B / (B + W + 1e-6), B = sum_u n_u (m_u - m)^2 / n and W the mean squared distance of returns to
        their own action's mean: the share of the spread that actions explain.
    prior_count: kappa, 2 in the paper. gate_count: tau.

    The formulas are from others' notes on the paper, whose own text and code were not found, so this is a variant. The notes
    standardise the m'_u themselves; divided by their own spread, two actions would stay as far apart as without shrinkage, so
    here the spread is that of the returns. The notes do not say tau, the weight of the step's part, how B and W are weighted,
    what A is centred on, or what becomes of invalid actions and their penalty: those are ours. The record's two levels are the
    prompt group (-1), whose advantage is the episode's, and the state's group (0) with rho A.
    """
    returns = step_returns(batch, gamma, invalid_penalty)
    executed = jnp.where(batch.invalid, grouping.NO_STATE, actions)
    steps = grouping.sort_steps([batch.peers, batch.states, executed], batch.mask)
    _, state, action = steps.segments
    ordered = grouping.steps_in_order(returns, steps)
    magnitudes = grouping.steps_in_order(return_magnitudes(batch, gamma, invalid_penalty), steps)
    visits, tries = grouping.group_size(state), grouping.group_size(action)
    mean, action_mean = grouping.group_mean(ordered, state, visits), grouping.group_mean(ordered, action, tries)
    gain = grouping.significant(action_mean - mean, state, magnitudes)
    between = grouping.group_sum(gain**2, state) / visits
    within = grouping.group_sum(grouping.significant(ordered - action_mean, state, magnitudes) ** 2, state) / visits
    trust = jnp.tanh(visits / gate_count) * between / (between + within + grouping.EPSILON)
    advantages = tries / (tries + prior_count) * gain
    if normalize == "mean_std":
        deviations = grouping.group_deviations(ordered, state, visits, magnitudes)
        advantages = advantages / (grouping.group_std(deviations, state, visits - 1) + grouping.EPSILON)
    step, sizes = (grouping.steps_in_place(x, steps, batch.mask.shape) for x in (trust * advantages, visits))
    return with_episode(batch, returns, step, sizes, step_weight, statistics, normalize, invalid_penalty)
