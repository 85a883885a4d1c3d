"""The admissible commands of a compiled game, in the order of the engine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.envs.alfworld import bits
from hgpo_jax.envs.alfworld.game_file import CAN
from hgpo_jax.envs.alfworld.phrases import VERBS
from hgpo_jax.envs.alfworld.tables import Games

_ALONE = ("go to", "slice", "take", "use")  # verbs whose commands do not share words of bits


class Layout:
    """All possible commands of a game as bits, sorted by their texts.

    Attributes:
      slots: i32[bits, 3], for each bit its verb and its arguments as positions in the list of names that `admissible` makes.
      words: the verbs that share each word of bits.
      by_name: the fields place_word, location i16[G, R] and thing_word i16[G, O] of `Games` sorted by name.
    """

    def __init__(self, games: Games):
        (_, R), (_, O), K = games.place_word.shape, games.thing_word.shape, games.here.shape[2]
        places, things = np.asarray(games.place_order), np.asarray(games.thing_order)
        sorted_by = {"place_word": places, "location": places, "thing_word": things}
        self.by_name = {field: np.take_along_axis(getattr(games, field), order, 1) for field, order in sorted_by.items()}
        here, held = 1 + len(VERBS) + np.arange(K), np.array([1 + len(VERBS) + K])
        place = held + 1 + np.arange(R)
        thing = place[-1] + 1 + np.arange(O)
        none = np.array([0])
        arguments = {
            "examine": (np.concatenate([here, held, here]), none),
            "go to": (place, none),
            **{verb: (here, none) for verb in ("close", "open")},
            **{verb: (held, here) for verb in ("clean", "cool", "heat", "move", "put")},
            **{verb: (none, none) for verb in ("help", "inventory", "look")},
            "slice": (thing, held),
            "take": (np.repeat(thing, K), np.tile(here, O)),
            "use": (thing, none),
        }
        slots: list[np.ndarray] = []
        self.words: list[list[str]] = []
        for number, verb in enumerate(VERBS, 1):
            rows = np.stack(np.broadcast_arrays(number, *arguments[verb]), 1)
            if verb == "take":  # a field of K bits for each thing
                spread = np.zeros(((bits.starts(O, K)[-1] // bits.BITS + 1) * bits.BITS, 3), np.int64)
                spread[(np.array(bits.starts(O, K))[:, None] + np.arange(K)).ravel()] = rows
                rows = spread
            if not self.words or verb in _ALONE or self.words[-1][0] in _ALONE or len(slots[-1]) + len(rows) > bits.BITS:
                slots.append(rows)
                self.words.append([verb])
            else:
                slots[-1] = np.concatenate([slots[-1], rows])
                self.words[-1].append(verb)
        slots = [np.pad(rows, ((0, -len(rows) % bits.BITS), (0, 0))) for rows in slots]
        self.slots = np.concatenate(slots).astype(np.int32)


def admissible(env, state) -> tuple[jax.Array, jax.Array]:
    """Implements `CompiledAlfworld.admissible`."""
    games, layout = env.games, env.layout
    game, at, held = state.game, state.at, state.held
    held_one = jnp.maximum(held, 0)
    here = games.here_by_name[game, at]
    there = here >= 0
    openable, cleans, heats, cools = games.place_can[game, :, here].T & there
    reach = there & env.open_here(state, here)
    opened = state.opened[here]
    holds = held >= 0
    can = dict(zip(CAN, games.can[game], strict=True))
    can_held = dict(zip(CAN, bits.tests(games.can[game], held_one) & holds, strict=True))
    puts = holds & reach & bits.tests(games.accepts[game, here], held_one)
    first = ~holds | (games.place_rank[game, here] <= games.thing_rank[game, held_one])  # in the order of names
    order = games.thing_order[game].astype(jnp.int32)
    contents = jnp.where(there[:, None], state.inside[here], jnp.uint32(0))
    takes = jnp.where(reach[:, None] & ~holds, contents & can["pickupable"], jnp.uint32(0))
    slices = jnp.where(can_held["knife"], state.lying[at] & can["sliceable"], jnp.uint32(0))
    location = env.by_name["location"][game]
    always = jnp.ones(1, bool)
    legal = {
        "clean": cleans & can_held["cleanable"],
        "close": openable & opened,
        "cool": cools & can_held["coolable"],
        "examine": jnp.concatenate([there & first, holds[None], there & ~first]),
        "go to": (location >= 0) & (location != at),
        "heat": heats & can_held["heatable"],
        "help": games.helps[game][None],
        "inventory": always,
        "look": always,
        "move": puts & games.moves[game],
        "open": openable & ~opened,
        "put": puts & ~games.moves[game],
        "slice": bits.test(slices, order),
        "use": bits.test(bits.union(contents) & can["toggleable"], order),
    }
    words = [
        bits.pack_fields(bits.columns(takes, order), env.nearby)
        if verbs == ["take"]
        else bits.pack(jnp.concatenate([legal[verb] for verb in verbs]))
        for verbs in layout.words
    ]
    slot, count = bits.select(jnp.concatenate(words), env.commands)
    names = jnp.concatenate(
        [
            jnp.arange(1 + len(VERBS), dtype=jnp.int16),
            games.place_word[game, here],
            games.thing_word[game, held_one][None],
            env.by_name["place_word"][game],
            env.by_name["thing_word"][game],
        ]
    )
    filled = jnp.arange(env.commands) < count
    rows = names[jnp.asarray(layout.slots)[slot]].astype(jnp.int32)
    return filled, jnp.where(filled[:, None], rows, 0)
