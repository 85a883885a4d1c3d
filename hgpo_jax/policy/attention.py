"""Causal attention: from queries at given slots (`attend`), from all slots (`attend_all`, on TPUs by splash, on GPUs by
cuDNN), and to a cache from one token (`decode_attention`) or several (`extend_attention`).

Shape suffixes: the dimension letters of `hgpo_jax`, and r = H / G query heads that share a key-value head.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from hgpo_jax.policy.kv_cache import KVCache, on_each_device
from hgpo_jax.policy.mesh import all_auto_axes, auto_axes

MAX_SCORES = 2**28  # 1 GB in float32, over the devices of fsdp and tensor together


def attend(q_BQHE, k_BSGE, v_BSGE, slots_BQ, start_BQ=None, *, max_scores: int = MAX_SCORES):
    """Computes attention from queries at `slots` to the slots not after them, from `start` (0 if None) on: [B, Q, H, E].

    max_scores: scores to hold at a time; if B x H x Q x S is more, they are computed in chunks of queries, and recomputed in
    the backward pass, so that memory grows with the length and not with its square.
    """
    B, Q, H, E = q_BQHE.shape
    S, G = k_BSGE.shape[1:3]
    k_BGES, v_BGSE = k_BSGE.transpose(0, 2, 3, 1), v_BSGE.transpose(0, 2, 1, 3)

    def attend_chunk(q_BQHE, slots_BQ, start_BQ):
        Q = q_BQHE.shape[1]
        # All queries that share a key-value head are the rows of one product: [B, G, r x Q, E].
        queries = q_BQHE.reshape(B, Q, G, H // G, E).transpose(0, 2, 3, 1, 4).reshape(B, G, -1, E)
        scores = jnp.matmul(queries, k_BGES, preferred_element_type=jnp.float32)
        scores_BGrQS = scores.reshape(B, G, H // G, Q, S) * E**-0.5
        visible_BQS = jnp.arange(S) <= slots_BQ[..., None]
        if start_BQ is not None:
            visible_BQS &= jnp.arange(S) >= start_BQ[..., None]
        weights_BGrQS = jax.nn.softmax(jnp.where(visible_BQS[:, None, None], scores_BGrQS, -jnp.inf)).astype(v_BSGE.dtype)
        out_BGrQE = jnp.matmul(weights_BGrQS.reshape(B, G, -1, S), v_BGSE).reshape(B, G, H // G, Q, E)
        return out_BGrQE.transpose(0, 3, 1, 2, 4).reshape(B, Q, H, E)

    width = max(1, min(Q, max_scores // (B * H * S)))
    if width == Q:
        return attend_chunk(q_BQHE, slots_BQ, start_BQ)
    chunks = -(-Q // width)

    def split(a):
        a = jnp.pad(a, ((0, 0), (0, chunks * width - Q), *((0, 0),) * (a.ndim - 2)))
        return jnp.moveaxis(a.reshape(B, chunks, width, *a.shape[2:]), 1, 0)

    inputs = jax.tree.map(split, (q_BQHE, slots_BQ, start_BQ))
    out = jnp.moveaxis(jax.lax.map(lambda inputs: jax.checkpoint(attend_chunk)(*inputs), inputs), 0, 1)
    return out.reshape(B, chunks * width, *out.shape[3:])[:, :Q]


def decode_attention(q_BHE, cache: KVCache, position_B, needed):
    """Computes attention from one query per row, at `position`, to the slots of a cache not after it: [B, H, E].

    Reads the parts of the cache that are `needed`: what decoding reads decides how long it takes. A row with a position beyond,
    whose result nobody needs, gets an arbitrary one. Keys and values have the layout that the products read fastest: the slots,
    which are many, come last in scores and keys.
    """
    B, H, E = q_BHE.shape
    G = cache.keys[0].shape[1]

    def attend_to_parts(q_BHE, cache, position_B):
        keys, values = ([part.astype(q_BHE.dtype) for part in parts] for parts in (cache.keys, cache.values))
        q_BGrE = q_BHE.reshape(B, G, H // G, E)
        scores_BGrC = jnp.concatenate([jnp.matmul(q_BGrE, k, preferred_element_type=jnp.float32) for k in keys], -1) * E**-0.5
        visible_B11C = (jnp.arange(cache.ends[-1]) <= position_B[:, None])[:, None, None]
        weights_BGrC = jax.nn.softmax(jnp.where(visible_B11C, scores_BGrC, -jnp.inf)).astype(q_BHE.dtype)
        weights = jnp.split(weights_BGrC, cache.ends[:-1], -1)
        outs = [jnp.matmul(w, v, preferred_element_type=jnp.float32) for w, v in zip(weights, values, strict=True)]
        return functools.reduce(jnp.add, outs).astype(q_BHE.dtype).reshape(B, H, E)

    return _with_needed_parts(attend_to_parts, needed, q_BHE, cache, position_B)


def extend_attention(q_BQHE, cache: KVCache, rows_B, slots_BQ, needed):
    """Computes attention from queries at `slots` to the slots not after them in the `rows` of a cache: [B, Q, H, E].

    Reads the parts of the cache that are `needed`. rows: counted within a device's part.
    """

    def attend_to_parts(q_BQHE, cache, rows_B, slots_BQ):
        k_BSGE, v_BSGE = on_each_device(KVCache.take, cache, rows_B).as_prompt()
        return attend(q_BQHE, k_BSGE, v_BSGE, slots_BQ)

    return _with_needed_parts(attend_to_parts, needed, q_BQHE, cache, rows_B, slots_BQ)


def _with_needed_parts(attention, needed, q, cache: KVCache, *args):
    """Calls `attention(q, cache, *args)` with as many parts of the cache as hold the first `needed` slots, i32[]."""

    def attend_to(count, q, cache, *args):
        return attention(q, KVCache(cache.keys[:count], cache.values[:count]), *args)

    reads = [functools.partial(attend_to, count) for count in range(1, len(cache.ends) + 1)]
    return jax.lax.switch(jnp.searchsorted(jnp.array(cache.ends), needed), reads, q, cache, *args)


def attend_all(q_BSHE, k_BSGE, v_BSGE, start_BS=None):
    """Computes attention from every slot to those not after it, from `start` (0 if None) on: [B, S, H, E].

    `start` is the same for the slots of one segment, and all earlier slots of the sequence belong to other segments.
    """
    E = q_BSHE.shape[-1]
    device = jax.sharding.get_abstract_mesh().abstract_device
    shards = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in auto_axes("kv_heads"))
    platform = device.platform if device is not None and k_BSGE.shape[2] % shards == 0 else None
    if platform == "tpu" and E % LANES == 0:
        return splash(q_BSHE, k_BSGE, v_BSGE, start_BS)
    if platform == "gpu" and q_BSHE.dtype == jnp.bfloat16 and E % 8 == 0 and E <= 128:
        return cudnn(q_BSHE, k_BSGE, v_BSGE, start_BS)
    return attend_in_blocks(q_BSHE, k_BSGE, v_BSGE, start_BS)


def query_block_size(S: int) -> int:
    """Returns the queries in a block of `attend_in_blocks`: 64 or more, so that there are at most 16 blocks."""
    return max(64, -(-S // 16))


def attend_in_blocks(q_BSHE, k_BSGE, v_BSGE, start_BS=None, size: int | None = None):
    """Computes `attend_all` by blocks of `size` queries, each with the keys up to its end, which skips half of the scores."""
    B, S = q_BSHE.shape[:2]
    size = size or query_block_size(S)
    slots_BS = jnp.broadcast_to(jnp.arange(S), (B, S))
    out = []
    for begin in range(0, S, size):
        end = min(begin + size, S)
        queries = (a if a is None else a[:, begin:end] for a in (slots_BS, start_BS))
        limit = MAX_SCORES * size // S  # for all blocks together, as the backward pass holds them
        out.append(attend(q_BSHE[:, begin:end], k_BSGE[:, :end], v_BSGE[:, :end], *queries, max_scores=limit))
    return jnp.concatenate(out, axis=1)


def attend_on_shards(attention, q_BSHE, k_BSGE, v_BSGE, start_BS):
    """Runs `attention(q, k, v, start)` on each device's part of the rows and heads, inside a `shard_map` or not.

    The compiler cannot split a kernel along any axis, so none is left to it.
    """
    axes = all_auto_axes()
    if not axes:
        return attention(q_BSHE, k_BSGE, v_BSGE, start_BS)
    split = P(auto_axes("batch") or None, None, auto_axes("heads") or None)
    rows = P(auto_axes("batch") or None)
    mapped = jax.shard_map(attention, in_specs=(split, split, split, rows), out_specs=split, axis_names=axes, check_vma=False)
    return mapped(q_BSHE, k_BSGE, v_BSGE, start_BS)


def cudnn(q_BSHE, k_BSGE, v_BSGE, start_BS=None):
    """Computes `attend_all` by cuDNN's fused attention, bfloat16 only.

    It holds no scores, but JAX turns `start` into a bias, [B, 1, S, S] in bfloat16.
    """
    S = q_BSHE.shape[1]

    def attend_shard(*arrays):
        # With a mask it rejects odd lengths.
        even = lambda a: jnp.pad(a, ((0, 0), (0, S % 2), *((0, 0),) * (a.ndim - 2)))  # noqa: E731
        q, k, v, start = jax.tree.map(even, arrays)
        mask = None if start is None else (start[:, :, None] == start[:, None])[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")[:, :S]

    return attend_on_shards(attend_shard, q_BSHE, k_BSGE, v_BSGE, start_BS)


LANES = 128  # lanes of a TPU's vector registers, which a head and a block of slots must fill


def splash(q_BSHE, k_BSGE, v_BSGE, start_BS=None, interpret: bool = False):
    """Computes `attend_all` by JAX's splash attention kernel for TPUs; memory grows with S and not with its square.

    interpret: run the kernel on another backend, slowly.
    """
    # Only here: Pallas takes long to import, and only TPUs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    S = q_BSHE.shape[1]
    block = min(512, -(-S // LANES) * LANES)
    length = -(-S // block) * block

    def attend_shard(q, k, v, start):
        mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * q.shape[2])
        blocks = kernel.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            block_q_dq=block,
            block_kv_dq=block,
        )
        attention = kernel.make_splash_mha_single_device(mask, block_sizes=blocks, interpret=interpret)
        # Slots beyond S come after all others, so no other slot attends to them.
        heads_first = lambda a: jnp.pad(jnp.swapaxes(a, 1, 2), ((0, 0), (0, 0), (0, length - S), (0, 0)))  # noqa: E731
        start = None if start is None else jnp.pad(start, ((0, 0), (0, length - S)))
        segments = None if start is None else kernel.SegmentIds(start, start)
        out = jax.vmap(attention)(heads_first(q * q.shape[-1] ** -0.5), heads_first(k), heads_first(v), segments)
        return jnp.swapaxes(out, 1, 2)[:, :S]

    return attend_on_shards(attend_shard, q_BSHE, k_BSGE, v_BSGE, start_BS)
