"""Snapshots whose true advantages are drawn, one for each situation."""

import numpy as np

from hgpo_jax.credit.snapshot import About, Snapshot

SITUATIONS = 30


def snapshot(seed=0, batches=4, groups=4, steps=5, noise=0.1, **about) -> tuple[Snapshot, np.ndarray]:
    """Draws a snapshot of prompt groups of 8, and the true advantages without the noise that the snapshot has."""
    rng = np.random.default_rng(seed)
    B = batches * groups * 8
    mask = np.arange(steps) < rng.integers(1, steps + 1, B)[:, None]

    def whole(high):
        return np.where(mask, rng.integers(0, high, mask.shape), 0).astype(np.int32)

    situations = whole(SITUATIONS)
    true = np.where(mask, rng.normal(size=SITUATIONS)[situations], 0)
    arrays = {
        "rewards": np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32),
        "mask": mask,
        "invalid": mask & False,
        **{name: whole(4) for name in ("states", "next_states", "actions", "lengths")},
        "agents": whole(1),
        "groups": (np.arange(B) // 8).astype(np.int32),
        "success": rng.random(B) < 0.5,
        "task": np.zeros(B, np.int32),
        "batch": (np.arange(B) // (8 * groups)).astype(np.int32),
        "situations": situations,
        "true_advantages": np.where(mask, true + noise * rng.normal(size=mask.shape), 0).astype(np.float32),
        "standard_error": np.where(mask, noise, 0).astype(np.float32),
        "true_values": np.zeros(mask.shape, np.float32),
    }
    fields = {
        "format": 1, "setting": "drawn", "level": 0.5, "success": 0.5, "seed": seed, "iteration": 3, "method": "hgpo",
        "environment": "none", "gamma": 0.9, "history_length": 2, "continuations": 100, "parameters": 1, "versions": {},
        "fields": {}, "run": "none", "prompt_groups": groups, "batches": batches,
        "signals": [],
    }  # fmt: skip
    return Snapshot(arrays, About(**fields | about)), true
