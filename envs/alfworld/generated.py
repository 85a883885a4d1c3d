"""More games in the rooms of existing ones: `generate_games(paths, held_out, number, seed)`.

A new game takes over a game's room: its places, its things and their abilities. The task, the kind of its thing, the target of
that kind, and the positions of all loose things are drawn anew (as likely as in the existing games, and within the rules).
Games are kept if they are not won from the start, the local expert wins them, and no held-out game has the same task, kind of
thing, target and room together.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from hgpo_jax.envs.alfworld import phrases, tables, usual_places
from hgpo_jax.envs.alfworld.compiled import CompiledAlfworld
from hgpo_jax.envs.alfworld.dataset import TASK_TYPES
from hgpo_jax.envs.alfworld.expert import expert_action
from hgpo_jax.envs.alfworld.game_file import CAN, MARKS, PLACE_CAN
from hgpo_jax.envs.alfworld.tables import Games, Tables, compile_games

# The modules that a new game depends on, besides the game files and the code that reads them.
CODE = ("bits", "compiled_commands", "compiled", "expert", "generated", "usual_places", "compiled_observations")
BATCH = 1024  # games played at once
TURNS = 50  # limit for the expert to win
# By task type: the sentences of the official games; and the treatment of the thing, rows of MARKS, CAN and PLACE_CAN.
_SENTENCES = {
    "pick_and_place_simple": ("put a {} in {}.", "put some {} on {}."),
    "look_at_obj_in_light": ("look at {} under the {}.", "examine the {} with the {}."),
    "pick_clean_then_place_in_recep": ("put a clean {} in {}.", "clean some {} and put it in {}."),
    "pick_heat_then_place_in_recep": ("put a hot {} in {}.", "heat some {} and put it in {}."),
    "pick_cool_then_place_in_recep": ("put a cool {} in {}.", "cool some {} and put it in {}."),
    "pick_two_obj_and_place": ("put two {} in {}.", "find two {} and put them in {}."),
}
_TREATED = {
    "pick_clean_then_place_in_recep": ("isclean", "cleanable", "clean"),
    "pick_heat_then_place_in_recep": ("ishot", "heatable", "heat"),
    "pick_cool_then_place_in_recep": ("iscool", "coolable", "cool"),
}
GOAL_LENGTH = 6  # words of the longest sentence
LOOK, TWO = "look_at_obj_in_light", "pick_two_obj_and_place"


class Task(NamedTuple):
    """The identity of a game, which must differ from those of held-out games. A room is the names of its places."""

    task: str
    kind: str
    target: str  # kind of place, or of lamp
    room: tuple[str, ...]


def generate_games(
    paths: Sequence[str | os.PathLike],
    held_out: Sequence[str | os.PathLike],
    number: int,
    seed: int,
    logic: str | os.PathLike | None = None,
    cache: str | os.PathLike | None = None,
) -> Tables:
    """Makes games.

    Args:
      paths: the games that provide the rooms, as for `compile_games`.
      held_out: games that must not be made. Their words are among those of the result.
      number: number of games to make.
      seed: another one makes other games.
      logic, cache: as for `compile_games`.

    Returns: only the new games, with shapes that also hold the existing ones. Locations keep the numbers that they have in the
    game that provides the room.

    Raises:
      OSError, ValueError: as `compile_games`, or no game can be made in these rooms.
    """
    if number < 1:
        raise ValueError(f"number={number}: must be at least 1")
    files = [*paths, *held_out]
    file = None
    if cache is not None:
        digest = hashlib.sha256(repr((tables._digest(files, logic, None), len(paths), number, seed)).encode())
        for name in CODE:
            digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
        file = Path(cache) / f"alfworld-generated-{digest.hexdigest()[:24]}.npz"
        if result := tables._read(file):
            return result
    words, everything = compile_games(files, logic, cache=cache)
    source = jax.tree.map(lambda field: field[: len(paths)], everything)
    refused = set(tasks_of(Tables(words, jax.tree.map(lambda field: field[len(paths) :], everything))))
    result = Tables(words, _make_games(words, source, refused, number, np.random.default_rng(seed)))
    if file is not None:
        tables._write(file, result)
    return result


def tasks_of(tables: Tables) -> list[Task]:
    """Returns the task of each game."""
    names, kind = usual_places.kinds_of(tables.words)
    games, words = tables.games, tables.words
    tasks = []
    for g in range(len(games.task)):
        of = lambda flags, those, g=g: names[kind[those[g][np.flatnonzero(flags)[0]]]]  # noqa: E731
        lamps = _flags(games.lamp[g])
        target = of(lamps, games.thing_word) if lamps.any() else of(games.target[g], games.place_word)
        task = TASK_TYPES[games.task[g]] if games.task[g] < len(TASK_TYPES) else "unknown"
        tasks.append(Task(task, of(_flags(games.wanted[g]), games.thing_word), target, _room(words, games, g)))
    return tasks


def _room(words: Sequence[str], games: Games, g: int) -> tuple[str, ...]:
    return tuple(words[word] for word in games.place_word[g] if word)


def _make_games(words: tuple[str, ...], source: Games, refused: set[Task], number: int, rng: np.random.Generator) -> Games:
    """Makes `number` games that the expert wins."""
    tasks = _possible_tasks(Tables(words, source), refused)
    if not tasks:
        raise ValueError("held_out: leaves no task for the rooms of the given games; give more games")
    order = CompiledAlfworld(Tables(words, source)).search_order
    draw = _Draw(words, source, tasks, rng)
    batches, missing = [], number
    while missing:
        drawn = draw(missing + missing // 4 + 16)
        env = CompiledAlfworld(Tables(words, drawn), TURNS)
        env.search_order = order
        won = np.flatnonzero(_won(env))[:missing]
        if len(won) < len(drawn.task) / 100:
            raise ValueError(f"only {len(won)} of {len(drawn.task)} games drawn in the given rooms can be won; give more games")
        batches.append(jax.tree.map(lambda field, won=won: field[won], drawn))
        missing -= len(won)
    return jax.tree.map(lambda *fields: np.concatenate(fields), *batches)


def _won(env: CompiledAlfworld) -> np.ndarray:
    """Marks the games that are not won from the start, but that the expert wins, bool[G]."""

    def turn(carry, _):
        state, recent, won = carry
        action = expert_action(env, state, recent, None)
        state, _, reward, _, _ = env.step(state, action)
        return (state, jnp.concatenate([recent[1:], action[None]]), won | (reward > 0)), None

    def play(game):
        state, _ = env.start(game)
        start = (state, jnp.zeros((2, env.action_length), jnp.int32), jnp.array(False))
        (_, _, won), _ = jax.lax.scan(turn, start, length=TURNS)
        return won & ~env.won(state)

    count = len(env)
    batch = min(BATCH, count)
    games = np.arange(count + -count % batch).reshape(-1, batch) % count
    together = jax.jit(jax.vmap(play))
    return np.concatenate([together(some) for some in tqdm(games, "playing games", delay=3, leave=False, disable=None)])[:count]


def _possible_tasks(tables: Tables, refused: set[Task]) -> dict[str, dict[int, list[Task]]]:
    """Lists the possible tasks by task type and number of the game that provides the room."""
    names, kind = usual_places.kinds_of(tables.words)
    words, games = tables.words, tables.games
    lamps = {names[k] for k in kind[games.thing_word[_flags(games.lamp, games.thing_word.shape[1])]]}
    possible: dict[str, dict[int, list[Task]]] = {}
    for g in range(len(games.task)):
        loose = _loose(games, g)
        room = _room(words, games, g)
        can = dict(zip(CAN, _flags(games.can[g], loose.size), strict=True))
        accepts = _flags(games.accepts[g], loose.size)
        thing_kind, place_kind = kind[games.thing_word[g]], kind[games.place_word[g]]
        lit = sorted({names[k] for k in thing_kind[can["toggleable"]]} & lamps)
        for k in np.unique(thing_kind[loose]):
            of_kind = loose & (thing_kind == k)
            fits = [names[p] for p in np.unique(place_kind[(accepts & of_kind).any(1)])]
            for task in TASK_TYPES:
                _, able, tool = _TREATED.get(task, (None, None, None))
                if able and not ((can[able] & of_kind).any() and games.place_can[g, PLACE_CAN.index(tool)].any()):
                    continue
                if task == TWO and of_kind.sum() < 2:
                    continue
                tasks = [Task(task, names[k], target, room) for target in (lit if task == LOOK else fits)]
                if tasks := [one for one in tasks if one not in refused]:
                    possible.setdefault(task, {}).setdefault(g, []).extend(tasks)
    return possible


def _loose(games: Games, g: int) -> np.ndarray:
    """Marks a game's things to be placed anew, bool[O]: those that can be carried, lie in a place and relate to no other."""
    count = games.thing_word.shape[1]
    within = _flags(games.within[g], count)
    movable = _flags(games.can[g, CAN.index("pickupable")], count) & _flags(games.inside[g], count).any(0)
    return movable & _flags(games.accepts[g], count).any(0) & ~within.any(0) & ~within.any(1)


class _Draw:
    """Draws games: `draw(number)` returns that many, which need not be solvable."""

    def __init__(self, words: Sequence[str], source: Games, tasks: dict[str, dict[int, list[Task]]], rng: np.random.Generator):
        self.words, self.source, self.tasks, self.rng = words, source, tasks, rng
        self.names, self.kind = usual_places.kinds_of(words)
        self.chances = usual_places.chances(words, source)
        self.split = lru_cache(maxsize=None)(phrases.Splitter(words))
        self.rooms = (source.intro == phrases.ID[phrases.TASK]).argmax(1) + 1  # words of an introduction before the task
        self.goal_length = max(source.goal.shape[1], GOAL_LENGTH)

    def __call__(self, number: int) -> Games:
        rows: list[dict[str, np.ndarray | np.integer]] = []
        with tqdm(total=number, desc="drawing games", delay=3, leave=False, disable=None) as progress:
            while len(rows) < number:
                row = self._row()
                if row["contents"] <= self.source.contents.max():  # no longer observations than in the existing games
                    rows.append(row)
                    progress.update()
        base = np.array([row.pop("game") for row in rows])
        games = jax.tree.map(lambda field: field[base], self.source)
        return games.replace(**{name: tables._pad([np.asarray(row[name]) for row in rows], 0) for name in rows[0]})

    def _row(self) -> dict[str, np.ndarray | np.integer]:
        """Returns a game's new fields, and the `game` that provides its room."""
        rng, source, kind = self.rng, self.source, self.kind
        name = TASK_TYPES[rng.choice([TASK_TYPES.index(task) for task in self.tasks])]
        g = rng.choice(list(self.tasks[name]))
        task = self.tasks[name][g][rng.integers(len(self.tasks[name][g]))]
        count = source.thing_word.shape[1]
        thing_kind, place_kind = kind[source.thing_word[g]], kind[source.place_word[g]]
        is_lamp = _flags(source.can[g, CAN.index("toggleable")], count) & (thing_kind == self.names.index(task.target))
        mark = MARKS.index(_TREATED[name][0]) if name in _TREATED else -1
        goal = self.split(_SENTENCES[name][rng.integers(2)].format(task.kind, task.target))
        intro = [*source.intro[g, : self.rooms[g]], *goal]
        inside, lying, moved = self._places(g, thing_kind, place_kind)
        return {
            "game": g,
            "task": np.int16(TASK_TYPES.index(name)),
            "goal": np.pad(goal, (0, int(self.goal_length) - len(goal))),
            "intro": np.pad(intro, (0, int(self.rooms.max() + self.goal_length) - len(intro))),
            "wanted": _bits(thing_kind == self.names.index(task.kind)),
            "target": (place_kind == self.names.index(task.target)) & (name != LOOK),
            "lamp": _bits(is_lamp & (name == LOOK)),
            "mark": np.int16(mark),
            "count": np.int16(2 if name == TWO else 1),
            "inside": _bits(inside),
            "lying": _bits(lying),
            "marks": _bits(_flags(source.marks[g], count) & ~moved),
            "contents": np.int16(inside.sum(1).max()),
        }

    def _places(self, g: int, thing_kind, place_kind):
        """Places things anew: in places bool[R, O], at locations bool[L + 1, O]; and which ones are placed, bool[O]."""
        source, count = self.source, thing_kind.size
        loose = _loose(source, g)
        inside, lying = _flags(source.inside[g], count), _flags(source.lying[g], count)
        chance = np.where(_flags(source.accepts[g], count), self.chances[thing_kind][:, place_kind].T, 0.0)[:, loose].cumsum(0)
        place = (self.rng.random(loose.sum()) * chance[-1] >= chance).sum(0)
        inside[:, loose] = np.arange(len(inside))[:, None] == place
        lying[:, loose] = np.arange(len(lying))[:, None] == source.location[g, place]
        return inside, lying, loose


def _flags(sets: jax.Array | np.ndarray, count: int | None = None) -> np.ndarray:
    """Unpacks bits u32[..., W] to flags bool[..., count]."""
    return np.unpackbits(np.ascontiguousarray(sets).view(np.uint8), axis=-1, bitorder="little", count=count).astype(bool)


def _bits(flags: np.ndarray) -> np.ndarray:
    """Packs flags bool[..., O] into bits u32[..., W]."""
    padded = np.pad(flags, [(0, 0)] * (flags.ndim - 1) + [(0, -flags.shape[-1] % 32)])
    return np.packbits(padded, axis=-1, bitorder="little").view(np.uint32)
