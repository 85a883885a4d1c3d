"""The key-value cache of one layer: its axes, allocation, writing, and compaction to fewer rows, on each device's rows."""

from __future__ import annotations

import itertools
import math

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


PART = 128  # slots; the lanes of a TPU's vector registers
SHORTEST_PART = 256  # slots
WORTH_A_BRANCH = 2**26  # bytes; about what a GPU reads while the host learns which branch to take


class KVCache(struct.PyTreeNode):
    """Keys and values of B rows in C slots, in the weights' type; a model's cache is one of these for each layer.

    The slots come in parts, one after the other, so that a step of decoding reads no more of them than it needs: a slice of a
    single array would be copied first.
    """

    keys: tuple[jax.Array, ...]  # [B, G, E, c] each
    values: tuple[jax.Array, ...]  # [B, G, c, E] each

    @classmethod
    def of(cls, keys, values) -> KVCache:
        """Makes a cache of one part from a prompt's keys and values, [B, S, G, E] each, with as many slots."""
        return cls((keys.transpose(0, 2, 3, 1),), (values.transpose(0, 2, 1, 3),))

    @property
    def ends(self) -> list[int]:
        """The slots up to the end of each part."""
        return list(itertools.accumulate(part.shape[SLOTS["values"]] for part in self.values))

    def map(self, call, *others: KVCache) -> KVCache:
        """Makes a cache from `call(part, slots, begin, *the whole array of others)` for the parts of keys and values.

        slots: the dimension that holds the slots. begin: the number of the part's first slot.
        """
        begins = [0, *self.ends[:-1]]

        def parts(name: str) -> tuple:
            slots, wholes = SLOTS[name], [other.whole(name) for other in others]
            return tuple(call(part, slots, begin, *wholes) for part, begin in zip(getattr(self, name), begins, strict=True))

        return KVCache(parts("keys"), parts("values"))

    def whole(self, name: str) -> jax.Array:
        """Returns all slots of the `keys` or `values` as one array."""
        parts = getattr(self, name)
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, SLOTS[name])

    def lengthen(self, more: int) -> KVCache:
        """Returns the cache with `more` further empty slots, in one part."""

        def pad(name: str) -> tuple[jax.Array]:
            whole, slots = self.whole(name), SLOTS[name]
            return (jnp.pad(whole, [(0, more if axis == slots else 0) for axis in range(whole.ndim)]),)

        return KVCache(pad("keys"), pad("values"))

    def in_parts(self) -> KVCache:
        """Returns the cache in the parts that decoding may leave out."""
        wholes = {name: self.whole(name) for name in SLOTS}
        ends = _ends(self.ends[-1], _bytes_on_a_device(wholes["keys"]))
        return KVCache(**{name: tuple(jnp.split(whole, ends[:-1], SLOTS[name])) for name, whole in wholes.items()})

    def partition(self) -> KVCache:
        """Returns the PartitionSpecs of all arrays on the mesh in context."""
        return jax.tree.map(lambda a: partition_in_context(AXES, a.shape), self)

    def write(self, key, value, position) -> KVCache:
        """Writes one token's key and value, [B, G, E] each, at slot `position` i32[B]. Each device writes its part."""

        def write_shard(cache, key, value, position):
            token = KVCache.of(key[:, None], value[:, None])
            # Row by row and head by head: otherwise the few heads would come last in the TPU compiler's layout, padded.
            rows, heads = jnp.arange(key.shape[0])[:, None], jnp.arange(key.shape[1])

            def put(part, slots, begin, new):
                # A negative index would count from the end.
                at = jnp.where(position < begin, part.shape[slots], position - begin)
                index = (rows, heads, *(slice(None),) * (slots - 2), at[:, None])
                return part.at[index].set(jnp.squeeze(new, slots), mode="drop")

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

        def put(part, slots, begin, new):
            width = min(part.shape[slots], new.shape[slots] - begin)
            if width <= 0:
                return part
            new = jax.lax.slice_in_dim(new, begin, begin + width, axis=slots)
            return part.at[(row, *(slice(None),) * (slots - 1), slice(width))].set(new[source], mode="drop")

        return self.map(put, prompts)

    def insert_at(self, tokens: KVCache, row, begin, lengths) -> KVCache:
        """Writes the first `lengths` i32[n] slots of each row of another cache to the rows `row` i32[n] among those that a
        device has, from slot `begin` i32[n] on.

        A row outside the cache is not written.
        """
        slot = jnp.arange(tokens.ends[-1])
        rows, heads = row[:, None, None], jnp.arange(tokens.keys[0].shape[1])[:, None]

        def put(part, slots, first, new):
            at = begin[:, None] + slot - first
            # A negative index would count from the end.
            at = jnp.where((slot < lengths[:, None]) & (at >= 0), at, part.shape[slots])
            index = (rows, heads, *(slice(None),) * (slots - 2), at[:, None])
            return part.at[index].set(jnp.moveaxis(new, slots, 2), mode="drop")

        return self.map(put, tokens)

    def as_prompt(self) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values as they were given to `of`, [B, C, G, E] each."""
        return self.whole("keys").transpose(0, 3, 1, 2), self.whole("values").transpose(0, 2, 1, 3)

    def take(self, rows) -> KVCache:
        """Selects rows i32[n] of the cache among those that a device has."""
        return jax.tree.map(lambda a: a[rows], self)


def _bytes_on_a_device(whole: jax.Array) -> int:
    """Returns the bytes of keys and values together, where `whole` is one of them."""
    mesh = jax.sharding.get_abstract_mesh()
    split = jax.tree.leaves(tuple(partition_in_context(AXES, whole.shape)))
    return 2 * whole.nbytes // math.prod(mesh.shape[axis] for axis in split)


def _ends(slots: int, size: int) -> list[int]:
    """Lists where the parts of a cache with so many slots end: at an eighth, a quarter, a half, and the end.

    size: its bytes on a device. A part after the first begins at a multiple of PART.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform == "gpu" and size < WORTH_A_BRANCH:
        return [slots]
    ends = (-(-slots // (PART * share)) * PART for share in (8, 4, 2))
    return sorted({slots, *(end for end in ends if SHORTEST_PART <= end < slots)})


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
