"""Groups of steps from one lexicographic sort.

Sorted by (prompt group, s_t, s_{t-1}, ..., s_{t-K}), the steps of every group of every level lie side by side, because
a longer context only refines a shorter one: level k's groups end where one of the first k + 2 sort columns changes.
The ids themselves are compared, never hashes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hgpo_jax.advantages.record import Batch

# Steps that did not happen sort after all others, which keeps the segment ids sorted.
PADDING_KEY = jnp.iinfo(jnp.int32).max
# Stands for the observation before the first step. No real id: those that tracers hide from the checks may be negative.
NO_STATE = jnp.iinfo(jnp.int32).min
# The largest number of 15 bits.
SHORT_IDS = 2**15 - 1
# Added to a standard deviation before dividing by it, as in the released code of GRPO, GiGPO and HGPO.
EPSILON = 1e-6
# Rows from which sums are taken in blocks of so many.
LONG_SUM, BLOCK = 2**14, 2**8
# A difference this small relative to what was summed is what float32 leaves of a true difference of zero.
ROUNDING = 64 * jnp.finfo(jnp.float32).eps


class Sorted(NamedTuple):
    """Rows in sorted order, N = B * T.

    order:    i32[N], the flat index b * T + t of each sorted row.
    segments: one i32[N] per sort column, ascending: rows share an id where all columns up to this one are equal.
    mask:     bool[N], steps that happened.
    """

    order: jax.Array
    segments: tuple[jax.Array, ...]
    mask: jax.Array


def sort_steps(columns: list[jax.Array], mask: jax.Array) -> Sorted:
    """Sort the steps by i32[B, T] columns, the first one most significant."""
    mask = mask.ravel()
    columns = [column.ravel() for column in columns]

    def sort(keys: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        rows = jnp.arange(mask.size, dtype=jnp.int32)
        return jax.lax.sort((*keys, rows), num_keys=len(keys), is_stable=True)

    def full_keys() -> tuple[jax.Array, ...]:
        return sort([jnp.where(mask, column, PADDING_KEY) for column in columns])

    def paired_keys() -> tuple[jax.Array, ...]:
        halves = [jnp.where(mask, jnp.where(column == NO_STATE, 0, column + 1), SHORT_IDS) for column in columns]
        halves += [jnp.zeros_like(halves[0])] * (len(halves) % 2)
        *keys, order = sort([high << 15 | low for high, low in zip(halves[::2], halves[1::2], strict=True)])
        halves = [half for key in keys for half in (key >> 15, key & SHORT_IDS)]
        return *halves[: len(columns)], order

    # Fewer keys sort faster: where all ids fit into 15 bits, two of them make one key.
    ids = jnp.where(mask, jnp.stack(columns), 0)
    short = jnp.all((ids >= 0) | (ids == NO_STATE)) & (ids.max() < SHORT_IDS - 1)
    *keys, order = jax.lax.cond(short, paired_keys, full_keys) if len(columns) > 1 else full_keys()
    segments = []
    change = jnp.zeros(mask.size, bool)
    for key in keys:
        change = change | jnp.pad(key[1:] != key[:-1], (1, 0))
        segments.append(jnp.cumsum(change, dtype=jnp.int32))
    return Sorted(order, tuple(segments), mask[order])


def sort_contexts(batch: Batch, history_length: int) -> Sorted:
    """Sort by peers and context; `segments[k + 1]` are the level-k groups and `segments[0]` the prompt groups (of a role).

    A step with t < k has `NO_STATE` in place of observations before the first, so that it meets no step that has them.
    """
    columns = [batch.peers]
    for lag in range(history_length + 1):
        earlier = batch.states[:, : max(batch.states.shape[1] - lag, 0)]
        columns.append(jnp.pad(earlier, ((0, 0), (batch.states.shape[1] - earlier.shape[1], 0)), constant_values=NO_STATE))
    return sort_steps(columns, batch.mask)


def steps_in_order(values: jax.Array, steps: Sorted) -> jax.Array:
    """[B, T] -> [N] in sorted order."""
    return values.ravel()[steps.order]


def steps_in_place(values: jax.Array, steps: Sorted, shape: tuple[int, ...]) -> jax.Array:
    """[..., N] in sorted order -> [*shape, ...], zero where no step happened."""
    values = jnp.where(steps.mask, values, jnp.zeros((), values.dtype)).T
    placed = jnp.zeros_like(values).at[steps.order].set(values, unique_indices=True)
    return placed.reshape(*shape, *values.shape[1:])


def group_sum(values: jax.Array, segment: jax.Array) -> jax.Array:
    """[N] -> [N]: the sum over each row's group.

    A float32 sum of n terms one after the other is off by up to n roundings. Long ones are summed in blocks, then the blocks.
    """
    rows = values.size
    if rows > LONG_SUM and jnp.issubdtype(values.dtype, jnp.floating):
        part = segment + jnp.arange(rows, dtype=jnp.int32) // BLOCK  # ascending, equal where group and block are
        parts = rows + rows // BLOCK + 1
        group = jax.lax.cummax(jnp.zeros(parts, jnp.int32).at[part].set(segment, indices_are_sorted=True))
        sums = jax.ops.segment_sum(values, part, parts, indices_are_sorted=True)
        return jax.ops.segment_sum(sums, group, rows, indices_are_sorted=True)[segment]
    return jax.ops.segment_sum(values, segment, rows, indices_are_sorted=True)[segment]


def group_min(values: jax.Array, segment: jax.Array) -> jax.Array:
    """[N] -> [N]: the smallest value in each row's group."""
    return jax.ops.segment_min(values, segment, values.size, indices_are_sorted=True)[segment]


def group_size(segment: jax.Array) -> jax.Array:
    """Counts members of each row's group, i32[N]."""
    return group_sum(jnp.ones_like(segment), segment)


def group_mean(values: jax.Array, segment: jax.Array, size: jax.Array, weights: jax.Array | float = 1.0) -> jax.Array:
    """Returns f32[N]: each row's group mean; `size` is the sum of the group's weights.

    Summed as distances to the group's smallest value, so that the mean of equal values is that value to the bit. A plain
    float32 mean of equal returns such as 10 * 0.95^n can miss them, and with them a later test of deviations against 0.
    """
    least = group_min(values, segment)
    return least + group_sum((values - least) * weights, segment) / size


def group_deviations(
    values: jax.Array, segment: jax.Array, size: jax.Array, magnitudes: jax.Array, weights: jax.Array | float = 1.0
) -> jax.Array:
    """Returns f32[N]: each row's distance to its group's mean, exactly 0 where it is within the rounding of what was summed.

    magnitudes: f32[N], the sum of the absolute terms of each value. Rewards of the same total in another order give sums
        that differ in float32, and dividing these differences by their spread would make them as large as real ones.
    """
    return significant(values - group_mean(values, segment, size, weights), segment, magnitudes)


def significant(differences: jax.Array, segment: jax.Array, magnitudes: jax.Array) -> jax.Array:
    """Returns the differences, 0 in place of those at most `ROUNDING` times the largest of the group's magnitudes, f32[N]."""
    largest = jax.ops.segment_max(magnitudes, segment, magnitudes.size, indices_are_sorted=True)[segment]
    return jnp.where(jnp.abs(differences) <= ROUNDING * largest, 0.0, differences)  # what is not a number stays to be seen


def group_std(deviations: jax.Array, segment: jax.Array, degrees: jax.Array, weights: jax.Array | float = 1.0) -> jax.Array:
    """Returns f32[N]: each row's group's standard deviation, from the deviations f32[N] off its mean; `degrees` of freedom."""
    return jnp.sqrt(group_sum(deviations**2 * weights, segment) / jnp.maximum(degrees, 1))


def state_ids(rows: jax.Array, mask: jax.Array) -> jax.Array:
    """Dense ids of equal rows, exact: i32[..., O] token ids and bool[...] -> i32[...].

    Ids count from 0 in the lexicographic order of the distinct rows; rows outside the mask share one id of their own,
    the largest. Four columns at a time refine the ids of the columns before them: one sort with O keys would take
    minutes to compile.
    """
    flat_mask = jnp.ravel(mask)
    flat = jnp.asarray(rows, jnp.int32).reshape(flat_mask.size, -1)
    per_sort = 4
    flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % per_sort)))
    chunks = flat.reshape(flat_mask.size, -1, per_sort).transpose(1, 2, 0)

    def refine(ids: jax.Array, chunk: jax.Array) -> tuple[jax.Array, None]:
        steps = sort_steps([ids, *chunk], flat_mask)
        return jnp.zeros_like(ids).at[steps.order].set(steps.segments[-1], unique_indices=True), None

    ids, _ = jax.lax.scan(refine, jnp.zeros(flat_mask.size, jnp.int32), chunks)
    return ids.reshape(mask.shape)


def by_role(batch: Batch, roles: jax.Array) -> Batch:
    """Returns the batch with each step compared only with those of its own role, i32[B, T], in its prompt group."""
    prompts = jnp.broadcast_to(batch.groups[:, None], batch.mask.shape)
    return batch._replace(peers=state_ids(jnp.stack([prompts, roles], axis=-1), batch.mask), roles=roles)
