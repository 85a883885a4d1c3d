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

    cosine: to the true advantages, over all steps. gradient: `gradient_cosine`. scale: c. sign: share of the steps with a clear
    true advantage whose sign is right; an advantage of 0 counts half. bias2, variance: over the steps whose situation recurs in
    another batch; both are nan for a cosine of 0 or less, and where the true advantages of these steps are below their noise.
    recurs: the share of these steps.
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
        "gradient": gradient_cosine(advantages, snapshot),
        "bias2": float(bias2 / spread),
        "variance": float((mse - bias2) / spread),
        "sign": float(agrees[clear].mean()) if clear.any() else np.nan,
        "scale": scale,
        "recurs": float(recurs.mean()),
    }


def gradient_cosine(advantages: np.ndarray, snapshot: Snapshot) -> float:
    """Returns the cosine of a batch's policy gradients sum A grad log pi with these advantages f[B, T] and with the true ones.

    Products and squares are means over the batches, in the directions that the snapshot keeps; nan without those, or where the
    true gradients are below their noise. The noise of a state's value is in the advantages before and after it.
    """
    if "gradients" not in snapshot.arrays:
        return np.nan
    mask, gamma, products = snapshot["mask"], snapshot.about.gamma, []
    variances = value_variances(snapshot["standard_error"], gamma)
    for rows in snapshot.batches():
        steps = np.where(mask[rows][..., None], snapshot["gradients"][rows].astype(np.float64), 0.0)
        ours, true = (np.einsum("bt,btd->d", a[rows], steps) for a in (advantages, snapshot["true_advantages"]))
        of_values = gamma * np.pad(steps[:, :-1], ((0, 0), (1, 0), (0, 0))) - steps
        noise = np.einsum("bt,btd,btd->", variances[rows], of_values, of_values)
        products.append((ours @ true, ours @ ours, true @ true - noise))
    product, square, true_square = np.mean(products, axis=0)
    return float(product / np.sqrt(square * true_square)) if min(square, true_square) > 0 else np.nan


def value_variances(standard_error: np.ndarray, gamma: float) -> np.ndarray:
    """Returns the variance f64[B, T] of the value before each step, from the standard errors f[B, T] of its advantages.

    An advantage's is that value's plus gamma^2 times the next one's; nothing follows an episode's end.
    """
    squares = np.asarray(standard_error, np.float64) ** 2
    variances, later = np.zeros_like(squares), np.zeros(len(squares))
    for t in reversed(range(squares.shape[1])):
        later = variances[:, t] = np.maximum(squares[:, t] - gamma**2 * later, 0.0)
    return variances


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
