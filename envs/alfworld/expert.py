"""Two scripted players: a local expert that can be imitated, and random admissible play.

The expert uses only what the agent can read: the task, the admissible commands, the held thing and its treatment, and its last
actions. It does not know where things are, so it searches place after place. The order depends only on the kind of the
wanted thing and the names of the places (`CompiledAlfworld.search_order`). The place where it last went, or that it last
opened, shows its progress; the current observation or its last few actions name that place. If none of them does, it goes on
after the first in order of the places where it stands. When its needs change, after it took or put something, it starts over.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax.envs.alfworld import bits
from hgpo_jax.envs.alfworld.compiled import CompiledAlfworld, State
from hgpo_jax.envs.alfworld.game_file import MARKS, PLACE_CAN

TREATMENTS = {"isclean": "clean", "ishot": "heat", "iscool": "cool"}  # each is both a verb and an ability of a place


def random_action(env: CompiledAlfworld, state: State, key: jax.Array) -> jax.Array:
    """Returns one of the admissible commands, all equally likely, i32[3]."""
    filled, commands = env.admissible(state)
    return commands[jax.random.randint(key, (), 0, filled.sum())]


def expert_action(env: CompiledAlfworld, state: State, recent: jax.Array, key: jax.Array | None) -> jax.Array:
    """Returns the local expert's command, always an admissible one.

    Args:
      env, state: the game.
      recent: i32[K, 3], the last K actions, oldest first, 0 where there was none.
      key: unused; the expert is deterministic.

    Returns: i32[3].
    """
    games, game, held = env.games, state.game, state.held
    goal_things, mark, lamps, target = games.wanted[game], games.mark[game], games.lamp[game], games.target[game]
    filled, commands = env.admissible(state)
    is_verb = {
        verb: filled & (commands[:, 0] == env.word_id[verb])
        for verb in ("go to", "open", "take", "put", "move", "use", *TREATMENTS.values())
    }
    named = games.entity[game, commands[:, 1:]].astype(jnp.int32)  # things, followed by places
    thing = jnp.clip(named[:, 0], 0, env.things - 1)
    place = jnp.clip(named.max(1) - env.things, 0, env.places - 1)
    goes, puts = is_verb["go to"], is_verb["put"] | is_verb["move"]

    looks, two = (lamps != 0).any(), games.count[game] > 1
    holds = (held >= 0) & bits.test(goal_things, held)
    ready = (mark < 0) | bits.test(state.marks[mark], held)
    treatment = jnp.clip(mark, 0, len(TREATMENTS) - 1)
    treats = jnp.stack([is_verb[TREATMENTS[mark]] for mark in MARKS[: len(TREATMENTS)]])[treatment]
    tools = games.place_can[game, PLACE_CAN.index("clean") :][treatment]
    # Two things have to meet, so the expert always uses the first of the target places.
    first = jnp.argmin(jnp.where(target, games.place_word[game], len(env.words)))
    goal = jnp.arange(env.places) == first
    # Nothing has to be looked for here: no other place holds a finished thing, or the game would be won.
    settled = jnp.where(two, goal, target & (mark < 0))

    a_thing, a_lamp = bits.select(goal_things, 1)[0][0], bits.select(lamps, 1)[0][0]  # only the kind matters
    sought = jnp.where(held < 0, a_thing, jnp.where(holds & looks, a_lamp, held))
    rank = env.search_order[env.kind_of_word[games.thing_word[game, sought]], games.place_word[game]]
    ahead = ((rank - _searched(env, state, recent, rank)) % len(env.words))[place]

    rules = [  # the first one that fits some command wins
        (holds & looks, is_verb["use"] & bits.test(lamps, thing)),
        (holds & looks, goes),
        (holds & ~ready, treats),
        (holds & ~ready, goes & tools[place]),
        (holds & ready, puts & goal[place]),
        (holds & ready, is_verb["open"] & goal[place]),
        (holds & ready, goes & goal[place]),
        (held >= 0, puts),
        (held < 0, is_verb["take"] & bits.test(goal_things, thing) & ~settled[place]),
        (held < 0, (goes | is_verb["open"]) & ~settled[place]),
        (held >= 0, goes | is_verb["open"]),
        (True, filled),
    ]
    fitting = jnp.stack([commands & condition for condition, commands in rules])
    fitting = fitting[jnp.argmax(fitting.any(1))]
    return commands[jnp.argmin(jnp.where(fitting, ahead, len(env.words)))]


def _searched(env: CompiledAlfworld, state: State, recent, rank):
    """Returns the place up to which the search has come, as its rank, i32[]; 0 at the beginning."""
    games, game = env.games, state.game
    here = games.location[game] == state.at
    done = jnp.where(here.any(), jnp.where(here, rank, len(env.words)).min(), 0)
    for verb, argument, _ in recent:
        there = here & (games.place_word[game] == argument)
        goes = (verb == env.word_id["go to"]) | (verb == env.word_id["open"])
        done = jnp.where(goes & there.any(), jnp.where(there, rank, 0).sum(), done)
        handles = jnp.stack([verb == env.word_id[name] for name in ("take", "put", "move")]).any()
        done = jnp.where(handles, 0, done)
    return done
