"""The household whose answers have a plan: step by step the plain one where the plan fits, and nothing where it does not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from household_play import quick_jit
from plain_household import PlainHousehold

from hgpo_jax.envs.household import Household, HouseholdSubgoals
from hgpo_jax.envs.words import Words
from hgpo_jax.rollout.tasks import task_keys

K, B = 2, 64
MIXED, EXPERT = range(2)  # who plays: anyone, or the expert


@functools.cache
def played(who: int) -> tuple[HouseholdSubgoals, dict]:
    """Records [B, T, ...] of episodes that go on past their end: what was there before each answer, and what came of it."""
    env = HouseholdSubgoals()

    def turn(carry, key):
        state, observation, recent = carry
        keys = jax.random.split(key, 5)
        legal, rows = env.admissible(state)
        label, admissible = env.expert_action(state, recent, keys[0]), env.random_action(state, keys[1])
        listed = rows[jax.random.randint(keys[2], (), 0, len(rows))]  # also what does not fit here and now
        words = jax.random.randint(keys[3], (4,), -2, len(env.words) + 3)
        broken = label.at[jax.random.randint(keys[4], (), 0, 2)].set(words[0])  # an action of the expert's behind a wrong plan
        other = jnp.stack([label, label, admissible, listed, words, broken])
        answer = label if who == EXPERT else other[jax.random.randint(key, (), 0, len(other))]
        after, seen, reward, done, invalid = env.step(state, answer)
        record = {
            "state": state, "before": observation, "legal": legal, "rows": rows, "label": label, "answer": answer,
            "seen": seen, "reward": reward, "done": done, "invalid": invalid, "switches": env.switches(answer),
        }  # fmt: skip
        return (after, seen, jnp.concatenate([recent[1:], answer[None]])), record

    def episode(task, key):
        state, observation = env.reset(task)
        carry = state, observation, jnp.zeros((K, 4), jnp.int32)
        return jax.lax.scan(turn, carry, jax.random.split(key, env.max_turns))[1]

    tasks, keys = task_keys("train", 1, jnp.arange(B)), jax.random.split(jax.random.key(2), B)
    return env, jax.tree.map(np.asarray, quick_jit(jax.vmap(episode))(tasks, keys))


def words_of(env, ids) -> list[str]:
    return [env.words[i] if 0 <= i < len(env.words) else f"#{i}" for i in ids]


def test_every_step_is_the_plain_households_where_the_plan_fits():
    env, record = played(MIXED)
    refused = {"plan": 0, "action": 0}
    for b in range(B):
        house = PlainHousehold.read(env.house, jax.tree.map(lambda a, b=b: a[b, 0], record["state"].house))
        subgoal = ""
        assert words_of(env, record["before"][b, 0])[:3] == ["", "you_are_in_the_middle_of_the", house.room]
        for t in range(env.max_turns):
            plans = {("switch", place) for place in house.places} | ({("keep", subgoal)} if subgoal else set())
            if b < 8 and t < 3:
                legal = {tuple(words_of(env, row)) for row in record["rows"][b, t][record["legal"][b, t]]}
                assert legal == {(*plan, *action) for plan in plans for action in house.admissible()}
            first, second, *action = words_of(env, record["answer"][b, t])
            fits = (first, second) in plans
            subgoal = second if fits else subgoal
            seen, reward, done, invalid = house.step(*(action if fits else ("", "")))
            got = record["reward"][b, t], record["done"][b, t], record["invalid"][b, t], record["switches"][b, t]
            assert got == (reward, done, invalid, first == "switch"), (b, t)
            shown = words_of(env, record["seen"][b, t])
            assert [word for word in shown[1:] if word] == [word for word in seen if word] and shown[0] == subgoal, (b, t)
            refused["action" if fits else "plan"] += invalid
            if done:
                break
    assert min(refused.values()) > B


def test_the_expert_takes_up_the_place_where_it_acts():
    env, record = played(EXPERT)
    assert (record["reward"] > 0).any(1).mean() > 0.9
    going, kept = env.house.word_id["go_to"], 0
    for b in range(B):
        for t in range(int(np.argmax(record["done"][b])) + 1):
            plan, place, verb, argument = record["label"][b, t]
            assert not record["invalid"][b, t]
            at = record["state"].house.at[b, t]
            assert place == (argument if verb == going else env.house._place_word[0][at])
            assert env.words[plan] == ("keep" if place == record["state"].subgoal[b, t] else "switch")
            kept += env.words[plan] == "keep"
    assert kept > B


def test_what_it_refuses_is_what_the_household_refuses():
    for wrong in ({"places": 5}, {"things": 9}, {"tasks": ("heat",), "rooms": ("bedroom",)}, {"max_turns": 0}):
        with pytest.raises(ValueError) as alone:
            Household(**wrong)
        with pytest.raises(ValueError) as planned:
            HouseholdSubgoals(**wrong)
        assert str(planned.value) == str(alone.value)


def test_it_is_played_in_its_own_words():
    text = Words(HouseholdSubgoals())
    _, commands = text.reset(0)
    assert "switch fridge_1 go_to fridge_1" in commands and not any(command.startswith("keep") for command in commands)
    observation, commands, *_, info = text.step("switch fridge_1 go_to fridge_1")
    assert info["admissible"] and observation.split()[:2] == ["fridge_1", "you_arrive_at"]
    assert "keep fridge_1 open fridge_1" in commands
    observation, *_, info = text.step("keep cabinet_1 open fridge_1")
    assert not info["admissible"] and observation.split()[:2] == ["fridge_1", "nothing_happens"]
