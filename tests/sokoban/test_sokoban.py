"""Sokoban against its rules in plain Python, and that every generated room can be solved and takes some moves."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_sokoban import PlainSokoban, solve

from hgpo_jax.envs.sokoban import Sokoban
from hgpo_jax.envs.sokoban.env import MOVES
from hgpo_jax.envs.sokoban.expert import expert_action, random_action
from hgpo_jax.envs.sokoban.text import SokobanText
from hgpo_jax.rollout.tasks import task_keys

# Compiling is most of these tests' time, and without optimisation takes a quarter of it.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def each(states, count):
    """The single states of a batch."""
    states = jax.device_get(states)
    for b in range(count):
        yield SimpleNamespace(**{name: value[b] for name, value in vars(states).items()})


def rooms(size, boxes, count, seed=0):
    env = Sokoban(size, boxes)
    states, _ = quick_jit(jax.vmap(env.reset))(task_keys("train", seed, jnp.arange(count)))
    return [PlainSokoban.read(size, state) for state in each(states, count)]


SLOW_CASES = [pytest.param(*case, marks=pytest.mark.slow) for case in ((6, 1, "success"), (7, 2, "success"), (7, 2, "gym"))]


@pytest.mark.parametrize(("size", "boxes", "reward"), [(6, 1, "gym"), *SLOW_CASES])
def test_every_step_is_what_the_plain_rules_say(size, boxes, reward):
    """A mix of random words, admissible moves and the solver's, also past the end."""
    env, B = Sokoban(size, boxes, reward, max_turns=25), 96

    @quick_jit
    @jax.vmap
    def play(key):
        def turn(state, key):
            keys = jax.random.split(key, 3)
            noise = jax.random.randint(keys[0], (1,), 0, len(MOVES) + 2)
            players = [noise, random_action(env, state, keys[1]), expert_action(env, state, noise, keys[1])]
            action = jnp.stack(players)[jax.random.choice(keys[2], 3, p=jnp.array([0.2, 0.2, 0.6]))]
            after, observation, *outcome = env.step(state, action)
            return after, (after, action, observation, outcome)

        first, observation = env.reset(key)
        return first, observation, jax.lax.scan(turn, first, jax.random.split(key, 25))[1]

    first, observation, (states, actions, seen, (rewards, done, invalid)) = play(task_keys("train", 1, jnp.arange(B)))
    wins, gains = 0, set()
    for b, state in enumerate(each(first, B)):
        plain = PlainSokoban.read(size, state)
        assert told(env, observation[b]) == plain.draw_all(size)
        for t in range(25):
            plain, reward_, done_, invalid_ = plain.step(env.decode(actions[b, t]), reward == "gym", 25)
            assert plain == PlainSokoban.read(size, jax.tree.map(lambda a, b=b, t=t: a[b, t], states))
            assert told(env, seen[b, t]) == plain.draw_all(size)
            assert float(rewards[b, t]) == pytest.approx(reward_, abs=1e-5)
            assert (bool(done[b, t]), bool(invalid[b, t])) == (done_, invalid_)
            wins += plain.won
            gains.add(round(reward_, 1))
    assert wins > 10 and np.asarray(invalid).mean() > 0.05
    one_of_several = {0.9} if boxes > 1 else set()
    assert gains >= ({-0.1, -1.1, 10.9} | one_of_several if reward == "gym" else {0.0, 10.0})


def told(env, observation) -> str:
    return SokobanText(env)._tell(np.asarray(observation)).replace(" ", "")


@pytest.mark.slow
def test_observations_are_equal_just_where_rooms_are():
    env = Sokoban()
    states, seen = jax.device_get(quick_jit(jax.vmap(env.reset))(task_keys("train", 2, jnp.arange(512))))
    facts = [(*map(tuple, (s.walls, s.targets, s.boxes)), int(s.agent)) for s in each(states, 512)]
    ids = [tuple(row.tolist()) for row in seen]
    assert len(set(ids)) == len(set(facts)) == len(set(zip(ids, facts, strict=True))) > 450
    assert seen.min() > 0 and seen.max() < len(env.words)


# The last two numbers: seed of the sample, and the solver's weight, which finds longer solutions sooner.
SLOW_SAMPLES = [(7, 2, 25, 0, 1), (6, 1, 2000, 7, 1), (8, 2, 40, 7, 1), (8, 3, 30, 7, 3), (10, 4, 30, 7, 5)]


@pytest.mark.parametrize(
    ("size", "boxes", "count", "seed", "weight"),
    [(6, 1, 300, 0, 1), *(pytest.param(*sample, marks=pytest.mark.slow) for sample in SLOW_SAMPLES)],
)
def test_every_generated_room_is_solved_and_takes_some_moves(size, boxes, count, seed, weight):
    lengths, generated = [], rooms(size, boxes, count, seed)
    for room in generated:
        assert len(room.boxes) == len(room.targets) == boxes
        assert not room.boxes & room.targets and room.agent in room.floor - room.boxes
        assert all(0 < c < size - 1 for cell in room.floor for c in cell)
        moves = solve(room, weight)
        assert moves is not None, room.draw_all(size)
        for move in moves:
            room = room.move(move)
        assert room.won
        lengths.append(len(moves))
    assert min(lengths) >= 3 * boxes and np.median(lengths) >= 6 * boxes
    first = generated[:300]  # small rooms repeat now and then
    assert len({room.draw_all(size) for room in first}) > 0.95 * len(first)


@pytest.mark.slow
def test_the_expert_needs_the_fewest_moves_with_one_box():
    env = Sokoban(max_turns=40)
    B = 128

    @quick_jit
    @jax.vmap
    def play(key):
        def turn(state, _):
            action = expert_action(env, state, jnp.zeros((1, 1), jnp.int32), key)
            after, _, reward, _, _ = env.step(state, action)
            return after, reward

        first, _ = env.reset(key)
        return first, jax.lax.scan(turn, first, None, length=40)[1]

    first, rewards = play(task_keys("warm_start", 0, jnp.arange(B)))
    taken = np.argmax(np.asarray(rewards) > 0, axis=1) + 1
    assert taken.tolist() == [len(solve(PlainSokoban.read(6, state))) for state in each(first, B)]


@pytest.mark.parametrize(
    ("fields", "part"),
    [({"size": 5}, "size=5"), ({"boxes": 0}, "boxes=0"), ({"boxes": True}, "boxes=True"), ({"reward": "all"}, "reward='all'"),
     ({"max_turns": 0}, "max_turns=0"), ({"size": 11}, "between 6 and 10")],
)  # fmt: skip
def test_mistakes_are_refused(fields, part):
    with pytest.raises(ValueError, match=part):
        Sokoban(**fields)


def test_words_in_and_out():
    env = Sokoban()
    assert env.encode(" left ").tolist() == [MOVES.index("left") + 1] and env.encode("jump").tolist() == [0]
    assert env.decode([1, 0, 4]) == "up right"
    assert len(set(env.words)) == len(env.words)
