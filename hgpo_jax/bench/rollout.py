"""Host rollouts with long answers: continuous batching beside turns in lockstep, with random weights of any shape.

    python -m hgpo_jax.bench rollout --policy Qwen2.5-0.5B --layers 4 --episodes 32 --turns 6

The environment is artificial and answers at once. Prompts grow from one length to another over an episode. The vocabulary has
--mean tokens, one of which ends an answer, and all are equally likely; so lengths are geometric, cut at --longest. Lockstep
samples a turn of all unfinished episodes, one decode batch after the other, and begins the next turn when the last has ended.

    python -m hgpo_jax.bench rollout --keep 2 --episodes 64 --slots 64 --turns 16 --mean 20 --longest 64

compares partial rollouts (`rollout.keep`) with whole ones instead, by the decode steps of an iteration and by its time, with
interrupted answers read again and going on in their slots (`rollout.reread`). Its episodes, in groups of GROUP, have 2 to
--turns turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import time

import jax
import numpy as np

from hgpo_jax.bench import limits, policy_options
from hgpo_jax.bench.artificial_environment import ArtificialEnvironment
from hgpo_jax.bench.limits import row
from hgpo_jax.config.policies import SHARED
from hgpo_jax.envs.command_line import whole_number
from hgpo_jax.policy import initialize, network
from hgpo_jax.policy.placement import cast
from hgpo_jax.rollout.chat_prompts import ParsedResponse, Prompt
from hgpo_jax.rollout.host import HostRollout, TextSettings
from hgpo_jax.rollout.partial_rollout import PartialRollout
from hgpo_jax.sampling.generate import Decoding, buckets, make_decode_blocks, make_sampler
from hgpo_jax.utils.errors import ConfigError

END, NEVER = 0, -1
GROUP = 8  # episodes of a prompt group, with --keep
ITERATIONS, FIRST = 12, 4  # played with --keep, and those that are left out: they begin with nothing carried over
UNIFORM = Decoding(temperature=1e6)  # whatever the logits


class ArtificialFormat:
    """Prompts of random tokens that grow from one length to another."""

    def __init__(self, vocabulary: int, turns: int, shortest: int, longest: int, end: int):
        self.prompt_limit, self.end_tokens, self._vocabulary = longest, (end,), vocabulary
        self._lengths = np.linspace(shortest, longest, turns).astype(int)

    def build(self, inputs) -> list[Prompt]:
        """Builds the prompts of some turns: a task always has the same ones."""
        return [Prompt(self.ids(int(each.observation), each.turn)) for each in inputs]

    def ids(self, task: int, turn: int) -> list[int]:
        """Returns token ids of a task's prompt at a turn; after the last turn a critic would ask for one more."""
        length = self._lengths[min(turn, len(self._lengths) - 1)]
        return np.random.default_rng((task, turn)).integers(1, self._vocabulary, length).tolist()

    def parse(self, ids) -> ParsedResponse:
        """Treats every response as an action."""
        return ParsedResponse("", "", True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    policy_options.add_arguments(parser)
    for name, default, meaning in (
        ("episodes", 32, "episodes, each of another task"),
        ("slots", 32, "of them that are decoded at a time"),
        ("turns", 8, "of an episode"),
        ("mean", 150, "tokens of an answer, before it is cut"),
        ("longest", 512, "tokens of the longest answer"),
        ("shortest-prompt", 300, "tokens of the first prompt"),
        ("longest-prompt", 1200, "tokens of the last prompt"),
    ):
        parser.add_argument(f"--{name}", type=whole_number, default=default, help=f"{meaning}; default {default}")
    parser.add_argument("--keep", type=whole_number, default=1, help="compare rollout.keep=KEEP with whole rollouts")
    parser.add_argument("--equal", action="store_true", help="all answers have --longest tokens")


def run(args: argparse.Namespace) -> list[dict]:
    """Returns rows; a limit_share is of the fewest possible steps, a ratio the speed over lockstep's."""
    if args.mean < 2:
        raise ConfigError(f"--mean {args.mean}: must be 2 or more; for answers of one token give --longest 1 --equal")
    if args.shortest_prompt > args.longest_prompt:
        raise ConfigError(f"--shortest-prompt {args.shortest_prompt}: is above --longest-prompt {args.longest_prompt}")
    model, _, mesh = policy_options.open_policy(args, [args.slots])
    model = dataclasses.replace(model, vocab_size=args.mean)
    end = NEVER if args.equal else END
    text = ArtificialFormat(args.mean, args.turns, args.shortest_prompt, args.longest_prompt, end)
    tasks, keys = np.arange(args.episodes), jax.random.split(jax.random.key(1), args.episodes)
    with jax.set_mesh(mesh):
        params = cast(initialize(model, 0, mesh), args.dtype)
        if args.keep > 1:
            return keep_rows(args, text, network(model), params, mesh)
        rollout = HostRollout(
            functools.partial(ArtificialEnvironment, args.turns),
            text,
            {SHARED: network(model)},
            mesh,
            TextSettings(args.episodes, 0, args.longest, args.slots // mesh.shape["data"]),
        )
        lockstep = Lockstep(network(model), mesh, text, args)
        played: dict[str, tuple[np.ndarray, float]] = {}

        def in_slots() -> None:
            episodes, report = rollout({SHARED: params}, tasks, keys, tasks, UNIFORM)
            assert report is not None
            played["slots"] = np.asarray(episodes.response_lengths), report.counts["decode_steps"]

        def in_lockstep() -> None:
            played["lockstep"] = lockstep(params, tasks, keys)

        timings = limits.timed({"slots": in_slots, "lockstep": in_lockstep}, args.repeats, args.profile)
        rollout.close()
    speed = {name: played[name][0].sum() / timing.median for name, timing in timings.items()}
    excess = {name: steps / fewest(lengths, args.slots) for name, (lengths, steps) in played.items()}
    shape = f"{args.policy}, {args.dtype}, {args.episodes} episodes in {args.slots} slots, {args.mesh}"
    return [
        row(f"tokens, {shape}", speed["slots"], "tokens/s", 1 / excess["slots"], speed["slots"] / speed["lockstep"]),
        row("tokens in lockstep", speed["lockstep"], "tokens/s", 1 / excess["lockstep"]),
        row("decode steps over the fewest possible", excess["slots"], "times"),
        row("decode steps over the fewest possible, in lockstep", excess["lockstep"], "times"),
        row("answer, in the mean", float(played["slots"][0].mean()), "tokens"),
    ]


def keep_rows(args: argparse.Namespace, text: ArtificialFormat, graphdef, params, mesh) -> list[dict]:
    """Returns rows of whole and of partial rollouts; a ratio is of the whole one's steps or seconds to the partial one's."""
    if args.episodes % GROUP:
        raise ConfigError(f"--episodes {args.episodes}: must be a multiple of {GROUP}, the episodes of a prompt group")

    def inputs(n: int) -> tuple:
        tasks = np.arange(n * args.episodes, (n + 1) * args.episodes)
        groups = np.arange(args.episodes) // GROUP
        return tasks, jax.random.split(jax.random.key(n), args.episodes), groups, UNIFORM

    rows: list[dict] = []
    whole: dict[str, float] = {}
    for keep, reread in ((1, True), (args.keep, True), (args.keep, False)):
        sizes = args.episodes, 0, args.longest, args.slots // mesh.shape["data"]
        settings = TextSettings(*sizes, keep=keep, reread=reread)
        make = functools.partial(ArtificialEnvironment, args.turns, shortest=2)
        host = HostRollout(make, text, {SHARED: graphdef}, mesh, settings)
        partial, steps, busy, seconds = PartialRollout(host, keep, inputs, GROUP), [], [], []
        for iteration in range(ITERATIONS):
            given, begin = {SHARED: params}, time.perf_counter()
            _, report = partial(given, iteration) if keep > 1 else host(given, *inputs(iteration))
            assert report is not None
            steps.append(report.counts["decode_steps"])
            busy.append(report.counts.get("slot_use", 0.0) * steps[-1])
            seconds.append(time.perf_counter() - begin)
        host.close()
        fields = f"rollout.keep={keep}" + " rollout.reread=false" * (not reread)
        shape = f"{fields}, {args.episodes} episodes of 2 to {args.turns} turns in {args.slots} slots"
        for what, value, unit in (
            (f"decode steps, {shape}", float(np.mean(steps[FIRST:])), "steps"),
            (f"iteration, {fields}", float(np.median(seconds[FIRST:])), "s"),
        ):
            of_whole = whole.setdefault(unit, value)
            rows.append(row(what, value, unit, None, of_whole / value if keep > 1 else None))
        rows.append(row(f"slots in use, {fields}", sum(busy[FIRST:]) / sum(steps[FIRST:]), "share"))
    return rows


def fewest(lengths: np.ndarray, slots: int) -> int:
    """Returns the fewest decode steps for answers of i32[B, T] tokens: those of the longest episode, or of all over the slots.

    An answer's first token comes with its prompt.
    """
    decoded = lengths - 1
    return max(1, int(decoded.sum(1).max()), math.ceil(decoded.sum() / slots))


class Lockstep:
    """Lockstep rollouts: `lockstep(params, tasks, keys)` plays turn by turn; (lengths of all responses i32[B, T], steps)."""

    def __init__(self, graphdef, mesh, text: ArtificialFormat, args: argparse.Namespace):
        self._text, self._turns, self._slots = text, args.turns, args.slots
        self._blocks, self._sample = make_decode_blocks(graphdef), make_sampler(graphdef, mesh, args.longest, text.end_tokens)
        self._widths = buckets(args.longest_prompt, factor=2, smallest=128)

    def __call__(self, params, tasks: np.ndarray, keys) -> tuple[np.ndarray, int]:
        blocks, steps = self._blocks(params), 0
        lengths = np.zeros((len(tasks), self._turns), np.int32)
        for turn in range(self._turns):
            for rows in np.split(np.arange(len(tasks), dtype=np.int32), range(self._slots, len(tasks), self._slots)):
                prompts = [self._text.ids(int(tasks[row]), turn) for row in rows]
                size = len(prompts[0])
                width = next(width for width in self._widths if width >= size)
                tokens = np.pad(np.array(prompts, np.int32), ((0, 0), (0, width - size)))
                some = np.full(len(rows), size, np.int32)
                out = self._sample(params, blocks, tokens, some, keys, rows, np.int32(turn), UNIFORM)
                lengths[rows, turn] = out.lengths
                steps += int(lengths[rows, turn].max()) - 1
        return lengths, steps
