"""A conversation with a language model, whose answers come in pieces as they are sampled."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx

from hgpo_jax.policy import Policy
from hgpo_jax.policy.answers import TextStream
from hgpo_jax.policy.chat_template import ChatFrame
from hgpo_jax.sampling.constraint import restrict
from hgpo_jax.sampling.generate import Decoding, make_decode_blocks, sample_token

SHORTEST = 128  # tokens that a short prompt is padded to; longer ones to twice that, four times, ...


class Chat:
    """A conversation.

    Args:
      policy: one with a tokenizer that has a chat template.
      max_new: tokens of the longest answer.
      seed: decides the answers; the same conversation with the same seed gets the same ones.
      system: the system message, if the conversation should begin with one.
      thinking: as in `ChatFrame`.

    Raises:
      ValueError: no tokenizer, chat template or end token, or a max_new that leaves no room for a prompt.
    """

    def __init__(
        self,
        policy: Policy,
        decoding: Decoding,
        *,
        max_new: int = 512,
        seed: int = 0,
        system: str = "",
        thinking: bool | None = None,
    ):
        if policy.tokenizer is None:
            raise ValueError("tokenizer: the folder holds none; add tokenizer.json and tokenizer_config.json")
        self._frame = ChatFrame(policy.tokenizer, thinking=thinking, usual_date=datetime.date.today())
        self._limit = policy.config.max_position_embeddings - max_new
        if max_new < 1:
            raise ValueError(f"max_new={max_new}: must be 1 or more")
        if self._limit < 1:
            raise ValueError(f"max_new={max_new}: the model's context is {policy.config.max_position_embeddings} tokens")
        self._policy, self._decoding, self._max_new = policy, decoding, max_new
        self._key, self._system = jax.random.key(seed), [{"role": "system", "content": system}] if system else []
        self._blocks = make_decode_blocks(policy.graphdef)(policy.params)
        self.reset()

    def reset(self) -> None:
        """Forgets the conversation."""
        self.messages: list[dict[str, str]] = []
        self._answers = 0

    def prompt(self, question: str) -> list[int]:
        """Returns the token ids of the conversation with another question; drops the oldest exchanges that do not fit.

        Raises ValueError if the question alone does not fit.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        while len(ids := self._frame.conversation(self._system + messages)) > self._limit:
            if len(messages) == 1:
                raise ValueError(f"{len(ids)} tokens; beside a response {self._limit} fit in the context: ask less")
            del messages[:2]
        self.messages = messages
        return ids

    def answer(self, question: str) -> Iterator[str]:
        """Yields the answer in pieces, as they are sampled; pieces sampled before the caller stops belong to the conversation.

        Raises ValueError if the question does not fit.
        """
        ids = self.prompt(question)
        key, text = jax.random.fold_in(self._key, self._answers), ""
        self._answers += 1
        try:
            if self._frame.inside_thought:
                text += self._frame.opened
                yield text
            for piece in self._pieces(ids, key):
                text += piece
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": text})

    def _pieces(self, ids: list[int], key) -> Iterator[str]:
        """Yields the text that each token adds."""
        graphdef, params = self._policy.graphdef, self._policy.params
        width = SHORTEST
        while width < len(ids):
            width *= 2
        prompt = np.zeros((1, width), np.int32)
        prompt[0, : len(ids)] = ids
        logits, cache = _read(graphdef, params, prompt, np.array([len(ids)], np.int32), width + self._max_new)
        text = TextStream(self._frame.text.decode)
        for i in range(self._max_new):
            position, token_key = np.array([len(ids) + i], np.int32), jax.random.fold_in(key, i)
            token, logits, cache = _advance(graphdef, params, self._blocks, logits, cache, position, token_key, self._decoding)
            if int(token[0]) in self._frame.end_tokens:
                break
            yield text.push([int(token[0])], last=False)[0]
        yield text.push([], last=True)[0]


@functools.partial(jax.jit, static_argnums=(0, 4))
def _read(graphdef, params, prompt, length, capacity: int):
    """Prefills a prompt i32[1, P], right-padded: (next-token logits f32[1, V], a cache of `capacity` slots)."""
    model = nnx.merge(graphdef, params)
    hidden, cache = model.prefill(prompt, length - 1, capacity)
    return model.logits(hidden), [layer.in_parts() for layer in cache]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(3, 4))
def _advance(graphdef, params, blocks, logits, cache, position, key, decoding: Decoding):
    """Samples a token of a response and decodes it: (token i32[1], logits f32[1, V] of the next one, the cache)."""
    model = nnx.merge(graphdef, params)
    token, _ = sample_token(restrict(logits, None, model.c.unwritten), key[None], decoding)
    hidden, cache = model.decode(token, position, cache, blocks)
    return token, model.logits(hidden), cache
