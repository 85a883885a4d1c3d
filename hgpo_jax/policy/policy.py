"""A language model with its tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hgpo_jax.policy import huggingface_folder, huggingface_vision, safetensors_files, weight_names
from hgpo_jax.policy.chat_template import ChatFrame, end_tokens
from hgpo_jax.policy.model_config import ModelConfig
from hgpo_jax.policy.pictures import Pictures, place, prepare
from hgpo_jax.policy.placement import network
from hgpo_jax.policy.tokenizer import AS_TRAINED, GENERATION, generation_of
from hgpo_jax.policy.vision import Grids
from hgpo_jax.utils.heartbeat import phase


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

    def logits(self, input_ids, lengths, pictures: Pictures | None = None):
        """Returns next-token logits f32[B, S, V] for right-padded i32[B, S], meaningless past a row's length (i32[B]).

        pictures: those of the rows, from `see`.
        """
        input_ids = jnp.asarray(input_ids)
        tokens = jnp.where(jnp.arange(input_ids.shape[1]) < jnp.asarray(lengths)[:, None], input_ids, 0)
        return _logits(self.graphdef, self.params, tokens, pictures)

    def see(self, pictures: Sequence[Sequence[np.ndarray]]) -> tuple[Pictures, list[Grids]]:
        """Computes the features of the pictures in each prompt, uint8 [H, W, 3] each: (for `logits`, each prompt's grids).

        A picture that several prompts hold is computed once.

        Raises:
          ValueError: the policy has no vision, there is no picture, or one is refused (`pictures.check`).
        """
        v = self.config.vision
        if v is None:
            raise ValueError(f"a {self.config.model_type} sees no pictures; choose a qwen2_5_vl")
        different = {id(picture): picture for row in pictures for picture in row}
        if not different:
            raise ValueError("the prompts hold no pictures; compute their logits without")
        number = {key: index for index, key in enumerate(different)}
        patches, grids = prepare(list(different.values()), v)
        features = _features(self.graphdef, grids, self.params, patches)
        rows = [[number[id(picture)] for picture in row] for row in pictures]
        return place(features, grids, rows, v), [tuple(grids[index] for index in row) for row in rows]

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
            special = [self._special(name) for name in ("bos", "eos", "pad")]
            config = huggingface_folder.config_json(self.config, tensors[0].dtype, *special)
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            if self.config.vision:
                huggingface_vision.write_preprocessor(folder, self.config.vision)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
                huggingface_folder.open_to_transformers_4(folder)
                (folder / GENERATION).write_text(json.dumps(self._generation(stop, trained), indent=2) + "\n")

        huggingface_folder.save(Path(folder), self.params, tensors, write_rest, "model", size)

    def _special(self, name: str) -> int | None:
        """Returns the id of a special token that has a row of the embedding; transformers fails for one without."""
        index = getattr(self.tokenizer, f"{name}_token_id", None)
        return None if index is None or index >= self.config.vocab_size else index

    def _generation(self, stop: Sequence[str], trained: ChatFrame | None) -> dict[str, Any]:
        """Returns the content of generation_config.json: the earlier content, with every token that ends an answer."""
        settings = {AS_TRAINED: trained.settings} if trained and not trained.plain else {}
        ends = dict.fromkeys((*self.end_tokens, *end_tokens(self.tokenizer, stop)))
        others = {f"{name}_token_id": self._special(name) for name in ("bos", "pad")}
        token_ids = {name: index for name, index in others.items() if index is not None}
        return token_ids | generation_of(self.tokenizer) | settings | {"eos_token_id": list(ends)}


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef, params, tokens, pictures):
    model = nnx.merge(graphdef, params)
    every = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model.logits(model.hidden(tokens, every, pictures=pictures))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _features(graphdef, grids, params, patches):
    return nnx.merge(graphdef, params).visual(patches[None], grids)[0]
