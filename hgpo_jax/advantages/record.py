"""The input and the output of an estimator."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax


class Batch(NamedTuple):
    """One iteration's trajectories, trajectory-major: B trajectories of at most T steps.

    rewards: f32[B, T], the environment's rewards; zero where `mask` is False.
    mask:    bool[B, T], steps that happened; a prefix of every row.
    states:  i32[B, T], 0 or more; equal ids exactly where the raw observations are equal.
    groups:  i32[B], 0 or more; the prompt group (same task, same initial state) of each trajectory.
    invalid: bool[B, T], steps whose response contained no valid action.
    peers:   i32[B, T], equal where steps may be compared: their prompt group, or ids of (prompt group, role) with `by_role`.
    roles:   i32[B, T], 0 or more, with `by_role` the role that acted in each step; else None.
    """

    rewards: jax.Array
    mask: jax.Array
    states: jax.Array
    groups: jax.Array
    invalid: jax.Array
    peers: jax.Array
    roles: jax.Array | None = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "advantages",
        "returns",
        "level_advantages",
        "level_sizes",
        "level_weights",
        "part_advantages",
        "part_returns",
        "margins",
        "keep",
        "peers",
        "states",
        "scores",
        "stats",
    ],
    meta_fields=["levels"],
)
@dataclasses.dataclass(frozen=True)
class Estimate:
    """The result of `estimate`; all arrays are zero where no step happened.

    advantages:       f32[B, T].
    returns:          f32[B, T], the quantity that the estimator compared inside its groups: the discounted return, or
                      the episode score for estimators that ignore steps; the value target for `gae`. The penalty for
                      an invalid action is in it.
    level_advantages: f32[B, T, L], the advantage inside each level's group; None for estimators without levels.
    level_sizes:      i32[B, T, L], members of that group, 0 where the step has no such level.
    level_weights:    f32[B, T, L], the weights actually used, 0 where a level was dropped. The weighted levels add
                      up to the advantage, except in `eb_gae` and `pgpo`.
    part_advantages:  f32[B, T, 3], of the switch, subgoal and action parts of an answer, 0 where a step has none; None for
                      estimators that give a whole answer one advantage.
    part_returns:     f32[B, T, 3], the targets of these parts' values.
    margins:          f32[B, T], how far a step's score is above the middle of its group, for losses that ask for it; None:
                      as far as its advantage says.
    keep:             bool[B, T], the steps to learn from; the others leave the update's sums and its counts. None: all.
    peers:            i32[B, T], equal for the steps that may be compared with each other at all: those of a prompt group, with
                      `by_role` of one role in it; -1 where a step did not happen or a filter dropped it.
    states:           i32[B, T], what level 0 compares in place of the observation; None: the observation.
    scores:           f32[B, T], what level -1 compares, the penalty in it; None: the returns.
    stats:            scalars or short vectors, by name.
    levels:           the level k of each of the L columns; -1 is the prompt group.
    """

    advantages: jax.Array
    returns: jax.Array
    level_advantages: jax.Array | None = None
    level_sizes: jax.Array | None = None
    level_weights: jax.Array | None = None
    part_advantages: jax.Array | None = None
    part_returns: jax.Array | None = None
    margins: jax.Array | None = None
    keep: jax.Array | None = None
    peers: jax.Array | None = None
    states: jax.Array | None = None
    scores: jax.Array | None = None
    stats: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    levels: tuple[int, ...] = ()

    def by_level(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(level_advantages, level_sizes, level_weights) of an estimator with levels."""
        assert self.level_advantages is not None and self.level_sizes is not None and self.level_weights is not None
        return self.level_advantages, self.level_sizes, self.level_weights
