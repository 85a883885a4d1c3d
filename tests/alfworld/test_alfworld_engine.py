"""Properties of the engine that need no recording: every command, shared games, copies, wording, determinism."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from alfworld_places import GAMES, LOGIC
from hypothesis import given, settings
from hypothesis import strategies as st

from hgpo_jax.envs.alfworld import Game, load_game
from hgpo_jax.envs.alfworld.planner import plan

EVERY = [(path, logic) for path in GAMES for logic in (None, LOGIC)]
LETTERS = "lok go to\tinventry1{}#?()\0é\u2028\U0001f600İ"
LOADED = [load_game(path, logic) for path, logic in EVERY]


def walk(game: Game, chance: random.Random, steps: int) -> list:
    return [game.step(chance.choice(game.commands)) for _ in range(steps)]


@given(st.sampled_from(LOADED), st.integers(0, 2**32), st.integers(0, 30))
@settings(max_examples=30, deadline=None)
def test_every_admissible_command_does_something(loaded: Game, seed: int, steps: int) -> None:
    game = loaded.fresh()
    walk(game, random.Random(seed), steps)
    commands = game.commands
    assert commands == sorted(set(commands))
    for command in commands:
        observation, _, _ = game.copy().step(command)
        assert observation != "Nothing happens."
        assert observation == game.copy().step(f" \t{command}\n")[0]


@given(st.sampled_from(LOADED), st.integers(0, 2**32), st.text(st.sampled_from(LETTERS), max_size=20))
@settings(max_examples=30, deadline=None)
def test_other_commands_change_nothing(loaded: Game, seed: int, text: str) -> None:
    game = loaded.fresh()
    walk(game, random.Random(seed), 5)
    before, commands = game.state, game.commands
    for wrong in (text, "", " ", commands[0].upper(), commands[0] + "x", "go to the moon 1", "take", "look look", "\0"):
        if wrong.strip() not in commands:
            assert game.step(wrong) == ("Nothing happens.", commands, game.won)
            assert game.state == before


@given(st.sampled_from(LOADED), st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_copies_and_shared_games_are_independent(loaded: Game, seed: int) -> None:
    """Episodes of one loaded game, played in turns, equal the same episodes played alone."""
    first, second = loaded.fresh(), loaded.fresh()
    walk(first, random.Random(seed), 10)
    third = first.copy()
    streams = [random.Random(seed + i) for i in range(3)]
    mixed = [walk(game, chance, 1)[0] for _ in range(10) for game, chance in zip((first, second, third), streams, strict=True)]
    alone_first, alone_second = loaded.fresh(), loaded.fresh()
    walk(alone_first, random.Random(seed), 10)
    assert mixed[0::3] == walk(alone_first, random.Random(seed), 10)
    assert mixed[1::3] == walk(alone_second, random.Random(seed + 1), 10)
    assert loaded.state is loaded.data.initial


def test_play_goes_on_after_a_win_and_reset_starts_over() -> None:
    game = LOADED[0].fresh()
    start = game.reset()
    results = [game.step(command) for command in plan(game)]
    assert [won for _, _, won in results] == [False] * (len(results) - 1) + [True]
    assert game.step("look")[2] is True
    assert game.reset() == start and start[0].endswith(game.task) and not game.won


@pytest.mark.parametrize("path", GAMES, ids=lambda path: path.parent.parent.name)
def test_wording_comes_from_the_grammar(path: Path) -> None:
    """The same plan in both releases' words; the old one says 'put .. in/on ..' and names places, the new has help."""
    old, new = load_game(path), load_game(path, LOGIC)
    assert "help" in new.commands and "help" not in old.commands and old.task == new.task
    old_plan, new_plan = plan(old), plan(new)
    assert [c.replace("put ", "move ").replace(" in/on ", " to ") for c in old_plan] == new_plan
    assert old.step(old_plan[0])[0].startswith("You arrive at loc ")
    assert new.step(new_plan[0])[0].startswith(f"You arrive at {new_plan[0].removeprefix('go to ')}. ")


def test_a_changed_grammar_and_domain_are_followed(tmp_path: Path) -> None:
    """Whoever may only look at what is open cannot examine a closed drawer: rules and words are read, not built in."""
    data, changed = json.loads(GAMES[0].read_text()), tmp_path / "game.tw-pddl"
    start = data["pddl_domain"].index("(:action examineReceptacle")
    where = data["pddl_domain"].index("(atLocation ?a ?l)", start)
    data["pddl_domain"] = data["pddl_domain"][:where] + "(opened ?r) " + data["pddl_domain"][where:]
    data["grammar"] = data["grammar"].replace("close {r}", "shut {r} gently").replace("You close", "Softly you close")
    changed.write_text(json.dumps(data))
    for path, examines, shut, says in ((GAMES[0], True, "close {}", "You"), (changed, False, "shut {} gently", "Softly you")):
        game = load_game(path)
        go = next(command for command in game.commands if command.startswith("go to drawer"))
        drawer = go.removeprefix("go to ")
        game.step(go)
        assert (f"examine {drawer}" in game.commands) is examines
        game.step(f"open {drawer}")
        assert game.step(shut.format(drawer))[0].startswith(f"{says} close the {drawer}")


def test_transcripts_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "import sys, random; from hgpo_jax.envs.alfworld import load_game; game = load_game(sys.argv[1], sys.argv[2]);"
        "chance = random.Random(1); game.reset();"
        "print([game.step(chance.choice(game.commands)) for _ in range(60)])"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code, str(GAMES[-1]), str(LOGIC)],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(told) == 1
    assert "You arrive at" in told.pop()
