"""Households that are asked for: every generated task can be done in time and is not done already, streams of tasks do not
meet, and what is out of range is refused in one line that names the field, the value and the fix."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from household_play import FULL, each, generated, quick_jit
from plain_household import MIDDLE, QUALITY, PlainHousehold, allowed_kinds, kind_of

from hgpo_jax.envs.household import Household, world
from hgpo_jax.rollout.tasks import STREAMS, task_keys

SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ((6, 2), (12, 8))]
NOT_NUMBERS = ["6", 6.5, 7.0, None, float("nan"), True, [6]]
NOT_NAMES = [None, "place", "kitchen", 5, {}, (), [], ("fly",), ("place", 3), (["place"],), np.array(["place", "two"])]


@pytest.mark.parametrize("stream", ["train", "held_out"])
@pytest.mark.parametrize(("places", "things"), [FULL, *SLOW])
def test_tasks_are_sound_and_can_be_done_in_time(places, things, stream):
    """At most 3 things in a receptacle; a goal that suits the task, holds none of what is asked and has space for it; and the
    tool. Then 12 turns are enough: 3 to fetch and 3 to deliver a thing (go, open, take; go, open, put), 2 to treat it. Task
    types are drawn evenly, and the rooms of a type."""
    env, states = generated((places, things), stream)
    drawn = Counter()
    for state in each(states):
        plain = PlainHousehold.read(env, state)
        drawn[plain.task, plain.room] += 1
        assert env.max_turns > 12 and not plain.won()
        assert len(plain.lies) == things and plain.at == MIDDLE and not plain.opened and not plain.lamp_on
        assert all(len(plain.contents(place)) <= 3 for place in plain.places) and not plain.carried
        twins = [thing for thing in plain.lies if kind_of(thing) == plain.goal_thing]
        assert len(twins) == (2 if plain.task == "two" else 1)
        assert len({kind_of(thing) for thing in plain.lies}) == things - len(twins) + 1
        assert not any(kind_of(plain.lies[thing]) == plain.goal_place for thing in twins)
        if plain.task == "look":
            assert world.LAMP_AT[plain.room] in plain.places
        else:
            goals = [place for place in plain.places if kind_of(place) == plain.goal_place]
            assert any(len(plain.contents(place)) + len(twins) <= 3 for place in goals)
        if plain.task in QUALITY:
            assert world.TOOL[plain.task] in plain.places and kind_of(twins[0]) in allowed_kinds(plain.task)
    for task, rooms in world.TASKS.items():
        total = sum(drawn[task, room] for room in env.rooms)
        assert abs(total / 4096 - 1 / 6) < 0.02, task
        shares = [drawn[task, room] / total for room in env.rooms]
        np.testing.assert_allclose(shares, np.isin(env.rooms, rooms) / len(rooms), atol=0.05)


def test_the_order_of_tasks_and_rooms_is_free():
    """Ids of rooms and words move with the order; what they mean does not."""
    env = Household(("look", "clean"), ("bathroom", "bedroom", "kitchen"), things=3)
    start = quick_jit(jax.vmap(lambda key: ((state := env.reset(key)[0]), env.goal(state))))
    states, goals = start(jax.random.split(jax.random.key(4), 64))
    for goal, state in zip(np.asarray(goals), each(states), strict=True):
        plain = PlainHousehold.read(env, state)
        assert plain.room in world.TASKS[plain.task]
        assert plain.task in ("look", "clean") and (plain.goal_place == "") == (plain.task == "look")
        said = [plain.room, world.TASK_WORDS[world.TASK_ID[plain.task]], plain.goal_thing, plain.goal_place]
        assert [env.words[i] for i in goal] == said


def facts(states) -> list[tuple]:
    """One hashable row per task: what its household is like, whatever the order in which things are listed."""
    return [
        (*(int(s[name]) for name in ("room", "task", "goal_kind", "goal_place")), things)
        for s in map(vars, each(states))
        if (things := frozenset(zip(s["kind"].tolist(), s["copy"].tolist(), s["where"].tolist(), strict=True)))
    ]


def test_streams_are_disjoint_and_held_out_tasks_are_new():
    """Keys of all streams under several seeds, 4096 each; a key does not depend on how many are asked for. And no household of
    the default job's 4096 train tasks of seed 0 is among 512 held-out ones.

    Keys never meet, but a small household can come up twice: under seeds 1, 2, 3 there are 0, 2 and 1 such pairs of 2 million.
    Within the 4096 a few repeat, so the comparison can find an equal pair.
    """
    numbers = jnp.arange(4096)
    rows = [np.asarray(jax.random.key_data(task_keys(name, seed, numbers))) for name in STREAMS for seed in range(4)]
    assert len(np.unique(np.concatenate(rows), axis=0)) == 4096 * 4 * len(STREAMS)
    few = task_keys("train", 0, jnp.array([4095, 7]))
    np.testing.assert_array_equal(jax.random.key_data(few), rows[0][[4095, 7]])
    train, held_out = (facts(generated(None, stream)[1]) for stream in ("train", "held_out"))
    assert len(set(train)) > 4080 and len(set(held_out[:512])) == 512
    assert set(train) & set(held_out[:512]) == set()


def refusal(**arguments) -> str:
    with pytest.raises(ValueError) as caught:
        Household(**arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("field", "low", "high"), [("places", 6, 12), ("things", 2, 8), ("max_turns", 1, 1000)])
def test_numbers(field, low, high):
    for value in (low - 1, high + 1, -1, *NOT_NUMBERS):  # True would be in the range of max_turns
        assert refusal(**{field: value}) == f"{field}={value!r}: must be a whole number between {low} and {high}"
    for value in (low, high, np.int64(low)):
        assert getattr(Household(**{field: value}), field) == value


@pytest.mark.parametrize(("field", "known"), [("tasks", world.TASKS), ("rooms", world.ROOMS)])
def test_names(field, known):
    for value in [*NOT_NAMES, [next(iter(known))] * 2, [*known, "attic"]]:
        given = list(value) if isinstance(value, list | tuple) and value else value
        assert refusal(**{field: value}) == f"{field}={given!r}: list one or more of {', '.join(known)}, each once"


def test_tasks_without_a_room():
    for task, rooms in world.TASKS.items():
        for room in world.ROOMS:
            if room in rooms:
                assert Household((task,), (room,)).tasks == (task,)
            else:
                message = refusal(tasks=(task,), rooms=(room,))
                assert message == f"rooms=['{room}']: task '{task}' needs one of {', '.join(rooms)}"
    assert "task 'heat'" in refusal(tasks=["place", "heat"], rooms=["bedroom", "bathroom"])
