"""The household for two told again in plain Python, around the plain household."""

from __future__ import annotations

from dataclasses import dataclass

from plain_household import CARRIED, PlainHousehold, kind_of

from hgpo_jax.envs.household import world

SEARCHERS_TURN_EVERY = 5


@dataclass
class PlainTeam:
    house: PlainHousehold
    max_turns: int
    told: str = ""
    seen: tuple[str, ...] = ()
    turn: int = 0

    @classmethod
    def begin(cls, env, state) -> PlainTeam:
        """From the first JAX state of an episode (its arrays as numpy)."""
        house = PlainHousehold.read(env.house, state.house)
        return cls(house, env.max_turns, seen=("you_are_in_the_middle_of_the", house.room))

    @property
    def role(self) -> str:
        return "carrier" if self.turn % SEARCHERS_TURN_EVERY else "searcher"

    def observation(self) -> list[str]:
        """The words for the role whose turn it is, without empty slots at the end."""
        if self.role == "carrier":
            words = ["carrier", self.told, *self.seen]
        else:
            words = ["searcher"]
            kinds = world.KINDS[self.house.room]
            for thing in sorted(self.house.lies, key=lambda thing: (kinds.index(kind_of(thing)), thing)):
                spot = self.house.lies[thing]
                words += [thing, "carrier" if spot == CARRIED else spot]
        while words[-1] == "":
            words.pop()
        return words

    def admissible(self) -> set[tuple[str, str]]:
        return {(place, "") for place in self.house.places} if self.role == "searcher" else self.house.admissible()

    def step(self, first: str, second: str) -> tuple[list[str], float, bool, bool]:
        """Does one action: (the next observation, reward, done, invalid)."""
        role, reward = self.role, 0.0
        if role == "searcher":
            invalid = first not in self.house.places or second != ""
            self.told = self.told if invalid else first
        else:
            seen, reward, _, invalid = self.house.step(first, second)
            self.seen = tuple(seen)
        self.turn += 1
        won = self.house.won()
        assert (reward > 0) == (won and role == "carrier")
        return self.observation(), reward, won or self.turn >= self.max_turns, invalid
