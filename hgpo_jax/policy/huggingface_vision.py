"""What the Hugging Face folder of a Qwen2.5-VL holds beside a language model's: its config.json and preprocessor_config.json.

The sizes of the language model stand at the top of config.json, as on the hub, or in `text_config`, as transformers writes them
since 4.52. We write them at the top, which every version reads.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from hgpo_jax.policy.model_config import VisionConfig

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # holds the same as `image_processor`, since transformers 5
VIDEO = "video_preprocessor_config.json"  # kept for others: our policies see no videos
# Of red, green and blue, after division by 255; the numbers of CLIP (Radford et al., arXiv 2103.00020).
IMAGE_MEAN, IMAGE_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
TOWER_FIELDS = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "out_hidden_size",
    "fullatt_block_indexes",
    "window_size",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
    "tokens_per_second",
)
TOKEN_FIELDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def with_text_at_top(raw: dict) -> dict:
    """Returns a config.json whose language model's fields stand at the top. Raises ValueError if `text_config` is no object."""
    text = raw.get("text_config") or {}
    if not isinstance(text, dict):
        raise ValueError("text_config is not an object")
    # transformers 4.53 to 4.55 wrote the tokens' ids at the top, and null inside.
    text = {name: value for name, value in text.items() if value is not None and not (name in TOKEN_FIELDS and name in raw)}
    # Before transformers 5 the inner of two fields counted.
    tied = {"tie_word_embeddings": raw.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False)}
    return raw | text | tied | {"model_type": raw["model_type"]}


def vision_of(raw: dict, rope: dict, preprocessor: dict) -> VisionConfig:
    """Reads a VisionConfig from config.json, its rope_scaling, and preprocessor_config.json ({} if there is none).

    Raises ValueError: a field is missing or not supported.
    """
    tower = raw.get("vision_config")
    if not isinstance(tower, dict):
        raise ValueError("vision_config is not an object")
    if "mrope_section" not in rope:
        raise ValueError("rope_scaling lacks mrope_section")
    if left_out := [name for name in TOWER_FIELDS if name not in tower]:
        import transformers  # here, as in `huggingface_folder`

        defaults = transformers.Qwen2_5_VLConfig().vision_config
        tower = tower | {name: getattr(defaults, name) for name in left_out}
    plain = {
        "hidden_act": "silu",
        "in_channels": 3,
        "in_chans": 3,
        "image_mean": list(IMAGE_MEAN),
        "image_std": list(IMAGE_STD),
        "resample": 3,  # bicubic
        **{name: tower[name] for name in ("patch_size", "temporal_patch_size")},
        "merge_size": tower["spatial_merge_size"],
    }
    for fields in (tower, preprocessor):
        for name, value in plain.items():
            if fields.get(name, value) != value:
                raise ValueError(f"{name}={json.dumps(fields[name]):.50} is not supported; expected {json.dumps(value)}")
    turns = tower.get("rope_parameters") or {}
    if not isinstance(turns, dict) or turns.get("rope_theta", 10_000.0) != 10_000.0:
        raise ValueError(f"vision_config: rope_parameters={json.dumps(turns):.50} is not supported")
    lists = {"mrope_section": rope["mrope_section"], "fullatt_block_indexes": tower["fullatt_block_indexes"]}
    for name, value in lists.items():
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name}={json.dumps(value):.50}: must be a list")
    lists = {name: tuple(value) for name, value in lists.items()}
    tokens = {name: raw[name] for name in TOKEN_FIELDS if name in raw}
    return VisionConfig(**{name: tower[name] for name in TOWER_FIELDS} | lists | tokens | _areas(preprocessor))


def _areas(preprocessor: dict) -> dict:
    """Returns min_pixels and max_pixels, which transformers 5 calls the shortest and the longest edge."""
    size = preprocessor.get("size") or {}
    if not isinstance(size, dict):
        raise ValueError(f"{PREPROCESSOR}: size is not an object")
    names = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
    given = {name: preprocessor.get(name) or size.get(name) or size.get(edge) for name, edge in names.items()}
    return {name: value for name, value in given.items() if value is not None}


def config_fields(vision: VisionConfig) -> dict:
    """Returns the fields of config.json that only a Qwen2.5-VL has; rope_scaling among them."""
    v = dataclasses.asdict(vision)
    return {
        "rope_scaling": {"type": "mrope", "mrope_section": list(vision.mrope_section)},
        "vision_config": {
            "model_type": "qwen2_5_vl",
            **{name: v[name] for name in TOWER_FIELDS},
            "in_channels": vision.in_channels,
            "in_chans": vision.in_channels,
            "hidden_act": "silu",
        },
        **{name: v[name] for name in TOKEN_FIELDS},
    }


def write_preprocessor(folder: Path, v: VisionConfig) -> None:
    """Writes preprocessor_config.json, readable by transformers 4 and 5."""
    content = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": v.min_pixels,
        "max_pixels": v.max_pixels,
        "size": {"shortest_edge": v.min_pixels, "longest_edge": v.max_pixels},
        "patch_size": v.patch_size,
        "temporal_patch_size": v.temporal_patch_size,
        "merge_size": v.spatial_merge_size,
        "image_mean": list(IMAGE_MEAN),
        "image_std": list(IMAGE_STD),
        "resample": 3,
    }
    (folder / PREPROCESSOR).write_text(json.dumps(content, indent=2) + "\n")
