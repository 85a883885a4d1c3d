"""Attention of queries to the keys not after them.

At given slots (`attend`), at all of them (`attend_all`, on TPUs by splash, on GPUs by cuDNN), and of one token to a cache
(`attend_kept`).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from hgpo_jax.mesh import free_axes

MAX_SCORES = 2**28  # 1 GB in float32, over the devices of fsdp and tensor together


def attend(q_BRNH, k_BSKH, v_BSKH, slots_BR, first_BR=None, max_scores: int = MAX_SCORES):
    """Attention of queries at `slots` to the slots not after them, from `first` (0 if None) on: [B, R, N, H].

    max_scores: scores to hold at a time; where B x N x R x S is more, the queries are worked through in pieces whose scores
      are computed again in the backward pass, so that memory grows with the length and not with its square.
    """
    B, R, N, H = q_BRNH.shape
    S, K = k_BSKH.shape[1:3]
    k_BKHS, v_BKSH = k_BSKH.transpose(0, 2, 3, 1), v_BSKH.transpose(0, 2, 1, 3)

    def piece(q_BRNH, slots_BR, first_BR):
        # The queries of a key-value head's group are rows of one product.
        R = q_BRNH.shape[1]
        q_BKrH = q_BRNH.reshape(B, R, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)
        scores = jnp.matmul(q_BKrH, k_BKHS, preferred_element_type=jnp.float32).reshape(B, K, N // K, R, S) * H**-0.5
        seen_BRS = jnp.arange(S) <= slots_BR[..., None]
        if first_BR is not None:
            seen_BRS &= jnp.arange(S) >= first_BR[..., None]
        shares = jax.nn.softmax(jnp.where(seen_BRS[:, None, None], scores, -jnp.inf)).astype(v_BSKH.dtype)
        out = jnp.matmul(shares.reshape(B, K, -1, S), v_BKSH).reshape(B, K, N // K, R, H)
        return out.transpose(0, 3, 1, 2, 4).reshape(B, R, N, H)

    width = max(1, min(R, max_scores // (B * N * S)))
    if width == R:
        return piece(q_BRNH, slots_BR, first_BR)
    pieces = -(-R // width)

    def cut(a):
        a = jnp.pad(a, ((0, 0), (0, pieces * width - R), *((0, 0),) * (a.ndim - 2)))
        return jnp.moveaxis(a.reshape(B, pieces, width, *a.shape[2:]), 1, 0)

    inputs = jax.tree.map(cut, (q_BRNH, slots_BR, first_BR))
    out = jnp.moveaxis(jax.lax.map(lambda inputs: jax.checkpoint(piece)(*inputs), inputs), 0, 1)
    return out.reshape(B, pieces * width, *out.shape[3:])[:, :R]


def attend_kept(q_BNH, k_BKHC, v_BKCH, position_B):
    """Attention of one query a row, at `position`, to the slots of a cache not after it: [B, N, H].

    Keys and values lie as the products read them fastest: the slots, which are many, come last in the scores and in the keys.
    """
    B, N, H = q_BNH.shape
    K, _, C = k_BKHC.shape[1:]
    scores_BKGC = jnp.matmul(q_BNH.reshape(B, K, N // K, H), k_BKHC, preferred_element_type=jnp.float32) * H**-0.5
    seen_B11C = (jnp.arange(C) <= position_B[:, None])[:, None, None]
    shares_BKGC = jax.nn.softmax(jnp.where(seen_B11C, scores_BKGC, -jnp.inf)).astype(v_BKCH.dtype)
    return jnp.matmul(shares_BKGC, v_BKCH).reshape(B, N, H)


def attend_all(q_BSNH, k_BSKH, v_BSKH, first_BS=None):
    """Attention of every slot to those not after it, from `first` (0 if None) on: [B, S, N, H].

    `first` is the same for the slots of one text, and all slots of a sequence before a text belong to others.
    """
    H = q_BSNH.shape[-1]
    device = jax.sharding.get_abstract_mesh().abstract_device
    parts = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in free_axes("kv_heads"))
    if device is not None and device.platform == "tpu" and H % LANES == 0 and k_BSKH.shape[2] % parts == 0:
        return splash(q_BSNH, k_BSKH, v_BSKH, first_BS)
    if device is not None and device.platform == "gpu" and q_BSNH.dtype == jnp.bfloat16 and H % 8 == 0 and H <= 128:
        return cudnn(q_BSNH, k_BSKH, v_BSKH, first_BS)
    return attend_in_blocks(q_BSNH, k_BSKH, v_BSKH, first_BS)


def block_of(S: int) -> int:
    """Queries in a block of `attend_in_blocks`: 64 or more, so that there are 16 blocks at most."""
    return max(64, -(-S // 16))


def attend_in_blocks(q_BSNH, k_BSKH, v_BSKH, first_BS=None, size: int | None = None):
    """`attend_all` by blocks of `size` queries, each to the keys up to its end: half of the scores are never computed."""
    B, S = q_BSNH.shape[:2]
    size = size or block_of(S)
    slots_BS = jnp.broadcast_to(jnp.arange(S), (B, S))
    out = []
    for begin in range(0, S, size):
        end = min(begin + size, S)
        queries = (a if a is None else a[:, begin:end] for a in (slots_BS, first_BS))
        limit = MAX_SCORES * size // S  # of all blocks together, as the backward pass keeps them
        out.append(attend(q_BSNH[:, begin:end], k_BSKH[:, :end], v_BSKH[:, :end], *queries, max_scores=limit))
    return jnp.concatenate(out, axis=1)


def cudnn(q_BSNH, k_BSKH, v_BSKH, first_BS=None):
    """`attend_all` by cuDNN's fused attention, which holds no scores; bfloat16 only."""
    S = q_BSNH.shape[1]
    # With a mask it refuses odd lengths.
    even = lambda a: jnp.pad(a, ((0, 0), (0, S % 2), *((0, 0),) * (a.ndim - 2)))  # noqa: E731
    q, k, v, first = jax.tree.map(even, (q_BSNH, k_BSKH, v_BSKH, first_BS))
    mask = None if first is None else (first[:, :, None] == first[:, None])[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")[:, :S]


LANES = 128  # of a TPU's vector registers, which a head and a block of slots must fill


def splash(q_BSNH, k_BSKH, v_BSKH, first_BS=None, interpret: bool = False):
    """`attend_all` by JAX's splash attention kernel for TPUs, whose memory grows with S and not with its square.

    interpret: run the kernel on another back end, slowly.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    S = q_BSNH.shape[1]
    block = min(512, -(-S // LANES) * LANES)
    length = -(-S // block) * block

    def part(q, k, v, first):
        mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * q.shape[2])
        blocks = kernel.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
            block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
        )  # fmt: skip
        attention = kernel.make_splash_mha_single_device(mask, block_sizes=blocks, interpret=interpret)
        # Slots beyond S come after all others, so that no other attends to them.
        turn = lambda a: jnp.pad(jnp.swapaxes(a, 1, 2), ((0, 0), (0, 0), (0, length - S), (0, 0)))  # noqa: E731
        first = None if first is None else jnp.pad(first, ((0, 0), (0, length - S)))
        segments = None if first is None else kernel.SegmentIds(first, first)
        out = jax.vmap(attention)(turn(q * q.shape[-1] ** -0.5), turn(k), turn(v), segments)
        return jnp.swapaxes(out, 1, 2)[:, :S]

    mesh = jax.sharding.get_abstract_mesh()
    axes = set(mesh.axis_names) - set(mesh.manual_axes)  # all of them: the compiler may not split a kernel
    if not axes:
        return part(q_BSNH, k_BSKH, v_BSKH, first_BS)
    split = P(free_axes("batch") or None, None, free_axes("heads") or None)
    rows = P(free_axes("batch") or None)
    part = jax.shard_map(part, in_specs=(split, split, split, rows), out_specs=split, axis_names=axes, check_vma=False)
    return part(q_BSNH, k_BSKH, v_BSKH, first_BS)
