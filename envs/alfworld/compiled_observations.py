"""Observations of a compiled game after an action, as words of `phrases.py`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from hgpo_jax.envs.alfworld import bits
from hgpo_jax.envs.alfworld import phrases as p
from hgpo_jax.envs.alfworld.game_file import CAN, PLACE_CAN
from hgpo_jax.envs.alfworld.phrases import ID, VERBS


class Deed(struct.PyTreeNode):
    """An action and its result.

    Its thing and place have a meaning only for verbs that have them.
    """

    does: dict[str, jax.Array]  # verb -> bool[], at most one is set
    invalid: jax.Array  # bool[], no verb is set
    thing: jax.Array  # i32[]
    place: jax.Array  # i32[]
    first: jax.Array  # i32[], word of the first argument
    second: jax.Array  # i32[], word of the second argument
    container: jax.Array  # bool[], whether things can lie in the thing


# By verb: the text before its first argument, before its second, and at the end; "" if that depends on more.
_CONFIRM = {
    "clean": ("You clean the", " using the", p.STOP),
    "close": ("You close the", p.STOP, ""),
    "cool": ("You cool the", " using the", p.STOP),
    "heat": ("You heat the", " using the", p.STOP),
    "help": (p.HELP, "", ""),
    "move": ("You move the", " to the", p.STOP),
    "put": ("You put the", " in/on the", p.STOP),
    "slice": ("You sliced the", " with the", p.STOP),
    "take": ("You pick up the", " from the", p.STOP),
    "use": ("You turn on the", p.STOP, ""),
}
_CONFIRM_WORDS = np.array([[ID[word] for word in _CONFIRM.get(verb, ("", "", ""))] for verb in VERBS], np.int32)


def tell(env, state, deed: Deed) -> jax.Array:
    """Returns the observation, i32[observation_length], after `deed` has led to `state`."""
    games, game, does, first = env.games, state.game, deed.does, deed.first
    here = games.here[game, state.at]
    there = here >= 0
    around = does["look"] & there.any()
    openable = games.place_can[game, PLACE_CAN.index("openable"), deed.place]
    visible = ~openable | state.opened[deed.place]
    examines_place = does["examine"] & (env.games.place_word[game, deed.place] == first)
    examines_thing = does["examine"] & ~examines_place
    sees = does["go to"] | does["open"] | examines_place

    # The list: pairs of a thing and a place beside which it lies, or else the contents of one place or thing.
    beside = state.lying[state.at] & jnp.where(there[:, None], state.removals[here], jnp.uint32(0))
    contents = jnp.where(sees & visible, state.inside[deed.place], jnp.uint32(0))
    contents = jnp.where(examines_thing, games.within[game, deed.thing], contents)
    rows = jnp.where(around, beside, jnp.zeros_like(beside).at[0].set(contents))
    pairs = bits.pack_fields(bits.columns(rows, jnp.arange(env.things)), env.nearby)
    slot, count = bits.select(pairs, env.listed)
    thing = slot // bits.BITS * (bits.BITS // env.nearby) + slot % bits.BITS // env.nearby
    empty = (count == 0).astype(jnp.int32)

    # The sentence before the list: a phrase, a name, a phrase, a name, a phrase.
    verb = sum(number * does[name] for number, name in enumerate(VERBS))
    phrase = jnp.where(deed.invalid, _words(p.NOTHING_HAPPENS, "", ""), jnp.asarray(_CONFIRM_WORDS)[verb])
    named = jnp.where(deed.invalid, 0, jnp.stack([first, deed.second]))
    view = jnp.where(openable, jnp.where(visible, _word(p.IN, empty), ID[" is closed."]), _word(p.ON, empty))
    moved = jnp.where(does["go to"], ID["You arrive at"], ID["You open the"])
    phrase = jnp.where(sees, jnp.stack([moved, jnp.where(openable, ID[". The"], ID[". On the"]), view]), phrase)
    phrase = jnp.where(examines_place, jnp.stack([jnp.where(openable, ID["The"], ID["On the"]), view, 0]), phrase)
    arrived = jnp.where(does["go to"] & ~games.moves[game], games.location_word[game, state.at], first)
    named = jnp.where(sees, jnp.stack([arrived, jnp.where(examines_place, 0, first)]), named)
    phrase = jnp.where(examines_thing, _examined(env, state, deed, empty), phrase)
    none = state.held < 0
    carrying = jnp.where(none, _words(p.NOT_CARRYING, "", ""), _words("You are carrying: a", p.STOP, ""))
    phrase = jnp.where(does["inventory"], carrying, phrase)
    held = jnp.where(none, 0, games.thing_word[game, state.held])
    named = jnp.where(does["inventory"], jnp.stack([held, 0]), named)
    phrase = jnp.where(does["look"], _words(p.MIDDLE, "", ""), phrase)
    sentence = jnp.stack([phrase[0], named[0], phrase[1], named[1], phrase[2]])
    sentence = jnp.pad(sentence, (0, env.sentence - 5))
    sentence = jnp.where(around, _facing(env, game, here, empty), sentence)
    listing = jnp.where(jnp.arange(env.listed) < count, games.thing_word[game, thing], 0)
    return _join(env, sentence, _list(listing, count))


def _words(*words: str) -> jax.Array:
    return jnp.array([ID[word] for word in words])


def _word(choice: tuple[str, str], empty):
    """Returns the word before a list, or the word for an empty one."""
    return jnp.where(empty, ID[choice[1]], ID[choice[0]])


def _examined(env, state, deed: Deed, empty):
    """Describes the held thing, i32[3]."""
    clean, hot, cool, sliced, toggled = bits.tests(state.marks, deed.thing)
    can_slice, can_toggle = (
        bits.test(env.games.can[state.game, CAN.index(what)], deed.thing) for what in ("sliceable", "toggleable")
    )
    cases = [  # the first case that fits wins, as in the grammar
        (deed.container, "This is a normal"),
        (clean & hot & sliced, "This is a hot and clean sliced"),
        (clean & cool & sliced, "This is a cool and clean sliced"),
        (clean & sliced, "This is a clean sliced"),
        (hot & sliced, "This is a hot sliced"),
        (cool & sliced, "This is a cool sliced"),
        (clean & hot, "This is a hot and clean"),
        (clean & cool, "This is a cool and clean"),
        (hot, "This is a hot"),
        (clean, "This is a clean"),
        (cool, "This is a cold"),
        (can_toggle & toggled, "This"),
        (can_slice & sliced, "This is a sliced"),
    ]
    look = jnp.select([case for case, _ in cases], [ID[word] for _, word in cases], ID["There's nothing special about"])
    end = jnp.where(look == ID["This"], ID[" is on."], ID[p.STOP])
    return jnp.stack([look, jnp.where(deed.container, _word(p.INSIDE, empty), end), 0])


def _facing(env, game, here, empty):
    """Lists the places at the agent's location, i32[sentence]."""
    K, count = env.nearby, (here >= 0).sum()
    k = jnp.arange(K)
    after = jnp.where(k == count - 2, ID[p.AND], ID[p.COMMA])
    after = jnp.where(k == count - 1, _word(p.BESIDE, empty), after)
    words = jnp.stack([env.games.place_word[game, here].astype(jnp.int32), after], 1)
    words = jnp.where((k < count)[:, None], words, 0).ravel()
    words = jnp.concatenate([jnp.array([ID["You are facing the"]]), words])
    return jnp.pad(words, (0, env.sentence - words.shape[0]))


def _list(names, count):
    """Lists names, i32[3 * listed]: "a pen 2, and a cd 1." after its first article."""
    k = jnp.arange(names.shape[0])
    link = jnp.where(k == count - 2, ID[p.AND], ID[p.COMMA])
    link = jnp.where(k == count - 1, ID[p.STOP], link)
    link = jnp.where(k < count, link, 0)
    article = jnp.where(k < count - 1, ID[p.ITEM], 0)
    return jnp.stack([names, link, article], 1).ravel()


def _join(env, sentence, listing):
    """Joins a sentence of any length and the list after it, without a gap, i32[observation_length]."""
    at = jnp.arange(env.observation_length)
    length = (sentence != 0).sum()
    words = jnp.concatenate([sentence, listing, jnp.zeros(1, jnp.int32)])
    words, length = jax.lax.optimization_barrier((words, length))
    behind = jnp.minimum(at - length + sentence.shape[0], words.shape[0] - 1)
    return words[jnp.where(at < length, at, behind)]
