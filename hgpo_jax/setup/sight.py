"""The eyes of a policy: the vision of a small one for an environment's pictures, and whether any policy sees them."""

from __future__ import annotations

import math
from typing import Any

from hgpo_jax.config.schema import Config, PolicyConfig
from hgpo_jax.envs.protocol import Pictured
from hgpo_jax.policy.model_config import ModelConfig, VisionConfig
from hgpo_jax.policy.pictures import grid_of, resized
from hgpo_jax.rollout.environments import environment
from hgpo_jax.utils.errors import ConfigError

MERGE = 1  # of a small policy's tower: a feature for each patch, which is a quarter of the work of four smaller ones


def small_model(policy: PolicyConfig, vocabulary: int, env: Any = None) -> ModelConfig:
    """Returns the sizes of a policy with random weights, which sees if its environment shows pictures.

    env: the compiled environment whose words it reads; None: it reads text.

    Raises ValueError, after `policy.`, for sizes that do not fit together.
    """
    if not isinstance(env, Pictured):
        return ModelConfig(vocab_size=vocabulary, **policy.sizes)
    width, heads = policy.hidden_size, policy.num_attention_heads
    half = width // heads // 2
    if half < 3:
        raise ValueError(f"hidden_size={width}: with pictures must be at least 6 times num_attention_heads={heads}")
    if policy.vision_hidden_size % (4 * policy.vision_heads):
        raise ValueError(
            f"vision_hidden_size={policy.vision_hidden_size}: must be vision_heads={policy.vision_heads} times a multiple of 4"
        )
    height, wide = env.picture_size
    before, feature, after = env.picture_words
    vision = VisionConfig(
        depth=policy.vision_depth,
        hidden_size=policy.vision_hidden_size,
        intermediate_size=policy.vision_intermediate_size,
        num_heads=policy.vision_heads,
        out_hidden_size=width,
        fullatt_block_indexes=(),  # the window is the whole picture
        mrope_section=rope_sections(half),
        window_size=max(height, wide),
        patch_size=height // env.picture_features[0] // MERGE,
        spatial_merge_size=MERGE,
        image_token_id=feature,
        video_token_id=feature,  # there are no films
        vision_start_token_id=before,
        vision_end_token_id=after,
        min_pixels=height * wide,
        max_pixels=height * wide,
    )
    return ModelConfig(vocab_size=vocabulary, model_type="qwen2_5_vl", vision=vision, **policy.sizes)


def tower_is_frozen(config: Config, model: ModelConfig) -> bool:
    """Whether a policy has a vision tower that training leaves as it is: no picture reaches it, or it is not to learn."""
    return model.vision is not None and (config.policy.vision_frozen or not environment(config.env).is_seen)


def rope_sections(half: int) -> tuple[int, int, int]:
    """Splits the rotary frequencies of a head: a quarter for the time, the rest for row and column, as in Qwen2.5-VL."""
    time = max(1, half // 4)
    return time, (half - time + 1) // 2, (half - time) // 2


def shown(config: Config) -> Any:
    """Makes the compiled environment whose pictures prompts show; None where they show none. Raises ConfigError."""
    entry = environment(config.env)
    return entry.compiled(config) if entry.pictures and entry.compiled else None


def check_sight(config: Config, model: ModelConfig, env: Any, tokenizer: Any = None) -> None:
    """Raises ConfigError unless a policy sees an environment's pictures as its prompts have room for them.

    tokenizer: of a policy that reads chat messages; None: prompts consist of the environment's words.
    """
    size, features, mend = environment(config.env).picture_size, None, "change picture_size"
    if isinstance(env, Pictured):
        size, features, mend = env.picture_size, math.prod(env.picture_features), "change env.tile"
    if size is None:
        return
    source, name, v = config.policy.source, config.env.name, model.vision
    if v is None:
        raise ConfigError(f"policy.source={source}: sees no pictures, which env.name={name} shows; give a qwen2_5_vl")
    height, width = size
    count = math.prod(grid_of(height, width, v)) // v.spatial_merge_size**2
    if resized(height, width, v) != (height, width) or features not in (None, count):
        unit = v.patch_size * v.spatial_merge_size
        raise ConfigError(
            f"policy.source={source}: sees a feature in {unit} x {unit} pixels, of {v.min_pixels:,} to {v.max_pixels:,}; "
            f"env.name={name} shows {height} x {width} pixels" + (f" for {features} features" if features else "") + f"; {mend}"
        )
    if tokenizer is not None:
        marks = (v.vision_start_token_id, v.image_token_id, v.vision_end_token_id)
        if lacking := [mark for mark in marks if mark not in tokenizer.added_tokens_decoder]:
            raise ConfigError(
                f"policy.source={source}: its tokenizer has no special token {lacking[0]}, which its config.json gives to "
                "pictures; give a qwen2_5_vl with its own tokenizer"
            )
    elif v.image_token_id != env.picture_words[1]:
        raise ConfigError(
            f"policy.source={source}: its image token is {v.image_token_id}, in env.name={name} {env.picture_words[1]}; "
            "give a policy that was trained on the same env.*"
        )
