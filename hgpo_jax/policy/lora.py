"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685) as a separate tree beside frozen weights; peft's files in and out.

    config = dataclasses.replace(policy.config, lora=LoraConfig(rank=16, alpha=32))
    adapters = lora.initialize(config, seed, mesh)
    model = nnx.merge(network(config), lora.bind(policy.params, adapters))      # the adapted network
    model = nnx.merge(network(policy.config), policy.params)                   # the reference: no adapters

Differentiate with respect to `adapters`: no gradient of the size of the weights is ever computed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from hgpo_jax.policy import huggingface_folder, safetensors_files, weight_names
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.model_config import LoraConfig, ModelConfig
from hgpo_jax.policy.placement import shapes, shardings

PREFIX = "base_model.model."  # peft's prefix of the name of a layer of the wrapped model
TOWER = "visual."  # prefix of a vision tower's layers among the targets


def _only(tree: dict) -> dict:
    """Selects the adapters' part of a tree."""
    return unflatten_dict({path: leaf for path, leaf in flatten_dict(tree).items() if path[-1] in ("lora_a", "lora_b")})


def initialize(config: ModelConfig, seed: int, mesh: Mesh) -> dict:
    """Creates adapters of `config.lora`, in place on the mesh: A uniform in +-1/sqrt(inputs), B zero, so that nothing changes.

    Returns a nested dict of f32 arrays, stacked as the parameters are: lora_a [(layers - 1,) in, rank] and lora_b
    [(layers - 1,) rank, out].
    """
    like = flatten_dict(_only(shapes(config)))

    def create():
        keys = jax.random.split(jax.random.key(seed), len(like))
        fresh = {}
        for key, (path, leaf) in zip(keys, like.items(), strict=True):
            if path[-1] == "lora_a":
                fresh[path] = leaf.shape[-2] ** -0.5 * jax.random.uniform(key, leaf.shape, minval=-1.0)
            else:
                fresh[path] = jnp.zeros(leaf.shape)
        return unflatten_dict(fresh)

    return jax.jit(create, out_shardings=_only(shardings(config, mesh)))()


def bind(params: dict, adapters: dict) -> dict:
    """Returns the parameters of the adapted network; copies nothing."""
    return unflatten_dict(flatten_dict(params) | flatten_dict(adapters))


def merge(config: ModelConfig, params: dict, adapters: dict, *, donate: bool = False) -> dict:
    """Returns parameters of the equivalent network without adapters: W + (alpha / rank) A B, in W's dtype and place.

    Weights without an adapter are shared with `params`, not copied.
    donate: take the memory of the adapted weights for the new ones; `params` cannot be used any more.
    """
    assert config.lora is not None  # its adapters
    flat, low = flatten_dict(params), flatten_dict(adapters)
    for path in [path for path in low if path[-1] == "lora_a"]:
        kernel, a, b = flat[*path[:-1], "kernel"], low[path], low[*path[:-1], "lora_b"]
        merged = jax.jit(_merge, out_shardings=kernel.sharding, donate_argnums=0 if donate else ())
        flat[*path[:-1], "kernel"] = merged(kernel, a, b, config.lora.scale)
    return unflatten_dict(flat)


def _merge(kernel, a, b, scale):
    change = jnp.matmul(a, b, precision="highest")  # by default accelerators round float32 operands
    return (kernel.astype(jnp.float32) + scale * change).astype(kernel.dtype)


def save(folder: str | Path, config: ModelConfig, adapters: dict, base: str = "") -> None:
    """Writes adapter_config.json and adapter_model.safetensors, which peft reads.

    base: the folder or hub name of the frozen policy, for the record.

    Raises:
      ValueError: the folder holds files that do not belong to a policy.
    """
    assert config.lora is not None  # its adapters
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base) or None,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "target_modules": _pattern(config.lora.targets) if config.vision else sorted(config.lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    huggingface_folder.save(
        Path(folder),
        adapters,
        weight_names.layout(adapters, config.num_hidden_layers, PREFIX, nested=config.vision is not None),
        lambda partial: (partial / "adapter_config.json").write_text(json.dumps(content, indent=2) + "\n"),
        "adapter_model",
        safetensors_files.SHARD_SIZE,
    )


def _pattern(targets: tuple[str, ...]) -> str:
    """Returns the regular expression by which peft tells the layers of both towers of a Qwen2.5-VL apart."""
    tower = "|".join(sorted(name.removeprefix(TOWER) for name in targets if name.startswith(TOWER)))
    text = "|".join(sorted(name for name in targets if not name.startswith(TOWER)))
    parts = {r"language_model\.layers": text, r"visual\.blocks": tower}
    return "|".join(rf".*{blocks}\.[0-9]+\.[a-z_]+\.({names})" for blocks, names in parts.items() if names)


def _targets(names: Iterable[str]) -> tuple[str, ...]:
    """Lists what a file of adapters of a Qwen2.5-VL adapts, by the names of its tensors."""
    return tuple(sorted({(TOWER if ".visual." in name else "") + name.split(".")[-3] for name in names if name.count(".") > 2}))


# Fields of peft's adapter_config.json, and the values with which the files hold plain adapters. Some ways to begin (PiSSA,
# LoftQ, ...) change the weights that are adapted, too.
PLAIN = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal")}
# Fields that describe the files, training or the libraries used. Any other field, known today or not, must be unset.
OTHERS = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("r", "lora_alpha", "target_modules", "lora_dropout", "layers_pattern", "megatron_config", "megatron_core"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config", "qalora_group_size"),
    *("ensure_weight_tying", "velora_config"),
}


def load(folder: str | Path, config: ModelConfig, mesh: Mesh | None = None) -> tuple[ModelConfig, dict]:
    """Reads an adapter folder, ours or peft's, for a policy of this config: (config with `lora`, f32 adapters).

    Raises:
      ValueError: one line that names the field, file or tensor at fault.
    """
    folder = Path(folder)
    raw = huggingface_folder.read_json(folder, "adapter_config.json")
    for name, value in raw.items():
        if value not in PLAIN[name] if name in PLAIN else value and name not in OTHERS:
            raise ValueError(f"policy {folder}: {name}={json.dumps(value):.50} in adapter_config.json is not supported")
    source = safetensors_files.Weights(folder, "adapter_model")
    if config.vision:
        raw["target_modules"] = _targets(source.shapes)
    if isinstance(raw.get("target_modules"), str):
        raise ValueError(f"policy {folder}: target_modules in adapter_config.json is a pattern; expected a list of names")
    try:
        settings = LoraConfig(rank=raw["r"], alpha=raw["lora_alpha"], targets=tuple(sorted(raw["target_modules"])))
    except KeyError as error:
        raise ValueError(f"policy {folder}: adapter_config.json lacks {error.args[0]}") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"policy {folder}: adapter_config.json: {error}") from None
    config = dataclasses.replace(config, lora=settings)
    nested = weight_names.is_nested(source.shapes, PREFIX)
    tensors = weight_names.layout(_only(shapes(config)), config.num_hidden_layers, PREFIX, nested)
    source.check(tensors)
    mesh = mesh or make_mesh("data=1", jax.local_devices()[:1])
    return config, source.load(tensors, _only(shardings(config, mesh)), "float32")
