"""A batch of responses as compiled rollouts sample them, with random weights: prefill and decode apart, against limits.

    python -m hgpo_jax.bench sample --policy Qwen2.5-0.5B --batch 1 8 --against transformers

The time of decoding is that of N tokens minus that of one. Its limit is the larger of two times: the bytes of all weights and
of the cache over the rate of reading memory, and the operations over the rate of matrix products, both measured in this run.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.bench import limits, policies, profile
from hgpo_jax.bench.limits import GiB, row
from hgpo_jax.bench.plan import compiled_bytes
from hgpo_jax.envs.cli import whole_number
from hgpo_jax.policy import initialize, network
from hgpo_jax.policy.placement import cast
from hgpo_jax.sampling.generate import Decoding, make_decode_blocks, make_sampler


def add_arguments(parser: argparse.ArgumentParser) -> None:
    policies.add_arguments(parser)
    parser.add_argument("--prompt", type=whole_number, help="tokens of each prompt; default 128, the household's own")
    parser.add_argument("--new", type=whole_number, default=32, help="tokens of each response, at least 2")
    parser.add_argument("--batch", type=whole_number, nargs="+", default=[1, 8], help="rows at once; several in turn")
    parser.add_argument("--temperature", type=temperature, default=1.0, help="of sampling; 0 takes the most likely token")
    profile.add_argument(parser)


def temperature(text: str) -> float:
    """Reads the option's value. Raises ValueError or ArgumentTypeError, which argparse reports in one line."""
    if not 0 <= float(text) <= 10:
        raise argparse.ArgumentTypeError(f"{text:.50}: must be a number from 0 to 10")
    return float(text)


def run(args: argparse.Namespace) -> list[dict]:
    """Returns rows of name, value, unit, limit_share (of the machine's, more is better), ratio (our speed to the peer's)."""
    workload, peer = policies.workload(args), policies.load_peer(args.against)
    prompt, new = args.prompt or workload.prompt, max(args.new, 2)
    policies.refuse(args, workload.model, args.batch, prompt + new)
    rates = limits.Rates(policies.meshes(args.mesh, 0).values(), args.dtype)
    measured = [_measure(args, workload.model, peer, batch, prompt, new) for batch in args.batch]
    rates.measure()
    rows = [line for one in measured for line in _rows(args, workload.model, one, prompt, new, rates)]
    return [*rows, *rates.rows()]


def _measure(args, model, peer, batch: int, prompt: int, new: int) -> dict:
    """Measures seconds of one token and of `new` tokens on every mesh and by the peer, seconds of compiling, and bytes."""
    prompts = np.random.default_rng(0).integers(0, model.vocab_size, (batch, prompt)).astype(np.int32)
    inputs = (
        prompts,
        np.full(batch, prompt, np.int32),
        jax.random.split(jax.random.key(0), batch),
        np.arange(batch, dtype=np.int32),
        np.int32(0),
        Decoding(temperature=args.temperature),
    )
    calls, compiled, compiling = {}, {}, {}
    for name, mesh in policies.meshes(args.mesh, batch).items():
        with jax.set_mesh(mesh):
            params = cast(initialize(model, 0, mesh), args.dtype)
            blocks = make_decode_blocks(network(model))(params)
            for count in (1, new):
                # No token is -1, so every response has its full length.
                lowered = make_sampler(network(model), mesh, count, (-1,)).lower(params, blocks, *inputs)
                began = time.perf_counter()
                compiled[name] = lowered.compile()
                compiling[name] = time.perf_counter() - began
                calls[name, count] = lambda c=compiled[name], p=(params, blocks): c(*p, *inputs)
    if peer:
        peers = peer.make_model(model, params, args.dtype)
        calls |= {("peer", count): peer.sampler(peers, prompts, count, args.temperature) for count in (1, new)}
    for call in calls.values():
        jax.block_until_ready(call())
    times = limits.alternate(calls, args.repeats)
    names = list(dict.fromkeys(name for name, _ in calls))
    best = min(compiled, key=lambda name: statistics.median(times[name, new]))
    return {
        "batch": batch,
        "best": best,
        "first": {name: statistics.median(times[name, 1]) for name in names},
        "whole": {name: statistics.median(times[name, new]) for name in names},
        "decode": {
            name: statistics.median(b - a for a, b in zip(times[name, 1], times[name, new], strict=True)) for name in names
        },
        "compile": compiling[best],
        "bytes": compiled_bytes(compiled[best]),
        "rise": {name: limits.memory_rise(calls[name, new]) for name in names if name in (best, "peer")},
        "profile": profile.rows(args.profile, f"batch {batch}", calls[best, new], compiled[best]) if args.profile else [],
    }


def _rows(args, model, one: dict, prompt: int, new: int, rates: limits.Rates) -> list[dict]:
    """Returns the rows of one batch size."""
    batch, best, itemsize = one["batch"], one["best"], jnp.dtype(args.dtype).itemsize
    prefill = rates.seconds(limits.read_bytes(model, 0, 0, itemsize), batch * limits.forward_flops(model, prompt, 1))
    decode = sum(
        rates.seconds(limits.read_bytes(model, batch, slots, itemsize), batch * limits.decode_flops(model, slots))
        for slots in range(prompt + 1, prompt + new)
    )

    def line(name, phase, limit, tokens, on=best):
        seconds = one[phase][on]
        ratio = one[phase]["peer"] / seconds if "peer" in one[phase] and on == best else None
        value, unit = (tokens / seconds, "tokens/s") if tokens else (seconds, "s")
        return row(f"{name}, batch {batch}, {on}", value, unit, limit / seconds, ratio)

    shape = f"{args.policy}, {args.dtype}, prompt {prompt}, {new} new"
    others = [name for name in one["whole"] if name not in (best, "peer")]
    return [
        line(f"decode, {shape}", "decode", decode, batch * (new - 1)),
        line("prefill and first token", "first", prefill, batch * prompt),
        line("both", "whole", prefill + decode, None),
        *(line("both", "whole", prefill + decode, None, name) for name in others),
        row(f"compile, batch {batch}", one["compile"], "s"),
        row(f"memory of the program with the weights, batch {batch}", one["bytes"] / GiB, "GiB"),
        *limits.memory_rows(f"memory above the weights, batch {batch}", one["rise"], best),
        *one["profile"],
    ]
