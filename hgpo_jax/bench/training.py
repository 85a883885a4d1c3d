"""One iteration of the main job by phase: seconds, tokens/s, compile seconds and the share of the matmul rate.

The policy is freshly initialized, so every episode runs to its last turn: the most work that an iteration can hold. The
limit is the rate of large float32 matrix products on the same devices in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from hgpo_jax import cli
from hgpo_jax.bench.limits import forward_flops, matmul_rate, row
from hgpo_jax.iteration import collect, make_learn
from hgpo_jax.job import build


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cli.add_config_arguments(parser)
    parser.add_argument("--repeats", type=int, default=7, help="timed iterations, of which the median counts")


def run(args: argparse.Namespace) -> list[dict]:
    """Rows of name, value, unit, limit_share (of the matmul rate, more is better) and ratio (None: no peer)."""
    job = build(cli.load_config(args))
    learn, init = make_learn(job)
    rate = matmul_rate(job.mesh)
    reference = jax.tree.map(jnp.copy, job.policy.params)
    state = init(job.policy.params)
    seconds = {"rollout": [], "update": []}
    for iteration in range(args.repeats + 1):
        began = time.perf_counter()
        episodes, played = collect(job, state["params"], iteration)
        sampled = time.perf_counter()
        state, _ = jax.block_until_ready(learn(state, reference, episodes, job.key(iteration, 1), 0.0))
        seconds["rollout"].append(sampled - began)
        seconds["update"].append(time.perf_counter() - sampled)
    first = {name: times.pop(0) for name, times in seconds.items()}
    rollout, update = (statistics.median(seconds[name]) for name in ("rollout", "update"))
    steps, tokens = int(played["steps"]), int(played["tokens"])
    model, width = job.policy.config, episodes.prompts.shape[-1]
    answer = episodes.responses.shape[-1]
    decode = forward_flops(model, width + answer, width + answer) / (width + answer) * (answer - 1)
    rollout_flops = steps * (forward_flops(model, width, 1) + decode)
    passes = 4 if job.config.learner.kl_weight else 3  # backward counts twice; the reference policy once
    update_flops = steps * passes * forward_flops(model, width + answer - 1, answer)
    shape = (
        f"{job.config.rollout.prompt_groups} x {job.config.rollout.group_size} episodes of {job.config.env.max_turns} turns"
    )

    return [
        row(f"rollout, {shape}", rollout, "s", rollout_flops / rollout / rate),
        row("update, the same steps", update, "s", update_flops / update / rate),
        row("iteration", rollout + update, "s", (rollout_flops + update_flops) / (rollout + update) / rate),
        row("prompt and response tokens", tokens / (rollout + update), "tokens/s"),
        row("matmul rate (limit)", rate / 1e9, "GFLOP/s"),
        row("compile rollout", first["rollout"] - rollout, "s"),
        row("compile update", first["update"] - update, "s"),
    ]
