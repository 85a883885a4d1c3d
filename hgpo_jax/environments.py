"""The configured environment and its runner: compiled together with the policy, or text programs on the host."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from envs.alfworld.dataset import ENVIRONMENT_VARIABLE, list_games
from envs.alfworld.generated import generate_games
from envs.alfworld.habits import search_order
from envs.alfworld.short_prompts import ShortPromptAlfworld
from envs.alfworld.tables import Tables, compile_games, joined
from envs.household import Household
from envs.sokoban import Sokoban
from hgpo_jax.config import Config
from hgpo_jax.config.tree import EnvConfig
from hgpo_jax.errors import ConfigError
from hgpo_jax.policy import ModelConfig, network
from hgpo_jax.policy.tokenizer import ACT
from hgpo_jax.rollout.compiled import make_rollout
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.host import HostRollout
from hgpo_jax.rollout.requirements import RUNNER, check_compiled
from hgpo_jax.rollout.result import RolloutResult
from hgpo_jax.rollout.tasks import task_keys, task_numbers
from hgpo_jax.rollout.text import ChatFormat
from hgpo_jax.sampling import Decoding


def household(config: Config) -> Household:
    """The embedded household with the configured tasks and rooms. Raises ConfigError."""
    fields = {name: getattr(config.env, name) for name in ("tasks", "rooms", "places", "things", "max_turns")}
    try:
        return Household(**fields)
    except ValueError as error:
        raise ConfigError(f"env.{error}") from None


def sokoban(config: Config) -> Sokoban:
    """Sokoban with rooms as configured. Raises ConfigError."""
    fields = {name: getattr(config.env, name) for name in ("size", "boxes", "reward", "max_turns")}
    try:
        return Sokoban(**fields)
    except ValueError as error:
        raise ConfigError(f"env.{error}") from None


def alfworld(config: Config) -> ShortPromptAlfworld:
    """The games of all splits that a run can train on or be evaluated on, for they share one vocabulary. Raises ConfigError."""
    return _alfworld(*_which_games(config))[0]


def alfworld_games(config: Config) -> dict[str, np.ndarray]:
    """The numbers of the games of each stream of tasks (`rollout/tasks.py`), i32[.]. Raises ConfigError."""
    _, games = _alfworld(*_which_games(config))
    if (held_out := config.env.held_out) not in games:
        list_alfworld(alfworld_data(config), held_out)  # says why
    return {"train": games["train"], "warm_start": games["train"], "held_out": games[held_out]}


def _which_games(config: Config) -> tuple:
    env = config.env
    made = env.generated if env.split == "generated" else 0
    return alfworld_data(config), env.split, made, env.max_turns, Path(config.cache_dir, "alfworld")


@functools.lru_cache(maxsize=2)  # policy, plan and runner all ask for it
def _alfworld(
    data: str, split: str, made: int, max_turns: int, cache: Path
) -> tuple[ShortPromptAlfworld, dict[str, np.ndarray]]:
    if made:
        try:
            files = list_alfworld(data, "train")
        except ConfigError:
            files = list_alfworld(data, "valid_train")
    else:
        files = list_alfworld(data, split)
    count, held_out, games = len(files), [], {"train": np.arange(len(files), dtype=np.int32)}
    for name in HELD_OUT:
        with contextlib.suppress(ConfigError):  # a folder need not have both; `alfworld_games` needs the one that is asked for
            found = list_alfworld(data, name)
            games[name] = count + len(held_out) + np.arange(len(found), dtype=np.int32)
            held_out += found
    try:
        words, tables = compile_games([*files, *held_out], cache=cache)
        order = search_order(words, jax.tree.map(lambda field: field[:count], tables))
        if made:
            games["train"] = np.append(games["train"], len(tables.task) + np.arange(made, dtype=np.int32))
            tables = joined(tables, generate_games(files, held_out, made, seed=0, cache=cache).games)
    except (ValueError, OSError) as error:
        raise ConfigError(f"env.data={data}: {' '.join(str(error).split())}") from None
    env = ShortPromptAlfworld(Tables(words, tables), max_turns)
    env.search_order = order  # the expert knows nothing of held-out games
    return env, games


def alfworld_data(config: Config) -> str:
    """The folder of ALFWorld's games. Raises ConfigError where none is given."""
    if folder := config.env.data or os.environ.get(ENVIRONMENT_VARIABLE, ""):
        return folder
    raise ConfigError(
        "env.data=: alfworld needs its games; unpack ALFWorld's json_2.1.1 (or later) and give data=FOLDER, where it lies, "
        f"or set {ENVIRONMENT_VARIABLE}"
    )


def list_alfworld(data: str, split: str) -> list[Path]:
    """The games of a split. Raises ConfigError."""
    try:
        return [game.path for game in list_games(split, data)]
    except (ValueError, OSError) as error:
        raise ConfigError(f"env.data={data}: {' '.join(str(error).split())}") from None


HELD_OUT = get_args(EnvConfig.model_fields["held_out"].annotation)
COMPILED: dict[str, Callable[[Config], Any]] = {"household": household, "sokoban": sokoban, "alfworld": alfworld}


class CompiledRunner:
    """Runs a compiled environment: a rollout is one compiled program.

    Args:
      games: of an environment with a list of games, the numbers (i32[.]) of those of each stream of tasks.

    Attributes:
      env: the environment.
      program: the jitted rollout (`rollout.compiled.make_rollout`).
      task_types: names; `Episodes.task` is an index into them.
      num_tasks, num_held_out_tasks: games to train on and held-out ones; None where tasks are generated.

    Raises:
      ConfigError: the environment lacks something (`rollout/requirements.py`).
    """

    def __init__(self, config: Config, env, model: ModelConfig, tokenizer, mesh: Mesh, games: dict | None = None):
        try:
            check_compiled(env, RUNNER)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.env, self.task_types, self._games = env, env.task_types, games
        # Given to the program as an argument: thousands of games take longer to compile into it.
        self._tables = jax.device_put(env.tables, NamedSharding(mesh, PartitionSpec())) if games else None
        self.num_tasks, self.num_held_out_tasks = (games and len(games[stream]) for stream in ("train", "held_out"))
        self.program = make_rollout(
            env, network(model), mesh, history_length=config.rollout.history_length,
            decode_batch_size=config.rollout.decode_batch_size, end=tokenizer.eos_token_id,
            act=tokenizer.convert_tokens_to_ids(ACT),
        )  # fmt: skip

    def rollout(self, params, tasks, keys, groups, decoding: Decoding, *, held_out: bool = False) -> RolloutResult:
        """Plays B episodes; does not wait until they are computed.

        Args:
          params: of the network that plays.
          tasks: [B], from `select_tasks`.
          keys: [B], a random key for each episode.
          groups: i32[B], prompt groups.
          held_out: whether the tasks are held-out ones.
        """
        return RolloutResult(self.program(params, tasks, keys, groups, decoding, self._tables), None)

    def select_tasks(self, stream: str, seed: int, indices) -> jax.Array:
        """What `rollout` takes as the tasks with these numbers, i32[B], in a stream (`rollout/tasks.py`)."""
        if self._games is None:
            return task_keys(stream, seed, indices)
        games = self._games[stream]
        return jnp.asarray(games[task_numbers(stream, seed, np.asarray(indices), len(games))])

    def abstract_episodes(self, params, inputs: tuple) -> Episodes:
        """Shapes and dtypes of the episodes of `rollout(params, *inputs)`, nothing computed."""
        return jax.eval_shape(self.program, params, *inputs, self._tables)

    def compile(self, params, inputs: tuple) -> None:
        """Compiles the rollout, whose first call then finds it in the compilation cache."""
        self.program.lower(params, *inputs, self._tables).compile()

    def transcript(self, result: RolloutResult, index: int) -> str:
        """One episode as a person would read it."""
        episodes = result.episodes
        text = lambda ids: self.env.decode([i for i in np.asarray(ids) if i < len(self.env.words)])  # noqa: E731
        outcome = "success" if episodes.success[index] else "failure"
        own, prompts = hasattr(self.env, "prompt"), episodes.prompts[index]
        goal = self.env.goal_text(episodes.observations[index, 0]) if own else text(prompts[0][: self.env.goal_length])
        lines = [f"task: {goal} ({outcome})"]
        for t in range(int(episodes.mask[index].sum())):
            invalid = "   (invalid)" if episodes.invalid[index, t] else ""
            lines.append(f"  {text(episodes.observations[index, t])}\n    > {text(episodes.responses[index, t])}{invalid}")
        return "\n".join(lines)


class TextRunner:
    """Runs text programs on the host: the embedded environments told in sentences or drawings, ALFWorld's games, WebShop.

    `train` and `held_out` make an environment each (`make_environments`). Attributes and methods as in `CompiledRunner`.
    """

    def __init__(
        self, config: Config, train: Callable, held_out: Callable, model: ModelConfig, tokenizer, mesh: Mesh
    ):
        env, rollout = config.env, config.rollout
        try:
            prompts = ChatFormat(tokenizer, env.name.removesuffix("_text"), rollout.prompt_limit, rollout.stop)
            self._train = HostRollout(
                train, prompts, network(model), mesh, batch=rollout.prompt_groups * rollout.group_size,
                history_length=rollout.history_length, response_limit=rollout.response_limit,
                decode_batch_size=rollout.decode_batch_size, strict=env.strict, workers=env.workers,
                time_limit=env.time_limit, ready_fraction=rollout.ready_fraction,
            )  # fmt: skip
            self._held_out = self._train.with_environment(held_out)
        except (ValueError, OSError) as error:
            raise ConfigError(f"env.name={env.name}: {' '.join(str(error).split())}") from None
        self.task_types = self._train.task_types
        self.num_tasks, self.num_held_out_tasks = self._train.num_tasks, self._held_out.num_tasks

    def rollout(self, params, tasks, keys, groups, decoding: Decoding, *, held_out: bool = False) -> RolloutResult:
        return (self._held_out if held_out else self._train)(params, tasks, keys, groups, decoding)

    def select_tasks(self, stream: str, seed: int, indices) -> list[int]:
        count = self.num_held_out_tasks if stream == "held_out" else self.num_tasks
        return task_numbers(stream, seed, np.asarray(indices), count)

    def abstract_episodes(self, params, inputs: tuple) -> Episodes:
        return self._train.abstract_episodes()

    def compile(self, params, inputs: tuple) -> None:
        """Its shapes depend on the prompts: each compiles when it first occurs."""

    def transcript(self, result: RolloutResult, index: int) -> str:
        return result.report.transcript(result.episodes, index)


def make_environments(config: Config) -> tuple[Callable, Callable]:
    """What makes one text environment for training, and one for the evaluation. Raises ConfigError."""
    env = config.env
    if env.name == "household_text":
        from envs.household.text import HouseholdText

        make = functools.partial(HouseholdText, household(config))
        return make, make
    if env.name == "sokoban_text":
        from envs.sokoban.text import SokobanText

        make = functools.partial(SokobanText, sokoban(config))
        return make, make
    if env.name == "alfworld":
        from envs.alfworld.text import AlfworldText

        make, data = functools.partial(AlfworldText, max_turns=env.max_turns), alfworld_data(config)
        return tuple(functools.partial(make, list_alfworld(data, split)) for split in (env.split, env.held_out))
    data = env.data
    if not data:
        raise ConfigError(f"env.data=: {env.name} needs its data; give data=FOLDER")
    try:
        from envs.webshop.text import WebshopText

        files = webshop_files(data)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"env.data={data}: {error}") from None
    options = {"max_turns": env.max_turns, "order": env.goal_order, "reachable_only": env.reachable_only}
    make = functools.partial(WebshopText.open, *files, **options)
    # verl-agent gives each prompt group and each of its 128 validation episodes a shuffle of its own.
    seeds = (range(config.rollout.prompt_groups), range(1000, 1128)) if env.goal_order == "verl-agent" else ((), ())
    # The first 500 goals are for evaluation, as in WebShop.
    return functools.partial(make, first=500, seeds=seeds[0]), functools.partial(make, first=0, last=500, seeds=seeds[1])


def webshop_files(folder: str) -> list[Path]:
    """The catalogue and the attributes in a folder of WebShop's files. Raises ValueError."""
    files = [next(iter(sorted(Path(folder).glob(f"{stem}*.json*"))), None) for stem in ("items_shuffle", "items_ins")]
    if None in files:
        raise ValueError("expected WebShop's items_shuffle*.json and items_ins*.json (or .json.gz) in it")
    return files
