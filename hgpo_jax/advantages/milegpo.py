"""MileGPO: GraphGPO, and milestones and traps among the observations (Qian et al., 2026, arXiv 2608.19803)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.gigpo import step_advantages, with_episode
from hgpo_jax.advantages.graphgpo import Graph, settled, to_success, transition_graph
from hgpo_jax.advantages.record import Batch, Estimate
from hgpo_jax.advantages.returns import last_steps, penalties

# Table 5 of the paper, the same for ALFWorld and WebShop. Weights that are 1 there are not written here.
SCALE, GRAPH_DISCOUNT, REACH = 10.0, 0.2, 0.2  # c, gamma_G, omega
SHAPING, TRAP_WEIGHT = 0.25, 0.25  # lambda, w_-
CENTRALITY, REVISITS = 0.25, 0.25  # w_c, w_l
TRAP_SCORE, TRAP_VISITS = 0.1, 2


def milegpo(
    batch: Batch,
    *,
    next_states: jax.Array,
    success: jax.Array,
    residual: float = 0.2,
    coverage: float = 1.1,
    shrink: float = 0.0,
    branch_alone: bool = False,
    statistics: str = "per_step",
    normalize: str = "mean_std",
    invalid_penalty: float = 0.1,
) -> Estimate:
    """GRPO's advantage plus `A_G + residual (A_mix - A_G)`, each of a step among the visits of its state, as in `gigpo`.

    next_states: i32[B, T], ids as in `states`, of the observation after each step. What follows a successful trajectory's
        last step is ignored: that step leads to `success`, as in `graphgpo`.
    success: bool[B].
    A_G compares r_G = 10 * 0.2^d, d the distance from the next state to success; A_mix compares
        r_G + 10 * 0.25 (rise of the milestones' potential - a quarter of the rise of the traps').
    A potential is the largest score of a milestone (trap), times 0.2 for each step on the way there. Milestones are
    observations of successful trajectories. Their scores (eq. 5) count the success of who visits them, the share of successes
    that do, and degree; they grow (eq. 18) with evidence of progress on the way in, and of better success than siblings from
    the same state. Traps are observations of failures alone, of two or more or twice in one, scored 0.1 or more (eq. 6).
    residual: eta. coverage: theta_m; a milestone without evidence of progress keeps its score if this share of successes visit
        it, or with `branch_alone` if it has better success than a sibling; else its score is multiplied by `shrink`.
    The defaults are ALFWorld's, the only ones that training has. WebShop's are residual=1, coverage=0.5, shrink=0.5,
    branch_alone=True, normalize="mean".

    Two trajectories that lead from one state to the same next one share an edge, whatever their actions. The paper does not say
    whether `success` counts where degrees and progress are normalised; here it has no degree, and counts for progress. An
    invalid action's penalty is in both returns. The record's two levels are the prompt group (-1), whose advantage is the
    episode's, and the state's group (0); its `returns` are r_G and `residual` times what A_mix adds.
    """
    graph = transition_graph(batch, next_states, success)
    nodes = visits(batch, graph, success)
    distance = to_success(graph)
    milestones = calibrated(batch, graph, nodes, distance, success, coverage, shrink, branch_alone)
    rise = rises(graph, milestones) - TRAP_WEIGHT * rises(graph, traps(nodes))
    reached = distance[graph.target] < distance.size
    graph_return = jnp.where(reached, SCALE * GRAPH_DISCOUNT ** distance[graph.target].astype(jnp.float32), 0.0)

    def returns(shaping: float) -> jax.Array:
        each = jnp.where(batch.mask, (graph_return + shaping * rise).reshape(batch.mask.shape), 0.0)
        return each - penalties(batch, invalid_penalty)

    plain, mixed = returns(0.0), returns(SCALE * SHAPING)
    (by_graph, sizes), (by_both, _) = (step_advantages(batch, each, jnp.abs(each), normalize) for each in (plain, mixed))
    step = by_graph + residual * (by_both - by_graph)
    together = returns(residual * SCALE * SHAPING)
    return with_episode(batch, together, step, sizes, 1.0, statistics, normalize, invalid_penalty)


class Nodes(NamedTuple):
    """Counts by node, each [2 B T]; a trajectory counts once, however often it comes.

    group: i32, the number of the node's prompt group, 0 or more. visitors, winners: i32, trajectories, and those that succeed.
    again: i32, visits after a trajectory's first. rate: f32, winners / visitors. base: f32, the prompt group's success rate.
    successes, failures: i32, trajectories of the prompt group. observation: bool, visited and not `success`.
    """

    group: jax.Array
    visitors: jax.Array
    winners: jax.Array
    again: jax.Array
    rate: jax.Array
    base: jax.Array
    successes: jax.Array
    failures: jax.Array
    observation: jax.Array


def visits(batch: Batch, graph: Graph, success: jax.Array) -> Nodes:
    """Counts who visits each node: a trajectory its steps' observations, and the one after its last step."""
    number, shape = graph.nodes.order.size, batch.mask.shape
    both = jnp.concatenate([graph.source.reshape(shape), graph.target.reshape(shape)], axis=1)
    visited = jnp.concatenate([batch.mask, last_steps(batch.mask)], axis=1)
    row = jnp.broadcast_to(jnp.arange(shape[0], dtype=jnp.int32)[:, None], both.shape)
    rows = grouping.sort_steps([both, row], visited)
    node, won = both.ravel()[rows.order], success[row.ravel()[rows.order]]
    first = starts(rows.segments[1]) & rows.mask

    def count(which: jax.Array, by: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(which.astype(jnp.int32), by, number)

    group = jnp.zeros(number, jnp.int32).at[graph.nodes.segments[1]].set(graph.nodes.segments[0])
    visitors, winners = count(first, node), count(first & won, node)
    happened, group_of_row = batch.mask[:, 0], group[graph.source.reshape(shape)[:, 0]]
    successes, failures = count(happened & success, group_of_row), count(happened & ~success, group_of_row)
    goal = jnp.zeros(number, bool).at[graph.target].max(graph.succeeded)
    return Nodes(
        group=group,
        visitors=visitors,
        winners=winners,
        again=count(rows.mask, node) - visitors,
        rate=winners / jnp.maximum(visitors, 1),
        base=(successes / jnp.maximum(successes + failures, 1))[group],
        successes=successes[group],
        failures=failures[group],
        observation=(visitors > 0) & ~goal,
    )


def starts(segment: jax.Array) -> jax.Array:
    """Marks the first row of each segment, bool[N]."""
    return jnp.pad(segment[1:] != segment[:-1], (1, 0), constant_values=True)


def share_of_largest(values: jax.Array, group: jax.Array) -> jax.Array:
    """Returns values of 0 or more divided by the largest of their group, 0 where that is 0, f32[N]."""
    largest = jax.ops.segment_max(values, group, values.size)[group]
    return jnp.where(largest > 0, values / jnp.where(largest > 0, largest, 1.0), 0.0)


def traps(nodes: Nodes) -> jax.Array:
    """Returns the traps' scores by node (eq. 6) as shares of the prompt group's largest, 0 for what is none, f32[2 B T]."""
    visitors = jnp.maximum(nodes.visitors, 1)
    score = nodes.base + REVISITS * nodes.visitors / jnp.maximum(nodes.failures, 1) * nodes.again / visitors
    recurs = (nodes.visitors >= TRAP_VISITS) | (nodes.again > 0)
    trap = nodes.observation & (nodes.winners == 0) & recurs & (score >= TRAP_SCORE - grouping.ROUNDING)
    return share_of_largest(jnp.where(trap, score, 0.0), nodes.group)


def rises(graph: Graph, scores: jax.Array) -> jax.Array:
    """Returns by how much each step raises the potential of these targets, 0 where it does not (eq. 8 to 10), f32[B T]."""
    potential = settled(scores, lambda near: near.at[graph.source].max(REACH * near[graph.target]))
    return jnp.maximum(potential[graph.target] - potential[graph.source], 0.0)


def calibrated(
    batch: Batch,
    graph: Graph,
    nodes: Nodes,
    distance: jax.Array,
    success: jax.Array,
    coverage: float,
    shrink: float,
    branch_alone: bool,
) -> jax.Array:
    """Returns the milestones' scores by node (eq. 5, 18) as shares of the prompt group's largest, f32[2 B T].

    distance: of each node from success, as `to_success` returns it.
    """
    number = nodes.group.size
    row = jnp.broadcast_to(jnp.arange(batch.mask.shape[0], dtype=jnp.int32)[:, None], batch.mask.shape)
    rows = grouping.sort_steps([graph.source.reshape(row.shape), graph.target.reshape(row.shape), row], batch.mask)
    source, target, won = graph.source[rows.order], graph.target[rows.order], success[row.ravel()[rows.order]]
    edge, used = starts(rows.segments[1]) & rows.mask, starts(rows.segments[2]) & rows.mask

    # Branch-counterfactual credit (eq. 11 to 14).
    winners = grouping.group_sum((used & won).astype(jnp.int32), rows.segments[1])
    rate = winners / jnp.maximum(grouping.group_sum(used.astype(jnp.int32), rows.segments[1]), 1)
    siblings = grouping.group_sum(edge.astype(jnp.int32), rows.segments[0]) - 1
    others = (grouping.group_sum(jnp.where(edge, rate, 0.0), rows.segments[0]) - rate) / jnp.maximum(siblings, 1)
    margin = jnp.where(siblings > 0, significant(rate - others), 0.0)
    better = share_of_largest(jnp.where(rows.mask, jnp.abs(margin), 0.0), nodes.group[source])
    branch = largest(jnp.where(margin > 0, better, 0.0), target, number)

    # Local progress (eq. 15, 16).
    known = (distance[source] < number) & (distance[target] < number)
    nearer = jnp.where(known, distance[source] - distance[target], 0)
    excess = jnp.where(siblings > 0, jnp.maximum(-margin, 0.0), jnp.maximum(nodes.base - nodes.rate, 0.0)[target])
    progress = significant(nearer + (nodes.rate - nodes.base)[target] - excess)
    progress = largest(jnp.where(rows.mask & (winners > 0), progress, 0.0), target, number)
    progress = share_of_largest(progress, nodes.group)

    degree = jnp.zeros(number).at[source].add(edge).at[target].add(edge)
    milestone = nodes.observation & (nodes.winners > 0)
    covers = nodes.winners / jnp.maximum(nodes.successes, 1)
    central = share_of_largest(jnp.where(milestone, degree, 0.0), nodes.group)
    score = jnp.maximum(nodes.rate - nodes.base, 0.0) + covers + CENTRALITY * central
    retained = (progress > 0) | (covers >= coverage) | (branch_alone & (branch > 0))
    score = score * jnp.where(retained, 1 + branch + progress, shrink)
    return share_of_largest(jnp.where(milestone, score, 0.0), nodes.group)


def significant(differences: jax.Array) -> jax.Array:
    """Returns differences of shares, 0 in place of those within rounding."""
    return jnp.where(jnp.abs(differences) <= grouping.ROUNDING, 0.0, differences)


def largest(values: jax.Array, node: jax.Array, number: int) -> jax.Array:
    """Returns the largest of the values [N] at each node, at least 0, f32[number]."""
    return jnp.zeros(number).at[node].max(values)
