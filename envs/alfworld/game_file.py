"""One game file as numbers, names and texts, which `tables.py` converts to arrays: `sheet(path, logic)`.

The arrays implement one set of rules, that of the official releases; a file with other rules is rejected.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hgpo_jax.envs.alfworld import bits
from hgpo_jax.envs.alfworld.dataset import type_in
from hgpo_jax.envs.alfworld.game import Game, load_game
from hgpo_jax.envs.alfworld.pddl import parse_lists
from hgpo_jax.envs.alfworld.planner import read_goal

# Digests of the rules that the arrays implement. Domains: the kinds of places where things are cleaned.
DOMAINS = {"9eae8f285bf65a92": ("sinktype", "sinkbasintype"), "6d2f322ee043e011": ("sinkbasintype",)}
# Grammars: whether one moves things to places (the others put them in/on places, and arrive at locations).
GRAMMARS = {"49b373425005f369": False, "9f506a0ed041c9d6": True}
_TASK = re.compile(r'Your task is to: [^"]*')

# Abilities of a thing, rows of `can`, and possible treatments, rows of `marks`: names of predicates.
CAN = ("pickupable", "cleanable", "heatable", "coolable", "toggleable", "sliceable", "isreceptacleobject", "knife")
MARKS = ("isclean", "ishot", "iscool", "issliced", "istoggled")
# Abilities of a place, rows of `place_can`.
PLACE_CAN = ("openable", "clean", "heat", "cool")


def sheet(path: Path, logic: str | os.PathLike | None) -> dict:
    """Returns a game's fields as in `tables.Games`, without G and padding, with names for words; also `path`, `kinds`, `names`.

    Raises:
      OSError, ValueError: as `compile_games`.
    """
    game = load_game(path, logic)
    try:
        return {"path": path} | _arrays(game, *_rules(path, logic))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; play it with the engine on the host (env.compiled=false)") from None


def _rules(path: Path, logic: str | os.PathLike | None) -> tuple[tuple[str, ...], bool]:
    if logic is not None:
        domain, grammar = ((Path(logic) / name).read_text(encoding="utf-8") for name in ("alfred.pddl", "alfred.twl2"))
    else:
        texts = json.loads(path.read_text(encoding="utf-8"))
        domain, grammar = texts["pddl_domain"], texts["grammar"]
    cleaners, moves = DOMAINS.get(_domain_digest(domain)), GRAMMARS.get(_grammar_digest(_TASK.sub("", grammar)))
    if cleaners is None or moves is None:
        raise ValueError("its domain or grammar is of no release that can be compiled")
    return cleaners, moves


@lru_cache(maxsize=8)
def _domain_digest(text: str) -> str:
    return hashlib.sha256(repr(parse_lists(text)).encode()).hexdigest()[:16]


@lru_cache(maxsize=8)
def _grammar_digest(text: str) -> str:
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:16]


class _Room(NamedTuple):
    """A game's objects by name of their PDDL entity, sorted."""

    facts: dict[str, Collection[tuple]]
    spot: dict[str, str]  # receptacle -> its location
    things: list[str]
    places: list[str]  # receptacles
    locations: list[str]
    inside: set[tuple[str, str]]  # (thing, receptacle)
    lying: set[tuple[str, str]]  # (thing, location)
    within: set[tuple[str, str]]  # (thing, the thing that it lies in)
    kinds: dict[str, dict[str, set[str]]]  # objecttype and receptacletype -> entity -> its kinds


def _read_room(game: Game) -> _Room:
    """Reads a game's initial state. Raises ValueError for one that the arrays cannot hold."""
    facts: dict[str, Collection[tuple]] = defaultdict(frozenset, {**game.data.fixed, **game.data.initial})
    spot = dict(facts["receptacleatlocation"])
    if len(spot) != len(facts["receptacleatlocation"]):
        raise ValueError("a receptacle is at two locations")
    places, locations = sorted(spot), sorted(set(spot.values()))
    if len(facts["atlocation"]) != 1 or {l for _, l in facts["atlocation"]} & set(locations) or facts["holds"]:
        raise ValueError("an episode does not start in the middle of the room with empty hands")
    inside = {(o, r) for o, r in facts["inreceptacle"] if r in spot}
    at = {(o, l) for o, l in facts["objectatlocation"] if l in set(locations)}
    outer = {o for o, _ in inside}
    within = {(inner, o) for inner, o in facts["inreceptacleobject"] if o in outer and inner != o}
    things = sorted(outer | {o for o, _ in at if (o,) in facts["sliceable"]} | {inner for inner, _ in within})
    at = {(o, l) for o, l in at if o in set(things)}
    kind_of: dict[str, dict[str, set[str]]] = {"objecttype": defaultdict(set), "receptacletype": defaultdict(set)}
    for predicate, kinds in kind_of.items():
        for id, kind in facts[predicate]:
            kinds[id].add(kind)
    return _Room(facts, spot, things, places, locations, inside, at, within, kind_of)


def _arrays(game: Game, cleaners: tuple[str, ...], moves: bool) -> dict:
    room = _read_room(game)
    facts, spot, things, places, locations, inside, lying, within, kind_of = room
    name = {id: entity.name for id, entity in game.data.narrator.entities.items()}
    number = {id: n for ids in (things, places, locations) for n, id in enumerate(ids)}
    thing_kinds, place_kinds = kind_of.values()
    facts["knife"] = {(o,) for o in things if thing_kinds[o] & {"knifetype", "butterknifetype"}}
    place_has = {
        "openable": {r for (r,) in facts["openable"]},
        "clean": {r for r in places if place_kinds[r] & set(cleaners)},
        "heat": {r for r in places if "microwavetype" in place_kinds[r]},
        "cool": {r for r in places if "fridgetype" in place_kinds[r]},
    }
    can_take = lambda r, o: any((k, t) in facts["cancontain"] for k in place_kinds[r] for t in thing_kinds[o])  # noqa: E731
    accepts = {(o, r) for r in places for o in things if can_take(r, o)}
    here = [[n for n, r in enumerate(places) if spot[r] == l] for l in locations]
    if max(map(len, here)) > bits.BITS:
        raise ValueError(f"more than {bits.BITS} receptacles are at one location")
    thing_names, place_names = [name[o] for o in things], [name[r] for r in places]
    thing_order = sorted(range(len(things)), key=thing_names.__getitem__)
    sets = partial(_bitsets, things)

    def of(predicates: Sequence[str]) -> np.ndarray:
        return sets(predicates, ((o, p) for p in predicates for (o,) in facts[p] if o in number))

    most = _most(facts, here, places, inside, accepts, place_has)
    return {
        "kinds": {kind.removesuffix("type") for kinds in kind_of.values() for some in kinds.values() for kind in some},
        "names": {*thing_names, *place_names, *(() if moves else (name[l] for l in locations))},
        "task": type_in(game.data.path),
        "moves": moves,
        "helps": any(rule.name == "help" for rule in game.data.rules.actions),
        "goal": game.task,
        "intro": game.reset()[0],
        "thing_word": thing_names,
        "thing_order": thing_order,
        "thing_rank": np.argsort(thing_order),
        "can": of(CAN),
        "within": sets(things, within),
        "marks": of(MARKS),
        "place_word": place_names,
        "place_order": sorted(range(len(places)), key=place_names.__getitem__),
        "place_rank": [sum(other < place_name for other in thing_names) for place_name in place_names],
        "place_can": [[r in place_has[what] for r in places] for what in PLACE_CAN],
        "opened": [(r,) in facts["opened"] for r in places],
        "accepts": sets(places, accepts),
        "inside": sets(places, inside),
        "location": [number[spot[r]] for r in places],
        "here": here,
        "here_by_name": [sorted(numbers, key=place_names.__getitem__) for numbers in here],
        "location_word": [""] * len(locations) if moves else [name[l] for l in locations],
        "lying": sets(locations, lying),
        **_goal_arrays(game, room),
        **most,
    }


def _bitsets(things: Sequence[str], rows: Sequence, pairs: Iterable[tuple]) -> np.ndarray:
    """Returns u32[rows, W], a set of things for each row, from (thing, row) pairs."""
    number = {id: n for n, id in enumerate(things)}
    row = {id: n for n, id in enumerate(rows)}
    bitsets = np.zeros((len(rows), -(-len(things) // 32)), np.uint32)
    for o, r in pairs:
        bitsets[row[r], number[o] // 32] |= np.uint32(1 << number[o] % 32)
    return bitsets


def _goal_arrays(game: Game, room: _Room) -> dict:
    """Returns what the goal asks for: which things, where, under which lamp, treated how, and how many."""
    goal, facts = read_goal(game.data.goal_formula), room.facts
    if len(goal.states) > 1:
        raise ValueError("its goal asks for two treatments")
    thing_kinds, place_kinds = room.kinds.values()
    goal_things = {o for o in room.things if goal.kind in thing_kinds[o]}
    for state in goal.states:
        goal_things &= {o for (o,) in facts[{"isclean": "cleanable", "ishot": "heatable", "iscool": "coolable"}[state]]}
    lamps = {o for o in room.things if goal.lamp in thing_kinds[o] and (o,) in facts["toggleable"]}
    return {
        "wanted": _bitsets(room.things, [0], ((o, 0) for o in goal_things))[0],
        "target": [goal.target in place_kinds[r] for r in room.places],
        "lamp": _bitsets(room.things, [0], ((o, 0) for o in lamps))[0],
        "mark": MARKS.index(goal.states[0]) if goal.states else -1,
        "count": goal.number,
    }


def _most(facts, here, places, inside, accepts, place_has) -> dict[str, int]:
    """Computes bounds over all states: see the last fields of `tables.Games`."""
    memberships = Counter(o for o, _ in inside)
    carried = {o for (o,) in facts["pickupable"]}
    fits = {(o, r) for o, r in accepts | inside if o in carried}
    pairs, commands = 0, 0
    for numbers in here:
        there = {places[n] for n in numbers}
        per_thing: dict[str, int] = defaultdict(int)
        for o, r in fits:
            per_thing[o] += r in there
        pairs = max(pairs, sum(per_thing.values()))
        take = sum(min(max(memberships[o], 1), number) for o, number in per_thing.items())
        tools = sum(len(place_has[what] & there) for what in ("clean", "heat", "cool"))
        held = 1 + len(there) + tools + len(facts["sliceable"])
        commands = max(commands, len(there) + len(place_has["openable"] & there) + max(take, held))
    fixed = len(places) + len(facts["toggleable"]) + len(("help", "inventory", "look"))
    return {"contents": max(Counter(r for _, r in inside).values(), default=0), "pairs": pairs, "commands": commands + fixed}
