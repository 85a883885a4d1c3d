"""Times of whole `estimate(...)` calls, checks included: `python -m hgpo_jax.bench advantages`.

The peer is the same computation as dictionaries of contexts and a loop over groups, the way PyTorch training code does
it on the host; it is timed in the same run and its result compared.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hgpo_jax.advantages import ESTIMATORS, estimate, parameters
from hgpo_jax.bench.limits import row
from hgpo_jax.envs.cli import whole_number

GROUP_SIZE = 8
STEPS = 50
# Milliseconds for HGPO with K = 2, by trajectories of 50 steps, on two CPU cores.
LIMITS = {128: 4.0, 20_000: 2000.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=whole_number, default=50, help="timed calls of 128 x 50 steps; of larger ones 5")


def run(args: argparse.Namespace) -> list[dict]:
    """Returns rows of name, value, unit, limit_share (of the limit, less is better), ratio (peer's time over ours), or None."""
    rows, medians = [], {}
    for trajectories in (128, 1280, 20_000):
        batch = make_batch(trajectories)
        on_device = {key: jax.device_put(value) for key, value in batch.items()}
        repeats = args.repeats if trajectories == 128 else 5
        started = time.perf_counter()
        record = jax.block_until_ready(estimate("hgpo", **on_device))
        compiled = time.perf_counter() - started
        milliseconds = 1e3 * median_time(functools.partial(estimate, "hgpo", **on_device), repeats)
        ratio = None
        if trajectories < 20_000:
            peer_milliseconds = 1e3 * median_time(functools.partial(dictionaries, **batch), 3)
            ratio = peer_milliseconds / milliseconds
            np.testing.assert_allclose(record.advantages, dictionaries(**batch), rtol=1e-3, atol=1e-4)
        limit = LIMITS.get(trajectories)
        name = f"hgpo K=2, {trajectories:,} x {STEPS}"
        rows.append(row(name, milliseconds, "ms", limit and milliseconds / limit, ratio))
        rows.append(row(f"{name}, first call", compiled, "s"))
        medians[trajectories * STEPS] = milliseconds
    few, many = min(medians), max(medians)
    growth = medians[many] / medians[few] / (many * math.log(many) / (few * math.log(few)))
    rows.append(row(f"growth from {few:,} to {many:,} steps", growth, "times N log N"))
    batch = make_batch(128)
    further = {"values": batch["rewards"], "next_states": batch["states"], "agents": batch["states"] % 2}
    further["actions"], further["switches"] = batch["states"] % 3, batch["states"] % 4 == 0
    further |= dict.fromkeys(("high_values", "low_values", "term_values"), batch["rewards"])
    further["success"] = batch["rewards"].max(axis=1) > 0
    further["final_values"] = batch["rewards"][:, 0]
    for name in ESTIMATORS:
        arrays = {**batch, **{key: further[key] for key in parameters(name)[0]}}
        on_device = {key: jax.device_put(value) for key, value in arrays.items()}
        jax.block_until_ready(estimate(name, **on_device))
        milliseconds = 1e3 * median_time(functools.partial(estimate, name, **on_device), args.repeats)
        rows.append(row(f"{name}, defaults, 128 x {STEPS}", milliseconds, "ms"))
    return rows


def median_time(call: Callable[[], object], repeats: int) -> float:
    """Returns the seconds of the median call, including the wait for its result."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def make_batch(trajectories: int) -> dict[str, Any]:
    """Makes trajectories of 10 to 50 steps, half of them successful; few states are common and many rare, as in a house."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(STEPS // 5, STEPS + 1, trajectories)
    rewards = np.zeros((trajectories, STEPS), np.float32)
    rewards[np.arange(trajectories), lengths - 1] = 10.0 * (rng.random(trajectories) < 0.5)
    return {
        "rewards": rewards,
        "mask": np.arange(STEPS) < lengths[:, None],
        "states": rng.geometric(0.15, (trajectories, STEPS)).astype(np.int32),
        "groups": (np.arange(trajectories) // GROUP_SIZE).astype(np.int32),
    }


def dictionaries(
    rewards: np.ndarray, mask: np.ndarray, states: np.ndarray, groups: np.ndarray, history: int = 2, gamma: float = 0.95
) -> np.ndarray:
    """Computes HGPO with the defaults of `hgpo` and no invalid actions: one dictionary per level, one NumPy call per group."""
    returns = np.zeros(rewards.shape)
    later = np.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        later = rewards[:, t] + gamma * later
        returns[:, t] = later
    total, weights = np.zeros(rewards.shape), np.zeros(rewards.shape)
    for k in range(history + 1):
        members = defaultdict(list)
        for b, length in enumerate(mask.sum(axis=1)):
            path, group = states[b].tolist(), int(groups[b])
            for t in range(k, length):
                members[group, *path[t - k : t + 1]].append((b, t))
        for steps in members.values():
            if len(steps) > 1:
                index = tuple(np.array(steps).T)
                values = returns[index]
                if values.max() > values.min():
                    items = (values - values.mean()) / (values.std() + 1e-6)
                    total[index] += (k + 2) * items
                    weights[index] += (k + 2) * (items != 0)
    return total / (weights + 1e-6)
