"""The network: equal to transformers' PyTorch Qwen2, and its three faces equal to each other on every mesh."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hgpo_jax.mesh import make_mesh
from hgpo_jax.policy import ModelConfig, Policy, initialize, load_policy, network, shardings
from hgpo_jax.policy.tokenizer import word_tokenizer

REFERENCE = Path(__file__).parent / "data" / "qwen2_tiny"
VARIANTS = {
    "grouped heads 7:1, tied": dict(hidden_size=56, num_hidden_layers=3, num_attention_heads=14, num_key_value_heads=2),
    "one layer, untied": dict(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False
    ),
    "one key-value head": dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1),
}  # fmt: skip
TINY = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    initializer_range=0.2,
)  # fmt: skip


def test_logits_equal_the_stored_ones_of_transformers():
    stored = np.load(REFERENCE / "expected.npz")
    logits = load_policy(REFERENCE).logits(stored["ids"], np.full(3, 19))
    np.testing.assert_allclose(logits, stored["logits"], atol=1e-4)
    assert np.abs(stored["logits"]).max() > 1  # the comparison is about something


@pytest.mark.parametrize("sizes", VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_transformers(sizes, tmp_path):
    torch = pytest.importorskip("torch")
    from make_reference import random_model

    model = random_model(vocab_size=101, intermediate_size=80, **({"tie_word_embeddings": True} | sizes))
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(1).integers(0, 101, (3, 17))
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(load_policy(tmp_path).logits(ids, np.full(3, 17)), expected, atol=1e-4)


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


def test_wanted_slots_equal_the_full_output(tiny):
    graphdef, params = tiny
    tokens = jax.random.randint(jax.random.key(0), (4, 11), 0, 64)
    slots = jnp.array([[0, 4, 10], [3, 3, 2], [9, 1, 0], [10, 10, 10]])
    model = nnx.merge(graphdef, params)
    full = model.hidden(tokens, jnp.broadcast_to(jnp.arange(11), (4, 11)))
    some = model.hidden(tokens, slots)
    np.testing.assert_allclose(some, jnp.take_along_axis(full, slots[..., None], 1), atol=1e-5)


def test_remat_changes_nothing(tiny):
    graphdef, params = tiny
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 64)
    slots = jnp.broadcast_to(jnp.arange(9), (2, 9))

    def loss(params, remat):
        return (nnx.merge(graphdef, params).hidden(tokens, slots, remat=remat) ** 3).sum()

    plain, rematted = (jax.grad(loss)(params, remat) for remat in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, rematted)


def test_decoding_equals_reading_with_prompts_of_different_lengths(tiny):
    graphdef, params = tiny
    model = nnx.merge(graphdef, params)
    tokens = jax.random.randint(jax.random.key(3), (3, 12), 0, 64)
    lengths = jnp.array([8, 5, 1])
    prompts = jnp.where(jnp.arange(8) < lengths[:, None], tokens[:, :8], 0)
    hidden, cache = model.prefill(prompts, lengths - 1, 12)
    full = model.hidden(tokens, jnp.broadcast_to(jnp.arange(12), (3, 12)))
    rows = jnp.arange(3)
    np.testing.assert_allclose(hidden, full[rows, lengths - 1], atol=1e-5)
    for step in range(4):
        position = lengths + step
        hidden, cache = model.decode(tokens[rows, position], position, cache)
        np.testing.assert_allclose(hidden, full[rows, position], atol=1e-5)


@pytest.mark.parametrize("spec", ["data=8", "fsdp=8", "data=2,fsdp=2,tensor=2", "data=2,tensor=4"])
def test_same_parameters_and_logits_on_every_mesh(spec, tiny):
    _, expected = tiny
    mesh = make_mesh(spec)
    params = initialize(TINY, 0, mesh)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), params, expected)
    placed = jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), params, shardings(TINY, mesh))
    assert all(jax.tree.leaves(placed))
    ids = np.random.default_rng(0).integers(0, 64, (8, 9))
    with jax.set_mesh(mesh):
        logits = np.asarray(Policy(TINY, params, None).logits(ids, np.full(8, 9)))
    reference = np.asarray(Policy(TINY, expected, None).logits(ids, np.full(8, 9)))
    np.testing.assert_allclose(logits, reference, atol=1e-4)


def test_heads_are_never_cut(tiny):
    with pytest.raises(ValueError, match="heads dimension of 4"):
        shardings(TINY, make_mesh("tensor=8"))


@pytest.mark.parametrize("tied", [True, False])
def test_folder_round_trip_is_bit_exact(tied, tmp_path):
    config = ModelConfig(**{**vars(TINY), "tie_word_embeddings": tied})
    params = initialize(config, 5, make_mesh("data=1", jax.devices()[:1]))
    words = ("", "go_to", "fridge_1")
    Policy(config, params, word_tokenizer(words)).save(tmp_path)
    back = load_policy(tmp_path)
    assert back.config == config
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), jax.device_get(back.params))
    assert back.tokenizer("go_to fridge_1 _ <|im_end|>")["input_ids"] == [1, 2, 0, 4]
    assert back.tokenizer.eos_token_id == 4
    assert back.tokenizer.pad_token_id == 3


def test_transformers_loads_the_folder_and_agrees(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import Qwen2ForCausalLM

    policy = Policy(TINY, initialize(TINY, 1, make_mesh("data=1", jax.devices()[:1])), word_tokenizer(("", "a")))
    policy.save(tmp_path)
    ids = np.random.default_rng(4).integers(0, 64, (2, 10))
    with torch.no_grad():
        expected = Qwen2ForCausalLM.from_pretrained(tmp_path).eval()(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(policy.logits(ids, np.full(2, 10)), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]), "damaged"),
        (lambda f: _edit(f, "num_hidden_layers", 4), "model.layers.3"),
        (lambda f: _edit(f, "num_hidden_layers", 2), "unexpected"),
        (lambda f: _edit(f, "hidden_size", 40), "shape"),
        (lambda f: _edit(f, "tie_word_embeddings", True), "lm_head.weight differs"),
        (lambda f: _edit(f, "model_type", "llama"), "llama"),
        (lambda f: _edit(f, "use_sliding_window", True), "use_sliding_window"),
    ],
)
def test_damaged_folders_are_named_in_one_line(tmp_path, change, fragment):
    import shutil

    folder = tmp_path / "policy"
    shutil.copytree(REFERENCE, folder)
    change(folder)
    with pytest.raises(ValueError) as caught:
        load_policy(folder)
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def _edit(folder, field, value):
    import json

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
