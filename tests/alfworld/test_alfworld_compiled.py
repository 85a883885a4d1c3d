"""The compiled games against the engine: every observation, command list, win and reward, letter by letter."""

import json
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alfworld_places import GAMES, LOGIC, TINY
from alfworld_play import PLAYERS, compare, environment, programs

from hgpo_jax.envs.alfworld import phrases, tables
from hgpo_jax.envs.alfworld.compiled import CompiledAlfworld
from hgpo_jax.envs.alfworld.tables import compile_games

WORDINGS = pytest.mark.parametrize("logic", [None, LOGIC], ids=["release 2.1.1", "current wording"])


@WORDINGS
def test_play_equals_the_engines(logic: Path | None) -> None:
    seen = compare(GAMES, logic, PLAYERS, 50, seed=0)
    assert seen["steps"] == len(GAMES) * len(PLAYERS) * 50
    put = "You put the" if logic is None else "You move the"
    for what in ("won", "invalid", "You pick up the", put, "You heat the", "You turn on the", "You are facing the"):
        assert seen[what] > 0, what
    assert (phrases.HELP in seen) == (logic is not None)


@pytest.mark.slow
@pytest.mark.needs("data")
@pytest.mark.optimized
@WORDINGS
def test_official_games_equal_the_engines(some_official: list[Path], logic: Path | None) -> None:
    seen = compare(some_official, logic, PLAYERS, 50, seed=1)
    assert seen["steps"] == 79 * len(PLAYERS) * 50
    never = {" is on.", "This"}  # no lamp of these games can be held
    other = "You put the" if logic else "You move the"
    told = {sentence for sentence in phrases.SENTENCES if sentence.startswith("You")} | set(phrases.LOOKS)
    assert told - never - {other} <= set(seen)


def test_words_that_are_no_action_change_nothing() -> None:
    env = environment(tuple(GAMES), None)
    start, step = programs(env)
    state, _ = start(jnp.arange(len(GAMES)))
    look, go, desk = env.word_id["look"], env.word_id["go to"], int(env.games.place_word[0, 0])
    wrong = [(0, 0, 0), (-1, 0, 0), (look, desk, 0), (look, 0, desk), (desk, 0, 0)]
    wrong += [(go, desk, desk), (go, 0, 0), (go, 0, desk), (go, len(env.words), 0), (go, -1, 0), (go, desk, -1)]
    for action in wrong:
        after, seen = step(state, np.array([action] * len(GAMES), np.int32))
        assert env.decode(seen["observation"][0]) == "Nothing happens." and seen["invalid"].all(), action
        before = state.replace(turn=state.turn + 1)
        jax.tree.map(np.testing.assert_array_equal, after, before)
    assert not step(state, np.array([(go, desk, 0)] * len(GAMES), np.int32))[1]["invalid"][0]


def test_words_write_together_to_texts() -> None:
    """No name runs on from a phrase into a longer word: the longest word that fits is always the right one."""
    words = phrases.vocabulary({"apple", "armchair", "alarmclock"}, {"armchair 1", "armchair 12", "inbox 1", "oven 2"})
    split = phrases.Splitter(words)
    for name in (word for word in words if word.startswith(" ") and word[-1].isdigit()):
        for phrase in (*phrases.VERBS, *phrases.SENTENCES, phrases.ITEM, phrases.COMMA, phrases.AND, phrases.WELCOME):
            ids = [words.index(phrase), words.index(name), words.index(phrases.STOP)]
            assert split(phrases.join(words, ids)) == ids
    assert len(set(words)) == len(words)


def test_tables_are_kept_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    game = tmp_path / "game.tw-pddl"
    game.write_bytes(GAMES[0].read_bytes())
    first = compile_games([game], cache=tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(tables, "sheet", lambda *_: pytest.fail("compiled again"))
        again = compile_games([game], cache=tmp_path / "cache")
    assert again.words == first.words
    jax.tree.map(np.testing.assert_array_equal, again.games, first.games)
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.stat().st_mode == game.stat().st_mode  # whoever may read other files may read it
    whole = kept.read_bytes()
    for damaged in (whole[:1000], whole[:200] + bytes(200) + whole[400:]):  # cut off, spoilt: made again
        kept.write_bytes(damaged)
        assert compile_games([game], cache=tmp_path / "cache").words == first.words
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(np, "savez_compressed", Mock(side_effect=KeyboardInterrupt))
        compile_games(GAMES[:1], cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == [kept]
    words = compile_games(GAMES).words
    assert compile_games([game], words=words, cache=tmp_path / "cache").words == words != first.words
    game.write_bytes(GAMES[1].read_bytes())
    other = compile_games([game], cache=tmp_path / "cache")
    assert other.words != first.words and len(list((tmp_path / "cache").iterdir())) == 3
    with pytest.raises(ValueError, match=r"no word for .*; compile all games together") as error:
        compile_games(GAMES[1:2], words=compile_games(GAMES[:1]).words)
    assert "\n" not in str(error.value)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="games: is empty"):
        compile_games([])
    with pytest.raises(ValueError, match="max_turns=0: must be at least 1"):
        CompiledAlfworld(compile_games(GAMES[:1]), max_turns=0)
    with pytest.raises(ValueError, match=r"tiny.tw-pddl: .*no release that can be compiled; play it with the engine"):
        compile_games([TINY])
    texts = json.loads(GAMES[0].read_text())
    problem = texts["pddl_problem"]
    place = problem.split("(receptacleAtLocation ")[1].split(")")[0]
    thing = problem.split("(inReceptacle ")[1].split()[0]
    for fact, message in (
        (f"(receptacleAtLocation {place.split()[0]} loc1)", "a receptacle is at two locations"),
        (f"(holds agent1 {thing})", "does not start in the middle of the room with empty hands"),
    ):
        path = tmp_path / "game.tw-pddl"
        changed = problem.replace("(:init", f"(:init {fact}", 1).replace("(:objects", "(:objects loc1 - location", 1)
        path.write_text(json.dumps(texts | {"pddl_problem": changed}))
        with pytest.raises(ValueError, match=f"{path}: .*{message}") as error:
            compile_games([path])
        assert "\n" not in str(error.value)
