"""The published sizes: as many parameters, and a mesh that holds them. No weights."""

import dataclasses
import json
import math

import jax
import pytest

from hgpo_jax.policy import RopeScaling, huggingface_folder, initialize, network, placement, shapes, shardings
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.presets import FAMILIES, preset
from hgpo_jax.policy.transformer import Qwen2
from tests.helpers.needs import DATA
from tests.helpers.tiny import MODEL, mesh_of

NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
QWEN = {"tie_word_embeddings": True, "rope_theta": 1e6}
SMOLLM2 = {
    "model_type": "llama", "tie_word_embeddings": True, "rope_theta": 1e5, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "initializer_range": 0.02,
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Of each family a config.json with the sizes of the model card.
CONFIGS = {
    "Qwen2.5-1.5B": (QWEN | {"model_type": "qwen2"}, (151936, 1536, 8960, 28, 12, 2)),
    "Qwen3-8B": (QWEN | {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 128,
                        "max_position_embeddings": 40960},
                 (151936, 4096, 12288, 36, 32, 8)),
    "Llama-3.1-8B": (SMOLLM2 | {"rope_theta": 5e5, "max_position_embeddings": 131072, "tie_word_embeddings": False,
                                "rope_scaling": {"rope_type": "llama3"} | LLAMA3}, (128256, 4096, 14336, 32, 32, 8)),
    "SmolLM2-135M": (SMOLLM2, (49152, 576, 1536, 30, 9, 3)),
    "SmolLM2-1.7B": (SMOLLM2 | {"rope_theta": 1.3e5}, (49152, 2048, 8192, 24, 32, 32)),
}  # fmt: skip
# As transformers counts them.
PARAMETERS = {
    "Qwen2.5-0.5B": 494_032_768, "Qwen2.5-1.5B": 1_543_714_304, "Qwen2.5-3B": 3_085_938_688, "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664, "Qwen2.5-32B": 32_763_876_352, "Qwen2.5-72B": 72_706_203_648,
    "Qwen2.5-VL-3B": 3_754_622_976, "Qwen2.5-VL-7B": 8_292_166_656,
    "Qwen3-0.6B": 596_049_920, "Qwen3-1.7B": 1_720_574_976, "Qwen3-4B": 4_022_468_096, "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200, "Qwen3-32B": 32_762_123_264, "Llama-3.1-8B": 8_030_261_248, "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400, "Llama-3.2-3B": 3_212_749_824, "SmolLM2-135M": 134_515_008, "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
}  # fmt: skip


def write(name, folder):
    fields, sizes = CONFIGS[name]
    (folder / "config.json").write_text(json.dumps(fields | dict(zip(NAMES, sizes, strict=True))))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_read_as_the_preset_of_its_name_says(name, tmp_path):
    write(name, tmp_path)
    config = huggingface_folder.read_config(tmp_path)
    assert config == preset(name) == preset(f"Qwen/{name}-Instruct")
    assert dataclasses.asdict(config).items() >= dict(zip(NAMES, CONFIGS[name][1], strict=True)).items()


def test_the_base_of_rotary_frequencies_is_ten_thousand_where_it_is_left_out(tmp_path):
    write("SmolLM2-135M", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({name: value for name, value in raw.items() if name != "rope_theta"}))
    assert huggingface_folder.read_config(tmp_path).rope_theta == 1e4


def parameters(c):
    """Their number by hand: attention with what a model type adds to it, feed-forward, norms, embedding and head, and what
    sees."""
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    biases = queries + 2 * keys
    added = {"qwen2": biases, "qwen2_5_vl": biases, "qwen3": 2 * c.head_dim, "llama": 0}[c.model_type]
    block = c.hidden_size * (2 * queries + 2 * keys + 3 * c.intermediate_size + 2) + added
    language = c.num_hidden_layers * block + c.hidden_size * (1 + c.vocab_size * (1 if c.tie_word_embeddings else 2))
    return language + (tower_parameters(c.vision) if c.vision else 0)


def tower_parameters(v):
    """Their number by hand: the projection of patches, blocks with biases everywhere but in their norms, the merger."""
    D, F, M = v.hidden_size, v.intermediate_size, v.hidden_size * v.spatial_merge_size**2
    block = 2 * D + 4 * D * D + 4 * D + 3 * D * F + 2 * F + D
    return v.patch_length * D + v.depth * block + D + M * M + M + M * v.out_hidden_size + v.out_hidden_size


def test_the_first_llamas_have_as_many_heads_of_keys(tmp_path):
    raw = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    for more in ({}, {"num_key_value_heads": None}):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"num_attention_heads": 4} | more))
        assert huggingface_folder.read_config(tmp_path).num_key_value_heads == 4
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "qwen2", "num_attention_heads": 4}))
    with pytest.raises(ValueError, match=r"config\.json lacks num_key_value_heads"):
        huggingface_folder.read_config(tmp_path)


def test_presets_have_as_many_parameters_as_published():
    assert {family + size for family, (sizes, _) in FAMILIES.items() for size in sizes} == PARAMETERS.keys()
    assert {name: parameters(preset(name)) for name in PARAMETERS} == PARAMETERS
    assert preset("Llama-3.2-1B").rope_scaling == RopeScaling(**LLAMA3 | {"factor": 32.0})
    assert preset("Qwen3-8B-Base").max_position_embeddings == 32_768
    assert preset("Qwen2.5-1B") is preset("Qwen/Qwen2.5-1.5B-Instruct-extra") is None


def test_a_published_vision_language_model_is_read_as_its_preset(tmp_path):
    """A config.json and a preprocessor_config.json with what the hub's say."""
    tower = {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
        "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    fields = QWEN | dict(zip(NAMES, (151936, 2048, 11008, 36, 16, 2), strict=True)) | {
        "model_type": "qwen2_5_vl", "max_position_embeddings": 128000, "vision_config": tower, "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "image_token_id": 151655, "video_token_id": 151656,
        "vision_start_token_id": 151652, "vision_end_token_id": 151653,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 3136, "max_pixels": 12845056}))
    assert huggingface_folder.read_config(tmp_path) == preset("Qwen/Qwen2.5-VL-3B-Instruct")


@pytest.mark.parametrize(("name", "spec"), [
    ("Qwen2.5-VL-3B", "data=2,fsdp=2,tensor=2"),
    ("Qwen2.5-7B", "data=2,fsdp=2,tensor=2"), ("Qwen3-32B", "data=2,fsdp=2,tensor=2"),
    ("SmolLM2-135M", "data=2,fsdp=4"),  # an odd number of heads, which no tensor axis divides
])  # fmt: skip
def test_the_networks_parameters_are_as_many_and_a_mesh_cuts_every_matrix(name, spec):
    leaves = jax.tree.leaves(shapes(preset(name)))
    assert sum(a.size for a in leaves) == PARAMETERS[name]
    places = jax.tree.leaves(shardings(preset(name), make_mesh(spec)))
    largest = max(math.prod(s.shard_shape(a.shape)) for s, a in zip(places, leaves, strict=True))
    assert largest == max(a.size for a in leaves if a.ndim > 1) / 4  # fsdp x tensor


def test_a_network_is_traced_once_for_all_who_ask_and_once_to_create_it(monkeypatch):
    made, config = [], dataclasses.replace(MODEL, vocab_size=19)
    monkeypatch.setattr(placement, "Qwen2", lambda *given: made.append(given) or Qwen2(*given))
    assert network(config) is network(config)
    shapes(config).clear()  # the caller's own
    assert jax.tree.structure(shapes(config)) == jax.tree.structure(shardings(config, mesh_of())) and len(made) == 1
    for seed in range(2):
        jax.eval_shape(lambda seed=seed: initialize(config, seed, mesh_of()))
    assert len(made) == 2


@pytest.mark.needs("data")
@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B"])
def test_the_published_config_reads_as_the_model_card_says(name, tmp_path):
    file = DATA / "qwen2.5" / "configs" / f"{name}-Instruct.config.json"
    (tmp_path / "config.json").write_bytes(file.read_bytes())
    assert huggingface_folder.read_config(tmp_path) == preset(name)
