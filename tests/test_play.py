"""`python -m hgpo_jax.envs.play`, run as a person would."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hgpo_jax.envs import cli
from hgpo_jax.envs import play as environments

ROOT = Path(__file__).resolve().parents[1]
GAMES = ROOT / "tests" / "alfworld" / "data" / "json_2.1.1"
PLAY = [sys.executable, "-m", "hgpo_jax.envs.play"]


def play(*arguments, keys="", **options):
    return subprocess.run(
        [*PLAY, *map(str, arguments)], input=keys, capture_output=True, text=True, timeout=120, cwd=ROOT, **options
    )


def commands_in(screen: str) -> list[str]:
    """The commands of one turn's list."""
    return [line.split(maxsplit=1)[1] for line in screen.splitlines() if line.startswith("  ") and line.split()[0].isdigit()]


def test_household_shows_what_an_agent_sees():
    from hgpo_jax.envs.household import Household
    from hgpo_jax.envs.household.text import HouseholdText

    env = HouseholdText(Household())
    seen = [env.reset(3), env.step("go to cabinet 1"), env.step("open cabinet 1"), env.step("dance")]
    result = play("household", "--seed", 3, keys="go to cabinet 1\nopen cabinet 1\ndance\n")
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.startswith(f"Task: {env.goal}\n")
    screens = result.stdout.split("turn ")
    assert len(screens) == 5
    for screen, (observation, commands, *_) in zip(screens, seen, strict=False):
        assert observation in screen
        assert commands_in(screen) == commands
    assert "not admissible" in screens[3] and "not admissible" not in screens[2]
    assert screens[-1].endswith("Stopped.\n")


def test_a_number_picks_a_command_and_the_seed_a_task():
    first, second = (play("household", "--seed", seed, keys="1\n").stdout for seed in (0, 1))
    assert first != second
    assert "You arrive at cabinet 1." in first


def test_a_team_is_played_by_one_person():
    result = play("household_team", "--seed", 3, keys="say fridge 1\nlook\n")
    assert result.returncode == 0 and result.stderr == ""
    screens = result.stdout.split("turn ")
    assert [command.split()[0] for command in commands_in(screens[0])] == ["say"] * 6
    assert "You are the carrier. The searcher says: fridge 1. You are in the middle" in screens[1]
    assert "look" in commands_in(screens[1])


def test_an_episode_ends_with_its_turns():
    result = play("household", "--turns", 2, keys="look\nlook\nlook\n")
    assert result.returncode == 0
    assert result.stdout.endswith("Not solved after 2 turns: reward 0.\n")
    assert result.stdout.count("turn ") == 2


def test_alfworld_plays_a_file_and_picks_from_a_folder():
    from hgpo_jax.envs.alfworld import load_game

    path = sorted(GAMES.rglob("game.tw-pddl"))[1]
    game = load_game(path)
    observation, commands = game.reset()
    move = commands[0]
    by_file = play("alfworld", path, keys=f"{move}\n")
    assert by_file.returncode == 0
    assert observation in by_file.stdout and game.step(move)[0] in by_file.stdout
    assert commands_in(by_file.stdout.split("turn ")[0]) == commands
    assert play("alfworld", GAMES, "--seed", 1, keys=f"{move}\n").stdout == by_file.stdout
    assert play("alfworld", GAMES, "--seed", 4, keys=f"{move}\n").stdout == by_file.stdout


def test_webshop_can_be_won(tmp_path):
    sys.path.insert(0, str(ROOT / "tests" / "webshop"))
    from webshop_tiny import write

    from hgpo_jax.envs.webshop.text import WebshopText

    files = write(tmp_path)[:2]
    env = WebshopText.open(*files)
    env.reset(0)
    goal = env._session.goal
    options = goal["goal_options"]
    wanted = [value for _, value in (options.items() if isinstance(options, dict) else options)]
    keys = [f"search[{goal['name']}]", f"click[{goal['asin']}]", *(f"click[{value}]" for value in wanted), "click[buy now]"]
    result = play("webshop", *files, keys="\n".join(keys) + "\n")
    assert result.returncode == 0
    assert result.stdout.startswith(f"Task: {env.goal}\n\n'Search'\n    1  search[<your query>]\n")
    assert result.stdout.endswith(f"Solved after {len(keys)} turns: reward 10, score 1.\n")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["ENVIRONMENT"]),
        (["chess"], ["chess", "household"]),
        (["sokoban", "--boxes", "5"], ["boxes=5", "4"]),
        (["household", "--tasks", "cook"], ["cook", "place"]),
        (["household", "--places", "3"], ["places=3", "6"]),
        (["household", "--seed", "x"], ["--seed", "x", "whole number"]),
        (["household", "--turns", "0"], ["--turns", "0", "whole number"]),
        (["alfworld", "no/such/game"], ["no/such/game", "no such file"]),
        (["alfworld", "README.md"], ["README.md", "JSON"]),
        (["alfworld", "configs"], ["configs", "game.tw-pddl"]),
        (["webshop", "README.md"], ["attributes"]),
        (["webshop", "none.json", "none.json"], ["none.json", "no such file"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, parts):
    result = play(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")
    for part in parts:
        assert part in result.stderr


INCOMPLETE = """
class Whole:
    max_turns, task_types, goal, task_type = 2, ("a",), "the goal", 0
    def reset(self, task): return "seen", ["do it"]
    def step(self, action): return "seen", ["do it"], 0.0, False, {"won": False, "admissible": True}

class NoSteps:
    max_turns, task_types = 2, ("a",)
    def reset(self, task): return "seen", ["do it"]

class NoGoal(Whole):
    goal = property()

class NoInfo(Whole):
    def step(self, action): return "seen", ["do it"], 0.0, False, {"won": False}

class Failing(Whole):
    def __init__(self): {}["key"]
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NoSteps", "mine.py:NoSteps lacks step: step(action) -> (observation, commands, reward, done, info"),
        ("NoGoal", "lacks goal: the task as text"),
        ("NoInfo", "the info of step(action) lacks admissible: "),
        ("Failing", "mine.py:Failing: cannot be made: KeyError: 'key'"),
    ],
)
def test_an_incomplete_environment_is_refused_in_a_line(name, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(INCOMPLETE)
    monkeypatch.setattr(sys, "argv", ["play", f"{tmp_path}/mine.py:{name}"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"do it\n")))
    with pytest.raises(SystemExit) as ended:
        cli.run(environments.main, (ValueError, ImportError))
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and said in error


def test_odd_input_is_only_an_inadmissible_action():
    result = subprocess.run(
        [*PLAY, "household"], input=b"\xff\x1b[31m\nlook\n", capture_output=True, timeout=120, cwd=ROOT
    )
    assert result.returncode == 0 and b"\x1b" not in result.stdout
    assert result.stdout.count(b"turn ") == 3


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_in_a_terminal_it_asks_and_ends_at_control_d():
    import pty

    ours, theirs = pty.openpty()
    with subprocess.Popen([*PLAY, "household"], stdin=theirs, stdout=subprocess.PIPE, cwd=ROOT) as process:
        os.write(ours, b"look\n\x04")
        screen = process.communicate(timeout=120)[0].decode()
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0
    assert "turn 1 of 20> " in screen and "turn 2 of 20> " in screen and screen.endswith("Stopped.\n")
