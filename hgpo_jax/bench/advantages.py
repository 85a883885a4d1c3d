"""Times of whole `estimate("hgpo", ...)` calls, checks included: `python -m hgpo_jax.bench advantages`.

The peer is the same computation as dictionaries of contexts and a loop over groups, the way PyTorch training code does
it on the host; it is timed in the same run and its result compared.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections import defaultdict
from typing import Any

import jax
import numpy as np

from hgpo_jax.advantages import estimate
from hgpo_jax.bench.limits import row, timed
from hgpo_jax.envs.command_line import whole_number

GROUP_SIZE, STEPS = 8, 50
TRAJECTORIES = (128, 1280, 20_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=whole_number, default=20, help="timed calls, of which the median counts")


def run(args: argparse.Namespace) -> list[dict]:
    """Returns rows; a ratio is the peer's time over ours. The peer takes too long for the most trajectories."""
    rows, medians = [], []
    for trajectories in TRAJECTORIES:
        batch = make_batch(trajectories)
        ours = functools.partial(estimate, "hgpo", **jax.device_put(batch))
        median, ratio = timed({"ours": ours}, args.repeats)["ours"].median, None
        if trajectories < TRAJECTORIES[-1]:
            ratio = timed({"peer": functools.partial(dictionaries, **batch)}, 3)["peer"].median / median
            np.testing.assert_allclose(ours().advantages, dictionaries(**batch), rtol=1e-3, atol=1e-4)
        rows.append(row(f"hgpo K=2, {trajectories:,} x {STEPS}", 1e3 * median, "ms", ratio=ratio))
        medians.append(median)
    few, many = TRAJECTORIES[0] * STEPS, TRAJECTORIES[-1] * STEPS
    growth = medians[-1] / medians[0] / (many * math.log(many) / (few * math.log(few)))
    return [*rows, row(f"growth from {few:,} to {many:,} steps", growth, "times N log N")]


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
