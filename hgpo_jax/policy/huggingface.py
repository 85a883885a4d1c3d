"""Weights and configs in Hugging Face's layout: config.json and model.safetensors, names as transformers' Qwen2.

A stacked parameter of ours is one tensor per layer there, and their linear weights are [out, in] where ours are [in, out].
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from transformers import Qwen2Config

from hgpo_jax.policy.qwen2 import ModelConfig

CONFIG_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "initializer_range",
)  # fmt: skip


def to_huggingface(params: dict, layers: int) -> dict[str, np.ndarray]:
    """Nested parameters of `Qwen2` -> tensors by Hugging Face name."""
    tensors = {}
    for path, value in _flatten(params):
        value = np.asarray(value)
        if path[0] == "layers":
            for index in range(layers - 1):
                tensors[_name(("layers", str(index), *path[1:]))] = _turn(path, value[index])
        elif path[0] == "last":
            tensors[_name(("layers", str(layers - 1), *path[1:]))] = _turn(path, value)
        else:
            tensors[_name(path)] = _turn(path, value)
    return tensors


def from_huggingface(tensors: dict[str, np.ndarray], like: dict, layers: int) -> dict:
    """Tensors by Hugging Face name -> nested parameters shaped as `like` (arrays or ShapeDtypeStructs).

    Raises:
      ValueError: a tensor that is missing, unexpected or of another shape.
    """
    left = set(tensors)

    def take(path, shape):
        name = _name(path)
        if name not in tensors:
            raise ValueError(f"weights: tensor {name} is missing")
        left.discard(name)
        value = _turn(path, tensors[name])
        if value.shape != shape:
            raise ValueError(
                f"weights: tensor {name} has shape {tensors[name].shape}, the config asks for {shape[::-1]}"
            )
        return value

    def leaf(path, target):
        if path[0] == "layers":
            rows = [take(("layers", str(i), *path[1:]), target.shape[1:]) for i in range(layers - 1)]
            return np.stack(rows)
        return take(("layers", str(layers - 1), *path[1:]) if path[0] == "last" else path, target.shape)

    params: dict = {}
    for path, target in _flatten(like):
        node = params
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = leaf(path, target)
    if left:
        raise ValueError(f"weights: tensor {min(left)} is unexpected ({len(left)} such); is tie_word_embeddings right?")
    return params


def _flatten(tree, prefix=()):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, (*prefix, key))
        elif value is not None:
            yield (*prefix, key), value


def _name(path) -> str:
    *head, last = path
    name = ".".join((*head, {"kernel": "weight", "embedding": "weight"}.get(last, last)))
    return name if head[0] == "lm_head" else f"model.{name}"


def _turn(path, value):
    return np.ascontiguousarray(value.T) if path[-1] == "kernel" else value


def config_to_huggingface(config: ModelConfig, eos: int, pad: int) -> Qwen2Config:
    """The transformers config of a policy."""
    same = {name: getattr(config, name) for name in CONFIG_FIELDS}
    return Qwen2Config(
        **same,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        rope_theta=config.rope_theta,
        max_position_embeddings=32768,
        eos_token_id=eos,
        pad_token_id=pad,
        bos_token_id=None,
        architectures=["Qwen2ForCausalLM"],
        dtype="float32",
    )


def read_config(folder: Path) -> ModelConfig:
    """The ModelConfig of a Hugging Face folder.

    Raises:
      ValueError: no or broken config.json, or another architecture than Qwen2.
    """
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"policy {folder}: holds no config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"policy {folder}: config.json is not JSON: {error}") from None
    if raw.get("model_type") != "qwen2":
        raise ValueError(f"policy {folder}: model_type is {raw.get('model_type')!r}; qwen2 is supported")
    if raw.get("use_sliding_window"):
        raise ValueError(f"policy {folder}: use_sliding_window is true; only full attention is supported")
    rope = raw.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default" or raw.get("rope_scaling"):
        raise ValueError(f"policy {folder}: scaled rotary embeddings are not supported")
    missing = [name for name in CONFIG_FIELDS[:6] if name not in raw]
    if missing:
        raise ValueError(f"policy {folder}: config.json lacks {missing[0]}")
    # transformers leaves fields out of the file that equal the architecture's defaults.
    filled = Qwen2Config(**{name: raw[name] for name in CONFIG_FIELDS if name in raw})
    theta = rope.get("rope_theta", raw.get("rope_theta", 10_000.0))
    return ModelConfig(**{name: getattr(filled, name) for name in CONFIG_FIELDS}, rope_theta=float(theta))


def write_weights(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of model.safetensors. Raises ValueError where the file is missing or damaged."""
    file = folder / "model.safetensors"
    if not file.is_file():
        raise ValueError(f"policy {folder}: holds no model.safetensors")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"policy {folder}: model.safetensors is damaged: {error}") from None
