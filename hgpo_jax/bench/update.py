"""The update as training makes it, with random weights of any shape, against the machine's limits.

    python -m hgpo_jax.bench update --policy Qwen2.5-0.5B --layers 4 --rows 16 --tokens 512 --remat full --against transformers

PPO-clip of the response tokens, exact token mean over micro-batches, AdamW; no KL and no entropy bonus, which the
peer does not compute. Operations are those of one forward and one backward pass; recomputation by remat has a separate row.
With --lora adapters are trained beside frozen weights, which need no gradient: operations of two passes, not three.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import statistics
import time
from typing import Any

import jax
import numpy as np

from hgpo_jax.bench import limits, policies, profile
from hgpo_jax.bench.limits import GiB, row
from hgpo_jax.bench.plan import compiled_bytes
from hgpo_jax.config import LearnerConfig
from hgpo_jax.envs.cli import whole_number
from hgpo_jax.learner.algorithms import METHODS
from hgpo_jax.learner.batch import TrainingBatch
from hgpo_jax.learner.optimizer import make_optimizer
from hgpo_jax.learner.update import make_policy_loss, make_update
from hgpo_jax.policy import LoraConfig, initialize, lora
from hgpo_jax.policy.placement import shardings_like, storage_shardings
from hgpo_jax.utils.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    policies.add_arguments(parser)
    parser.add_argument("--rows", type=whole_number, default=16, help="decisions to learn from, in one optimizer step")
    parser.add_argument("--tokens", type=whole_number, default=512, help="tokens of each, prompt and response")
    parser.add_argument("--response", type=whole_number, help="of these, tokens of the response; default an eighth")
    parser.add_argument("--microbatch", type=whole_number, default=4, help="rows per device and gradient, the peer's too")
    parser.add_argument("--remat", choices=["none", "dots", "full"], default="none", help="as learner.remat; peer: full")
    parser.add_argument("--lora", type=whole_number, metavar="RANK", help="train adapters on every matrix; peer: peft's")
    parser.add_argument("--offload", action="store_true", help="the optimizer's moments lie in host memory between steps")
    profile.add_argument(parser)


def run(args: argparse.Namespace) -> list[dict]:
    """Returns rows of name, value, unit, limit_share (of the machine's, more is better), ratio (our speed to the peer's)."""
    model, peer = policies.workload(args).model, policies.load_peer(args.against)
    response = args.response or max(args.tokens // 8, 1)
    if response >= args.tokens:
        raise ConfigError(f"--response {response}: leaves no prompt of --tokens {args.tokens}")
    if args.lora and peer and importlib.util.find_spec("peft") is None:
        raise ConfigError("--lora: --against transformers needs peft; pip install 'hgpo_jax[parity]'")
    policies.refuse(args, model, [args.rows], args.tokens)
    config = LearnerConfig(
        remat=args.remat,
        minibatch_size=args.rows,
        microbatch_size=args.microbatch,
        kl_weight=0,
        entropy_weight=0,
        warmup_steps=0,
    )
    batch = random_batch(model.vocab_size, args.rows, args.tokens - response, response)
    rates = limits.Rates(policies.meshes(args.mesh, 0).values(), args.dtype)
    meshes = policies.meshes(args.mesh, args.rows)
    trained = dataclasses.replace(model, lora=LoraConfig(args.lora, alpha=2 * args.lora)) if args.lora else model
    steps = {name: OurUpdate(trained, config, mesh, batch, args.dtype, offload=args.offload) for name, mesh in meshes.items()}
    calls = dict(steps)
    if peer:
        ours = next(iter(steps.values()))
        theirs = peer.make_model(model, ours.frozen or ours.params, "float32")
        if ours.frozen:
            theirs = peer.with_adapters(theirs, trained, ours.params)
        calls["peer"] = peer.updater(theirs, batch, config, args.dtype)
    first = {name: call() for name, call in calls.items()}
    if peer:  # the same work: equal loss and gradient from equal weights
        tolerance = 1e-3 if args.dtype == "float32" else 0.05
        for name in steps:
            for what, value in first["peer"].items():
                np.testing.assert_allclose(first[name][what], value, rtol=tolerance, atol=1e-5, err_msg=f"{what}, {name}, peer")
    times = {name: statistics.median(values) for name, values in limits.alternate(calls, args.repeats).items()}
    rates.measure()
    best = min(steps, key=times.__getitem__)

    forward = limits.forward_flops(model, args.tokens - 1, response)
    again = forward - limits.forward_flops(dataclasses.replace(model, num_hidden_layers=1), args.tokens - 1, response)
    # The optimizer reads and writes weights and both moments in float32, and reads the gradient.
    touched = 7 * 4 * sum(math.prod(a.shape) for a in jax.tree.leaves(steps[best].params))
    passes = 2 if args.lora else 3
    limit = rates.seconds(touched, args.rows * passes * forward)
    rise = {name: limits.memory_rise(calls[name]) for name in calls if name in (best, "peer")}
    shape = f"{args.policy}, {model.num_hidden_layers} layers, {args.rows} x {args.tokens} tokens ({response} of response)"
    ratio = times["peer"] / times[best] if peer else None
    kind = (f", LoRA {args.lora}" if args.lora else "") + ("" if args.remat == "none" else f", remat {args.remat}")
    lines = [
        row(f"update, {shape}, {args.dtype}{kind}, {best}", times[best], "s", limit / times[best], ratio),
        row("tokens", args.rows * args.tokens / times[best], "tokens/s"),
    ]
    if args.remat == "full":
        share = rates.seconds(touched, args.rows * (passes * forward + again)) / times[best]
        lines.append(row("the same, counting what remat recomputes", times[best], "s", share))
    lines += [row(f"update on {name}", times[name], "s", limit / times[name]) for name in steps if name != best]
    return [
        *lines,
        row("compile", steps[best].compile_seconds, "s"),
        row("memory of the program with weights and optimizer", compiled_bytes(steps[best].compiled) / GiB, "GiB"),
        *limits.memory_rows("memory above weights and optimizer", rise, best),
        row("one [response tokens, vocabulary] float32 array", args.rows * response * model.vocab_size * 4 / GiB, "GiB"),
        *(profile.rows(args.profile, "update", steps[best], steps[best].compiled) if args.profile else []),
        *rates.rows(),
    ]


def random_batch(vocabulary: int, rows: int, prompt: int, response: int) -> TrainingBatch:
    """Makes decisions with random tokens, all of the same lengths, as if sampled by a uniform policy."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = dict(
        prompts=rng.integers(0, vocabulary, (rows, prompt)).astype(np.int32),
        prompt_lengths=np.full(rows, prompt, np.int32),
        responses=rng.integers(0, vocabulary, (rows, response)).astype(np.int32),
        response_lengths=np.full(rows, response, np.int32),
        old_logp=np.full((rows, response), -math.log(vocabulary), np.float32),
        advantages=rng.standard_normal(rows).astype(np.float32),
    )
    return TrainingBatch(**arrays)


class OurUpdate:
    """The compiled update of `learner.make_update` on a mesh, its weights and optimizer; each call is one step.

    params: the trained weights or, with `model.lora`, the adapters; `frozen`: then the weights, else None.
    """

    def __init__(self, model, config: LearnerConfig, mesh, batch: TrainingBatch, dtype: str, *, offload: bool = False):
        self._mesh = mesh
        optimizer = make_optimizer(config.lr, config.warmup_steps, config.grad_clip, weight_decay=config.weight_decay)
        loss = make_policy_loss(model, config, METHODS["hgpo"], 1.0)
        step = make_update(
            loss,
            optimizer,
            mesh,
            minibatch_size=config.minibatch_size,
            microbatch_size=config.microbatch_size,
            compute_dtype=dtype,
        )
        count = len(batch.advantages)
        with jax.set_mesh(mesh):
            self.params, self.frozen = initialize(dataclasses.replace(model, lora=None), 0, mesh), None
            if model.lora:
                self.params, self.frozen = lora.initialize(model, 0, mesh), self.params
            self._inputs = (self.frozen, batch, np.arange(count, dtype=np.int32), np.int32(count), np.float32(1))
            moments = jax.eval_shape(optimizer.init, self.params)
            stored = storage_shardings(moments, model, mesh, offload=offload)
            self._moments = jax.jit(optimizer.init, out_shardings=stored)(self.params)

            def with_storage(params, moments, *inputs):
                params, moments, stats = step(params, jax.device_put(moments, shardings_like(moments, model, mesh)), *inputs)
                return params, jax.device_put(moments, stored), stats

            lowered = jax.jit(with_storage, donate_argnums=(0, 1)).lower(self.params, self._moments, *self._inputs)
            began = time.perf_counter()
            self.compiled = lowered.compile()
            self.compile_seconds = time.perf_counter() - began

    def __call__(self) -> dict[str, float]:
        """Takes one step; returns {"loss", "grad_norm"} before it."""
        with jax.set_mesh(self._mesh):
            self.params, self._moments, stats = self.compiled(self.params, self._moments, *self._inputs)
        stats = jax.device_get(stats)
        return {"loss": float(stats["loss"]), "grad_norm": float(stats["grad_norm"])}
