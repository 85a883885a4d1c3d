"""The update on conversations, each computed once, against the same turns as decisions of their own.

    python -m hgpo_jax.bench conversations --policy SmolLM2-135M --layers 4 --rows 2 --tokens 640 --turns 20

A conversation's turns have equal numbers of tokens, an eighth of them the answer's. Both updates are that of `bench update`,
and find the same loss and gradient. Tokens computed are the slots of all sequences, padding included.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.bench import limits, policy_options
from hgpo_jax.bench.limits import row
from hgpo_jax.bench.update import OurUpdate
from hgpo_jax.config import LearnerConfig
from hgpo_jax.envs.command_line import whole_number
from hgpo_jax.learner.batch import TrainingBatch, assign_to_sequences
from hgpo_jax.utils.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    policy_options.add_arguments(parser)
    parser.add_argument("--rows", type=whole_number, default=4, help="conversations to learn from, in one optimizer step")
    parser.add_argument("--tokens", type=whole_number, default=640, help="tokens of each at its end")
    parser.add_argument("--turns", type=whole_number, default=20, help="turns of each")
    parser.add_argument("--microbatch", type=whole_number, default=1, help="sequences per device and gradient")
    parser.add_argument("--remat", choices=["none", "dots", "full"], default="none", help="as learner.remat")


def run(args: argparse.Namespace) -> list[dict]:
    """Returns rows; a ratio is the speed over that of separate decisions, or the tokens computed over the conversations'."""
    if args.tokens < 2 * args.turns:
        raise ConfigError(f"--turns {args.turns}: leaves no prompt and answer of --tokens {args.tokens}")
    model, _, mesh = policy_options.open_policy(args, [args.rows])
    batch = random_conversations(model.vocab_size, args.rows, args.turns, args.tokens)
    batches = {"conversations": batch, "turns": batch.replace(chain=None)}
    sizes = {"minibatch_size": args.rows * args.turns, "microbatch_size": args.microbatch}
    config = LearnerConfig(remat=args.remat, kl_weight=0, entropy_weight=0, warmup_steps=0, **sizes)
    calls = {name: OurUpdate(model, config, mesh, one, args.dtype, offload=False) for name, one in batches.items()}
    first = {name: call() for name, call in calls.items()}
    for what, value in first["turns"].items():
        tolerance = 1e-4 if args.dtype == "float32" else 0.05
        np.testing.assert_allclose(first["conversations"][what], value, rtol=tolerance, atol=1e-5, err_msg=what)
    seconds = {name: timing.median for name, timing in limits.timed(calls, args.repeats, args.profile).items()}
    shape = f"{args.policy}, {model.num_hidden_layers} layers, {args.rows} x {args.tokens} tokens, {args.turns} turns"
    rows, length = [], args.rows * args.tokens
    for name, one in batches.items():
        computed, ratio = slots_computed(one), seconds["turns"] / seconds[name]
        rows.append(row(f"update by {name}, {shape}, {args.dtype}", seconds[name], "s", ratio=ratio))
        rows.append(row(f"tokens computed by {name}", computed, "tokens", ratio=computed / length))
    return rows


def random_conversations(vocabulary: int, rows: int, turns: int, tokens: int) -> TrainingBatch:
    """Makes the turns of conversations with random tokens, as if sampled by a uniform policy."""
    key, turn = jax.random.key(0), tokens // turns
    response = max(turn // 8, 1)
    texts = jnp.repeat(jax.random.randint(key, (rows, tokens), 0, vocabulary), turns, axis=0)
    ends = jnp.tile(tokens - turn * jnp.arange(turns)[::-1], rows)  # of each answer
    at = (ends - response)[:, None]
    return TrainingBatch(
        prompts=jnp.where(jnp.arange(tokens - response) < at, texts[:, : tokens - response], 0),
        prompt_lengths=ends - response,
        responses=jnp.take_along_axis(texts, at + jnp.arange(response), axis=1),
        response_lengths=jnp.full(rows * turns, response),
        old_logp=jnp.full((rows * turns, response), -jnp.log(vocabulary)),
        advantages=jax.random.normal(key, (rows * turns,)),
        chain=jnp.repeat(jnp.arange(rows) * turns, turns),
    )


def slots_computed(batch: TrainingBatch) -> int:
    """Counts the slots of all sequences of a mini-batch."""
    count = len(batch.advantages)
    _, sequences = assign_to_sequences(batch, jnp.arange(count), 0, count, count)
    return int(sequences) * batch.sequence_shape().slots
