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

SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in ((6, 1, "success", 200), (7, 3, "gym", 40))]
CASES = pytest.mark.parametrize("case", [(6, 2, "gym", 32), *SLOW], ids=str)  # size, boxes, reward, rooms
# Compiling is most of these tests' time, and without optimisation takes a quarter of it.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def at(states, index):
    """One of a batch's states."""
    return SimpleNamespace(**{name: value[index] for name, value in vars(states).items()})


@functools.cache
def program(size, boxes, reward, batch):
    """(environment, first states, their observations, records of 25 turns) of a batch: a mix of random words, admissible
    moves and the solver's, also past the end; the even ones by the solver alone."""
    env = Sokoban(size, boxes, reward, max_turns=25)

    @quick_jit
    @jax.vmap
    def play(key, alone):
        def turn(state, key):
            keys = jax.random.split(key, 3)
            noise = jax.random.randint(keys[0], (1,), 0, len(MOVES) + 2)
            players = [noise, random_action(env, state, keys[1]), expert_action(env, state, noise, keys[1])]
            player = jax.random.choice(keys[2], 3, p=jnp.array([0.2, 0.2, 0.6]))
            action = jnp.stack(players)[jnp.where(alone, 2, player)]
            after, observation, *outcome = env.step(state, action)
            return after, (after, action, observation, outcome)

        first, observation = env.reset(key)
        return first, observation, jax.lax.scan(turn, first, jax.random.split(key, 25))[1]

    return env, *jax.device_get(play(task_keys("train", 1, jnp.arange(batch)), jnp.arange(batch) % 2 == 0))


def told(env, observation) -> str:
    return SokobanText(env)._tell(observation).replace(" ", "")


@CASES
def test_every_step_is_what_the_plain_rules_say(case):
    size, boxes, reward, batch = case
    env, first, observation, (states, actions, seen, (rewards, done, invalid)) = program(*case)
    wins, gains = 0, set()
    for b in range(1, batch, 2):
        plain = PlainSokoban.read(size, at(first, b))
        assert told(env, observation[b]) == plain.draw_all(size)
        for t in range(25):
            plain, reward_, done_, invalid_ = plain.step(env.decode(actions[b, t]), reward == "gym", 25)
            assert plain == PlainSokoban.read(size, at(states, (b, t)))
            assert told(env, seen[b, t]) == plain.draw_all(size)
            assert float(rewards[b, t]) == pytest.approx(reward_, abs=1e-5)
            assert (bool(done[b, t]), bool(invalid[b, t])) == (done_, invalid_)
            wins += plain.won
            gains.add(round(reward_, 1))
    assert wins > 10 and invalid[1::2].mean() > 0.05
    one_of_several = {0.9} if boxes > 1 else set()
    assert gains >= ({-0.1, -1.1, 10.9} | one_of_several if reward == "gym" else {0.0, 10.0})


@CASES
def test_every_generated_room_is_solved_and_takes_some_moves(case):
    """With one box the expert needs the fewest moves."""
    size, boxes, _, batch = case
    _, first, observation, (states, *_) = program(*case)
    lengths, rooms = [], [PlainSokoban.read(size, at(first, b)) for b in range(batch)]
    won = ~(states.boxes & ~states.targets).any(-1)
    for b, room in enumerate(rooms):
        assert len(room.boxes) == len(room.targets) == boxes
        assert not room.boxes & room.targets and room.agent in room.floor - room.boxes
        assert all(0 < c < size - 1 for cell in room.floor for c in cell)
        moves = solve(room, 1 if boxes < 3 else 3)
        assert moves is not None, room.draw_all(size)
        if boxes == 1 and b % 2 == 0:
            assert won[b, len(moves) - 1] and not won[b, : len(moves) - 1].any()
        for move in moves:
            room = room.move(move)
        assert room.won
        lengths.append(len(moves))
    assert min(lengths) >= 3 * boxes and np.median(lengths) >= 6 * boxes
    drawn = [room.draw_all(size) for room in rooms]  # small rooms repeat now and then
    assert len(set(drawn)) == len(set(map(bytes, observation))) > 0.95 * batch


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
