"""The premises of hierarchical groups, measured on a batch: peers, group sizes, bias and variance.

Plain NumPy functions on the host, for notebooks and metrics: arrays in, numbers out. B trajectories of at most T steps,
`mask` bool[B, T] a prefix of every row. The Oracle group of a step holds the steps with the same full history: the same
prompt group and the same observations from the first to this one. Only its members were in truly the same situation,
but few steps have a peer there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def peer_share(level_sizes: ArrayLike, mask: ArrayLike) -> np.ndarray:
    """Returns f64[L], the share of steps at each level that have a peer, that is a group of two or more.

    level_sizes: i32[B, T, L] as in the record of `hgpo_jax.advantages.estimate`, or [B, T, 1] from `oracle_sizes`.
    A step without that level (t < k) has no peer there. All zeros for a batch without steps.
    """
    sizes = np.asarray(level_sizes)[np.asarray(mask)]
    return (sizes > 1).mean(axis=0) if len(sizes) else np.zeros(sizes.shape[-1])


def group_sizes(level_sizes: ArrayLike, mask: ArrayLike) -> list[dict[int, int]]:
    """Returns, for each level, the number of groups by group size, sizes ascending."""
    sizes = np.asarray(level_sizes)[np.asarray(mask)]
    distribution = []
    for column in sizes.T:
        numbers, steps = np.unique(column[column > 0], return_counts=True)
        # Each member of a group of n counts it once.
        distribution.append({int(n): int(count // n) for n, count in zip(numbers, steps, strict=True)})
    return distribution


def oracle_groups(states: ArrayLike, mask: ArrayLike, groups: ArrayLike) -> np.ndarray:
    """Returns dense ids of the Oracle groups, i64[B, T]; -1 where no step happened.

    states i32[B, T], groups i32[B]. Two trajectories share a history until they diverge, so one pass over time refines the
    prompt groups observation by observation.
    """
    states, mask = np.asarray(states), np.asarray(mask)
    history, ids, num_groups = np.asarray(groups, np.int64), np.full(mask.shape, -1, np.int64), 0
    for t in range(mask.shape[1]):
        alive = mask[:, t]
        if not alive.any():
            break
        pairs = np.stack([history[alive], states[alive, t]], axis=1)
        unique, index = np.unique(pairs, axis=0, return_inverse=True)
        ids[alive, t] = index.ravel() + num_groups
        history = ids[:, t]
        num_groups += len(unique)
    return ids


def oracle_sizes(ids: np.ndarray) -> np.ndarray:
    """Returns the members of each step's Oracle group, i64[B, T, 1]; 0 where no step happened."""
    happened = ids >= 0
    sizes = np.zeros(ids.shape, np.int64)
    sizes[happened] = np.bincount(ids[happened])[ids[happened]]
    return sizes[..., None]


def against_oracle(advantages: ArrayLike, returns: ArrayLike, ids: np.ndarray) -> dict[str, float]:
    """Computes the error of an estimator's advantages against the Oracle groups', over the steps with an Oracle peer.

    advantages: f32[B, T], with `normalize="mean"`, because the scales must agree. returns: f32[B, T] as in the record of
    `hgpo`. ids: from `oracle_groups`. The Oracle's advantage is the return minus the mean of its group.
    The error e = A - A_oracle is split by Oracle group: the part that a group's members share is bias, the rest is variance.
      steps: steps with an Oracle peer, the ones counted.
      bias: root of the mean square of the group means of e. variance: mean square of e about its group's mean. The means of
        few members hold some of the members' noise and all of the Oracle's, so that a bias is never 0, and compares estimators.
      mse: mean square of e, which is bias^2 + variance.
    All but `steps` are nan if no step has an Oracle peer.
    """
    advantages, returns = np.asarray(advantages, np.float64), np.asarray(returns, np.float64)
    counted = oracle_sizes(ids)[..., 0] > 1
    if not counted.any():
        return {"steps": 0, "bias": np.nan, "variance": np.nan, "mse": np.nan}
    _, group = np.unique(ids[counted], return_inverse=True)
    size = np.bincount(group)

    def group_mean(values):
        return (np.bincount(group, values) / size)[group]

    error = advantages[counted] - (returns[counted] - group_mean(returns[counted]))
    shared = group_mean(error)
    return {
        "steps": int(counted.sum()),
        "bias": float(np.sqrt(np.mean(shared**2))),
        "variance": float(np.mean((error - shared) ** 2)),
        "mse": float(np.mean(error**2)),
    }


def against_truth(advantages: ArrayLike, truth: ArrayLike, standard_error: ArrayLike, mask: ArrayLike) -> dict[str, float]:
    """Computes the error of an estimator's advantages against true ones with known noise, over all steps.

    advantages: f32[B, T], with `normalize="mean"` and no penalty, because the scales must agree. truth, standard_error:
    f64[B, T] of `true_advantages`, from samples that the estimator has not seen.
      mse: mean square of A - A_true. cosine: of both as vectors. spread: mean square of A_true.
    The expected contribution of the truth's noise is subtracted from each; with too few continuations the rest may be negative,
    and the cosine is nan.
    """
    mask = np.asarray(mask)
    estimated, true, noise = (np.asarray(a, np.float64)[mask] for a in (advantages, truth, standard_error))
    if not len(estimated):
        return {"mse": np.nan, "cosine": np.nan, "spread": np.nan}
    spread = float(np.mean(true**2) - np.mean(noise**2))
    scale = np.sqrt(max(np.mean(estimated**2) * spread, 0.0))
    return {
        "mse": float(np.mean((estimated - true) ** 2) - np.mean(noise**2)),
        "cosine": float(np.mean(estimated * true) / scale) if scale > 0 else np.nan,
        "spread": spread,
    }
