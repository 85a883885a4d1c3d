"""`python -m hgpo_jax.check`: an environment that is broken on purpose for each kind of fault, and sound ones without any."""

import random
import re
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from hgpo_jax.check import compiled, text
from hgpo_jax.check.__main__ import check, main
from hgpo_jax.check.statistics import GROUP, Play, peers, table, warnings
from hgpo_jax.config import cli, load
from hgpo_jax.rollout import requirements
from hgpo_jax.rollout.tasks import task_keys
from tests.helpers.chat_tokenizers import byte_tokenizer
from tests.helpers.needs import DATA


class State(struct.PyTreeNode):
    task: jax.Array
    at: jax.Array
    turn: jax.Array


class Corridor:
    """The agent walks to the right end."""

    words, task_types = ("", "left", "right", "far", "reach_the_end", "door", "hall"), ("walk",)
    goal_length = observation_length = 1
    action_length, max_turns, size = 2, 3, 4

    def reset(self, key):
        at = jax.random.randint(key, (), 0, self.size - 1)
        return State(jnp.int32(0), at, jnp.int32(0)), jnp.array([6], jnp.int32)

    def step(self, state, action):
        move = jnp.select([action[0] == 1, action[0] == 2], [-1, 1], 0)
        after = State(state.task, jnp.clip(state.at + move, 0, self.size - 1), state.turn + 1)
        won = self.won(after)
        seen = jnp.where(won, 5, 6)[None].astype(jnp.int32)
        return after, seen, 10.0 * won, won | (after.turn >= self.max_turns), move == 0

    def goal(self, state):
        return jnp.array([4], jnp.int32)

    def won(self, state):
        return state.at == self.size - 1

    def decode(self, ids):
        return " ".join(self.words[i] for i in ids if i)


class Guided(Corridor):
    def random_action(self, state, key):
        return jnp.array([1, 0], jnp.int32) + jax.random.bernoulli(key).astype(jnp.int32) * jnp.array([1, 0], jnp.int32)

    def expert_action(self, state, recent, key):
        return jnp.array([2, 0], jnp.int32)

    def admissible(self, state):
        return jnp.array([True, True, False]), jnp.array([[1, 0], [2, 0], [3, 0]], jnp.int32)


def faults_of(make, expert=None, episodes=8):
    env = make()
    expert = expert or (type(env) if hasattr(env, "random_action") and hasattr(env, "expert_action") else None)
    tasks = task_keys("train", 0, jnp.arange(episodes) // 8)
    return compiled.check(env, expert, tasks, jax.random.key(0), 2)[0]


def broken(base=Corridor, **members):
    return type("Broken", (base,), members)


def stepped(change):
    """A `step` whose answer is changed by `change(state, observation, reward, done, invalid)`."""
    return lambda self, state, action: change(*Corridor.step(self, state, action))


def hidden(self, name, member):
    if name == member:
        raise AttributeError(name)
    return object.__getattribute__(self, name)


def leaves_a_tracer(self, key):
    state, seen = Corridor.reset(self, key)
    self.at = state.at
    return state, seen


class Counting(Corridor):
    def __init__(self):
        self.episodes = 0

    def reset(self, key):
        self.episodes += 1
        state, seen = super().reset(key)
        return state.replace(at=state.at * 0 + self.episodes % 3), seen


def drawn_when_traced(self, key):
    state, seen = Corridor.reset(self, key)
    return state, seen - random.randrange(1_000_000)


def drawn_on_the_host(state, seen, *rest):
    shape = jax.ShapeDtypeStruct((), np.int32)
    draw = jax.pure_callback(lambda _: np.int32(random.randrange(4)), shape, state.turn, vmap_method="sequential")
    return state, seen - draw, *rest


def of_seven(length):
    """Members of an environment with prompts of its own, which are said to have at most 7 tokens."""
    prompt = lambda self, state, *given, act=0: length(state)  # noqa: E731
    return {"prompt": prompt, "prompt_slots": lambda self, history: 7, "goal_text": lambda self, observation: ""}


FAR = jnp.array([3, 0], jnp.int32)
# What is wrong with each of these, all at once.
FAULTS = [
    (broken(
        __getattribute__=lambda self, name: hidden(self, name, "decode"), observation_length=1.0, task_types="walk",
        prompt=None, roles="walker",
    ), [
        "decode: is missing; add it: decode(ids) -> text",
        "observation_length: is 1.0; make it a whole number above 0",
        "task_types: is 'walk'; make it a tuple of texts",
        "prompt_slots: is missing; add it: prompt_slots(history_length)",
        "goal_text: is missing; add it: goal_text(observation)",
        "role: is missing; add it: role(state) -> whose turn",
        "roles is 'walker'; give different words",
    ]),
    (broken(max_turns=0, words=("left", "right"), expert_action=Guided.expert_action), [
        "max_turns: is 0; make it a whole number above 0",
        "words: begins with 'left'; put the empty word '' first",
        "random_action: is missing beside expert_action; add it",
    ]),
    (broken(words=("", "left", "left")), ["words: has 'left' twice; name each once"]),
    (broken(
        Guided, reset=lambda self, key: (Corridor.reset(self, key)[0], jnp.ones(1)),
        goal=lambda self, state: jnp.zeros(2, jnp.int32), random_action=lambda self, state, key: jnp.int32(1),
        admissible=lambda self, state: (jnp.ones(3, bool), jnp.ones(3, jnp.int32)),
    ), [
        "reset(key): observation is f32[1]; make it i32[1]",
        "goal(state): goal is i32[2]; make it i32[1]",
        "random_action(state, key): action is i32[]; make it i32[2]",
        "admissible(state): words is i32[3]; make it i32[3, 2]",
    ]),
    (broken(reset=lambda self, key: Corridor.reset(self, key)[0].at), [
        "reset(key): does not return 2 values; return (state, observation)",
    ]),
    (broken(reset=lambda self, key: ((), jnp.zeros(1, jnp.int32))), ["reset(key): its state has no field task; add it"]),
    (broken(
        step=stepped(lambda *answer: answer[:4]), won=lambda self, state: (state.at > 2) * 1, roles=("one", "two"),
        role=lambda self, state: state.turn * 1.0,
    ), [
        "step(state, action): does not return 5 values",
        "won(state): won is i32[]; make it bool[]",
        "role(state): role is f32[]; make it i32[]",
    ]),
    (broken(
        step=stepped(lambda s, o, r, d, i: (s.replace(turn=s.turn * 1.0), o, r.astype(jnp.int32), d * 1, i)),
        **of_seven(lambda state: (jnp.zeros(9, jnp.int32), jnp.int32(9))),
    ), [
        "step(state, action): reward is i32[]; make it f32[]",
        "step(state, action): done is i32[]; make it bool[]",
        "step(state, action): state.turn becomes f32[]; leave it i32[], as reset made it",
        "prompt(...): prompt is i32[9]; make it i32[7]",
    ]),
    (broken(step=stepped(lambda s, *rest: ((s, s), *rest))), [
        "step(state, action): its state has other fields than that of reset",
    ]),
    (broken(step=stepped(lambda s, o, r, d, i: (s, o, 1.0 if d else 0.0, d, i))), [
        "step(state, action): cannot be compiled: TracerBoolConversionError: .* (use jnp.where",
    ]),
    (Counting, ["episodes: changes in play, and leaks from one episode into others"]),
    (broken(reset=leaves_a_tracer, at=None, decode=lambda self, ids: list(ids)), [
        "at: changes in play", "decode(ids): returns a list; return text",
    ]),
    (broken(reset=drawn_when_traced, decode=lambda self, ids: self.names[ids]), [
        "reset(key): episodes of equal keys differ; draw everything random from the key",
        "reset(key): an observation has the id -",
        "decode(ids): fails with AttributeError",
    ]),
    (broken(step=stepped(drawn_on_the_host)), ["step(state, action): answers the same action in the same state differently"]),
    (broken(
        step=stepped(lambda s, o, r, d, i: (s, o * 0 + 9, r * jnp.nan, d & False, i)), roles=("one", "two"),
        role=lambda self, state: state.turn, **of_seven(lambda state: (jnp.zeros(7, jnp.int32), state.turn + 7)),
        reset=lambda self, key: (Corridor.reset(self, key)[0].replace(task=jnp.int32(1)), jnp.ones(1, jnp.int32)),
    ), [
        "step(state, action): an observation has the id 9; an id is the index of one of the 7 words",
        "step(state, action): a reward is nan; make it a finite number",
        "step(state, action): an episode goes on after max_turns=3 actions; count them, and return done",
        "reset(key): state.task is 1; it is one of the 1 task_types",
        "role(state): is 3; it is one of the 2 roles",
        "prompt(...): is 10 tokens long; prompt_slots(history_length) says at most 7",
    ]),
    (broken(
        Guided, step=stepped(lambda s, o, r, *rest: (s, o, jnp.where(s.turn > 3, jnp.inf, r), *rest)),
        goal=lambda self, state: -jnp.ones(1, jnp.int32), random_action=lambda self, state, key: FAR,
        expert_action=lambda self, state, recent, key: jnp.array([0, 2], jnp.int32),
        admissible=lambda self, state: (jnp.array([True]), FAR[None]),
    ), [
        "step(state, action): after the end a reward is inf; keep it finite",
        "goal(state): the goal has the id -1",
        "random_action: gives 'far', which step(state, action) calls invalid (100.0% of its actions)",
        "expert_action: gives 'right', which step(state, action) calls invalid",
        "expert_action: gives an action with an empty word before others",
        "admissible: gives 'far', which step(state, action) calls invalid",
    ]),
]  # fmt: skip


def assert_found(faults, line):
    parts = line.split(" .* ")
    assert any(fault.startswith(parts[0]) and parts[-1] in fault for fault in faults), (line, faults)


@pytest.mark.parametrize(("make", "lines"), FAULTS)
def test_what_is_wrong_with_a_compiled_one(make, lines):
    faults = faults_of(make)
    for line in lines:
        assert_found(faults, line)
    assert len(faults) == len(lines), faults


def test_a_sound_compiled_one_has_no_fault():
    assert faults_of(Guided) == []


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
    return lambda self, action: change(*Guess.step(self, action))


def told(**members):
    return type("Told", (Guess,), members)


def listing(*more):
    """Commands beside those of Guess, which do nothing."""
    return told(commands=lambda self: [*Guess.commands(self), *more])


TEXTS = {
    "max_turns: is missing; add it: actions after which an episode ends": told(
        __getattribute__=lambda self, name: hidden(self, name, "max_turns")
    ),
    "max_turns: is 'ten'; make it a whole number above 0": told(max_turns="ten"),
    "goal: is missing after reset(": told(__getattribute__=lambda self, name: hidden(self, name, "goal")),
    "step('guess .* its info lacks won; add it: whether the task is solved": told(
        step=answering(lambda o, c, r, d, info: (o, c, r, d, {"admissible": True}))
    ),
    "reset( .* fails with ZeroDivisionError": told(reset=lambda self, task: 1 // 0),
    "reset( .* observation is a int, not str; return (observation, commands)": told(reset=lambda self, task: (7, [])),
    "step('guess .* 4 values were returned instead of 5": told(step=answering(lambda *answer: answer[:4])),
    "step('guess .* reward is nan; return": told(step=answering(lambda o, c, r, d, info: (o, c, np.nan, d, info))),
    "reset( .* task_type is 1, there are 1": told(task_type=1),
    "roles is 'ab'; give different words": told(roles="ab", role=0),
    "role: is missing after reset(": told(roles=("a", "b")),
    "reset( .* role is 2, there are 2": told(roles=("a", "b"), role=2),
    "step('guess .* info calls this inadmissible, but the commands before it list it": told(
        step=answering(lambda o, c, r, d, info: (o, c, r, d, info | {"admissible": False}))
    ),
    "step('no such command'): info calls it admissible, and the commands do not list it": told(
        step=answering(lambda o, c, r, d, info: (o, c, r, d, info | {"admissible": True}))
    ),
    "step(action): an episode goes on after max_turns=3 actions": told(
        step=answering(lambda o, c, r, d, info: (o, c, r, False, info))
    ),
    "reset(task): a second play of task .* draw everything random from the task": told(
        reset=lambda self, task: (str(random.random()), Guess.reset(self, task)[1])
    ),
    "step(action): a second play of task .* draw everything random from the task": told(
        step=answering(lambda o, *rest: (str(random.random()), *rest))
    ),
    "reset(task): something of earlier episodes is left in task": Forgetful,
    "reset(task): a step after the end of an episode changes the next one": Disturbed,
    "commands: ' wait' is read from no answer: blanks": listing(" wait"),
    "commands: 'say </action>' is read from no answer": listing("say </action>"),
    "commands: 'say\\nso' has a line break": listing("say\nso"),
    "rollout.prompt_limit: .* prompts are longer, and lose history": told(step=answering(lambda o, *rest: (o * 30_000, *rest))),
}  # fmt: skip


def text_faults(make, tasks=(5, 11)):
    def measure(inputs):
        lengths = [len(each.observation) for each in inputs]
        return lengths, sum(length > 1000 for length in lengths)

    return text.check(make, make(), [task for task in tasks for _ in range(8)], 0, 2, measure)[0]


@pytest.mark.parametrize("line", TEXTS)
def test_what_is_wrong_with_a_text_one(line):
    assert_found(text_faults(TEXTS[line]), line)


def test_a_text_one_that_hangs(monkeypatch):
    monkeypatch.setattr(requirements, "LIMIT", 0.2)
    began = time.monotonic()
    (fault,) = text_faults(told(step=lambda self, action: time.sleep(60)))
    assert_found([fault], "step('guess .* gives no answer in 0.2 s; see why it hangs")
    assert time.monotonic() - began < 1.5  # the other episodes would hang, too


def test_a_sound_text_one_has_no_fault():
    assert text_faults(Guess) == text_faults(listing("Nf3", "nf3", "Guess 1", "click[B07XYZ]", "Übe!")) == []


def test_peers_are_those_of_the_same_task_and_the_same_last_observations():
    states = np.array([[0, 1, 2], [0, 1, 1], [0, 3, 0], [0, 1, 0]])
    mask = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 0, 0]], bool)
    play = Play(mask, states, ~mask, states, mask[:, 0], np.array([0, 0, 0, 1]), np.zeros(4), mask[:, 0], False)
    # Level 0: the 0s and the 1s of the first three. Level 1: only (0, 1).
    np.testing.assert_allclose(peers(play, 2), [5 / 8, 2 / 8, 0])


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["check", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.run(main)
    return ended.value.code


GAME = """from tests.check.test_check import Guess
class Mine(Guess):
    def __init__(self, size: int = 4):
        super().__init__()
"""


def test_the_command_and_its_exit_codes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(GAME + "        self.size = size\n")
    assert run(monkeypatch, "./my.py:Mine", "env.options.size=5", "--episodes", "9") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("./my.py:Mine: text; ") and "2 tasks, 8 episodes each" in shown[0]
    assert shown[2].split()[:2] == ["random", "commands"] and shown[-1] == "no faults found in ./my.py:Mine"
    (tmp_path / "bad.py").write_text(GAME + "        self.max_turns = 0\n")
    assert run(monkeypatch, "./bad.py:Mine") == 1
    assert capsys.readouterr().out == (
        "fault: max_turns: is 0; make it a whole number above 0\n1 fault found in ./bad.py:Mine\n"
    )
    for arguments, message in (
        (["houshold"], "env.name='houshold': must be one of household"),
        (["./none.py:Mine"], "env.name=./none.py:Mine: no file"),
        (["./bad.py:Mine", "env.options.sise=5"], "env.options.sise=5: no such option; did you mean size?"),
        (["household", "--episodes", "0"], "argument --episodes: 0: must be a whole number from 1"),
        (["agent", "env.command=true"], "env.name=agent: is a command"),
        (["webshop"], "env.data=: webshop needs its data"),
    ):
        assert run(monkeypatch, *arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {message}") and error.count("\n") == 1, error


@pytest.mark.slow
@pytest.mark.parametrize("name", ["household", "sokoban_text"])
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
    return text.check(make, make(), tasks, 0, 2, measure, state_key)[1]


@pytest.mark.parametrize("line", ODD)
def test_it_is_said_in_one_line(line):
    (said,) = warnings(play_of(ODD[line]))
    begin, *rest = line.split(" .* ")
    assert said.startswith(begin) and all(part in said for part in rest) and "\n" not in said


@pytest.mark.parametrize(("make", "key"), [
    (Walk, ""), (walk(lambda self, fallen, limit: (10.0 * fallen, {"won": fallen})), ""),
    (Clock, f"{__file__}:place"),
])  # fmt: skip
def test_nothing_is_said_of_what_is_as_it_should_be(make, key):
    assert list(warnings(play_of(make, key))) == []


def test_unknown_success_is_no_number_in_the_table():
    play = play_of(ODD["success: is unknown in all episodes"])
    assert table({"random commands": play}, 0, "words").splitlines()[1].split()[2] == "unknown"
