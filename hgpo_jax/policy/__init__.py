"""The policy: a Qwen2.5 (`qwen2.py`), its tokenizer, and both as a Hugging Face folder.

policy = load_policy("runs/household-hgpo-s0/policy")
logits = policy.logits(input_ids, lengths)
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from hgpo_jax.mesh import sharding
from hgpo_jax.policy import huggingface
from hgpo_jax.policy.qwen2 import ModelConfig, Qwen2

# Logical axes of each parameter by its last two names; a leading "layers" axis is never split.
PARAMETER_AXES = {
    "embed_tokens.embedding": ("vocab", "embed"),
    "q_proj.kernel": ("embed", "heads"),
    "q_proj.bias": ("heads",),
    "k_proj.kernel": ("embed", "kv_heads"),
    "k_proj.bias": ("kv_heads",),
    "v_proj.kernel": ("embed", "kv_heads"),
    "v_proj.bias": ("kv_heads",),
    "o_proj.kernel": ("heads", "embed"),
    "gate_proj.kernel": ("embed", "mlp"),
    "up_proj.kernel": ("embed", "mlp"),
    "down_proj.kernel": ("mlp", "embed"),
    "lm_head.kernel": ("embed", "vocab"),
}


@dataclasses.dataclass(frozen=True)
class Policy:
    """Weights and what it takes to use them.

    params: nested dict of f32 or bf16 arrays, the state of `Qwen2`. `model(params)` binds any such tree to the network.
    """

    config: ModelConfig
    params: dict
    tokenizer: object

    @functools.cached_property
    def graphdef(self):
        return network(self.config)

    def logits(self, input_ids, lengths):
        """Next-token logits f32[B, T, V] for right-padded i32[B, T]; what stands past a row's length is meaningless."""
        tokens = jnp.where(jnp.arange(input_ids.shape[1]) < jnp.asarray(lengths)[:, None], jnp.asarray(input_ids), 0)
        return _logits(self.graphdef, self.params, tokens)

    def save(self, folder: str | Path) -> None:
        """Writes a Hugging Face folder: config.json, model.safetensors and the tokenizer."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        eos, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        huggingface.config_to_huggingface(self.config, eos, pad).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        params = jax.device_get(self.params)
        huggingface.write_weights(folder, huggingface.to_huggingface(params, self.config.num_hidden_layers))


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef, params, tokens):
    model = nnx.merge(graphdef, params)
    return model.logits(model.hidden(tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)))


def network(config: ModelConfig):
    """The network's graph definition: `nnx.merge(network(config), params)` is a `Qwen2`."""
    return nnx.split(nnx.eval_shape(lambda: Qwen2(config, nnx.Rngs(0))))[0]


def shapes(config: ModelConfig) -> dict:
    """The parameters as ShapeDtypeStructs, nothing allocated."""
    return nnx.to_pure_dict(nnx.split(nnx.eval_shape(lambda: Qwen2(config, nnx.Rngs(0))))[1])


def shardings(config: ModelConfig, mesh: Mesh) -> dict:
    """A NamedSharding for every parameter. Raises ValueError where a dimension does not divide."""

    def place(path, leaf):
        name = ".".join(part.key for part in path[-2:])
        axes = PARAMETER_AXES.get(name, (None,) * leaf.ndim)
        axes = (None,) * (leaf.ndim - len(axes)) + axes
        heads = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads}
        # A head is never cut in two, so head dimensions divide by heads rather than by elements.
        shape = tuple(heads.get(axis, size) for axis, size in zip(axes, leaf.shape, strict=True))
        return sharding(axes, shape, mesh, name)

    return jax.tree_util.tree_map_with_path(place, shapes(config))


def initialize(config: ModelConfig, seed: int, mesh: Mesh) -> dict:
    """Random parameters, each created in its place on the mesh; the same values on every mesh."""
    create = lambda: nnx.to_pure_dict(nnx.split(Qwen2(config, nnx.Rngs(seed)))[1])  # noqa: E731
    return jax.jit(create, out_shardings=shardings(config, mesh))()


def load_policy(folder: str | Path, mesh: Mesh | None = None, dtype: str = "float32") -> Policy:
    """Reads a Hugging Face folder.

    Args:
      folder: holds config.json, model.safetensors and, if the policy is to read text, a tokenizer.
      mesh: where to put the weights; one device if None.
      dtype: `float32` or `bfloat16`.

    Raises:
      ValueError: one line that names the file or tensor at fault.
    """
    from transformers import AutoTokenizer

    folder = Path(folder)
    config = huggingface.read_config(folder)
    tensors = huggingface.read_weights(folder)
    params = huggingface.from_huggingface(tensors, shapes(config), config.num_hidden_layers)
    params = jax.tree.map(lambda a: np.asarray(a, jnp.dtype(dtype)), params)
    params = jax.device_put(params, shardings(config, mesh)) if mesh is not None else jax.tree.map(jnp.asarray, params)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return Policy(config, params, AutoTokenizer.from_pretrained(folder) if has_tokenizer else None)
