"""The policy: a Qwen2.5, Qwen3 or Llama (`qwen2.py`), its tokenizer, and both as a Hugging Face folder.

policy = load_policy("runs/household-hgpo-s0/policy")
policy = load_policy("smollm2")
policy = load_policy("Qwen/Qwen2.5-1.5B-Instruct", make_mesh("fsdp=8"), "bfloat16")
logits = policy.logits(input_ids, lengths)
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from hgpo_jax.files import CACHE_DIR
from hgpo_jax.mesh import make_mesh
from hgpo_jax.policy import huggingface, weights
from hgpo_jax.policy.model_config import LoraConfig, ModelConfig, RopeScaling
from hgpo_jax.policy.placement import PARAMETER_AXES, initialize, network, shapes, shardings
from hgpo_jax.policy.qwen2 import Qwen2
from hgpo_jax.policy.tokenizer import read_tokenizer

__all__ = [
    "PARAMETER_AXES",
    "LoraConfig",
    "ModelConfig",
    "Policy",
    "Qwen2",
    "RopeScaling",
    "initialize",
    "load_policy",
    "network",
    "shapes",
    "shardings",
]


@dataclasses.dataclass(frozen=True)
class Policy:
    """Weights and what it takes to use them.

    params: nested dict of f32 or bf16 arrays, the state of `Qwen2`. tokenizer: a transformers tokenizer, or None.
    """

    config: ModelConfig
    params: dict
    tokenizer: Any

    @functools.cached_property
    def graphdef(self):
        return network(self.config)

    def logits(self, input_ids, lengths):
        """Next-token logits f32[B, S, V] for right-padded i32[B, S]; what is past a row's length (i32[B]) is meaningless."""
        tokens = jnp.where(jnp.arange(input_ids.shape[1]) < jnp.asarray(lengths)[:, None], jnp.asarray(input_ids), 0)
        return _logits(self.graphdef, self.params, tokens)

    def save(self, folder: str | Path, size: int = weights.SHARD_SIZE) -> None:
        """Writes a Hugging Face folder: config.json, safetensors of at most `size` bytes each, and the tokenizer.

        The folder appears only when it is complete; an older policy in it is replaced. With several processes, all of them
        call this and process 0 writes.

        Raises:
          ValueError: the folder holds something that is not a policy's, or the policy has adapters.
        """
        if self.config.lora:
            raise ValueError(f"policy {folder}: has adapters; save them with lora.save, or lora.merge first")
        tensors = weights.layout(self.params, self.config.num_hidden_layers)

        def write_rest(folder: Path) -> None:
            special = [getattr(self.tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
            config = huggingface.config_json(self.config, tensors[0].dtype, *special)
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)

        huggingface.save(Path(folder), self.params, tensors, write_rest, "model", size)


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef, params, tokens):
    model = nnx.merge(graphdef, params)
    return model.logits(model.hidden(tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)))


def load_policy(
    folder: str | Path, mesh: Mesh | None = None, dtype: str = "float32", cache_dir: str | Path = CACHE_DIR
) -> Policy:
    """Reads a Hugging Face folder, each process the parts of the weights that its devices hold.

    Args:
      folder: holds config.json, model.safetensors (or an index and what it names) and, if the policy is to read text, a
        tokenizer. A name such as Qwen/Qwen2.5-1.5B-Instruct is fetched from the hub. Or a GGUF file, or `smollm2`, the
        package that carries one (`gguf_folder.py`).
      mesh: where to put the weights; one device if None.
      dtype: `float32` or `bfloat16`.
      cache_dir: where the folder is kept that a GGUF file becomes.

    Raises:
      ValueError: one line that names the file or tensor at fault.
    """
    folder = huggingface.find(folder, cache_dir)
    mesh = mesh or make_mesh("data=1", jax.local_devices()[:1])
    config = huggingface.read_config(folder)
    tensors = weights.layout(shapes(config), config.num_hidden_layers)
    source = weights.Weights(folder)
    source.check(tensors, tied=config.tie_word_embeddings)
    params = source.load(tensors, shardings(config, mesh), dtype)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return Policy(config, params, read_tokenizer(str(folder)) if has_tokenizer else None)
