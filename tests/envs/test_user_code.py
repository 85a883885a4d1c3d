"""Environments and estimators from a folder outside the repository: named on the command line, trained, evaluated, resumed."""

import importlib.metadata
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from hgpo_jax.advantages import ESTIMATORS
from hgpo_jax.config import describe, load
from hgpo_jax.envs import user_code
from hgpo_jax.learner.methods import method_named
from hgpo_jax.rollout.backend import backend
from hgpo_jax.rollout.environments import environment, max_turns
from hgpo_jax.setup.validate import check_together
from hgpo_jax.trainer import provenance
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.training import TINY, command, rows_of

COMPILED = '''
import jax, jax.numpy as jnp
from flax import struct

class State(struct.PyTreeNode):
    task: jax.Array
    at: jax.Array
    turn: jax.Array

class Corridor:
    """The agent walks to the right end."""
    words, task_types = ("", "left", "right", "reach_the_end", "door", "hall"), ("walk",)
    goal_length = observation_length = action_length = 1

    def __init__(self, size: int = 3, max_turns: int = 4, lights: bool = True):
        self.size, self.max_turns = size, max_turns

    def reset(self, key):
        return State(jnp.int32(0), jax.random.randint(key, (), 0, self.size - 1), jnp.int32(0)), jnp.array([5], jnp.int32)

    def step(self, state, action):
        move = jnp.select([action[0] == 1, action[0] == 2], [-1, 1], 0)
        after = State(state.task, jnp.clip(state.at + move, 0, self.size - 1), state.turn + 1)
        won, invalid = self.won(after), move == 0
        seen = jnp.where(won, 4, 5)[None].astype(jnp.int32)
        return after, seen, 10.0 * won, won | (after.turn >= self.max_turns), invalid

    def goal(self, state):
        return jnp.array([3], jnp.int32)

    def won(self, state):
        return state.at == self.size - 1

    def decode(self, ids):
        return " ".join(self.words[i] for i in ids if i)

class Guided(Corridor):
    def expert_action(self, state, recent, key):
        return jnp.array([2], jnp.int32)

    def random_action(self, state, key):
        return jax.random.randint(key, (1,), 1, 3)
'''
TEXT = """
class Guess:
    task_types, task_type = ("guess",), 0

    def __init__(self, size: int = 4, max_turns: int = 3):
        self.size, self.max_turns = size, max_turns

    def reset(self, task):
        self.number, self.turn, self.goal = task % self.size, 0, "guess my number"
        return "I think of a number.", [f"guess {n}" for n in range(self.size)]

    def step(self, action):
        self.turn += 1
        won = action == f"guess {self.number}"
        info = {"won": won, "admissible": action.startswith("guess ")}
        return "No.", [f"guess {n}" for n in range(self.size)], 10.0 * won, won or self.turn == self.max_turns, info
"""
ESTIMATOR = """
from hgpo_jax.advantages import Estimate, returns

def plain(batch, *, gamma=0.95, invalid_penalty=0.1):
    total = returns.step_returns(batch, gamma, invalid_penalty)
    return Estimate(total, total)

def greedy(batch, *, dreams):
    return plain(batch)

def misspelt(batch):
    return plain(batch.rewards)

def bare(batch):
    return batch.rewards

def by_episode(batch):
    return Estimate(batch.rewards.sum(1), batch.rewards)

def scored(told):
    return 0

number = 3
"""
PROMPTS = "== first ==\n$goal\n$observation\n$commands\n== later ==\n$goal\n$history\n$observation\n== entry ==\n$action\n"
SMALL = [word for word in TINY if not word.startswith("env.")]
TEXTS = ["policy.tokenizer=tok", "rollout.prompt_limit=512", "rollout.response_limit=4", "learner.microbatch_size=4"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A user's folder, from which commands run."""
    for name, text in (("rooms", COMPILED), ("games", TEXT), ("learning", ESTIMATOR)):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    monkeypatch.chdir(tmp_path)
    known = dict(ESTIMATORS)
    yield tmp_path
    ESTIMATORS.clear()
    ESTIMATORS.update(known)


def checked(*overrides):
    config = load(None, ["warm_start=none", *overrides])
    check_together(config)
    return config


def test_options_of_annotations_that_only_a_type_checker_can_read(here):
    (here / "typed.py").write_text(
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tables\n"
        f"{TEXT}\n    def __init__(self, size: int = 4, max_turns: int = 3, table: tables.Table | None = None):\n"
        "        self.size, self.max_turns = size, max_turns\n"
    )
    env = environment(checked("env.name=./typed.py:Guess", "env.options.size=5").env).text(None)[0]()
    assert env.size == 5
    with pytest.raises(ConfigError, match=r"env\.options\.size=x: must be a valid integer"):
        checked("env.name=./typed.py:Guess", "env.options.size=x")


def test_a_compiled_one_with_options_of_its_annotated_types(here):
    config = checked("env.name=./rooms.py:Corridor", "env.options.size=5", "env.options.lights=false")
    found = environment(config.env)
    env = found.compiled(config)
    assert (env.size, env.max_turns, found.expert) == (5, 4, None)
    assert backend(config) == "compiled" and max_turns(config.env) == 4
    assert config.model_dump(mode="json")["env"]["options"] == {"size": 5, "lights": False}
    guided = environment(load(None, ["env.name=./rooms.py:Guided"]).env)
    assert guided.expert.__name__ == "Guided"
    check_together(load(None, ["env.name=./rooms.py:Guided"]))  # with the default warm start


def test_a_text_one_that_worker_processes_make_again(here):
    config = checked("env.name=./games.py:Guess", "env.options.size=7")
    train, held_out = environment(config.env).text(config)
    assert backend(config) == "host"
    assert len(train().reset(3)[1]) == 7
    script = "import pickle, sys; print(pickle.load(sys.stdin.buffer)().reset(1)[1][-1], 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(held_out), capture_output=True, check=True)
    assert done.stdout.decode().split() == ["guess", "6", "False"]


def test_one_that_takes_held_out_is_evaluated_on_other_tasks(here):
    """Else one of a fixed number of tasks says that it is evaluated on those of training."""
    text = (here / "games.py").read_text()
    (here / "split.py").write_text(text.replace("max_turns: int = 3", "max_turns: int = 3, held_out: bool = False"))
    entry = environment(checked("env.name=./split.py:Guess").env)
    train, held_out = entry.text(None)
    assert entry.splits and train.args[1] == {} and held_out.args[1] == {"held_out": True}
    held_out().reset(3)
    chosen = environment(checked("env.name=./split.py:Guess", "env.options.held_out=true").env)
    assert chosen.text(None)[0] is chosen.text(None)[1]
    assert environment(checked("env.name=./games.py:Guess").env).splits  # whose tasks are numbers
    (here / "listed.py").write_text(text + "\n    def __len__(self):\n        return 200\n")
    assert not environment(checked("env.name=./listed.py:Guess").env).splits


def test_a_value_without_a_type_is_read_as_in_a_configuration():
    def make(size: int = 1, **others):
        return size, others

    assert user_code.options(make, {"size": "2", "slippery": "false", "text": "a: b: c"}) == {
        "size": 2, "slippery": False, "text": "a: b: c",
    }  # fmt: skip


def test_lists_may_be_optional():
    def make(names: list[str] | None = None, sizes: tuple[int, ...] | None = None, text: str | list[str] = ""):
        return names, sizes, text

    given = {"names": "x,y", "sizes": 3, "text": "a,b"}
    assert user_code.options(make, given) == {"names": ["x", "y"], "sizes": (3,), "text": "a,b"}
    assert user_code.options(make, {"names": "none", "sizes": "null"}) == {"names": None, "sizes": None}


def test_collections_of_any_annotation():
    def make(sizes: Sequence[int] = (), names: set[str] = frozenset(), costs: dict[str, float] | None = None, any: list = ()):
        return sizes, names, costs, any

    assert user_code.options(make, {"sizes": "3,4", "names": "x,y", "costs": "{a: 1, b: 2}", "any": "x,y"}) == {
        "sizes": [3, 4], "names": {"x", "y"}, "costs": {"a": 1.0, "b": 2.0}, "any": ["x", "y"],
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"^costs=a: must be a valid dictionary$"):
        user_code.options(make, {"costs": "a"})


def test_a_file_finds_those_beside_it(here, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (here / "sub").mkdir()
    (here / "sub" / "beside_it.py").write_text(ESTIMATOR)
    (here / "sub" / "mine.py").write_text("from beside_it import plain\n")
    assert method_named("./sub/mine.py:plain").estimator == "./sub/mine.py:plain"
    assert sys.path[-1] == str(here / "sub")  # it hides no module


def test_a_module_and_an_entry_point(here, monkeypatch):
    monkeypatch.syspath_prepend(here)
    (here / "my_rooms.py").write_text(COMPILED + "\n__version__ = '1.2'\n")
    assert environment(checked("env.name=my_rooms:Corridor").env).compiled
    assert user_code.version("my_rooms:Corridor")["version"] == "1.2"
    assert user_code.version("hypothesis.strategies:integers")["version"] == importlib.metadata.version("hypothesis")
    (here / "needing.py").write_text("import no_such_thing\n")
    with pytest.raises(ConfigError, match="its import fails: ModuleNotFoundError: "):
        checked("env.name=needing:Any")
    package = here / "added-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: added\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[hgpo_jax.rollout.environments]\nlong_corridor = my_rooms:Corridor\n[hgpo_jax.estimators]\nmine = learning:plain\n"
    )
    user_code.installed.cache_clear()
    try:
        assert environment(checked("env.name=long_corridor").env).compiled
        assert method_named("mine").estimator == "mine"
        shown = describe(["env.name", "method"])
        assert "long_corridor" in shown and "| mine |" in " ".join(shown.split())
        with pytest.raises(ConfigError, match=r"env.name='long_corrido'.*did you mean long_corridor\?"):
            load(None, ["env.name=long_corrido"])
    finally:
        user_code.installed.cache_clear()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env.name=no_such.module:MyEnv"], "env.name=no_such.module:MyEnv: no module 'no_such'; write package.module:NAME"),
        (["env.name=./none.py:MyEnv"], r"env.name=./none.py:MyEnv: no file .*none.py; a relative path begins where"),
        (["env.name=./broken.py:MyEnv"], r"env.name=./broken.py:MyEnv: its import fails: ZeroDivisionError: .*broken.py"),
        (["env.name=./rooms.py:Coridor"], r"env.name=./rooms.py:Coridor: .* has no Coridor; did you mean Corridor\?"),
        (["env.name=./learning.py:number"], "env.name=./learning.py:number: number is a int; name a class"),
        (["env.name=./rooms.py:"], "env.name='./rooms.py:': must be one of household, .*path/to/file.py:NAME"),
        (["env.name=./lacking.py:Guess"], "env.name=./lacking.py:Guess: Guess lacks task_types: the names of its task types"),
        (["env.name=./lacking.py:Corridor"], r"env.name=./lacking.py:Corridor: Corridor lacks won: won\(state\) -> "),
        (["env.name=./lacking.py:Needing"], "env.options.size=: is needed"),
        (["env.name=./rooms.py:Corridor", "env.options.sise=5"], r"env.options.sise=5: no such option; did you mean size\?"),
        (["env.name=./rooms.py:Corridor", "env.options.size=big"], "env.options.size=big: must be a valid integer"),
        (["env.name=./rooms.py:Corridor", "env.options.size=true"], "env.options.size=True: true and false are not values"),
        (["env.name=./rooms.py:Corridor", "env.max_turns=9"], "env.max_turns=9: .* has a max_turns of its own.*env.options"),
        (["env.name=./rooms.py:Corridor", "env.template=x"], "env.template=x: .* takes no template"),
        (["env.name=./rooms.py:Corridor", "warm_start=cloning"], "warm_start=cloning: .*Corridor has no expert to clone"),
        (["env.name=./rooms.py:Corridor", "env.compiled=true"], "env.compiled=true: .* has no such choice"),
        (["env.name=./rooms.py:Corridor", "env.size=7"], "env.size=7: .*Corridor does not read it; leave it at 6"),
        (["env.name=sokoban", "env.rooms=bathroom,kitchen"], "env.rooms=bathroom,kitchen: env.name=sokoban does not read it"),
        (["env.data=games"], "env.data=games: env.name=household does not read it"),
        (["env.workers=2"], "env.workers=2: env.name=household, compiled, does not read it"),
        (["method=kpo", "learner.aggregate=seq-mean-token-sum"], "learner.aggregate=.*: method=kpo does not read it"),
        (["env.options.size=7", "env.name=sokoban"], "env.options.size=7: env.name=sokoban has fields of its own; write"),
        (["method=./learning.py:plane"], r"method=./learning.py:plane: .* has no plane; did you mean plain\?"),
        (["method=./learning.py:greedy"], "method=./learning.py:greedy: needs dreams; an iteration has actions, agents"),
        (["method=./learning.py:misspelt"], "method=./learning.py:misspelt: line 5, `.*`: fails with AttributeError: "),
        (["method=./learning.py:bare"], r"method=./learning.py:bare: returns an? \w+ for 2 trajectories of 3 steps; return"),
        (["method=./learning.py:by_episode"], r"method=./learning.py:by_episode: returns advantages of shape \(2,\) for 2"),
        (["method=no_such:plain"], "method=no_such:plain: no module 'no_such'"),
    ],
)
def test_mistakes_are_one_line(here, overrides, message):
    (here / "lacking.py").write_text(
        TEXT.replace('task_types, task_type = ("guess",), 0', "task_type = 0")
        + COMPILED.replace("def won", "def is_won")
        + "class Needing(Guess):\n    def __init__(self, size: int):\n        pass\n"
    )
    for _ in range(2):  # nothing of a module that fails is left
        with pytest.raises(ConfigError, match=f"^{message}") as caught:
            checked(*overrides)
        assert "\n" not in str(caught.value)


def test_options_of_a_resumed_run_keep_those_that_are_not_given_again():
    from hgpo_jax.config import read_fields, resolve

    base = load(None, ["env.name=a:B", "env.options.size=5", "env.options.name=007"]).model_dump(mode="json")
    assert base["env"]["options"] == {"size": 5, "name": "007"}
    assert resolve(read_fields(None, ["env.options.size=6"]), base).env.options == {"size": 6, "name": "007"}


PARTS = ["env.name=./rooms.py:Corridor", "method=./learning.py:plain"]
TEXT_GAME = ["env.name=household_text", "env.template=prompts.txt"]


@pytest.mark.parametrize(
    ("fields", "recorded", "changed", "others"),
    [
        (PARTS, "env.name", "rooms.py", ["method"]),
        (["reward.source=./learning.py:scored"], "reward.source", "learning.py", []),
        (["env.name=household_text", "env.state_key=./learning.py:scored"], "env.state_key", "learning.py", []),
        (TEXT_GAME, "env.template", "prompts.txt", []),
    ],
)
def test_what_a_run_was_made_with_is_recorded_and_a_change_warned_of_once(here, monkeypatch, fields, recorded, changed, others):
    monkeypatch.setattr(importlib.metadata, "packages_distributions", dict)  # which reads all that is installed
    config = load(None, ["warm_start=none", *fields])
    assert provenance.record(config, here, 0) == []
    (record,) = json.loads((here / "provenance.json").read_text())
    assert set(record) == {"from_iteration", recorded, *others}
    assert record[recorded]["name"] == f"./{changed}:Corridor" if others else record[recorded]["file"].endswith(f"/{changed}")
    assert provenance.record(config, here, 2) == []
    (here / changed).write_text((here / changed).read_text().replace("\n", "\n\n", 1))
    if changed.endswith(".py"):  # this process has read it as it was
        with pytest.raises(ConfigError, match=rf"{changed}:\w+: has changed since this process read it; begin a new process$"):
            provenance.record(config, here, 3)
        monkeypatch.setattr(user_code, "_READ", {})  # as in a new one
    (warning,) = provenance.record(config, here, 3)
    assert warning.startswith(f"{next(field for field in fields if recorded in field)}: it has changed since iteration 0")
    first, second = json.loads((here / "provenance.json").read_text())
    assert first == record and second["from_iteration"] == 3
    assert all(second[other] == first[other] for other in others)
    assert second[recorded]["sha256"] != first[recorded]["sha256"]
    assert provenance.record(config, here, 4) == []
    (here / "empty").mkdir()
    provenance.record(load(), here / "empty", 0)
    assert not list((here / "empty").iterdir())


@pytest.mark.slow
def test_trains_evaluates_resumes_and_is_reported(here):
    words = [
        *SMALL, "env.name=./rooms.py:Guided", "warm_start=cloning", "cloning.max_steps=30", "cloning.episodes=64",
        "method=./learning.py:plain", "run_dir=run", "cache_dir=cache", "iterations=2",
    ]  # fmt: skip
    said = command("-m", "hgpo_jax.train", *words, cwd=here).stdout
    assert "warm start: 30 steps of behaviour cloning" in said
    rows = rows_of(here / "run")
    assert len(rows) == 2 and all(np.isfinite(row["loss"]) for row in rows)
    assert "./learning.py:plain" in (here / "run" / "config.yaml").read_text()
    before = (here / "run" / "evaluation.json").read_text()
    command("-m", "hgpo_jax.evaluate", "run", cwd=here)
    assert (here / "run" / "evaluation.json").read_text() == before
    (here / "learning.py").write_text(ESTIMATOR + "# changed\n")
    resumed = command("-m", "hgpo_jax.train", "--resume", "run", "iterations=3", cwd=here)
    assert len(rows_of(here / "run")) == 3
    (warning,) = [line for line in resumed.stderr.splitlines() if line.startswith("warning: ")]
    assert warning.startswith("warning: method=./learning.py:plain: it has changed since iteration 0")
    command("-m", "hgpo_jax.report", "run", cwd=here)


@pytest.mark.slow
def test_a_text_one_is_learned_in_a_users_prompts(here):
    """It has no expert: the warm start clones random admissible commands."""
    words = [
        *SMALL, "iterations=2", "env.name=./games.py:Guess", "env.options.size=2", "env.template=prompts.txt", "env.workers=1",
        "warm_start=cloning", "cloning.episodes=64", "cloning.max_steps=300", "policy.hidden_size=32", *TEXTS[1:],
        "run_dir=run", "cache_dir=cache",
    ]  # fmt: skip
    said = command("-m", "hgpo_jax.train", *words, cwd=here).stdout
    assert re.search(r"admissible (9[5-9]|100)%\s", said)
    assert all(np.isfinite(row["loss"]) for row in rows_of(here / "run"))
