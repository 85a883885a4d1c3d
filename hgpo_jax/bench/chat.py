"""A chat of many turns: seconds to the first tokens of each answer, where a slot holds what was read before, and without.

    python -m hgpo_jax.bench chat --policy SmolLM2-135M --turns 10 --against transformers

Each turn adds a message of random tokens and an answer with random weights. The first tokens are as many as a server sends at
once, and by default an answer has no others: they would only take time. The peer keeps its cache by hand. Nothing is compiled
during the timing.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from typing import NamedTuple

import jax
import numpy as np

from hgpo_jax.bench import policy_options
from hgpo_jax.bench.limits import row
from hgpo_jax.envs.command_line import whole_number
from hgpo_jax.policy import initialize, network
from hgpo_jax.policy.placement import cast
from hgpo_jax.sampling.continuous_batching import SlotSampler
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.sampling.slot_plan import SlotRequest
from hgpo_jax.sampling.slot_programs import MIN_STEPS, SlotPrograms

NEVER = -1  # no token ends an answer


class Turns(NamedTuple):
    """seconds: to the first tokens of each turn's answer. reused: tokens of each turn's prompt that were held."""

    seconds: list[float]
    prompts: list[int]
    reused: list[int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    policy_options.add_arguments(parser)
    policy_options.add_against(parser)
    parser.add_argument(
        "--turns", type=functools.partial(whole_number, low=2), default=10, help="turns of the chat; default 10"
    )
    parser.add_argument("--message", type=whole_number, default=100, help="tokens that each turn adds; default 100")
    parser.add_argument("--response", type=whole_number, default=MIN_STEPS, help=f"tokens of an answer; default {MIN_STEPS}")


def run(args: argparse.Namespace) -> list[dict]:
    """Returns rows; a ratio is a share of the prompts' tokens, or as its row says: of seconds, or our speed to the peer's."""
    model, _, mesh = policy_options.open_policy(args, [])
    peer = policy_options.load_peer(args.against)
    random = np.random.default_rng(0)
    messages = random.integers(0, model.vocab_size, (args.turns, args.message)).tolist()
    limit = args.turns * (args.message + args.response)
    with jax.set_mesh(mesh):
        params = cast(initialize(model, 0, mesh), args.dtype)
        programs = SlotPrograms(network(model), mesh, max_new=args.response, end_tokens=(NEVER,))

        def ours(reuse: bool) -> Turns:
            keys = jax.random.split(jax.random.key(0), 1)
            sampler = SlotSampler(programs, params, keys, Decoding(), slots=1, prompt_limit=limit, reuse=reuse)
            return _play(sampler, messages)

        calls = {"held": lambda: ours(True).seconds, "read anew": lambda: ours(False).seconds}
        if peer:
            theirs = peer.make_model(model, params, args.dtype)
            calls["transformers"] = lambda: peer.chat(theirs, messages, args.response, MIN_STEPS)
        turns = ours(True)
        seconds = _medians(calls, args.repeats)
    shape = f"{args.policy}, {args.dtype}, {args.message} + {args.response} tokens a turn"
    reused, prompts, last = sum(turns.reused[1:]), sum(turns.prompts[1:]), f"first tokens at turn {args.turns}"
    rows = [row(f"prompt tokens of later turns not read again, {shape}", reused, "tokens", ratio=reused / prompts)]
    for name, of_turns in seconds.items():
        rows.append(row(f"first tokens at turn 2, {name}", of_turns[1], "s"))
        rows.append(row(f"{last}, {name}, over turn 2", of_turns[-1], "s", ratio=of_turns[-1] / of_turns[1]))
    if peer:
        ours_last = seconds["held"][-1]
        rows.append(row(f"{last}, held, against transformers", ours_last, "s", ratio=seconds["transformers"][-1] / ours_last))
    return rows


def _play(sampler: SlotSampler, messages: list[list[int]]) -> Turns:
    text, turns = [], Turns([], [], [])
    for number, message in enumerate(messages):
        text += message
        before, began = sampler.reused_tokens, time.perf_counter()
        sampler.add([SlotRequest(0, number, list(text))])
        responses = sampler.step(MIN_STEPS)
        turns.seconds.append(time.perf_counter() - began)
        turns.prompts.append(len(text))
        turns.reused.append(sampler.reused_tokens - before)
        while not responses:
            responses = sampler.step()
        text += responses[0].tokens.tolist()
    return turns


def _medians(calls: dict, repeats: int) -> dict[str, list[float]]:
    """Calls each in turn, once to compile; returns the median seconds of every turn."""
    for call in calls.values():
        call()
    rounds = [{name: call() for name, call in calls.items()} for _ in range(repeats)]
    return {name: [statistics.median(some) for some in zip(*(one[name] for one in rounds), strict=True)] for name in calls}
