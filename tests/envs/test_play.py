"""`python -m hgpo_jax.envs.play`, as a person would use it."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "webshop"))
from webshop_tiny import write

from hgpo_jax.envs import command_line
from hgpo_jax.envs import play as playing
from hgpo_jax.envs.alfworld import load_game
from hgpo_jax.envs.compiled_as_text import Words
from hgpo_jax.envs.household import Household, HouseholdSubgoals, HouseholdTeam
from hgpo_jax.envs.household.text import HouseholdTeamText, HouseholdText
from hgpo_jax.envs.sokoban import Sokoban
from hgpo_jax.envs.sokoban.text import SokobanText
from hgpo_jax.envs.webshop.text import WebshopText
from tests.envs.test_user_code import COMPILED, TEXT

ROOT = Path(__file__).resolve().parents[2]
GAMES = ROOT / "tests" / "alfworld" / "data" / "json_2.1.1"
GAME = sorted(GAMES.rglob("game.tw-pddl"))[1]


@pytest.fixture
def play(monkeypatch, capsys):
    """Plays with these keys typed; gives what is shown, or the error's line where the exit code is not 0."""
    monkeypatch.chdir(ROOT)

    def played(*words, keys: str | bytes = "", code: int | None = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["play", *map(str, words)])
        keys = keys.encode() if isinstance(keys, str) else keys
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(keys), "utf-8"))
        try:
            command_line.run(playing.main, (ValueError, ImportError))
            ended = 0
        except SystemExit as exit:
            ended = exit.code
        shown, said = capsys.readouterr()
        assert ended == code
        if code:
            assert said.startswith("error: ") and said.count("\n") == 1
        else:
            assert said == ""
        return said or shown

    return played


def commands_in(screen: str) -> list[str]:
    """The commands of one turn's list."""
    return [line.split(maxsplit=1)[1] for line in screen.splitlines() if line.startswith("  ") and line.split()[0].isdigit()]


def test_a_search_is_played(play, tmp_path):
    screen = play("search", "--cache", tmp_path, keys="<search> mimor leholm</search>\nmimor leholm\n")
    assert "(1) mimor leholm was born in" in screen and "(That was not admissible" in screen
    assert "envs/search/files.py" in play("search", "--cache", tmp_path, "--data", tmp_path / "none", code=2)


def test_a_search_is_played_by_three(play, tmp_path):
    keys = "2\n<search> mimor leholm</search>\n1\n<answer> x</answer>\n"
    screen = play("search_team", "--cache", tmp_path, "--passages", 240, keys=keys)
    assert [line for line in screen.splitlines() if line.startswith("You are")] == [
        f"You are the {role}." for role in ("verifier", "searcher", "verifier", "answerer", "answerer")
    ]
    assert screen.endswith("Not solved after 4 turns: reward 0, score 0.\n") and "not admissible" not in screen


def test_a_game_shows_what_an_agent_sees(play):
    game = load_game(GAME)
    seen = [game.reset()]
    move = seen[0][1][0]
    seen += [game.step(move), game.step("dance")]
    shown = play("alfworld", GAME, keys=f"{move}\ndance\n")
    assert shown.startswith("Task: ") and shown.endswith("Stopped.\n")
    screens = shown.split("turn ")
    assert len(screens) == 4
    for screen, (observation, commands, *_) in zip(screens, seen, strict=False):
        assert observation in screen and commands_in(screen) == commands
    assert "not admissible" in screens[2] and "not admissible" not in screens[1]
    assert play("alfworld", GAME, keys="1\ndance\n").replace("> 1", f"> {move}") == shown
    for seed in (1, 4):  # of three games in the folder
        assert play("alfworld", GAMES, "--seed", seed, keys=f"{move}\ndance\n") == shown
    assert play("alfworld", GAMES, "--seed", 0) not in shown
    ended = play("alfworld", GAME, "--turns", 2, keys="look\nlook\nlook\n")
    assert ended.endswith("Not solved after 2 turns: reward 0.\n") and ended.count("turn ") == 2


@pytest.mark.parametrize(
    ("words", "kind", "inner", "turns"),
    [
        (["household", "--tasks", "two"], HouseholdText, Household, 20),
        (["household_team", "--tasks", "two", "--turns", "9"], HouseholdTeamText, HouseholdTeam, 9),
        (["household_subgoals", "--tasks", "two"], Words, HouseholdSubgoals, 20),
        (["sokoban", "--size", "8"], SokobanText, Sokoban, 50),
    ],
)
def test_generated_games_are_those_of_their_options(words, kind, inner, turns):
    arguments = playing.parser().parse_args([*words, "--seed", "3"])
    env, task = arguments.start(arguments)
    assert (type(env), type(env._env), env.max_turns, task) == (kind, inner, turns, 3)
    house = getattr(env._env, "house", env._env)
    assert getattr(house, "tasks", None) == (("two",) if "two" in words else None)


def test_a_room_is_drawn(play, tmp_path):
    file = tmp_path / "room.png"
    move = commands_in(play("sokoban", "--picture", file))[0]
    before = np.asarray(Image.open(file))
    play("sokoban", "--picture", file, keys=f"{move}\n")
    after = np.asarray(Image.open(file))
    assert before.shape == after.shape == (6 * 32, 6 * 32, 3)
    assert 0 < (before != after).any(-1).sum() <= 3 * 32 * 32  # two cells, or three with a box
    for bad in (tmp_path / "room.gif", tmp_path / "no" / "room.png"):
        assert play("sokoban", "--picture", bad, code=2).startswith(f"error: --picture {bad}: must be a .png file in a folder")


def test_a_team_is_played_by_one_person(play):
    screens = play("household_team", "--seed", 3, keys="say fridge 1\nlook\n").split("turn ")
    assert [command.split()[0] for command in commands_in(screens[0])] == ["say"] * 6
    assert "You are the carrier. The searcher says: fridge 1. You are in the middle" in screens[1]
    assert "look" in commands_in(screens[1])


def test_webshop_can_be_won(play, tmp_path):
    files = write(tmp_path)[:2]
    env = WebshopText.open(*files)
    env.reset(0)
    goal = env._session.goal
    options = goal["goal_options"]
    wanted = [value for _, value in (options.items() if isinstance(options, dict) else options)]
    keys = [f"search[{goal['name']}]", f"click[{goal['asin']}]", *(f"click[{value}]" for value in wanted), "click[buy now]"]
    shown = play("webshop", *files, keys="\n".join(keys) + "\n")
    assert shown.startswith(f"Task: {env.goal}\n\n'Search'\n    1  search[<your query>]\n")
    assert shown.endswith(f"Solved after {len(keys)} turns: reward 10, score 1.\n")


def test_a_persons_own(play, tmp_path, monkeypatch):
    (tmp_path / "rooms.py").write_text(COMPILED)
    (tmp_path / "games.py").write_text(TEXT + "    def close(self): print('put away')\n")
    monkeypatch.chdir(tmp_path)
    shown = play("./games.py:Guess", "size=2", "--seed", "1", keys="guess 0\n2\n")
    assert shown.endswith("Solved after 2 turns: reward 10.\nput away\n")
    assert play("./games.py:Guess", "sizes=2", code=2) == "error: sizes=2: no such option; did you mean size?\n"
    (tmp_path / "lacking.py").write_text(
        TEXT.replace("task_types, task_type", "task_type, other") + "class Failing(Guess):\n    def __init__(self): {}['key']\n"
    )
    assert "lacking.py:Guess lacks task_types: " in play("./lacking.py:Guess", code=2)
    assert "lacking.py:Failing: cannot be made: KeyError: 'key'" in play("./lacking.py:Failing", code=2)
    (tmp_path / "failing.py").write_text(
        TEXT.replace("self.turn += 1", "sys.exit(0)").replace("class", "import sys\nclass") + "class Later(Guess):\n"
        "    words, action_length = ('', 'guess'), 2\n    def reset(self, task): return 1 / 0\n"
    )
    assert "step('guess 0') fails with SystemExit: 0 (" in play("./failing.py:Guess", keys="guess 0\n", code=2)
    assert "reset(0) fails with ZeroDivisionError: division by zero (" in play("./failing.py:Later", code=2)
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit()\n")
    assert "its import fails: SystemExit: (" in play("./leaving.py:Any", code=2)
    (tmp_path / "endless.py").write_text(TEXT.replace(", max_turns: int = 3", "").replace("= size, max_turns", "= size, 3"))
    assert play("./endless.py:Guess", "--turns", 5, code=2) == (
        "error: --turns 5: ./endless.py:Guess has no option max_turns; leave it out\n"
    )
    (tmp_path / "open_rooms.py").write_text(
        COMPILED.replace("class Corridor", "import dataclasses\n@dataclasses.dataclass\nclass Corridor")
    )
    assert play("./open_rooms.py:Corridor", keys="right\nright\n").endswith("reward 10.\n")
    in_words = play("./rooms.py:Corridor", "size=4", "--seed", "1", keys="right\nright\n")
    assert in_words.startswith("Task: reach_the_end\n\nhall\nturn 1 of 4> right\n")
    assert in_words.endswith("door\n\nSolved after 2 turns: reward 10.\n")


def test_odd_input_is_only_an_inadmissible_action(play):
    shown = play("alfworld", GAME, keys=b"\xff\x1b[31m\nlook\n")
    assert "\x1b" not in shown and shown.count("turn ") == 3


def test_in_a_terminal_it_asks_and_ends_at_control_d():
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "hgpo_jax.envs.play", "alfworld", str(GAME)]
    with subprocess.Popen(words, stdin=theirs, stdout=subprocess.PIPE, cwd=ROOT) as process:
        os.write(ours, b"look\n\x04")
        screen = process.communicate(timeout=120)[0].decode()
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0
    assert "turn 1 of 50> " in screen and "turn 2 of 50> " in screen and screen.endswith("Stopped.\n")
