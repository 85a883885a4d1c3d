"""The environment of mathematics: turns, states, signals, what it costs to be hostile, and that it can be trained."""

import io
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hgpo_jax.config import load
from hgpo_jax.envs import play
from hgpo_jax.envs.math.problems import Problem, Problems
from hgpo_jax.envs.math.text import NOTHING, GeneratedMath, ListedMath, read_action
from hgpo_jax.rollout.chat_prompts import PromptInput, load_template
from hgpo_jax.rollout.environments import environment
from hgpo_jax.rollout.requirements import check_text

PROBLEM = Problem("Lena has 12 pens, finds 7 and triples them.", "57", 0, ("12+7", "19*3"))


def begun(max_turns=6):
    env = ListedMath([PROBLEM], ("problem",), max_turns)
    env.reset(0)
    return env


def call(expression):
    return f"<calculate>{expression}</calculate>"


def test_a_worked_episode():
    env = ListedMath([PROBLEM], ("problem",), 6)
    assert env.reset(0) == (NOTHING, []) and (env.goal, len(env)) == (PROBLEM.question, 1)
    assert env.step("First add. " + call("12 + 7")) == (
        "12+7=19", [], 0.0, False,
        {"won": False, "admissible": True, "truncated": False, "signals": {"format": 0.0, "calculation": 0.0}},
    )  # fmt: skip
    observation, _, _, _, info = env.step(call("12+7"))
    assert (observation, info["admissible"], info["signals"]["calculation"]) == ("12+7=19", False, -1)
    observation, _, _, _, info = env.step(call("19 / 0"))
    assert (observation, info["admissible"]) == ("12+7=19\nError: division by zero.", False)
    observation, _, _, _, info = env.step("I do not know.")
    assert observation.startswith("12+7=19\nError: write one") and info["signals"] == {"format": -1, "calculation": 0}
    assert env.step(call("19*3"))[0] == "12+7=19\n19*3=57"
    assert env.step("<answer>57.0</answer>")[:4] == ("12+7=19\n19*3=57\nRight.", [], 10.0, True)
    env.reset(0)
    assert env.step("<answer> 56 </answer>")[0:4:2] == ("Wrong.", 0.0)


def test_states_are_equal_where_the_same_is_known():
    one, other = begun(), begun()
    one.step(call("1+1"))
    other.step(call("2 × 3"))
    assert one.step(call("2*3"))[0] == other.step("Also " + call(" 1 + 1"))[0] == "1+1=2\n2*3=6"


def test_turns_run_out():
    env = begun(max_turns=2)
    assert not env.step("?")[3] and env.step("?")[3]


@pytest.mark.parametrize(("last", "truncated"), [("<answer>3</answer>", False), (call("1+1"), True), ("?", True)])
def test_a_wrong_answer_in_the_last_turn_is_no_time_limit(last, truncated):
    """A critic would go on from there."""
    *_, done, info = begun(max_turns=1).step(last)
    assert done and info["truncated"] is truncated


@pytest.mark.parametrize(("response", "found"), [
    ("<answer>7</answer>", ("answer", "7", True)), ("so <calculate> 1+1 </calculate>\n", ("calculate", "1+1", True)),
    ("<answer>7</answer> yes", ("answer", "7", False)), ("<answer>7", ("", "", False)), ("7", ("", "", False)),
    ("<calculate>1</calculate><answer>1</answer>", ("calculate", "1", False)), ("<answer></answer>", ("answer", "", True)),
    ("<calculate><answer>1</answer></calculate>", ("calculate", "<answer>1</answer>", False)),
    ("<Answer>7</Answer>", ("", "", False)), ("I could <calculate> or so. <answer>3</answer>", ("answer", "3", True)),
    ("An <answer> is due: <answer>3</answer>", ("answer", "3", True)),
    ("<answer>7</calculate>", ("", "", False)), ("<answer>" * 20_000, ("", "", False)),
])  # fmt: skip
def test_actions_are_read(response, found):
    assert read_action(response) == found


@given(st.text("<>/calculateanswer 0123456789+*^()", max_size=80), st.integers(0, 2**64 - 1))
def test_any_response_is_a_turn(response, task):
    env = GeneratedMath(Problems(), max_turns=3)
    env.reset(task)
    for text in (response, call(response), f"<answer>{response}</answer>"):
        observation, commands, reward, done, info = env.step(text)
        assert observation and commands == [] and set(info["signals"]) == set(env.signals)
        if done:
            assert reward in (0.0, 10.0) and (reward > 0) == info["won"]
            break


@pytest.mark.parametrize("text", ["9**9**9", "1" * 100_000, "(" * 100_000, "-" * 100_000, "{" * 100_000, "9!" * 50_000])
def test_hostile_texts_are_short_observations(text):
    env = begun()
    observation, _, _, done, info = env.step(call(text))
    assert len(observation) < 100 and observation.startswith("Error: ") and not done and not info["admissible"]
    assert env.step(f"<answer>{text}</answer>")[0:4:3] == ("Wrong.", True)


@pytest.mark.parametrize("held_out", [False, True])
def test_its_scripted_player_solves_all(held_out):
    kinds = defaultdict(int)
    for task in range(60):
        env = GeneratedMath(Problems(operations=1 + task % 8, digits=1 + task % 6), held_out=held_out)
        env.reset(task)
        turns, done = 0, False
        while not done:
            *_, reward, done, info = env.step(env.expert(2))
            turns += 1
            assert info["admissible"]  # an equal call is never made twice
        assert reward == 10 and turns <= 2 + task % 8
        kinds[env.task_types[env.task_type]] += 1
    assert len(kinds) == 3 and not check_text(env)  # lists no commands


def test_the_template_shows_what_is_known_and_leaves_actions_whole():
    template = load_template(environment(load(None, ["env.name=math"]).env).template)
    shown = template.render(PromptInput("GOAL", [("o", "so <calculate>1+1</calculate>")], 1, "1+1=2", []))
    assert "GOAL" in shown and "1+1=2" in shown and "so <calculate>1+1</calculate>" in shown
    assert template.bare and template.parse("<think>a</think> so <answer>2</answer>", 30).action == "so <answer>2</answer>"


@pytest.mark.parametrize(("arguments", "last"), [
    ([], "Solved after 1 turns: reward 10."),
    (["--problems", "poem"], "error: problems=['poem']: give different ones of arithmetic, equation, story"),
    (["--data", "nowhere"], "error: nowhere: has no train.jsonl; give a folder with train.jsonl and test.jsonl"),
])  # fmt: skip
def test_it_can_be_played(arguments, last, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["play", "math", *arguments])
    stdin = io.TextIOWrapper(io.BytesIO(b"<answer>262</answer>\n"))
    monkeypatch.setattr("sys.stdin", stdin)
    with pytest.raises(SystemExit) if arguments else pytest.MonkeyPatch.context():
        play.command_line.run(play.main, (ValueError, ImportError))
    assert "".join(capsys.readouterr()).strip().splitlines()[-1] == last
