"""Dynamic sampling: rollouts are repeated until enough prompt groups have anything to teach (DAPO, Yu et al., 2025)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from hgpo_jax import advantages
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.result import RolloutResult
from hgpo_jax.setup.job import MAX_TRIES


def sample_informative(
    rollout: Callable[[int], tuple[RolloutResult, dict]], prompt_groups: int, group_size: int
) -> tuple[Episodes, list[dict], int]:
    """Samples until there are as many prompt groups with different rewards as an iteration learns from.

    rollout: makes rollout number 0, 1, ..., each on further tasks, and its sums; at most MAX_TRIES are made.

    Returns: the episodes, in which missing groups have no steps; the sums of each rollout; the number of groups.
    """
    batch, sums, filled = None, [], jnp.int32(0)
    for attempt in range(MAX_TRIES):
        (episodes, _), of_one = rollout(attempt)
        if batch is None:
            batch = jax.tree.map(jnp.zeros_like, episodes).replace(groups=episodes.groups)
        batch, filled = _keep_informative(batch, filled, episodes, group_size)
        sums.append(of_one)
        if filled >= prompt_groups:
            break
    assert batch is not None  # MAX_TRIES is above 0
    return batch, sums, int(filled)


@functools.partial(jax.jit, static_argnums=3)
def _keep_informative(batch: Episodes, filled, episodes: Episodes, group_size: int) -> tuple[Episodes, jax.Array]:
    """Puts the prompt groups of `episodes` with different rewards after the first `filled` (i32[]) of `batch`, if they fit."""
    useful = advantages.informative(episodes.rewards, episodes.mask, episodes.groups).reshape(-1, group_size).any(1)
    slot = jnp.where(useful, filled + jnp.cumsum(useful) - 1, len(useful))
    rows = (slot[:, None] * group_size + jnp.arange(group_size)).ravel()
    merged = jax.tree.map(lambda old, new: old.at[rows].set(new, mode="drop"), batch, episodes)
    return merged.replace(groups=batch.groups), jnp.minimum(filled + useful.sum(), len(useful))
