"""The households for a searcher and a carrier, for a planner and an executor, and with a plan in every answer: step by step as
the plain ones; each role sees its own, and the scripted players need each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from household_play import quick_jit
from plain_household import PlainHousehold
from plain_roles import PLACES_NAMED, PlainPlan, PlainTeam

from hgpo_jax.envs.compiled_as_text import Words
from hgpo_jax.envs.household import HouseholdPlan, HouseholdSubgoals, HouseholdTeam, world
from hgpo_jax.envs.household.text import HouseholdTeamText
from hgpo_jax.rollout.tasks import task_keys

SIX = {
    "tasks": ("place", "two", "look", "clean", "heat", "cool"), "rooms": ("kitchen", "bathroom", "bedroom", "livingroom"),
    "things": 8,
}  # fmt: skip
TEAM, PLAN, SUBGOALS = HouseholdTeam(**SIX, max_turns=30), HouseholdPlan(**SIX, max_turns=24), HouseholdSubgoals()
ANYONE, EXPERTS, GUESS = range(3)  # who plays; in a guess the one that sees everything says anything
K, B = 2, 64


@functools.cache
def program(env):
    """`play(who)` -> records [B, T, ...] of episodes that go on past their end: what was there before each action, and what
    came of it."""

    def turn(who, carry, key):
        state, observation, recent = carry
        keys, role = jax.random.split(key, 6), env.role(state) if hasattr(env, "role") else 0
        label, admissible = env.expert_action(state, recent[role], keys[0]), env.random_action(state, keys[1])
        record = {"state": state, "before": observation, "label": label, "role": role}
        words = jax.random.randint(keys[2], label.shape, -2, len(env.words) + 3)
        at = jax.random.randint(keys[3], (), 0, len(label))
        cut = jnp.where(jnp.arange(len(label)) < at, admissible, 0)  # of a blueprint the first places, or none
        gap, broken, nearly = admissible.at[0].set(0), label.at[at].set(words[0]), label.at[-1].set(words[-1])
        others = [label, label, admissible, words, cut, gap, broken, nearly]
        if env is not PLAN:
            record["legal"], record["rows"] = env.admissible(state)
            others.append(record["rows"][jax.random.randint(keys[4], (), 0, len(record["rows"]))])  # fits here and now or not
        any_of = jnp.stack(others)[jax.random.randint(keys[5], (), 0, len(others))]
        action = jnp.stack([any_of, label, jnp.where(role == 0, admissible, label)])[who]
        after, seen, reward, done, invalid = env.step(state, action)
        record |= {"action": action, "seen": seen, "reward": reward, "done": done, "invalid": invalid}
        return (after, seen, recent.at[role].set(jnp.concatenate([recent[role][1:], action[None]]))), record

    def episode(who, task, key):
        state, observation = env.reset(task)
        carry = state, observation, jnp.zeros((2, K, env.action_length), jnp.int32)
        return jax.lax.scan(functools.partial(turn, who), carry, jax.random.split(key, env.max_turns))[1]

    tasks, keys = task_keys("train", 1, jnp.arange(B)), jax.random.split(jax.random.key(2), B)
    play = quick_jit(jax.vmap(episode, (None, 0, 0)))
    return functools.cache(lambda who: jax.tree.map(np.asarray, play(who, tasks, keys)))


def turns(env, record, plain_of):
    """Every turn that counts: (b, t, the plain episode, outcome, words of the action)."""
    for b in range(B):
        plain = plain_of(at(record["state"], b, 0))
        for t in range(env.max_turns):
            outcome = tuple(record[name][b, t].item() for name in ("reward", "done", "invalid"))
            yield b, t, plain, outcome, words_of(env, record["action"][b, t])
            if outcome[1]:
                break


def at(states, b: int, t: int):
    return jax.tree.map(lambda array: array[b, t], states)


def words_of(env, ids) -> list[str]:
    return [env.words[i] if 0 <= i < len(env.words) else f"#{i}" for i in ids]


def trimmed(words: list[str]) -> list[str]:
    while words and words[-1] == "":
        words = words[:-1]
    return words


def listed(env, record, b: int, t: int) -> set[tuple[str, ...]]:
    """What the environment says is admissible."""
    return {tuple(words_of(env, row)) for row in record["rows"][b, t][record["legal"][b, t]]}


@pytest.mark.parametrize(("env", "plain"), [(TEAM, PlainTeam), (PLAN, PlainPlan)], ids=["team", "plan"])
def test_every_step_is_that_of_the_plain_one(env, plain):
    record = program(env)(ANYONE)
    ends = struck = 0
    invalids = dict.fromkeys(env.roles, 0)
    for b, t, episode, outcome, action in turns(env, record, functools.partial(plain.begin, env)):
        role, before = episode.role, len(getattr(episode, "left", ()))
        assert env.roles[record["role"][b, t]] == role
        assert trimmed(words_of(env, record["before"][b, t])) == episode.observation(), (b, t)
        if env is TEAM:
            assert listed(env, record, b, t) == episode.admissible(), (b, t)
            assert tuple(words_of(env, record["label"][b, t])) in episode.admissible(), (b, t)
        seen, *rest = episode.step(*action)
        assert outcome == tuple(rest), (b, t, action)
        assert trimmed(words_of(env, record["seen"][b, t])) == seen, (b, t)
        ends, struck = ends + (rest[0] > 0), struck + (len(getattr(episode, "left", ())) < before)
        invalids[role] += rest[-1]
    assert ends > B // 10 and (struck > B // 2 or env is TEAM)
    assert invalids[env.roles[0]] > B // 5 and invalids[env.roles[1]] > B


@pytest.mark.parametrize(("env", "short", "better"), [(TEAM, 16, 0.2), (PLAN, 10, 0.3)], ids=["team", "plan"])
def test_the_experts_solve_everything_and_need_the_one_that_sees(env, short, better):
    experts, guess = (program(env)(who) for who in (EXPERTS, GUESS))
    solved = lambda record, most: (record["reward"][:, :most] > 0).any(1).mean()  # noqa: E731
    assert solved(experts, None) == 1
    assert solved(experts, short) > solved(guess, short) + better
    if env is PLAN:
        tasks = experts["state"].task[:, 0]
        lengths = [len(trimmed(words_of(env, label))) for label in experts["label"][:, 0]]
        assert lengths == [PLACES_NAMED[list(world.TASKS)[task]] for task in tasks]


@pytest.mark.parametrize("env", [TEAM, PLAN], ids=["team", "plan"])
def test_what_is_said_can_be_read_in_the_prompt(env):
    """Places that are seen, of the kind that is asked for, where the room's lamp stands, or where things are treated."""
    record, told = program(env)(ANYONE), 0
    for b, t, *_ in turns(env, record, lambda state: None):
        if record["role"][b, t] == 0:
            house = at(record["state"], b, t).house
            asked = env.words[house.goal_place] if house.task != world.TASK_ID["look"] else ""
            apart = {world.LAMP_AT.get(env.house.rooms[house.room])} if not asked else set()
            known = apart | {*words_of(env, record["before"][b, t])} | ({*world.TOOL.values()} if env is PLAN else set())
            for name in trimmed(words_of(env, record["label"][b, t])):
                assert name in known or (asked and name.startswith(f"{asked}_")), (b, t)
                told += 1
    assert told > B


def test_every_answer_is_done_where_its_plan_fits():
    env, record = SUBGOALS, program(SUBGOALS)(ANYONE)
    refused = {"plan": 0, "action": 0}
    subgoal = ""
    for b, t, house, outcome, (first, second, *action) in turns(env, record, lambda s: PlainHousehold.read(env.house, s.house)):
        if t == 0:
            subgoal = ""
            assert words_of(env, record["before"][b, 0])[:3] == ["", "you_are_in_the_middle_of_the", house.room]
        plans = {("switch", place) for place in house.places} | ({("keep", subgoal)} if subgoal else set())
        if b < 8 and t < 3:
            assert listed(env, record, b, t) == {(*plan, *known) for plan in plans for known in house.admissible()}
        fits = (first, second) in plans
        subgoal = second if fits else subgoal
        seen, *rest = house.step(*(action if fits else ("", "")))
        assert outcome == tuple(rest) and env.switches(record["action"][b, t]) == (first == "switch"), (b, t)
        shown = words_of(env, record["seen"][b, t])
        assert trimmed(shown[1:]) == trimmed(seen) and shown[0] == subgoal, (b, t)
        refused["action" if fits else "plan"] += rest[-1]
    assert min(refused.values()) > B


def test_the_expert_takes_up_the_place_where_it_acts():
    env, record, kept = SUBGOALS, program(SUBGOALS)(EXPERTS), 0
    assert (record["reward"] > 0).any(1).mean() > 0.9
    for b, t, _, (_, _, invalid), (plan, place, verb, argument) in turns(env, record, lambda state: None):
        state = at(record["state"], b, t)
        assert not invalid
        assert place == (argument if verb == "go_to" else env.words[env.house._place_word[0][state.house.at]])
        assert plan == ("keep" if place == env.words[state.subgoal] else "switch")
        kept += plan == "keep"
    assert kept > B


def test_the_teams_text_tells_the_same_and_its_player_wins():
    text, told = HouseholdTeamText(TEAM), {}
    for task in range(12):
        observation, commands = text.reset(task)
        for turn in range(TEAM.max_turns):
            assert (text.roles, text.role) == (TEAM.roles, int(turn % 5 > 0))
            assert observation.startswith("You are the searcher and" if turn % 5 == 0 else "You are the carrier.")
            assert all(command.startswith("say ") == (turn % 5 == 0) for command in commands)
            before, room = text._state.house, text._places()[0]
            seen = TEAM.decode(TEAM._observe(text._state))
            assert told.setdefault((room, observation), seen) == seen
            command = text.expert(2)
            assert command in commands
            observation, commands, reward, done, info = text.step(command)
            assert info["admissible"] and info["won"] == done == (reward > 0)
            if done:
                break
            if turn % 5 == 0:
                assert f"The searcher says: {command[4:]}." in observation
                np.testing.assert_array_equal(before.where, text._state.house.where)
        assert done
    assert len(told) == len({(room, seen) for (room, _), seen in told.items()}) > 50
    text.reset(0)
    before = text._state
    place = text._places()[0].replace("_", " ")
    _, commands, reward, done, info = text.step(f"go to {place}")  # the searcher cannot
    assert (reward, done, info) == (0, False, {"won": False, "admissible": False})
    jax.tree.map(np.testing.assert_array_equal, before.house, text._state.house)
    assert text._state.hint == 0 and not any(command.startswith("say ") for command in commands)
    assert not text.step(f"say {place}")[-1]["admissible"]  # the carrier has no say


def test_words_in_and_out():
    env = HouseholdPlan(tasks=("place", "heat"))
    assert env.action_length == 3
    ids = env.encode("fridge_1 nonsense countertop_1 cabinet_1")
    assert ids.tolist() == [env.words.index("fridge_1"), 0, env.words.index("countertop_1")]
    assert env.decode(ids) == "fridge_1 countertop_1"
    text = Words(SUBGOALS)
    _, commands = text.reset(0)
    assert "switch fridge_1 go_to fridge_1" in commands and not any(command.startswith("keep") for command in commands)
    observation, commands, *_, info = text.step("switch fridge_1 go_to fridge_1")
    assert info["admissible"] and observation.split()[:2] == ["fridge_1", "you_arrive_at"]
    assert "keep fridge_1 open fridge_1" in commands
    observation, *_, info = text.step("keep cabinet_1 open fridge_1")
    assert not info["admissible"] and observation.split()[:2] == ["fridge_1", "nothing_happens"]
