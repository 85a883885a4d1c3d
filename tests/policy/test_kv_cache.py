"""The cache of decoding: writing, moving and taking rows."""

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.policy.kv_cache import KVCache


def test_a_cache_holds_what_was_put_into_it():
    """Whether a token comes with a prompt, alone, or from another cache."""
    keys, values = (jax.random.normal(jax.random.key(i), (3, 5, 2, 8)) for i in range(2))
    position = jnp.array([3, 1, 6])
    cache = KVCache.of(keys[:, :3], values[:, :3]).lengthen(4).write(keys[:, 4], values[:, 4], position)
    empty = jnp.zeros((3, 7, 2, 8))
    new_keys, new_values = (
        empty.at[:, :3].set(a[:, :3]).at[jnp.arange(3), position].set(a[:, 4]) for a in (keys, values)
    )
    same(cache, KVCache.of(new_keys, new_values))
    moved = KVCache.of(empty, empty).insert(KVCache.of(keys, values), jnp.array([2, 0, 1]), jnp.array([0, 2, 3]))
    source = lambda a: empty.at[0, :5].set(a[2]).at[2, :5].set(a[0])  # noqa: E731  # row 3 is outside
    same(moved, KVCache.of(source(keys), source(values)))
    taken = jnp.array([2, 2, 1])
    same(cache.take(taken), KVCache.of(new_keys[taken], new_values[taken]))


def same(a: KVCache, b: KVCache):
    jax.tree.map(np.testing.assert_array_equal, a, b)
