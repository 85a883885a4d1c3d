"""The network: equal to transformers' PyTorch Qwen2, Qwen3 and Llama, and its three faces equal to each other on every mesh."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hgpo_jax.mesh import make_mesh
from hgpo_jax.policy import ModelConfig, Policy, RopeScaling, initialize, load_policy, network, shardings, weights
from hgpo_jax.policy.qwen2 import product

DATA = Path(__file__).parent / "data"
REFERENCE = DATA / "qwen2_tiny"
VARIANTS = {
    "qwen2, 7:1 heads, tied": dict(hidden_size=56, num_hidden_layers=3, num_attention_heads=14, num_key_value_heads=2),
    "qwen2, one layer, untied, rope 1e6": dict(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
        rope_theta=1e6,
    ),
    "qwen2, one key-value head, head_dim": dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=24
    ),
    "qwen3, 7:1 heads, tied, head_dim": dict(
        model_type="qwen3", hidden_size=48, num_hidden_layers=3, num_attention_heads=14, num_key_value_heads=2, head_dim=10
    ),
    "qwen3, untied, rope 1e6": dict(
        model_type="qwen3", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
        tie_word_embeddings=False, rope_theta=1e6,
    ),
    "llama, 3:1 heads, tied": dict(
        model_type="llama", hidden_size=48, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, rms_norm_eps=1e-5
    ),
    "llama, scaled rope, untied, head_dim": dict(
        model_type="llama", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=12,
        tie_word_embeddings=False, rope_theta=5e5, llama3=True,
    ),
}  # fmt: skip
TINY = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    initializer_range=0.2,
)  # fmt: skip


def compute(policy, ids):
    """As `compute` of make_reference.py: (logits, gradient by Hugging Face name)."""
    ids = jnp.asarray(ids)

    def loss(params):
        model = nnx.merge(policy.graphdef, params)
        logits = model.logits(model.hidden(ids, jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)))
        logp = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(logp, ids[:, 1:, None], -1).mean(), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(policy.params)
    gather = weights.to_host(gradients)
    return logits, {t.name: gather(t) for t in weights.layout(gradients, policy.config.num_hidden_layers)}


def assert_same(policy, ids, logits, gradients):
    """Logits within 1e-4, gradients within 1e-3 of each parameter's largest."""
    ours, ours_gradients = compute(policy, ids)
    np.testing.assert_allclose(ours, logits, atol=1e-4)
    assert ours_gradients.keys() == gradients.keys()
    for name, theirs in gradients.items():
        scale = np.abs(theirs).max()
        assert scale > 1e-5, name  # the comparison is about something
        np.testing.assert_allclose(ours_gradients[name], theirs, rtol=0, atol=1e-3 * min(scale, 1), err_msg=name)


@pytest.mark.parametrize("name", ["qwen2_tiny", "qwen3_tiny", "llama_tiny"])
def test_logits_and_gradients_equal_the_stored_ones_of_transformers(name):
    stored = dict(np.load(DATA / name / "expected.npz"))
    gradients = {key.removeprefix("gradient/"): value for key, value in stored.items() if key.startswith("gradient/")}
    assert np.abs(stored["logits"]).max() > 1
    assert_same(load_policy(DATA / name), stored["ids"], stored["logits"], gradients)


@pytest.mark.parametrize("sizes", VARIANTS.values(), ids=VARIANTS)
def test_logits_and_gradients_equal_transformers(sizes, tmp_path):
    pytest.importorskip("torch")
    import make_reference

    model = make_reference.random_model(vocab_size=101, intermediate_size=80, **({"tie_word_embeddings": True} | sizes))
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(1).integers(0, 101, (3, 17))
    assert_same(load_policy(tmp_path), ids, *make_reference.compute(model, ids))


def test_padding_does_not_reach_the_row():
    policy = load_policy(REFERENCE)
    ids = np.random.default_rng(2).integers(0, 67, (2, 12))
    other = ids.copy()
    other[:, 7:] = 3
    full, cut = policy.logits(ids, np.array([12, 12])), policy.logits(other, np.array([7, 7]))
    np.testing.assert_allclose(full[:, :7], cut[:, :7], atol=1e-5)


@pytest.fixture(scope="module")
def tiny():
    mesh = make_mesh("data=1", jax.devices()[:1])
    return network(TINY), initialize(TINY, 0, mesh)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_has_the_gradients_of_a_product(dtype):
    x, w, g = (
        jax.random.normal(key, shape).astype(dtype)
        for key, shape in zip(jax.random.split(jax.random.key(0), 3), [(3, 5, 7), (7, 4), (3, 5, 4)], strict=True)
    )
    exact, exact_back = jax.vjp(jnp.matmul, *(a.astype("float32") for a in (x, w)))
    expected = (exact, *exact_back(g.astype("float32")))
    for multiply in (product, jax.jit(product)):
        y, back = jax.vjp(multiply, x, w)
        for ours, like, theirs in zip((y, *back(g)), (g, x, w), expected, strict=True):
            assert ours.dtype == like.dtype and ours.shape == like.shape
            # Sums of bfloat16 may be rounded at every step.
            close = 1e-5 if dtype == "float32" else 4 * 2**-8 * np.abs(theirs).max()
            np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, atol=close)


def test_wanted_slots_equal_the_full_output(tiny):
    graphdef, params = tiny
    tokens = jax.random.randint(jax.random.key(0), (4, 11), 0, 64)
    slots = jnp.array([[0, 4, 10], [3, 3, 2], [9, 1, 0], [10, 10, 10]])
    hidden = jax.jit(lambda params, slots: nnx.merge(graphdef, params).hidden(tokens, slots))
    full, some = hidden(params, jnp.broadcast_to(jnp.arange(11), (4, 11))), hidden(params, slots)
    np.testing.assert_allclose(some, jnp.take_along_axis(full, slots[..., None], 1), atol=1e-5)


@pytest.mark.slow
def test_remat_changes_nothing(tiny):
    graphdef, params = tiny
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 64)
    slots = jnp.broadcast_to(jnp.arange(9), (2, 9))

    def loss(params, remat):
        return (nnx.merge(graphdef, params).hidden(tokens, slots, remat=remat) ** 3).sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    plain, *rematted = (gradient(params, remat) for remat in ("none", "dots", "full"))
    for other in rematted:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, other)


@pytest.mark.parametrize("model_type", ["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "llama"))])
def test_decoding_equals_reading_with_prompts_of_different_lengths(model_type):
    config = dataclasses.replace(TINY, model_type=model_type, head_dim=12)
    graphdef, params = network(config), initialize(config, 0, make_mesh("data=1", jax.devices()[:1]))
    tokens = jax.random.randint(jax.random.key(3), (3, 12), 0, 64)
    lengths = jnp.array([8, 5, 1])
    prompts = jnp.where(jnp.arange(8) < lengths[:, None], tokens[:, :8], 0)
    hidden, cache = jax.jit(lambda p: nnx.merge(graphdef, p).prefill(prompts, lengths - 1, 12))(params)
    slots = jnp.broadcast_to(jnp.arange(12), (3, 12))
    full = jax.jit(lambda p: nnx.merge(graphdef, p).hidden(tokens, slots))(params)

    @jax.jit
    def decode(params, *state):
        model = nnx.merge(graphdef, params)
        return model.decode(*state, model.decode_blocks())

    rows = jnp.arange(3)
    np.testing.assert_allclose(hidden, full[rows, lengths - 1], atol=1e-5)
    for step in range(4):
        position = lengths + step
        hidden, cache = decode(params, tokens[rows, position], position, cache)
        np.testing.assert_allclose(hidden, full[rows, position], atol=1e-5)


LLAMA = dataclasses.replace(TINY, model_type="llama", rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64), tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        ("data=2,fsdp=2,tensor=2", TINY),
        *(pytest.param(s, TINY, marks=pytest.mark.slow) for s in ("data=8", "fsdp=8", "data=2,tensor=4")),
        pytest.param("data=2,fsdp=2,tensor=2", LLAMA, marks=pytest.mark.slow),
    ],
)
def test_same_parameters_and_logits_on_every_mesh(spec, config):
    expected = initialize(config, 0, make_mesh("data=1", jax.devices()[:1]))
    mesh = make_mesh(spec)
    params = initialize(config, 0, mesh)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), params, expected)
    placed = jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), params, shardings(config, mesh))
    assert all(jax.tree.leaves(placed))
    ids = np.random.default_rng(0).integers(0, 64, (8, 9))
    with jax.set_mesh(mesh):
        logits = np.asarray(Policy(config, params, None).logits(ids, np.full(8, 9)))
    reference = np.asarray(Policy(config, expected, None).logits(ids, np.full(8, 9)))
    np.testing.assert_allclose(logits, reference, atol=1e-4)


def test_heads_are_never_cut(tiny):
    with pytest.raises(ValueError, match="heads dimension of 4"):
        shardings(TINY, make_mesh("tensor=8"))
