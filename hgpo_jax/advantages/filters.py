"""Filters: the trajectories that an estimator compares and an update learns from; the others count nowhere."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages.informative import informative
from hgpo_jax.advantages.record import Batch


def keep_informative(batch: Batch) -> jax.Array:
    """Keeps the prompt groups with different scores, bool[B]: DAPO's filter, without its further samples."""
    return informative(batch.rewards, batch.mask, batch.groups)


def keep_valid(batch: Batch) -> jax.Array:
    """Keeps the trajectories without an invalid action, bool[B]: the filter of THOR's trajectories.

    A prompt group that keeps fewer than half of its trajectories, or only trajectories that score the same, goes as a whole.
    In the authors' code (github.com/JingMog/THOR) it is a failing call of their code tool that counts as invalid.
    """
    happened = batch.mask[:, :1]
    valid = happened & ~jnp.any(batch.invalid, axis=1, keepdims=True)
    trajectories = grouping.sort_steps([batch.groups[:, None]], happened)
    segment = trajectories.segments[0]
    left = grouping.group_sum(grouping.steps_in_order(valid.astype(jnp.int32), trajectories), segment)
    enough = grouping.steps_in_place(2 * left >= grouping.group_size(segment), trajectories, happened.shape)
    return keep_informative(batch._replace(mask=batch.mask & valid & enough))


# By the names of the option `keep`.
FILTERS: dict[str, Callable[[Batch], jax.Array]] = {"informative": keep_informative, "valid": keep_valid}


def filtered(batch: Batch, keep: str) -> Batch:
    """Returns the batch without the steps of the trajectories that the filter drops."""
    mask = batch.mask & FILTERS[keep](batch)[:, None]
    return batch._replace(rewards=jnp.where(mask, batch.rewards, 0.0), mask=mask, invalid=batch.invalid & mask)
