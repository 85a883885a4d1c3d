"""An environment that lacks something is refused at once, in one line that names its class and what it lacks."""

import contextlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from flax import struct
from odd_env import Counting

from hgpo_jax import config as configuration
from hgpo_jax.envs.protocol import INFO, BegunTextEnv, CompiledEnv, Playable, TextEnv, members
from hgpo_jax.rollout import requirements
from hgpo_jax.rollout.compiled import make_rollout
from hgpo_jax.rollout.environments import environment
from hgpo_jax.rollout.requirements import check_compiled, check_text
from hgpo_jax.rollout.runners import CompiledRunner
from hgpo_jax.rollout.workers import LocalWorkers
from hgpo_jax.utils.errors import ConfigError


class State(struct.PyTreeNode):
    task: jax.Array


class Taskless(struct.PyTreeNode):
    turn: jax.Array


def lacking(base, member):
    """The class without a member of its own or of its instances."""

    def gone(self):
        raise AttributeError(member)

    return type("Mine", (base,), {member: property(gone, lambda self, value: None)})


class Room:
    words, task_types, max_turns = ("", "stay"), ("leave",), 3
    goal_length = observation_length = action_length = 1
    decode = staticmethod(lambda ids: "stay")
    state = State

    def goal(self, state):
        return jnp.ones(1, jnp.int32)

    def won(self, state):
        return jnp.bool_(True)

    def step(self, state, action):
        return state, jnp.zeros(1, jnp.int32), jnp.float32(1), jnp.bool_(True), jnp.bool_(False)

    def reset(self, key):
        return self.state(**{name: jnp.int32(0) for name in self.state.__annotations__}), jnp.zeros(1, jnp.int32)


def pictures(**members):
    """Members of an environment that shows pictures of 4 x 6 pixels."""
    draw = lambda self, observation: jnp.zeros((4, 6, 3), jnp.uint8)  # noqa: E731
    sizes = {"picture_size": (4, 6), "picture_features": (2, 3), "picture_words": (1, 1, 1)}
    return {"picture": draw} | sizes | members


def signals(values):
    return {"signals": ("milestones",), "signal_values": values}


def test_complete_ones_pass():
    check_compiled(Room())
    check_compiled(type("Mine", (Room,), signals(lambda self, state: state.task[None]))())
    check_compiled(type("Mine", (Room,), pictures())())
    check_text(Counting())


def test_a_compiled_environment():
    for member in members(CompiledEnv):
        env = lacking(Room, member)()
        with pytest.raises(ConfigError, match=f"^Mine lacks {member}: [^\n]+$"):
            CompiledRunner(configuration.load(), env, None, None, None)
        if member in members(Playable):
            with pytest.raises(ValueError, match=f"^Mine lacks {member}: "):
                make_rollout(env, None, None)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"state": Taskless}, r"Mine: reset\(key\): its state has no field task; add it: "),
        ({"reset": lambda self, key: self.no_such(key)}, r"Mine: reset\(key\): cannot be compiled: AttributeError: .*no_such"),
        (
            {"reset": lambda self, key: jnp.zeros(1)},
            r"Mine: reset\(key\): does not return 2 values; return \(state, observation\)",
        ),
        (
            {"step": lambda self, state, action: None},
            r"Mine: step\(state, action\): does not return 5 values; return \(state, ",
        ),
        (
            {"step": lambda self, s, a: (s, a[0], 1.0, True, False)},
            r"Mine: step\(state, action\): observation is i32\[\]; make ",
        ),
        ({"step": lambda self, s, a: 1 if a[0] else 0}, r"Mine: step\(state, action\): cannot be compiled: .*use jnp.where"),
        ({"goal": lambda self, state: jnp.zeros(2, jnp.int32)}, r"Mine: goal\(state\): goal is i32\[2\]; make it i32\[1\]"),
        ({"won": lambda self, state: state.task[None] > 0}, r"Mine: won\(state\): won is bool\[1\]; make it bool\[\]"),
        ({"max_turns": "3"}, "Mine: max_turns is '3'; give a whole number above 0"),
        ({"goal_length": 2.0}, "Mine: goal_length is 2.0; "),
        (signals(lambda self, state: state.task), r"Mine: signal_values\(state\) is int32\[\]; give f32\[1\], for milestones"),
        (signals(lambda self, state: jnp.zeros(2)), r"Mine: signal_values\(state\) is float32\[2\]; give f32\[1\], "),
        (signals(lambda self, state: jnp.array([True])), r"Mine: signal_values\(state\) is bool\[1\]; "),
        (signals(lambda self, state: [state.task]), r"Mine: signal_values\(state\) is a list; "),
        (signals(lambda self, state: state.no_such), r"Mine: signal_values\(state\) fails with AttributeError: .*no_such"),
        ({"picture": lambda self, observation: None}, "Mine lacks picture_size: height and width of a picture in pixels"),
        (pictures(picture_size=(4, 0)), r"Mine: picture_size is \(4, 0\); give 2 numbers, height and width, each above 0"),
        (pictures(picture_features=(2, 2)), r"Mine: picture_features is \(2, 2\); give what cuts 4 x 6 pixels into squares"),
        (pictures(picture_words=(1, 2)), r"Mine: picture_words is \(1, 2\); give 3 numbers, ids of words from 1 on"),
        (pictures(picture=lambda self, o: jnp.zeros((4, 6, 3))), r"Mine: picture\(observation\) is float32\[4, 6, 3\]; "),
        (pictures(picture=lambda self, o: None), r"Mine: picture\(observation\) is NoneType\[\]; give uint8\[4, 6, 3\]"),
        (pictures(picture=lambda self, o: 1 / 0), r"Mine: picture\(observation\) fails with ZeroDivisionError"),
        (
            pictures(prompt=lambda self: None, prompt_slots=lambda self, K: 1, goal_text=lambda self, seen: ""),
            "Mine has both picture and prompt; a prompt of its own shows no picture, so leave one of the two out",
        ),
        (signals(5), r"Mine: signal_values\(state\) fails with TypeError: "),
    ],
)
def test_what_a_compiled_environment_says(members, message):
    with pytest.raises(ConfigError, match=f"^{message}[^\n]*$"):
        CompiledRunner(configuration.load(), type("Mine", (Room,), members)(), None, None, None)


def test_a_text_environment():
    for member in members(BegunTextEnv):
        after = "" if member in members(TextEnv) else r" after reset\(task\)"
        with pytest.raises(ValueError, match=f"^Mine{after} lacks {member}: [^\n]+$"):
            LocalWorkers(lacking(Counting, member))
    with pytest.raises(ValueError, match=r"^Mine: max_turns is 0; give a whole number above 0$"):
        LocalWorkers(type("Mine", (Counting,), {"max_turns": 0}))


@pytest.mark.parametrize(("member", "call"), [("reset", r"reset\(0\)"), ("step", r"step\('add 1'\) in task 0")])
def test_a_text_environment_that_hangs(monkeypatch, member, call):
    def hang(self, _):
        with contextlib.suppress(Exception):  # whatever it catches
            time.sleep(60)

    mine = type("Mine", (Counting,), {member: hang})
    with pytest.raises(ValueError, match=rf"^Mine: {call} gives no answer in 0.3 s \(env.time_limit\); see why it hangs$"):
        LocalWorkers(mine, 0.3)
    monkeypatch.setattr(sys.modules[__name__], f"Hanging_{member}", mine, raising=False)
    with pytest.raises(ConfigError, match=rf"Mine: {call} gives no answer in 0.4 s \(env.time_limit\)"):
        environment(configuration.load(None, [f"env.name={__name__}:Hanging_{member}", "env.time_limit=0.4"]).env)
    monkeypatch.setattr(requirements, "LIMIT", 0.2)
    with pytest.raises(ValueError, match=f"^Mine: {call} gives no answer in 0.2 s; see why it hangs$"):
        LocalWorkers(mine)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.parametrize("key", INFO)
def test_what_a_text_environments_step_says(key):
    class Mine(Counting):
        def step(self, action):
            *result, info = super().step(action)
            del info[key]
            return *result, info

    with pytest.raises(ValueError, match=rf"^Mine: the info of step\(action\) lacks {key}: [^\n]+$"):
        LocalWorkers(Mine)


class Unlucky(Counting):
    def reset(self, task):
        return super().reset(13 if task == 0 else task)


def test_a_task_that_cannot_begin_still_costs_its_own_episodes_alone():
    workers = LocalWorkers(Unlucky)
    workers.send([(0, 0, ()), (1, 1, ())])
    failed, answered = (answer for _, answer in workers.receive(2))
    assert failed.reason == "ValueError: unlucky" and answered.observation == "at 1"


def test_workers_need_no_jax():
    script = "import sys, hgpo_jax.rollout.workers; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
