"""The key-value cache of one layer: its axes, allocation, writing, and compaction to fewer rows; work on each device's rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from hgpo_jax.policy.int8 import quantize
from hgpo_jax.policy.mesh import auto_axes, partition_in_context

# Of keys [B, G, E, C] and values [B, G, C, E], the first three of scales [B, G, C]. Heads come first, as the products of
# decoding read them; otherwise every token would copy them.
AXES = ("batch", "kv_heads", None, None)


# Which of an array's dimensions the slots are.
SLOTS = {"keys": 3, "values": 2, "key_scales": 2, "value_scales": 2}


def manual_axes() -> set[str]:
    """Mesh axes that split a cache. Moving its rows is written by hand for each device: left to the compiler, it aborts on
    an array whose rows and heads are split inside a shard_map over a third axis."""
    return {*auto_axes("batch"), *auto_axes("kv_heads")}


class KVCache(struct.PyTreeNode):
    """Keys and values of B rows in C slots; a model's cache is one of these for each layer.

    Both are of the weights' type, or i8 to be multiplied by the scales, one for each slot and head.
    """

    keys: jax.Array  # [B, G, E, C]
    values: jax.Array  # [B, G, C, E]
    key_scales: jax.Array | None = None  # f32[B, G, C]
    value_scales: jax.Array | None = None  # likewise

    @classmethod
    def of(cls, keys, values, int8: bool) -> KVCache:
        """A cache of a prompt's keys and values, [B, S, G, E] each, in as many slots."""
        keys, values = keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3)
        if not int8:
            return cls(keys, values)
        (keys, key_scales), (values, value_scales) = quantize(keys, 2), quantize(values, 3)
        return cls(keys, values, key_scales, value_scales)

    def map(self, call, *others: KVCache) -> KVCache:
        """A cache of `call(array, slots, *the same array of others)` for every array that there is.

        slots: which of its dimensions the slots are.
        """
        arrays = {name: [getattr(cache, name) for cache in (self, *others)] for name in SLOTS}
        of = {name: call(found[0], SLOTS[name], *found[1:]) for name, found in arrays.items() if found[0] is not None}
        return KVCache(**of)

    def lengthen(self, more: int) -> KVCache:
        """The cache with `more` empty slots."""
        return self.map(lambda a, slots: jnp.pad(a, [(0, more if axis == slots else 0) for axis in range(a.ndim)]))

    def partition(self) -> KVCache:
        """The PartitionSpecs of all arrays on the mesh in context."""
        return jax.tree.map(lambda a: partition_in_context(AXES[: a.ndim], a.shape), self)

    def write(self, key, value, position) -> KVCache:
        """The cache with one token's key and value, [B, G, E] each, at slot `position` i32[B]. Each device writes its part."""

        def write_shard(cache, key, value, position):
            token = KVCache.of(key[:, None], value[:, None], self.key_scales is not None)
            # Row by row and head by head: else heads, which are few, would come last in the TPU compiler's layout, padded.
            rows, heads = jnp.arange(key.shape[0])[:, None], jnp.arange(key.shape[1])

            def put(a, slots, new):
                return a.at[(rows, heads, *(slice(None),) * (slots - 2), position[:, None])].set(jnp.squeeze(new, slots))

            return cache.map(put, token)

        axes = manual_axes()
        if not axes:
            return write_shard(self, key, value, position)
        token = partition_in_context(AXES[:3], key.shape)
        specs = self.partition(), token, token, partition_in_context(AXES[:1], position.shape)
        write = jax.shard_map(write_shard, in_specs=specs, out_specs=specs[0], axis_names=axes, check_vma=False)
        return write(self, key, value, position)

    def insert(self, prompts: KVCache, source, row) -> KVCache:
        """The cache with rows i32[m] `source` of another one, of fewer slots, at `row` i32[m], of those that a device has.

        A row outside of the cache is not written.
        """
        W = prompts.values.shape[2]

        def put(a, slots, new):
            return a.at[(row, *(slice(None),) * (slots - 1), slice(W))].set(new[source], mode="drop")

        return self.map(put, prompts)

    def take(self, rows) -> KVCache:
        """The cache of some rows, i32[n], of those that a device has."""
        return jax.tree.map(lambda a: a[rows], self)


def on_each_device(call, *args):
    """`call` with the part of the arguments' rows that each device has, inside a `shard_map` or not.

    Arguments are trees of arrays whose rows are split over the batch's axes, and of KVCaches. Left to the compiler, rows would
    move between devices.
    """
    if not manual_axes():
        return call(*args)
    is_cache = lambda a: isinstance(a, KVCache)  # noqa: E731

    def specs(tree):
        def spec(a):
            return a.partition() if is_cache(a) else partition_in_context(("batch",) + (None,) * (a.ndim - 1), a.shape)

        return jax.tree.map(spec, tree, is_leaf=is_cache)

    shapes = jax.eval_shape(call, *args)
    mapped = jax.shard_map(
        call, in_specs=specs(args), out_specs=specs(shapes), axis_names=manual_axes(), check_vma=False
    )
    return mapped(*args)
