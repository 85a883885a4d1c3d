"""Records that a run writes during the next iteration: rows of metrics, dumps of episodes, warnings, the live line."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax

from hgpo_jax.config import Config
from hgpo_jax.rollout.result import RolloutResult
from hgpo_jax.trainer.alarms import Alarms
from hgpo_jax.trainer.metrics import Logger, MetricsWriter, WeightsAndBiases, read_metrics, rollout_metrics, unknown_by_role
from hgpo_jax.utils.errors import RunError
from hgpo_jax.utils.heartbeat import current, phase
from hgpo_jax.utils.progress import Progress, warn


def loggers(config: Config, folder: Path, first: int) -> dict:
    """Returns the constructors of the configured loggers, for a MetricsWriter."""
    constructors: dict[str, Callable[[], Logger]] = {}
    if config.log.tensorboard:
        from hgpo_jax.trainer.tensorboard import TensorBoard  # tensorboardX imports PyTorch if that is installed

        constructors["TensorBoard"] = functools.partial(TensorBoard, folder, first)
    if config.log.wandb:
        project, fields = os.environ.get("WANDB_PROJECT", "hgpo_jax"), config.model_dump(mode="json")
        constructors["Weights & Biases"] = functools.partial(WeightsAndBiases, folder, project, fields)
    return constructors


class Recorder:
    """Two threads that write: one waits for metrics and writes rows, the other writes dumps; `wait` raises their errors.

    Args:
      first: the iteration that the run starts or resumes with.
      writes: whether this process writes; the others watch the same numbers, so that all of them stop together.
      on_iteration: called with every row of metrics once it is written, in another thread.
    """

    def __init__(
        self, config: Config, folder: Path, first: int, writes: bool, on_iteration: Callable[[dict], None] | None = None
    ):
        self._config, self._folder, self._writes, self._on_iteration = config, folder, writes, on_iteration
        self._rows, self._dumps = ThreadPoolExecutor(1, "rows"), ThreadPoolExecutor(1, "dumps")
        self._row: Future | None = None
        self._raised: BaseException | None = None  # by `on_iteration`
        self._dump: Future | None = None
        if writes:
            (folder / "episodes").mkdir(exist_ok=True)
            self._writer = MetricsWriter(folder, first, loggers(config, folder, first))
        # The other processes see the same folder, but not before the first one has written to it.
        self._alarms = Alarms(config, [row for row in read_metrics(folder) if row["iteration"] < first])
        self._first, self._last = first, 0.0
        self._seconds: dict[str, float] = {}
        self._progress = Progress("training", config.iterations, "it", done=first, plain="iteration")

    def time_phase(self, name: str, arrays, began: float) -> None:
        """Times a phase until `arrays` are computed, from `began` or the end of the previous phase."""
        self._rows.submit(self._wait_for, name, arrays, began)

    def _wait_for(self, name: str, arrays, began: float) -> None:
        with phase(name, says_end=False):
            jax.block_until_ready(arrays)
        ended = time.perf_counter()
        self._seconds[name] = ended - max(began, self._last)
        self._last = ended

    def dump(self, iteration: int, result: RolloutResult) -> None:
        """Begins to write an iteration's episodes, if a dump is due, and their report, if they have one."""
        last = iteration + 1 == self._config.iterations
        if self._writes and (last or (iteration + 1) % self._config.log.dump_every == 0):
            if self._dump:
                self._dump.result()
            self._dump = self._dumps.submit(self._save, f"iteration-{iteration:05d}", result)

    def _save(self, name: str, result: RolloutResult) -> None:
        path = self._folder / "episodes" / name
        if result.report is not None:  # first: a dump without one is a compiled rollout's
            result.report.save(path.with_suffix(".json"))
        jax.device_get(result.episodes).save(path.with_suffix(".npz"))

    def row(self, iteration: int, sums: list[dict], metrics: dict, counts: dict, result: RolloutResult) -> None:
        """Begins to write an iteration's row.

        sums: from its rollouts (`metrics.rollout_sums`); metrics: from the update; counts: numbers that are already computed.
        """
        self._row = self._rows.submit(self._write, iteration, sums, metrics, counts, result)

    def _write(self, iteration: int, sums, metrics, counts: dict, result: RolloutResult) -> None:
        numbers = {name: float(value) for name, value in jax.device_get(metrics).items()}
        row = {"iteration": iteration, **rollout_metrics(sums), **counts, **numbers, "seconds": self._seconds}
        row |= unknown_by_role(row)
        spent, self._seconds = self._seconds, {}
        if iteration == self._first:
            row["seconds_to_first_iteration"] = current().seconds()
        row["tokens_per_second"] = row["tokens"] / (spent["rollout"] + spent["update"])
        if self._writes:
            if row["nonfinite_steps"]:
                self._save(f"nonfinite-{iteration:05d}", result)
            self._writer.write(row)
            self._progress.update(1, live_line(row), seconds=sum(spent.values()))
            self._call_back(dict(row))
        try:
            warnings = self._alarms.check(row, result.episodes)
        except RunError as error:  # as in `_call_back`
            self._raised = error
            return
        for warning in warnings if self._writes else ():
            warn(warning)

    def _call_back(self, row: dict) -> None:
        try:
            if self._on_iteration:
                self._on_iteration(row)
        except BaseException as error:  # the row is on disk: what is learned can be saved before this ends the training
            self._raised = error

    def wait(self, dumps: bool = False) -> None:
        """Waits for the most recent row and raises its errors; with `dumps`, waits until everything is on disk.

        An error is raised once, so that what was learned can be saved after it.
        """
        row, self._row = self._row, None
        if row:
            row.result()
        if self._raised:
            error, self._raised = self._raised, None
            raise error
        if dumps and self._dump:
            self._dump.result()
        if dumps and self._writes:
            self._writer.sync()

    def close(self) -> None:
        """Ends the threads and closes the files, even after a failure."""
        for threads in (self._rows, self._dumps):
            threads.shutdown()
        self._progress.close()
        if self._writes:
            self._writer.close()


def live_line(row: dict) -> dict:
    """Returns the fields of an iteration that the live line shows."""
    rate = row["tokens_per_second"]
    return {
        "success": "unknown" if math.isnan(row["success"]) else f"{row['success']:.2f}",
        "return": f"{row['return']:.2f}",
        "tok/s": f"{rate / 1e3:.0f}k" if rate >= 1e4 else f"{rate:.0f}",
        "rollout": f"{row['seconds']['rollout']:.2f}s",
        "update": f"{row['seconds']['update']:.2f}s",
    }
