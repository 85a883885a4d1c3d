"""Explanations of a plan's runs: estimators, and parts of HGPO, against true advantages of the runs' own iterations.

The iteration of a run after a given number of iterations is replayed from its checkpoint, with the true advantage of every step
(`hgpo_jax/analysis/true_advantages.py`). `PARTS` change one thing in HGPO each; the last is the best that a baseline can
do for returns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field

from hgpo_jax.advantages.gae import generalized_advantages
from hgpo_jax.analysis.dumps import Dump
from hgpo_jax.analysis.earlier_policies import restore
from hgpo_jax.analysis.true_advantages import true_advantages
from hgpo_jax.tables.advantage_errors import AS_RELEASED, CONTINUATIONS, ESTIMATORS, centred_advantages, errors
from hgpo_jax.tables.run_measurements import InRun, Numbers, require

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


class Measured(InRun):
    """The result of one cell. invalid: a share of the iteration's steps. numbers: `bias.errors`."""

    name = "truth"
    title = "Against true advantages in runs"
    note = "Mean over the runs ± standard error."
    about = "advantages against true ones"
    estimators = (*ESTIMATORS, *PARTS)
    apart = PARTS
    labels: ClassVar = {"cosine": "cosine", "mse": "mean square error, as a share of theirs"}
    invalid: float
    numbers: Annotated[Numbers, require(estimators, labels)] = Field(alias="errors")


def parts(dump: Dump, values: np.ndarray) -> dict[str, np.ndarray]:
    """Computes advantages f32[B, T] of PARTS, centred as in `bias.centred_advantages`.

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
    advantages = (
        np.asarray(dump.estimate("hgpo", **penalized).advantages),
        mean(weights * np.maximum(sizes - 1, 0)),
        mean(weights),
        bootstrapped_advantages(dump),
        np.where(e.mask, record.returns - values, 0),
    )
    return dict(zip(PARTS, advantages, strict=True))


def bootstrapped_advantages(dump: Dump) -> np.ndarray:
    """Computes GAE f32[B, T] with HGPO's own baseline, a step's return less its advantage, as the value."""
    e, record = dump.episodes, dump.estimate("hgpo", **OPTIONS)
    values = jnp.where(e.mask, record.returns - record.advantages, 0)
    return np.asarray(generalized_advantages(e.rewards, values, e.mask, dump.config.advantage.gamma, LAMBDA))


def measure(cell: str, folder: Path, iteration: int) -> Measured:
    """Replays a run's iteration from its checkpoint, or from its start, and measures it."""
    job, reference, state = restore(folder, iteration)
    params, config = job.rollout_params(state.params, reference), job.config
    tasks, *inputs = job.episode_inputs(iteration)
    e = jax.device_get(job.runner.rollout(params, tasks, *inputs).episodes)
    truth, other = (
        true_advantages(job, params, tasks, e, continuations=CONTINUATIONS, seed=2 * config.seed + i) for i in range(2)
    )
    dump = Dump(e, config, job.tokenizer, iteration=iteration)
    return Measured(
        cell=cell,
        iteration=iteration,
        success=float(np.mean(e.success)),
        invalid=float(np.mean(np.asarray(e.invalid)[e.mask])),
        errors=errors(centred_advantages(dump) | parts(dump, other.values), truth, e.mask),
    )
