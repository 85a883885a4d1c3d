"""Host rollouts with long answers: continuous batching beside turns in lockstep, with random weights of any shape.

    python -m hgpo_jax.bench rollout --policy Qwen2.5-0.5B --layers 4 --episodes 32 --turns 6

The environment is artificial and answers at once. Prompts grow from 300 to 1,200 tokens over an episode. Every token ends an
answer with probability 1 / --mean, because of specially made weights, whatever came before; so lengths are geometric, cut at
--longest. Lockstep samples a turn of all unfinished episodes, one decode batch after the other, and begins the next turn when
the last has ended. The compiled rollout has the same slots, and the environment, inside one program.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from hgpo_jax.bench import policies
from hgpo_jax.bench.limits import row
from hgpo_jax.config.policies import SHARED
from hgpo_jax.envs.cli import whole_number
from hgpo_jax.policy import initialize, network
from hgpo_jax.policy.placement import cast
from hgpo_jax.rollout.chat_prompts import ParsedResponse, Prompt
from hgpo_jax.rollout.compiled import on_shards, start_episode
from hgpo_jax.rollout.compiled_slots import SlotProgram
from hgpo_jax.rollout.host import HostRollout, TextSettings
from hgpo_jax.sampling.generate import Decoding, buckets, make_decode_blocks, make_sampler
from hgpo_jax.utils.errors import ConfigError

END = 0


class MadeUp:
    """An environment whose episodes always have the maximum length."""

    task_types, goal, task_type = ("made up",), "", 0

    def __init__(self, turns: int):
        self.max_turns = turns

    def reset(self, task):
        """Returns the first observation."""
        self._task = task
        return str(task), []

    def step(self, action):
        """Returns the next observation."""
        return str(self._task), [], 0.0, False, {"won": False, "admissible": True}


class MadeUpState(struct.PyTreeNode):
    task: jax.Array  # i32[]
    turn: jax.Array  # i32[]


class MadeUpCompiled:
    """The same environment, compiled, with prompts of its own random tokens."""

    goal_length = observation_length = action_length = 1

    def __init__(self, args: argparse.Namespace, vocabulary: int):
        self.max_turns, self.longest_answer, self.vocabulary = args.turns, args.longest, vocabulary
        self.lengths = np.linspace(args.shortest_prompt, args.longest_prompt, args.turns).astype(int)
        self.widths = buckets(args.longest_prompt, factor=2, smallest=128)

    def start(self, task):
        """Returns the initial state and observation of an episode."""
        return MadeUpState(task=task, turn=jnp.int32(0)), task[None]

    def goal(self, state):
        """Returns the task."""
        return state.task[None]

    def won(self, state):
        """Returns False: nothing can be won."""
        return jnp.array(False)

    def step(self, state, action):
        """Returns (state, observation, reward, done, invalid)."""
        after = state.replace(turn=state.turn + 1)
        return after, state.task[None], jnp.float32(0), after.turn >= self.max_turns, jnp.array(False)


class MadeUpProgram(SlotProgram):
    """The rollout of `MadeUpCompiled`, which returns lengths of all responses, i32[B, T], and decoding steps, i32[1]."""

    @property
    def response_slots(self) -> int:
        return self.env.longest_answer

    @property
    def widths(self):
        return self.env.widths

    @property
    def end_tokens(self):
        return (END,)

    def prompt(self, state):
        """Returns random tokens."""
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), state.env.task), state.env.turn)
        ids = jax.random.randint(key, self.widths[-1:], 1, self.env.vocabulary)
        return ids, jnp.asarray(self.env.lengths)[jnp.minimum(state.env.turn, self.env.max_turns - 1)], {}

    def lengths(self, params, tasks, keys, decoding):
        """Plays the episodes."""
        states = jax.vmap(start_episode, (None, None, 0, 0))(self.env, 0, tasks, keys)
        played = self.play_slots(params, states, decoding)
        return played.record["response_lengths"], played.steps[None]


class MadeUpFormat:
    """Prompts of random tokens that grow from one length to another."""

    end_tokens = (END,)

    def __init__(self, vocabulary: int, turns: int, shortest: int, longest: int):
        self.prompt_limit, self._vocabulary = longest, vocabulary
        self._lengths = np.linspace(shortest, longest, turns).astype(int)

    def build(self, inputs) -> list[Prompt]:
        """Builds the prompts of some turns: a task always has the same ones."""
        return [Prompt(self.ids(int(each.observation), each.turn), pairs_dropped=0, tokens_cut=0) for each in inputs]

    def ids(self, task: int, turn: int) -> list[int]:
        """Returns token ids of a task's prompt at a turn; after the last turn a critic would ask for one more."""
        length = self._lengths[min(turn, len(self._lengths) - 1)]
        return np.random.default_rng((task, turn)).integers(1, self._vocabulary, length).tolist()

    def parse(self, ids) -> ParsedResponse:
        """Treats every response as an action."""
        return ParsedResponse("", "", True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    policies.add_arguments(parser)
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
    parser.add_argument("--equal", action="store_true", help="all answers have --longest tokens")


def run(args: argparse.Namespace) -> list[dict]:
    """Returns rows of name, value, unit, limit_share (of the fewest possible steps) and ratio (speed over lockstep's)."""
    if args.mean < 2 and not args.equal:
        raise ConfigError(f"--mean {args.mean}: must be 2 or more; for answers of one token give --longest 1 --equal")
    if args.shortest_prompt > args.longest_prompt:
        raise ConfigError(f"--shortest-prompt {args.shortest_prompt}: is above --longest-prompt {args.longest_prompt}")
    workload = policies.workload(args)
    policies.refuse(args, workload.model, [args.slots], args.longest_prompt + args.longest)
    ((spec, mesh),) = policies.meshes(args.mesh or "data=1", args.slots).items()
    model, B = workload.model, args.episodes
    text = MadeUpFormat(model.vocab_size, args.turns, args.shortest_prompt, args.longest_prompt)
    tasks, keys, groups = list(range(B)), jax.random.split(jax.random.key(1), B), np.arange(B)
    with jax.set_mesh(mesh):
        params = cast(initialize(model, 0, mesh), args.dtype)
        params = jax.jit(lambda params: _ends_at_random(params, 0.0 if args.equal else 1 / args.mean))(params)
        rollout = HostRollout(
            lambda: MadeUp(args.turns),
            text,
            {SHARED: network(model)},
            mesh,
            TextSettings(B, 0, args.longest, max(1, args.slots // mesh.shape["data"])),
        )
        lockstep = Lockstep(network(model), mesh, text, args)
        slots = {"history_length": 0, "decode_batch_size": max(1, args.slots // mesh.shape["data"])}
        program = functools.partial(MadeUpProgram, graphdefs={SHARED: network(model)}, **slots)
        compiled = jax.jit(on_shards(MadeUpProgram.lengths, program, MadeUpCompiled(args, model.vocab_size), mesh))
        times: dict[str, list[float]] = {"continuous": [], "compiled": [], "lockstep": []}
        for repeat in range(args.repeats + 1):  # the first round compiles
            began = time.perf_counter()
            episodes, report = rollout({SHARED: params}, tasks, keys, groups, Decoding())
            on_host = time.perf_counter()
            in_program = jax.device_get(compiled(None, {SHARED: params}, jnp.arange(B), keys, Decoding()))
            half = time.perf_counter()
            lengths = lockstep(params, tasks, keys)
            if repeat:
                times["continuous"].append(on_host - began)
                times["compiled"].append(half - on_host)
                times["lockstep"].append(time.perf_counter() - half)
        rollout.close()
    assert report is not None
    # Their lengths may differ if another shape rounds differently.
    found: dict[str, tuple[np.ndarray, float]] = {
        "continuous": (np.asarray(episodes.response_lengths), report.counts["decode_steps"]),
        "compiled": (in_program[0], float(in_program[1].max())),
        "lockstep": (lengths, lockstep.steps),
    }
    speed, excess = {}, {}
    for name, (lengths, steps) in found.items():
        speed[name] = [int(lengths.sum()) / seconds for seconds in times[name]]
        # No schedule takes fewer steps than the longest episode has tokens, nor than all tokens over the slots.
        # An answer's first token comes with its prompt.
        decoded = lengths - 1
        excess[name] = steps / max(1, int(decoded.sum(1).max()), math.ceil(decoded.sum() / args.slots))
    shape = f"{args.policy}, {args.dtype}, {B} episodes in {args.slots} slots, {spec}"
    said = {"continuous": f"tokens, {shape}", "compiled": "in one compiled program", "lockstep": "in lockstep"}
    rows = []
    for name, meaning in said.items():
        ratio = statistics.median(a / b for a, b in zip(speed[name], speed["lockstep"], strict=True))
        ours = ratio if name != "lockstep" else None
        rows.append(row(meaning, statistics.median(speed[name]), "tokens/s", 1 / excess[name], ours))
    for name, meaning in (said | {"continuous": ""}).items():
        rows.append(row(", ".join(filter(None, [meaning, "decode steps over the fewest possible"])), excess[name], "times"))
    return [
        *rows,
        row("slots that decode, in the mean", 100 * report.counts["slot_use"], "%"),
        row("answer, in the mean", float(episodes.response_lengths.mean()), "tokens"),
    ]


def _ends_at_random(params, probability: float):
    """Makes weights for which every token is END with this probability and otherwise any other one.

    A large equal component of all embeddings outweighs the layers' contributions in every hidden state; END's is a little
    larger.
    """
    table = params["embed_tokens"]["embedding"]
    V, D = table.shape
    size = 1e3  # large beside the output of random layers
    odds = math.log(probability * (V - 1) / (1 - probability)) if probability else -50.0
    hidden = math.sqrt(D)  # size of that component after the final norm
    head = jnp.zeros((V, D), table.dtype).at[:, 0].set(1.0)
    if "lm_head" in params:
        kernel = head.T.at[0, END].add(odds / hidden)
        params = params | {"lm_head": params["lm_head"] | {"kernel": kernel.astype(table.dtype)}}
        return params | {"embed_tokens": {"embedding": table.at[:, 0].set(size)}}
    return params | {"embed_tokens": {"embedding": (size * head).at[END, 0].add(odds / hidden)}}


class Lockstep:
    """Lockstep rollouts: `lockstep(params, tasks, keys)` plays turn by turn; lengths of all responses, i32[B, T].

    Attributes:
      steps: decoding steps of the latest call.
    """

    def __init__(self, graphdef, mesh, text: MadeUpFormat, args: argparse.Namespace):
        self._text, self._turns, self._slots = text, args.turns, args.slots
        self._blocks, self._sample = make_decode_blocks(graphdef), make_sampler(graphdef, mesh, args.longest, (END,))
        self._widths = buckets(args.longest_prompt, factor=2, smallest=128)

    def __call__(self, params, tasks: list[int], keys) -> np.ndarray:
        blocks, self.steps = self._blocks(params), 0
        lengths = np.zeros((len(tasks), self._turns), np.int32)
        for turn in range(self._turns):
            for begin in range(0, len(tasks), self._slots):
                rows = np.arange(begin, min(begin + self._slots, len(tasks)), dtype=np.int32)
                prompts = [self._text.ids(tasks[row], turn) for row in rows]
                width = next(width for width in self._widths if width >= len(prompts[0]))
                tokens = np.array([ids + [0] * (width - len(ids)) for ids in prompts], np.int32)
                some = np.array([len(ids) for ids in prompts], np.int32)
                out = self._sample(params, blocks, tokens, some, keys, rows, np.int32(turn), Decoding())
                lengths[rows, turn] = out.lengths
                self.steps += int(lengths[rows, turn].max()) - 1
        return lengths
