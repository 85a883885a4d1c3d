"""Game files as arrays for `compiled.py`: `compile_games(paths)` -> `Tables`, cached on disk if a folder is given.

Things (objects) and places (receptacles) of a game are numbered by their sorted PDDL ids, the order in which texts list
them; commands are sorted by names instead, hence a second order of each. Sets of things are bits: thing o is bit o % 32 of
word o // 32.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import struct
from tqdm import tqdm

from hgpo_jax.envs.alfworld import phrases
from hgpo_jax.envs.alfworld.game_file import sheet

# The modules that read a game: a change in them invalidates cached arrays.
CODE = (
    "dataset",
    "formulas",
    "game",
    "grammar",
    "narrator",
    "pddl",
    "phrases",
    "planner",
    "query",
    "rules",
    "game_file",
    "tables",
)
NOWHERE = -1


class Games(struct.PyTreeNode):
    """G games, padded to common bounds: O things in W = ceil(O / 32) words of bits, R places, L locations and after them the
    one where an episode starts, at most K places at one location, V words."""

    task: jax.Array  # i16[G], index into dataset.TASK_TYPES, or their number if the path names none
    moves: jax.Array  # bool[G], "move pen 1 to desk 1" (else "put pen 1 in/on desk 1")
    helps: jax.Array  # bool[G], whether there is a command `help`
    goal: jax.Array  # i16[G, .], words of the task, 0 after them
    intro: jax.Array  # i16[G, .], words of the first observation
    wanted: jax.Array  # u32[G, W], things the task is about
    target: jax.Array  # bool[G, R], target places of these things
    lamp: jax.Array  # u32[G, W], lamps one of which must be on; none unless the task is to look at a thing
    mark: jax.Array  # i16[G], row of sheets.MARKS that a wanted thing must have, or -1
    count: jax.Array  # i16[G], how many wanted things in one place
    thing_word: jax.Array  # i16[G, O], its name; 0 if the game has fewer things
    thing_order: jax.Array  # i16[G, O], things sorted by name
    thing_rank: jax.Array  # i16[G, O], a thing's position in that order
    can: jax.Array  # u32[G, 8, W], things by ability, rows as sheets.CAN
    within: jax.Array  # u32[G, O, W], things that lie in a thing from the start
    marks: jax.Array  # u32[G, 5, W], things with a mark at the start, rows as sheets.MARKS
    place_word: jax.Array  # i16[G, R], its name
    place_order: jax.Array  # i16[G, R], places sorted by name
    place_rank: jax.Array  # i16[G, R], how many things' names come before a place's
    place_can: jax.Array  # bool[G, 4, R], rows as sheets.PLACE_CAN
    opened: jax.Array  # bool[G, R], open at the start
    accepts: jax.Array  # u32[G, R, W], things that can be put into a place
    inside: jax.Array  # u32[G, R, W], things in a place at the start
    location: jax.Array  # i16[G, R], a place's location, -1 if the game has fewer places
    here: jax.Array  # i16[G, L + 1, K], places at a location in order, then -1
    here_by_name: jax.Array  # i16[G, L + 1, K], the same sorted by name
    location_word: jax.Array  # i16[G, L + 1], its name if arrivals mention it, else 0
    lying: jax.Array  # u32[G, L + 1, W], things at a location at the start
    entity: jax.Array  # i16[G, V], the thing a word names, or O + the place, or -1
    contents: jax.Array  # i16[G], most things in one place at the start
    pairs: jax.Array  # i16[G], most pairs (thing, place at one location that can take it)
    commands: jax.Array  # i16[G], most admissible commands


class Tables(NamedTuple):
    """All words, indexed by id, and the games."""

    words: tuple[str, ...]
    games: Games


def compile_games(
    paths: Sequence[str | os.PathLike],
    logic: str | os.PathLike | None = None,
    words: Sequence[str] | None = None,
    cache: str | os.PathLike | None = None,
) -> Tables:
    """Reads game files into arrays.

    Args:
      paths: those of `game.tw-pddl` files.
      logic: as in `load_game`.
      words: the words of other tables, to which these games are then limited (a trained policy has no others).
      cache: folder for the arrays; they are made anew when a file or the code that reads it has changed.

    Raises:
      OSError: a file cannot be opened.
      ValueError: one line: no game, or one that `load_game` or the arrays reject, and what to do.
    """
    if not paths:
        raise ValueError("games: is empty; name at least one game.tw-pddl file")
    file = Path(cache) / f"alfworld-{_digest(paths, logic, words)}.npz" if cache is not None else None
    if file is not None and (tables := _read(file)):
        return tables
    sheets = [sheet(Path(path), logic) for path in tqdm(paths, "compiling games", delay=3, leave=False, disable=None)]
    if words is None:
        kinds, names = (set().union(*(game[part] for game in sheets)) for part in ("kinds", "names"))
        words = phrases.vocabulary(kinds, names)
    tables = Tables(tuple(words), _stack(sheets, words))
    if file is not None:
        _write(file, tables)
    return tables


def _stack(sheets: list[dict], words: Sequence[str]) -> Games:
    split, word_id = phrases.Splitter(words), {word: number for number, word in enumerate(words)}
    bound = lambda field: max(len(game[field]) for game in sheets)  # noqa: E731
    O, L = bound("thing_word"), bound("lying") + 1
    for game in sheets:
        try:
            for field_name in ("goal", "intro"):
                game[field_name] = split(game[field_name])
            for field_name in ("thing_word", "place_word", "location_word"):
                game[field_name] = [word_id[f" {name}"] if name else 0 for name in game[field_name]]
        except (KeyError, ValueError) as error:
            problem = f"no word for {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{game['path']}: {problem}; compile all games together, or leave this one out") from None
        entity = np.full(len(words), NOWHERE)
        entity[game["thing_word"]] = np.arange(len(game["thing_word"]))
        entity[game["place_word"]] = O + np.arange(len(game["place_word"]))
        game["entity"] = entity
        for name in ("here", "here_by_name"):
            game[name] = [*game[name], *[[]] * (L - len(game[name]))]
    # In the order of names, an entry that the game does not have follows its places and things.
    fill = {"location": NOWHERE, "here": NOWHERE, "here_by_name": NOWHERE}
    fill |= {"thing_order": O - 1, "place_order": bound("place_word") - 1}
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(Games):
        values = [game[field.name] for game in sheets]
        if field.name.startswith("here"):
            width = max(len(row) for value in values for row in value)
            values = [[[*row, *[NOWHERE] * (width - len(row))] for row in value] for value in values]
        fields[field.name] = _pad([np.asarray(value) for value in values], fill.get(field.name, 0))
    lying, names = fields["lying"], fields["location_word"]
    fields["lying"] = np.pad(lying, ((0, 0), (0, L - lying.shape[1]), (0, 0)))
    fields["location_word"] = np.pad(names, ((0, 0), (0, L - names.shape[1])))
    return Games(**fields)


def join_games(first: Games, second: Games) -> Games:
    """Joins the games of two tables that have the same bounds except for the lengths of texts."""
    return jax.tree.map(lambda *fields: _pad([row for field in fields for row in field], 0), first, second)


def _pad(values: list[np.ndarray], fill: int) -> np.ndarray:
    """Stacks arrays of one rank, each padded at the ends of its axes."""
    shape = np.max([value.shape for value in values], axis=0)
    dtype = values[0].dtype if values[0].dtype in (np.bool_, np.uint32) else np.int16
    stacked = np.full((len(values), *map(int, shape)), fill, dtype)
    for row, value in enumerate(values):
        place: tuple[int | slice, ...] = (row, *(slice(0, size) for size in value.shape))
        stacked[place] = value
    return stacked


# -- on disk ------------------------------------------------------------------------------------------------------------


def _digest(paths: Sequence, logic: str | os.PathLike | None, words: Sequence[str] | None) -> str:
    parts = [Path(path) for path in paths]
    parts += [Path(logic) / name for name in ("alfred.pddl", "alfred.twl2")] if logic is not None else []
    parts += [Path(__file__).parent / f"{name}.py" for name in CODE]
    digest = hashlib.sha256(repr((tuple(map(str, paths)), words)).encode())
    for part in parts:
        digest.update(hashlib.sha256(part.read_bytes()).digest())
    return digest.hexdigest()[:24]


def _read(path: Path) -> Tables | None:
    try:
        with np.load(path) as arrays:
            words = tuple(arrays["words"].tolist())
            return Tables(words, Games(**{field.name: arrays[field.name] for field in dataclasses.fields(Games)}))
    except Exception:  # there is none yet, or it is damaged, which NumPy reports in many ways
        return None


def _write(path: Path, tables: Tables) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")  # several processes may compile the same games
    try:
        with open(partial, "wb") as file:
            np.savez_compressed(file, words=np.array(tables.words), **vars(tables.games))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
