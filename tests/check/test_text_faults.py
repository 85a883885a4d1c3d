"""The checks of text environments: each kind of fault and oddity in one that has it; and the command."""

import random
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hgpo_jax.check import text
from hgpo_jax.check.__main__ import check, main, prompt_measure
from hgpo_jax.check.play import GROUP, Play, table, warnings
from hgpo_jax.config import cli, load
from hgpo_jax.rollout import requirements
from hgpo_jax.rollout.chat_prompts import PastTurn, PromptInput
from hgpo_jax.rollout.environments import environment
from tests.helpers.chat_tokenizers import byte_tokenizer
from tests.helpers.needs import DATA


class Guess:
    """The agent finds a number."""

    task_types, task_type, max_turns, goal, size = ("guess",), 0, 3, "guess my number", 4

    def __init__(self):
        self.episodes = 0

    def reset(self, task):
        self.number, self.turn, self.episodes = task % self.size, 0, self.episodes + 1
        return "I think of a number.", self.commands()

    def commands(self):
        return [f"guess {n}" for n in range(self.size)]

    def step(self, action):
        self.turn += 1
        won = action == f"guess {self.number}"
        info = {"won": won, "admissible": action in self.commands()}
        return "No.", self.commands(), 10.0 * won, won or self.turn == self.max_turns, info


class Forgetful(Guess):
    """Does not forget its earlier episodes."""

    def reset(self, task):
        return f"{self.episodes} games so far.", super().reset(task)[1]


class Disturbed(Guess):
    """A step after the end changes the next episode."""

    late = False

    def reset(self, task):
        _, commands = super().reset(task)
        late, self.late = self.late, False
        return "You were late." if late else "I think of a number.", commands

    def step(self, action):
        self.late = self.turn >= self.max_turns or (self.turn > 0 and self.ended)
        answer = super().step(action)
        self.ended = answer[3]
        return answer


def answering(change):
    """A `step` whose answer is changed by `change(observation, commands, reward, done, info)`."""
    return lambda self, action: change(*Guess.step(self, action))


def informing(**told):
    return answering(lambda *answer: (*answer[:4], answer[4] | told))


def told(**members):
    return type("Told", (Guess,), members)


def listing(*more):
    """Commands beside those of Guess, which do nothing."""
    return told(commands=lambda self: [*Guess.commands(self), *more])


ABSENT = property(lambda self: self.absent)
TEXTS = {
    "Told lacks max_turns: actions after which an episode ends": told(max_turns=ABSENT),
    "Told: max_turns is 'ten'; give a whole number above 0": told(max_turns="ten"),
    "Told after reset(task) lacks goal: the task as text": told(goal=ABSENT),
    "step('guess .* info lacks won: whether the task is solved": told(
        step=answering(lambda o, c, r, d, info: (o, c, r, d, {"admissible": True}))
    ),
    "reset( .* fails with ZeroDivisionError": told(reset=lambda self, task: 1 // 0),
    "reset( .* observation is a int, not str; return (observation, commands)": told(reset=lambda self, task: (7, [])),
    "step('guess .* 4 values were returned instead of 5": told(step=answering(lambda *answer: answer[:4])),
    "step('guess .* reward is nan; return": told(step=answering(lambda o, c, r, d, info: (o, c, np.nan, d, info))),
    "reset( .* task_type is 1, there are 1": told(task_type=1),
    "Told: roles is 'ab'; give different words": told(roles="ab", role=0),
    "Told after reset(task) lacks role: whose turn": told(roles=("a", "b")),
    "reset( .* role is 2, there are 2": told(roles=("a", "b"), role=2),
    "step('guess .* info calls this inadmissible, but the commands before it list it": told(step=informing(admissible=False)),
    "step('no such command'): info calls it admissible, and the commands do not list it": told(step=informing(admissible=True)),
    "step(action): an episode goes on after max_turns=3 actions": told(
        step=answering(lambda o, c, r, d, info: (o, c, r, False, info))
    ),
    "reset(task), step(action): a second play .* (observation after 0 actions": told(
        reset=lambda self, task: (str(random.random()), Guess.reset(self, task)[1])
    ),
    "reset(task), step(action): a second play .* (observation after 1 actions": told(
        step=answering(lambda o, *rest: (str(random.random()), *rest))
    ),
    "reset(task): something of earlier episodes is left in task": Forgetful,
    "reset(task): a step after the end of an episode changes the next one": Disturbed,
    "commands: ' wait' is read from no answer: blanks": listing(" wait"),
    "commands: 'say </action>' is read from no answer": listing("say </action>"),
    "commands: 'say\\nso' has a line break": listing("say\nso"),
    "rollout.prompt_limit: .* prompts are longer, and lose history": told(step=answering(lambda o, *rest: (o * 30_000, *rest))),
}


def assert_found(faults, line):
    parts = line.split(" .* ")
    assert any(fault.startswith(parts[0]) and parts[-1] in fault for fault in faults), (line, faults)


def text_faults(make, tasks=(5, 11)):
    def measure(inputs):
        lengths = [len(each.observation) for each in inputs]
        return lengths, sum(length > 1000 for length in lengths)

    return text.check(make, make(), [task for task in tasks for _ in range(8)], 0, 2, measure).faults


@pytest.mark.parametrize("line", TEXTS)
def test_what_is_wrong_with_a_text_one(line):
    assert_found(text_faults(TEXTS[line]), line)


def test_play_without_commands_says_so():
    odd = warnings(Play(mask := np.ones((2, 1), bool), mask * 1, mask, mask * 1, np.zeros(2), np.zeros(2), np.zeros(2), False))
    assert next(odd).startswith("commands: none that was tried was admissible")


def test_a_text_one_that_hangs(monkeypatch):
    monkeypatch.setattr(requirements, "LIMIT", 0.2)
    steps = []
    (fault,) = text_faults(told(step=lambda self, action: (steps.append(action), time.sleep(60))))
    assert_found([fault], "step('guess .* gives no answer in 0.2 s; see why it hangs")
    assert len(steps) == 1  # the other episodes would hang, too


def test_a_sound_text_one_has_no_fault():
    assert text_faults(Guess) == text_faults(listing("Nf3", "nf3", "Guess 1", "click[B07XYZ]", "Übe!")) == []


def test_peers_are_those_of_the_same_task_and_the_same_last_observations():
    states = np.array([[0, 1, 2], [0, 1, 1], [0, 3, 0], [0, 1, 0]])
    mask = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 0, 0]], bool)
    play = Play(mask, states, ~mask, states, np.ones(4), np.array([0, 0, 0, 1]), np.zeros(4), False)
    # Level 0: the 0s and the 1s of the first three. Level 1: only (0, 1).
    assert table({"any": play}, 2, "words").split()[-3:] == ["62.5%", "25.0%", "0.0%"]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["check", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.run(main)
    return ended.value.code


GAME = """from tests.check.test_text_faults import Guess
class Mine(Guess):
    def __init__(self, size: int = 4):
        super().__init__()
        open("made", "a").write("x")
    def close(self):
        open("closed", "a").write("x")
"""


def test_the_command_and_its_exit_codes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(GAME.replace("super().__init__()", "super().__init__(); self.size = size"))
    assert run(monkeypatch, "./my.py:Mine", "env.options.size=5", "--episodes", "9") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("./my.py:Mine: text; ") and "2 tasks, 8 episodes each" in shown[0]
    assert shown[2].split()[:2] == ["random", "commands"] and shown[-1] == "no faults found in ./my.py:Mine"
    assert (tmp_path / "closed").read_text() == (tmp_path / "made").read_text()  # also the one that tells the members
    (tmp_path / "bad.py").write_text(GAME.replace("super().__init__()", "self.max_turns = 0"))
    assert run(monkeypatch, "./bad.py:Mine") == 1
    assert capsys.readouterr().out == (
        "fault: Mine: max_turns is 0; give a whole number above 0\n1 fault found in ./bad.py:Mine\n"
    )
    for arguments, message in (
        (["houshold"], "env.name='houshold': must be one of household"),
        (["./none.py:Mine"], "env.name=./none.py:Mine: no file"),
        (["./bad.py:Mine", "env.options.sise=5"], "env.options.sise=5: no such option; did you mean size?"),
        (["household", "--episodes", "0"], "argument --episodes: 0: must be a whole number from 1"),
        (["agent", "env.command=true"], "env.name=agent: is a command"),
        (["webshop"], "env.data=: webshop needs its data"),
        (["./my.py:Mine", "env.max_turns=3"], "env.max_turns=3: env.name=./my.py:Mine has a max_turns of its own"),
        (["./my.py:Mine", "reward=./my.py:other"], "reward=./my.py:other: check does not read it"),
    ):
        assert run(monkeypatch, *arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {message}") and error.count("\n") == 1, error


@pytest.mark.slow
@pytest.mark.parametrize("name", ["household", "sokoban_text", "math", "math_team"])
def test_ours_have_no_fault(name):
    faults, described = check(load(None, [f"env.name={name}", "env.max_turns=8"]), 8)
    assert not faults and described.startswith(f"{name}: ")


GAMES = Path(__file__).parents[1] / "alfworld" / "data"  # a few of ALFWorld's


def test_alfworld_has_no_fault(tmp_path):
    given = [f"data={GAMES}", "env.split=valid_train", "env.max_turns=8", "env.compiled=false", f"cache_dir={tmp_path}"]
    assert check(load(None, ["env.name=alfworld", *given]), 8)[0] == []


@pytest.mark.needs("data")
def test_webshop_has_no_fault():
    assert check(load(None, ["env.name=webshop", f"data={DATA / 'webshop'}"]), 16)[0] == []


def test_prompts_are_counted_in_the_policys_tokens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path / "tok")
    (tmp_path / "my.py").write_text(GAME)
    given = ["env.name=./my.py:Mine", "policy.tokenizer=tok", "rollout.prompt_limit=370"]
    faults, described = check(load(None, given), 8)
    (fault,) = faults
    assert fault.startswith("rollout.prompt_limit: ") and "longest (tokens)" in described
    assert re.search(r" 3[567]\d ", described)


def test_the_prompts_of_a_chat_grow():
    config = load(None, ["env.name=household_text", "env.template=conversation"])
    measure, unit = prompt_measure(config, environment(config.env))
    turns = [PromptInput("Tidy.", [], 0, "A room.", [])]
    turns.append(PromptInput("Tidy.", [], 1, "A desk.", [], (PastTurn("A room.", [], "go to desk"),)))
    (first, second), _ = measure(turns)
    assert unit == "characters" and second > first + len("A desk.go to desk")


class Walk:
    """A walk between -2 and 2, where falling off either end ends it."""

    task_types, task_type, max_turns, goal = ("walk",), 0, 6, "walk"

    def reset(self, task):
        self.at, self.turn = 0, 0
        return self.seen(), ["left", "right"]

    def seen(self):
        return f"You are at {self.at}."

    def step(self, action):
        self.turn += 1
        self.at += {"left": -1, "right": 1}.get(action, 0)
        fallen, limit = abs(self.at) > 2, self.turn == self.max_turns
        reward, info = self.judge(fallen, limit)
        return self.seen(), ["left", "right"], reward, fallen or limit, {"admissible": action in ("left", "right")} | info

    def judge(self, fallen, limit):
        """Surviving is the success, and a time limit no end."""
        return 1.0, {"won": limit and not fallen, "truncated": limit and not fallen}


def walk(judge=Walk.judge, seen=Walk.seen):
    return type("Odd", (Walk,), {"judge": judge, "seen": seen})


def place(seen):
    return seen.partition(".")[0]


class Clock(Walk):
    """Shows what time it is, which no other episode of its task has."""

    tasks = 0

    def seen(self):
        return f"You are {'here' if self.at < 0 else 'there'}. It is {self.minute + self.turn // 60}:{self.turn}"

    def reset(self, task):
        type(self).tasks += 1
        self.minute = self.tasks
        return super().reset(task)


class Story(Clock):
    """Never says the same thing twice, nor with numbers."""

    def seen(self):
        digits = str(self.minute * 10 + self.turn)
        return "".join("abcdefghij"[int(digit)] for digit in digits)


ODD = {
    "success: episodes that are won end early with rewards of .* others reach max_turns with 6; if lasting": walk(
        lambda self, fallen, limit: (1.0, {"won": fallen})  # a fall pays and ends
    ),
    "success: none of 64 episodes is won, and rewards are up to 0.6": walk(
        lambda self, fallen, limit: (0.1, {"won": False})  # for effort
    ),
    "success: episodes that are won have rewards of at most -5 in total": walk(
        lambda self, fallen, limit: (-1.0 * (not limit), {"won": limit, "truncated": limit})
    ),
    "success: is unknown in all episodes": walk(lambda self, fallen, limit: (1.0, {"won": None})),
    "truncated: episodes are won where max_turns are used up": walk(
        lambda self, fallen, limit: (1.0, {"won": limit and not fallen})
    ),
    "observation: a number in it changes with every step .* 0.0% of the steps .* env.state_key=FILE.py:NAME": Clock,
    "observation: a number in it changes with every step .* 9": walk(  # episodes of a task count alike
        seen=lambda self: f"You are at {self.at}, {9 - self.turn} to go."
    ),
    "observation: 0.0% of the steps after the first have a peer, of which groups": Story,
}


def play_of(make, state_key=""):
    measure = lambda inputs: ([1] * len(inputs), 0)  # noqa: E731
    tasks = np.repeat(np.arange(8), GROUP).tolist()
    return text.check(make, make(), tasks, 0, 2, measure, state_key).plays["random commands"]


@pytest.mark.parametrize("line", ODD)
def test_it_is_said_in_one_line(line):
    (said,) = warnings(play_of(ODD[line]))
    begin, *rest = line.split(" .* ")
    assert said.startswith(begin) and all(part in said for part in rest) and "\n" not in said


FALLING = walk(lambda self, fallen, limit: (10.0 * fallen, {"won": fallen}))


@pytest.mark.parametrize(("make", "key"), [(Walk, ""), (FALLING, ""), (Clock, f"{__file__}:place")])
def test_nothing_is_said_of_what_is_as_it_should_be(make, key):
    assert list(warnings(play_of(make, key))) == []


class Solved(Guess):
    """Has a player."""

    def expert(self, history_length):
        return f"guess {self.number}"


class Shown(Guess):
    """Shows the number, in a picture that it draws anew into the same array."""

    picture_size, noise = (2, 3), 0

    def __init__(self):
        super().__init__()
        self.picture = np.zeros((2, 3, 3), np.uint8)

    def reset(self, task):
        answer = super().reset(task)
        self.picture[:] = 10 * self.number + self.noise * self.episodes
        return answer


def test_pictures_belong_to_states_and_are_the_same_in_each_play():
    tasks = np.repeat(np.arange(8), GROUP).tolist()
    measure = lambda inputs: ([1] * len(inputs), 0)  # noqa: E731
    report = text.check(Shown, Shown(), tasks, 0, 2, measure)
    play = report.plays["random commands"]
    assert report.faults == [] and len(set(play.states[play.mask].tolist())) == 2 * Shown.size
    noisy = type("Noisy", (Shown,), {"noise": 1})
    (fault,) = text.check(noisy, noisy(), tasks, 0, 2, measure).faults[:1]
    assert "of earlier episodes is left in task 0 (picture after 0 actions" in fault and "\n" not in fault


def expert_check(expert):
    make = type("Player", (Solved,), {"expert": expert})
    return text.check(make, make(), np.repeat(np.arange(8), GROUP).tolist(), 0, 2, lambda inputs: ([1] * len(inputs), 0))


def test_the_environments_own_player_plays_too():
    plays = text.check(Solved, Solved(), [0] * 8 + [1] * 8, 0, 2, lambda inputs: ([1] * len(inputs), 0)).plays
    assert list(plays) == ["random commands", "expert"] and plays["expert"].success.all()
    assert not plays["random commands"].success.all()
    lost = expert_check(lambda self, history_length: f"guess {self.number + 1}")
    assert lost.faults == []
    said = next(warnings(lost.plays["expert"], "expert"))
    assert said.startswith("expert: wins none of 64 episodes, and this is what the warm start clones")


@pytest.mark.parametrize(("expert", "fault"), [
    (lambda self, history_length: 1 / 0, "expert(2): line "),
    (lambda self: "guess 1", "expert(2): fails with TypeError: "),
    (lambda self, history_length: None, "expert(2): returns None, a NoneType; return the action as a text"),
])  # fmt: skip
def test_faults_of_the_environments_own_player(expert, fault):
    (said,) = expert_check(expert).faults
    assert said.startswith(fault) and "\n" not in said


def test_unknown_success_is_no_number_in_the_table():
    play = play_of(ODD["success: is unknown in all episodes"])
    assert table({"random commands": play}, 0, "words").splitlines()[1].split()[2] == "unknown"
