"""Finds the games of a data folder: `list_games("valid_seen")`.

The folder is the argument `data` or the environment variable `ALFWORLD_DATA`; in it the splits lie directly or below
`json_<release>/`, as the official download unpacks them. The list has the games that ALFWorld's own environment keeps: a trial
with `traj_data.json` of one of the six task types, a path without "movable" and "Sliced", and a `game.tw-pddl` marked
solvable. The paths are sorted (ALFWorld's order depends on the file system).
"""

import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
SPLITS = ("train", "valid_seen", "valid_unseen", "valid_train")
GAME_FILE = "game.tw-pddl"
ENVIRONMENT_VARIABLE = "ALFWORLD_DATA"


class GameFile(NamedTuple):
    """A game on disk. `trial` is its path below the split folder, `task_type` one of `TASK_TYPES`."""

    path: Path
    split: str
    task_type: str
    trial: str


def type_in(path: str | os.PathLike) -> int:
    """Returns the task type of a game by its path, as an index into `TASK_TYPES`, or their number if the path tells none.

    The innermost folder that begins with one counts, as in `pick_and_place_simple-Mug-None-Desk-308/trial_.../game.tw-pddl`.
    """
    for part in reversed(Path(path).parts):
        for number, name in enumerate(TASK_TYPES):
            if part.startswith(name):
                return number
    return len(TASK_TYPES)


def data_folder(data: str | os.PathLike | None = None) -> Path:
    """Returns the data folder: `data`, or else `ALFWORLD_DATA`.

    Raises:
        ValueError: neither is given, or it is not a folder.
    """
    path = data if data is not None else os.environ.get(ENVIRONMENT_VARIABLE)
    if not path:
        raise ValueError(
            f"no ALFWorld data: set {ENVIRONMENT_VARIABLE} to the folder that holds json_2.1.1/, or name it in the call"
        )
    folder = Path(os.path.expandvars(path)).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; set {ENVIRONMENT_VARIABLE} or the argument to the ALFWorld data")
    return folder


def _release(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]


def split_folder(split: str, data: str | os.PathLike | None = None) -> Path:
    """Returns the folder with the trials of `split`; of several releases, the newest that has the split.

    Raises:
        ValueError: an unknown split, or one that is not there.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")
    folder = data_folder(data)
    releases = sorted((path for path in folder.glob("json_*") if path.is_dir()), key=_release, reverse=True)
    for candidate in [folder, *releases]:
        if (candidate / split).is_dir():
            return candidate / split
    raise ValueError(f"{folder}: no {split}/ or json_*/{split}/ in it; unpack the ALFWorld games there")


def list_games(split: str, data: str | os.PathLike | None = None, task_types: Collection[str] = TASK_TYPES) -> list[GameFile]:
    """Lists the solvable games of a split, sorted by path.

    Args:
        split: one of `SPLITS`.
        data: the data folder; default `ALFWORLD_DATA`.
        task_types: which of `TASK_TYPES` to keep.

    Raises:
        ValueError: no such folder, split or task type, a file that is not what it should be, or no game left.
    """
    unknown = sorted(set(task_types) - set(TASK_TYPES))
    if unknown or not task_types:
        raise ValueError(f"unknown or missing task types {unknown}; choose from {', '.join(TASK_TYPES)}")
    folder = split_folder(split, data)
    games = [game for trial in _trials(folder) if (game := _game(folder, trial, split, task_types))]
    if not games:
        raise ValueError(f"{folder}: no solvable game of {', '.join(task_types)}; is the download complete?")
    return games


def game_from(number: int, split: str, data: str | os.PathLike | None = None) -> GameFile:
    """Returns the first solvable game from a trial on, counted round; reads the files of no more trials than it must.

    Raises ValueError as `list_games` does.
    """
    folder = split_folder(split, data)
    trials = _trials(folder)
    for step in range(len(trials)):
        if game := _game(folder, trials[(number + step) % len(trials)], split, TASK_TYPES):
            return game
    raise ValueError(f"{folder}: no solvable game; is the download complete?")


def _trials(folder: Path) -> list[str]:
    """Lists the trials of a split that ALFWorld keeps by their names, sorted."""
    walked = ((Path(root).relative_to(folder).as_posix(), files) for root, _, files in os.walk(folder))
    complete = (trial for trial, files in walked if "traj_data.json" in files and GAME_FILE in files)
    return sorted(trial for trial in complete if "movable" not in trial and "Sliced" not in trial)


def _game(folder: Path, trial: str, split: str, task_types: Collection[str]) -> GameFile | None:
    """Returns the game of a trial; None if it is of another type or not solvable."""
    task_type = _load(folder / trial / "traj_data.json").get("task_type", "")
    path = folder / trial / GAME_FILE
    solvable = task_type in task_types and _load(path).get("solvable") is True
    return GameFile(path, split, task_type, trial) if solvable else None


def _load(path: Path) -> dict:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: broken JSON ({error}); unpack the released file again") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object; unpack the released file again")
    return data
