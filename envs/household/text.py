"""The household as text tasks: `reset(task)` and `step(action)` over the same rules, told in one of two wordings.

    env = HouseholdText(Household())
    observation, commands = env.reset(0)
    observation, commands, reward, done, info = env.step("go to fridge 1")

`HouseholdText` speaks as ALFWorld does. `HouseholdWords` shows the very words of the compiled environment, so that both
faces can be compared. In either, two observations of a room are equal exactly where the compiled ones are.
"""

from __future__ import annotations

import functools

import jax
import numpy as np

from envs.household import world
from envs.household.env import Household

BLANK = "_"  # an empty slot between words


class HouseholdWords:
    """Generated households played one at a time. A task is the random key that it is generated from, as a 64-bit number.

    Args:
      household: the rules; all that share one share its compiled functions.

    Attributes:
      task_types: their names; `task_type` is an index into it.
      goal: the task of the running episode.
    """

    task_types = tuple(world.TASKS)

    def __init__(self, household: Household):
        self._household, self.max_turns = household, household.max_turns

    def reset(self, task: int) -> tuple[str, list[str]]:
        """Starts the task of `jax.random.key(task)`; returns the first observation and the commands to choose from."""
        if not 0 <= task < 2**64:
            raise IndexError(f"task={task}: must be a number of 64 bits")
        key = np.array([task >> 32, task & 0xFFFFFFFF], np.uint32)
        with jax.set_mesh(_one_cpu()):
            self._state, seen = jax.device_get(_programs(self._household)[0](key))
        self.task_type = int(self._state.task)
        self._room = self._household.rooms[int(self._state.room)]
        self.goal = self._goal(seen["goal"])
        return self._see(seen)

    def step(self, action: str) -> tuple[str, list[str], float, bool, dict]:
        """Does one action; an inadmissible one changes nothing.

        Returns: (observation, commands, reward 10 on success else 0, done, info with `won` and `admissible`).
        """
        with jax.set_mesh(_one_cpu()):
            self._state, seen = jax.device_get(_programs(self._household)[1](self._state, self._ids(action)))
        info = {"won": bool(seen["reward"] > 0), "admissible": not seen["invalid"]}
        return *self._see(seen), float(seen["reward"]), bool(seen["done"]), info

    def _see(self, seen) -> tuple[str, list[str]]:
        legal, words = seen["admissible"]
        self._commands = {self._command(*self._words(pair)): pair for pair in words[legal]}
        return self._tell(self._words(seen["observation"])), sorted(self._commands)

    def _words(self, ids) -> list[str]:
        return [self._household.words[i] for i in ids]

    # -- the wording --------------------------------------------------------------------------------------------

    def _ids(self, action: str) -> np.ndarray:
        """An action's words as i32[2]; a word that the household does not know is -1."""
        known = self._household.word_id | {BLANK: 0}
        ids = [known.get(word, -1) for word in action.split()][: self._household.action_length]
        return np.array(ids + [0] * (self._household.action_length - len(ids)), np.int32)

    def _goal(self, ids) -> str:
        return _join(self._words(ids))

    def _command(self, verb: str, argument: str) -> str:
        return _join([verb, argument])

    def _tell(self, words: list[str]) -> str:
        return _join(words)


class HouseholdText(HouseholdWords):
    """The household in ALFWorld's wording; see `HouseholdWords` for what it takes and has."""

    def _ids(self, action):
        return np.asarray(self._commands.get(action.strip(), (-1, -1)), np.int32)

    def _goal(self, ids):
        _, task, kind, place = self._words(ids)
        name = self.task_types[world.TASK_WORDS.index(task)]
        if name == "look":
            return f"examine the {kind} with the desklamp."
        quality = {"place": "a", "two": "two", "clean": "a clean", "heat": "a hot", "cool": "a cool"}[name]
        return f"put {quality} {kind} in {place}."

    def _command(self, verb, argument):
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
        return world.ROOMS[self._room][at] if at < self._household.places else ""

    def _tell(self, words):
        first, *rest = words
        names = [_name(word) for word in rest]
        if first == "you_are_in_the_middle_of_the":
            places = [_name(place) for place in world.ROOMS[self._room][: self._household.places]]
            return f"You are in the middle of a room. Looking quickly around you, you see {_list(places)}."
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
        things = _list([_name(thing) for thing in things if thing])
        if place.rsplit("_", 1)[0] in world.OPENABLE:
            return f"The {_name(place)} is open. In it, you see {things}."
        return f"On the {_name(place)}, you see {things}."


def _join(words: list[str]) -> str:
    return " ".join(word or BLANK for word in words).rstrip(f" {BLANK}")


def _name(word: str) -> str:
    return word.replace("_", " ")


def _list(names: list[str]) -> str:
    names = [f"a {name}" for name in names]
    return ", ".join([*names[:-1], f"and {names[-1]}" if len(names) > 1 else names[-1]]) if names else "nothing"


@functools.cache
def _one_cpu() -> jax.sharding.Mesh:
    """One processor of the host: the caller's mesh may hold many devices, and a household needs none of them."""
    axis = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((1,), ("household",), axis_types=axis, devices=jax.local_devices(backend="cpu")[:1])


@functools.lru_cache(maxsize=8)
def _programs(household: Household):
    """Jitted `reset(key data)` and `step(state, action)`, both -> (state, what there is to tell)."""

    @jax.jit
    def reset(key):
        state, observation = household.reset(jax.random.wrap_key_data(key, impl="threefry2x32"))
        return state, {
            "observation": observation,
            "admissible": household.admissible(state),
            "goal": household.goal(state),
        }

    @jax.jit
    def step(state, action):
        state, observation, reward, done, invalid = household.step(state, action)
        return state, {
            "observation": observation,
            "admissible": household.admissible(state),
            "reward": reward,
            "done": done,
            "invalid": invalid,
        }

    return reset, step
