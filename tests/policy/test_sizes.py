"""The published sizes: as many parameters, the same tensors as transformers has, and a mesh that holds them. No weights."""

import json
import math
from pathlib import Path

import jax
import pytest

from hgpo_jax.mesh import make_mesh
from hgpo_jax.policy import ModelConfig, RopeScaling, huggingface, shapes, shardings, weights
from hgpo_jax.policy.presets import preset

CONFIGS = Path(__file__).parents[3] / "shared" / "data" / "qwen2.5" / "configs"
NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
QWEN2 = {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": False}
QWEN3 = {"model_type": "qwen3", "rope_theta": 1e6, "tie_word_embeddings": False, "head_dim": 128}
SMOLLM2 = {
    "model_type": "llama", "rope_theta": 1e5, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip


def llama3(factor):
    rope = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return SMOLLM2 | {
        "rope_theta": 5e5, "max_position_embeddings": 131072, "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "llama3", **rope},
    }  # fmt: skip


# Sizes from the model cards; parameters as transformers counts them.
MODELS = {
    "Qwen2.5-0.5B": (QWEN2 | {"tie_word_embeddings": True}, (151936, 896, 4864, 24, 14, 2), 494_032_768),
    "Qwen2.5-1.5B": (QWEN2 | {"tie_word_embeddings": True}, (151936, 1536, 8960, 28, 12, 2), 1_543_714_304),
    "Qwen2.5-7B": (QWEN2, (152064, 3584, 18944, 28, 28, 4), 7_615_616_512),
    "Qwen2.5-14B": (QWEN2, (152064, 5120, 13824, 48, 40, 8), 14_770_033_664),
    "Qwen2.5-72B": (QWEN2, (152064, 8192, 29568, 80, 64, 8), 72_706_203_648),
    "Qwen3-0.6B": (QWEN3 | {"tie_word_embeddings": True}, (151936, 1024, 3072, 28, 16, 8), 596_049_920),
    "Qwen3-8B": (QWEN3, (151936, 4096, 12288, 36, 32, 8), 8_190_735_360),
    "Qwen3-32B": (QWEN3, (151936, 5120, 25600, 64, 64, 8), 32_762_123_264),
    "Llama-3.1-8B": (llama3(8.0), (128256, 4096, 14336, 32, 32, 8), 8_030_261_248),
    "Llama-3.2-1B": (llama3(32.0) | {"tie_word_embeddings": True}, (128256, 2048, 8192, 16, 32, 8), 1_235_814_400),
    "SmolLM2-135M": (SMOLLM2, (49152, 576, 1536, 30, 9, 3), 134_515_008),
    "SmolLM2-360M": (SMOLLM2, (49152, 960, 2560, 32, 15, 5), 361_821_120),
    "SmolLM2-1.7B": (SMOLLM2 | {"rope_theta": 1.3e5}, (49152, 2048, 8192, 24, 32, 32), 1_711_376_384),
}


def config_of(name, folder):
    fields, sizes, _ = MODELS[name]
    fields = fields | dict(zip(NAMES, sizes, strict=True))
    (folder / "config.json").write_text(json.dumps(fields))
    config = huggingface.read_config(folder)
    if rope := fields.pop("rope_scaling", None):
        fields["rope_scaling"] = RopeScaling(**{key: value for key, value in rope.items() if key != "rope_type"})
    assert config == ModelConfig(**fields) == preset(name)
    return config


@pytest.mark.parametrize("name", MODELS)
def test_as_many_parameters_as_published_on_a_mesh_of_eight(name, tmp_path):
    config = config_of(name, tmp_path)
    like = shapes(config)
    assert sum(leaf.size for leaf in jax.tree.leaves(like)) == MODELS[name][2]
    # The smaller SmolLM2 have an odd number of heads, which no tensor axis divides.
    places = shardings(config, make_mesh("data=2,fsdp=4" if config.num_attention_heads % 2 else "data=2,fsdp=2,tensor=2"))
    largest = max(math.prod(s.shard_shape(a.shape)) for s, a in zip(*map(jax.tree.leaves, (places, like)), strict=True))
    matrices = [a.size for a in jax.tree.leaves(like) if a.ndim > 1]
    assert largest == max(matrices) / 4  # fsdp x tensor cut every matrix


@pytest.mark.parametrize("name", MODELS)
def test_the_same_tensors_as_transformers(name, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = config_of(name, tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    ours = {t.name: t.shape for t in weights.layout(shapes(config), config.num_hidden_layers)}
    assert ours == {key: tuple(value.shape) for key, value in model.named_parameters()}


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B"])
def test_the_published_config_reads_as_the_model_card_says(name, tmp_path):
    file = CONFIGS / f"{name}-Instruct.config.json"
    if not file.is_file():
        pytest.skip("needs shared/data/qwen2.5")
    expected = config_of(name, tmp_path)
    (tmp_path / "config.json").write_bytes(file.read_bytes())
    assert huggingface.read_config(tmp_path) == expected
