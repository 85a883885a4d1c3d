"""A run's folder: its location, whether the run may be resumed there, and the lock that keeps a second run out."""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import yaml
from filelock import FileLock, Timeout

from hgpo_jax import config as configuration
from hgpo_jax.config import Config
from hgpo_jax.learner.optimizer import lr_scale
from hgpo_jax.trainer import provenance
from hgpo_jax.trainer.checkpoint import newest, newest_intact
from hgpo_jax.trainer.metrics import read_metrics
from hgpo_jax.utils import remote
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.files import atomic_write, is_remote

# Fields that may differ when a run is resumed: they do not affect learning.
FREE_TO_CHANGE = (
    "run_dir",
    "cache_dir",
    "mesh",
    "iterations",
    "rollout.decode_batch_size",
    "learner.microbatch_size",
    "env.workers",
    "log.",
    "evaluation.",
)
HOW_TO_REPAIR = "repair it by hand, or start again in another run_dir"
LOCK, UNFINISHED = ".lock", "config.yaml.partial"
COMPILING = ".compiling"  # the programs that the run's process is compiling (`CompileWatch.file`)
# Files of a run that was killed before it wrote config.yaml.
NO_RUN = {LOCK, UNFINISHED, remote.STATE, remote.LOCK, provenance.FILE, f"{provenance.FILE}.partial"}
PROOFS = ("evaluation.json", "transcripts.txt")  # that a run has ended; the first one holds its result
# Files that a run writes at its end; a policy is written only after the last checkpoint is complete.
RESULTS = ("policy", "adapter", "evaluations", *PROOFS)


NAMING = ("name", "method", "seed", "run_dir", "cache_dir")  # fields that decide where a run lives


class Found(NamedTuple):
    """A command's run folder and its present state.

    config: for a resumed run its own, overridden by the fields that the user gave. ended: nothing is left to do.
    """

    config: Config
    folder: Path
    resuming: bool = False
    ended: bool = False


def find_run(given: dict, resume: str, allowed: tuple[str, ...] = ()) -> Found:
    """Finds the run that a command asks for.

    Args:
      given: the fields that the user gave, as `config.given` returns them. A resumed run takes all others from its config.yaml.
      resume: `--resume`.
      allowed: names of fields that may differ from the run's, besides those that do not affect the result.

    Raises:
      ConfigError: the folder holds a run but resuming was not requested, there is nothing to resume, the run was started
        with other fields, or it has done more iterations than requested.
    """
    folder, resuming = run_folder(given, resume)
    if not resuming:
        return Found(configuration.resolve(given), folder)
    before = began_with(folder)
    try:
        configuration.resolve(before)
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.yaml'}: {error}; {HOW_TO_REPAIR}") from None
    config = configuration.resolve(given, before)
    check_unchanged(config, folder, allowed)
    refuse_fewer(config, folder, newest(folder / "checkpoints"))
    return Found(config, folder, True, has_ended(folder, config.iterations))


def run_folder(given: dict, resume: str) -> tuple[Path, bool]:
    """Returns the run's folder, and whether the run is resumed there. Arguments and errors as in `find_run`."""
    # The other fields may be valid only together with those of the resumed run.
    names = configuration.resolve({name: given[name] for name in NAMING if name in given})
    stem, run_dir = f"{names.name}-{names.method.rpartition(':')[2]}-s{names.seed}", names.run_dir
    if resume not in ("auto", "never"):
        folder = remote.fetch(resume, names.cache_dir) if is_remote(resume) else Path(resume)
        if not (folder / "config.yaml").is_file():
            raise ConfigError(f"--resume {resume}: not a run's folder, it holds no config.yaml")
        if run_dir and Path(run_dir).resolve() != Path(resume).resolve():
            raise ConfigError(f"run_dir={run_dir}: a resumed run stays in {resume}; leave run_dir out")
        return folder, True
    if run_dir:
        folder = remote.fetch(run_dir, names.cache_dir, begins=True) if is_remote(run_dir) else Path(run_dir)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"run_dir={run_dir}: is a file; choose another folder")
        begun = (folder / "config.yaml").is_file()
        if begun and resume == "never":
            raise ConfigError(f"run_dir={run_dir}: already holds a run; give --resume {run_dir} or choose another folder")
        if folder.is_dir() and not begun and {path.name for path in folder.iterdir()} - NO_RUN:
            raise ConfigError(f"run_dir={run_dir}: is not empty and not a run; choose another folder, or remove this one")
        return folder, begun
    if resume == "auto":
        earlier = [p.parent for p in Path("runs").glob(f"{stem}-*/config.yaml") if not _evaluated(p.parent)]
        if earlier:
            return max(earlier), True
    return Path("runs") / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}", False


def _evaluated(folder: Path) -> bool:
    return all((folder / name).is_file() for name in PROOFS)


def has_ended(folder: Path, iterations: int) -> bool:
    """Whether a run of this many iterations is done and evaluated."""
    return _evaluated(folder) and len(read_metrics(folder)) == iterations


def refuse_fewer(config: Config, folder: Path, done: int) -> None:
    """Raises ConfigError if the run has already done more iterations than requested."""
    if config.iterations < done:
        raise ConfigError(
            f"iterations={config.iterations}: the run in {folder} has done {done}; give {done} or more, or another run_dir"
        )


def change_length(config: Config, folder: Path, first: int) -> list[str]:
    """Prepares a run that is resumed after its `first` iterations for a new total number of iterations.

    If it had ended, its results are renamed. Returns messages about that and about the learning rate.
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
    if has_ended(folder, before.iterations):
        kept = _set_aside(folder, before.iterations)
        messages.append(f"what the run ended with after {before.iterations} iterations is kept: {', '.join(kept)}")
    return messages


def _set_aside(folder: Path, iterations: int) -> list[str]:
    kept = []
    for path in (folder / name for name in RESULTS):
        if path.exists():
            aside = path.with_stem(f"{path.stem}-{iterations}")
            if aside.is_dir():  # left by a process that died before it resumed
                shutil.rmtree(aside)
            kept.append(path.rename(aside).name)
    return kept


def differing(config: Config, folder: Path) -> dict[str, tuple]:
    """Returns name -> (value that the run in `folder` started with, value in `config`) for each field that differs.

    Raises ConfigError for a damaged config.yaml.
    """
    old, new = began_with(folder), config.model_dump(mode="json")
    found: dict[str, tuple] = {}
    usual = configuration.RoleConfig().model_dump(mode="json")
    for role in dict.fromkeys((*old["roles"], *new["roles"])):
        before, now = (usual | tree["roles"].get(role, {}) for tree in (old, new))
        found |= {f"roles.{role}.{name}": (before[name], now[name]) for name in now if before[name] != now[name]}
    for name in configuration.fields():
        if name == "roles":
            continue
        before, now = old, new
        for part in name.split("."):
            before, now = before[part], now[part]
        if before != now:
            found[name] = before, now
    return found


def check_unchanged(config: Config, folder: Path, allowed: tuple[str, ...] = ()) -> None:
    """Raises ConfigError, naming every field, if a resumed run's configuration is not the one it started with.

    allowed: names of fields that may differ.
    """
    differ = differing(config, folder)
    known = set(configuration.fields())
    for role in {*began_with(folder)["roles"], *config.roles}:
        known |= set(configuration.role_fields(role))
    for name in allowed:
        if name not in known:
            raise ConfigError(f"--allow-change {name}: no such field; --help lists them all")
    changed = {
        name: f"{name}={now} (the run began with {name}={before})"
        for name, (before, now) in differ.items()
        if not name.startswith(FREE_TO_CHANGE) and name not in allowed
    }
    if changed:
        raise ConfigError(
            f"{', '.join(changed.values())}: give what the run in {folder} began with, another run_dir, or "
            f"{' '.join(f'--allow-change {name}' for name in changed)}"
        )


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
        old = configuration.current(old)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    fields = Config().model_dump(mode="json")
    unknown = {name: value for name, value in old.items() if name not in fields}
    for name, default in fields.items():
        if not isinstance(default, dict):
            fields[name] = old.get(name, default)
        elif isinstance(given := old.get(name) or {}, dict):
            fields[name] = default | given
        else:
            raise ConfigError(f"{file}: is damaged: {name}={configuration.shown(given)} is not a section; {HOW_TO_REPAIR}")
    return fields | unknown


def take_folder(config: Config, folder: Path, resuming: bool) -> tuple[FileLock, int, list[str], list[str]]:
    """Claims the folder for this process, prepares it for training, and writes its config.yaml.

    Returns: (its lock, the iterations done, warnings about damaged later checkpoints, an end of the last process or changed
    outside code, messages about a change of length).

    Raises:
      ConfigError: another process holds the folder, started a run there or has continued it since `find_run`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder_lock = lock(folder)
    if not resuming and (folder / "config.yaml").is_file():
        raise ConfigError(f"run_dir={folder}: another process has begun a run here; continue it with --resume {folder}")
    done, faults = resume_point(folder) if resuming else (0, [])
    refuse_fewer(config, folder, done)
    changes = change_length(config, folder, done) if resuming else []
    faults += [*ended_compiling(folder), *provenance.record(config, folder, done)]
    drop_later(folder, done)
    with atomic_write(folder / "config.yaml") as file:
        file.write(configuration.dump(config))
    return folder_lock, done, faults, changes


def lock(folder: Path) -> FileLock:
    """Locks the folder until this process ends, for whatever reason. Raises ConfigError if another process holds the lock."""
    folder_lock = FileLock(folder / LOCK)
    try:
        folder_lock.acquire(blocking=False)
    except Timeout:
        raise ConfigError(f"run_dir={folder}: another process is writing this run; wait for it or end it") from None
    return folder_lock


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
    if lost := sorted(set(range(done or 0)) - rows):
        wrong.append(f"{folder / 'metrics.jsonl'}: lacks {len(lost)} rows of finished iterations, the first is {lost[0]}")
    return done or 0, wrong


def ended_compiling(folder: Path) -> list[str]:
    """Warns of a last process that ended while it compiled; XLA aborts at some programs that it cannot compile."""
    file = folder / COMPILING
    programs = ", ".join(file.read_text().splitlines()) if file.is_file() else ""
    why = "if it was not killed, XLA aborted it and said why on standard error"
    return [f"the last process of this run ended while it compiled {programs}; {why}"] if programs else []


def drop_later(folder: Path, done: int) -> None:
    """Removes dumps of iterations that will be repeated, and half-written files."""
    for path in (folder / "episodes").glob("*"):
        number = path.stem.rpartition("-")[2]
        if path.suffix == ".partial" or (number.isdecimal() and int(number) >= done):
            path.unlink()
