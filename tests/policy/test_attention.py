"""Attention in chunks is attention, and so are the kernels for TPUs and GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hgpo_jax.policy import attention
from hgpo_jax.policy.attention import (
    MAX_SCORES,
    attend,
    attend_all,
    attend_in_blocks,
    cudnn,
    decode_attention,
    extend_attention,
    splash,
)
from hgpo_jax.policy.kv_cache import KVCache
from hgpo_jax.policy.mesh import make_mesh
from tests.helpers.tiny import mesh_of

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
    out = decode_attention(q[:, 0], KVCache.of(k, v), positions[:, 0], positions[:, 0].max() + 1)
    np.testing.assert_allclose(out, plain(*arrays)[:, 0], atol=1e-5)


@jax.jit
def filled(k, v, rows):
    """A cache of 1000 slots with these keys and values."""
    return KVCache.of(k[:, :1], v[:, :1]).lengthen(999).in_parts().insert(KVCache.of(k, v), rows, rows)


@pytest.mark.parametrize("needed, read", [(1, 256), (256, 256), (257, 512), (512, 512), (513, 1000), (1000, 1000)])
def test_a_cache_is_read_only_as_far_as_needed(needed, read):
    rng, rows = np.random.default_rng(1), np.arange(3)
    q, k, v = (rng.normal(size=(3, n, heads, E)).astype(np.float32) for n, heads in ((1, H), (1000, G), (1000, G)))
    positions = np.array([needed - 1, needed // 2, 0])
    # A NaN that is read reaches the result, masked or not.
    beyond = np.arange(1000)[:, None, None] >= read
    cache = filled(*(np.where(beyond, np.float32(np.nan), a) for a in (k, v)), rows)
    out = jax.jit(decode_attention)(q[:, 0], cache, positions, needed)
    np.testing.assert_allclose(out, plain(q, k, v, positions[:, None])[:, 0], atol=1e-5)
    some = np.array([2, 0])
    out = jax.jit(extend_attention)(q[some], cache, some, positions[some, None], needed)
    np.testing.assert_allclose(out, plain(q[some], k[some], v[some], positions[some, None]), atol=1e-5)


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


@pytest.fixture
def gpu_arrays():
    shapes = [(4, 149, heads, 8) for heads in (4, 2, 2)]
    return [jax.random.normal(key, shape) for key, shape in zip(jax.random.split(jax.random.key(2), 3), shapes, strict=True)]


def cudnn_gradients(packed: bool, inside: bool):
    """Gradients, and the output, of `cudnn` as programs call it: split over data by `shard_map` (`inside`), or not."""
    start = jnp.broadcast_to(START[:149], (4, 149)) if packed else None
    split = P("data")
    mapped = jax.shard_map(cudnn, in_specs=(split,) * 4, out_specs=split, axis_names={"data"}, check_vma=False)

    def total(*inputs):
        out = (mapped if inside else cudnn)(*inputs, start)
        return (out.astype(jnp.float32) ** 2).sum(), out

    return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))


@PACKED
@pytest.mark.parametrize("spec", ["data=1", "data=2,fsdp=2,tensor=2"])
def test_cudnn_attention_is_lowered_for_gpus(spec, packed, gpu_arrays, monkeypatch):
    """There is no GPU here, so it is only seen that a kernel is called in both directions, and left to no partitioner."""
    from jax._src.cudnn import fused_attention_stablehlo as kernels

    monkeypatch.setattr(kernels, "check_cudnn_version", lambda: 91100)
    with jax.set_mesh(mesh_of(spec)):
        inputs = [a.astype(jnp.bfloat16) for a in gpu_arrays]
        text = cudnn_gradients(packed, inside=True).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmha") == 2 and "Backward" in text
    assert "CustomSPMDPartitioning" not in text


@PACKED
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a shard_map"])
def test_cudnn_attention_computes_attention_on_eight_devices(inside, packed, gpu_arrays, monkeypatch):
    start = jnp.broadcast_to(START[:149], (4, 149)) if packed else None

    def total(*inputs):
        out = attend_in_blocks(*inputs, start)
        return (out**2).sum(), out

    gradients, out = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*gpu_arrays)
    whole = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, implementation=None, **more: whole(*a, **more))
    with jax.set_mesh(mesh_of("data=2,fsdp=2,tensor=2")):
        our_gradients, ours = cudnn_gradients(packed, inside)(*gpu_arrays)
    np.testing.assert_allclose(ours, out, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), our_gradients, gradients)


@pytest.mark.parametrize(("platform", "kernel"), [("tpu", "splash"), ("gpu", "cudnn"), ("cpu", "attend_in_blocks")])
def test_kernels_take_only_heads_that_the_mesh_divides(platform, kernel, monkeypatch):
    for name in ("splash", "cudnn", "attend_in_blocks"):
        monkeypatch.setattr(attention, name, lambda *arrays, name=name: name)
    device = jax.sharding.AbstractDevice(device_kind="pretended", num_cores=None, platform=platform)
    for tensor, chosen in {1: kernel, 2: kernel, 4: "attend_in_blocks"}.items():
        mesh = mesh_of(f"fsdp=2,tensor={tensor}").abstract_mesh.update(abstract_device=device)
        q, kv = (jax.ShapeDtypeStruct((2, 8, heads, 128), jnp.bfloat16) for heads in (4, 2))
        with jax.sharding.use_abstract_mesh(mesh):
            assert attend_all(q, kv, kv) == chosen
