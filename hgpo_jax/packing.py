"""Rows of tokens packed into sequences: several rows one behind the other where they fit, none cut, none twice.

A row here is a prompt and its response, whose last token is only a target and needs no slot. Attention never crosses rows,
and positions begin anew with each, so that packing changes nothing but the slots that are computed for nothing.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

# Rows that one sequence may hold. Short prompts fill their slots well enough alone: all of one task are about equally long.
MOST = 16
PACK_FROM = 256  # prompt slots


@chex.dataclass(frozen=True)
class Places:
    """Where N rows stand in C sequences of S slots.

    A row's response is predicted at slots of its own; those of a sequence are numbered through, 0..W - 1.
    """

    sequence: chex.Array  # i32[N]; C for a row that stands nowhere
    slot: chex.Array  # i32[N], the first slot of the row's prompt
    place: chex.Array  # i32[N], the first of the row's numbers among its sequence's predictions
    first: chex.Array  # i32[C, S], the first slot of the row that each slot belongs to
    wanted: chex.Array  # i32[C, W], the slots that predict


def sizes(prompt_slots: int, response_slots: int) -> tuple[int, int, int]:
    """(slots, predictions, rows at most) of a sequence for rows of such prompts and responses."""
    slots = prompt_slots + response_slots - 1
    if prompt_slots < PACK_FROM:
        return slots, response_slots, 1
    return slots, min(slots, 2 * response_slots), MOST


def pack(lengths, wanted, capacity: int, room: int, most: int):
    """Deals rows to sequences, longest first, each to the first sequence that has room for it.

    Args:
      lengths: i32[N], slots of each row; 0 for a row that is not to be placed.
      wanted: i32[N], predictions of each row.
      capacity, room: slots and predictions of a sequence; no row has more.
      most: rows of a sequence.

    Returns: (sequence, slot, place), i32[N] each as in `Places`; a row not placed has sequence N.
    """
    n = lengths.shape[0]
    if most == 1:
        here = jnp.cumsum(lengths > 0) - 1
        return jnp.where(lengths > 0, here, n), jnp.zeros_like(here), jnp.zeros_like(here)

    def put(carry, row):
        used, asked, held = carry
        fits = (used + lengths[row] <= capacity) & (asked + wanted[row] <= room) & (held < most)
        to = jnp.where(lengths[row] > 0, jnp.argmax(fits), n)
        out = (to, used.at[to].get(mode="fill", fill_value=0), asked.at[to].get(mode="fill", fill_value=0))
        add = lambda a, value: a.at[to].add(value, mode="drop")  # noqa: E731
        return (add(used, lengths[row]), add(asked, wanted[row]), add(held, 1)), out

    order = jnp.argsort(-lengths)
    empty = jnp.zeros(n, jnp.int32)
    _, found = jax.lax.scan(put, (empty, empty, empty), order)
    return tuple(empty.at[order].set(a) for a in found)


def places(sequence, slot, place, prompt_lengths, response_lengths, shape: tuple[int, int], predictions: int) -> Places:
    """Places of N rows in `shape` = (C, S) with W = `predictions`, from what `pack` says of them."""
    C, S = shape
    at = jnp.arange(predictions)
    columns = jnp.where(at < response_lengths[:, None], place[:, None] + at, predictions)
    slots = (slot + prompt_lengths - 1)[:, None] + at
    here = jnp.where(response_lengths > 0, sequence, C)
    return Places(
        sequence=here,
        slot=slot,
        place=place,
        first=jax.lax.cummax(jnp.zeros((C, S), jnp.int32).at[here, slot].max(slot, mode="drop"), axis=1),
        wanted=jnp.zeros((C, predictions), jnp.int32).at[here[:, None], columns].set(slots, mode="drop"),
    )


def alone(prompts, prompt_lengths, responses, response_lengths) -> Places:
    """Places of N rows in N sequences."""
    (n, P), R = prompts.shape, responses.shape[1]
    nothing = jnp.zeros(n, jnp.int32)
    return places(jnp.arange(n), nothing, nothing, prompt_lengths, response_lengths, (n, P + R - 1), R)


def tokens(where: Places, prompts, prompt_lengths, responses, response_lengths):
    """The rows' tokens in their sequences: i32[C, S]."""
    S = where.first.shape[1]
    out = jnp.zeros(where.first.shape, jnp.int32)
    # A response's last token is only a target.
    for part, begin, lengths in ((prompts, 0, prompt_lengths), (responses, prompt_lengths, response_lengths - 1)):
        at = jnp.arange(part.shape[1])
        slots = jnp.where(at < lengths[:, None], (where.slot + begin)[:, None] + at, S)
        out = out.at[where.sequence[:, None], slots].set(part, mode="drop")
    return out


def columns(where: Places, responses, response_lengths):
    """Index (i32[N, 1], i32[N, R]) of each response token among the predictions; out of bounds beyond a response's end."""
    at = jnp.arange(responses.shape[1])
    W = where.wanted.shape[1]
    return where.sequence[:, None], jnp.where(at < response_lengths[:, None], where.place[:, None] + at, W)
