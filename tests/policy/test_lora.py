"""Adapters: nothing at the start, the same merged and unmerged, gradients of their own size only, peft's files."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from hgpo_jax.policy import LoraConfig, ModelConfig, Policy, load_policy, lora, network, shapes
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.pictures import place
from tests.helpers.refusals import refused

DATA = Path(__file__).parent / "data"
BASE = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=10,
)  # fmt: skip
SOME = LoraConfig(rank=3, alpha=12, targets=("q_proj", "v_proj", "o_proj", "down_proj"))
ONE = make_mesh("data=1", jax.devices()[:1])
IDS = np.random.default_rng(2).integers(0, 64, (3, 11))
LENGTHS = np.full(3, 11)


def adapted(base, settings, seed=0):
    """(config, adapters with both factors random)"""
    config = dataclasses.replace(base, lora=settings)
    rng = np.random.default_rng(seed)
    draw = lambda a: jnp.asarray(rng.normal(0, 0.1, a.shape), jnp.float32)  # noqa: E731
    return config, jax.tree.map(draw, jax.eval_shape(lambda: lora.initialize(config, 0, ONE)))


def weights_of(config, dtype="float32"):
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(0, 0.2, s.shape), dtype), shapes(config))


def bound(config, params, adapters):
    return Policy(config, lora.bind(params, adapters), None)


def test_fresh_adapters_change_nothing():
    params, config = weights_of(BASE), dataclasses.replace(BASE, lora=SOME)
    fresh = lora.initialize(config, 0, ONE)
    a = np.asarray(fresh["layers"]["mlp"]["down_proj"]["lora_a"])
    assert a.shape == (2, 48, 3)
    assert 0.8 * 48**-0.5 < np.abs(a).max() <= 48**-0.5
    assert abs(a.mean()) < 0.05
    assert {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(fresh)} == {"lora_a", "lora_b"}
    logits = bound(config, params, fresh).logits(IDS, LENGTHS)
    np.testing.assert_array_equal(logits, Policy(BASE, params, None).logits(IDS, LENGTHS))


def test_adapters_are_as_written_in_the_paper():
    """Against the same network with W + alpha / rank A B put in its place by hand, in numpy."""
    params, (config, adapters) = weights_of(BASE), adapted(BASE, SOME)
    by_hand = jax.tree.map(np.array, params)
    for part in ("layers", "last"):
        for group, names in (("self_attn", ("q_proj", "v_proj", "o_proj")), ("mlp", ("down_proj",))):
            for name in names:
                low = adapters[part][group][name]
                by_hand[part][group][name]["kernel"] += 12 / 3 * np.asarray(low["lora_a"]) @ np.asarray(low["lora_b"])
    logits = bound(config, params, adapters).logits(IDS, LENGTHS)
    assert np.abs(logits - Policy(BASE, params, None).logits(IDS, LENGTHS)).max() > 0.1
    np.testing.assert_allclose(logits, Policy(BASE, by_hand, None).logits(IDS, LENGTHS), atol=1e-5)
    merged = lora.merge(config, params, adapters)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), merged, by_hand)
    np.testing.assert_allclose(logits, Policy(BASE, merged, None).logits(IDS, LENGTHS), atol=1e-5)
    assert merged["embed_tokens"]["embedding"] is params["embed_tokens"]["embedding"]
    used_up = jax.tree.map(jnp.copy, params)
    again = lora.merge(config, used_up, adapters, donate=True)
    jax.tree.map(np.testing.assert_array_equal, again, merged)
    gone = {jax.tree_util.keystr(path) for path, a in jax.tree.leaves_with_path(used_up) if a.is_deleted()}
    assert gone and all("kernel" in name and ("q_proj" in name or "mlp" in name or "_proj" in name) for name in gone)


def test_bfloat16_weights_stay_bfloat16():
    params, (config, adapters) = weights_of(BASE, "bfloat16"), adapted(BASE, SOME)
    assert {a.dtype for a in jax.tree.leaves(lora.merge(config, params, adapters))} == {jnp.dtype("bfloat16")}
    model = nnx.merge(network(config), lora.bind(params, adapters))
    hidden = jax.eval_shape(lambda: model.hidden(jnp.asarray(IDS), jnp.broadcast_to(jnp.arange(11), (3, 11))))
    assert hidden.dtype == jnp.bfloat16


def test_a_policy_with_adapters_is_not_saved_as_if_it_had_none(tmp_path):
    with pytest.raises(ValueError, match=r"has adapters; save them with lora.save, or lora.merge first"):
        Policy(dataclasses.replace(BASE, lora=SOME), {}, None).save(tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_sampling_reads_the_adapters():
    params, (config, adapters) = weights_of(BASE), adapted(BASE, SOME)
    graphdef, tokens = network(config), jnp.asarray(IDS)
    full = bound(config, params, adapters).logits(IDS, LENGTHS)

    @jax.jit
    def last_two(params):
        model = nnx.merge(graphdef, params)
        hidden, cache = model.prefill(tokens[:, :10], jnp.full(3, 9), 11)
        return model.logits(hidden), model.logits(model.decode(tokens[:, 10], jnp.full(3, 10), cache, model.decode_blocks())[0])

    for logits, slot in zip(last_two(lora.bind(params, adapters)), (9, 10), strict=True):
        np.testing.assert_allclose(logits, full[:, slot], atol=1e-4)


def test_gradients_are_those_of_the_adapters_alone():
    params, (config, adapters) = weights_of(BASE), adapted(BASE, SOME)
    sizes = {(48, 32), (32, 48), (32, 40), (40, 32), (32, 20), (20, 32), (64, 32), (32, 64)}

    def loss(adapters, params):
        model = nnx.merge(network(config), lora.bind(params, adapters))
        hidden = model.hidden(jnp.asarray(IDS), jnp.broadcast_to(jnp.arange(11), (3, 11)), remat="full")
        return (jax.nn.log_softmax(model.logits(hidden)) ** 2).mean()

    def weight_gradients(compiled):
        """Products in the compiled program whose result has the shape of a weight."""
        products = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", compiled.as_text())
        return sum(tuple(map(int, shape.split(","))) in sizes for shape in products)

    of_weights, of_adapters = (jax.jit(jax.grad(loss, n)).lower(adapters, params).compile() for n in (1, 0))
    assert weight_gradients(of_weights) > 0 == weight_gradients(of_adapters)
    gradients = of_adapters(adapters, params)
    assert jax.tree.structure(gradients) == jax.tree.structure(adapters)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.abs(gradient).max() > 0, path
    # A direction's slope by differences, so that the gradient is that of what `logits` computes.
    direction = jax.tree.map(lambda a: np.sign(np.sin(100 * np.asarray(a))), adapters)
    moved = lambda step: jax.tree.map(lambda a, d: a + step * d, adapters, direction)  # noqa: E731
    value = jax.jit(loss)
    slope = (value(moved(1e-3), params) - value(moved(-1e-3), params)) / 2e-3
    along = sum(np.vdot(g, d) for g, d in zip(jax.tree.leaves(gradients), jax.tree.leaves(direction), strict=True))
    np.testing.assert_allclose(along, slope, rtol=0.02)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder of adapters, their config, they themselves)"""
    folder, (config, adapters) = tmp_path_factory.mktemp("saved") / "a", adapted(BASE, SOME)
    lora.save(folder, config, adapters, base="somewhere")
    return folder, config, adapters


def test_an_adapter_folder_comes_back_bit_exact(saved):
    folder, config, adapters = saved
    back_config, back = lora.load(folder, BASE)
    assert back_config == dataclasses.replace(config, lora=dataclasses.replace(SOME, targets=tuple(sorted(SOME.targets))))
    jax.tree.map(np.testing.assert_array_equal, adapters, back)
    held = load_file(folder / "adapter_model.safetensors")
    assert len(held) == 3 * len(SOME.targets) * 2
    # peft's key names: docs/source/developer_guides/checkpoint.md of huggingface/peft.
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    np.testing.assert_array_equal(held[key], adapters["layers"]["self_attn"]["q_proj"]["lora_a"][0].T)
    key = "base_model.model.model.layers.2.mlp.down_proj.lora_B.weight"
    np.testing.assert_array_equal(held[key], adapters["last"]["mlp"]["down_proj"]["lora_b"].T)
    raw = json.loads((folder / "adapter_config.json").read_text())
    assert (raw["peft_type"], raw["r"], raw["lora_alpha"], raw["base_model_name_or_path"]) == ("LORA", 3, 12, "somewhere")


@pytest.mark.slow
def test_every_mesh_gets_the_same_adapters(tmp_path):
    config, adapters = adapted(BASE, LoraConfig(rank=3, alpha=6))
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    alone, spread = lora.initialize(config, 7, ONE), lora.initialize(config, 7, mesh)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(alone), jax.device_get(spread))
    lora.save(tmp_path, config, adapters)
    _, placed = lora.load(tmp_path, BASE, mesh)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(adapters), jax.device_get(placed))
    down = placed["last"]["mlp"]["down_proj"]
    assert tuple(down["lora_a"].sharding.spec) == ("tensor", None)
    assert tuple(down["lora_b"].sharding.spec) == (None, "fsdp")


@pytest.mark.parametrize(("fields", "fragment"), [
    ({"peft_type": "IA3"}, "peft_type"),
    ({"use_dora": True}, "use_dora"),
    ({"use_rslora": True}, "use_rslora"),
    ({"bias": "all"}, "bias"),
    ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"), ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights"),
    ({"alora_invocation_tokens": [7]}, "alora_invocation_tokens"), ({"a_field_of_next_year": True}, "a_field_of_next_year"),
    ({"target_modules": "all-linear"}, "target_modules"),
    ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    ({"target_modules": ["q_proj", "v_proj"]}, "is unexpected"),
    ({"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj", "up_proj"]}, "up_proj.lora_A.weight is missing"),
    ({"r": 4}, "has shape"), ({"r": 0}, "rank=0: must be a whole number of at least 1"), 
    ({"r": "4"}, "rank='4': must be"), ({"lora_alpha": 0}, "alpha=0: must be positive"),
    ({"target_modules": []}, "targets=[]"),
])  # fmt: skip
def test_adapters_that_mean_something_else_are_refused_in_one_line(fields, fragment, saved, tmp_path):
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with refused(fragment):
        lora.load(tmp_path, BASE)


BOTH = LoraConfig(rank=2, alpha=8, targets=("q_proj", "down_proj", "visual.qkv", "visual.proj", "visual.up_proj"))


def stored_prompts():
    """The policy of data/qwen2_5_vl_tiny, and its prompts with pictures: (policy, ids, patches, grids)."""
    folder = DATA / "qwen2_5_vl_tiny"
    stored = np.load(folder / "expected.npz")
    return load_policy(folder), stored["ids"], stored["patches"], tuple(map(tuple, stored["grids"].tolist()))


def logits_with_pictures(config, params, ids, patches, grids):
    @jax.jit
    def compute(params):
        model = nnx.merge(network(config), params)
        pictures = place(model.visual(jnp.asarray(patches)[None], grids)[0], grids, [[0], [1, 2]], config.vision)
        every = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        return model.logits(model.hidden(jnp.asarray(ids), every, pictures=pictures))

    return compute(params)


@pytest.mark.slow
def test_either_tower_is_adapted(tmp_path):
    policy, *inputs = stored_prompts()
    config, adapters = adapted(policy.config, BOTH)
    adapted_logits = logits_with_pictures(config, lora.bind(policy.params, adapters), *inputs)
    merged = logits_with_pictures(policy.config, lora.merge(config, policy.params, adapters), *inputs)
    np.testing.assert_allclose(adapted_logits, merged, atol=1e-4)
    tower_only = {"visual": adapters["visual"]}
    seen = dataclasses.replace(config, lora=dataclasses.replace(BOTH, targets=BOTH.targets[2:]))
    assert np.abs(logits_with_pictures(seen, lora.bind(policy.params, tower_only), *inputs) - adapted_logits).max() > 0.1
    for name, settings, tree in (("both", config, adapters), ("tower", seen, tower_only)):
        lora.save(tmp_path / name, settings, tree)
        back_config, back = lora.load(tmp_path / name, policy.config)
        assert set(back_config.lora.targets) == set(settings.lora.targets)
        jax.tree.map(np.testing.assert_array_equal, tree, back)
    with refused("targets=['visual.qkv']: a qwen2 has no vision tower"):
        dataclasses.replace(BASE, lora=LoraConfig(2, 4, ("q_proj", "visual.qkv")))


@pytest.mark.needs("torch", "peft")
def test_peft_reads_the_same_adapters_of_either_tower(tmp_path):
    import peft
    import torch
    from transformers import AutoModelForImageTextToText

    policy, ids, patches, grids = stored_prompts()
    config, adapters = adapted(policy.config, BOTH)
    lora.save(tmp_path / "ours", config, adapters)
    base = AutoModelForImageTextToText.from_pretrained(DATA / "qwen2_5_vl_tiny")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    assert sum("lora_A" in name for name, _ in theirs.named_parameters()) == 2 * 2 + 3 * 3
    is_image = torch.tensor(ids == policy.config.vision.image_token_id).int()
    with torch.no_grad():
        expected = theirs(
            input_ids=torch.tensor(ids).long(), pixel_values=torch.tensor(patches), image_grid_thw=torch.tensor(grids),
            mm_token_type_ids=is_image,
        ).logits  # fmt: skip
    ours = logits_with_pictures(config, lora.bind(policy.params, adapters), ids, patches, grids)
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    _, back = lora.load(tmp_path / "theirs", policy.config)
    jax.tree.map(np.testing.assert_array_equal, adapters, back)


@pytest.mark.needs("torch", "peft")
def test_peft_reads_and_writes_the_same_adapters(tmp_path):
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    policy = load_policy(DATA / "qwen2_tiny")
    config, adapters = adapted(policy.config, SOME)
    lora.save(tmp_path / "ours", config, adapters, base=DATA / "qwen2_tiny")
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(DATA / "qwen2_tiny"), tmp_path / "ours").eval()
    ids = np.load(DATA / "qwen2_tiny" / "expected.npz")["ids"]
    with torch.no_grad():
        expected = theirs(torch.tensor(ids).long()).logits.numpy()
    logits = bound(config, policy.params, adapters).logits(ids, np.full(len(ids), ids.shape[1]))
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    _, back = lora.load(tmp_path / "theirs", policy.config)
    jax.tree.map(np.testing.assert_array_equal, adapters, back)
    with torch.no_grad():
        merged = theirs.merge_and_unload()(torch.tensor(ids).long()).logits.numpy()
    ours = Policy(policy.config, lora.merge(config, policy.params, adapters), None)
    np.testing.assert_allclose(ours.logits(ids, np.full(len(ids), ids.shape[1])), merged, atol=1e-4)
