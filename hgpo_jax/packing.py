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
    """N rows in C sequences of S slots.

    A row's response is predicted at slots of its own; those of a sequence are numbered through, 0..W - 1.
    """

    sequence: chex.Array  # i32[N]; C for a row that stands nowhere
    place: chex.Array  # i32[N], the first of the row's numbers among its sequence's predictions
    tokens: chex.Array  # i32[C, S]
    wanted: chex.Array  # i32[C, W], the slots that predict
    first: chex.Array | None  # i32[C, S], the first slot of the row that each slot belongs to; None where all are 0

    def predictions(self, response_slots: int, response_lengths):
        """Index (i32[N, 1], i32[N, R]) of each response token among the predictions; out of bounds past a response's end."""
        at = jnp.arange(response_slots)
        inside = at < response_lengths[:, None]
        return self.sequence[:, None], jnp.where(inside, self.place[:, None] + at, self.wanted.shape[1])


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


def alone(prompts, prompt_lengths, responses, response_lengths) -> Places:
    """Places of N rows in N sequences."""
    n, R = responses.shape
    slots = prompt_lengths[:, None] + jnp.arange(R)
    tokens = jnp.pad(prompts, ((0, 0), (0, R - 1)))
    return Places(
        sequence=jnp.where(response_lengths > 0, jnp.arange(n), n),
        place=jnp.zeros(n, jnp.int32),
        # A response's last token is only a target; its slot may lie past the end.
        tokens=tokens.at[jnp.arange(n)[:, None], slots].set(responses, mode="drop"),
        wanted=slots - 1,
        first=None,
    )


def together(
    sequence, slot, place, prompts, prompt_lengths, responses, response_lengths, shape: tuple[int, int], predictions: int
) -> Places:
    """Places of N rows in `shape` = (C, S) with W = `predictions`, where `pack` wants them; rows without response nowhere."""
    C = shape[0]
    sequence = jnp.where(response_lengths > 0, sequence, C)
    row = sequence[:, None]

    def write(out, part, begin, lengths):
        """The first `lengths` entries of each row's part, from place `begin` of its sequence on."""
        at = jnp.arange(part.shape[1])
        to = jnp.where(at < lengths[:, None], begin[:, None] + at, out.shape[1])
        return out.at[row, to].set(part, mode="drop")

    begin = slot + prompt_lengths
    empty = jnp.zeros(shape, jnp.int32)
    tokens = write(write(empty, prompts, slot, prompt_lengths), responses, begin, response_lengths - 1)
    slots = (begin - 1)[:, None] + jnp.arange(responses.shape[1])
    return Places(
        sequence=sequence,
        place=place,
        tokens=tokens,
        wanted=write(jnp.zeros((C, predictions), jnp.int32), slots, place, response_lengths),
        first=jax.lax.cummax(empty.at[sequence, slot].max(slot, mode="drop"), axis=1),
    )
