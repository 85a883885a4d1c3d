"""Writes a compiled game as a game file for the engine: the start and the goal of one row of the tables, in PDDL."""

import json
import re
from pathlib import Path

import numpy as np

from hgpo_jax.envs.alfworld import load_game
from hgpo_jax.envs.alfworld.dataset import TASK_TYPES
from hgpo_jax.envs.alfworld.game_file import MARKS
from hgpo_jax.envs.alfworld.tables import Tables

# The goals of the official games.
GOALS = {
    "pick_and_place_simple": "",
    "pick_clean_then_place_in_recep": "(cleanable ?o) (isClean ?o)",
    "pick_heat_then_place_in_recep": "(heatable ?o) (isHot ?o)",
    "pick_cool_then_place_in_recep": "(coolable ?o) (isCool ?o)",
}
PLACE = """(exists (?r - receptacle) (exists (?o - object)
    (and {} (objectType ?o {}Type) (receptacleType ?r {}Type) (inReceptacle ?o ?r))))"""
TWO = """(exists (?r - receptacle) (exists (?o1 - object)
    (and (objectType ?o1 {0}Type) (receptacleType ?r {1}Type) (inReceptacle ?o1 ?r) (exists (?o2 - object)
        (and (not (= ?o1 ?o2)) (objectType ?o2 {0}Type) (receptacleType ?r {1}Type) (inReceptacle ?o2 ?r))))))"""
LOOK = """(exists (?ot - object ?r - receptacle ?a - agent ?l - location)
    (and (objectType ?ot {1}Type) (toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l)
        (inReceptacle ?ot ?r)))
(exists (?o - object ?a - agent) (and (objectType ?o {0}Type) (holds ?a ?o)))"""


def room(tables: Tables, g: int) -> tuple:
    """What a game made in the room of another has in common with it, padding aside."""
    words, games = tables.words, tables.games
    named = (games.place_word, games.thing_word, games.location_word)
    names = [[words[word] for word in field[g] if word] for field in named]
    return repr(names), repr(np.trim_zeros(games.within[g].ravel()).tolist())


def write_game(tables: Tables, g: int, given: Path, folder: Path) -> Path:
    """Writes the game `g` of the tables below `folder`; `given` is a game with the same room and things."""
    texts, games, words = json.loads(given.read_text()), tables.games, tables.words
    id_of = {f" {entity.name}": id for id, entity in load_game(given).data.narrator.entities.items()}
    count = games.thing_word.shape[1]
    flags = lambda sets: np.unpackbits(sets[g].view(np.uint8), axis=-1, bitorder="little", count=count)  # noqa: E731
    thing = [id_of.get(words[word]) for word in games.thing_word[g]]
    place = [id_of.get(words[word]) for word in games.place_word[g]]
    problem = texts["pddl_problem"].lower()
    spots = dict(re.findall(r"\(receptacleatlocation (\S+) (\S+)\)", problem))
    location = dict(zip(games.location[g].tolist(), map(spots.get, place), strict=True))

    head, goal = problem.split("(:goal")
    own, places = ("|".join(map(re.escape, filter(None, ids))) for ids in (thing, place))
    arguments = dict.fromkeys(MARKS, "") | {"inreceptacle": rf"\s+(?:{places})", "objectatlocation": r"\s+[^\s()]+"}
    for name, more in arguments.items():
        head = re.sub(rf"\({name}\s+(?:{own}){more}\s*\)", "", head)
    facts = [f"(inreceptacle {thing[o]} {place[r]})" for r, o in zip(*np.nonzero(flags(games.inside)), strict=True)]
    facts += [f"(objectatlocation {thing[o]} {location[l]})" for l, o in zip(*np.nonzero(flags(games.lying)), strict=True)]
    facts += [f"({MARKS[m]} {thing[o]})" for m, o in zip(*np.nonzero(flags(games.marks)), strict=True)]
    # Locations are numbered by those that are mentioned: the ones where things lay stay so, by a thing that cannot be used.
    before = dict(re.findall(r"\(objectatlocation (\S+) ([^\s()]+)\)", problem))
    unused = next(id for id in before if id not in thing)
    facts += [f"(objectatlocation {unused} {spot})" for spot in sorted(set(before.values()))]

    task = TASK_TYPES[games.task[g]]
    name_of = lambda some, those: words[those[g][np.flatnonzero(some)[0]]].split()[0]  # noqa: E731
    wanted, lamps = name_of(flags(games.wanted), games.thing_word), flags(games.lamp)
    target = name_of(lamps, games.thing_word) if lamps.any() else name_of(games.target[g], games.place_word)
    if task in GOALS:
        goal = PLACE.format(GOALS[task], wanted, target)
    else:
        goal = (TWO if games.count[g] == 2 else LOOK).format(wanted, target)
    head = head.replace("(:init", "(:init " + " ".join(facts), 1)
    texts["pddl_problem"] = f"{head} (:goal (and {goal})))"
    sentence = "".join(words[word] for word in games.goal[g]).rstrip(".")
    texts["grammar"] = re.sub(r'Your task is to: [^"]*?(\.?")', rf"Your task is to: {sentence}\1", texts["grammar"])
    path = folder / f"{task}-{g}" / "game.tw-pddl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(texts))
    return path
