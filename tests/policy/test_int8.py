"""Sampling in 8 bits: the rounding, and that decoding computes with just the rounded weights and cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hgpo_jax.policy import LoraConfig, ModelConfig, initialize, lora, network, shardings
from hgpo_jax.policy.attention import decode_attention
from hgpo_jax.policy.int8 import quantize
from hgpo_jax.policy.kv_cache import KVCache
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.qwen2 import Linear

PLAIN = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.2,
)  # fmt: skip
INT8 = dataclasses.replace(PLAIN, sample_dtype="int8")
TOKENS = jax.random.randint(jax.random.key(3), (4, 12), 0, 64)
LENGTHS = jnp.array([8, 5, 1, 7])
STEPS = 4


@settings(deadline=None)
@example(np.zeros((3, 5), np.float32), 1)
@given(arrays.arrays(np.float32, (3, 5), elements=st.floats(-1e4, 1e4, width=32)), st.sampled_from([0, 1]))
def test_a_value_is_off_by_half_a_scale_and_the_largest_not_at_all(values, axis):
    whole, scale = quantize(jnp.asarray(values), axis)
    assert whole.dtype == jnp.int8 and scale.dtype == jnp.float32
    assert values.any() or not (whole.any() or scale.any())
    whole, scale = np.asarray(whole, np.float64), np.expand_dims(np.asarray(scale, np.float64), axis)
    assert np.abs(whole).max() <= 127
    largest = np.abs(values).max(axis, keepdims=True)
    normal = largest > 1e-30  # below, float32 loses digits of the scale
    np.testing.assert_allclose(np.where(normal, scale, 0), np.where(normal, largest / 127, 0), rtol=1e-5)
    assert (np.abs(whole * scale - values) <= np.where(normal, 0.501 * scale, largest)).all()
    assert (np.abs(whole)[np.broadcast_to(normal, whole.shape) & (np.abs(values) == largest)] == 127).all()


@functools.partial(jax.jit, static_argnums=0)
def decoded(config, params):
    """(hidden states [STEPS, B, D] of decoding, the blocks it was done with)."""
    model, rows = nnx.merge(network(config), params), jnp.arange(4)
    blocks = model.decode_blocks()
    _, cache = model.prefill(jnp.where(jnp.arange(8) < LENGTHS[:, None], TOKENS[:, :8], 0), LENGTHS - 1, 8 + STEPS)

    def step(cache, n):
        hidden, cache = model.decode(TOKENS[rows, LENGTHS + n], LENGTHS + n, cache, blocks)
        return cache, hidden

    return jax.lax.scan(step, cache, jnp.arange(STEPS))[1], [nnx.state(block) for block in blocks]


def one_device():
    return make_mesh("data=1", jax.devices()[:1])


def rounded(values, axis):
    whole, scale = quantize(values, axis)
    return whole.astype(jnp.float32) * jnp.expand_dims(scale, axis)


def test_a_product_is_that_of_the_rounded_matrix():
    config = dataclasses.replace(PLAIN, lora=LoraConfig(rank=2, alpha=4.0))
    layer = Linear(config, "q_proj", 32, 48, nnx.Rngs(0), bias=True)
    layer.lora_a[...], layer.lora_b[...] = jax.random.normal(jax.random.key(1), (32, 2)), jnp.ones((2, 48))
    x, kernel = jax.random.normal(jax.random.key(2), (5, 32)), layer.kernel[...]
    layer.bias[...] = jnp.arange(48.0)
    layer.transpose()
    layer.quantize()
    assert layer.kernel[...].dtype == jnp.int8 and layer.kernel[...].shape == (48, 32)
    adapters = 2 * (x @ layer.lora_a[...]) @ layer.lora_b[...]
    np.testing.assert_allclose(layer(x), x @ rounded(kernel, 0) + jnp.arange(48.0) + adapters, atol=1e-4)
    expected, layer.bias = layer(x) - jnp.arange(48.0), None
    half = layer(x.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), expected, atol=0.05, rtol=0.02)


def test_attention_is_that_of_the_rounded_cache():
    keys, values, q = (jax.random.normal(jax.random.key(i), (3, 6, heads, 8)) for i, heads in enumerate((2, 2, 4)))
    cache, position = KVCache.of(keys, values, True), jnp.array([5, 0, 3])
    plain = KVCache.of(rounded(keys, 3), rounded(values, 3), False)
    np.testing.assert_allclose(
        decode_attention(q[:, 0], cache, position), decode_attention(q[:, 0], plain, position), atol=1e-5
    )
    exact = decode_attention(q[:, 0], KVCache.of(keys, values, False), position)
    assert 1e-4 < np.abs(exact - decode_attention(q[:, 0], cache, position)).max() < 0.05


@pytest.mark.parametrize("int8", [False, True])
def test_a_cache_holds_what_was_put_into_it(int8):
    """Whether a token comes with a prompt, alone, or from another cache."""
    keys, values = (jax.random.normal(jax.random.key(i), (3, 5, 2, 8)) for i in range(2))
    of, position = jax.jit(KVCache.of, static_argnums=2), jnp.array([3, 1, 6])
    write = jax.jit(lambda k, v: KVCache.of(k[:, :3], v[:, :3], int8).lengthen(4).write(k[:, 4], v[:, 4], position))
    cache = write(keys, values)
    empty = jnp.zeros((3, 7, 2, 8))
    new_keys, new_values = (
        empty.at[:, :3].set(a[:, :3]).at[jnp.arange(3), position].set(a[:, 4]) for a in (keys, values)
    )
    same(cache, of(new_keys, new_values, int8))
    moved = of(empty, empty, int8).insert(of(keys, values, int8), jnp.array([2, 0, 1]), jnp.array([0, 2, 3]))
    source = lambda a: empty.at[0, :5].set(a[2]).at[2, :5].set(a[0])  # noqa: E731  # row 3 is outside
    same(moved, of(source(keys), source(values), int8))
    taken = jnp.array([2, 2, 1])
    same(cache.take(taken), of(new_keys[taken], new_values[taken], int8))


def same(a: KVCache, b: KVCache):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def divergence(a, b):
    """KL(a || b) of softmaxes, in the mean and at most."""
    a, b = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
    each = (jnp.exp(a) * (a - b)).sum(-1)
    return float(each.mean()), float(each.max())


def test_what_is_sampled_from_hardly_differs():
    plain, int8 = (dataclasses.replace(config, lora=LoraConfig(rank=2, alpha=2.0)) for config in (PLAIN, INT8))
    params, low = initialize(PLAIN, 0, one_device()), lora.initialize(plain, 0, one_device())
    params = lora.bind(params, jax.tree.map(lambda a: a + 0.1 * jax.random.normal(jax.random.key(a.size), a.shape), low))
    head = params["embed_tokens"]["embedding"].T
    exact, (hidden, blocks) = decoded(plain, params)[0], decoded(int8, params)
    assert {block["mlp"]["up_proj"]["kernel"][...].dtype for block in blocks} == {jnp.dtype("int8")}
    mean, most = divergence(exact @ head, hidden @ head)
    assert 1e-7 < mean < 2e-4 and most < 2e-3, (mean, most)


@pytest.mark.slow
def test_on_a_mesh_the_same():
    params = initialize(INT8, 0, one_device())
    hidden = jax.device_get(decoded(INT8, params)[0])
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    with jax.set_mesh(mesh):
        split, blocks = jax.device_get(decoded(INT8, jax.device_put(params, shardings(INT8, mesh))))
    # A sum in another order may round one of the cache's numbers to the next.
    np.testing.assert_allclose(split, hidden, atol=0.02)
    assert np.median(np.abs(split - hidden)) < 1e-4
    assert blocks[0]["self_attn"]["q_proj"]["kernel"][...].dtype == jnp.int8
