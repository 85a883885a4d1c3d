"""The decisions that one iteration learns from, and the micro-batches that they are cut into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from hgpo_jax.learner import packing
from hgpo_jax.sampling.generate import is_end


class TrainingBatch(struct.PyTreeNode):
    """N decisions to learn from: one prompt and one response each.

    Only the policy loss reads old_logp, advantages, margins and agents; only the critic's loss reads values, returns and
    has_target.
    """

    prompts: jax.Array  # i32[N, P], right-padded
    prompt_lengths: jax.Array  # i32[N]
    responses: jax.Array  # i32[N, R], right-padded
    response_lengths: jax.Array  # i32[N]; 0 for a decision that does not count
    old_logp: jax.Array  # f32[N, R], under the sampler; with `learner.rollout_correction` under the policy before the update
    advantages: jax.Array  # f32[N], or f32[N, R] if each token has its own
    margins: jax.Array | None = None  # f32[N] or f32[N, R], for losses that ask for them; None: they do not
    agents: jax.Array | None = None  # i32[N], the role of each decision; None if there is one role
    values: jax.Array | None = None  # f32[N], the critic's before the update; with three heads f32[N, 3]
    returns: jax.Array | None = None  # the critic's targets, of the same shape
    has_target: jax.Array | None = None  # bool[N, 3], the heads that learn from a decision; None: all
    chain: jax.Array | None = None  # i32[N], equal for turns that extend each other (`conversations.chains`); None: none do
    allowed: jax.Array | None = None  # u32[N, R, W], the tokens that each could have been (`sampling/constraint.py`); None: any
    pictures: jax.Array | None = None  # u8[N, H, W, 3], what each prompt shows; None: it is text alone
    layout: packing.PackedLayout | None = None  # None: each decision is a sequence of its own

    def tokens(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns (prompts, prompt_lengths, responses, response_lengths), as the functions of `packing` take them."""
        return self.prompts, self.prompt_lengths, self.responses, self.response_lengths

    def sequence_shape(self) -> packing.SequenceShape:
        """Returns the shape of the sequences that the decisions are packed into; one with a picture has its own."""
        if self.pictures is not None:
            return packing.unpacked_shape(self.prompts.shape[1], self.responses.shape[1])
        of = packing.sequence_shape if self.chain is None else packing.conversation_shape
        return of(self.prompts.shape[1], self.responses.shape[1])

    def usual_predictions(self) -> int:
        """Returns the predictions that most sequences need at most."""
        response = self.responses.shape[1]
        return response if self.chain is None else max(response, self.sequence_shape().slots // 4)

    def sequences(self) -> packing.PackedLayout:
        """Returns the sequences that the network reads."""
        return self.layout or packing.unpacked(*self.tokens())

    def response_mask(self) -> jax.Array:
        """Returns bool[N, R], true on response tokens."""
        return jnp.arange(self.responses.shape[1]) < self.response_lengths[:, None]

    def unfinished(self, end_tokens: Sequence[tuple[int, ...]]) -> jax.Array:
        """Marks responses that were cut before one of their role's end tokens, bool[N]; false if there is no response."""
        last = jnp.maximum(self.response_lengths - 1, 0)[:, None]
        token = jnp.take_along_axis(self.responses, last, axis=1)[:, 0]
        ended = is_end(token, end_tokens[0])
        for role, ends in enumerate(end_tokens[1:], 1):
            assert self.agents is not None
            ended = jnp.where(self.agents == role, is_end(token, ends), ended)
        return (self.response_lengths > 0) & ~ended


class Assignment(NamedTuple):
    """Decisions in the order of the sequences that they are assigned to, i32[N] each; see `packing.first_fit`."""

    decision: jax.Array  # its index in the TrainingBatch
    sequence: jax.Array
    slot: jax.Array
    offset: jax.Array


def assign_to_sequences(
    batch: TrainingBatch, order: jax.Array, begin: jax.Array | int, stop: jax.Array | int, size: int
) -> tuple[Assignment, jax.Array]:
    """Assigns the decisions `order[begin:stop]` to sequences.

    Args:
      order: i32[number of decisions], a permutation.
      begin, stop: i32[], at most `size` apart.

    Returns: (an Assignment of `size` entries, the number of sequences i32[]).
    """
    at = begin + jnp.arange(size)
    decision = order[jnp.minimum(at, order.shape[0] - 1)]
    predictions = jnp.where(at < stop, batch.response_lengths[decision], 0)
    lengths = jnp.where(predictions > 0, batch.prompt_lengths[decision] + predictions - 1, 0)
    shape = batch.sequence_shape()
    if batch.chain is None:
        sequence, slot, offset = packing.first_fit(lengths, predictions, shape)
    else:
        sequence, slot, offset = packing.first_fit_of_chains(batch.chain[decision], lengths, predictions, shape)
    by_sequence = jnp.argsort(sequence)
    assignment = Assignment(*(a[by_sequence] for a in (decision, sequence, slot, offset)))
    return assignment, jnp.where(sequence < size, sequence + 1, 0).max()


def gather_microbatch(
    batch: TrainingBatch, assignment: Assignment, first_sequence: jax.Array, sequences: int
) -> tuple[jax.Array, TrainingBatch]:
    """Gathers the decisions in M = `sequences` sequences from number `first_sequence` (i32[]) on.

    Returns: (their indices in `batch`, the micro-batch). Its size is static; unused entries have no response and no words: they
    may be turns of another role, with ids beyond this policy's vocabulary, whose NaN no mask takes out of a gradient.
    """
    shape = batch.sequence_shape()
    size = assignment.sequence.shape[0]
    at = jnp.searchsorted(assignment.sequence, first_sequence) + jnp.arange(min(sequences * shape.max_decisions, size))
    decision, sequence, slot, offset = (a.at[at].get(mode="clip") for a in assignment)
    belongs = (at < size) & (sequence < jnp.minimum(first_sequence + sequences, size))
    microbatch = jax.tree.map(lambda a: a[decision], batch)
    microbatch = microbatch.replace(
        prompts=jnp.where(belongs[:, None], microbatch.prompts, 0),
        responses=jnp.where(belongs[:, None], microbatch.responses, 0),
        prompt_lengths=jnp.where(belongs, microbatch.prompt_lengths, 1),
        response_lengths=jnp.where(belongs, microbatch.response_lengths, 0),
    )
    if shape.max_decisions > 1:
        local = (sequence - first_sequence, slot, offset)
        microbatch = microbatch.replace(layout=packing.packed(local, *microbatch.tokens(), sequences=sequences, shape=shape))
    return decision, microbatch
