"""Segments packed into sequences: several one after another if they fit, each of them once and uncut.

A segment is a prompt and its response, whose last token is only a target and needs no slot. Where turns of a conversation
extend each other (`conversations.py`), all of them are one segment: the last one's prompt and response hold the others'.
Attention never crosses segments, and positions restart with each, so packing affects only the number of slots computed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

MAX_DECISIONS = 16  # per sequence
MAX_TURNS = 64  # the same where decisions are turns of conversations
# Shorter prompts fill their slots well enough unpacked: in environments with such prompts, all have about the same length.
PACK_FROM = 128  # prompt slots
Three = tuple[jax.Array, jax.Array, jax.Array]


class SequenceShape(NamedTuple):
    """The capacity of one sequence: S token slots, Q slots that predict a token, at most `max_decisions` decisions."""

    slots: int
    predictions: int
    max_decisions: int


class PackedLayout(struct.PyTreeNode):
    """N decisions in M sequences of S slots, as the network reads them.

    Every response token is predicted at a slot of its own; the predictions of a sequence are numbered 0..Q - 1.
    """

    tokens: jax.Array  # i32[M, S]
    predict_slots: jax.Array  # i32[M, Q]; slot t predicts token t + 1
    segment_start: jax.Array | None  # i32[M, S], first slot of the segment that each slot belongs to; None: all are 0
    sequence: jax.Array  # i32[N]; M for a decision outside all sequences
    offset: jax.Array  # i32[N], number of the decision's first prediction in its sequence

    def response_index(self, response_slots: int, response_lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the index (i32[N, 1], i32[N, R]) of each response token in [M, Q]; out of bounds past a response's end."""
        slot = jnp.arange(response_slots)
        inside = slot < response_lengths[:, None]
        return self.sequence[:, None], jnp.where(inside, self.offset[:, None] + slot, self.predict_slots.shape[1])


def sequence_shape(prompt_slots: int, response_slots: int) -> SequenceShape:
    """Returns the shape of sequences for prompts of P and responses of R slots."""
    if prompt_slots < PACK_FROM:
        return unpacked_shape(prompt_slots, response_slots)
    slots = prompt_slots + response_slots - 1
    return SequenceShape(slots, min(slots, 2 * response_slots), MAX_DECISIONS)


def unpacked_shape(prompt_slots: int, response_slots: int) -> SequenceShape:
    """Returns the shape of sequences of one decision each."""
    return SequenceShape(prompt_slots + response_slots - 1, response_slots, 1)


def conversation_shape(prompt_slots: int, response_slots: int) -> SequenceShape:
    """Returns the shape of sequences for conversations; any number of their tokens may be predicted."""
    slots = prompt_slots + response_slots - 1
    return SequenceShape(slots, slots, MAX_TURNS)


def first_fit(lengths: jax.Array, predictions: jax.Array, shape: SequenceShape, decisions: jax.Array | int = 1) -> Three:
    """Assigns segments to sequences by first-fit decreasing: longest first, each to the first sequence with room for it.

    Args:
      lengths: i32[N], slots of each segment, at most `shape.slots`; 0 for a segment to leave out.
      predictions: i32[N], at most `shape.predictions`.
      decisions: i32[N], at most `shape.max_decisions`, or the same for all.

    Returns: (sequence, slot, offset), i32[N] each: sequence and offset as in `PackedLayout`, with sequence N for omitted
    segments, and the segment's first slot.
    """
    N = lengths.shape[0]
    if shape.max_decisions == 1:
        sequence = jnp.cumsum(lengths > 0) - 1
        return jnp.where(lengths > 0, sequence, N), jnp.zeros_like(sequence), jnp.zeros_like(sequence)
    decisions = jnp.broadcast_to(decisions, N)

    def place(used: Three, segment: jax.Array) -> tuple[Three, Three]:
        slots, predicted, decided = used  # per sequence
        fits = (
            (slots + lengths[segment] <= shape.slots)
            & (predicted + predictions[segment] <= shape.predictions)
            & (decided + decisions[segment] <= shape.max_decisions)
        )
        to = jnp.where(lengths[segment] > 0, jnp.argmax(fits), N)
        out = (to, slots.at[to].get(mode="fill", fill_value=0), predicted.at[to].get(mode="fill", fill_value=0))
        changes = lengths[segment], predictions[segment], decisions[segment]
        slots, predicted, decided = (a.at[to].add(change, mode="drop") for a, change in zip(used, changes, strict=True))
        return (slots, predicted, decided), out

    longest_first = jnp.argsort(-lengths)
    zeros = jnp.zeros(N, jnp.int32)
    _, placed = jax.lax.scan(place, (zeros, zeros, zeros), longest_first)
    to, slot, offset = (zeros.at[longest_first].set(a) for a in placed)
    return to, slot, offset


def first_fit_of_chains(chain: jax.Array, lengths: jax.Array, predictions: jax.Array, shape: SequenceShape) -> Three:
    """Assigns decisions to sequences like `first_fit`, with those of a chain in one segment, and their predictions in a row.

    chain: i32[N], equal for decisions of which each one's prompt begins with all shorter ones and their responses. A chain of
    more than `shape.max_decisions` is cut into several segments. lengths, predictions: i32[N], as in `first_fit`.

    Returns: as `first_fit`, for each decision.
    """
    zeros, number = jnp.zeros_like(lengths), jnp.arange(lengths.shape[0])
    chain = jnp.where(lengths > 0, chain, jnp.iinfo(chain.dtype).max)
    order = jnp.lexsort((lengths, chain))
    begins = jnp.diff(chain[order], prepend=-1) != 0
    begins = (number - jax.lax.cummax(jnp.where(begins, number, 0))) % shape.max_decisions == 0
    # Predictions before each decision, of its segment alone.
    before = jnp.cumsum(predictions[order]) - predictions[order]
    before = zeros.at[order].set(before - jax.lax.cummax(jnp.where(begins, before, 0)))
    segment = zeros.at[order].set(jnp.cumsum(begins) - 1)
    slots, predicted, decisions = zeros.at[segment].max(lengths), zeros.at[segment].add(predictions), zeros.at[segment].add(1)
    sequence, slot, offset = first_fit(slots, predicted, shape, decisions)
    return sequence[segment], slot[segment], offset[segment] + before


def unpacked(prompts: jax.Array, prompt_lengths: jax.Array, responses: jax.Array, response_lengths: jax.Array) -> PackedLayout:
    """Lays out N decisions in N sequences: prompts i32[N, P], responses i32[N, R], their lengths i32[N]."""
    N, R = responses.shape
    slots = prompt_lengths[:, None] + jnp.arange(R)
    tokens = jnp.pad(prompts, ((0, 0), (0, R - 1)))
    return PackedLayout(
        sequence=jnp.where(response_lengths > 0, jnp.arange(N), N),
        offset=jnp.zeros(N, jnp.int32),
        # A response's last token is only a target; its slot may lie past the end.
        tokens=tokens.at[jnp.arange(N)[:, None], slots].set(responses, mode="drop"),
        predict_slots=slots - 1,
        segment_start=None,
    )


def packed(
    assignment: Three,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    responses: jax.Array,
    response_lengths: jax.Array,
    *,
    sequences: int,
    shape: SequenceShape,
) -> PackedLayout:
    """Lays out N decisions in M = `sequences` sequences, where `assignment`, the result of `first_fit`, puts them.

    prompts i32[N, P], responses i32[N, R], their lengths i32[N]; a decision without a response is left out. Those of a chain
    write the same tokens into the slots that they share.
    """
    sequence, slot, offset = assignment
    sequence = jnp.where(response_lengths > 0, sequence, sequences)

    def write(out: jax.Array, values: jax.Array, begin: jax.Array, lengths: jax.Array) -> jax.Array:
        """Writes the first `lengths` of each decision's values into its row of `out`, from `begin` on."""
        at = jnp.arange(values.shape[1])
        to = jnp.where(at < lengths[:, None], begin[:, None] + at, out.shape[1])
        return out.at[sequence[:, None], to].set(values, mode="drop")

    begin = slot + prompt_lengths
    zeros = jnp.zeros((sequences, shape.slots), jnp.int32)
    tokens = write(write(zeros, prompts, slot, prompt_lengths), responses, begin, response_lengths - 1)
    slots = (begin - 1)[:, None] + jnp.arange(responses.shape[1])
    return PackedLayout(
        sequence=sequence,
        offset=offset,
        tokens=tokens,
        predict_slots=write(jnp.zeros((sequences, shape.predictions), jnp.int32), slots, offset, response_lengths),
        segment_start=jax.lax.cummax(zeros.at[sequence, slot].max(slot, mode="drop"), axis=1),
    )
