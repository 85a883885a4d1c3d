"""Attention in chunks is attention, and so are the kernels for TPUs and GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.policy.attention import MAX_SCORES, attend, attend_all, attend_in_blocks, cudnn, decode_attention, splash
from hgpo_jax.policy.kv_cache import KVCache
from hgpo_jax.policy.mesh import make_mesh

B, Q, S, H, G, E = 2, 7, 9, 4, 2, 6
CHUNKS = 3 * B * H * S  # scores of three queries


@pytest.fixture(scope="module")
def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(key, (B, n, heads, E)) for key, n, heads in zip(keys, (Q, S, S), (H, G, G), strict=False))
    return q, k, v, jnp.sort(jax.random.randint(keys[3], (B, Q), 0, S), axis=1)


def plain(q, k, v, slots, start=None):
    """One query of one head at a time."""
    out = np.zeros(q.shape)
    for b, i, h in np.ndindex(q.shape[:3]):
        visible = slice(0 if start is None else int(start[b, i]), int(slots[b, i]) + 1)
        scores = np.asarray(k, np.float64)[b, visible, h * G // H] @ np.asarray(q, np.float64)[b, i, h] / np.sqrt(E)
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights / weights.sum() @ np.asarray(v, np.float64)[b, visible, h * G // H]
    return out


@pytest.mark.parametrize("limit", [1, CHUNKS, MAX_SCORES])  # one, three and all queries at a time
def test_equals_one_query_at_a_time(arrays, limit):
    compute, start = jax.jit(lambda *given: attend(*given, max_scores=limit)), arrays[3] // 2
    np.testing.assert_allclose(compute(*arrays), plain(*arrays), atol=1e-5)
    np.testing.assert_allclose(compute(*arrays, start), plain(*arrays, start), atol=1e-5)


def test_one_query_a_row_to_a_cache(arrays):
    q, k, v, positions = arrays
    out = decode_attention(q[:, 0], KVCache.of(k, v), positions[:, 0])
    np.testing.assert_allclose(out, plain(*arrays)[:, 0], atol=1e-5)


def test_all_slots_in_blocks(arrays):
    k, v = arrays[1:3]
    q, slots = jnp.tile(k, (1, 1, H // G, 1)) * 1.3, jnp.broadcast_to(jnp.arange(S), (B, S))
    start = jnp.broadcast_to(jnp.array([0, 0, 0, 3, 3, 5, 6, 6, 6]), (B, S))
    compute = jax.jit(lambda *given: attend_in_blocks(*given, size=4))
    np.testing.assert_allclose(compute(q, k, v), plain(q, k, v, slots), atol=1e-5)
    np.testing.assert_allclose(compute(q, k, v, start), plain(q, k, v, slots, start), atol=1e-5)


def test_gradients_of_chunks(arrays):
    def total(q, k, v, limit):
        return (attend(q, k, v, arrays[3], arrays[3] // 2, max_scores=limit) ** 2).sum()

    whole, chunks = (jax.jit(jax.grad(total, (0, 1, 2)), static_argnums=3)(*arrays[:3], n) for n in (MAX_SCORES, CHUNKS))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), whole, chunks)


# Three segments of 70, 1 and 60 slots, and slots of none.
START = np.repeat([0, 70, 71, 131], [70, 1, 60, 19])
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["one segment", "packed"])


@PACKED
@pytest.mark.parametrize("spec", ["data=1", pytest.param("data=2,fsdp=2,tensor=2", marks=pytest.mark.slow)])
def test_splash_attention_and_its_gradients(spec, packed):
    rows, keys = (1 if spec == "data=1" else 4), jax.random.split(jax.random.key(1), 3)
    inputs = [jax.random.normal(key, (rows, 150, heads, 128)) for key, heads in zip(keys, (4, 2, 2), strict=True)]
    slots = jnp.broadcast_to(jnp.arange(150), (rows, 150))
    start = jnp.broadcast_to(START, (rows, 150)) if packed else None

    def total(attention):
        def f(*inputs):
            out = attention(*inputs)
            return (out**2).sum(), out

        return jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))

    (_, out), gradients = total(lambda q, k, v: attend(q, k, v, slots, start))(*inputs)
    with jax.set_mesh(make_mesh(spec, jax.devices()[: 2 * rows] if rows > 1 else jax.devices()[:1])):
        (_, ours), our_gradients = total(lambda q, k, v: splash(q, k, v, start, interpret=True))(*inputs)
    np.testing.assert_allclose(ours, out, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), our_gradients, gradients)


@PACKED
def test_cudnn_attention_is_lowered_for_gpus_and_its_mask_is_ours(packed, monkeypatch):
    """No GPU here: that the kernel is called, in both directions, and that what it is told to compute is `attend_all`."""
    from jax._src.cudnn import fused_attention_stablehlo as kernels

    q, k, v = (jax.random.normal(jax.random.key(2), (2, 149, heads, 8), jnp.bfloat16) for heads in (4, 2, 2))
    start = jnp.broadcast_to(START[:149], (2, 149)) if packed else None
    compute = lambda q, k, v: cudnn(q, k, v, start).astype(jnp.float32).sum()  # noqa: E731
    monkeypatch.setattr(kernels, "check_cudnn_version", lambda: 91100)
    text = jax.jit(jax.grad(compute, (0, 1, 2))).trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmha" in text and "Backward" in text
    whole = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, implementation=None, **more: whole(*a, **more))
    exact = [a.astype(jnp.float32) for a in (q, k, v)]
    ours, theirs = (jax.jit(attention)(*exact, start) for attention in (cudnn, attend_all))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
