"""Measurements in single runs of a plan (`truth.py`, `gradients.py`), kept beside them and, by `collect`, in NAME.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hgpo_jax.analysis.dumps import read_config
from hgpo_jax.rollout.environments import backend
from hgpo_jax.setup.job import Job, build
from hgpo_jax.tables.plan import Plan, cells
from hgpo_jax.trainer.checkpoint import Checkpoints
from hgpo_jax.trainer.folder import has_ended
from hgpo_jax.trainer.loop import starting_params
from hgpo_jax.trainer.step import TrainState, make_train_step
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.files import atomic_write


class Kind(NamedTuple):
    """A kind of measurement.

    name: of the command, of RUNS/NAME.json, in the record that `collect` keeps, and of its picture.
    title, note: text above its tables.
    parse: a JSON object -> a NamedTuple with `cell`, a name, and `iteration`; KeyError, TypeError or ValueError if it is not
      one.
    lines: formats a list of them as lines of Markdown.
    """

    name: str
    title: str
    note: str
    parse: Callable[[Any], Any]
    lines: Callable[[list], list[str]]

    def file(self, runs: Path) -> Path:
        return runs / f"{self.name}.json"

    def parse_all(self, kept: Any) -> list:
        """Parses stored measurements. Raises ValueError if something is missing."""
        try:
            return [self.parse(one) for one in kept]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not measured: {error}") from None

    def read(self, runs: Path) -> list:
        """Reads the measurements in these runs. Raises ConfigError."""
        file = self.file(runs)
        try:
            return self.parse_all(json.loads(file.read_text())) if file.is_file() else []
        except (ValueError, RecursionError):
            raise ConfigError(f"{file}: is damaged; delete it and measure again with `tables {self.name}`") from None

    def read_record(self, plan: Plan, file: Path) -> list:
        """Reads the measurements that `collect` kept in NAME.json. Raises ConfigError."""
        try:
            return of_plan(plan, self.parse_all(json.loads(file.read_text()).get(self.name, [])))
        except ValueError:
            raise ConfigError(f"{file}: is not a record of runs; give the .json that `collect` wrote") from None

    def measure_all(
        self, plan: Plan, runs: Path, names: list[str], iteration: int, measure: Callable[[str, Path, int], Any]
    ) -> None:
        """Adds `measure(cell, folder, iteration)` of each cell without a result; prints the table. Raises ConfigError."""
        known, found = {cell.name for cell in cells(plan)}, self.read(runs)
        for name in names:
            if name not in known:
                raise ConfigError(f"{name}: no such cell; `tables plan` lists them, as {min(known, default='none')}")
            _refuse(runs / name, iteration)
        for name in names:
            if (name, iteration) not in [(one.cell, one.iteration) for one in found]:
                one = measure(name, runs / name, iteration)
                others = self.read(runs)  # another process may have added some, as may this one
                found = [*(o for o in others if (o.cell, o.iteration) != (name, iteration)), one]
                with atomic_write(self.file(runs)) as file:
                    file.write(json.dumps([one._asdict() for one in found], indent=1) + "\n")
        print("\n".join(self.lines(of_plan(plan, found))))


def of_plan(plan: Plan, found: list) -> list:
    """Selects the measurements of cells that the plan has; it may have lost some since."""
    names = {cell.name for cell in cells(plan)}
    return [one for one in found if one.cell in names]


def by_setting(found: list) -> dict[tuple[str, int], list]:
    """Groups by (setting, iteration), one measurement per cell; settings in order of appearance, iterations ascending."""
    settings = list(dict.fromkeys(one.cell.partition("/")[0] for one in found))
    groups: dict[tuple[str, int], list] = {}
    for one in sorted(found, key=lambda one: (settings.index(one.cell.partition("/")[0]), one.iteration)):
        groups.setdefault((one.cell.partition("/")[0], one.iteration), []).append(one)
    return groups


def heading(setting: str, iteration: int, ours: list) -> str:
    return f"{setting}, {when(iteration)}: {', '.join(one.cell.partition('/')[2] for one in ours)}"


def when(iteration: int) -> str:
    return f"after {iteration} iteration{'s' * (iteration > 1)}" if iteration else "at the start"


def restored(folder: Path, iteration: int) -> tuple[Job, Any, TrainState]:
    """Restores a run's (job, reference policy, training state) after this many iterations: from a checkpoint, or its start."""
    config = read_config(folder)
    job = build(config)
    start = starting_params(job, folder)
    _, init = make_train_step(job)
    state = init(start)
    if iteration:
        checkpoints = Checkpoints(folder / "checkpoints", config.log)
        state = TrainState.from_checkpoint(checkpoints.restore(iteration, state.to_checkpoint()))
        checkpoints.close()
    return job, job.reference_copy(start), state


def _refuse(folder: Path, iteration: int) -> None:
    """Raises ConfigError if an iteration of a run cannot be measured."""
    if not (folder / "config.yaml").is_file() or not has_ended(folder, (config := read_config(folder)).iterations):
        raise ConfigError(f"{folder}: the run has not ended; `tables run` ends it")
    if backend(config) != "compiled":
        raise ConfigError(f"{folder}: env.name={config.env.name}: this needs an environment compiled with the policy")
    if config.reward.source or config.rollout.group_size < 2:
        raise ConfigError(f"{folder}: this needs rollout.group_size of 2 or more, and no reward.source")
    if iteration and not (folder / "checkpoints" / str(iteration)).is_dir():
        raise ConfigError(
            f"--at {iteration}: {folder} has no checkpoint of it; log.checkpoint_every and keep_checkpoints say which "
            "it keeps, and 0 is its start"
        )
