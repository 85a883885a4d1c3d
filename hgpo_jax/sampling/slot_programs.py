"""The compiled programs of a sampler that batches continuously (`continuous_batching.py`)."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hgpo_jax.policy.kv_cache import AXES, KVCache, on_each_device
from hgpo_jax.policy.mesh import partition
from hgpo_jax.policy.pictures import Pictures
from hgpo_jax.sampling.generate import Decoding, make_decode_blocks, turn_keys
from hgpo_jax.sampling.slots import (
    Continued,
    NewPrompts,
    Pace,
    Sampled,
    SlotState,
    copy_rows,
    decode_slots,
    extend_slots,
    free_slots,
    prefill_slots,
)

# A step decodes at least MIN_STEPS tokens, and at most MAX_STEPS, until a sixteenth of the responses has ended. So an ended
# slot waits for few tokens, and long responses are not interrupted for nothing.
MIN_STEPS, SHARE = 8, 16


class SlotPrograms:
    """The compiled programs of a SlotSampler, which all samplers of a policy share.

    Args:
      graphdef: that of the `Qwen2` whose parameters are passed.
      mesh: slots are split over its `data` and `fsdp` axes.
      max_new: R, the longest response.
      end_tokens: the tokens that end a response.

    Attributes:
      max_new, end_tokens: the arguments.
      shards: parts that the slots are split into.
      called: each program and shape, in words, that has been called.
    """

    def __init__(self, graphdef, mesh: Mesh | AbstractMesh, *, max_new: int, end_tokens: tuple[int, ...]):
        self._graphdef, self._mesh, self.max_new, self.end_tokens = graphdef, mesh, max_new, end_tokens
        self.shards = mesh.shape["data"] * mesh.shape["fsdp"]
        self.called: set[tuple[str, str]] = set()
        self._programs = {
            "empty": jax.jit(self._empty, static_argnums=(1, 2)),
            "take": jax.jit(self._take),
            "resize": jax.jit(self._resize, static_argnums=2),
            "copy": jax.jit(self._copy, donate_argnums=0),
            "see": jax.jit(self._see, static_argnums=2),
            "prefill": jax.jit(self._prefill, donate_argnums=2),
            "extend": jax.jit(self._prefill, donate_argnums=2),
            "decode": jax.jit(self._decode, donate_argnums=2),
            "decode_blocks": make_decode_blocks(graphdef),
        }

    def lower(self, name: str, *args):
        """Lowers a program for these arguments."""
        return self._programs[name].lower(*args)

    def row_bytes(self, params, length: int) -> int:
        """Bytes, over all devices, of one slot of each shard whose caches hold `length` tokens.

        A device holds a copy of what is not split over its axis.
        """
        cache = jax.eval_shape(functools.partial(self._empty, slots=self.shards, length=length), params).cache
        parts = zip(jax.tree.leaves(cache), jax.tree.leaves(self._cache_shardings(cache)), strict=True)
        of_device = sum(math.prod(sharding.shard_shape(a.shape)) * a.dtype.itemsize for a, sharding in parts)
        return self._mesh.size * of_device

    def __call__(self, name: str, shape: str, *args):
        """Calls a program with arguments of this shape."""
        self.called.add((name, shape))
        return self._programs[name](*args)

    def _empty(self, params, slots: int, length: int) -> SlotState:
        """Makes `slots` free slots, a multiple of the shards, whose caches hold `length` tokens."""
        return self._place(free_slots(nnx.merge(self._graphdef, params), slots, length))

    def _sharding(self, axes, a) -> NamedSharding:
        return NamedSharding(self._mesh, partition(axes, a.shape, self._mesh))

    def _cache_shardings(self, cache):
        """Returns the sharding of every array of one or more KVCaches."""
        return jax.tree.map(lambda a: self._sharding(AXES[: a.ndim], a), cache)

    def _place(self, state: SlotState) -> SlotState:
        """Constrains the state to the sharding that every program takes and returns."""
        rows = lambda name: self._sharding(("batch",), getattr(state, name))  # noqa: E731
        return jax.lax.with_sharding_constraint(state, SlotState.of(rows, self._cache_shardings(state.cache)))

    def _on_data(self, call, in_specs):
        """Maps `call` over the indices of the data axis; the compiler handles the other axes."""
        return jax.shard_map(
            call, mesh=self._mesh, in_specs=in_specs, out_specs=P("data"), axis_names={"data"}, check_vma=False
        )

    def _take(self, state: SlotState, rows) -> SlotState:
        """Selects the slots `rows` i32[S'] without their caches; row numbers count within a shard."""

        def take(arrays, rows):
            return {name: value[rows] for name, value in arrays.items()}

        values = self._on_data(lambda *a: on_each_device(take, *a), P("data"))(state.rows(), rows)
        return self._place(SlotState.of(values.get, []))

    def _resize(self, layer: KVCache, rows, length: int) -> KVCache:
        """Returns one layer's cache of the slots `rows`, resized to `length` tokens."""

        def resize(layer, rows):
            return layer.take(rows).lengthen(length - layer.ends[-1]).in_parts()

        resized = self._on_data(lambda *a: on_each_device(resize, *a), P("data"))(layer, rows)
        return jax.lax.with_sharding_constraint(resized, self._cache_shardings(resized))

    def _copy(self, cache: list[KVCache], other: list[KVCache] | None, source, rows) -> list[KVCache]:
        """Writes rows `source` of another cache, or of the cache itself, to its rows `rows`; they count within a shard."""

        def copy(cache, other, source, rows):
            return on_each_device(copy_rows, cache, cache if other is None else other, source, rows)

        copied = self._on_data(copy, P("data"))(cache, other, source, rows)
        return jax.lax.with_sharding_constraint(copied, self._cache_shardings(copied))

    def _see(self, params, patches, grid: tuple[int, int, int]):
        """Computes the features [n, D] of one picture, whose patches are f32[N, C x T x P x P]."""
        features = nnx.merge(self._graphdef, params).visual(patches[None], (grid,))[0]
        return jax.lax.with_sharding_constraint(features, NamedSharding(self._mesh, P()))

    def _prefill(
        self,
        params,
        blocks,
        state: SlotState,
        prompts: NewPrompts | Continued,
        keys,
        episodes,
        turns,
        decoding: Decoding,
        pictures: Pictures | None = None,
    ):
        """Computes prompts, or what is left of them, and samples the first token of their responses.

        Response number j of m belongs to episode episodes[j] at turn turns[j]. keys are those of the episodes
        (`sampling.turn_keys`). decoding: of scalars, or of [m]. pictures: those of new
        prompts.

        Returns: (the state, tokens i32[m], their log-probabilities f32[m]).
        """
        keys = turn_keys(keys[episodes], turns)
        data, everywhere = P("data"), P()
        of_pictures: Any = pictures and jax.tree.unflatten(jax.tree.structure(pictures), (everywhere, data, data))
        in_specs = (everywhere, everywhere, data, data, data, _by_row(decoding), of_pictures)
        prefill = self._on_data(self._prefill_shard, in_specs)
        state, *first = prefill(params, blocks, state, prompts, keys, decoding, pictures)
        return self._place(state), *jax.lax.with_sharding_constraint(first, NamedSharding(self._mesh, everywhere))

    def _prefill_shard(self, params, blocks, state: SlotState, prompts: NewPrompts | Continued, keys, decoding, pictures):
        model = nnx.merge(self._graphdef, params)
        if isinstance(prompts, Continued):
            return extend_slots(model, blocks, state, prompts, keys, self.end_tokens, decoding)
        widths = (prompts.tokens.shape[1],)
        return prefill_slots(model, state, prompts, keys, widths, self.end_tokens, decoding, pictures)

    def _decode(self, params, blocks, state: SlotState, free, limits, most, decoding: Decoding) -> tuple[SlotState, Sampled]:
        """Decodes MIN_STEPS to `most` (i32[], at most MAX_STEPS) tokens in every active slot; stops early when all have ended.

        free: bool[S], slots whose responses are no longer wanted. limits: i32[S], tokens of each longest response. decoding: of
        scalars, or of [S].
        """
        data, everywhere = P("data"), P()
        decode = self._on_data(self._decode_shard, (everywhere, everywhere, data, data, data, everywhere, _by_row(decoding)))
        state, sampled = decode(params, blocks, state, free, limits, most, decoding)
        return self._place(state), jax.lax.with_sharding_constraint(sampled, NamedSharding(self._mesh, everywhere))

    def _decode_shard(self, params, blocks, state: SlotState, free, limits, most, decoding):
        state = state.replace(ended=state.ended | free)
        model = nnx.merge(self._graphdef, params)
        return decode_slots(model, blocks, state, limits, Pace(MIN_STEPS, most, SHARE), self.end_tokens, decoding)


def _by_row(decoding: Decoding):
    """Returns, for each of its arrays, how a `shard_map` over data splits it."""
    return jax.tree.map(lambda a: P("data") if jnp.ndim(a) else P(), decoding)
