"""More games made in the rooms of given ones: that they are new, can be won and are what the engine plays."""

import dataclasses
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from alfworld_places import GAMES
from alfworld_play import compare
from alfworld_writer import room, write_game

from hgpo_jax.envs.alfworld import generated, load_game, usual_places
from hgpo_jax.envs.alfworld.dataset import TASK_TYPES
from hgpo_jax.envs.alfworld.generated import generate_games, tasks_of
from hgpo_jax.envs.alfworld.planner import plan
from hgpo_jax.envs.alfworld.tables import Tables, compile_games

GIVEN = [path for path in GAMES if "valid_train" in path.parts]
HELD_OUT = [path for path in GAMES if path not in GIVEN]
BOUNDS = ("pairs", "commands")  # those of the game whose room it is, which hold for every way to deal its things


def check_rows(tables: Tables, numbers: list[int], given: list[Path], others: list[Path], folder: Path) -> list[Path]:
    """Asserts that these games, written as PDDL and compiled, are the rows that they were made as; returns the files."""
    rooms = compile_games(given)
    base = {room(rooms, g): path for g, path in enumerate(given)}
    files = [write_game(tables, g, base[room(tables, g)], folder) for g in numbers]
    compiled = compile_games([*given, *others, *files])
    assert set(compiled.words) <= set(tables.words)
    compiled = compile_games([*given, *others, *files], words=tables.words)
    for field in dataclasses.fields(tables.games):
        ours = getattr(tables.games, field.name)[numbers]
        theirs = getattr(compiled.games, field.name)[-len(numbers) :]
        if field.name in BOUNDS:
            assert (ours >= theirs).all(), field.name
            continue
        size = tuple(map(min, zip(ours.shape, theirs.shape, strict=True)))
        within = tuple(map(slice, size))
        np.testing.assert_array_equal(ours[within], theirs[within], field.name)
        if field.name in ("goal", "intro"):  # as long as the longest of all that were made
            assert not ours[:, size[1] :].any() and not theirs[:, size[1] :].any()
        else:
            assert ours.shape == theirs.shape, field.name
    return files


def every_task(given: Tables, refused: set) -> set:
    rooms = generated._possible_tasks(given, refused).values()
    return {task for of_kind in rooms for found in of_kind.values() for task in found}


def draws(tables: Tables, seed: int) -> generated._Draw:
    return generated._Draw(*tables, generated._possible_tasks(tables, set()), np.random.default_rng(seed))


def test_held_out_tasks_are_not_asked_for() -> None:
    given = compile_games(GIVEN)
    own, free = set(tasks_of(given)), every_task(given, set())
    assert own <= free and every_task(given, own) == free - own
    # Two are asked for only where there are two.
    names = [Counter(given.words[word].split()[0] for word in row if word) for row in given.games.thing_word]
    twos = generated._possible_tasks(given, set())["pick_two_obj_and_place"]
    assert twos and all(names[g][task.kind] > 1 for g, tasks in twos.items() for task in tasks)


def test_same_seed_same_games() -> None:
    tables = compile_games(GIVEN)
    first, again, other = (draws(tables, seed)(40) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, again, first)
    assert (other.inside != first.inside).any((1, 2)).all()


def test_tasks_are_the_games_names() -> None:
    """`pick_heat_then_place_in_recep-Apple-None-DiningTable-26` is the folder of a game."""
    for path, task in zip(GAMES, tasks_of(compile_games(GAMES)), strict=True):
        kind, thing, _, target, _ = path.parts[-3].split("-")
        assert task[:3] == (kind, thing.lower(), target.lower())


def test_things_lie_where_they_usually_do() -> None:
    """Each as often in a place that may hold it as such things are found in such places in the given games."""
    tables = compile_games(GIVEN)
    words, games = tables
    chances, kind = usual_places.chances(words, games), usual_places.kinds_of(words)[1]
    tasks = {task: {0: rooms[0]} for task, rooms in generated._possible_tasks(tables, set()).items() if 0 in rooms}
    draw, counts = generated._Draw(words, games, tasks, np.random.default_rng(0)), Counter()
    rows = [draw._row() for _ in range(1500)]
    flags = lambda sets: generated._flags(np.stack(sets), games.thing_word.shape[1])  # noqa: E731
    inside, lying = flags([row["inside"] for row in rows]), flags([row["lying"] for row in rows])
    start, accepts = flags(games.inside[:1])[0], flags(games.accepts[:1])[0]
    for thing in np.flatnonzero(start.any(0)):
        if (inside[:, :, thing] == start[:, thing]).all():
            counts["kept"] += 1
            continue
        weights = np.where(accepts[:, thing], chances[kind[games.thing_word[0, thing]], kind[games.place_word[0]]], 0)
        expected = weights / weights.sum()
        error = 5 * np.sqrt(expected * (1 - expected) / len(rows)) + 1e-9
        assert (abs(inside[:, :, thing].mean(0) - expected) <= error).all()
        assert (inside[:, :, thing].sum(1) == 1).all()
        where = games.location[0, inside[:, :, thing].argmax(1)]
        assert lying[np.arange(len(rows)), where, thing].all() and (lying[:, :, thing].sum(1) == 1).all()
        counts["dealt"] += 1
    assert counts["dealt"] > 10 and counts["kept"] < counts["dealt"] / 2


def test_refusals() -> None:
    with pytest.raises(ValueError, match="number=0: must be at least 1"):
        generate_games(GIVEN, HELD_OUT, 0, 0)
    with pytest.raises(ValueError, match="games: is empty"):
        generate_games([], [], 1, 0)


@pytest.mark.slow
@pytest.mark.needs("data")
@pytest.mark.optimized
def test_hundreds_of_games(official: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are new, the engine plays the same ones, each can be won, and they are kept."""
    given, held_out = official["valid_train"], [*official["valid_seen"], *official["valid_unseen"]]
    tables = generate_games(given, held_out, 300, 0, cache=tmp_path)
    tasks = tasks_of(tables)
    assert not set(tasks) & set(tasks_of(compile_games(held_out, cache=tmp_path))) and len(tasks) == 300 > len(set(tasks)) > 225
    share = Counter(task.task for task in tasks)
    assert set(share) == set(TASK_TYPES) and min(share.values()) > 25
    files = check_rows(tables, list(range(0, 300, 30)), given, held_out, tmp_path / "written")
    for file in files:
        assert 0 < len(plan(load_game(file))) <= 50
    assert compare(files, None, ("planner", "random", "cook"), 40, seed=0)["won"] > 0
    monkeypatch.setattr(generated, "_make_games", lambda *_: pytest.fail("made again"))
    kept = generate_games(given, held_out, 300, 0, cache=tmp_path)
    assert kept.words == tables.words
    jax.tree.map(np.testing.assert_array_equal, kept.games, tables.games)
