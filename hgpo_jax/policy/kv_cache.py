"""The key-value cache of one layer: its axes, allocation, writing, and compaction to fewer rows; work on each device's rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from hgpo_jax.mesh import auto_axes, partition_in_context

# Of keys [B, G, E, C] and values [B, G, C, E]. Heads come first, as the products of decoding read them; otherwise every
# token would copy them.
AXES = ("batch", "kv_heads", None, None)


def manual_axes() -> set[str]:
    """Mesh axes that split a cache. Moving its rows is written by hand for each device: left to the compiler, it aborts on
    an array whose rows and heads are split inside a shard_map over a third axis."""
    return {*auto_axes("batch"), *auto_axes("kv_heads")}


class KVCache(struct.PyTreeNode):
    """Keys and values of B rows in C slots; a model's cache is one of these for each layer."""

    keys: jax.Array  # [B, G, E, C]
    values: jax.Array  # [B, G, C, E]

    @classmethod
    def allocate(cls, keys, values, length: int) -> KVCache:
        """A cache of C = `length` slots that begins with a prompt's keys and values, [B, S, G, E] each."""
        padding = [(0, 0), (0, length - keys.shape[1]), (0, 0), (0, 0)]
        keys, values = jnp.pad(keys, padding), jnp.pad(values, padding)
        return cls(keys=keys.transpose(0, 2, 3, 1), values=values.transpose(0, 2, 1, 3))

    def partition(self) -> KVCache:
        """The PartitionSpecs of both arrays on the mesh in context."""
        return jax.tree.map(lambda a: partition_in_context(AXES, a.shape), self)

    def write(self, key, value, position) -> KVCache:
        """The cache with one token's key and value, [B, G, E] each, at slot `position` i32[B]. Each device writes its part."""

        def write_shard(cache, key, value, position):
            rows = jnp.arange(len(position))
            return cache.replace(
                keys=cache.keys.at[rows, :, :, position].set(key), values=cache.values.at[rows, :, position].set(value)
            )

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
        return self.replace(
            keys=self.keys.at[row, :, :, :W].set(prompts.keys[source], mode="drop"),
            values=self.values.at[row, :, :W].set(prompts.values[source], mode="drop"),
        )

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
