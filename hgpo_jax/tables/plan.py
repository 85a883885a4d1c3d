"""A plan of runs: its file, its cells, and for each the exact commands, the memory and the tokens."""

from __future__ import annotations

import fnmatch
import itertools
import math
import shlex
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import pydantic
import yaml
from pydantic import Field, StringConstraints

from hgpo_jax import config as configuration
from hgpo_jax.bench import duration
from hgpo_jax.config import CONFIGS, Config, Positive, Section, cli
from hgpo_jax.evaluate import parse_seeds
from hgpo_jax.evaluation.files import file_name
from hgpo_jax.policy.mesh import abstract_mesh
from hgpo_jax.rollout.environments import max_turns
from hgpo_jax.setup import memory
from hgpo_jax.trainer.resume import PROOFS
from hgpo_jax.utils.errors import ConfigError

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]  # part of a path and of a job's name


class Expected(Section):
    """Means over a whole run, for the expected tokens; the configuration's limits are the defaults."""

    turns: float | None = Field(None, gt=0)
    prompt: float | None = Field(None, gt=0)
    response: float | None = Field(None, gt=0)


class Tpu(Section):
    """A slice, for which the hours of training are estimated, and the mesh there."""

    type: str
    mesh: str


def _each_once(values: tuple) -> tuple:
    """Checks a list whose repetitions would be counted as if they were others. Raises ValueError."""
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{', '.join(map(str, values))}: give {value} once")
    return values


class Setting(Section):
    """An environment and a model, or `pools` of others: runs and pairs of several settings, counted together.

    config: a name in configs/ or a path. fields: overrides `field=value`. seeds: those of the evaluations after training
    (`evaluate --seeds`), on each of the splits; none if training's own evaluation is enough. columns: the columns of a table,
    shown name -> number (`results.numbers`).
    """

    title: str
    config: str = ""
    pools: tuple[Name, ...] = ()
    fields: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    splits: tuple[str, ...] = ()
    columns: dict[str, str]
    expected: Expected = Expected()
    tpu: Tpu | None = None

    @pydantic.model_validator(mode="after")
    def _is_one_or_pools(self) -> Setting:
        if bool(self.config) == bool(self.pools):
            raise ValueError("give config, or the settings that it pools")
        if self.pools and (unused := self.model_fields_set - {"title", "columns", "pools"}):
            raise ValueError(f"{min(unused)}: has no effect with pools; leave it out")
        if bool(self.seeds) != bool(self.splits):
            there, missing = ("seeds", "splits") if self.seeds else ("splits", "seeds")
            raise ValueError(f"{there}: nothing is evaluated without {missing}; give both, or leave them out")
        return self

    _are_different = pydantic.field_validator("pools", "seeds", "splits")(_each_once)


class Method(Section):
    """A row: its title, and its overrides."""

    title: str
    fields: tuple[str, ...]


class Table(Section):
    """Cells that are shown together: settings x methods x seeds.

    seeds: setting -> its own; a list in the file is of all settings. baseline: each method's paired difference to this one.
    highlight: the methods that a picture of many names besides it.
    """

    title: str
    settings: tuple[Name, ...]
    methods: tuple[Name, ...]
    seeds: dict[Name, tuple[int, ...]]
    baseline: Name | None = None
    highlight: tuple[Name, ...] = ()

    @pydantic.field_validator("seeds", mode="before")
    @classmethod
    def _by_setting(cls, seeds, info):
        return seeds if isinstance(seeds, dict) else dict.fromkeys(info.data.get("settings", ()), seeds)

    @pydantic.field_validator("seeds")
    @classmethod
    def _seeds_are_different(cls, seeds: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        for setting, of_setting in seeds.items():
            try:
                _each_once(of_setting)
            except ValueError as error:
                raise ValueError(f"{setting}: {error}") from None
        return seeds

    _are_different = pydantic.field_validator("settings", "methods")(_each_once)


class Published(Section):
    """Published numbers in percent, their source, and setting -> method -> column -> (mean, std or nothing)."""

    source: str
    numbers: dict[Name, dict[Name, dict[str, tuple[float, float | None]]]]


class Plan(Section):
    """A file in configs/tables.

    fields: overrides of all cells. variables: environment variables of every command. window: last iterations of `train/last`.
    bias_seeds: seeds with which `bias` measures the settings.
    """

    title: str
    fields: tuple[str, ...] = ()
    variables: dict[str, str] = Field({})
    window: Positive = 10
    bias_seeds: tuple[int, ...] = ()
    settings: dict[Name, Setting]
    methods: dict[Name, Method]
    tables: tuple[Table, ...]
    published: Published | None = None

    _are_different = pydantic.field_validator("bias_seeds")(_each_once)

    @pydantic.field_validator("tables")
    @classmethod
    def _have_titles_of_their_own(cls, tables: tuple[Table, ...]) -> tuple[Table, ...]:
        titles = [table.title for table in tables]
        for title in titles:
            if titles.count(title) > 1:
                raise ValueError(f"two tables have the title {title!r}; rename one")
        return tables


class Cell(NamedTuple):
    """One run of a plan."""

    setting: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.setting}/{self.method}/s{self.seed}"


class Step(NamedTuple):
    """A command of a cell. It is done when all its `proofs` exist; the first of them holds its numbers."""

    module: str
    arguments: tuple[str, ...]
    proofs: tuple[Path, ...]

    @property
    def done(self) -> bool:
        return all(file.is_file() for file in self.proofs)

    def shell(self, variables: dict[str, str]) -> str:
        """Returns the command for a shell. `$NAME` in an argument stays a variable."""
        words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        words += ["python", "-m", f"hgpo_jax.{self.module}", *map(quote, self.arguments)]
        return " ".join(words)


def quote(word: str) -> str:
    """Quotes a word for a shell that expands `$NAME` in it."""
    return f'"{word}"' if "$" in word else shlex.quote(word)


def find(path: str) -> Path:
    """Finds a plan's file, by its path or its name in configs/tables. Raises ConfigError."""
    for file in (Path(path), CONFIGS / "tables" / f"{path}.yaml"):
        if file.is_file():
            return file
    names = ", ".join(sorted(file.stem for file in (CONFIGS / "tables").glob("*.yaml")))
    raise ConfigError(f"{path}: no such plan; configs/tables has {names}")


def read(file: Path) -> Plan:
    """Reads the plan of a file. Raises ConfigError."""
    try:
        plan = Plan.model_validate(configuration.read_yaml(file.read_text()))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not a YAML file: {' '.join(str(error).split())}") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        reason = "no such field" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{file}: {where}: {reason}") from None
    for where, kind, names, options in _references(plan):
        for name in names:
            if name not in options:
                raise ConfigError(f"{file}: {where}: {name} is not one of the {kind} {', '.join(options)}")
    return plan


def _references(plan: Plan) -> Iterator[tuple[str, str, Iterable[str], Collection[str]]]:
    """Yields (where, kind, names, names of this kind that exist) of everything that the plan refers to by name."""
    with_config = [name for name, setting in plan.settings.items() if setting.config]
    for name, setting in plan.settings.items():
        yield f"settings.{name}.pools", "settings with a config", setting.pools, with_config
        first, *others = (_numbers(plan.settings[member]) for member in setting.pools or (name,))
        common = [number for number in first if all(number in of_other for of_other in others)]
        yield f"settings.{name}.columns", "numbers", setting.columns.values(), common
    published = plan.published.numbers if plan.published else {}
    yield "published.numbers", "settings", published, plan.settings
    for name, numbers in published.items():
        yield f"published.numbers.{name}", "methods", numbers, plan.methods
        for method, of_method in numbers.items():
            yield f"published.numbers.{name}.{method}", "columns", of_method, plan.settings[name].columns
    for table in plan.tables:
        where = f"table {table.title!r}"
        yield where, "settings", table.settings, plan.settings
        unpooled = [name for name in table.settings if plan.settings[name].config]
        for name in table.settings:
            yield f"{where}: {name} pools", "settings of the table", plan.settings[name].pools, unpooled
        yield f"{where}: seeds", "settings of the table", table.seeds, table.settings
        yield f"{where}: settings", "settings with seeds", unpooled, table.seeds
        yield where, "methods", table.methods, plan.methods
        yield f"{where}: baseline", "methods of the table", filter(None, [table.baseline]), table.methods
        yield where, "methods of the table", table.highlight, table.methods


def _numbers(setting: Setting) -> list[str]:
    """Lists the numbers that the runs of a setting with a config can have."""
    of_splits = [f"{split}/{number}" for split in setting.splits for number in ("success", "score")] if setting.seeds else []
    return ["train/auc", "train/last", "final/sampled", "final/greedy", *of_splits]


def cells(plan: Plan) -> list[Cell]:
    """Lists every cell once, in the order to run them: table by table, seed by seed, the methods of a seed side by side.

    Settings alternate, so that two cells that run at once seldom make the same warm start.
    """
    unique: dict[Cell, None] = {}
    for table in plan.tables:
        unpooled = [setting for setting in table.settings if plan.settings[setting].config]
        seeds = dict.fromkeys(seed for setting in unpooled for seed in table.seeds[setting])
        for seed, method, setting in itertools.product(seeds, table.methods, unpooled):
            if seed in table.seeds[setting]:
                unique[Cell(setting, method, seed)] = None
    return list(unique)


def cells_of(plan: Plan, table: Table, setting: str, method: str) -> list[Cell]:
    """Lists the cells of a table's row: every seed, of each pooled setting."""
    members = plan.settings[setting].pools or (setting,)
    return [Cell(member, method, seed) for member in members for seed in table.seeds[member]]


def select_cells(plan: Plan, patterns: Iterable[str]) -> list[Cell]:
    """Lists the cells whose names match a pattern with `*`, or all if there are no patterns. Raises ConfigError."""
    candidates, patterns = cells(plan), list(patterns)
    if not candidates:
        raise ConfigError(f"{plan.title}: the plan has no cells; give its tables settings, methods and seeds")
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(cell.name, pattern) for cell in candidates):
            raise ConfigError(f"{pattern}: no such cell; `tables plan` lists them, as {candidates[0].name}")
    return [cell for cell in candidates if not patterns or any(fnmatch.fnmatchcase(cell.name, pattern) for pattern in patterns)]


def overrides(plan: Plan, cell: Cell) -> list[str]:
    """Lists the overrides of a cell."""
    setting = plan.settings[cell.setting]
    return [*plan.fields, *setting.fields, *plan.methods[cell.method].fields, f"seed={cell.seed}"]


def config_of(plan: Plan, cell: Cell, more: tuple[str, ...] = ()) -> Config:
    """Returns a cell's configuration. `more`: further overrides. Raises ConfigError."""
    try:
        return configuration.load(plan.settings[cell.setting].config, [*overrides(plan, cell), *more])
    except ConfigError as error:
        raise ConfigError(f"{cell.name}: {error}") from None


def steps(plan: Plan, cell: Cell, runs: str | Path, more: tuple[str, ...] = ()) -> list[Step]:
    """Lists the commands of a cell in order: training, then an evaluation for each split. `more`: further overrides."""
    setting, folder = plan.settings[cell.setting], Path(runs) / cell.name
    arguments = ["--config", setting.config, "--resume", "auto", *overrides(plan, cell), *more, f"run_dir={folder}"]
    commands = [Step("train", tuple(arguments), tuple(folder / name for name in PROOFS))]
    if not setting.seeds:
        return commands
    seeds = ",".join(map(str, setting.seeds))
    parse_seeds(seeds)
    evaluation = config_of(plan, cell, more).evaluation
    more = tuple(field for field in more if not cli.of_policy(field))  # which is the run's
    now = [field for field in overrides(plan, cell) if field.startswith("evaluation.")]  # the run may have begun with others
    for split in setting.splits:
        proof = folder / "evaluations" / file_name(split, evaluation.temperature, evaluation.episodes, setting.seeds)
        commands.append(Step("evaluate", (str(folder), "--seeds", seeds, "--split", split, *now, *more), (proof,)))
    return commands


SLICES = {"v4": "tpu-v4", "v5litepod": "tpu-v5e", "v5p": "tpu-v5p", "v6e": "tpu-v6e"}  # as Google names slices


class Cost(NamedTuple):
    """devices: number in the mesh. bytes: the most that each holds. tokens: expected total, limit: maximum total.

    disk: bytes of the checkpoints that are kept, and of the one that is being written.
    hours: of the training on the setting's TPUs (bench/duration.py); None if it has none. lacking: what it lacks of their
    memory, in words.
    """

    devices: int
    bytes: int
    tokens: float
    limit: float
    disk: int
    hours: float | None
    lacking: str = ""


def cost(plan: Plan, cell: Cell) -> Cost:
    """Estimates the cost of a cell, without its weights or devices. Raises ConfigError."""
    config, setting = config_of(plan, cell), plan.settings[cell.setting]
    try:
        mesh = abstract_mesh(config.mesh)
        workload = memory.workload_of(config, mesh)
        most = memory.peak(memory.bytes_of_run(config, mesh))
    except ValueError as error:
        raise ConfigError(f"{cell.name}: {error}") from None
    validations = math.ceil(config.iterations / config.evaluation.every) if config.evaluation.every else 0
    # Training ends with a sampled and a greedy evaluation.
    evaluated = config.evaluation.episodes * (validations + 2 + len(setting.seeds) * len(setting.splits))
    episodes = config.iterations * config.rollout.prompt_groups * config.rollout.group_size + evaluated
    turns = setting.expected.turns or max_turns(config.env)
    prompt = setting.expected.prompt or workload.prompt
    response = setting.expected.response or workload.response
    whole = memory.of_state(memory.bytes_of_run(config, abstract_mesh("data=1")))
    disk = whole * (config.log.keep_checkpoints + config.log.keep_best + 1)
    hours, lacking = None, ""
    if setting.tpu:
        chip = SLICES.get(setting.tpu.type.partition("-")[0])
        if chip is None:
            expected = f"expected one of {', '.join(SLICES)} and a size, as v5p-8"
            raise ConfigError(f"settings.{cell.setting}.tpu.type={setting.tpu.type}: {expected}")
        slice_, rates = abstract_mesh(setting.tpu.mesh), duration.RATES[chip]
        parts = duration.seconds_at_limits(config, slice_, workload, rates, turns, prompt, response)
        hours = config.iterations * sum(parts.values()) / duration.REACHED / 3600
        there = memory.peak(memory.bytes_of_run(config, slice_))
        if there > memory.USABLE * memory.CHIPS[chip]:
            lacking = f"{there / memory.GiB:.3g} of {memory.CHIPS[chip] / memory.GiB:.3g} GiB"
    limit = episodes * max_turns(config.env) * (workload.prompt + workload.response)
    return Cost(mesh.size, most, episodes * turns * (prompt + response), limit, disk, hours, lacking)


def listing(plan: Plan, runs: str | Path) -> str:
    """Lists every cell with its cost and its commands, and the sums."""
    lines, total, costs = [], 0.0, {}
    for cell in cells(plan):
        key = cell.setting, cell.method  # seeds do not change sizes
        if key not in costs:
            costs[key] = cost(plan, cell)
        spent, tpu = costs[key], plan.settings[cell.setting].tpu
        total += spent.tokens
        hours = f", about {spent.hours:.2g} h on {tpu.type} (mesh={tpu.mesh}) without environments" if tpu else ""
        if tpu and spent.lacking:
            hours = f"; {tpu.type} is too small, {spent.lacking} each"
        lines.append(
            f"{cell.name}: {spent.devices} device{'s' if spent.devices > 1 else ''}, {spent.bytes / memory.GiB:.3g} GiB each, "
            f"{spent.tokens:.3g} tokens expected ({spent.limit:.3g} at most), {spent.disk / 1e9:.3g} GB of checkpoints{hours}"
        )
        lines += [f"    {step.shell(plan.variables)}" for step in steps(plan, cell, runs)]
    return "\n".join([*lines, f"{len(cells(plan))} cells, {total:.3g} tokens expected"])
