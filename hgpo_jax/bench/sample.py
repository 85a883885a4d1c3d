"""A batch of responses as compiled rollouts sample them, with random weights: prefill and decode apart, against limits.

    python -m hgpo_jax.bench sample --policy Qwen2.5-0.5B --batch 1 8 --against transformers

The time of decoding is that of N tokens minus that of one. Its limit is the larger of two times: the bytes of all weights and
of the cache over the rate of reading memory, and the operations over the rate of matrix products, both measured in this run.
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.bench import limits, policy_options
from hgpo_jax.bench.limits import row
from hgpo_jax.envs.command_line import whole_number
from hgpo_jax.policy import ModelConfig, initialize, network
from hgpo_jax.policy.placement import cast
from hgpo_jax.sampling.generate import Decoding, make_decode_blocks, make_sampler


def add_arguments(parser: argparse.ArgumentParser) -> None:
    policy_options.add_arguments(parser)
    policy_options.add_against(parser)
    parser.add_argument("--prompt", type=whole_number, help="tokens of each prompt; default 128, the household's own")
    parser.add_argument("--new", type=functools.partial(whole_number, low=2), default=32, help="tokens of each response")
    parser.add_argument("--batch", type=whole_number, nargs="+", default=[1, 8], help="rows at once; several in turn")


def run(args: argparse.Namespace) -> list[dict]:
    """Returns rows; a ratio is our speed to the peer's."""
    model, prompt, mesh = policy_options.open_policy(args, args.batch)
    peer, prompt = policy_options.load_peer(args.against), args.prompt or prompt
    rates, rows = limits.measure_rates(mesh, args.dtype), []
    with jax.set_mesh(mesh):
        params = cast(initialize(model, 0, mesh), args.dtype)
        theirs = peer and peer.make_model(model, params, args.dtype)
        for batch in args.batch:
            prompts = np.random.default_rng(0).integers(0, model.vocab_size, (batch, prompt)).astype(np.int32)
            ours = samplers(model, mesh, params, prompts, args.new)
            calls = {("ours", count): call for count, call in ours.items()}
            if peer:
                calls |= {("peer", count): peer.sampler(theirs, prompts, count) for count in ours}
            timings = limits.timed(calls, args.repeats, args.profile)
            seconds = {call: timing.median for call, timing in timings.items()}
            rows += _rows(args, model, batch, prompt, seconds, rates, mesh.shape["data"])
            size = limits.compiled_bytes(ours[args.new].func) / limits.GiB
            rows.append(row(f"memory of the program with the weights, batch {batch}", size, "GiB"))
    return [*rows, *limits.peak_rows(mesh), *rates.rows(args.dtype)]


def samplers(model: ModelConfig, mesh, params, prompts: np.ndarray, new: int, temperature: float = 1.0) -> dict:
    """Compiles the sampler of one token and that of `new` tokens: number -> call."""
    batch, length = prompts.shape
    inputs = (
        params,
        make_decode_blocks(network(model))(params),
        prompts,
        np.full(batch, length, np.int32),
        jax.random.split(jax.random.key(0), batch),
        np.arange(batch, dtype=np.int32),
        np.int32(0),
        Decoding(temperature),
    )

    def call(count: int) -> functools.partial:
        # No token is -1, so every response has its full length.
        return functools.partial(make_sampler(network(model), mesh, count, (-1,)).lower(*inputs).compile(), *inputs)

    return {count: call(count) for count in (1, new)}


def _rows(
    args: argparse.Namespace, model: ModelConfig, batch: int, prompt: int, seconds: dict, rates: limits.Rates, copies: int
) -> list[dict]:
    """Returns the rows of one batch size. seconds: of (whose, tokens). copies: of the weights, which are all read."""
    itemsize = jnp.dtype(args.dtype).itemsize
    once = limits.read_bytes(model, 0, 0, itemsize)
    weights, cache = copies * once, limits.read_bytes(model, batch, 1, itemsize) - once
    prefill = rates.seconds(weights, batch * limits.forward_flops(model, prompt, 1))
    decode = sum(
        rates.seconds(weights + slots * cache, batch * limits.decode_flops(model, slots))
        for slots in range(prompt + 1, prompt + args.new)
    )

    def line(name: str, phase, limit: float, tokens: int) -> dict:
        ours = phase("ours")
        ratio = phase("peer") / ours if args.against else None
        return row(f"{name}, batch {batch}", tokens / ours, "tokens/s", limit / ours, ratio)

    shape = f"{args.policy}, {args.dtype}, prompt {prompt}, {args.new} new, {args.mesh}"
    return [
        line(f"decode, {shape}", lambda who: seconds[who, args.new] - seconds[who, 1], decode, batch * (args.new - 1)),
        line("prefill and first token", lambda who: seconds[who, 1], prefill, batch * prompt),
        line("new tokens of both", lambda who: seconds[who, args.new], prefill + decode, batch * args.new),
    ]
