"""CRBC: actions compared by the value of a prompt group's observed transitions (Ren et al., 2026, arXiv 2609.35082)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.gigpo import with_episode
from hgpo_jax.advantages.graphgpo import transition_graph
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import last_steps

DISCOUNT, LEAST_STD = 0.98, 0.1  # beta and sigma_min of the paper
NEGLIGIBLE = 1e-9  # of a value from 0 to 1: the discount adds at most 50 times as much


def crbc(
    batch: Batch,
    *,
    next_states: jax.Array,
    success: jax.Array,
    actions: jax.Array,
    step_weight: float = 5.0,
    statistics: str = "per_step",
    normalize: str = "mean_std",
    invalid_penalty: float = 0.1,
) -> Estimate:
    """GRPO's advantage plus `step_weight` A(s, u), which all visits of state s with action u share.

    next_states: i32[B, T], ids as in `states`, of the observation after each step. Trajectories end in success or in failure,
        time-outs too; what is observed after their last step is ignored.
    success: bool[B].
    actions: i32[B, T], 0 or more; equal ids within a state exactly where the actions are the same one. All invalid actions
        count as one, whatever their ids: the paper does not say.
    V(s) is the expected discount until success of a walk over the observed transitions of the prompt group, each as likely as
    it was frequent, by the paper's closure of infinite depth; Q(s, u) that after action u. With sigma the standard deviation
    of Q over the n visits of s (divided by n), A = (Q - V) / max(sigma, 0.1); 0 where one action alone was tried.
    Rewards and the penalty of invalid actions are in the episode's part only. The paper counts an episode once in it
    (`per_trajectory`), and gives no weights of steps. Its ALFWorld states hold place, object in hand and commands besides the
    observation. The record's two levels are the prompt group (-1) and the state's group (0); its `returns` are Q.
    """
    after = after_steps(batch, next_states, success)
    executed = jnp.where(batch.invalid, grouping.NO_STATE, actions)
    steps = grouping.sort_steps([batch.peers, batch.states, executed], batch.mask)
    _, state, action = steps.segments
    ordered, one = grouping.steps_in_order(after, steps), jnp.ones(after.size)
    visits, tries = grouping.group_size(state), grouping.group_size(action)
    of_action = grouping.group_mean(ordered, action, tries)
    gain = grouping.significant(of_action - grouping.group_mean(ordered, state, visits), state, one)
    step = jnp.where(tries < visits, gain / jnp.maximum(grouping.group_std(gain, state, visits), LEAST_STD), 0.0)
    step, sizes, values = (grouping.steps_in_place(x, steps, batch.mask.shape) for x in (step, visits, of_action))
    return with_episode(batch, values, step, sizes, step_weight, statistics, normalize, invalid_penalty)


def after_steps(batch: Batch, next_states: jax.Array, success: jax.Array) -> jax.Array:
    """Returns the discounted value of where each step led, f32[B, T]: V of the next state, 1 for success and 0 for failure."""
    graph = transition_graph(batch, next_states, success)
    mask, goes_on = batch.mask.ravel(), (batch.mask & ~last_steps(batch.mask)).ravel()
    nodes = graph.nodes.order.size
    visits = jnp.maximum(jnp.zeros(nodes).at[graph.source].add(mask), 1.0)

    def walked(values: jax.Array) -> jax.Array:
        """Takes values one step back along all transitions."""
        return jnp.where(goes_on, DISCOUNT * values[graph.target], 0.0)

    def back(of_steps: jax.Array) -> jax.Array:
        """Means over the visits of each node."""
        return jnp.zeros(nodes).at[graph.source].add(of_steps) / visits

    # V is the sum of what is reached in one step, in two, ...: these grow smaller, and so does their rounding.
    def again(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        values, last = carry
        last = back(walked(last))
        return values + last, last

    won = jnp.where(graph.succeeded & mask, DISCOUNT, 0.0)
    values, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[1] > NEGLIGIBLE), again, (back(won), back(won)))
    return (won + walked(values)).reshape(batch.mask.shape)
