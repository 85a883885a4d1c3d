"""The household as text tasks: `reset(task)` and `step(action)` over the same rules, told in ALFWorld's wording.

    env = HouseholdText(Household())
    observation, commands = env.reset(0)
    observation, commands, reward, done, info = env.step("go to fridge 1")

Two observations of a room are equal exactly where the compiled ones are.
"""

from __future__ import annotations

import numpy as np

from hgpo_jax.envs.household import expert, world
from hgpo_jax.envs.words import Words


class HouseholdText(Words):
    """The household in ALFWorld's wording; see `Words` for what it takes and has."""

    def expert(self, history_length: int) -> str:
        """The command of the local expert (`expert.py`)."""
        return self._expert(expert, history_length)

    def _ids(self, action):
        return np.asarray(self._commands.get(action.strip(), (-1, -1)), np.int32)

    def _goal(self, ids):
        _, task, kind, place = self._words(ids)
        name = self.task_types[world.TASK_WORDS.index(task)]
        if name == "look":
            return f"examine the {kind} with the desklamp."
        quality = {"place": "a", "two": "two", "clean": "a clean", "heat": "a hot", "cool": "a cool"}[name]
        return f"put {quality} {kind} in {place}."

    def _command(self, *words: str) -> str:
        verb, argument = words
        argument, here = _name(argument), _name(self._here())
        return {
            "go_to": f"go to {argument}",
            "take": f"take {argument} from {here}",
            "put": f"move {argument} to {here}",
            "heat": f"heat {argument} with {here}",
            "cool": f"cool {argument} with {here}",
            "clean": f"clean {argument} with {here}",
        }.get(verb, f"{verb} {argument}".strip())

    def _here(self) -> str:
        at = int(self._state.at)
        return self._places()[at] if at < self._env.places else ""

    def _places(self) -> list[str]:
        """The names of the room's receptacles."""
        return list(world.ROOMS[self._env.rooms[int(self._state.room)]][: self._env.places])

    def _tell(self, ids):
        first, *rest = self._words(ids)
        names = [_name(word) for word in rest]
        if first == "you_are_in_the_middle_of_the":
            places = _list([_name(place) for place in self._places()])
            return f"You are in the middle of a room. Looking quickly around you, you see {places}."
        if first in ("you_arrive_at", "you_open", "you_are_facing"):
            verb = {"you_arrive_at": "You arrive at", "you_open": "You open the", "you_are_facing": "You are facing the"}
            return f"{verb[first]} {names[0]}. {self._view(*rest)}"
        if first == "you_carry":
            quality = {"": "", "hot": "hot ", "cold": "cold ", "clean_now": "clean "}[rest[0]]
            return f"You are carrying: a {quality}{names[1]}."
        if first == "you_pick_up":
            return f"You pick up the {names[0]} from the {names[2]}."
        if first == "you_put":
            return f"You move the {names[0]} to the {names[2]}."
        if first in ("you_heat", "you_cool", "you_clean"):
            return f"You {first[4:]} the {names[0]} using the {names[2]}."
        return {
            "you_close": f"You close the {names[0]}.",
            "you_turn_on": f"You turn on the {names[0]}.",
            "you_carry_nothing": "You are not carrying anything.",
            "nothing_happens": "Nothing happens.",
        }[first]

    def _view(self, place, status, *things) -> str:
        """What a receptacle shows."""
        if status == "it_is_closed":
            return f"The {_name(place)} is closed."
        listed = _list([_name(thing) for thing in things if thing])
        if place.rsplit("_", 1)[0] in world.OPENABLE:
            return f"The {_name(place)} is open. In it, you see {listed}."
        return f"On the {_name(place)}, you see {listed}."


def _name(word: str) -> str:
    return word.replace("_", " ")


def _list(names: list[str]) -> str:
    names = [f"a {name}" for name in names]
    return ", ".join([*names[:-1], f"and {names[-1]}" if len(names) > 1 else names[-1]]) if names else "nothing"
