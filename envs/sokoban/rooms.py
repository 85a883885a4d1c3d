"""Solvable rooms: carved by a walk, then played backwards from the solved state.

A pull is a push backwards: the agent stands beside a box, steps away from it and takes it along. Boxes start on the
targets and are pulled many times; pushing them back the same way solves the room. Of all states that a room goes through,
the one with its boxes farthest from the targets is kept. Rooms in which a box never leaves its target, or all stay near, are
discarded.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

STEPS = 8  # of the walk, for each inner cell along a side
PULLS = 12  # for each box
LEAVE = 2.0  # logit bonus of a pull that takes its box off a target


def make_room(key: jax.Array, size: int, boxes: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Makes a room: (walls, targets, boxes, each bool[size * size], and the agent's cell i32[])."""

    def draw(attempt):
        return attempt, *_draw(jax.random.fold_in(key, attempt), size, boxes)

    return jax.lax.while_loop(lambda drawn: ~drawn[-1], lambda drawn: draw(drawn[0] + 1), draw(jnp.int32(0)))[1]


def _draw(key, size: int, boxes: int):
    """Draws (a room, whether it is hard enough)."""
    cells = jnp.arange(size**2)
    offsets = jnp.array([-size, size, -1, 1])
    keys = jax.random.split(key, 4)
    walls = _carve(keys[0], size)
    near, far = (jnp.clip(cells[:, None] + step * offsets, 0, size**2 - 1) for step in (1, 2))  # [cell, direction]
    # First floor from which a box can be pulled, then other floor.
    rank = walls + ~(~walls[near] & ~walls[far]).any(1)
    spots = jnp.argsort(jax.random.uniform(keys[1], (size**2,)) + rank)[: boxes + 1]
    targets = jnp.zeros(size**2, bool).at[spots[:boxes]].set(True)
    rows, columns = jnp.divmod(cells, size)
    apart = jnp.abs(rows[:, None] - rows[spots[:boxes]]) + jnp.abs(columns[:, None] - columns[spots[:boxes]])
    distance = apart.min(1)  # to the nearest target

    def pull(carry, key):
        stand, agent, best = carry
        free = ~walls & ~stand
        can = stand[:, None] & reach(free, agent, size)[near] & free[far]
        logits = jnp.where(can, distance[near] - distance[:, None] + LEAVE * targets[:, None], -jnp.inf).ravel()
        box, way = jnp.divmod(jax.random.categorical(key, logits), 4)
        some = can.any()
        stand = jnp.where(some, stand.at[box].set(False).at[near[box, way]].set(True), stand)
        agent = jnp.where(some, far[box, way], agent)
        score = jnp.where((stand & targets).any(), -1, (distance * stand).sum())
        best = jax.tree.map(lambda a, b: jnp.where(score > best[0], a, b), (score, stand, agent), best)
        return (stand, agent, best), None

    first = (targets, spots[boxes], (jnp.int32(-1), targets, spots[boxes]))
    (_, _, (score, stand, agent)), _ = jax.lax.scan(pull, first, jax.random.split(keys[2], PULLS * boxes))
    reached = reach(~walls & ~stand, agent, size)
    agent = jnp.argmax(jax.random.uniform(keys[3], (size**2,)) * reached).astype(jnp.int32)
    enough = (~walls).sum() > boxes  # cells for all boxes and the agent
    return (walls, targets, stand, agent), enough & (score > 2 * boxes)


def _carve(key, size: int):
    """Carves the floor along a walk, two cells wide; returns the walls, bool[size * size]."""
    steps = STEPS * (size - 2)
    keys = jax.random.split(key, 3)
    start = jax.random.randint(keys[0], (2,), 1, size - 1)
    ways = jnp.array([[-1, 0], [1, 0], [0, -1], [0, 1]])
    turns, sides = (jax.random.randint(k, (steps,), 0, 4) for k in keys[1:])

    def walk(at, step):
        at = jnp.clip(at + ways[step[0]], 1, size - 2)
        return at, (at, jnp.clip(at + ways[step[1]], 1, size - 2))

    _, visited = jax.lax.scan(walk, start, jnp.stack([turns, sides], 1))
    visited = jnp.concatenate([start[None], *visited])
    return jnp.ones((size, size), bool).at[visited[:, 0], visited[:, 1]].set(False).ravel()


def reach(free, agent, size: int):
    """Marks the cells that the agent can walk to over free ones, including its own, bool[size * size]."""
    bit = jnp.arange(size)
    allowed = (free.reshape(size, size) << bit).sum(1)  # a row is a number; the outer cells are never free

    def spread(carry):
        rows, _ = carry
        wider = rows | rows << 1 | rows >> 1 | jnp.roll(rows, 1) | jnp.roll(rows, -1)
        wider &= allowed
        return wider, (wider != rows).any()

    start = jnp.where(bit == agent // size, 1 << agent % size, 0)
    rows, _ = jax.lax.while_loop(lambda carry: carry[1], spread, (start, jnp.array(True)))
    return (rows[:, None] >> bit & 1).astype(bool).ravel()
