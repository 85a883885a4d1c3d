"""The checks of compiled environments: each kind of fault in one that has it, and none in a sound one."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from hgpo_jax.check import compiled
from hgpo_jax.envs.protocol import Expert
from hgpo_jax.rollout.tasks import task_keys


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


def faults_of(make):
    env = make()
    expert = make if isinstance(env, Expert) else None
    tasks = task_keys("train", 0, jnp.zeros(8, jnp.int32))
    return compiled.check(env, expert, tasks, jax.random.key(0), 2).faults


def broken(base=Corridor, **members):
    return type("Broken", (base,), members)


def stepped(change):
    """A `step` whose answer is changed by `change(state, observation, reward, done, invalid)`."""
    return lambda self, state, action: change(*Corridor.step(self, state, action))


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


def seen(change):
    """The same of a `step`, where the change is one of `change(state, observation, reward, done)`."""
    return stepped(lambda *answer: (*change(*answer[:4]), answer[4]))


FAR = jnp.array([3, 0], jnp.int32)
# The beginnings of all faults of an environment, each in a line, and what belongs further on after three dots.
FAULTS = {
    """Broken lacks decode: decode(ids) -> text
    Broken: observation_length is 1.0; give a whole number above 0
    Broken: task_types is 'walk'; give a tuple of texts
    Broken lacks prompt_slots: prompt_slots(history_length)
    Broken lacks goal_text: goal_text(observation)
    Broken lacks role: role(state) -> whose turn
    Broken: roles is 'walker'; give different words""": broken(
        observation_length=1.0, task_types="walk", prompt=None, roles="walker", decode=property(lambda self: self.absent)
    ),
    """Broken: max_turns is 0; give a whole number above 0
    Broken: words begins with 'left'; put the empty word '' first
    Broken lacks random_action: random_action(env, state, key)""": broken(
        max_turns=0, words=("left", "right"), expert_action=Guided.expert_action
    ),
    "Broken: words has 'left' twice; name each once": broken(words=("", "left", "left")),
    "Broken: answer_parts is (1, 2); give three numbers, 2 together": broken(answer_parts=(1, 2), switches=None),
    """reset(key): observation is f32[1]; make it i32[1]
    goal(state): goal is i32[2]; make it i32[1]
    random_action(state, key): action is i32[]; make it i32[2]
    admissible(state): words is i32[3]; make it i32[3, 2]""": broken(
        Guided,
        reset=lambda self, key: (Corridor.reset(self, key)[0], jnp.ones(1)),
        goal=lambda self, state: jnp.zeros(2, jnp.int32),
        random_action=lambda self, state, key: jnp.int32(1),
        admissible=lambda self, state: (jnp.ones(3, bool), jnp.ones(3, jnp.int32)),
    ),
    "reset(key): does not return 2 values; return (state, observation)": broken(
        reset=lambda self, key: Corridor.reset(self, key)[0].at
    ),
    "reset(key): its state has no field task; add it": broken(reset=lambda self, key: ((), jnp.zeros(1, jnp.int32))),
    """step(state, action): does not return 5 values
    won(state): won is i32[]; make it bool[]
    role(state): role is f32[]; make it i32[]""": broken(
        step=stepped(lambda *answer: answer[:4]),
        won=lambda self, state: (state.at > 2) * 1,
        roles=("one", "two"),
        role=lambda self, state: state.turn * 1.0,
    ),
    """step(state, action): reward is i32[]; make it f32[]
    step(state, action): done is i32[]; make it bool[]
    step(state, action): state.turn becomes f32[]; leave it i32[], as reset made it
    prompt(...): prompt is i32[9]; make it i32[7]""": broken(
        step=seen(lambda s, o, r, d: (s.replace(turn=s.turn * 1.0), o, r.astype(jnp.int32), d * 1)),
        **of_seven(lambda state: (jnp.zeros(9, jnp.int32), jnp.int32(9))),
    ),
    "step(state, action): its state has other fields than that of reset": broken(
        step=stepped(lambda s, *rest: ((s, s), *rest))
    ),
    "step(state, action): cannot be compiled: TracerBoolConversionError: ... (use jnp.where": broken(
        step=seen(lambda s, o, r, d: (s, o, 1.0 if d else 0.0, d))
    ),
    "episodes: changes in play, and leaks from one episode into others": Counting,
    """at: changes in play
    decode(ids): returns a list; return text""": broken(reset=leaves_a_tracer, at=None, decode=lambda self, ids: list(ids)),
    """reset(key): episodes of equal keys differ; draw everything random from the key
    reset(key): an observation has the id -
    decode(ids): fails with AttributeError""": broken(reset=drawn_when_traced, decode=lambda self, ids: self.names[ids]),
    "step(state, action): answers the same action in the same state differently": broken(step=stepped(drawn_on_the_host)),
    """step(state, action): an observation has the id 9; make it the index of one of the 7 words
    step(state, action): a reward is nan; make it a finite number
    step(state, action): an episode goes on after max_turns=3 actions; count them, and return done
    reset(key): state.task is 1; make it the index of one of the 1 task_types
    role(state): is 2; make it the index of one of the 2 roles
    prompt(...): is 10 tokens long; prompt_slots(history_length) says at most 7""": broken(
        step=seen(lambda s, o, r, d: (s, o * 0 + 9, r * jnp.nan, d & False)),
        roles=("one", "two"),
        role=lambda self, state: state.turn,
        reset=lambda self, key: (Corridor.reset(self, key)[0].replace(task=jnp.int32(1)), jnp.ones(1, jnp.int32)),
        **of_seven(lambda state: (jnp.zeros(7, jnp.int32), state.turn + 7)),
    ),
    """step(state, action): after the end a reward is inf; keep it finite
    goal(state): the goal has the id -1
    random_action: gives 'far', which step(state, action) calls invalid (100.0% of its actions)
    expert_action: gives 'right', which step(state, action) calls invalid
    expert_action: gives an action with an empty word before others
    admissible: gives 'far', which step(state, action) calls invalid""": broken(
        Guided,
        step=seen(lambda s, o, r, d: (s, o, jnp.where(s.turn > 3, jnp.inf, r), d)),
        goal=lambda self, state: -jnp.ones(1, jnp.int32),
        random_action=lambda self, state, key: FAR,
        expert_action=lambda self, state, recent, key: jnp.array([0, 2], jnp.int32),
        admissible=lambda self, state: (jnp.array([True]), FAR[None]),
    ),
}


@pytest.mark.parametrize("lines", FAULTS)
def test_what_is_wrong_with_a_compiled_one(lines):
    faults, beginnings = faults_of(FAULTS[lines]), [line.strip().split(" ... ") for line in lines.splitlines()]
    for begin, *rest in beginnings:
        assert any(fault.startswith(begin) and all(part in fault for part in rest) for fault in faults), (begin, faults)
    assert len(faults) == len(beginnings), faults


def test_a_sound_compiled_one_has_no_fault():
    assert faults_of(Guided) == []
