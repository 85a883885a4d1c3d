"""A run's folder: its location, and the lock that keeps a second run out."""

from __future__ import annotations

import math
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax
from filelock import FileLock, Timeout

from hgpo_jax import config as configuration
from hgpo_jax.config import Config
from hgpo_jax.config.earlier_fields import unknown_field
from hgpo_jax.trainer import provenance
from hgpo_jax.trainer.checkpoint import newest
from hgpo_jax.trainer.resume import (
    HOW_TO_REPAIR,
    began_with,
    change_length,
    check_unchanged,
    drop_later,
    ended_compiling,
    has_ended,
    has_results,
    refuse_fewer,
    resume_point,
)
from hgpo_jax.utils import distributed, remote
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.files import atomic_write, is_remote

LOCK, UNFINISHED = ".lock", "config.yaml.partial"
# Files of a run that was killed before it wrote config.yaml.
NO_RUN = {LOCK, UNFINISHED, distributed.SHARED, remote.STATE, remote.LOCK, provenance.FILE, f"{provenance.FILE}.partial"}
NAMING = ("name", "method", "seed", "run_dir", "cache_dir")  # fields that decide where a run lives


class Found(NamedTuple):
    """A command's run folder and its present state.

    config: for a resumed run its own, overridden by the fields that the user gave. ended: nothing is left to do.
    """

    config: Config
    folder: Path
    resuming: bool = False
    ended: bool = False


def find_run(fields: dict, resume: str, allowed: tuple[str, ...] = ()) -> Found:
    """Finds the run that a command asks for.

    Args:
      fields: the fields that the user gave, as `config.read_fields` returns them. A resumed run takes all others from its
        config.yaml.
      resume: `--resume`.
      allowed: names of fields that may differ from the run's, besides those that do not affect the result.

    Raises:
      ConfigError: the folder holds a run but resuming was not requested, there is nothing to resume, the run was started
        with other fields, or it has done more iterations than requested.
    """
    folder, resuming = run_folder(fields, resume)
    if not resuming:
        config = configuration.resolve(fields)
        names = {*configuration.fields(), *(name for role in config.roles for name in configuration.role_fields(role))}
        for name in allowed:  # for when the same command resumes the run
            if name not in names:
                raise ConfigError(f"--allow-change {name}: {unknown_field(name, sorted(names))}")
        return Found(config, folder)
    before = began_with(folder)
    try:
        configuration.resolve(before)
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.yaml'}: {error}; {HOW_TO_REPAIR}") from None
    config = configuration.resolve(fields, before)
    check_unchanged(config, folder, allowed)
    refuse_fewer(config, folder, newest(folder / "checkpoints"))
    return Found(config, folder, True, has_ended(folder, config.iterations))


def run_folder(fields: dict, resume: str) -> tuple[Path, bool]:
    """Returns the run's folder, and whether the run is resumed there. Arguments and errors as in `find_run`."""
    # The other fields may be valid only together with those of the resumed run.
    names = configuration.resolve({name: fields[name] for name in NAMING if name in fields})
    stem, run_dir = f"{names.name}-{names.method.rpartition(':')[2]}-s{names.seed}", names.run_dir
    if resume not in ("auto", "never"):
        folder = remote.fetch(resume, names.cache_dir) if is_remote(resume) else Path(resume).expanduser()
        if not (folder / "config.yaml").is_file():
            raise ConfigError(f"--resume {resume}: not a run's folder, it holds no config.yaml")
        if run_dir and Path(run_dir).resolve() != Path(resume).expanduser().resolve():
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
        earlier = [p.parent for p in Path("runs").glob(f"{stem}-*/config.yaml") if not has_results(p.parent)]
        if earlier:
            return max(earlier), True
    return Path("runs") / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}", False


def take_folder(
    config: Config, folder: Path, resuming: bool, state: Any, policy: Any = ()
) -> tuple[FileLock, int, list[str], list[str]]:
    """Claims the folder for this process, prepares it for training, and writes its config.yaml.

    state: what a checkpoint holds, from `loop.describe`. policy: all weights of the policies, which are saved before and after.

    Returns: (its lock, the iterations done, warnings about damaged later checkpoints, an end of the last process or changed
    outside code, messages about a change of length).

    Raises:
      ConfigError: another process holds the folder, started a run there or has continued it since `find_run`, or its disk is
        too full for what is asked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder_lock = lock(folder)
    if not resuming and (folder / "config.yaml").is_file():
        raise ConfigError(f"run_dir={folder}: another process has begun a run here; continue it with --resume {folder}")
    done, faults = resume_point(folder) if resuming else (0, [])
    refuse_fewer(config, folder, done)
    refuse_full_disk(config, folder, state, policy, done)
    changes = change_length(config, folder, done) if resuming else []
    faults += [*ended_compiling(folder), *provenance.record(config, folder, done)]
    drop_later(folder, done)
    with atomic_write(folder / "config.yaml") as file:
        file.write(configuration.dump(config))
    return folder_lock, done, faults, changes


def refuse_full_disk(config: Config, folder: Path, state: Any, policy: Any, done: int) -> None:
    """Raises ConfigError if the disk of a run's folder cannot hold its checkpoints and policies.

    state, policy: as in `take_folder`. The checkpoint that is being written is there beside those that are kept.
    """

    def bytes_of(tree: Any) -> int:
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))

    size, policies = bytes_of(state), bytes_of(policy) * (1 + (not any((folder / "start").rglob("config.json"))))
    left = math.ceil((config.iterations - done) / config.log.checkpoint_every)
    there = sum(path.name.isdecimal() for path in (folder / "checkpoints").glob("*"))  # not those that are damaged or partial
    count = min(left, max(0, config.log.keep_checkpoints + config.log.keep_best + 1 - there))
    if (free := shutil.disk_usage(folder).free) < count * size + policies:
        needs, has = f"{count} checkpoint{'s' * (count != 1)} of {size / 1e9:.3g} GB more", f"{free / 1e9:.3g} GB left"
        needs += f" and {policies / 1e9:.3g} GB of policies"
        raise ConfigError(f"run_dir={folder}: needs room for {needs}, and its disk has {has}; give another, or make room")


def lock(folder: Path) -> FileLock:
    """Locks the folder until this process ends, for whatever reason. Raises ConfigError if another process holds the lock."""
    folder_lock = FileLock(folder / LOCK)
    try:
        folder_lock.acquire(blocking=False)
    except Timeout:
        raise ConfigError(f"run_dir={folder}: another process is writing this run; wait for it or end it") from None
    return folder_lock
