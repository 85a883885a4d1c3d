"""The key-value cache of one layer: its axes, allocation, writing, and compaction to fewer rows, on each device's rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from hgpo_jax.policy.mesh import auto_axes, partition_in_context

# For keys [B, G, E, C] and values [B, G, C, E]. Heads come first, as the products of decoding read them; otherwise every token
# would copy them.
AXES = ("batch", "kv_heads", None, None)


# The dimension of each array that holds the slots.
SLOTS = {"keys": 3, "values": 2}


def manual_axes() -> set[str]:
    """Lists the mesh axes that split a cache. Explicit code for each device moves its rows: the compiler's own code aborts for
    an array whose rows and heads are split inside a shard_map over a third axis."""
    return {*auto_axes("batch"), *auto_axes("kv_heads")}


class KVCache(struct.PyTreeNode):
    """Keys and values of B rows in C slots, in the weights' type; a model's cache is one of these for each layer."""

    keys: jax.Array  # [B, G, E, C]
    values: jax.Array  # [B, G, C, E]

    @classmethod
    def of(cls, keys, values) -> KVCache:
        """Makes a cache from a prompt's keys and values, [B, S, G, E] each, with as many slots."""
        return cls(keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3))

    def map(self, call, *others: KVCache) -> KVCache:
        """Makes a cache from `call(array, slots, *the same array of others)` for keys and values.

        slots: the dimension that holds the slots.
        """
        of = {
            name: call(getattr(self, name), slots, *(getattr(other, name) for other in others)) for name, slots in SLOTS.items()
        }
        return KVCache(**of)

    def lengthen(self, more: int) -> KVCache:
        """Returns the cache with `more` further empty slots."""
        return self.map(lambda a, slots: jnp.pad(a, [(0, more if axis == slots else 0) for axis in range(a.ndim)]))

    def partition(self) -> KVCache:
        """Returns the PartitionSpecs of all arrays on the mesh in context."""
        return jax.tree.map(lambda a: partition_in_context(AXES, a.shape), self)

    def write(self, key, value, position) -> KVCache:
        """Writes one token's key and value, [B, G, E] each, at slot `position` i32[B]. Each device writes its part."""

        def write_shard(cache, key, value, position):
            token = KVCache.of(key[:, None], value[:, None])
            # Row by row and head by head: otherwise the few heads would come last in the TPU compiler's layout, padded.
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
        """Writes rows i32[m] `source` of another cache with fewer slots to the rows `row` i32[m] among those that a device has.

        A row outside the cache is not written.
        """
        W = prompts.values.shape[2]

        def put(a, slots, new):
            return a.at[(row, *(slice(None),) * (slots - 1), slice(W))].set(new[source], mode="drop")

        return self.map(put, prompts)

    def take(self, rows) -> KVCache:
        """Selects rows i32[n] of the cache among those that a device has."""
        return jax.tree.map(lambda a: a[rows], self)


def on_each_device(call, *args):
    """Runs `call` on each device's part of the arguments' rows, inside a `shard_map` or not.

    Arguments are trees of arrays whose rows are split over the batch's axes, and of KVCaches. The compiler alone would move
    rows between devices.
    """
    if not manual_axes():
        return call(*args)
    is_cache = lambda a: isinstance(a, KVCache)  # noqa: E731

    def specs(tree):
        def spec(a):
            return a.partition() if is_cache(a) else partition_in_context(("batch",) + (None,) * (a.ndim - 1), a.shape)

        return jax.tree.map(spec, tree, is_leaf=is_cache)

    shapes = jax.eval_shape(call, *args)
    mapped = jax.shard_map(call, in_specs=specs(args), out_specs=specs(shapes), axis_names=manual_axes(), check_vma=False)
    return mapped(*args)
