"""Scores of advantages against a snapshot's true ones. Plain NumPy.

An estimator's scale is free, because optimizers such as Adam ignore it. So errors are those of A / c - A_true, where
c = mean(A A_true) / mean(A_true^2): an unbiased estimator has c = 1, and noise does not change c. Shares of mean(A_true^2) make
settings comparable. Over all steps 1 / cosine^2 - 1 = bias^2 + variance.

The noise of the true advantages is subtracted from every square; products of two batches contain none.
"""

from __future__ import annotations

import numpy as np

from hgpo_jax.analysis import diagnostics
from hgpo_jax.credit.snapshot import Snapshot

CLEAR = 2.0  # standard errors from 0, from which on the sign of a true advantage counts


def score(advantages: np.ndarray, snapshot: Snapshot) -> dict[str, float]:
    """Scores advantages f[B, T] of all batches.

    cosine: to the true advantages, over all steps. scale: c. sign: share of the steps with a clear true advantage whose sign is
    right; an advantage of 0 counts half. bias2, variance: over the steps whose situation recurs in another batch; both are nan
    for a cosine of 0 or less, and where the true advantages of these steps are below their noise. recurs: the share of these
    steps.
    """
    mask = snapshot["mask"]
    estimated, true, noise = (
        np.asarray(a, np.float64)[mask] for a in (advantages, snapshot["true_advantages"], snapshot["standard_error"])
    )
    against = diagnostics.against_truth(advantages, snapshot["true_advantages"], snapshot["standard_error"], mask)
    scale = float(np.mean(estimated * true) / against["spread"]) if against["spread"] > 0 else np.nan
    clear = np.abs(true) > CLEAR * noise
    agrees = np.where(estimated == 0, 0.5, np.sign(estimated) == np.sign(true))
    batch = np.broadcast_to(snapshot["batch"][:, None], mask.shape)[mask]
    _, situation = np.unique(snapshot["situations"][mask], return_inverse=True)
    error = (estimated / scale if scale > 0 else np.nan) - true
    spread, recurs = shared_square(true, situation, batch)
    spread = spread if spread > 0 else np.nan
    bias2, _ = shared_square(error, situation, batch)
    mse = np.mean((error**2 - noise**2)[recurs]) if recurs.any() else np.nan
    return {
        "cosine": against["cosine"],
        "bias2": float(bias2 / spread),
        "variance": float((mse - bias2) / spread),
        "sign": float(agrees[clear].mean()) if clear.any() else np.nan,
        "scale": scale,
        "recurs": float(recurs.mean()),
    }


def shared_square(values: np.ndarray, situation: np.ndarray, batch: np.ndarray) -> tuple[float, np.ndarray]:
    """Estimates the mean square of the part of `values` that depends on the situation alone.

    It is the mean product of two steps in the same situation but different batches, whose noise is independent; a situation
    weighs as much as it has steps. Also returns which steps have a partner in another batch.
    """
    sums, counts = np.zeros((2, batch.max() + 1, situation.max() + 1))
    np.add.at(sums, (batch, situation), values)
    np.add.at(counts, (batch, situation), 1)
    pairs, products = (a.sum(0) ** 2 - (a**2).sum(0) for a in (counts, sums))
    recurs = pairs > 0
    if not recurs.any():
        return np.nan, recurs[situation]
    return float(np.average(products[recurs] / pairs[recurs], weights=counts.sum(0)[recurs])), recurs[situation]
