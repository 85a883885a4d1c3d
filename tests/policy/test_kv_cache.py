"""The cache of decoding: writing, moving and taking rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.policy.kv_cache import KVCache


@pytest.mark.parametrize(("first", "slots", "ends"), [(3, 7, [7]), (300, 1000, [256, 512, 1000])])
def test_a_cache_holds_what_was_put_into_it(first, slots, ends):
    """Whether a token comes with a prompt, alone, or from another cache."""
    keys, values = (jax.random.normal(jax.random.key(i), (3, slots - 2, 2, 8)) for i in range(2))
    position = jnp.array([first, 1, slots - 1])
    cache = KVCache.of(keys[:, :first], values[:, :first]).lengthen(1).in_parts().lengthen(slots - first - 1).in_parts()
    assert cache.ends == ends
    cache = cache.write(keys[:, -1], values[:, -1], position)
    empty = jnp.zeros((3, slots, 2, 8))
    new_keys, new_values = (
        empty.at[:, :first].set(a[:, :first]).at[jnp.arange(3), position].set(a[:, -1]) for a in (keys, values)
    )
    same(cache, new_keys, new_values)
    moved = KVCache.of(empty[:, :1], empty[:, :1]).lengthen(slots - 1).in_parts()
    moved = moved.insert(KVCache.of(keys, values), jnp.array([2, 0, 1]), jnp.array([0, 2, 3]))  # row 3 is outside
    source = lambda a: empty.at[0, : slots - 2].set(a[2]).at[2, : slots - 2].set(a[0])  # noqa: E731
    same(moved, source(keys), source(values))
    some, begin = moved.take(jnp.array([0, 2])), jnp.array([first - 2, 0])
    rest = KVCache.of(keys[:2, :3], values[:2, :3])
    some = some.insert_at(rest, jnp.array([1, 2]), begin, jnp.array([2, 3]))  # row 2 is outside
    written = lambda a: a[jnp.array([0, 2])].at[1, first - 2 : first].set  # noqa: E731
    same(some, written(source(keys))(keys[0, :2]), written(source(values))(values[0, :2]))
    taken = jnp.array([2, 2, 1])
    same(cache.take(taken), new_keys[taken], new_values[taken])


def same(cache: KVCache, keys, values):
    for name in ("keys", "values"):
        np.testing.assert_array_equal(cache.whole(name), KVCache.of(keys, values).whole(name))
