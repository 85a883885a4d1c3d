"""GraphGPO: steps valued by the distance to success in the graph of observed transitions (arXiv 2605.26684)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.gigpo import step_advantages, with_episode
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import last_steps, penalties


def graphgpo(
    batch: Batch,
    *,
    next_states: jax.Array,
    success: jax.Array,
    step_weight: float = 1.0,
    statistics: str = "per_step",
    normalize: str = "mean_std",
    invalid_penalty: float = 0.1,
) -> Estimate:
    """GiGPO with step returns `10 * 0.1^d`, d the distance from the step's next state to success.

    next_states: i32[B, T], ids as in `states`, of the observation after each step. What follows a successful trajectory's
        last step is ignored: that step leads to `success`.
    success: bool[B].
    The graph of a prompt group joins s to s' for every observed step. `success` is a node of its own, as in the released
    code, and no observation is a goal: the last step of a success has d = 0, and a step to where a success took its last
    step has d = 1. A next state from which `success` cannot be reached is one step further than the furthest that can; in a
    prompt group without success all step returns are 0 (released: 1), and so are their differences.
    The paper's eq. 4 has the cost 1 of the step itself in d as well, a factor of 0.1 that only `mean` would show.
    Other options as in `gigpo`.
    """
    distance = goal_distances(batch, next_states, success)
    returns = jnp.where(distance >= 0, 10 * 0.1 ** distance.astype(jnp.float32), 0.0)
    returns = jnp.where(batch.mask, returns, 0.0) - penalties(batch, invalid_penalty)
    step, sizes = step_advantages(batch, returns, jnp.abs(returns), normalize)
    return with_episode(batch, returns, step, sizes, step_weight, statistics, normalize, invalid_penalty)


class Graph(NamedTuple):
    """The observed transitions of all prompt groups: nodes are observations, and `success` where one has it.

    nodes:          [B, 2 T] sorted by prompt group and observation: the steps' observations, then those after the steps.
    source, target: i32[B * T], each step's node and the one that it leads to, from 0 to 2 B T - 1.
    succeeded:      bool[B * T], steps that lead to `success`.
    """

    nodes: grouping.Sorted
    source: jax.Array
    target: jax.Array
    succeeded: jax.Array


def transition_graph(batch: Batch, next_states: jax.Array, success: jax.Array) -> Graph:
    """Returns the graph of the transitions, in which the last step of a success leads to `success`."""
    shape = batch.mask.shape
    succeeded = last_steps(batch.mask) & success[:, None]
    next_states = jnp.where(succeeded, grouping.NO_STATE, next_states)  # no observation has this id
    both = jnp.concatenate([batch.mask, batch.mask], axis=1)
    group = jnp.broadcast_to(batch.groups[:, None], both.shape)
    rows = grouping.sort_steps([group, jnp.concatenate([batch.states, next_states], axis=1)], both)
    nodes = jnp.zeros(both.size, jnp.int32).at[rows.order].set(rows.segments[1], unique_indices=True)
    nodes = nodes.reshape(both.shape)
    return Graph(rows, nodes[:, : shape[1]].ravel(), nodes[:, shape[1] :].ravel(), succeeded.ravel())


def to_success(graph: Graph) -> jax.Array:
    """Counts transitions from each node to `success`, i32[2 B T]; where there is no way as many as there are nodes."""
    unreachable = graph.nodes.order.size  # longer than any path
    start = jnp.full(unreachable, unreachable, jnp.int32)
    start = start.at[graph.target].min(jnp.where(graph.succeeded, 0, unreachable))
    return settled(start, lambda distance: distance.at[graph.source].min(distance[graph.target] + 1))


def settled(values: jax.Array, relax: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns the values after as many times of `relax` as change any."""

    def again(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        now = relax(carry[0])
        return now, jnp.any(now != carry[0])

    result: jax.Array
    result, _ = jax.lax.while_loop(lambda carry: carry[1], again, (values, jnp.array(True)))
    return result


def goal_distances(batch: Batch, next_states: jax.Array, success: jax.Array) -> jax.Array:
    """Counts transitions from each step's next state to `success`, -1 in a prompt group without success, i32[B, T]."""
    shape = batch.mask.shape
    graph = transition_graph(batch, next_states, success)
    distance, rows = to_success(graph), graph.nodes
    reachable = distance < distance.size
    ordered = jnp.where(reachable, distance, -1)[rows.segments[1]]
    furthest = jax.ops.segment_max(ordered, rows.segments[0], ordered.size, indices_are_sorted=True)[rows.segments[0]]
    furthest = grouping.steps_in_place(furthest, rows, (shape[0], 2 * shape[1]))[:, : shape[1]]
    distance = distance[graph.target].reshape(shape)
    return jnp.where(distance < ordered.size, distance, jnp.where(furthest >= 0, furthest + 1, -1))
