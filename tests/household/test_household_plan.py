"""The household with a plan: step by step as the plain one, and its scripted players, of which each needs the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from household_play import quick_jit
from plain_plan import PlainPlan

from hgpo_jax.envs.household import Household, HouseholdPlan, world
from hgpo_jax.envs.household.plan import PLANNER
from hgpo_jax.rollout.tasks import task_keys

SIX = {
    "tasks": ("place", "two", "look", "clean", "heat", "cool"), "rooms": ("kitchen", "bathroom", "bedroom", "livingroom"),
    "things": 8, "max_turns": 24,
}  # fmt: skip
SIZES = {"default": {}, "six": SIX}
MIXED, EXPERT, GUESS = range(3)  # who plays: anyone; the experts; an expert executor of a random blueprint
K, B = 2, 128


@functools.cache
def programs(size: str):
    """(the environment, `play(who)`: records [B, T, ...] of episodes that go on past their end)."""
    env = HouseholdPlan(**SIZES[size])

    def turn(who, carry, key):
        state, observation, recent = carry
        keys, role = jax.random.split(key, 5), env.role(state)
        label, admissible = env.expert_action(state, recent[role], keys[0]), env.random_action(state, keys[1])
        words = jax.random.randint(keys[2], label.shape, -2, len(env.words) + 3)
        keep = jax.random.randint(keys[3], (), 0, len(label) + 1)
        cut = jnp.where(jnp.arange(len(label)) < keep, admissible, 0)  # of a blueprint the first places, or none
        gap = admissible.at[0].set(0)
        nearly = label.at[-1].set(words[-1])  # a word too many, or one that is no place
        any_of = jnp.stack([label, label, admissible, cut, gap, nearly, words])[jax.random.randint(key, (), 0, 7)]
        action = jnp.stack([any_of, label, jnp.where(role == PLANNER, admissible, label)])[who]
        after, seen, reward, done, invalid = env.step(state, action)
        record = {
            "state": state, "before": observation, "label": label, "action": action, "role": role, "seen": seen,
            "reward": reward, "done": done, "invalid": invalid,
        }  # fmt: skip
        return (after, seen, recent.at[role].set(jnp.concatenate([recent[role][1:], action[None]]))), record

    def episode(who, task, key):
        state, observation = env.reset(task)
        carry = state, observation, jnp.zeros((len(env.roles), K, env.action_length), jnp.int32)
        return jax.lax.scan(functools.partial(turn, who), carry, jax.random.split(key, env.max_turns))[1]

    tasks, keys = task_keys("train", 1, jnp.arange(B)), jax.random.split(jax.random.key(2), B)
    play = quick_jit(jax.vmap(episode, (None, 0, 0)))
    return env, lambda who: jax.tree.map(np.asarray, play(who, tasks, keys))


def played(size: str, who: int) -> tuple[HouseholdPlan, dict]:
    env, play = programs(size)
    return env, play(who)


def words_of(env, ids) -> list[str]:
    return [env.words[i] if 0 <= i < len(env.words) else f"#{i}" for i in ids]


def trimmed(words: list[str]) -> list[str]:
    while words and words[-1] == "":
        words = words[:-1]
    return words


@pytest.mark.parametrize("size", ["default", pytest.param("six", marks=pytest.mark.slow)])
def test_every_step_is_that_of_the_plain_one(size):
    env, record = played(size, MIXED)
    ends = struck = 0
    invalids = {"planner": 0, "executor": 0}
    for b in range(B):
        plain = PlainPlan.begin(env, jax.tree.map(lambda a, b=b: a[b, 0], record["state"]))
        assert trimmed(words_of(env, record["before"][b, 0])) == plain.observation()
        for t in range(env.max_turns):
            role, before = plain.role, len(plain.left)
            assert env.roles[record["role"][b, t]] == role
            observation, reward, done, invalid = plain.step(*words_of(env, record["action"][b, t]))
            got = record["reward"][b, t], record["done"][b, t], record["invalid"][b, t]
            assert got == (reward, done, invalid), (b, t)
            assert trimmed(words_of(env, record["seen"][b, t])) == observation, (b, t)
            ends, struck, invalids[role] = ends + (reward > 0), struck + (len(plain.left) < before), invalids[role] + invalid
            if done:
                break
    assert ends > B // 10 and struck > B // 2
    assert B // 5 < invalids["planner"] < 4 * B // 5 and invalids["executor"] > B


@pytest.mark.parametrize("size", ["default", pytest.param("six", marks=pytest.mark.slow)])
def test_the_experts_solve_everything_and_a_blueprint_saves_turns(size):
    (env, expert), (_, guess) = played(size, EXPERT), played(size, GUESS)
    solved = lambda record, turns: (record["reward"][:, :turns] > 0).any(1).mean()  # noqa: E731
    assert solved(expert, None) == 1
    assert solved(expert, 10) > solved(guess, 10) + 0.3
    first = expert["label"][:, 0]
    for b in range(B):  # the planner says nothing that it does not see, but for places that the task is about
        house = jax.tree.map(lambda a, b=b: a[b, 0], expert["state"]).house
        room = env.house.rooms[house.room]
        seen, asked = words_of(env, expert["before"][b, 0]), env.words[house.goal_place]
        tools = {*world.TOOL.values(), world.LAMP_AT.get(room)}
        named = trimmed(words_of(env, first[b]))
        assert all(name in seen or name in tools or name.startswith(f"{asked}_") for name in named), (b, named)
        assert len(named) == {"place": 2, "two": 4, "look": 2}.get(list(world.TASKS)[house.task], 3)


def test_what_it_refuses_is_what_the_household_refuses():
    for wrong in ({"places": 5}, {"things": 9}, {"tasks": ("heat",), "rooms": ("bedroom",)}, {"tasks": ()}, {"max_turns": 0}):
        with pytest.raises(ValueError) as alone:
            Household(**wrong)
        with pytest.raises(ValueError) as planned:
            HouseholdPlan(**wrong)
        assert str(planned.value) == str(alone.value)


def test_it_reads_and_writes_words():
    env = HouseholdPlan(tasks=("place", "heat"))
    assert env.action_length == 3
    ids = env.encode("fridge_1 nonsense countertop_1 cabinet_1")
    assert ids.tolist() == [env.words.index("fridge_1"), 0, env.words.index("countertop_1")]
    assert env.decode(ids) == "fridge_1 countertop_1"
