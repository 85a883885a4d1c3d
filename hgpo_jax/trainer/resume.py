"""Whether and from where a run may be resumed: what its folder holds, and what may have changed since it began.

`loop.Training` then restores the state itself.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from hgpo_jax import config as configuration
from hgpo_jax.config import Config
from hgpo_jax.config.earlier_fields import unknown_field
from hgpo_jax.learner.loss_table import name_of
from hgpo_jax.learner.methods import method_named
from hgpo_jax.learner.optimizer import lr_scale
from hgpo_jax.trainer.checkpoint import newest_intact
from hgpo_jax.trainer.metrics import keep_rows, read_metrics
from hgpo_jax.utils.errors import ConfigError, excerpt
from hgpo_jax.utils.heartbeat import COMPILING

# Fields that may differ when a run is resumed: they do not affect learning.
FREE_TO_CHANGE = (
    "run_dir",
    "cache_dir",
    "mesh",
    "iterations",
    "rollout.decode_batch_size",
    "rollout.prompt_widths",
    "rollout.mesh",
    "rollout.store",
    "learner.microbatch_size",
    "learner.remat",
    "learner.offload",
    "reward.workers",
    "env.workers",
    "env.preload",
    "log.",
    "evaluation.",
)
FIXED = ("rollout.overlap", "rollout.keep")  # fields that decide what a checkpoint holds
# Fixed, too, where a checkpoint holds unfinished episodes, which are played again; but not where and how fast.
PLAYED, PLACES = ("seed", "env.", "rollout."), ("env.data", "env.time_limit", "rollout.ready_fraction")
HOW_TO_REPAIR = "repair it by hand, or start again in another run_dir"
PROOFS = ("evaluation.json", "transcripts.txt")  # that a run has ended; the first one holds its result
# Files that a run writes at its end; a policy is written only after the last checkpoint is complete.
RESULTS = ("policy", "adapter", "evaluations", *PROOFS)


def has_results(folder: Path) -> bool:
    return all((folder / name).is_file() for name in PROOFS)


def has_ended(folder: Path, iterations: int) -> bool:
    """Whether a run of this many iterations is done and evaluated."""
    return has_results(folder) and len(read_metrics(folder)) == iterations


def refuse_fewer(config: Config, folder: Path, done: int) -> None:
    """Raises ConfigError if the run has already done more iterations than requested."""
    if config.iterations < done:
        raise ConfigError(
            f"iterations={config.iterations}: the run in {folder} has done {done}; give {done} or more, or another run_dir"
        )


def change_length(config: Config, folder: Path, first: int) -> list[str]:
    """Prepares a run that is resumed after its `first` iterations for a new total number of iterations.

    What it had ended with is renamed. Returns messages about that and about the learning rate.
    """
    before = configuration.resolve(began_with(folder))
    messages: list[str] = []
    if before.iterations == config.iterations:
        return messages
    if 0 < first < config.iterations:
        at = ((before, first - 1), (config, first), (config, config.iterations - 1))
        rates = [f"{c.learner.lr * lr_scale(c.learner, i, c.iterations):.3g} in iteration {i + 1}" for c, i in at]
        messages.append(
            f"{config.iterations} iterations instead of {before.iterations}: learning rate {', '.join(dict.fromkeys(rates))}; "
            "the optimizer's warm-up is not repeated"
        )
    if names := _set_aside(folder, before.iterations):  # also of a run that was killed in its evaluation
        messages.append(f"what the run ended with after {before.iterations} iterations is kept: {', '.join(names)}")
    return messages


def _set_aside(folder: Path, iterations: int) -> list[str]:
    names = []
    for path in (folder / name for name in RESULTS):
        if path.exists():
            aside = path.with_stem(f"{path.stem}-{iterations}")
            if aside.is_dir():  # left by a process that died before it resumed
                shutil.rmtree(aside)
            names.append(path.rename(aside).name)
    return names


def differing(config: Config, folder: Path) -> dict[str, tuple]:
    """Returns name -> (value that the run in `folder` started with, value in `config`) for each field that differs.

    Raises ConfigError for a damaged config.yaml.
    """
    old, new = began_with(folder), config.model_dump(mode="json")
    differences: dict[str, tuple] = {}
    usual = configuration.RoleConfig().model_dump(mode="json")
    for role in dict.fromkeys((*old["roles"], *new["roles"])):
        before, now = (usual | tree["roles"].get(role, {}) for tree in (old, new))
        differences |= {f"roles.{role}.{name}": (before[name], now[name]) for name in now if before[name] != now[name]}
    for name in configuration.fields():
        if name == "roles":
            continue
        before, now = old, new
        for part in name.split("."):
            before, now = before[part], now[part]
        if before != now:
            differences[name] = before, now
    return differences


def free_to_change(config: Config) -> tuple[str, ...]:
    """Returns FREE_TO_CHANGE without what the configured loss depends on: hapo's compares the rows of a micro-batch.

    Of a loss of one's own that is not known.
    """
    depends = ("mesh", "learner.microbatch_size") if name_of(config.learner, method_named(config.method)) == "hapo" else ()
    return tuple(name for name in FREE_TO_CHANGE if name not in depends)


def check_unchanged(config: Config, folder: Path, allowed: tuple[str, ...] = ()) -> None:
    """Raises ConfigError, naming every field, if a resumed run's configuration is not the one it started with.

    allowed: names of fields that may differ.
    """
    differ = differing(config, folder)
    all_fields = set(configuration.fields())
    free = free_to_change(config)
    fixed = {
        name
        for name in differ
        if name.startswith(FIXED) or (config.rollout.keep > 1 and name.startswith(PLAYED) and name not in PLACES)
    }
    for role in {*began_with(folder)["roles"], *config.roles}:
        all_fields |= set(configuration.role_fields(role))
    for name in allowed:
        if name not in all_fields:
            raise ConfigError(f"--allow-change {name}: {unknown_field(name, sorted(all_fields))}")
    changed = {
        name: f"{name}={now} (the run began with {name}={before})"
        for name, (before, now) in differ.items()
        if not name.startswith(free) and (name not in allowed or name in fixed)
    }
    if changed:
        ways = [f"what the run in {folder} began with", "another run_dir"]
        if flags := " ".join(f"--allow-change {name}" for name in changed if name not in fixed):
            ways.append(flags)
        raise ConfigError(f"{', '.join(changed.values())}: give {', '.join(ways[:-1])}{',' * (len(ways) > 2)} or {ways[-1]}")


def began_with(folder: Path) -> dict:
    """Returns the fields in a run's config.yaml, unchecked, with defaults for fields newer than the run. Raises ConfigError."""
    file = folder / "config.yaml"
    try:
        old = configuration.read_yaml(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: is damaged: {' '.join(str(error).split())}; {HOW_TO_REPAIR}") from None
    if not isinstance(old, dict):
        raise ConfigError(f"{file}: is damaged: expected the fields of a run; {HOW_TO_REPAIR}")
    try:
        old = configuration.drop_removed(old)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    fields = Config().model_dump(mode="json")
    unknown = {name: value for name, value in old.items() if name not in fields}
    for name, default in fields.items():
        if not isinstance(default, dict):
            fields[name] = old.get(name, default)
        elif isinstance(section := old.get(name) or {}, dict):
            fields[name] = default | section
        else:
            raise ConfigError(f"{file}: is damaged: {name}={excerpt(section)} is not a section; {HOW_TO_REPAIR}")
    return fields | unknown


def resume_point(folder: Path) -> tuple[int, list[str]]:
    """Returns the iterations done at the newest intact checkpoint (0 for a run without one yet), and the faults of newer ones.

    Raises:
      ConfigError: there were checkpoints, but none is intact.
    """
    rows = {row["iteration"] for row in read_metrics(folder)}
    every = began_with(folder)["log"]["checkpoint_every"]
    done, wrong = newest_intact(folder / "checkpoints")
    # The second checkpoint is begun only after the first is complete.
    if done is None and (wrong or len(rows) > 2 * every or (rows and (folder / "policy").exists())):
        raise ConfigError(
            f"{folder}: no intact checkpoint is left of {len(rows)} iterations ({wrong[0] if wrong else 'all are gone'}); "
            "start again in another run_dir, or empty this one"
        )
    wrong = [f"{fault}; going back to iteration {done}" for fault in wrong]
    # A checkpoint relies on the rows of the iterations before it.
    if missing := sorted(set(range(done or 0)) - rows):
        wrong.append(f"{folder / 'metrics.jsonl'}: lacks {len(missing)} rows of finished iterations, the first is {missing[0]}")
    return done or 0, wrong


def ended_compiling(folder: Path) -> list[str]:
    """Warns of a last process that ended while it compiled; XLA aborts at some programs that it cannot compile."""
    file = folder / COMPILING
    programs = ", ".join(file.read_text().splitlines()) if file.is_file() else ""
    why = "if it was not killed, XLA aborted it and said why on standard error"
    return [f"the last process of this run ended while it compiled {programs}; {why}"] if programs else []


def drop_later(folder: Path, done: int) -> None:
    """Removes rows and dumps of iterations that will be repeated, and half-written files.

    A row that is left would ask for a checkpoint that there never was, if `log.checkpoint_every` is smaller from now on.
    """
    keep_rows(folder, done)
    for path in (folder / "episodes").glob("*"):
        number = path.stem.rpartition("-")[2]
        if path.suffix == ".partial" or (number.isdecimal() and int(number) >= done):
            path.unlink()
