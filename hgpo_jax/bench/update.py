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
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hgpo_jax.bench import limits, policy_options
from hgpo_jax.bench.limits import row
from hgpo_jax.config import LearnerConfig
from hgpo_jax.envs.command_line import whole_number
from hgpo_jax.learner.batch import TrainingBatch
from hgpo_jax.learner.loss_table import aggregation
from hgpo_jax.learner.methods import METHODS, Method
from hgpo_jax.learner.objective import make_policy_loss
from hgpo_jax.learner.optimizer import frozen_parts, make_optimizer
from hgpo_jax.learner.update import make_update
from hgpo_jax.policy import LoraConfig, ModelConfig, initialize, lora
from hgpo_jax.policy.placement import shardings_like, storage_shardings
from hgpo_jax.utils.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    policy_options.add_arguments(parser)
    policy_options.add_against(parser)
    parser.add_argument("--rows", type=whole_number, default=16, help="decisions to learn from, in one optimizer step")
    parser.add_argument("--tokens", type=whole_number, default=512, help="tokens of each, prompt and response")
    parser.add_argument("--response", type=whole_number, help="of these, tokens of the response; default an eighth")
    parser.add_argument("--microbatch", type=whole_number, default=4, help="rows per device and gradient, the peer's too")
    parser.add_argument("--remat", choices=["none", "dots", "full"], default="none", help="as learner.remat; peer: full")
    parser.add_argument("--lora", type=whole_number, metavar="RANK", help="train adapters on every matrix; peer: peft's")
    parser.add_argument("--offload", action="store_true", help="the optimizer's moments lie in host memory between steps")


def run(args: argparse.Namespace) -> list[dict]:
    """Returns rows; a ratio is our speed to the peer's."""
    response = args.response or max(args.tokens // 8, 1)
    if response >= args.tokens:
        raise ConfigError(f"--response {response}: leaves no prompt of --tokens {args.tokens}")
    if args.lora and args.against and importlib.util.find_spec("peft") is None:
        raise ConfigError("--lora: --against transformers needs peft; pip install 'hgpo_jax[parity]'")
    model, _, mesh = policy_options.open_policy(args, [args.rows])
    peer = policy_options.load_peer(args.against)
    if args.lora:
        model = dataclasses.replace(model, lora=LoraConfig(args.lora, alpha=2 * args.lora))
    sizes = {"minibatch_size": args.rows, "microbatch_size": args.microbatch}
    config = LearnerConfig(remat=args.remat, kl_weight=0, entropy_weight=0, warmup_steps=0, **sizes)
    batch = random_batch(model.vocab_size, args.rows, args.tokens - response, response)
    rates = limits.measure_rates(mesh, args.dtype)
    ours = OurUpdate(model, config, mesh, batch, args.dtype, offload=args.offload)
    calls = {"ours": ours}
    if peer:
        calls["peer"] = peer.updater(peer.make_learner(model, ours.params, ours.frozen), batch, config, args.dtype)
        first = {name: call() for name, call in calls.items()}  # the same work: equal loss and gradient from equal weights
        for what, value in first["peer"].items():
            tolerance = 1e-3 if args.dtype == "float32" else 0.05
            np.testing.assert_allclose(first["ours"][what], value, rtol=tolerance, atol=1e-5, err_msg=what)
    seconds = {name: timing.median for name, timing in limits.timed(calls, args.repeats, args.profile).items()}

    forward = limits.forward_flops(model, args.tokens - 1, response)
    # The optimizer reads and writes weights and both moments in float32, and reads the gradient, once for each copy.
    touched = mesh.shape["data"] * 7 * 4 * sum(math.prod(a.shape) for a in jax.tree.leaves(ours.params))
    passes = (2 if args.lora else 3) * forward
    ratio = seconds["peer"] / seconds["ours"] if peer else None
    shape = f"{args.policy}, {model.num_hidden_layers} layers, {args.rows} x {args.tokens} tokens ({response} of response)"
    kind = (f", LoRA {args.lora}" if args.lora else "") + ("" if args.remat == "none" else f", remat {args.remat}")
    again = []
    if args.remat == "full":
        # The last block is not recomputed.
        most = (
            passes + forward - limits.forward_flops(dataclasses.replace(model, num_hidden_layers=1), args.tokens - 1, response)
        )
        share = rates.seconds(touched, args.rows * most) / seconds["ours"]
        again = [row("the same, counting what remat recomputes", seconds["ours"], "s", share)]
    share = rates.seconds(touched, args.rows * passes) / seconds["ours"]
    return [
        row(f"update, {shape}, {args.dtype}{kind}, {args.mesh}", seconds["ours"], "s", share, ratio),
        *again,
        row("tokens", args.rows * args.tokens / seconds["ours"], "tokens/s"),
        row("memory of the program with weights and optimizer", limits.compiled_bytes(ours.compiled) / limits.GiB, "GiB"),
        *limits.peak_rows(mesh),
        *rates.rows(args.dtype),
    ]


def random_batch(vocabulary: int, rows: int, prompt: int, response: int) -> TrainingBatch:
    """Makes decisions with random tokens, all of the same lengths, as if sampled by a uniform policy."""
    key = jax.random.key(0)
    return TrainingBatch(
        prompts=jax.random.randint(key, (rows, prompt), 0, vocabulary),
        prompt_lengths=jnp.full(rows, prompt),
        responses=jax.random.randint(key, (rows, response), 0, vocabulary),
        response_lengths=jnp.full(rows, response),
        old_logp=jnp.full((rows, response), -math.log(vocabulary)),
        advantages=jax.random.normal(key, (rows,)),
    )


def learner_step(
    model: ModelConfig, learner: LearnerConfig, method: Method, mesh, compute_dtype: str, temperature: float = 1.0
) -> tuple[Callable, optax.GradientTransformation]:
    """Builds the method's update of the policy, as in `learner.make_update`, and its optimizer."""
    optimizer = make_optimizer(
        learner.lr,
        learner.warmup_steps,
        learner.grad_clip,
        weight_decay=learner.weight_decay,
        frozen=frozen_parts(model),
    )
    step = make_update(
        make_policy_loss(model, learner, method, temperature),
        optimizer,
        mesh,
        minibatch_size=learner.minibatch_size,
        microbatch_size=learner.microbatch_size,
        per_token=aggregation(learner, method) == "token-mean",
        compute_dtype=compute_dtype,
    )
    return step, optimizer


class OurUpdate:
    """The compiled update of `learner.make_update` on a mesh, its weights and optimizer; each call is one step.

    params: the trained weights or, with `model.lora`, the adapters; `frozen`: then the weights, else None.
    """

    def __init__(self, model: ModelConfig, config: LearnerConfig, mesh, batch: TrainingBatch, dtype: str, *, offload: bool):
        step, optimizer = learner_step(model, config, METHODS["hgpo"], mesh, dtype)
        count = len(batch.advantages)
        with jax.set_mesh(mesh):
            self.params, self.frozen = initialize(dataclasses.replace(model, lora=None), 0, mesh), None
            if model.lora:
                self.params, self.frozen = lora.initialize(model, 0, mesh), self.params
            self._inputs = (self.frozen, batch, np.arange(count, dtype=np.int32), np.int32(count), np.float32(1))
            stored = storage_shardings(jax.eval_shape(optimizer.init, self.params), model, mesh, offload=offload)
            self._moments = jax.jit(optimizer.init, out_shardings=stored)(self.params)

            def with_storage(params, moments, *inputs):
                params, moments, stats = step(params, jax.device_put(moments, shardings_like(moments, model, mesh)), *inputs)
                return params, jax.device_put(moments, stored), stats

            jitted = jax.jit(with_storage, donate_argnums=(0, 1))
            self.compiled = jitted.lower(self.params, self._moments, *self._inputs).compile()

    def __call__(self) -> dict[str, float]:
        """Takes one step; returns {"loss", "grad_norm"} before it."""
        self.params, self._moments, stats = self.compiled(self.params, self._moments, *self._inputs)
        return {name: float(stats[name]) for name in ("loss", "grad_norm")}
