"""Attention of queries at given slots to the keys not after them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MAX_SCORES = 2**28  # 1 GB in float32, over the devices of fsdp and tensor together


def attend(q_BRNH, k_BSKH, v_BSKH, positions_BR, max_scores: int = MAX_SCORES):
    """Attention of queries at `positions` to the slots not after them: [B, R, N, H].

    max_scores: scores to hold at a time; where B x N x R x S is more, the queries are worked through in pieces whose scores
      are computed again in the backward pass, so that memory grows with the length and not with its square.
    """
    B, R, N, _ = q_BRNH.shape
    S = k_BSKH.shape[1]

    def piece(q, positions):
        mask = jnp.arange(S) <= positions[..., None]
        return jax.nn.dot_product_attention(q, k_BSKH, v_BSKH, mask=mask[:, None])

    width = max(1, min(R, max_scores // (B * N * S)))
    if width == R:
        return piece(q_BRNH, positions_BR)
    pieces = -(-R // width)
    room = pieces * width - R
    q = jnp.pad(q_BRNH, ((0, 0), (0, room), (0, 0), (0, 0))).reshape(B, pieces, width, *q_BRNH.shape[2:])
    positions = jnp.pad(positions_BR, ((0, 0), (0, room))).reshape(B, pieces, width)
    turn = lambda a: jnp.moveaxis(a, 1, 0)  # noqa: E731
    out = jax.lax.map(lambda inputs: jax.checkpoint(piece)(*inputs), (turn(q), turn(positions)))
    return turn(out).reshape(B, pieces * width, *out.shape[3:])[:, :R]
