"""Two scripted players: a solver of one box at a time that can be imitated, and random admissible play.

The whole room is visible, so the solver has the same information as an agent. It treats the other boxes as walls, finds for
each box the fewest moves onto a free target, and begins with the box that needs the fewest. With one box that is the shortest
solution; with several it can get stuck, and then moves at random.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.envs.sokoban.env import MOVES, Sokoban, State

NEVER = 10_000  # moves


def random_action(env: Sokoban, state: State, key: jax.Array) -> jax.Array:
    """Returns i32[1]: one of the admissible moves, all equally likely; up where there is none."""
    legal, words = env.admissible(state)
    return words[jax.random.categorical(key, jnp.where(legal | ~legal.any(), 0.0, -jnp.inf))]


def expert_action(env: Sokoban, state: State, recent: jax.Array, key: jax.Array) -> jax.Array:
    """Returns the solver's move.

    Args:
      env, state: the room.
      recent: the last actions, which the solver does not need.
      key: picks the move if no box can be brought to a target.

    Returns: i32[1].
    """
    inner = jnp.asarray(_inner(env)[0])
    boxes = jnp.argsort(~state.boxes[inner], stable=True)[: env.boxes]  # inner numbers of the boxes
    agent = jnp.argmax(inner == state.agent)
    targets = state.targets[inner]

    def plan(box):
        """Counts moves to bring one box to a target after each first move, i32[4]; NEVER for a blocked one."""
        others = state.boxes.at[inner[box]].set(False)[inner]
        distance, following, legal = _moves_left(env, ~state.walls[inner] & ~others, targets & ~others)
        settled = targets[box]
        after = jnp.where(legal[box, agent], distance.ravel()[following[box, agent]], NEVER)
        return jnp.where(settled, NEVER, after)

    left = jax.vmap(plan)(boxes).min(0)
    best = jnp.array([[env.word_id[move]] for move in MOVES])[jnp.argmin(left)]
    return jnp.where(left.min() < NEVER, best, random_action(env, state, key))


def _inner(env: Sokoban) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the cells that are not outer walls, [I]; for every cell its number among them, -1 for the outer ones)."""
    cells = np.arange(env.size**2)
    rows, columns = np.divmod(cells, env.size)
    inside = (rows % (env.size - 1) > 0) & (columns % (env.size - 1) > 0)
    return cells[inside], np.where(inside, np.cumsum(inside) - 1, -1)


def _moves_left(env: Sokoban, free, targets):
    """Solves for a lone box: (moves left i32[I, I] by box and agent; the result of each move, i32[I, I, 4] as box * I + agent;
    whether it is possible, bool[I, I, 4])."""
    inner, into = _inner(env)
    count = len(inner)
    ahead = into[inner[:, None] + env.offsets]  # [I, 4], -1 for an outer wall
    box, agent = np.arange(count)[:, None, None], ahead[None]
    pushes = agent == box
    moved = np.where(pushes, ahead[box[..., 0]], box)
    legal = (agent >= 0) & (moved >= 0)
    following = jnp.asarray(np.where(legal, moved * count + agent, 0))
    legal = jnp.asarray(legal) & free[agent] & free[moved]

    def relax(carry):
        left, _ = carry
        nearer = jnp.minimum(left, 1 + jnp.where(legal, left.ravel()[following], NEVER).min(-1))
        return nearer, (nearer < left).any()

    start = jnp.where(targets[:, None] & jnp.ones((1, count), bool), 0, NEVER)
    left, _ = jax.lax.while_loop(lambda carry: carry[1], relax, (start, jnp.array(True)))
    return left, following, legal
