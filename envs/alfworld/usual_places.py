"""Usual places of things by kind, counted over the starts of compiled games."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hgpo_jax.envs.alfworld.game_file import PLACE_CAN
from hgpo_jax.envs.alfworld.tables import Games


def kinds_of(words: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Returns (the kinds in the words' names, sorted; for each word the index of its name's kind, i32[V], else -1)."""
    kinds = [word.split()[0] if word.startswith(" ") and word[-1].isdigit() else "" for word in words]
    names = sorted(set(kinds) - {""})
    number = {kind: n for n, kind in enumerate(names)}
    return names, np.array([number.get(kind, -1) for kind in kinds], np.int32)


def chances(words: Sequence[str], games: Games) -> np.ndarray:
    """Returns the average number of things of a kind in one place of a kind at the start, f64[kinds, kinds], by kinds of things
    and of places. It is counted over the games that have such a thing, plus half a thing and one place (Jeffreys) if the rules
    allow it in such places; 0 if they do not and none was there.
    """
    names, kind = kinds_of(words)
    size = (len(names),) * 2
    thing_kind, place_kind = kind[games.thing_word], kind[games.place_word]  # -1 where a game has fewer

    def pairs(sets):
        game, place, thing = np.nonzero(np.unpackbits(sets.view(np.uint8), axis=-1, bitorder="little"))
        return thing_kind[game, thing], place_kind[game, place]

    frequency, allowed = np.zeros(size), np.zeros(size)
    np.add.at(frequency, pairs(games.inside), 1)
    allowed[pairs(games.accepts)] = 1
    has, places = np.zeros((len(games.task), len(names))), np.zeros((len(games.task), len(names)))
    for counts, those in ((has, thing_kind), (places, place_kind)):
        game, number = np.nonzero(those >= 0)
        np.add.at(counts, (game, those[game, number]), 1)
    return (frequency + 0.5 * allowed) / ((has > 0).T @ places + 1)


def search_order(words: Sequence[str], games: Games) -> np.ndarray:
    """Returns, for things of each kind, the turns in which to look in places of these names, all different, i32[kinds, V].

    Likely kinds of places come first, a place that must be opened counting half because it takes two actions; places of a
    kind go by number.
    """
    names, kind = kinds_of(words)
    openable = np.zeros(len(names), bool)
    openable[kind[games.place_word[games.place_can[:, PLACE_CAN.index("openable")]]]] = True
    worth = chances(words, games) / (1 + openable)
    order = np.empty((len(names), len(words)), np.int32)
    for row, by_kind in zip(order, worth, strict=True):
        row[np.lexsort((np.arange(len(words)), kind, -np.where(kind < 0, -1.0, by_kind[kind])))] = np.arange(len(words))
    return order
