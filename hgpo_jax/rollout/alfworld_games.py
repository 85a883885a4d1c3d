"""ALFWorld's games as a run uses them: which splits, compiled together or played on the host, and what a folder lacks."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import jax
import numpy as np

from hgpo_jax.config import Config
from hgpo_jax.config.choices import HeldOut
from hgpo_jax.envs.alfworld.dataset import ENVIRONMENT_VARIABLE, SPLITS, list_games, split_folder
from hgpo_jax.envs.alfworld.generated import generate_games
from hgpo_jax.envs.alfworld.short_prompts import ShortPromptAlfworld
from hgpo_jax.envs.alfworld.tables import Tables, compile_games, join_games
from hgpo_jax.envs.alfworld.text import AlfworldText
from hgpo_jax.envs.alfworld.usual_places import search_order
from hgpo_jax.utils.errors import ConfigError


def alfworld(config: Config) -> ShortPromptAlfworld:
    """Loads the games of all splits that a run can use, because they share one vocabulary. Raises ConfigError."""
    return _alfworld(*_which_games(config))[0]


def alfworld_games(config: Config) -> dict[str, np.ndarray]:
    """Returns the numbers of the games of each stream of tasks (`rollout/tasks.py`), i32[.]. Raises ConfigError."""
    _, games = _alfworld(*_which_games(config))
    if (held_out := config.env.held_out) not in games:
        list_alfworld(alfworld_data(config), held_out)  # explains why
    return {"train": games["train"], "warm_start": games["train"], "held_out": games[held_out]}


def _which_games(config: Config) -> tuple:
    env = config.env
    num_generated = env.generated if env.split == "generated" else 0
    return alfworld_data(config), env.split, num_generated, env.max_turns, Path(config.cache_dir, "alfworld")


@functools.lru_cache(maxsize=2)  # the policy, the memory plan and the runner all call it
def _alfworld(
    data: str, split: str, num_generated: int, max_turns: int, cache: Path
) -> tuple[ShortPromptAlfworld, dict[str, np.ndarray]]:
    files = _training_files(data, split)
    held_out: list[Path] = []
    count, games = len(files), {"train": np.arange(len(files), dtype=np.int32)}
    for name in get_args(HeldOut):
        with contextlib.suppress(ConfigError):  # a folder need not have both; `alfworld_games` checks for the requested one
            paths = list_alfworld(data, name)
            games[name] = count + len(held_out) + np.arange(len(paths), dtype=np.int32)
            held_out += paths
    try:
        words, tables = compile_games([*files, *held_out], cache=cache)
        order = search_order(words, jax.tree.map(lambda field: field[:count], tables))
        if num_generated:
            games["train"] = np.append(games["train"], len(tables.task) + np.arange(num_generated, dtype=np.int32))
            tables = join_games(tables, generate_games(files, held_out, num_generated, seed=0, cache=cache).games)
    except (ValueError, OSError) as error:
        raise ConfigError(f"env.data={data}: {' '.join(str(error).split())}") from None
    env = ShortPromptAlfworld(Tables(words, tables), max_turns)
    env.search_order = order  # the expert has no information about held-out games
    return env, games


def alfworld_data(config: Config) -> str:
    """Returns the folder of ALFWorld's games. Raises ConfigError if none is configured."""
    if folder := config.env.data or os.environ.get(ENVIRONMENT_VARIABLE, ""):
        return folder
    raise ConfigError(
        "env.data=: alfworld needs its games; unpack ALFWorld's json_2.1.1 (or later) and give data=FOLDER, where it lies, "
        f"or set {ENVIRONMENT_VARIABLE}"
    )


def list_alfworld(data: str, split: str) -> list[Path]:
    """Lists the games of a split. Raises ConfigError."""
    try:
        return [game.path for game in list_games(split, data)]
    except (ValueError, OSError) as error:
        raise ConfigError(f"env.data={data}: {' '.join(str(error).split())}{_other_splits(data, split)}") from None


def _other_splits(data: str, missing: str) -> str:
    """Describes the splits that a folder has instead of the missing one, and the field that selects them."""
    there = []
    for split in SPLITS:
        with contextlib.suppress(ValueError):
            split_folder(split, data)
            there.append(split)
    if not there or missing in there:
        return ""
    held_out = get_args(HeldOut)
    field, alike = ("env.held_out", held_out) if missing in held_out else ("env.split", ("train", "valid_train"))
    usable = [f"give {field}={split}" for split in alike if split in there]
    return f"; it has {', '.join(there)}, {usable[0] if usable else f'none of which is for {field}'}"


def alfworld_text(config: Config) -> tuple[Callable[[], AlfworldText], Callable[[], AlfworldText]]:
    """Returns the factories of the games on the host. Raises ConfigError."""
    env, data = config.env, alfworld_data(config)
    make = functools.partial(AlfworldText, max_turns=env.max_turns, cache=Path(config.cache_dir, "alfworld"))
    return functools.partial(make, _training_files(data, env.split)), functools.partial(make, list_alfworld(data, env.held_out))


def _training_files(data: str, split: str) -> list[Path]:
    """Lists the games of a split; for `generated`, those that provide the rooms. Raises ConfigError."""
    if split != "generated":
        return list_alfworld(data, split)
    try:
        split_folder("train", data)
    except ValueError:
        return list_alfworld(data, "valid_train")
    return list_alfworld(data, "train")
