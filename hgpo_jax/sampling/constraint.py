"""Constrained decoding: only tokens that can still become one of some sequences are sampled.

A set of tokens is a row of bits, so that the few words of a small vocabulary travel with every sampled token: the learner needs
the same sets, because a token's probability is that among the allowed ones. A row without any bit allows every token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

BITS = 32


def words_of(tokens: int) -> int:
    """Returns W, the u32 words that hold a bit for each of so many tokens."""
    return -(-tokens // BITS)


class Constraint(Protocol):
    """What one response may be, computed on the host while it is sampled.

    failure: why that cannot be told any longer, in a line; then only end tokens are allowed. "" otherwise.
    """

    failure: str

    def next_set(self, sampled: Sequence[int]) -> np.ndarray:
        """Returns what the token after these may be, u32[W]. Each call has the tokens of the one before, and perhaps more."""


class Sequences(struct.PyTreeNode):
    """The C sequences of tokens that each of B responses may be.

    Of sequences that begin alike all are possible until they part. With none left, everything is allowed.
    """

    tokens: jax.Array  # i32[B, C, R], with the token that ends each; what follows is never reached
    listed: jax.Array  # bool[B, C], the others are no sequences
    words: int = struct.field(pytree_node=False)  # W, u32 words of a set; tokens are below 32 W

    @classmethod
    def of_actions(cls, actions: jax.Array, listed: jax.Array, end: int, words: int) -> Sequences:
        """Makes the answers that are one of the actions i32[B, C, A], in which 0 is an empty slot, and then the end token."""
        ended = jnp.pad(actions, ((0, 0), (0, 0), (0, 1)))
        return cls(jnp.where(ended > 0, ended, end), listed, words)

    def next_tokens(self, sampled: jax.Array, i: jax.Array) -> jax.Array:
        """Returns what token number i, i32[] or i32[B], of each response may be after those before it in `sampled` i32[B, R]:
        u32[B, W]."""
        possible, following = self._going_on(sampled, i)
        bits = jnp.uint32(1) << (following % BITS).astype(jnp.uint32)
        in_word = possible[..., None] & (following[..., None] // BITS == jnp.arange(self.words))
        return jax.lax.reduce(jnp.where(in_word, bits[..., None], jnp.uint32(0)), jnp.uint32(0), jax.lax.bitwise_or, (1,))

    def chosen(self, sampled: jax.Array, i: jax.Array, token: jax.Array) -> jax.Array:
        """Returns the number of a sequence that goes on with `token` i32[B], where there is one, i32[B]."""
        possible, following = self._going_on(sampled, i)
        return jnp.argmax(possible & (following == token[:, None]), axis=-1).astype(jnp.int32)

    def numbered(self, number: jax.Array) -> jax.Array:
        """Returns the tokens i32[B, R] of sequence `number` i32[B] of each response."""
        return jnp.where((jnp.arange(self.tokens.shape[1]) == number[:, None])[..., None], self.tokens, 0).sum(1)

    def _going_on(self, sampled: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns which sequences agree with the first i tokens, bool[B, C], and token number i of each, i32[B, C].

        All by comparison: XLA's partitioner aborts on a gather or a scatter in rows that a shard_map over another axis splits.
        """
        at, i = jnp.arange(sampled.shape[-1]), jnp.broadcast_to(i, sampled.shape[:1])[:, None, None]
        agree = (self.tokens == sampled[:, None]) | (at >= i)
        return self.listed & agree.all(-1), jnp.where(at == i, self.tokens, 0).sum(-1)


def padded(answers: Iterable[Sequence[Sequence[int]]], tokens: int, words: int) -> Sequences:
    """Makes the Sequences of B responses of at most R `tokens` from lists, of which empty ones leave a response free.

    Their number is rounded up to a power of two, 16 or more, so that few shapes are compiled.
    """
    lists = list(answers)
    most = max(16, *map(len, lists))
    rows = np.zeros((len(lists), 1 << (most - 1).bit_length(), tokens), np.int32)
    listed = np.zeros(rows.shape[:2], bool)
    for row, flags, some in zip(rows, listed, lists, strict=True):
        flags[: len(some)] = True
        for into, answer in zip(row, some, strict=False):
            into[: len(answer)] = answer
    return Sequences(rows, listed, words)  # type: ignore[arg-type]  # NumPy's, which a program takes as well


def sets_of(answers: Sequence[Sequence[int]], response: Sequence[int], words: int) -> np.ndarray:
    """Returns what each token of a response could have been if it had to be one of the answers, u32[n, W]."""
    sets, possible = np.zeros((len(response), words), np.uint32), list(answers)
    for i, token in enumerate(response):
        following = {answer[i] for answer in possible}
        for each in following:
            sets[i, each // BITS] |= np.uint32(1 << each % BITS)
        possible = [answer for answer in possible if answer[i] == token]
    return sets


def restrict(logits: jax.Array, allowed: jax.Array | None, unwritten: int | None = None) -> jax.Array:
    """Lowers the logits f32[..., V] of tokens outside the sets u32[..., W] so far that they have probability 0.

    They stay finite: an infinite one would make the entropy's gradient NaN. None allows everything but `unwritten`
    (`ModelConfig.unwritten`).
    """
    if unwritten is not None:
        logits = jnp.where(jnp.arange(logits.shape[-1]) == unwritten, jnp.finfo(logits.dtype).min, logits)
    if allowed is None:
        return logits
    bits = (allowed[..., None] >> jnp.arange(BITS, dtype=jnp.uint32)) & 1 == 1
    inside = bits.reshape(*allowed.shape[:-1], -1)[..., : logits.shape[-1]]
    inside = jnp.pad(inside, [(0, 0)] * (inside.ndim - 1) + [(0, logits.shape[-1] - inside.shape[-1])])
    return jnp.where(inside | ~(allowed != 0).any(-1, keepdims=True), logits, jnp.finfo(logits.dtype).min)
