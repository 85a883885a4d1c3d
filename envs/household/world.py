"""The household's fixed facts: rooms, receptacles, kinds of things, tasks and the words that name them.

Everything in an observation, an action or a task is one word of `vocabulary`; a word's index is its token id and 0 is the empty
slot. Multi-word phrases are joined by underscores so that a word-level tokenizer needs no rules.

The six task types are ALFWorld's (Shridhar et al., 2021); the rooms are a small version of its floor plans.
"""

from __future__ import annotations

import numpy as np

# A room's receptacles in order of importance: `Household(places=n)` uses the first n of each room.
ROOMS: dict[str, tuple[str, ...]] = {
    "kitchen": (
        "countertop_1",
        "cabinet_1",
        "fridge_1",
        "microwave_1",
        "sinkbasin_1",
        "drawer_1",
        "cabinet_2",
        "diningtable_1",
        "drawer_2",
        "shelf_1",
        "cabinet_3",
        "garbagecan_1",
    ),
    "bathroom": (
        "sinkbasin_1",
        "cabinet_1",
        "countertop_1",
        "drawer_1",
        "shelf_1",
        "toilet_1",
        "cabinet_2",
        "bathtub_1",
        "drawer_2",
        "garbagecan_1",
        "cabinet_3",
        "shelf_2",
    ),
    "bedroom": (
        "desk_1",
        "bed_1",
        "drawer_1",
        "shelf_1",
        "safe_1",
        "cabinet_1",
        "drawer_2",
        "sidetable_1",
        "shelf_2",
        "dresser_1",
        "drawer_3",
        "garbagecan_1",
    ),
    "livingroom": (
        "sidetable_1",
        "sofa_1",
        "drawer_1",
        "coffeetable_1",
        "cabinet_1",
        "safe_1",
        "armchair_1",
        "shelf_1",
        "drawer_2",
        "cabinet_2",
        "diningtable_1",
        "garbagecan_1",
    ),
}
OPENABLE = frozenset({"cabinet", "drawer", "fridge", "microwave", "safe"})
LAMP_AT = {"bedroom": "desk_1", "livingroom": "sidetable_1"}  # place of the room's desk lamp

# The eight kinds of things of a room. There are at most two of each kind, "mug_1" and "mug_2".
KINDS: dict[str, tuple[str, ...]] = {
    "kitchen": ("apple", "potato", "tomato", "egg", "mug", "plate", "cup", "bread"),
    "bathroom": ("soapbar", "cloth", "towel", "candle", "spraybottle", "toiletpaper", "plunger", "soapbottle"),
    "bedroom": ("book", "cd", "pen", "pencil", "cellphone", "keychain", "alarmclock", "laptop"),
    "livingroom": ("remotecontrol", "newspaper", "vase", "statue", "watch", "creditcard", "box", "pillow"),
}
COPIES = 2
HEATABLE = frozenset({"apple", "potato", "tomato", "egg", "mug", "plate", "cup", "bread"})
COOLABLE = HEATABLE
CLEANABLE = frozenset({"apple", "potato", "tomato", "egg", "mug", "plate", "cup", "soapbar", "cloth"})

# Task types in the order of their ids, with the rooms in which each can be set.
TASKS: dict[str, tuple[str, ...]] = {
    "place": ("kitchen", "bathroom", "bedroom", "livingroom"),
    "two": ("kitchen", "bathroom", "bedroom", "livingroom"),
    "look": ("bedroom", "livingroom"),
    "clean": ("kitchen", "bathroom"),
    "heat": ("kitchen",),
    "cool": ("kitchen",),
}
TASK_ID = {name: index for index, name in enumerate(TASKS)}
TASK_WORDS = ("put_a", "put_two", "examine_with_the_desklamp_a", "put_a_clean", "put_a_hot", "put_a_cool")

# Verbs in the order of their ids. The first three take a receptacle, the next five a thing, `use` takes the lamp.
VERBS = ("go_to", "open", "close", "take", "put", "heat", "cool", "clean", "use", "look", "inventory")
VERB_ID = {name: index for index, name in enumerate(VERBS)}
TOOL = {"heat": "microwave_1", "cool": "fridge_1", "clean": "sinkbasin_1"}  # where each of these verbs works
LAMP = "desklamp_1"

PHRASES = (
    "you_are_in_the_middle_of_the",
    "you_arrive_at",
    "you_open",
    "you_close",
    "you_are_facing",
    "it_is_closed",
    "you_see",
    "you_see_nothing",
    "you_pick_up",
    "from",
    "you_put",
    "in",
    "you_heat",
    "you_cool",
    "you_clean",
    "using",
    "you_turn_on",
    "you_carry",
    "you_carry_nothing",
    "hot",
    "cold",
    "clean_now",
    "nothing_happens",
)


def vocabulary(rooms: tuple[str, ...], places: int) -> tuple[str, ...]:
    """Lists the words that can occur in these rooms with this many receptacles each; a word's id is its index.

    Index 0 is the empty slot (the tokenizer's padding). A household of fewer rooms has fewer words, which keeps the
    embedding of a small policy small.
    """
    names = tuple(dict.fromkeys(name for room in rooms for name in ROOMS[room][:places]))
    kinds = tuple(kind for room in rooms for kind in KINDS[room])
    place_kinds = tuple(dict.fromkeys(name.rsplit("_", 1)[0] for name in names))
    things = tuple(f"{kind}_{n}" for kind in kinds for n in range(1, COPIES + 1))
    words = ("", *VERBS, *PHRASES, *TASK_WORDS, *rooms, *place_kinds, *names, *kinds, *things, LAMP)
    assert len(set(words)) == len(words)
    return words


def affordances(kinds: tuple[str, ...]) -> np.ndarray:
    """Returns bool[tasks, kinds]: whether a thing of this kind can be the object of this task type."""
    allowed = {"clean": CLEANABLE, "heat": HEATABLE, "cool": COOLABLE}
    return np.array([[task not in allowed or kind in allowed[task] for kind in kinds] for task in TASKS])
