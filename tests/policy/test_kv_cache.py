"""The cache of decoding: writing, moving and taking rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.policy.kv_cache import KVCache


@pytest.mark.parametrize(("first", "slots", "ends"), [(3, 7, [7]), (300, 1000, [256, 512, 1000])])
def test_a_cache_holds_what_was_put_into_it(first, slots, ends):
    """Whether a token comes with a prompt, alone, or from another cache."""
    drawn = np.random.default_rng(0).normal(size=(2, 3, slots - 2, 2, 8)).astype(np.float32)
    position, taken = np.array([first, 1, slots - 1]), np.array([2, 2, 1])

    @jax.jit
    def caches(keys, values):
        cache = KVCache.of(keys[:, :first], values[:, :first]).lengthen(1).in_parts().lengthen(slots - first - 1).in_parts()
        assert cache.ends == ends
        cache, empty = cache.write(keys[:, -1], values[:, -1], position), jnp.zeros((3, 1, 2, 8))
        moved = KVCache.of(empty, empty).lengthen(slots - 1).in_parts()
        moved = moved.insert(KVCache.of(keys, values), jnp.array([2, 0, 1]), jnp.array([0, 2, 3]))  # row 3 is outside
        rest, begin = KVCache.of(keys[:2, :3], values[:2, :3]), jnp.array([first - 2, 0])
        some = moved.take(jnp.array([0, 2])).insert_at(rest, jnp.array([1, 2]), begin, jnp.array([2, 3]))  # row 2 is outside
        return [whole(each) for each in (cache, moved, some, cache.take(taken))]

    def expected(a):
        written, moved = np.zeros((2, 3, slots, 2, 8), np.float32)
        written[:, :first] = a[:, :first]
        written[np.arange(3), position] = a[:, -1]
        moved[[0, 2], : slots - 2] = a[[2, 0]]
        some = moved[[0, 2]]
        some[1, first - 2 : first] = a[0, :2]
        return written, moved, some, written[taken]

    wanted = jax.jit(lambda both: [whole(KVCache.of(*each)) for each in both])(list(zip(*map(expected, drawn), strict=True)))
    jax.tree.map(np.testing.assert_array_equal, caches(*drawn), wanted)


def whole(cache: KVCache) -> list:
    return [cache.whole(name) for name in ("keys", "values")]
