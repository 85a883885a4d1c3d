"""Memory of a run on each device before anything is allocated, by arithmetic and by the real compiler, and its hours.

    python -m hgpo_jax.bench plan policy=Qwen/Qwen2.5-1.5B-Instruct --mesh fsdp=2 --chip h100-80g
    python -m hgpo_jax.bench plan --config alfworld_qwen2.5_1.5b --chip h100-80g --turns 20 --prompt 1000 --response 200
    python -m hgpo_jax.bench plan policy=Qwen/Qwen2.5-1.5B-Instruct --mesh fsdp=8 --compile v5e:2x4      needs .[tpu], no TPU

Hours are arithmetic over the chip's data sheet (bench/duration.py), for half of its rates, which is what iterations reach on
CPUs; environments and communication come on top.

`--compile` hands sampling and update to the TPU compiler with abstract weights, and reports its own count of memory and the
collectives in the compiled programs, by kind and bytes. ALFWorld with a language model is planned as it is sampled on the host,
which takes no games; with env.compiled=true and data=FOLDER the whole rollout is compiled, games included.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from hgpo_jax.bench import duration, limits
from hgpo_jax.config import Config, cli
from hgpo_jax.learner.algorithms import method_named
from hgpo_jax.learner.batch import TrainingBatch
from hgpo_jax.learner.optimizer import make_optimizer
from hgpo_jax.learner.update import aggregation, make_policy_loss, make_update
from hgpo_jax.policy import network, shapes, shardings
from hgpo_jax.policy.mesh import abstract_mesh, make_mesh
from hgpo_jax.policy.placement import shardings_like
from hgpo_jax.policy.source import load_tokenizer
from hgpo_jax.rollout.compiled_text import CompiledTextRollout
from hgpo_jax.rollout.environments import backend, environment, max_turns
from hgpo_jax.rollout.runners import TextRunner
from hgpo_jax.sampling.continuous_batching import SlotPrograms
from hgpo_jax.sampling.generate import Decoding, make_decode_blocks, make_sampler
from hgpo_jax.setup import memory
from hgpo_jax.utils.errors import ConfigError

TOPOLOGIES = {"v4": "tpu-v4", "v5e": "tpu-v5e", "v5p": "tpu-v5p", "v6e": "tpu-v6e"}
ELEMENT = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1, "s8": 1, "u8": 1}

COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cli.add_config_arguments(parser)
    parser.add_argument("--chip", choices=sorted(memory.CHIPS), help="device whose memory the plan must fit")
    for name, meaning in (("turns", "of an episode"), ("prompt", "tokens of a prompt"), ("response", "tokens of a response")):
        parser.add_argument(f"--{name}", type=cli.positive, metavar="MEAN", help=f"{meaning}, for the hours; default: the most")
    parser.add_argument("--compile", metavar="TOPOLOGY", help="TPU topology to compile for, as in v5e:2x4 or v5p:2x2x2")


def run(args: argparse.Namespace) -> list[dict]:
    """Returns rows of name, value (GiB) and limit_share (of the chip's memory)."""
    config = cli.load_config(args)
    if args.compile and args.chip:
        raise ConfigError(f"--chip {args.chip}: --compile {args.compile} says for which; leave out one")
    if args.compile and any(role.has_weights for role in config.roles.values()):
        raise ConfigError(f"--compile {args.compile}: compiles for one policy; leave out roles.*.policy and lora_rank")
    try:
        mesh, chip = _tpu_mesh(args.compile, config.mesh) if args.compile else (abstract_mesh(config.mesh), args.chip)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    limit = memory.CHIPS[chip] if chip else None
    try:
        workload = memory.workload_of(config, mesh)
        phases = memory.bytes_of_run(config, mesh)
    except ValueError as error:
        raise ConfigError(str(error)) from None

    def row(name, size, shared=False):
        share = size / limit if limit and shared else None
        return {"name": name, "value": size / memory.GiB, "unit": "GiB", "limit_share": share, "ratio": None}

    rows = [row(f"{phase}: {name}", size) for phase, parts in phases.items() for name, size in parts.items() if size]
    rows.append(row("peak on each device, planned", memory.peak(phases), shared=True))
    largest = memory.peak(phases)
    if args.compile:
        always = sum(phases["always"].values())
        for name, lower, beside in programs(config, mesh, workload):
            compiled = lower().compile()
            # The program's own inputs count as its arguments; everything else that lives at the same time is added.
            size = compiled_bytes(compiled) + beside(always)
            largest = max(largest, size)
            rows.append(row(f"{name}, compiled for {args.compile}", size, shared=True))
            for kind, total in sorted(collectives(compiled.as_text()).items()):
                rows.append(row(f"{name}: {kind}", total))
    if limit:
        memory.refuse_too_large(config, phases, largest, limit)
    return rows + (_hours(args, config, mesh, workload, chip) if chip else [])


def _hours(args: argparse.Namespace, config: Config, mesh, workload: memory.Workload, chip: str) -> list[dict]:
    """Returns rows of an iteration's parts at the chip's limits, and of the run at the fraction of these that is reached."""
    expected = args.turns or max_turns(config.env), args.prompt or workload.prompt, args.response or workload.response
    rates = duration.rates_of(chip, config.policy.compute_dtype)
    parts = duration.seconds_at_limits(config, mesh, workload, rates, *expected)
    hours = config.iterations * sum(parts.values()) / duration.REACHED / 3600
    rows = [limits.row(f"an iteration at the limits of {chip}: {name}", seconds, "s") for name, seconds in parts.items()]
    return [*rows, limits.row(f"{config.iterations} iterations at {duration.REACHED:.0%} of these limits", hours, "h")]


def compiled_bytes(compiled) -> int:
    """Returns the peak bytes on each device of a compiled program, by the compiler's own analysis."""
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


def collectives(text: str) -> dict[str, int]:
    """Returns the bytes that a compiled program's collectives produce on each device, by kind; those in loops count once."""
    totals: Counter = Counter()
    seen = set()
    for shape, kind, rest in re.findall(rf"= (.*?) ({COLLECTIVES})(?:-start)?\((.*)", text):
        # The TPU compiler writes a collective that overlaps other work several times, with one channel.
        channel = re.search(r"channel_id=(\d+)", rest)
        if channel and channel[1] in seen:
            continue
        seen.add(channel and channel[1])
        for element, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shape):
            totals[kind] += ELEMENT.get(element, 4) * math.prod(int(n) for n in sizes.split(",") if n)
    return dict(totals)


def _tpu_mesh(topology: str, spec: str):
    """Returns (mesh over the devices of a TPU topology, the chip's name)."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    if topology.partition(":")[0] not in TOPOLOGIES:
        raise ConfigError(f"--compile {topology}: expected one of {', '.join(TOPOLOGIES)} and its shape, as in v5e:2x4")
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # the plug-in is absent, or does not know the shape; its errors come from C++
        reason = " ".join(str(error).split())
        raise ConfigError(f"--compile {topology}: no TPU compiler for it (pip install 'hgpo_jax[tpu]'): {reason}") from None
    return make_mesh(spec, devices), TOPOLOGIES[topology.partition(":")[0]]


def programs(config: Config, mesh, workload: memory.Workload):
    """Yields (name, function that lowers it, bytes beside it as a function of the permanent ones) for sampling and update."""
    learner, policy, model = config.learner, config.policy, workload.model
    everywhere = NamedSharding(mesh, PartitionSpec())

    def array(shape, dtype=jnp.int32) -> Any:  # stands for a jax.Array
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    placements = shardings(model, mesh)
    placed = lambda dtype: jax.tree.map(  # noqa: E731
        lambda a, where: jax.ShapeDtypeStruct(a.shape, dtype, sharding=where), shapes(model), placements
    )
    params, compute = placed("float32"), placed(policy.compute_dtype)

    rows = workload.decode_batch * mesh.shape["data"]
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    key = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=everywhere)
    scalar, row, prompts = array(()), array((rows,)), array((rows, workload.prompt))

    def outputs(lowered):
        """Returns a program's outputs, with the shardings that the compiler chooses."""
        return jax.tree.map(
            lambda a, where: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where),
            lowered.out_info,
            lowered.compile().output_shardings,
        )

    def sampler():
        sample = make_sampler(network(model), mesh, workload.response, (0,))
        with jax.set_mesh(mesh):
            blocks = outputs(make_decode_blocks(network(model)).lower(compute))
            return sample.lower(compute, blocks, prompts, row, key, row, scalar, Decoding())

    def rollout():
        """Lowers a language model's whole rollout, including the games."""
        found, source = environment(config.env), policy.tokenizer or policy.source
        assert found.text is not None
        runner = TextRunner(config, found, *found.text(config), model, load_tokenizer(source, config.cache_dir), mesh)
        assert isinstance(runner.train, CompiledTextRollout)
        batch = config.rollout.prompt_groups * config.rollout.group_size
        episodes = jax.ShapeDtypeStruct((batch,), key.dtype, sharding=everywhere)
        with jax.set_mesh(mesh):
            return runner.train.lowered(compute, episodes, Decoding())

    slots = SlotPrograms(network(model), mesh, max_new=workload.response, end_tokens=(0,))

    def free_slots():
        return outputs(slots.lower("empty", compute, rows, workload.prompt + workload.response))

    def prefill():
        with jax.set_mesh(mesh):
            return slots.lower("prefill", compute, free_slots(), prompts, row, row, row, key, row, row, row, Decoding())

    def decode():
        with jax.set_mesh(mesh):
            blocks = outputs(slots.lower("decode_blocks", compute))
            free = jax.ShapeDtypeStruct((rows,), bool, sharding=everywhere)
            return slots.lower("decode", compute, blocks, free_slots(), free, row, scalar, Decoding())

    def update():
        optimizer = make_optimizer(learner.lr, learner.warmup_steps, learner.grad_clip, weight_decay=learner.weight_decay)
        method = method_named(config.method)
        loss = make_policy_loss(model, learner, method, config.rollout.temperature)
        step = make_update(
            loss,
            optimizer,
            mesh,
            minibatch_size=learner.minibatch_size,
            microbatch_size=learner.microbatch_size,
            per_token=aggregation(learner, method) == "token-mean",
            compute_dtype=policy.compute_dtype,
        )
        N, P, R = workload.steps, workload.prompt, workload.response
        batch = TrainingBatch(
            prompts=array((N, P)),
            prompt_lengths=array((N,)),
            responses=array((N, R)),
            response_lengths=array((N,)),
            old_logp=array((N, R), jnp.float32),
            advantages=array((N,), jnp.float32),
        )
        moments = jax.eval_shape(optimizer.init, params)
        opt_state = jax.tree.map(
            lambda a, where: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where),
            moments,
            shardings_like(moments, model, mesh),
        )
        with jax.set_mesh(mesh):
            return jax.jit(step, donate_argnums=(0, 1)).lower(
                params, opt_state, compute, batch, array((N,)), array(()), array((), jnp.float32)
            )

    # A sampler needs one copy of the weights; parameters, optimizer and reference are held beside it.
    size = sum(
        math.prod(where.shard_shape(a.shape)) * a.dtype.itemsize
        for a, where in zip(jax.tree.leaves(params), jax.tree.leaves(placements), strict=True)
    )
    waiting = lambda always: always - (size if policy.compute_dtype == "float32" else 0)  # noqa: E731
    if backend(config) == "compiled":
        samplers = [("sampler", sampler, waiting)]
    elif config.env.compiled:
        samplers = [("rollout", rollout, waiting)]
    else:
        blocks = memory.bytes_by_phase(config, mesh, workload)["sampling"]["weights by layer"]  # `prefill` does not use them
        samplers = [("prefill", prefill, lambda always: waiting(always) + blocks), ("decode", decode, waiting)]
    return [*samplers, ("update", update, lambda always: 0)]
