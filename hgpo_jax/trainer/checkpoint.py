"""Checkpoints of a run: parameters and optimizer state by Orbax, the reference policy once as a Hugging Face folder.

Orbax writes a checkpoint in the background and renames it when it is complete, so that an interrupted one does not count.
It does not detect all later damage, so each checkpoint holds the digests of its files, which `newest_intact` checks.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import shutil
import sys
import traceback
from pathlib import Path

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from hgpo_jax.config import LogConfig
from hgpo_jax.utils import distributed
from hgpo_jax.utils.errors import RunError, one_line
from hgpo_jax.utils.files import atomic_write
from hgpo_jax.utils.heartbeat import phase

DIGESTS = "digests.json"
ITEM = "state"  # the folder of the arrays inside a checkpoint


class _Digesting(ocp.StandardCheckpointHandler):
    def finalize(self, directory) -> None:
        """Writes the digests; one process calls this when all files are written, before the checkpoint is committed."""
        super().finalize(directory)
        with open(Path(directory) / DIGESTS, "w") as file:
            json.dump(digests(Path(directory)), file, indent=1)
            file.flush()
            os.fsync(file.fileno())


def digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file below the folder except the digests themselves, by relative path."""
    by_name = {}
    for path in sorted(folder.rglob("*")):
        # Orbax adds commit_success.txt when the checkpoint is committed.
        if path.is_file() and path.name not in (DIGESTS, "commit_success.txt"):
            with open(path, "rb") as file:
                by_name[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return by_name


def damage(checkpoint: Path) -> str | None:
    """Describes the damage to a checkpoint; None if it is intact."""
    folder = checkpoint / ITEM
    try:
        recorded, actual = json.loads((folder / DIGESTS).read_text()), digests(folder)
    except (OSError, ValueError) as error:
        return f"{ITEM}/{DIGESTS} cannot be read: {one_line(error)}"
    changed = (f"{ITEM}/{name} has changed or is missing" for name, digest in recorded.items() if actual.get(name) != digest)
    return next(changed, None)


def _numbers(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]


def newest(folder: Path) -> int:
    """Returns the number of iterations done at the newest checkpoint in a folder, intact or not; 0 if there is none."""
    return max(_numbers(folder), default=0)


def newest_intact(folder: Path) -> tuple[int | None, list[str]]:
    """Returns the newest intact checkpoint in a folder, as iterations done, and the faults of newer ones.

    Damaged checkpoints are renamed to N.damaged, so that the run can write its own N again.
    """
    wrong: list[str] = []
    for step in sorted(_numbers(folder), reverse=True):
        fault = damage(folder / str(step))
        if fault is None:
            return step, wrong
        wrong.append(f"checkpoint {folder / str(step)} is damaged: {fault}")
        aside = folder / f"{step}.damaged"
        shutil.rmtree(aside, ignore_errors=True)
        (folder / str(step)).rename(aside)
    return None, wrong


class Checkpoints:
    """The checkpoints under `folder`, numbered by the iterations done; written atomically in the background.

    The fields of `settings` decide which are kept: the last `keep_checkpoints`, and the `keep_best` with the highest validation
    success. All others are deleted.

    read_only: nothing is written or deleted, so that a run that is being trained can be read.
    """

    def __init__(self, folder: Path, settings: LogConfig, read_only: bool = False):
        keep = [LatestN(settings.keep_checkpoints)]
        if settings.keep_best:
            best = BestN(get_metric_fn=_success, n=settings.keep_best, keep_checkpoints_without_metrics=False)
            keep.append(best)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy(keep),
            best_fn=_success if settings.keep_best else None,
            cleanup_tmp_directories=True,
            read_only=read_only,
            enable_async_checkpointing=True,
        )
        registry, handler = ocp.handlers.DefaultCheckpointHandlerRegistry(), _Digesting()
        for args in (ocp.args.StandardSave, ocp.args.StandardRestore):
            registry.add(ITEM, args, handler)
        _say_failures_once()
        self._folder = folder
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options, handler_registry=registry)

    def latest(self) -> int | None:
        """Iterations done at the newest checkpoint; None if there is none."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """Iterations done at the checkpoint with the highest validation success; None if none has one."""
        metrics = {step: self._manager.metrics(step) for step in self._manager.all_steps()}
        successes = {step: _success(each) for step, each in metrics.items() if each and _success(each) >= 0}
        return max(successes, key=lambda step: (successes[step], step), default=None)

    @phase("saving a checkpoint", says_end=False)
    def save(self, iterations: int, state, success: float | None = None) -> None:
        """Starts writing once `state` is computed and the previous write is complete; `state` may be donated right after.

        success: the validation success of this state. A checkpoint of so many iterations that is there is given it.

        Raises:
          RunError: the previous checkpoint or this one could not be written.
        """
        try:
            if success is not None and self.latest() == iterations:  # of a run that was interrupted in its validation
                distributed.broadcast_from_process_0(lambda: self._rate(iterations, success))
                self._manager.reload()
                return
            self._manager.save(
                iterations,
                args=ocp.args.Composite(**{ITEM: ocp.args.StandardSave(state)}),
                force=True,
                metrics={"success": -1.0 if success is None else success},  # worse than any success
            )
        except Exception as error:
            raise self._failed(error) from None

    def _rate(self, iterations: int, success: float) -> None:
        """Writes a checkpoint's success, and nothing else of it: it may be the only one that there is."""
        self._manager.wait_until_finished()
        file = self._folder / str(iterations) / "metrics" / "metrics"
        file.parent.mkdir(exist_ok=True)  # none if it was written before log.keep_best was given
        with atomic_write(file) as written:
            json.dump({"success": success}, written)

    @phase("reading the checkpoint")
    def restore(self, iterations: int, like):
        """Returns the state of a checkpoint. Raises RunError.

        like: its shapes, placed as its arrays are to be on any mesh (`jax.ShapeDtypeStruct`), or NumPy arrays for such.
        """
        args = ocp.args.Composite(**{ITEM: ocp.args.StandardRestore(like)})
        try:
            return self._manager.restore(iterations, args=args)[ITEM]
        except Exception as error:
            reason = one_line(f"{error!s:.500}")
            raise RunError(f"checkpoint {self._folder / str(iterations)} does not fit this run: {reason}") from None

    @phase("waiting for the checkpoint")
    def wait(self) -> None:
        """Waits for pending writes. Raises RunError if one fails."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from None

    def close(self) -> None:
        """Waits for pending writes, and ends the writer. Raises RunError if one fails."""
        self.wait()
        self._manager.close()

    def _failed(self, error: Exception) -> RunError:
        return RunError(f"checkpoints in {self._folder} cannot be written: {one_line(f'{error!s:.500}')}")


def _say_failures_once() -> None:
    """Silences the output of Orbax and tensorstore about a failed write, which also raises an exception.

    If one array cannot be written, for example because the disk is full, Orbax closes its event loop. Tensorstore's threads
    then fail to report each of the other arrays to it, with one traceback each: a thousand lines for a small model.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(_not_of_orbax)  # adding the same filter again has no effect
    if getattr(sys.unraisablehook, "func", None) is not _unless_abandoned:
        sys.unraisablehook = functools.partial(_unless_abandoned, sys.unraisablehook)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    """Returns False for exceptions in Orbax's tasks that asyncio logs because nobody has retrieved them."""
    frames = traceback.extract_tb(record.exc_info[2]) if record.exc_info else ()
    return not any("orbax" in frame.filename for frame in frames)


def _unless_abandoned(hook, unraisable) -> None:
    if not (isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"):
        hook(unraisable)


def _success(metrics: dict) -> float:
    return metrics["success"]
