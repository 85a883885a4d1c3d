"""One iteration of the default run by phase: seconds, tokens/s, compile seconds and the share of the matmul rate.

The policy is freshly initialized, so every episode runs to its last turn: the most work that an iteration can have. The limit
is the rate of large matrix products in the dtype at work, on the same devices in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import parameters
from hgpo_jax.bench import policies, profile
from hgpo_jax.bench.limits import forward_flops, matmul_rate, row
from hgpo_jax.config import Config, cli
from hgpo_jax.envs.cli import whole_number
from hgpo_jax.learner.algorithms import method_named
from hgpo_jax.rollout.environments import backend, max_turns
from hgpo_jax.rollout.runners import CompiledRunner
from hgpo_jax.setup.job import Job, build
from hgpo_jax.trainer.metrics import rollout_metrics
from hgpo_jax.trainer.step import make_train_step, sample
from hgpo_jax.utils.errors import ConfigError

# Rows that the peer processes at a time in its update: the fastest of 32 to 1,024 with the default job on two cores.
PEER_MICROBATCH = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cli.add_config_arguments(parser)
    parser.add_argument("--repeats", type=whole_number, default=7, help="timed iterations, of which the median counts")
    policies.add_against(parser)
    profile.add_argument(parser)


def run(args: argparse.Namespace) -> list[dict]:
    """Returns rows of name, value, unit, limit_share (of the matmul rate, more is better), ratio (our speed to the peer's)."""
    config, peer = cli.load_config(args), policies.load_peer(args.against)
    if peer:
        refuse_unlike(config)
    if args.profile and backend(config) != "compiled":
        raise ConfigError(f"--profile {args.profile}: traces a compiled environment's iteration; leave it out")
    job = build(config)
    train_step, init = make_train_step(job)
    rate = matmul_rate(job.mesh, config.policy.compute_dtype)
    reference = jax.tree.map(jnp.copy, job.given_params)
    state = init(job.given_params)
    peer_iteration = make_peer(peer, job) if peer else None
    seconds: dict[str, list[float]] = {"rollout": [], "update": [], "peer rollout": [], "peer update": []}
    for iteration in range(args.repeats + 1):
        began = time.perf_counter()
        (episodes, _), sums, _ = sample(job, state.params, iteration)
        metrics = rollout_metrics(sums)  # waits for the rollout
        sampled = time.perf_counter()
        state, _ = jax.block_until_ready(train_step(state, reference, episodes, job.key(iteration, 1), 0.0))
        seconds["rollout"].append(sampled - began)
        seconds["update"].append(time.perf_counter() - sampled)
        if peer_iteration is not None:
            for name, value in zip(("peer rollout", "peer update"), peer_iteration(iteration), strict=True):
                seconds[name].append(value)
    first = {name: times.pop(0) for name, times in seconds.items() if times}
    rollout, update = (statistics.median(seconds[name]) for name in ("rollout", "update"))
    ratios: list[float | None] = [None] * 3
    if peer:
        theirs = [statistics.median(seconds[name]) for name in ("peer rollout", "peer update")]
        ratios = [theirs[0] / rollout, theirs[1] / update, sum(theirs) / (rollout + update)]
    steps, tokens = int(metrics["steps"]), int(metrics["tokens"])
    model, width = job.policy.config, episodes.prompts.shape[-1]
    answer = episodes.responses.shape[-1]
    decode = forward_flops(model, width + answer, width + answer) / (width + answer) * (answer - 1)
    rollout_flops = steps * (forward_flops(model, width, 1) + decode)
    # Backward counts twice, once with frozen weights; the reference policy and the correction once. A critic, which is never
    # frozen, predicts and learns.
    passes = (2 if config.lora.rank else 3) + bool(config.learner.kl_weight) + (config.learner.rollout_correction != "none")
    passes += 4 * bool(job.method.critic)
    update_flops = steps * passes * forward_flops(model, width + answer - 1, answer)
    shape = (
        f"{job.config.rollout.prompt_groups} x {job.config.rollout.group_size} episodes of {max_turns(job.config.env)} turns"
    )

    profiled = []
    if args.profile:
        assert isinstance(job.runner, CompiledRunner)
        inputs = state.params, *job.episode_inputs(0)
        play = job.runner.program.lower(*inputs).compile()
        profiled += profile.rows(args.profile, "rollout", lambda: play(*inputs), play)
        batch = state, reference, episodes, job.key(0, 1), jnp.float32(0)
        compiled = train_step.lower(*batch).compile()
        profiled += profile.rows(args.profile, "update", lambda: compiled(*batch), compiled)

    return [
        row(f"rollout, {shape}", rollout, "s", rollout_flops / rollout / rate, ratios[0]),
        row("update, the same steps", update, "s", update_flops / update / rate, ratios[1]),
        row("iteration", rollout + update, "s", (rollout_flops + update_flops) / (rollout + update) / rate, ratios[2]),
        row("prompt and response tokens", tokens / (rollout + update), "tokens/s"),
        row(f"matmul rate, {config.policy.compute_dtype} (limit)", rate / 1e9, "GFLOP/s"),
        row("compile rollout", first["rollout"] - rollout, "s"),
        row("compile update", first["update"] - update, "s"),
        *profiled,
    ]


def refuse_unlike(config: Config) -> None:
    """Raises ConfigError if the peer's loop does not implement the configuration."""
    method = method_named(config.method)
    if config.env.name != "household":
        raise ConfigError(f"env.name={config.env.name}: --against transformers plays the embedded household only")
    if method.loss != "clip" or method.critic or method.dynamic_sampling or config.lora.rank:
        raise ConfigError(f"method={config.method}: --against transformers has one clipped loss, without critic or adapters")
    if needed := parameters(method.estimator)[0]:
        raise ConfigError(f"method={config.method}: needs {', '.join(needed)}, which --against transformers does not have")
    if config.learner.rollout_correction != "none":
        raise ConfigError("--against transformers: its sampler is its trainer; leave out learner.rollout_correction")
    if config.learner.aggregate != "token-mean" or config.policy.compute_dtype != "float32":
        raise ConfigError("--against transformers: needs learner.aggregate=token-mean, policy.compute_dtype=float32")


def make_peer(peer, job: Job):
    """Builds the peer's iteration as a call: its number -> seconds of rollout and update."""
    model, frozen = (peer.make_model(job.policy.config, job.policy.params, "float32") for _ in range(2))
    optimizer = peer.make_optimizer(model, job.config.learner, lr=0.0)  # as above, the policy does not change

    def iteration(number: int) -> tuple[float, float]:
        began = time.perf_counter()
        episodes = peer.play(model, job, number)
        played = time.perf_counter()
        peer.learn(model, frozen, optimizer, job, episodes, PEER_MICROBATCH, number)
        return played - began, time.perf_counter() - played

    return iteration
