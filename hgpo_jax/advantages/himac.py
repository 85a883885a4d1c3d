"""HiMAC: blueprints compared with each other, executions of one blueprint likewise (Jin et al., 2026, arXiv 2603.00977)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import discounted_sum, penalties, return_magnitudes


def himac(
    batch: Batch,
    *,
    agents: jax.Array,
    actions: jax.Array,
    gamma: float = 0.95,
    statistics: str = "per_step",
    normalize: str = "mean_std",
    invalid_penalty: float = 0.1,
) -> Estimate:
    """Returns the macro advantage for a planner's steps, the micro advantage for all others.

    agents: i32[B, T], the role that acted. The one that acts first in a trajectory is its planner; each of its actions is a
        blueprint, and the steps from it to the planner's next one are its execution. A sole role plans in every step.
    actions: i32[B, T], equal ids exactly where actions are equal.
    statistics: what the micro comparison's mean and std are taken over. `per_step`: every step of the executions counts once,
        so that their advantages sum to 0. `per_trajectory`: every execution counts once, however long it is.
    normalize: `mean_std` divides by (sample std + 1e-6), `mean` only centres.

    An execution's return R is the discounted sum of the rewards from its blueprint on, to the end of the episode. Executions of
    equal blueprints, written in the same state of one prompt group, form a group; the blueprint's worth W is their mean return.
      macro: W less the mean of W over the blueprints of the same state of the prompt group, each counted as often as written.
      micro: R less the mean of R over the group, the same for every step of the execution.
    Nothing to compare with gives 0. The penalty is subtracted from the advantage of the invalid step itself. `returns` is R
    less the penalty.

    Of the paper we had the abstract and summaries that others wrote, and found no code. By these, a group of blueprints is
    compared as in GRPO by the return of one greedy execution each, which trains the blueprints' tokens alone; then a group of
    executions of the best blueprint by their returns, which trains the actions' tokens alone; in turns, with one network. They
    leave open how long the turns are, how returns are normalised, and what is best where all blueprints fail. Ours: the mean
    over sampled executions, the discount, the penalty, groups by equality of what was written, so that one batch has both
    comparisons, and a planner that may write again.
    """
    shape = batch.mask.shape
    plans = batch.mask & (agents == agents[:, :1])
    begin = jax.lax.cummax(jnp.where(plans, jnp.arange(shape[1]), 0), axis=1)

    def at_begin(values: jax.Array) -> jax.Array:
        """Returns each step's value [B, T] at the blueprint that it executes."""
        return jnp.where(batch.mask, jnp.take_along_axis(values, begin, axis=1), 0)

    returns = at_begin(discounted_sum(batch.rewards, gamma))
    situation = [jnp.broadcast_to(batch.groups[:, None], shape), at_begin(batch.states)]
    blueprint = [*situation, at_begin(actions)]
    magnitudes = at_begin(return_magnitudes(batch, gamma, 0.0))
    macro = _compare(_means(returns, blueprint, plans), magnitudes, situation, plans, normalize)
    micro = _compare(returns, magnitudes, blueprint, batch.mask & ~plans if statistics == "per_step" else plans, normalize)
    penalty = penalties(batch, invalid_penalty)
    executes = micro if statistics == "per_step" else at_begin(micro)
    return Estimate(jnp.where(plans, macro, executes) - penalty, returns - penalty)


def _means(values: jax.Array, keys: list[jax.Array], counted: jax.Array) -> jax.Array:
    """f32[B, T]: the mean of values f32[B, T] over the counted steps (bool[B, T]) with the same keys, i32[B, T] each."""
    steps = grouping.sort_steps(keys, counted)
    segment = steps.segments[-1]
    means = grouping.group_mean(grouping.steps_in_order(values, steps), segment, grouping.group_size(segment))
    return grouping.steps_in_place(means, steps, counted.shape)


def _compare(values: jax.Array, magnitudes: jax.Array, keys: list[jax.Array], counted: jax.Array, normalize: str) -> jax.Array:
    """Returns f32[B, T]: a counted step's value less that mean, with `mean_std` over (sample std + 1e-6).

    magnitudes: f32[B, T], the sums of the values' absolute terms.
    """
    steps = grouping.sort_steps(keys, counted)
    segment = steps.segments[-1]
    size = grouping.group_size(segment)
    ordered = grouping.steps_in_order(values, steps)
    centred = grouping.group_deviations(ordered, segment, size, grouping.steps_in_order(magnitudes, steps))
    if normalize == "mean_std":
        centred = centred / (grouping.group_std(centred, segment, size - 1) + grouping.EPSILON)
    return grouping.steps_in_place(centred, steps, counted.shape)
