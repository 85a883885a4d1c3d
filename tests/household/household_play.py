"""Batches of recorded episodes of the JAX household, with players mixed at random. One compilation per household."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.envs.household import Household
from hgpo_jax.envs.household.expert import expert_action, random_action
from hgpo_jax.rollout.tasks import task_keys

K = 2  # actions that the expert remembers, as many as the default job's prompt holds
PLAYERS = ("expert", "admissible", "misplaced", "nonsense")
FULL, WIDE = (6, 8), (12, 2)  # (places, things)
BATCH = 1024  # of every play, so that a household compiles once for all of them

# Big programs that run for a second: without optimisation they compile four times as fast.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def six(places: int, things: int, max_turns: int = 30) -> Household:
    """All tasks in all rooms."""
    rooms = ("kitchen", "bathroom", "bedroom", "livingroom")
    return Household(("place", "two", "look", "clean", "heat", "cool"), rooms, places, things, max_turns)


@functools.cache
def player(size: tuple[int, int] | None) -> Play:
    """The play of one size, None for the default household; shared by all tests."""
    return Play(Household() if size is None else six(*size))


@functools.cache
def _reset(size: tuple[int, int] | None):
    return quick_jit(jax.vmap(player(size).env.reset))


@functools.cache
def generated(size: tuple[int, int] | None, stream: str, seed: int = 0):
    """(env, its initial states of the first 4096 tasks of a stream) as numpy."""
    states, _ = _reset(size)(task_keys(stream, seed, jnp.arange(4096)))
    return player(size).env, jax.tree.map(np.asarray, states)


def each(states):
    """The single states of a batch."""
    fields = {name: np.asarray(value) for name, value in vars(states).items()}
    for b in range(len(fields["turn"])):
        yield SimpleNamespace(**{name: array[b] for name, array in fields.items()})


class Play:
    """`Play(env)(task_keys, seed, mix)` plays one episode per key for all `max_turns`, past its end if it ends early.

    `mix` f32[B, 4] are the chances of PLAYERS: the local expert; random admissible play; an action of the household's
    table whether it fits here and now or not; any two words, ids outside the vocabulary included. Returns numpy arrays
    [B, T, ...]: the state and observation before each action, what was admissible then, the action, what `step` gave,
    the expert's label and its label for a state whose hidden facts were shuffled; and `final`, the last state.
    """

    def __init__(self, env: Household):
        self.env = env
        self._batch = quick_jit(jax.vmap(self._episode))

    def __call__(self, task_keys, seed: int, mix) -> dict:
        """Draws what the players do with numpy, which keeps random number generators out of the compiled program."""
        env, B, T, numbers = self.env, len(task_keys), self.env.max_turns, np.random.default_rng(seed)
        rows = 3 * env.places + 5 * env.things + 3
        any_words = numbers.integers(-2, len(env.words) + 5, (B, T, 2))
        verbs = numbers.choice(env._verb_word, (B, T))
        any_words[..., 0] = np.where(numbers.random((B, T)) < 0.5, verbs, any_words[..., 0])
        chances = np.cumsum(np.asarray(mix, float), axis=1)[:, None] / np.sum(mix, axis=1)[:, None, None]
        draws = {
            "who": (numbers.random((B, T, 1)) >= chances[..., :-1]).sum(-1),
            "row": numbers.integers(0, rows, (B, T)),
            "words": any_words,
            "where": numbers.integers(0, env.places, (B, T, env.things)),
            "condition": numbers.integers(0, 4, (B, T, env.things)),
            "opened": numbers.random((B, T, env.places)) < 0.5,
        }
        draws = {name: a if a.dtype == bool else a.astype(np.int32) for name, a in draws.items()}
        keys = jax.random.split(jax.random.key(seed), (B, T, 2))
        return jax.tree.map(np.asarray, self._batch(task_keys, keys, draws))

    def _episode(self, task_key, keys, draws):
        env = self.env
        start, first = env.reset(task_key)

        def turn(carry, given):
            (state, observation, recent), (keys, draw) = carry, given
            legal, rows = env.admissible(state)
            label = expert_action(env, state, recent, keys[0])
            actions = [label, random_action(env, state, keys[1]), rows[draw["row"]], draw["words"]]
            action = jnp.stack(actions)[draw["who"]]
            after, seen, reward, done, invalid = env.step(state, action)
            shuffled = expert_action(env, shuffle_hidden(env, state, draw), recent, keys[0])
            record = {
                "state": state, "legal": legal, "rows": rows, "label": label, "shuffled_label": shuffled,
                "action": action, "before": observation, "seen": seen,
                "reward": reward, "done": done, "invalid": invalid,
            }  # fmt: skip
            return (after, seen, jnp.concatenate([recent[1:], action[None]])), record

        carry = start, first, jnp.zeros((K, 2), jnp.int32)
        (final, _, _), record = jax.lax.scan(turn, carry, (keys, draws))
        return {**record, "first": first, "goal": env.goal(start), "final": final}


def shuffle_hidden(env: Household, state, draw: dict):
    """The same view of a different household: all that cannot be seen from where the agent stands is drawn again.

    Hidden are the things in other receptacles and in a closed one here, their condition, and which other receptacles
    are open. Hidden things stay hidden, so they never move to an open receptacle where the agent stands.
    """
    here = jnp.arange(env.places) == state.at
    open_here = jnp.append(env.accessible(state), False)[state.at]
    visible = (state.where == env.places) | ((state.where == state.at) & open_here)
    elsewhere = jnp.where((draw["where"] == state.at) & open_here, (draw["where"] + 1) % env.places, draw["where"])
    return state.replace(
        where=jnp.where(visible, state.where, elsewhere),
        condition=jnp.where(visible, state.condition, draw["condition"]),
        opened=jnp.where(here, state.opened, draw["opened"]),
    )


def state_at(record: dict, b: int, t: int):
    """One state out of a record; `t` may be the number of turns, for the last."""
    if t == record["done"].shape[1]:
        return SimpleNamespace(**{name: array[b] for name, array in vars(record["final"]).items()})
    return SimpleNamespace(**{name: array[b, t] for name, array in vars(record["state"]).items()})


def lengths(record: dict) -> np.ndarray:
    """i[B]: actions up to and with the one that ended the episode."""
    assert record["done"][:, -1].all()
    return record["done"].argmax(axis=1) + 1
