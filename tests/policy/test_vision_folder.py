"""The Hugging Face folder of a Qwen2.5-VL: both forms of config.json, both sets of names, and what is refused."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hgpo_jax import export
from hgpo_jax.policy import ModelConfig, Policy, huggingface_folder, huggingface_vision, load_policy, shapes, shardings
from hgpo_jax.policy.mesh import abstract_mesh
from hgpo_jax.policy.model_config import VisionConfig
from tests.helpers.refusals import refused

DATA = Path(__file__).parent / "data" / "qwen2_5_vl_tiny"
TOWER = VisionConfig(
    depth=3, hidden_size=16, intermediate_size=24, num_heads=4, out_hidden_size=32, fullatt_block_indexes=(1,),
    mrope_section=(1, 1, 2), window_size=8, patch_size=2, temporal_patch_size=1, image_token_id=60, tokens_per_second=7,
    min_pixels=64, max_pixels=4096,
)  # fmt: skip
CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    model_type="qwen2_5_vl", vision=TOWER,
)  # fmt: skip
# As the hub has it, with the sizes of DATA.
FLAT = {
    "model_type": "qwen2_5_vl", "vocab_size": 43, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_act": "silu", "initializer_range": 0.2,
    "max_position_embeddings": 32768, "max_window_layers": 70, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "sliding_window": 32768, "tie_word_embeddings": False, "use_sliding_window": False,
    "image_token_id": 39, "video_token_id": 40, "vision_start_token_id": 41, "vision_end_token_id": 42, "vision_token_id": 38,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    "vision_config": {
        "depth": 3, "hidden_act": "silu", "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "in_chans": 3,
        "out_hidden_size": 24, "patch_size": 2, "spatial_merge_size": 2, "spatial_patch_size": 2, "window_size": 8,
        "fullatt_block_indexes": [1], "tokens_per_second": 4, "temporal_patch_size": 2,
    },
}  # fmt: skip


def policy(dtype="float32", **fields):
    config, rng = dataclasses.replace(CONFIG, **fields), np.random.default_rng(5)
    return Policy(config, jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape), dtype), shapes(config)), None)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(("dtype", "fields"), [("float32", {}), ("bfloat16", {"tie_word_embeddings": False})])
def test_round_trip_is_bit_exact(dtype, fields, tmp_path):
    first = policy(dtype, **fields)
    first.save(tmp_path / "a", size=10_000)
    back = load_policy(tmp_path / "a", dtype=dtype)
    assert back.config == first.config
    same(first.params, back.params)
    export.export(tmp_path / "a", tmp_path / "b")
    assert load_policy(tmp_path / "b", dtype=dtype).config == first.config


def test_both_forms_of_the_config_are_read(tmp_path):
    nested = huggingface_folder.read_config(DATA)
    assert "text_config" in json.loads((DATA / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(FLAT))
    assert huggingface_folder.read_config(tmp_path) == nested
    assert nested.vision.fullatt_block_indexes == (1,) and nested.rope_theta == 1e4 and nested.rms_norm_eps == 1e-5
    # The field that ties head and embedding has stood in both places.
    text = json.loads((DATA / "config.json").read_text())
    text["text_config"]["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert huggingface_folder.read_config(tmp_path).tie_word_embeddings
    # transformers 4.53 to 4.55 had the tokens at the top, and nulls inside.
    text["text_config"] |= dict.fromkeys([*huggingface_vision.TOKEN_FIELDS, "rope_scaling"])
    (tmp_path / "config.json").write_text(json.dumps(text | {name: FLAT[name] for name in ("rope_scaling", *TOKENS)}))
    assert huggingface_folder.read_config(tmp_path).vision == nested.vision
    (tmp_path / "config.json").write_text(json.dumps(FLAT | {"vision_config": {"hidden_size": 16, "num_heads": 2, **SMALL}}))
    assert huggingface_folder.read_config(tmp_path).vision.depth == 32  # transformers' default


SMALL, TOKENS = {"out_hidden_size": 24}, huggingface_vision.TOKEN_FIELDS


def test_the_form_in_which_transformers_5_keeps_how_pictures_are_prepared(tmp_path):
    policy().save(tmp_path / "a")
    held = json.loads((tmp_path / "a" / "preprocessor_config.json").read_text())
    (tmp_path / "a" / "preprocessor_config.json").unlink()
    processor = tmp_path / "a" / "processor_config.json"
    processor.write_text(json.dumps({"image_processor": held, "processor_class": "Qwen2_5_VLProcessor"}))
    export.export(tmp_path / "a", tmp_path / "b")
    assert load_policy(tmp_path / "b").config == CONFIG
    processor.write_text(json.dumps({"image_processor": held | {"image_mean": [0, 0, 0]}}))
    with refused("image_mean=[0, 0, 0] is not supported"):
        load_policy(tmp_path / "a")
    processor.write_text(json.dumps({"image_processor": []}))
    with refused("processor_config.json: image_processor is not an object"):
        load_policy(tmp_path / "a")


@pytest.mark.parametrize("tied", [True, False])
def test_both_sets_of_names_are_read(tied, tmp_path):
    first = policy(tie_word_embeddings=tied)
    first.save(tmp_path / "a")
    held = load_file(tmp_path / "a" / "model.safetensors")
    if tied:
        held["lm_head.weight"] = held["model.embed_tokens.weight"]
    newer = {
        name if name == "lm_head.weight" else f"model.{name}" if name.startswith("visual.")
        else name.replace("model.", "model.language_model.", 1): value for name, value in held.items()
    }  # fmt: skip
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    save_file(newer, tmp_path / "b" / "model.safetensors")
    same(first.params, load_policy(tmp_path / "b").params)
    export.export(tmp_path / "b", tmp_path / "c")
    names = load_file(tmp_path / "c" / "model.safetensors").keys()
    assert names >= {"model.language_model.norm.weight", "model.visual.blocks.2.norm1.weight"}
    if tied:
        newer["lm_head.weight"] = newer["lm_head.weight"] + 1
        save_file(newer, tmp_path / "b" / "model.safetensors")
        with refused("tensor lm_head.weight differs from model.language_model.embed_tokens.weight"):
            load_policy(tmp_path / "b")


@pytest.mark.needs("torch")
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_writes_we_read_and_write_transformers_reads(tied, tmp_path):
    import torch
    from make_reference import random_vision_model
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    sizes = {name: getattr(CONFIG, name) for name in huggingface_folder.REQUIRED_FIELDS}
    names = ("depth", "hidden_size", "intermediate_size", "num_heads", "window_size", "patch_size")
    tower = {name: getattr(TOWER, name) for name in names}
    model = random_vision_model(
        {**tower, "fullatt_block_indexes": [0, 2], "tokens_per_second": 7}, [1, 1, 2], [60, 61, 62, 63], tied, **sizes
    ).to(torch.bfloat16)  # fmt: skip
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    load_policy(tmp_path / "theirs", dtype="bfloat16").save(tmp_path / "ours", size=30_000)
    back = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours", dtype="auto")
    assert type(back) is type(model)
    theirs, ours = model.state_dict(), back.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) and theirs[name].dtype == ours[name].dtype for name in theirs)
    text = ("max_position_embeddings", "rms_norm_eps", "layer_types", *sizes)
    for part, names in (("text_config", text), ("vision_config", ("fullatt_block_indexes", "tokens_per_second", *tower))):
        for name in names:
            assert getattr(getattr(back.config, part), name) == getattr(getattr(model.config, part), name), name
    assert back.config.text_config.rope_parameters.items() >= model.config.text_config.rope_parameters.items()
    for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "tie_word_embeddings"):
        assert getattr(back.config, name) == getattr(model.config, name), name
    processor = AutoImageProcessor.from_pretrained(tmp_path / "ours", backend="pil")
    assert processor.patch_size == 2 and processor.size["longest_edge"] == 28 * 28 * 1280


def test_areas_are_read_from_every_form_of_the_preprocessor(tmp_path):
    shutil.copytree(DATA, tmp_path, dirs_exist_ok=True)
    for content in (
        {"min_pixels": 100, "max_pixels": 5000},
        {"size": {"shortest_edge": 100, "longest_edge": 5000}},
        {"size": {"min_pixels": 100, "max_pixels": 5000}},
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
        vision = huggingface_folder.read_config(tmp_path).vision
        assert (vision.min_pixels, vision.max_pixels) == (100, 5000)
    assert huggingface_folder.read_config(DATA).vision.max_pixels == 28 * 28 * 1280


@pytest.mark.parametrize(("change", "said"), [
    ({"vision_config": None}, "config.json: vision_config is not an object"),
    ({"text_config": [1]}, "config.json: text_config is not an object"),
    ({"rope_scaling": {"type": "mrope"}}, "config.json: rope_scaling lacks mrope_section"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 2]}}, "=[1, 2, 2]: must be three numbers whose sum is 4"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": 4}}, "mrope_section=4: must be a list"),
    ({"rope_scaling": {"type": "yarn", "mrope_section": [1, 1, 2]}}, "is not supported"),
    ({"image_token_id": "x"}, "image_token_id='x': must be a whole number from 0 on"),
    ({"vision_config": {"hidden_act": "gelu"}}, 'hidden_act="gelu" is not supported; expected "silu"'),
    ({"vision_config": {"in_chans": 1}}, "in_chans=1 is not supported; expected 3"),
    ({"vision_config": {"depth": 0}}, "depth=0: must be a positive whole number"),
    ({"vision_config": {"num_heads": 3}}, "hidden_size=16: must be num_heads=3 times a multiple of 4"),
    ({"vision_config": {"out_hidden_size": 32}}, "out_hidden_size=32: must be hidden_size=24"),
    ({"vision_config": {"window_size": 3}}, "window_size=3: must be at least spatial_merge_size times patch_size"),
    ({"vision_config": {"fullatt_block_indexes": [3]}}, "fullatt_block_indexes=[3]: must be less than depth=3"),
    ({"vision_config": {"rope_parameters": {"rope_theta": 5.0}}}, "is not supported"),
])  # fmt: skip
def test_what_a_config_asks_for_and_is_not_there_is_refused(change, said, tmp_path):
    if isinstance(change.get("vision_config"), dict):
        change = {"vision_config": FLAT["vision_config"] | change["vision_config"]}
    (tmp_path / "config.json").write_text(json.dumps(FLAT | change))
    with refused(said) as caught:
        huggingface_folder.read_config(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(("content", "said"), [
    ({"image_mean": [0.5, 0.5, 0.5]}, "image_mean=[0.5, 0.5, 0.5] is not supported"),
    ({"patch_size": 14}, "patch_size=14 is not supported; expected 2"),
    ({"merge_size": 4}, "merge_size=4 is not supported; expected 2"),
    ({"min_pixels": 9, "max_pixels": 4}, "min_pixels=9: must not exceed max_pixels=4"),
    ({"min_pixels": 1.5}, "min_pixels=1.5: must be a positive whole number"),
    ({"size": 3}, "size is not an object"),
])  # fmt: skip
def test_what_a_preprocessor_asks_for_and_is_not_there_is_refused(content, said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FLAT))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    with refused(said):
        huggingface_folder.read_config(tmp_path)


# As the hub has them, and as transformers counts them.
PUBLISHED = {
    "3B": ((151936, 2048, 11008, 36, 16, 2), True, 3_754_622_976),
    "7B": ((152064, 3584, 18944, 28, 28, 4), False, 8_292_166_656),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_as_many_parameters_and_fit_a_mesh(name, tmp_path):
    sizes, tied, parameters = PUBLISHED[name]
    tower = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": sizes[1],
        "fullatt_block_indexes": [7, 15, 23, 31], "patch_size": 14, "window_size": 112, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "tokens_per_second": 2,
    }  # fmt: skip
    fields = dict(zip(huggingface_folder.REQUIRED_FIELDS, sizes, strict=True))
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    raw = FLAT | fields | {"rope_scaling": rope, "tie_word_embeddings": tied, "vision_config": tower}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = huggingface_folder.read_config(tmp_path)
    assert sum(math.prod(a.shape) for a in jax.tree.leaves(shapes(config))) == parameters
    placed = shardings(config, abstract_mesh("fsdp=8,tensor=4"))["visual"]["blocks"]
    assert tuple(placed["mlp"]["up_proj"]["kernel"].spec) == (None, "fsdp", "tensor")
    assert tuple(placed["attn"]["proj"]["kernel"].spec) == (None, "tensor", "fsdp")
    with refused({"3B": "mlp dimension of 3420", "7B": "heads dimension of 28"}[name] + ", which tensor = 8 does not divide"):
        shardings(config, abstract_mesh("tensor=8"))


def test_only_a_model_with_vision_has_it():
    with refused("model_type='qwen2': a qwen2_5_vl has vision, and no other model"):
        dataclasses.replace(CONFIG, model_type="qwen2")
    with refused("model_type='qwen2_5_vl': a qwen2_5_vl has vision"):
        dataclasses.replace(CONFIG, vision=None)
