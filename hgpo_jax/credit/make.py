"""Makes snapshots of a run's policy at the checkpoints whose success is nearest to some levels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np

from hgpo_jax.analysis.dumps import read_config
from hgpo_jax.analysis.earlier_policies import restore
from hgpo_jax.analysis.true_advantages import true_advantages
from hgpo_jax.config import Config
from hgpo_jax.credit.gradients import projections
from hgpo_jax.credit.snapshot import FORMAT, KINDS, About, Snapshot, load
from hgpo_jax.learner.methods import AVAILABLE_ARRAYS, method_named
from hgpo_jax.rollout.backend import backend, role_names
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.setup.build import build
from hgpo_jax.setup.job import MAX_TRIES, Job
from hgpo_jax.setup.memory import configs_by_policy
from hgpo_jax.trainer.metrics import read_metrics
from hgpo_jax.trainer.provenance import outside_code
from hgpo_jax.trainer.resume import free_to_change
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.progress import say

DIRECTIONS = 128
FARTHEST = 0.1  # success that a checkpoint may be away from its level
FIRST = 2_000_000  # number of the first batch, which chooses tasks and random keys; far from those of iterations
# Fields that say where a run's files are; a snapshot keeps nothing of the machine that made it.
PLACES = {"run_dir": True, "cache_dir": True, "name": True, "env": {"data"}, "policy": {"source", "tokenizer"}}


def success_by_iteration(folder: Path) -> dict[int, float]:
    """Returns the success of the policies that can be restored, in the iteration that they sampled, by iterations done.

    Raises ConfigError if the run has not learned yet.
    """
    success = {row["iteration"]: row["success"] for row in read_metrics(folder)}
    if not success:
        raise ConfigError(f"{folder}: the run has not finished an iteration")
    kept = {int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdecimal()} | {0}
    return {iteration: success[iteration] for iteration in sorted(kept) if iteration in success}


class NeverNear(ConfigError):
    """A run's success was at no checkpoint near a level."""


def nearest(folder: Path, level: float) -> int:
    """Returns the iterations after which a run's success was nearest to a level. Raises NeverNear."""
    success = success_by_iteration(folder)
    iteration = min(success, key=lambda i: abs(success[i] - level))
    if abs(success[iteration] - level) > FARTHEST:
        raise NeverNear(
            f"{folder}: no checkpoint has a success near {level:.0%}, the nearest {success[iteration]:.0%}; "
            "log.checkpoint_every and keep_checkpoints keep more, cloning.stop_at begins lower, iterations goes on longer"
        )
    return iteration


def make(
    run: Path,
    file: Path,
    setting: str,
    level: float,
    *,
    groups: int,
    batches: int,
    continuations: int,
    directions: int | None = None,
) -> None:
    """Writes a snapshot of a run, unless the same one is there already. Raises ConfigError, NeverNear for a level.

    directions: of its gradients; None: DIRECTIONS, or what a snapshot that is there has.
    """
    config = read_config(run)
    refuse(config, run)
    plan = {"run": digest(config), "setting": setting, "level": level}
    plan |= {"prompt_groups": groups, "batches": batches, "continuations": continuations}
    if file.exists():
        refuse_another(file, plan, directions)
        say(f"{file}: is there")
        return
    directions = DIRECTIONS if directions is None else directions
    iteration = nearest(run, level)
    numbers = batch_numbers(config, iteration, groups, batches)
    job, reference, state = restore(run, iteration)
    rollout = config.rollout.model_copy(update={"prompt_groups": groups})
    wide = build(config.model_copy(update={"rollout": rollout}), job.mesh)
    params = job.rollout_params(state.params, reference)

    def gradients(e: Episodes, number: int) -> np.ndarray:
        return projections(wide, state.params, reference, e, jax.random.key(number), directions)

    arrays = sample(wide, params, numbers, continuations, gradients if directions else None)
    about = About(
        **plan,
        format=FORMAT,
        success=float(arrays["success"].mean()),
        seed=config.seed,
        iteration=iteration,
        method=without_folders(config.method),
        environment=without_folders(config.env.name),
        gamma=config.advantage.gamma,
        history_length=config.rollout.history_length,
        parameters=sum(a.size for a in jax.tree.leaves(job.given_params)),
        signals=list(wide.signals),
        gradient_seeds=tuple(numbers) if directions else (),
        versions={name: version(name) for name in ("hgpo_jax", "jax", "numpy")},
        fields=learned_with(config),
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    Snapshot(arrays, about).save(file)
    say(f"{file}: {about.success:.0%} success after {iteration} iterations, {arrays['mask'].sum()} steps")


def refuse(config: Config, run: Path) -> None:
    """Raises ConfigError for a run that no snapshot can be made of."""
    if backend(config) != "compiled":
        raise ConfigError(f"{run}: env.name={config.env.name}: a snapshot needs an environment compiled with the policy")
    if config.reward.source:
        raise ConfigError(f"{run}: learned from reward.source, and a snapshot holds the environment's rewards alone")
    if config.rollout.group_size < 2 or len(configs_by_policy(config)) > 1:
        raise ConfigError(f"{run}: a snapshot needs one policy for all roles, and rollout.group_size of 2 or more")


def refuse_another(file: Path, plan: dict, directions: int | None) -> None:
    """Raises ConfigError if a file's snapshot is not the one that was planned, or lacks gradients in that many directions."""
    snapshot = load(file)
    about, gradients = snapshot.about, snapshot.arrays.get("gradients")
    differ = [name for name, value in plan.items() if getattr(about, name) != value]
    if differ:
        what = "another run's snapshot" if "run" in differ else f"a snapshot with {differ[0]}={getattr(about, differ[0])}"
        raise ConfigError(f"{file}: holds {what}; give --setting or another DIR")
    there = 0 if gradients is None else gradients.shape[-1]
    if directions not in (None, 0, there):
        raise ConfigError(f"{file}: --directions {directions}: its gradients have {there}; give that, or another DIR")


def digest(config: Config) -> str:
    """Returns a digest of the fields that affect learning, and of the user's code that they name, as it is now.

    Equal ones and an equal seed make the same run, if `iterations` sets no slope of the learning rate. Not covered: what that
    code imports, and this library.
    """
    excluded: dict = {"name": True}
    for name in free_to_change(config):
        section, _, field = name.partition(".")
        excluded[section] = excluded.get(section, set()) | {field} if field else True
    fields = config.model_dump(mode="json", exclude_defaults=True, exclude=excluded)
    fields = {name: value for name, value in fields.items() if value != {}}  # a section without the others
    if code := {name: (about["sha256"], about["version"]) for name, about in outside_code(config).items()}:
        fields["code"] = code
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def batch_numbers(config: Config, iteration: int, groups: int, batches: int) -> range:
    """Returns a number for each batch, as `Job.episode_inputs` takes them.

    In all of them the first role of a team would learn: for another one, the members of a group would share their first turn's
    key. Raises ConfigError where the numbers of tasks would leave 32 bits.
    """
    method = method_named(config.method)
    step = method.alternate * len(role_names(config)) if method.alternate else 1
    first = (FIRST + iteration * batches) * step
    numbers = range(first, first + batches * step, step)
    most = (2**31 - 1) // (numbers.stop * (MAX_TRIES if method.dynamic_sampling else 1))
    if groups > most:
        raise ConfigError(f"--groups {groups}: the numbers of the tasks would leave 32 bits; give {most} or fewer")
    return numbers


def learned_with(config: Config) -> dict:
    """Returns the fields of a run that are not at their defaults and do not name places."""
    return without_folders(config.model_dump(mode="json", exclude_defaults=True, exclude=PLACES))  # type: ignore[arg-type]


def without_folders(value):
    """Returns the value of a field, or several, with only the last part of every path, as in `my_file.py:NAME`."""
    if isinstance(value, dict):
        return {name: without_folders(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_folders(inner) for inner in value]
    return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else value


def sample(
    job: Job, params, numbers: range, continuations: int, gradients: Callable[[Episodes, int], np.ndarray] | None
) -> dict[str, np.ndarray]:
    """Plays the same tasks in every batch, and returns the arrays of a snapshot.

    numbers: `batch_numbers`. gradients: `projections` of a batch with its number; None to leave them out.
    """
    tasks, parts = job.episode_inputs(numbers.start)[0], []
    ids: dict[bytes, int] = {}
    for batch, number in enumerate(numbers):
        _, *inputs = job.episode_inputs(number)
        e: Episodes = jax.device_get(job.runner.rollout(params, tasks, *inputs).episodes)
        truth = true_advantages(job, params, tasks, e, continuations=continuations, seed=number)
        arrays = {name: getattr(e, AVAILABLE_ARRAYS.get(name, name), None) for name in KINDS | {"signals": ()}}
        arrays |= {"true_advantages": truth.advantages, "standard_error": truth.standard_error, "true_values": truth.values}
        arrays["situations"] = situations(job, tasks, e, ids)
        arrays["gradients"] = gradients(e, number) if gradients else None
        arrays["batch"] = np.full(len(e.mask), batch, np.int32)
        arrays["groups"] = e.groups + batch * job.config.rollout.prompt_groups
        parts.append({name: compact(a) for name, a in arrays.items() if a is not None})
        say(f"batch {batch + 1} of {len(numbers)}: {e.mask.sum()} steps, {e.success.mean():.0%} success")
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def compact(array) -> np.ndarray:
    """Returns an array of NumPy, without float64."""
    return np.asarray(array, np.float32) if array.dtype == np.float64 else np.asarray(array)


def situations(job: Job, tasks, e: Episodes, ids: dict[bytes, int]) -> np.ndarray:
    """Numbers the steps i32[B, T] by the full state before them and the response; `ids` has those of earlier batches."""
    B, T = e.mask.shape
    states = job.runner.replay(tasks, e)  # type: ignore[union-attr]  # `make` refuses runners of text
    rows = [to_bytes(leaf, B * (T + 1)).reshape(B, T + 1, -1)[:, :T] for leaf in jax.tree.leaves(states)]
    rows.append(to_bytes(e.responses, B * T).reshape(B, T, -1))
    rows.append(np.broadcast_to(to_bytes(e.groups, B)[:, None], (B, T, 4)))
    numbers = [ids.setdefault(row.tobytes(), len(ids)) for row in np.concatenate(rows, -1).reshape(B * T, -1)]
    return np.where(e.mask, np.array(numbers, np.int32).reshape(B, T), 0)


def to_bytes(leaf, rows: int) -> np.ndarray:
    """Returns the bytes u8[rows, ...] of an array, which may hold random keys."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.ascontiguousarray(leaf).reshape(rows, -1).view(np.uint8)
