"""Explanations of a plan's runs: estimators, and parts of HGPO, against true advantages of the runs' own iterations.

The iteration of a run after a given number of iterations is replayed from its checkpoint, with the true advantage of every step
(`hgpo_jax/analysis/true_advantages.py`). `PARTS` change one thing in HGPO each; the last is the best that a baseline can
do for returns.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.advantages.returns import generalized_advantages
from hgpo_jax.analysis.dumps import Dump
from hgpo_jax.analysis.true_advantages import true_advantages
from hgpo_jax.tables.bias import AS_RELEASED, CONTINUATIONS, ESTIMATORS, centred, errors
from hgpo_jax.tables.in_runs import Kind, by_setting, heading, restored

K, LAMBDA = 2, 0.35  # for HGPO, and for bootstrapping, as in EB-TD
OPTIONS = AS_RELEASED | {"history_length": K, "normalize": "mean", "invalid_penalty": 0.0}
BOOTSTRAPPED = "HGPO, bootstrapped"
PARTS = (
    "HGPO, penalties in its returns",
    "HGPO, weights times peers",
    "HGPO, no level dropped",
    BOOTSTRAPPED,
    "return - true value",
)


class Measured(NamedTuple):
    """The result of one cell: earlier iterations; success and invalid, shares of episodes and of steps; `bias.errors`."""

    cell: str
    iteration: int
    success: float
    invalid: float
    errors: dict[str, dict[str, float]]


def parts(dump: Dump, values: np.ndarray) -> dict[str, np.ndarray]:
    """Computes advantages f32[B, T] of PARTS, centred as in `bias.centred`.

    values: f64[B, T], the true value of each step's state. Their noise is independent of that of the true advantages, and makes
    `return - true value` look a little worse than it is.
    """
    e, record = dump.episodes, dump.estimate("hgpo", **OPTIONS)
    apart, sizes, _ = map(np.asarray, record.by_level())
    weights = np.where(sizes > 0, np.arange(K + 1) + 2.0, 0.0)

    def mean(weights):
        total = weights.sum(-1)
        return (weights * apart).sum(-1) / np.where(total > 0, total, 1)

    penalized = OPTIONS | {"invalid_penalty": dump.config.advantage.invalid_penalty}
    found = (
        np.asarray(dump.estimate("hgpo", **penalized).advantages),
        mean(weights * np.maximum(sizes - 1, 0)),
        mean(weights),
        bootstrapped(dump),
        np.where(e.mask, record.returns - values, 0),
    )
    return dict(zip(PARTS, found, strict=True))


def bootstrapped(dump: Dump) -> np.ndarray:
    """Computes GAE f32[B, T] with HGPO's own baseline, a step's return less its advantage, as the value."""
    e, record = dump.episodes, dump.estimate("hgpo", **OPTIONS)
    values = jnp.where(e.mask, record.returns - record.advantages, 0)
    return np.asarray(generalized_advantages(e.rewards, values, e.mask, dump.config.advantage.gamma, LAMBDA))


def measure(cell: str, folder: Path, iteration: int) -> Measured:
    """Replays a run's iteration from its checkpoint, or from its start, and measures it."""
    job, reference, state = restored(folder, iteration)
    params, config = job.rollout_params(state.params, reference), job.config
    tasks, *inputs = job.episode_inputs(iteration)
    e = jax.device_get(job.runner.rollout(params, tasks, *inputs).episodes)
    truth, other = (
        true_advantages(job, params, tasks, e, continuations=CONTINUATIONS, seed=2 * config.seed + i) for i in range(2)
    )
    dump = Dump(e, config, job.tokenizer, iteration=iteration)
    found = errors(centred(dump) | parts(dump, other.values), truth, e.mask)
    return Measured(cell, iteration, float(np.mean(e.success)), float(np.mean(np.asarray(e.invalid)[e.mask])), found)


def parse(kept: dict) -> Measured:
    one = Measured(**kept)
    numbers = [one.iteration, one.success, one.invalid]
    numbers += [one.errors[name][what] for name in (*ESTIMATORS, *PARTS) for what in ("cosine", "mse")]
    if not isinstance(one.cell, str) or not all(isinstance(x, int | float) for x in numbers):
        raise ValueError("numbers are missing")
    return one


def lines(found: list[Measured]) -> list[str]:
    """Formats cosine and mean square error by estimator, for each setting and iteration: mean and standard error."""
    lines: list[str] = []
    for (setting, iteration), ours in by_setting(found).items():
        lines += ["", heading(setting, iteration, ours), "", "| | cosine | mean square error |", "|---|---|---|"]
        for name in (*ESTIMATORS, *PARTS):
            shown = [name]
            for what in ("cosine", "mse"):
                values = np.array([one.errors[name][what] for one in ours])
                error = f" ± {values.std(ddof=1) / np.sqrt(len(values)):.3f}" if len(values) > 1 else ""
                shown.append(f"{values.mean():.3f}{error}")
            lines.append("| " + " | ".join(shown) + " |")
    return lines[1:]


KIND = Kind("truth", "Against true advantages in runs", "Mean over the runs ± standard error.", parse, lines)
