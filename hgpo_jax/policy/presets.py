"""Sizes of published models, Qwen2.5, Qwen2.5-VL, Qwen3 (dense), Llama 3 and SmolLM2: a run can be planned without their files.

Source: the models' config.json on the Hugging Face hub.
"""

from __future__ import annotations

from hgpo_jax.policy.model_config import ModelConfig, RopeScaling, VisionConfig

# name: (vocabulary, width, feed-forward, layers, query heads, key-value heads, tied head)
QWEN2_5 = {
    "0.5B": (151936, 896, 4864, 24, 14, 2, True),
    "1.5B": (151936, 1536, 8960, 28, 12, 2, True),
    "3B": (151936, 2048, 11008, 36, 16, 2, True),
    "7B": (152064, 3584, 18944, 28, 28, 4, False),
    "14B": (152064, 5120, 13824, 48, 40, 8, False),
    "32B": (152064, 5120, 27648, 64, 40, 8, False),
    "72B": (152064, 8192, 29568, 80, 64, 8, False),
}
QWEN2_5_VL = {name: QWEN2_5[name] for name in ("3B", "7B")}  # the language models
QWEN3 = {
    "0.6B": (151936, 1024, 3072, 28, 16, 8, True),
    "1.7B": (151936, 2048, 6144, 28, 16, 8, True),
    "4B": (151936, 2560, 9728, 36, 32, 8, True),
    "8B": (151936, 4096, 12288, 36, 32, 8, False),
    "14B": (151936, 5120, 17408, 40, 40, 8, False),
    "32B": (151936, 5120, 25600, 64, 64, 8, False),
}
LLAMA3_1 = {
    "8B": (128256, 4096, 14336, 32, 32, 8, False),
    "70B": (128256, 8192, 28672, 80, 64, 8, False),
}
LLAMA3_2 = {
    "1B": (128256, 2048, 8192, 16, 32, 8, True),
    "3B": (128256, 3072, 8192, 28, 24, 8, True),
}
SMOLLM2 = {
    "135M": (49152, 576, 1536, 30, 9, 3, True),
    "360M": (49152, 960, 2560, 32, 15, 5, True),
    "1.7B": (49152, 2048, 8192, 24, 32, 32, True),
}


def _tower(width: int) -> VisionConfig:
    """The vision tower of Qwen2.5-VL-3B and 7B, and how their preprocessor_config.json prepares pictures."""
    return VisionConfig(
        depth=32,
        hidden_size=1280,
        intermediate_size=3420,
        num_heads=16,
        out_hidden_size=width,
        fullatt_block_indexes=(7, 15, 23, 31),
        mrope_section=(16, 24, 24),
        tokens_per_second=2,
        max_pixels=12_845_056,
    )


def _llama3(factor: float) -> dict:
    scaling = RopeScaling(factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    return {
        "model_type": "llama",
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_scaling": scaling,
    }


# Prefix of a hub name -> sizes, and further fields of the family's models.
FAMILIES = {
    "Qwen2.5-": (QWEN2_5, {}),
    "Qwen2.5-VL-": (QWEN2_5_VL, {"model_type": "qwen2_5_vl", "max_position_embeddings": 128_000}),
    "Qwen3-": (QWEN3, {"model_type": "qwen3", "head_dim": 128}),
    "Llama-3.1-": (LLAMA3_1, _llama3(8.0)),
    "Llama-3.2-": (LLAMA3_2, _llama3(32.0)),
    "SmolLM2-": (SMOLLM2, {"model_type": "llama", "rope_theta": 1e5, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}),
}
CONTEXT = {("Qwen3-", False): {"max_position_embeddings": 40960}}  # by family and whether it is a base model
ROPE_THETA = {"SmolLM2-1.7B": 1.3e5}  # if it differs from the family's


def preset(name: str) -> ModelConfig | None:
    """Returns the sizes of a model by its hub name, such as Qwen/Qwen2.5-1.5B-Instruct; None for an unknown name."""
    for owner in ("Qwen/", "meta-llama/", "HuggingFaceTB/"):
        name = name.removeprefix(owner)
    base, name = name.endswith("-Base"), name.removesuffix("-Instruct").removesuffix("-Base")
    for family, (sizes, more) in FAMILIES.items():
        if name.startswith(family) and name.removeprefix(family) in sizes:
            vocabulary, width, inner, layers, heads, kv_heads, tied = sizes[name.removeprefix(family)]
            return ModelConfig(
                vocab_size=vocabulary,
                hidden_size=width,
                intermediate_size=inner,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                tie_word_embeddings=tied,
                vision=_tower(width) if more.get("model_type") == "qwen2_5_vl" else None,
                **more | CONTEXT.get((family, base), {}) | ({"rope_theta": ROPE_THETA[name]} if name in ROPE_THETA else {}),
            )
    return None
