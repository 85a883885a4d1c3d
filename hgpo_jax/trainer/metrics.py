"""Metrics of rollouts, and their destinations: metrics.jsonl, TensorBoard, Weights & Biases."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp

from hgpo_jax.advantages import Estimate
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.files import atomic_write
from hgpo_jax.utils.progress import warn


class WeightsAndBiases:
    """A run of Weights & Biases; training that is resumed in the folder continues the same run.

    config: the run's configuration, shown with it.
    """

    def __init__(self, folder: Path, project: str, config: dict):
        import wandb  # optional

        self._run = wandb.init(
            project=project,
            dir=str(folder),
            id=_identity(folder),
            name=folder.name,
            resume="allow",
            config=config,
            settings=wandb.Settings(silent=True),
        )
        # Not by wandb's own steps, which never go back: iterations that a resumed run repeats would be left out.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, row: dict) -> None:
        self._run.log({name.replace(".", "/"): value for name, value in flatten(row).items()})

    def close(self) -> None:
        self._run.finish()


def _identity(folder: Path) -> str:
    """Returns the id of a folder's run, which is kept there: another run in a folder of this place is another one."""
    file = folder / "wandb" / "id.txt"
    if file.is_file():
        return file.read_text().strip()
    if file.parent.is_dir():  # of a version before 0.10.0, whose ids were made of places
        return hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    file.parent.mkdir(parents=True)
    with atomic_write(file) as out:
        out.write(identity := secrets.token_hex(8))
    return identity


class Logger(Protocol):
    """A further destination for the rows of metrics."""

    def write(self, row: dict) -> None: ...

    def close(self) -> None: ...


def keep_rows(folder: Path, count: int) -> None:
    """Keeps the rows of a run's first iterations."""
    rows = [row for row in read_metrics(folder) if row["iteration"] < count]
    with atomic_write(folder / "metrics.jsonl") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


class MetricsWriter:
    """Appends one JSON object per iteration to metrics.jsonl, and passes the same row to other loggers.

    Args:
      folder: the run's folder.
      keep: iterations to keep; later lines of an interrupted run are dropped.
      loggers: name -> a function that makes a logger such as `TensorBoard`. A logger that fails is dropped with a warning.
    """

    def __init__(self, folder: Path, keep: int = 0, loggers: dict[str, Callable[[], Logger]] | None = None):
        self.path = folder / "metrics.jsonl"
        keep_rows(folder, keep)
        self._file = open(self.path, "a")  # noqa: SIM115 - open as long as the run
        self._loggers: dict[str, Logger] = {}
        for name, make in (loggers or {}).items():
            self._try(name, lambda name=name, make=make: self._loggers.update({name: make()}))

    def write(self, row: dict) -> None:
        """Writes `row`, a dict of numbers or nested dicts of numbers that has `iteration`. NaN is written as null."""
        clean = {k: {n: _finite(v) for n, v in x.items()} if isinstance(x, dict) else _finite(x) for k, x in row.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()
        for name, logger in list(self._loggers.items()):
            self._try(name, lambda logger=logger: logger.write(row))

    def sync(self) -> None:
        """Waits until the rows are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        for name, logger in list(self._loggers.items()):
            self._try(name, logger.close)

    def _try(self, name: str, call) -> None:
        try:
            call()
        except Exception as error:  # whatever a library raises, training continues
            self._loggers.pop(name, None)
            reason = " ".join(str(error).split())
            warn(f"{name} fails and is left out from now on: {reason}")


def _finite(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value


@functools.partial(jax.jit, static_argnames="roles")
def rollout_sums(e: Episodes, gamma, roles: tuple[str, ...]) -> dict[str, jax.Array]:
    """Sums over the episodes of one rollout, as scalars by name, for `rollout_metrics`. roles: those of the environment."""
    sums = {
        "episodes": e.mask[:, 0].sum(),  # an episode whose environment failed has no turns
        "failed": (~e.mask[:, 0]).sum(),
        "judged": e.judged.sum(),
        "success": e.success.sum(),
        "rewarded": (e.rewards.sum(1) > 0).sum(),
        "won_unrewarded": (e.success & (e.rewards.sum(1) <= 0)).sum(),
        "return": (e.rewards * gamma ** jnp.arange(e.rewards.shape[1])).sum(),
        "steps": e.mask.sum(),
        "invalid": (e.invalid & e.mask).sum(),
        "tokens": (e.prompt_lengths + e.response_lengths).sum(where=e.mask),
    }
    for role, turns in turns_by_role(e, roles).items():
        sums |= {
            f"by_role/judged/{role}": (turns.any(1) & e.judged).sum(),
            f"by_role/success/{role}": (turns.any(1) & e.success).sum(),
            f"by_role/turns/{role}": turns.sum(),
            f"by_role/invalid/{role}": (e.invalid & turns).sum(),
            f"by_role/response_length/{role}": e.response_lengths.sum(where=turns),
        }
    return sums


def turns_by_role(e: Episodes, roles: tuple[str, ...]) -> dict[str, jax.Array]:
    """Returns role -> its turns bool[B, T]; an empty dict if there is only one role."""
    return {role: e.mask & (e.agents == index) for index, role in enumerate(roles)} if len(roles) > 1 else {}


def role_advantages(e: Episodes, advantages, roles: tuple[str, ...]) -> dict[str, jax.Array]:
    """Mean and standard deviation of the advantages f32[B, T] over each role's turns, as scalars by name."""
    metrics = {}
    for role, turns in turns_by_role(e, roles).items():
        count = jnp.maximum(turns.sum(), 1)
        mean = advantages.sum(where=turns) / count
        metrics[f"by_role/advantage_mean/{role}"] = mean
        metrics[f"by_role/advantage_std/{role}"] = jnp.sqrt(((advantages - mean) ** 2).sum(where=turns) / count)
    return metrics


def advantage_metrics(mask, estimate: Estimate) -> dict:
    """Returns scalars that describe a batch's advantages over the steps to learn from; mask bool[B, T], those that happened."""
    happened = jnp.maximum(mask.sum(), 1)
    mask = mask if estimate.keep is None else estimate.keep
    steps = jnp.maximum(mask.sum(), 1)
    metrics = {} if estimate.keep is None else {"kept_share": mask.sum() / happened}
    metrics |= {
        "advantage_abs": jnp.abs(estimate.advantages).sum() / steps,
        "advantage_zero": 1 - ((estimate.advantages != 0) & mask).sum() / steps,  # 1 where no step is kept
    }
    if "switch_rate" in estimate.stats:
        metrics["switch_rate"] = estimate.stats["switch_rate"]
    if "rho" in estimate.stats:
        metrics |= _hierarchy_metrics(estimate)
    for column, level in enumerate(estimate.levels):
        _, sizes, _ = estimate.by_level()
        metrics[f"peers/level{level}"] = ((sizes[..., column] > 1) & mask).sum() / steps
    if 0 in estimate.levels:
        # It shows how much the other levels change; for hgpo, gigpo, eb_gae and pgpo level 0 is HGPO with K = 0.
        level0 = estimate.by_level()[0][..., estimate.levels.index(0)]
        norms = jnp.sqrt((level0**2).sum() * (estimate.advantages**2).sum())
        metrics["cosine_to_level0"] = (level0 * estimate.advantages).sum() / jnp.maximum(norms, 1e-12)
    return metrics


def _hierarchy_metrics(estimate: Estimate) -> dict:
    """Variance of the returns by level of history (`eb_gae`): tau2 between and s2 within the groups of each level."""
    metrics = {"hierarchy/rho": estimate.stats["rho"]}
    for column, level in enumerate(estimate.levels):
        metrics[f"hierarchy/s2_level{level}"] = estimate.stats["s2"][column]
        if column:
            metrics[f"hierarchy/tau2_level{level}"] = estimate.stats["tau2"][column - 1]
    return metrics


def rollout_metrics(sums: list[dict[str, jax.Array]]) -> dict[str, float]:
    """Computes the metrics of an iteration's rollouts from the `rollout_sums` of each; waits until these are computed."""
    sums = jax.device_get(sums)
    total = {name: float(sum(of_one[name] for of_one in sums)) for name in sums[0]}
    episodes, wins, judged = max(total["episodes"], 1), total["success"], total["judged"]
    # See `rollout/rewards.py` and `rollout/signals.py`.
    rewards = {name: value for name, value in total.items() if name.startswith(("reward/", "signal/"))}
    return {
        "success": wins / judged if judged else math.nan,  # unknown
        "success_at_least": wins / (judged + total["failed"]) if judged else math.nan,  # failed episodes count as lost
        "rewarded": total["rewarded"] / episodes,
        "won_unrewarded": total["won_unrewarded"] / wins if wins else 0.0,
        "return": total["return"] / episodes,
        "turns": total["steps"] / episodes,
        "invalid": total["invalid"] / max(total["steps"], 1),
        "steps": total["steps"],
        "tokens": total["tokens"],
        **{name: value / (1 if name == "reward/failed" else episodes) for name, value in rewards.items()},
        **_role_metrics(total),
    }


def _role_metrics(total: dict[str, float]) -> dict[str, float]:
    """Returns the per-role part of `rollout_metrics`, if there are several roles."""
    metrics: dict[str, float] = {}
    for role in (name.rpartition("/")[2] for name in total if name.startswith("by_role/turns/")):
        of = {part: total[f"by_role/{part}/{role}"] for part in ("judged", "success", "turns", "invalid", "response_length")}
        turns = max(of["turns"], 1)
        metrics |= {
            f"by_role/success/{role}": of["success"] / of["judged"] if of["judged"] else math.nan,
            f"by_role/turns/{role}": of["turns"] / max(total["episodes"], 1),
            f"by_role/invalid/{role}": of["invalid"] / turns,
            f"by_role/response_length/{role}": of["response_length"] / turns,
        }
    return metrics


def unknown_by_role(row: dict) -> dict[str, float]:
    """Returns NaN for the metrics of roles without a turn in this iteration, except for the number of turns."""
    idle = {name.rpartition("/")[2] for name, turns in row.items() if name.startswith("by_role/turns/") and not turns}
    names = [name for name in row if name.startswith("by_role/") and not name.startswith("by_role/turns/")]
    return {name: math.nan for name in names if name.rpartition("/")[2] in idle}


def flatten(row: dict) -> dict:
    """Flattens nested numbers to dotted names."""
    flat: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": number for inner, number in value.items()}
        else:
            flat[name] = value
    return flat


def read_metrics(folder: Path) -> list[dict]:
    """Reads the rows of a run's metrics.jsonl; an unfinished last line is left out, a missing file has no rows.

    Raises:
      ConfigError: another line is not a row.
    """
    path = Path(folder) / "metrics.jsonl"
    rows = []
    if path.is_file():
        *lines, _ = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                if not isinstance(row, dict) or not isinstance(row.get("iteration"), int):
                    raise ValueError("it holds no iteration")
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}: line {number} is not a row of metrics: {error}; remove the line") from None
            rows.append(row)
    return rows
