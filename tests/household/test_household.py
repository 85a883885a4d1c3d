"""The JAX household against its plain re-statement, over random episodes of every task in every room."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from household_play import BATCH, DIAGONAL, OTHERS, each, generated, lengths, player, quick_jit, state_at
from plain_household import PlainHousehold

from hgpo_jax.envs.household import Household, State, world
from hgpo_jax.rollout.tasks import task_keys

COMPARED = 400  # episodes that the plain household replays
SLOW = [pytest.param(size, marks=pytest.mark.slow) for size in DIAGONAL[1:] + OTHERS]


# f32[BATCH, 4]: a different mix of players in each episode, from nearly pure expert to nearly pure nonsense.
MIXES = np.random.default_rng(1).dirichlet([0.6, 0.8, 0.3, 0.2], BATCH)


def keys(seed: int):
    return jax.random.split(jax.random.key(seed), BATCH)


@pytest.fixture(scope="module", params=DIAGONAL[:1] + SLOW, ids=lambda size: f"{size[0]}-places-{size[1]}-things")
def played(request):
    """(play, its record) of one size, compiled once for all tests."""
    play = player(request.param)
    return play, play(keys(3), 3, MIXES)


def word(env: Household, token: int) -> str:
    """A word, or for an id without one a word that no rule knows."""
    return env.words[token] if 0 <= token < len(env.words) else f"<{token}>"


def replay(env: Household, record: dict, b: int, count: int, tally: set) -> None:
    """One episode: both households agree on everything that can be told of them at every turn."""
    plain = PlainHousehold.read(env, state_at(record, b, 0))
    assert [env.words[i] for i in record["first"][b]] == ["you_are_in_the_middle_of_the", plain.room, "", "", "", ""]
    task = world.TASK_WORDS[world.TASK_ID[plain.task]]
    assert [env.words[i] for i in record["goal"][b]] == [plain.room, task, plain.goal_thing, plain.goal_place]
    for t in range(count):
        rows, legal = record["rows"][b, t], record["legal"][b, t]
        told = [(env.words[verb], env.words[argument]) for verb, argument in rows[legal]]
        assert len(set(told)) == len(told)
        assert set(told) == plain.admissible(), (b, t)
        action = tuple(word(env, i) for i in record["action"][b, t].tolist())
        seen, *rest = plain.step(*action)
        assert [env.words[i] for i in record["seen"][b, t]] == seen, (b, t, action)
        assert [record[name][b, t].item() for name in ("reward", "done", "invalid")] == rest, (b, t, action)
        assert PlainHousehold.read(env, state_at(record, b, t + 1)) == plain, (b, t, action)
        tally.add(("nothing " if rest[-1] else "") + action[0])
        tally.update(w for w in seen if w in world.PHRASES)
    tally.add((plain.task, plain.room))
    if plain.won():
        tally.add(("won", plain.task))


def test_agrees_with_the_plain_household(played):
    play, record = played
    env, tally = play.env, set()
    for b, count in enumerate(lengths(record)[:COMPARED]):
        replay(env, record, b, count, tally)
    # The comparison was of all that there is: every verb done and refused, every phrase, task, room and success.
    missing = {*world.VERBS, *(f"nothing {verb}" for verb in world.VERBS), *world.PHRASES} - tally
    assert missing == set()
    assert {(task, room) for task, rooms in world.TASKS.items() for room in rooms} <= tally
    assert {("won", task) for task in world.TASKS} <= tally


def test_compiled_once_and_equal_keys_give_equal_episodes(played):
    play, record = played
    again = play(keys(3), 3, MIXES)
    jax.tree.map(np.testing.assert_array_equal, again, record)
    other = play(keys(5), 3, MIXES)
    assert not np.array_equal(other["state"].where[:, 0], record["state"].where[:, 0])
    assert play.traces == 1


def test_observations_and_goals_are_words_of_fixed_width(played):
    play, record = played
    env = play.env
    for name, width in (("first", env.observation_length), ("seen", env.observation_length), ("goal", env.goal_length)):
        assert record[name].shape[-1] == width and record[name].dtype == np.int32
        assert record[name].min() >= 0 and record[name].max() < len(env.words)
    assert (env.observation_length, env.goal_length, env.action_length) == (6, 4, 2)
    assert env.words[0] == "" and len(set(env.words)) == len(env.words)
    assert [env.word_id[w] for w in env.words] == list(range(len(env.words)))


def test_pays_once_and_ends(played):
    play, record = played
    count = lengths(record)
    live = np.arange(play.env.max_turns) < count[:, None]
    reward = record["reward"] * live
    assert set(np.unique(reward)) == {0.0, 10.0}
    assert set(np.unique(reward.sum(axis=1))) == {0.0, 10.0}
    assert record["done"][reward > 0].all()
    lost = reward.sum(axis=1) == 0
    assert lost.any() and (count[lost] == play.env.max_turns).all()


def test_invalid_actions_change_only_the_turn(played):
    play, record = played
    b, t = np.nonzero(record["invalid"][:, :-1])
    assert len(b) > 100
    for name, before in vars(record["state"]).items():
        after = getattr(record["state"], name)[b, t + 1]
        np.testing.assert_array_equal(after, before[b, t] + (name == "turn"), err_msg=name)
    assert {tuple(row) for row in record["seen"][b, t]} == {(play.env.word_id["nothing_happens"], 0, 0, 0, 0, 0)}


def test_encode_and_decode(played):
    play, record = played
    env = play.env
    for action in np.unique(record["rows"][record["legal"]], axis=0):
        np.testing.assert_array_equal(env.encode(env.decode(action)), action)
    assert env.decode(env.encode("go_to cabinet_1")) == "go_to cabinet_1"
    assert env.encode("go_to nowhere_at_all").tolist() == [env.word_id["go_to"], 0]
    assert env.encode("").tolist() == [0, 0] and env.encode("look").tolist() == [env.word_id["look"], 0]
    seen = record["seen"][0, 0]
    assert env.decode(seen).split() == [env.words[i] for i in seen if i]


def test_a_receptacle_takes_three_things():
    """A state that random play seldom meets: the fourth thing is refused, the third is not."""
    env, states = generated((6, 8), "train", 0)
    state = next(s for s in each(states) if env.rooms[s.room] == "bedroom" and not env._openable[s.room, 1])
    look = quick_jit(lambda state, action: (*env.admissible(state), *env.step(state, action)))
    for crowd in (2, 3):
        state.where = np.array([1] * crowd + [6] + [3] * (7 - crowd), np.int32)
        state.at = np.int32(1)
        plain = PlainHousehold.read(env, state)
        action = "put", plain.carried
        legal, rows, after, seen, *rest = look(State(**vars(state)), env.encode(" ".join(action)))
        assert {tuple(env.words[i] for i in row) for row in np.asarray(rows)[legal]} == plain.admissible()
        expected, *told = plain.step(*action)
        assert [env.words[i] for i in seen] == expected and [a.item() for a in rest] == told
        assert told[-1] == (crowd == 3) and PlainHousehold.read(env, after) == plain


def test_success_in_scattered_states():
    """States drawn at random, with the first two things near the goal: play seldom splits two between two cabinets."""
    env, states = generated((12, 2), "train", 0)
    numbers, B = np.random.default_rng(6), 4096
    goals = (env._place_kind[states.room] == states.goal_place[:, None]) + 0.02  # `look` has none
    where = np.argmax(goals[:, None] * numbers.random((B, 2, 12)), axis=-1)
    where[:, 0] = np.where(numbers.random(B) < 0.2, 12, where[:, 0])
    states = states.replace(
        where=where.astype(np.int32),
        condition=numbers.integers(0, 4, (B, 2)).astype(np.int32),
        lamp_on=numbers.random(B) < 0.7,
        at=np.where(numbers.random(B) < 0.7, 0, numbers.integers(0, 13, B)).astype(np.int32),  # lamps stand at 0
    )
    told = np.asarray(quick_jit(jax.vmap(env.won))(states))
    plain = [PlainHousehold.read(env, state) for state in each(states)]
    np.testing.assert_array_equal(told, [household.won() for household in plain])
    assert {(h.task, h.won()) for h in plain} == {(task, won) for task in world.TASKS for won in (True, False)}
    both = [
        h for h in plain if h.task == "two" and [p.rsplit("_", 1)[0] for p in h.lies.values()] == [h.goal_place] * 2
    ]
    assert sum(h.won() for h in both) > 50 and sum(not h.won() for h in both) > 50


def test_one_by_one_as_in_a_batch():
    """`vmap` changes nothing."""
    env, batch = generated((6, 4), "train", 0)
    reset = quick_jit(env.reset)
    for number, one in zip(range(3), each(batch), strict=False):
        state, _ = reset(task_keys("train", 0, jnp.array([number]))[0])
        for name, array in vars(one).items():
            np.testing.assert_array_equal(getattr(state, name), array)


def test_draws_tasks_evenly_and_rooms_evenly_within_a_task():
    env, state = generated((6, 4), "train", 2, 3 * 4096)
    for number, (task, rooms) in enumerate(world.TASKS.items()):
        of_task = np.asarray(state.task) == number
        assert abs(of_task.mean() - 1 / 6) < 0.02, task
        share = np.bincount(np.asarray(state.room)[of_task], minlength=4) / of_task.sum()
        expected = np.isin(env.rooms, rooms) / len(rooms)
        np.testing.assert_allclose(share, expected, atol=0.05)


def test_the_order_of_tasks_and_rooms_is_free():
    """Ids of rooms and words move with the order; what they mean does not."""
    rooms = ("bathroom", "bedroom", "kitchen")
    env = Household(("look", "clean"), rooms, things=3)
    start = quick_jit(jax.vmap(lambda key: (env.reset(key)[0], env.goal(env.reset(key)[0]))))
    states, goals = start(jax.random.split(jax.random.key(4), 64))
    goals = np.asarray(goals)
    for b, state in enumerate(each(states)):
        plain = PlainHousehold.read(env, state)
        assert plain.room in world.TASKS[plain.task]
        assert plain.task in ("look", "clean") and (plain.goal_place == "") == (plain.task == "look")
        said = [plain.room, world.TASK_WORDS[world.TASK_ID[plain.task]], plain.goal_thing, plain.goal_place]
        assert [env.words[i] for i in goals[b]] == said
