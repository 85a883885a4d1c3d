"""Environments: the compiled household, in resets and steps per second of a whole batch."""

from __future__ import annotations

import argparse
import statistics
import time

import jax

from envs.household import TASKS, Household
from envs.household.expert import random_action
from envs.household.world import ROOMS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=1024, help="episodes at once")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls, of which the median counts")


def run(args: argparse.Namespace) -> list[dict]:
    """Rows of name, value and unit."""
    env = Household(tasks=tuple(TASKS), rooms=tuple(ROOMS))
    keys = jax.random.split(jax.random.key(0), args.batch)
    reset, step = jax.jit(jax.vmap(env.reset)), jax.jit(jax.vmap(env.step))
    state, _ = reset(keys)
    actions = jax.jit(jax.vmap(lambda s, k: random_action(env, s, k)))(state, keys)
    rows = []
    for name, call in (("reset", lambda: reset(keys)), ("step", lambda: step(state, actions))):
        jax.block_until_ready(call())
        times = []
        for _ in range(args.repeats):
            began = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - began)
        rate = args.batch / statistics.median(times)
        rows.append({"name": f"household {name}, batch {args.batch:,}", "value": rate, "unit": f"{name}s/s"})
    return rows
