"""The household as text tasks: `reset(task)` and `step(action)` over the same rules, in ALFWorld's wording.

    env = HouseholdText(Household())
    observation, commands = env.reset(0)
    observation, commands, reward, done, info = env.step("go to fridge 1")

Two observations of a room are equal exactly if the compiled ones are.
"""

from __future__ import annotations

import numpy as np

from hgpo_jax.envs.compiled_as_text import Words
from hgpo_jax.envs.household import expert, world
from hgpo_jax.envs.household.env import Household, State
from hgpo_jax.envs.household.team import SEARCHER, HouseholdTeam


class HouseholdText(Words):
    """The household in ALFWorld's wording; see `Words` for arguments and attributes."""

    def expert(self, history_length: int) -> str:
        """Returns the command of the local expert (`expert.py`)."""
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

    def _house(self) -> tuple[Household, State]:
        """The household and its state."""
        return self._env, self._state

    def _here(self) -> str:
        env, state = self._house()
        at = int(state.at)
        return self._places()[at] if at < env.places else ""

    def _places(self) -> list[str]:
        """Lists the names of the room's receptacles."""
        env, state = self._house()
        return list(world.ROOMS[env.rooms[int(state.room)]][: env.places])

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
        """Describes the contents of a receptacle."""
        if status == "it_is_closed":
            return f"The {_name(place)} is closed."
        listed = _list([_name(thing) for thing in things if thing])
        if place.rsplit("_", 1)[0] in world.OPENABLE:
            return f"The {_name(place)} is open. In it, you see {listed}."
        return f"On the {_name(place)}, you see {listed}."


class HouseholdTeamText(HouseholdText):
    """The household for two (`HouseholdTeam`) in the same wording; the searcher's commands are "say fridge 1" and the like."""

    def expert(self, history_length: int) -> str:
        """Returns the command of the role's scripted player."""
        return self._expert(HouseholdTeam, history_length)

    def _house(self):
        return self._env.house, self._state.house

    def _command(self, *words):
        return f"say {_name(words[0])}" if self.role == SEARCHER else super()._command(*words)

    def _tell(self, ids):
        _, *rest = self._words(ids)
        if self.role == SEARCHER:
            pairs = zip(rest[::2], rest[1::2], strict=False)
            held = {"carrier": "with the carrier"}  # others are at a place
            spots = [f"The {_name(thing)} is {held.get(place, f'at the {_name(place)}')}." for thing, place in pairs if thing]
            return f"You are the searcher and tell the carrier a place. {' '.join(spots)}"
        message = f"The searcher says: {_name(rest[0])}." if rest[0] else "The searcher has said nothing."
        return f"You are the carrier. {message} {super()._tell(ids[2:])}"


def _name(word: str) -> str:
    return word.replace("_", " ")


def _list(names: list[str]) -> str:
    names = [f"a {name}" for name in names]
    return ", ".join([*names[:-1], f"and {names[-1]}" if len(names) > 1 else names[-1]]) if names else "nothing"
