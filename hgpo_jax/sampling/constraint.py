"""Constrained decoding: only tokens that can still become one of some sequences are sampled.

A set of tokens is a row of bits, so that the few words of a small vocabulary travel with every sampled token: the learner needs
the same sets, because a token's probability is that among the allowed ones. A row without any bit allows every token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

BITS = 32


def words_of(tokens: int) -> int:
    """Returns W, the u32 words that hold a bit for each of so many tokens."""
    return -(-tokens // BITS)


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
        """Returns what token number i32[] of each response may be after those before it in `sampled` i32[B, R]: u32[B, W]."""
        agree = (self.tokens == sampled[:, None]) | (jnp.arange(sampled.shape[-1]) >= i)
        possible = self.listed & agree.all(-1)
        following = jax.lax.dynamic_index_in_dim(self.tokens, i, axis=-1)  # [B, C, 1]
        # By comparison: XLA's partitioner aborts on a scatter into rows that a shard_map over another axis splits.
        flags = (possible[..., None] & (following == jnp.arange(self.words * BITS))).any(1)
        bits = flags.reshape(-1, self.words, BITS).astype(jnp.uint32) << jnp.arange(BITS, dtype=jnp.uint32)
        return bits.sum(-1, dtype=jnp.uint32)


def restrict(logits: jax.Array, allowed: jax.Array | None) -> jax.Array:
    """Lowers the logits f32[..., V] of tokens outside the sets u32[..., W] so far that they have probability 0.

    They stay finite: an infinite one would make the entropy's gradient NaN. None allows everything.
    """
    if allowed is None:
        return logits
    bits = (allowed[..., None] >> jnp.arange(BITS, dtype=jnp.uint32)) & 1 == 1
    inside = bits.reshape(*allowed.shape[:-1], -1)[..., : logits.shape[-1]]
    inside = jnp.pad(inside, [(0, 0)] * (inside.ndim - 1) + [(0, logits.shape[-1] - inside.shape[-1])])
    return jnp.where(inside | ~(allowed != 0).any(-1, keepdims=True), logits, jnp.finfo(logits.dtype).min)
