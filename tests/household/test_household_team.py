"""The household for two: step by step as the plain one, each role sees its own, and the scripted players solve it together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from household_play import quick_jit
from plain_team import PlainTeam

from hgpo_jax.envs.household import Household, HouseholdTeam, world
from hgpo_jax.envs.household.team import SEARCHER
from hgpo_jax.envs.household.text import HouseholdTeamText
from hgpo_jax.rollout.tasks import task_keys

SIX = {
    "tasks": ("place", "two", "look", "clean", "heat", "cool"), "rooms": ("kitchen", "bathroom", "bedroom", "livingroom"),
    "max_turns": 30,
}  # fmt: skip
SIZES = {"default": {}, "few": SIX | {"things": 2, "places": 12}, "many": SIX | {"things": 8}}
MIXED, EXPERT, LIAR = range(3)  # who plays: anyone; the expert; an expert carrier, while the searcher names any place
K, B = 2, 256


@functools.cache
def played(size: str, who: int) -> tuple[HouseholdTeam, dict]:
    """Records [B, T, ...] of episodes that go on past their end: what was there before each action, and what came of it."""
    env = HouseholdTeam(**SIZES[size])

    def turn(carry, key):
        state, observation, recent = carry
        keys, role = jax.random.split(key, 4), env.role(state)
        legal, rows = env.admissible(state)
        label, admissible = env.expert_action(state, recent[role], keys[0]), env.random_action(state, keys[1])
        listed = rows[jax.random.randint(keys[2], (), 0, len(rows))]  # also what does not fit here and now
        words = jax.random.randint(keys[3], (2,), -2, len(env.words) + 3)
        other = {MIXED: jnp.stack([label, label, admissible, listed, words])[jax.random.randint(key, (), 0, 5)],
                 EXPERT: label, LIAR: jnp.where(role == SEARCHER, admissible, label)}  # fmt: skip
        action = other[who]
        after, seen, reward, done, invalid = env.step(state, action)
        record = {
            "state": state, "before": observation, "legal": legal, "rows": rows, "label": label, "action": action,
            "role": role, "seen": seen, "reward": reward, "done": done, "invalid": invalid,
        }  # fmt: skip
        return (after, seen, recent.at[role].set(jnp.concatenate([recent[role][1:], action[None]]))), record

    def episode(task, key):
        state, observation = env.reset(task)
        carry = state, observation, jnp.zeros((len(env.roles), K, 2), jnp.int32)
        return jax.lax.scan(turn, carry, jax.random.split(key, env.max_turns))[1]

    tasks, keys = task_keys("train", 1, jnp.arange(B)), jax.random.split(jax.random.key(2), B)
    return env, jax.tree.map(np.asarray, quick_jit(jax.vmap(episode))(tasks, keys))


def words_of(env, ids) -> list[str]:
    return [env.words[i] if 0 <= i < len(env.words) else f"#{i}" for i in ids]


def trimmed(words: list[str]) -> list[str]:
    while words and words[-1] == "":
        words = words[:-1]
    return words


@pytest.mark.parametrize("size", ["default", *(pytest.param(size, marks=pytest.mark.slow) for size in ("few", "many"))])
def test_every_step_is_that_of_the_plain_team(size):
    env, record = played(size, MIXED)
    ends = invalids = 0
    for b in range(B):
        plain = PlainTeam.begin(env, jax.tree.map(lambda a, b=b: a[b, 0], record["state"]))
        assert trimmed(words_of(env, record["before"][b, 0])) == plain.observation()
        for t in range(env.max_turns):
            assert env.roles[record["role"][b, t]] == plain.role
            legal = {tuple(words_of(env, row)) for row in record["rows"][b, t][record["legal"][b, t]]}
            assert legal == plain.admissible(), (b, t)
            observation, reward, done, invalid = plain.step(*words_of(env, record["action"][b, t]))
            got = record["reward"][b, t], record["done"][b, t], record["invalid"][b, t]
            assert got == (reward, done, invalid), (b, t)
            assert trimmed(words_of(env, record["seen"][b, t])) == observation, (b, t)
            ends, invalids = ends + (reward > 0), invalids + invalid
            if done:
                break
    assert ends > B // 5 and invalids > B


def test_the_labels_are_admissible_and_the_searchers_can_be_read_in_its_prompt():
    """It names a place that it sees, or one of the kind that is asked for, or where the room's lamp stands."""
    env, record = played("many", MIXED)
    told = 0
    for b, t in np.argwhere(~np.pad(record["done"], ((0, 0), (1, 0)))[:, :-1].cumsum(1).astype(bool)):
        legal, label = record["rows"][b, t][record["legal"][b, t]], record["label"][b, t]
        assert (legal == label).all(1).any(), (b, t)
        if record["role"][b, t] == SEARCHER:
            name, house = env.words[label[0]], jax.tree.map(lambda a, b=b, t=t: a[b, t], record["state"].house)
            asked = env.words[house.goal_place] if house.task != world.TASK_ID["look"] else ""
            lamp = world.LAMP_AT.get(env.house.rooms[house.room], "")
            seen = words_of(env, record["before"][b, t])
            assert name in seen or (name.startswith(f"{asked}_") if asked else name == lamp), (b, t)
            told += 1
    assert told > B


@pytest.mark.parametrize(("size", "short"), [
    ("default", 12), pytest.param("few", 16, marks=pytest.mark.slow), pytest.param("many", 16, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_expert_team_solves_everything_and_needs_the_searcher(size, short):
    def solved(who, turns):
        return (played(size, who)[1]["reward"][:, :turns] > 0).any(1).mean()

    assert solved(EXPERT, None) == 1
    assert solved(EXPERT, short) > solved(LIAR, short) + 0.2


def test_what_it_refuses_is_what_the_household_refuses():
    for wrong in ({"places": 5}, {"things": 9}, {"tasks": ("heat",), "rooms": ("bedroom",)}, {"max_turns": 0}):
        with pytest.raises(ValueError) as alone:
            Household(**wrong)
        with pytest.raises(ValueError) as team:
            HouseholdTeam(**wrong)
        assert str(team.value) == str(alone.value)


def test_its_text_tells_the_same_and_its_player_wins():
    env = HouseholdTeam(**SIX)
    text, told = HouseholdTeamText(env), {}
    for task in range(12):
        observation, commands = text.reset(task)
        for turn in range(env.max_turns):
            assert (text.roles, text.role) == (env.roles, int(turn % 5 > 0))
            assert observation.startswith("You are the searcher and" if turn % 5 == 0 else "You are the carrier.")
            assert all(command.startswith("say ") == (turn % 5 == 0) for command in commands)
            house = text._state.house
            seen = env.decode(env._observe(text._state))
            room = text._places()[0]
            assert told.setdefault((room, observation), seen) == seen
            command = text.expert(2)
            assert command in commands
            observation, commands, reward, done, info = text.step(command)
            assert info["admissible"] and info["won"] == done == (reward > 0)
            if done:
                break
            if turn % 5 == 0:
                assert f"The searcher says: {command[4:]}." in observation
                np.testing.assert_array_equal(house.where, text._state.house.where)
        assert done
    assert len(told) == len({(room, seen) for (room, _), seen in told.items()}) > 50


def test_a_team_of_commands_that_do_not_fit_is_refused():
    text = HouseholdTeamText(HouseholdTeam())
    text.reset(0)
    before = text._state
    _, commands, reward, done, info = text.step("go to fridge 1")  # the searcher cannot
    assert (reward, done, info) == (0, False, {"won": False, "admissible": False})
    jax.tree.map(np.testing.assert_array_equal, before.house, text._state.house)
    assert text._state.told == 0 and not any(command.startswith("say ") for command in commands)
    assert not text.step("say fridge 1")[-1]["admissible"]  # the carrier has no say
