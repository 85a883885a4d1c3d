"""The policy that a run had after some of its iterations."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from hgpo_jax.analysis.dumps import read_config
from hgpo_jax.setup.build import build
from hgpo_jax.setup.job import Job
from hgpo_jax.trainer.checkpoint import Checkpoints
from hgpo_jax.trainer.loop import refusals, starting_params
from hgpo_jax.trainer.main import save_trained
from hgpo_jax.trainer.step import TrainState, make_train_step
from hgpo_jax.utils.errors import ConfigError


def best(folder: Path) -> int:
    """Returns the iterations of the checkpoint with the highest validation success. Raises ConfigError if none has one."""
    checkpoints = Checkpoints(folder / "checkpoints", read_config(folder).log, read_only=True)
    if (iteration := checkpoints.best()) is None:
        raise ConfigError(f"{folder}: no checkpoint has a validation success; log.keep_best and evaluation.every give it one")
    return iteration


def save(folder: Path, iteration: int, target: Path, mesh: str | None = None) -> dict[str, Path]:
    """Writes a run's policies after this many iterations, adapters merged; returns policy name -> folder.

    mesh: of the devices that read them; by default the run's.

    Raises ConfigError or RunError, in one line.
    """
    kept = sorted(int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdecimal())
    if iteration and iteration not in kept:
        there = ", ".join(map(str, kept)) or "none"
        raise ConfigError(f"{folder}: keeps no checkpoint of iteration {iteration}, but of {there}")
    job, _, state = restore(folder, iteration, mesh)
    params = job.merged_params(state.params, starting_params(job, folder) if job.adapted else state.params)
    with refusals():
        job.by_policy(functools.partial(save_trained, target), params)
    return {name: target / name for name in job.policies}


def restore(folder: Path, iteration: int, mesh: str | None = None) -> tuple[Job, Any, TrainState]:
    """Restores a run's (job, reference policy, training state) after this many iterations: from a checkpoint, or its start.

    mesh: as in `save`.
    """
    config = read_config(folder)
    if mesh is not None:
        config = config.model_copy(update={"mesh": mesh, "rollout": config.rollout.model_copy(update={"mesh": ""})})
    job = build(config)
    start = starting_params(job, folder)
    _, init = make_train_step(job)
    state = init(start)
    if iteration:
        checkpoints = Checkpoints(folder / "checkpoints", config.log, read_only=True)
        state = state.from_checkpoint(checkpoints.restore(iteration, state.to_checkpoint()))
        checkpoints.close()
    return job, job.reference_copy(start), state
