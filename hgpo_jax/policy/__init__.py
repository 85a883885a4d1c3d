"""The policy: a Qwen2.5, Qwen3 or Llama (`transformer.py`), its tokenizer, and both as a Hugging Face folder.

policy = load_policy("runs/household-hgpo-s0/policy")
policy = load_policy("smollm2")
policy = load_policy("Qwen/Qwen2.5-1.5B-Instruct", make_mesh("fsdp=8"), "bfloat16")
logits = policy.logits(input_ids, lengths)
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from hgpo_jax.policy import huggingface_folder, safetensors_files, weight_names
from hgpo_jax.policy.chat_template import ChatFrame, end_tokens
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.policy.model_config import LoraConfig, ModelConfig, RopeScaling
from hgpo_jax.policy.placement import PARAMETER_AXES, initialize, network, shapes, shardings
from hgpo_jax.policy.source import find
from hgpo_jax.policy.tokenizer import AS_TRAINED, GENERATION, generation_of, read_tokenizer
from hgpo_jax.policy.transformer import Qwen2
from hgpo_jax.utils.files import CACHE_DIR
from hgpo_jax.utils.heartbeat import phase

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
    """The weights of a language model, and everything needed to use them.

    params: nested dict of f32 or bf16 arrays, the state of `Qwen2`. tokenizer: a transformers tokenizer, or None.
    """

    config: ModelConfig
    params: dict
    tokenizer: Any

    @functools.cached_property
    def graphdef(self):
        return network(self.config)

    def logits(self, input_ids, lengths):
        """Returns next-token logits f32[B, S, V] for right-padded i32[B, S], meaningless past a row's length (i32[B])."""
        tokens = jnp.where(jnp.arange(input_ids.shape[1]) < jnp.asarray(lengths)[:, None], jnp.asarray(input_ids), 0)
        return _logits(self.graphdef, self.params, tokens)

    @functools.cached_property
    def frame(self) -> ChatFrame | None:
        """The tokenizer's chat template; None if it has none. Raises ValueError for an unusable one."""
        return ChatFrame(self.tokenizer) if getattr(self.tokenizer, "chat_template", None) else None

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer. Raises ValueError if there are none."""
        return self.frame.end_tokens if self.frame else end_tokens(self.tokenizer)

    @phase("saving the weights")
    def save(
        self,
        folder: str | Path,
        size: int = safetensors_files.SHARD_SIZE,
        stop: Sequence[str] = (),
        trained: ChatFrame | None = None,
    ) -> None:
        """Writes a Hugging Face folder: config.json, safetensors of at most `size` bytes each, and the tokenizer.

        stop: further tokens that end an answer, to be added to generation_config.json.
        trained: the frame in which the policy was trained; that file keeps it for every later frame of this tokenizer.

        The folder appears only when it is complete, and replaces an older policy there. With several processes, all of them
        call this and process 0 writes.

        Raises:
          ValueError: the folder holds files that do not belong to a policy, or the policy has adapters.
        """
        if self.config.lora:
            raise ValueError(f"policy {folder}: has adapters; save them with lora.save, or lora.merge first")
        tensors = weight_names.layout(self.params, self.config.num_hidden_layers)

        def write_rest(folder: Path) -> None:
            special = [getattr(self.tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
            config = huggingface_folder.config_json(self.config, tensors[0].dtype, *special)
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
                (folder / GENERATION).write_text(json.dumps(self._generation(stop, trained), indent=2) + "\n")

        huggingface_folder.save(Path(folder), self.params, tensors, write_rest, "model", size)

    def _generation(self, stop: Sequence[str], trained: ChatFrame | None) -> dict[str, Any]:
        """Returns the content of generation_config.json: the earlier content, with every token that ends an answer."""
        settings = {AS_TRAINED: trained.settings} if trained and not trained.plain else {}
        ends = dict.fromkeys((*self.end_tokens, *end_tokens(self.tokenizer, stop)))
        others = {f"{name}_token_id": getattr(self.tokenizer, f"{name}_token_id") for name in ("bos", "pad")}
        token_ids = {name: index for name, index in others.items() if index is not None}
        return token_ids | generation_of(self.tokenizer) | settings | {"eos_token_id": list(ends)}


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef, params, tokens):
    model = nnx.merge(graphdef, params)
    return model.logits(model.hidden(tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)))


@phase("loading the weights")
def load_policy(
    folder: str | Path, mesh: Mesh | None = None, dtype: str = "float32", cache_dir: str | Path = CACHE_DIR
) -> Policy:
    """Reads a Hugging Face folder; each process reads the parts of the weights that its devices hold.

    Args:
      folder: holds config.json, model.safetensors (or an index and the files that it lists) and, if the policy should read
        text, a tokenizer. A name such as Qwen/Qwen2.5-1.5B-Instruct is fetched from the hub. It may also be a GGUF file, or
        `smollm2`, the package that contains one (`gguf_folder.py`).
      mesh: the devices for the weights; one device if None.
      dtype: `float32` or `bfloat16`.
      cache_dir: keeps the folders converted from GGUF files.

    Raises:
      ValueError: one line that names the file or tensor at fault.
    """
    folder = find(folder, cache_dir)
    mesh = mesh or make_mesh("data=1", jax.local_devices()[:1])
    config = huggingface_folder.read_config(folder)
    tensors = weight_names.layout(shapes(config), config.num_hidden_layers)
    source = safetensors_files.Weights(folder)
    source.check(tensors, tied=config.tie_word_embeddings)
    params = source.load(tensors, shardings(config, mesh), dtype)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    policy = Policy(config, params, read_tokenizer(str(folder)) if has_tokenizer else None)
    _check_rows(folder, policy)
    return policy


def _check_rows(folder: Path, policy: Policy) -> None:
    """Raises ValueError if prompts or answers could hold ids without a row of the embedding.

    More rows than tokens are usual: sampling draws from all of them, as the loss does. Tokens that were added without rows, as
    is often the case for padding, are never written.
    """
    tokenizer, rows = policy.tokenizer, policy.config.vocab_size
    if tokenizer is None:
        return
    frame = [*policy.frame.head, *policy.frame.tail] if policy.frame else []
    added = set(tokenizer.get_added_vocab().values())
    plain = max((index for index in tokenizer.get_vocab().values() if index not in added), default=0)
    ends = policy.end_tokens if frame or tokenizer.eos_token_id is not None else ()
    if (largest := max([plain, *frame, *ends])) >= rows:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ValueError(f"policy {folder}: its tokenizer writes {token!r}, id {largest}, but the embedding has {rows} rows")
