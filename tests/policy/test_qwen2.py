"""The network: equal to transformers' PyTorch Qwen2, Qwen3 and Llama, and its three faces equal to each other on every mesh."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hgpo_jax.policy import (
    ModelConfig,
    Policy,
    RopeScaling,
    initialize,
    load_policy,
    network,
    safetensors_files,
    shardings,
    weight_names,
)
from hgpo_jax.policy.layers import product
from hgpo_jax.policy.mesh import make_mesh

DATA = Path(__file__).parent / "data"
VARIANTS = {
    "qwen2, 7:1 heads, tied": dict(hidden_size=56, num_hidden_layers=3, num_attention_heads=14, num_key_value_heads=2),
    "qwen2, one layer, untied, rope 1e6": dict(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
        rope_theta=1e6,
    ),
    "qwen3, 7:1 heads, tied, head_dim": dict(
        model_type="qwen3", hidden_size=48, num_hidden_layers=3, num_attention_heads=14, num_key_value_heads=2, head_dim=10
    ),
    "llama, scaled rope, one key-value head, untied, head_dim": dict(
        model_type="llama", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=12,
        tie_word_embeddings=False, rope_theta=5e5, rms_norm_eps=1e-5, llama3=True,
    ),
    "mistral, rope 1e6, untied, head_dim": dict(
        model_type="mistral", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
        tie_word_embeddings=False, rope_theta=1e6, rms_norm_eps=1e-5,
    ),
}  # fmt: skip
TINY = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=12, model_type="qwen3", rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64), initializer_range=0.2,
)  # fmt: skip
TOKENS = jax.random.randint(jax.random.key(3), (3, 12), 0, 64)
EVERY_SLOT = jnp.broadcast_to(jnp.arange(12), (3, 12))


def compute(policy, ids):
    """As `compute` of make_reference.py: (logits, gradient by Hugging Face name)."""
    ids = jnp.asarray(ids)

    def loss(params):
        model = nnx.merge(policy.graphdef, params)
        logits = model.logits(model.hidden(ids, jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)))
        logp = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(logp, ids[:, 1:, None], -1).mean(), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(policy.params)
    gather = safetensors_files.to_host(gradients)
    return logits, {t.name: gather(t) for t in weight_names.layout(gradients, policy.config.num_hidden_layers)}


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


@pytest.mark.needs("torch")
@pytest.mark.parametrize("sizes", VARIANTS.values(), ids=VARIANTS)
def test_logits_and_gradients_equal_transformers(sizes, tmp_path):
    import make_reference

    model = make_reference.random_model(vocab_size=101, intermediate_size=80, **({"tie_word_embeddings": True} | sizes))
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(1).integers(0, 101, (3, 17))
    assert_same(load_policy(tmp_path), ids, *make_reference.compute(model, ids))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_has_the_gradients_of_a_product(dtype):
    x, w, g = (
        jax.random.normal(key, shape).astype(dtype)
        for key, shape in zip(jax.random.split(jax.random.key(0), 3), [(3, 5, 7), (7, 4), (3, 5, 4)], strict=True)
    )
    exact, exact_back = jax.vjp(jnp.matmul, *(a.astype("float32") for a in (x, w)))
    y, back = jax.vjp(product, x, w)
    for ours, like, theirs in zip((y, *back(g)), (g, x, w), (exact, *exact_back(g.astype("float32"))), strict=True):
        assert ours.dtype == like.dtype and ours.shape == like.shape
        # Sums of bfloat16 may be rounded at every step.
        close = 1e-5 if dtype == "float32" else 4 * 2**-8 * np.abs(theirs).max()
        np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, atol=close)


def test_predictions_do_not_widen_the_table(params):
    """Decoding would write and read all of it in float32 for each token."""
    half = jax.tree.map(lambda a: a.astype("bfloat16"), params)
    hidden = jnp.ones((1, TINY.hidden_size), "bfloat16")
    program = str(jax.make_jaxpr(lambda params: nnx.merge(network(TINY), params).logits(hidden))(half))
    rows, width = TINY.vocab_size, TINY.hidden_size
    assert f"bf16[{width},{rows}]" in program and f"f32[1,{rows}]" in program
    assert f"f32[{rows},{width}]" not in program


def test_logits_of_an_untied_head_are_not_rounded():
    """Logits around 20 in bfloat16 would be multiples of 1/8."""
    untied = dataclasses.replace(TINY, tie_word_embeddings=False)
    params = initialize(untied, 0, make_mesh("data=1", jax.devices()[:1]))
    half = jax.tree.map(lambda a: a.astype("bfloat16"), params)
    hidden = jax.random.normal(jax.random.key(1), (5, TINY.hidden_size), "bfloat16")
    logits = nnx.merge(network(untied), half).logits(hidden)
    exact = np.asarray(hidden, np.float64) @ np.asarray(half["lm_head"]["kernel"], np.float64)
    np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def params():
    return initialize(TINY, 0, make_mesh("data=1", jax.devices()[:1]))


@pytest.fixture(scope="module")
def read(params):
    """Hidden states at some slots of TOKENS."""
    hidden = jax.jit(lambda params, slots: nnx.merge(network(TINY), params).hidden(TOKENS, slots))
    return lambda slots: hidden(params, slots)


def test_wanted_slots_equal_the_full_output(read):
    slots = jnp.array([[0, 4, 10], [3, 3, 2], [9, 1, 0]])
    np.testing.assert_allclose(read(slots), jnp.take_along_axis(read(EVERY_SLOT), slots[..., None], 1), atol=1e-5)


def test_decoding_equals_reading_with_prompts_of_different_lengths(params, read):
    graphdef, rows, lengths = network(TINY), jnp.arange(3), jnp.array([8, 5, 1])
    prompts = jnp.where(jnp.arange(8) < lengths[:, None], TOKENS[:, :8], 0)
    hidden, cache = jax.jit(lambda p: nnx.merge(graphdef, p).prefill(prompts, lengths - 1, 12))(params)

    @jax.jit
    def decode(params, *state):
        model = nnx.merge(graphdef, params)
        return model.decode(*state, model.decode_blocks())

    full = read(EVERY_SLOT)
    np.testing.assert_allclose(hidden, full[rows, lengths - 1], atol=1e-5)
    for step in range(4):
        position = lengths + step
        hidden, cache = decode(params, TOKENS[rows, position], position, cache)
        np.testing.assert_allclose(hidden, full[rows, position], atol=1e-5)


@pytest.mark.slow
def test_remat_changes_nothing(params):
    def loss(params, remat):
        return (nnx.merge(network(TINY), params).hidden(TOKENS, EVERY_SLOT, remat=remat) ** 3).sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    plain, *rematted = (gradient(params, remat) for remat in ("none", "dots", "full"))
    for other in rematted:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, other)


LLAMA = dataclasses.replace(TINY, model_type="llama", tie_word_embeddings=False)


@pytest.mark.parametrize(("spec", "config"), [
    ("data=2,fsdp=2,tensor=2", TINY),
    pytest.param("fsdp=8", dataclasses.replace(TINY, model_type="qwen2"), marks=pytest.mark.slow),
    pytest.param("data=2,tensor=4", LLAMA, marks=pytest.mark.slow),
])  # fmt: skip
def test_same_parameters_and_logits_on_every_mesh(spec, config):
    expected = initialize(config, 0, make_mesh("data=1", jax.devices()[:1]))
    mesh = make_mesh(spec)
    params = initialize(config, 0, mesh)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (params, expected)))
    placed = jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), params, shardings(config, mesh))
    assert all(jax.tree.leaves(placed))
    ids = np.random.default_rng(0).integers(0, 64, (8, 9))
    with jax.set_mesh(mesh):
        logits = np.asarray(Policy(config, params, None).logits(ids, np.full(8, 9)))
    policy = Policy(config, expected, None)
    np.testing.assert_allclose(logits, policy.logits(ids, np.full(8, 9)), atol=1e-4)
    ids[:, 7:] = 3  # padding does not reach the row
    np.testing.assert_allclose(policy.logits(ids, np.full(8, 7))[:, :7], logits[:, :7], atol=1e-4)
