"""Measurements in single runs of a plan, kept beside them and, by `collect`, in NAME.json.

`advantage_errors_in_runs.py` and `gradients.py` make them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pydantic

from hgpo_jax.analysis.dumps import read_config
from hgpo_jax.config import Section
from hgpo_jax.rollout.backend import backend
from hgpo_jax.tables.plan import Plan, cells
from hgpo_jax.trainer.resume import has_ended
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.files import atomic_write
from hgpo_jax.utils.markdown_table import table
from hgpo_jax.utils.progress import say


def require(names: Iterable[str], numbers: Iterable[str]) -> pydantic.AfterValidator:
    """Builds a check that a dictionary has these names, and for each of them these numbers."""

    def check(values: dict) -> dict:
        for name, number in itertools.product(names, numbers):
            if number not in values.get(name, ()):
                raise ValueError(f"{number} of {name} is missing")
        return values

    return pydantic.AfterValidator(check)


Numbers = dict[str, dict[str, float]]  # estimator -> name -> number


def read_measured(file: Path, kind: Any, command: str) -> Any:
    """Reads measurements as a type such as list[Measured], empty if there is no file. Raises ConfigError."""
    parse = pydantic.TypeAdapter(kind)
    try:
        return parse.validate_python(json.loads(file.read_text())) if file.is_file() else kind()
    except (ValueError, RecursionError):
        raise ConfigError(f"{file}: is damaged; delete it and measure again with `tables {command}`") from None


class InRun(Section):
    """The result of one cell after some iterations. What all results of a kind have in common:

    name: of the command, of RUNS/NAME.json, in the record that `collect` keeps, and of its picture. title, note: text above
    the tables. about: what the picture shows. estimators: in order; `apart`, the last of them, stand below a gap. labels: the
    numbers of an estimator and their labels; NAME_error is the standard error of NAME, if one measurement has it.
    """

    model_config = pydantic.ConfigDict(allow_inf_nan=True)
    name: ClassVar[str]
    title: ClassVar[str]
    note: ClassVar[str]
    about: ClassVar[str]
    estimators: ClassVar[tuple[str, ...]]
    apart: ClassVar[tuple[str, ...]]
    labels: ClassVar[dict[str, str]]
    cell: str
    iteration: int
    success: float  # a share of the episodes
    numbers: Numbers

    @property
    def details(self) -> str:
        """What the heading of a table says of how it was measured."""
        return ""

    @classmethod
    def file(cls, runs: Path) -> Path:
        return runs / f"{cls.name}.json"

    @classmethod
    def read(cls, runs: Path) -> list:
        """Reads the measurements in these runs. Raises ConfigError."""
        return read_measured(cls.file(runs), list[cls], cls.name)  # type: ignore[valid-type]

    @classmethod
    def lines(cls, measurements: list) -> list[str]:
        """Formats the numbers by estimator, for each setting and iteration: means and standard errors over its runs."""
        text: list[str] = []
        for (setting, iteration), ours in by_setting(measurements).items():
            runs = ", ".join(one.cell.partition("/")[2] for one in ours)
            details = dict.fromkeys(one.details for one in ours if one.details)
            text += ["", "; ".join([f"{setting}, {moment(iteration)}: {runs}", *details]), ""]
            of_each = {name: [one.numbers[name] for one in ours] for name in cls.estimators}
            lines = [[name, *(_mean(numbers, what) for what in cls.labels)] for name, numbers in of_each.items()]
            text += table(["estimator", *cls.labels.values()], lines)
        return text[1:]


def _mean(measured: list[dict[str, float]], what: str) -> str:
    """Formats the mean of a number and its standard error: from the errors of each, or else from their spread."""
    values = np.array([numbers[what] for numbers in measured])
    errors = [numbers[f"{what}_error"] for numbers in measured if f"{what}_error" in numbers]
    if errors:
        return f"{values.mean():.3f} ± {np.linalg.norm(errors) / len(values):.3f}"
    return f"{values.mean():.3f}" + (f" ± {values.std(ddof=1) / np.sqrt(len(values)):.3f}" if len(values) > 1 else "")


def measure_all(
    kind: type[InRun], plan: Plan, runs: Path, names: list[str], iteration: int, measure: Callable[[str, Path, int], InRun]
) -> None:
    """Adds `measure(cell, folder, iteration)` of each cell without a result; prints the table. Raises ConfigError."""
    cell_names, measurements = {cell.name for cell in cells(plan)}, kind.read(runs)
    for name in names:
        if name not in cell_names:
            raise ConfigError(f"{name}: no such cell; `tables plan` lists them, as {min(cell_names, default='none')}")
        _refuse(runs / name, iteration)
    for name in names:
        if (name, iteration) not in [(one.cell, one.iteration) for one in measurements]:
            one = measure(name, runs / name, iteration)
            others = kind.read(runs)  # another process may have added some, as may this one
            measurements = [*(o for o in others if (o.cell, o.iteration) != (name, iteration)), one]
            with atomic_write(kind.file(runs)) as file:
                file.write(json.dumps([one.model_dump(by_alias=True) for one in measurements], indent=1) + "\n")
    say("\n".join(kind.lines(of_plan(plan, measurements))))


def of_plan(plan: Plan, measurements: list) -> list:
    """Selects the measurements of cells that the plan has; it may have lost some since."""
    names = {cell.name for cell in cells(plan)}
    return [one for one in measurements if one.cell in names]


def by_setting(measurements: list) -> dict[tuple[str, int], list]:
    """Groups by (setting, iteration), one measurement per cell; settings in order of appearance, iterations ascending."""
    settings = list(dict.fromkeys(one.cell.partition("/")[0] for one in measurements))
    groups: dict[tuple[str, int], list] = {}
    for one in sorted(measurements, key=lambda one: (settings.index(one.cell.partition("/")[0]), one.iteration)):
        groups.setdefault((one.cell.partition("/")[0], one.iteration), []).append(one)
    return groups


def moment(iteration: int) -> str:
    return f"after {iteration} iteration{'s' * (iteration > 1)}" if iteration else "at the start"


def _refuse(folder: Path, iteration: int) -> None:
    """Raises ConfigError if an iteration of a run cannot be measured."""
    if not (folder / "config.yaml").is_file() or not has_ended(folder, (config := read_config(folder)).iterations):
        raise ConfigError(f"{folder}: the run has not ended; `tables run` ends it")
    if backend(config) != "compiled":
        raise ConfigError(f"{folder}: env.name={config.env.name}: this needs an environment compiled with the policy")
    if config.reward.source or config.rollout.group_size < 2:
        raise ConfigError(f"{folder}: this needs rollout.group_size of 2 or more, and no reward.source")
    if iteration and not (folder / "checkpoints" / str(iteration)).is_dir():
        keeps = "log.checkpoint_every and keep_checkpoints say which it keeps, and 0 is its start"
        raise ConfigError(f"--at {iteration}: {folder} has no checkpoint of it; {keeps}")
