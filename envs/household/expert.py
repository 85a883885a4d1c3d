"""Two scripted players: a local expert that can be imitated, and random admissible play.

The expert uses only information of an agent with a short memory: the task, its view from where it stands, the things that it
carries and the results of its last few actions. It does not know where things are, so it searches, avoiding the receptacles
of its recent `go_to`s. A player that knows the whole state solves more tasks but cannot be imitated from observations.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from hgpo_jax.envs.household import world
from hgpo_jax.envs.household.env import CAPACITY, CLEAN, COLD, HOT, Household, State


def random_action(env: Household, state: State, key: jax.Array) -> jax.Array:
    """Returns one of the admissible actions, all equally likely, i32[2]."""
    legal, words = env.admissible(state)
    return words[jax.random.categorical(key, jnp.where(legal, 0.0, -jnp.inf))]


def expert_action(env: Household, state: State, recent: jax.Array, key: jax.Array, hint: jax.Array | int = 0) -> jax.Array:
    """Returns the local expert's action.

    Args:
      env, state: the household.
      recent: i32[K, 2], the last K actions, oldest first, 0 where there was none.
      key: breaks ties between places to search.
      hint: i32[], word of a place to search first, 0 for none.

    Returns: i32[2], verb and argument.
    """
    places = env.places
    word = env.word_id
    place_words, thing_words = env.place_words(state), env.thing_words(state)
    at, here = state.at, jnp.arange(places) == state.at
    open_here = jnp.append(env.accessible(state), False)[at]
    closed_here = (at < places) & ~open_here
    is_goal = jnp.asarray(env._place_kind)[state.room] == state.goal_place
    at_goal = (here & is_goal).any()
    places_it = state.task != world.TASK_ID["look"]
    goal_things, ready = state.kind == state.goal_kind, _ready(state)
    carried = state.where == places
    holds_wanted, holds_other = (carried & goal_things).any(), (carried & ~goal_things).any()
    holds_ready = (carried & goal_things & ready).any()
    carried_word = (thing_words * carried).sum()

    # Take a wanted thing within reach, unless it already lies in the right place.
    settled = at_goal & ready & places_it
    takeable = goal_things & (state.where == at) & open_here & ~settled
    take = thing_words[jnp.argmax(takeable)]

    act = functools.partial(_act, word)
    go = lambda target: act("go_to", place_words[target])  # noqa: E731

    # Search somewhere else: not here, and not where the last few go_to actions led.
    went = ((recent[:, :1] == word["go_to"]) & (recent[:, 1:] == place_words)).any(0)
    noise = jax.random.uniform(key, (places,))
    search = go(jnp.argmax(noise - 2.0 * went - 4.0 * here + (place_words == hint)))

    verb, at_tool = _treatment(env, state)
    treat = jnp.where(at == at_tool, jnp.stack([verb, carried_word]), go(at_tool))
    lamp = jnp.asarray(env._lamp_at)[state.room]
    examine = jnp.where(at == lamp, act("use", word[world.LAMP]), go(lamp))
    # The first receptacle of the goal's kind, so that two things meet; the next one if that was just found full.
    goal_place = jnp.argmax(is_goal * (4.0 - went - 2.0 * here))
    here_word = jnp.append(place_words, 0)[at]
    open_it = act("open", here_word)
    full_here = open_here & ((state.where == at).sum() >= CAPACITY)
    put_it = act("put", carried_word)
    next_goal = jnp.where(goal_place == at, search, go(goal_place))
    deliver = jnp.where(at_goal & ~full_here, jnp.where(closed_here, open_it, put_it), next_goal)
    get_rid = jnp.where((at == places) | full_here, search, jnp.where(closed_here, open_it, put_it))

    conditions = [holds_wanted & ~places_it, holds_ready, holds_wanted, holds_other, closed_here, takeable.any()]
    return jnp.select(conditions, [examine, deliver, treat, get_rid, open_it, act("take", take)], search)


def _act(word: dict[str, int], verb: str, argument: jax.Array | int = 0) -> jax.Array:
    return jnp.stack([jnp.int32(word[verb]), jnp.int32(argument)])


def _ready(state: State) -> jax.Array:
    """Marks the things in the condition that the task asks for, bool[things]."""
    needed = jnp.array([-1, -1, -1, CLEAN, HOT, COLD])[state.task]
    return (needed < 0) | (state.condition == needed)


def _treatment(env: Household, state: State) -> tuple[jax.Array, jax.Array]:
    """Returns the word of the verb that the task asks for, and the number of the place where it is possible; i32[] both."""
    word, tool = env.word_id, jnp.asarray(env._tool_at)[state.room]  # heat, cool, clean
    verbs = jnp.array([0, 0, 0, word["clean"], word["heat"], word["cool"]])
    return verbs[state.task], tool[jnp.array([0, 0, 0, 2, 0, 1])[state.task]]
