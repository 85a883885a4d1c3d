"""The households for two roles told again in plain Python, around the plain household."""

from __future__ import annotations

from dataclasses import dataclass, field

from plain_household import CARRIED, PlainHousehold, kind_of

from hgpo_jax.envs.household import world

PLACES_NAMED = {"place": 2, "two": 4, "look": 2, "clean": 3, "heat": 3, "cool": 3}
SEARCHERS_TURN_EVERY = 5


@dataclass
class PlainTeam:
    """A searcher who names places, and a carrier."""

    house: PlainHousehold
    max_turns: int
    seen: tuple[str, ...] = ()
    turn: int = 0
    told: str = ""
    with_the_agent = "carrier"  # how a list calls the place of what is carried

    @classmethod
    def begin(cls, env, state):
        """From the first JAX state of an episode (its arrays as numpy)."""
        house = PlainHousehold.read(env.house, state.house)
        return cls(house, env.max_turns, ("you_are_in_the_middle_of_the", house.room))

    @property
    def role(self) -> str:
        return "carrier" if self.turn % SEARCHERS_TURN_EVERY else "searcher"

    @property
    def sees_all(self) -> bool:
        return self.role in ("searcher", "planner")

    def observation(self) -> list[str]:
        """The words for the role whose turn it is, without empty slots at the end."""
        if self.sees_all:
            kinds, words = world.KINDS[self.house.room], [self.role]
            for thing in sorted(self.house.lies, key=lambda thing: (kinds.index(kind_of(thing)), thing)):
                spot = self.house.lies[thing]
                words += [thing, self.with_the_agent if spot == CARRIED else spot]
        else:
            words = [self.role, *self.said(), *self.seen]
        while words[-1] == "":
            words.pop()
        return words

    def said(self) -> list[str]:
        return [self.told]

    def admissible(self) -> set[tuple[str, str]]:
        return {(place, "") for place in self.house.places} if self.sees_all else self.house.admissible()

    def step(self, *words: str) -> tuple[list[str], float, bool, bool]:
        """Does one action: (the next observation, reward, done, invalid)."""
        role, reward = self.role, 0.0
        if self.sees_all:
            invalid = self.listen(words)
        else:
            seen, reward, _, invalid = self.house.step(*("" if any(words[2:]) else word for word in words[:2]))
            self.seen = tuple(seen)
            self.move()
        self.turn += 1
        won = self.house.won()
        assert (reward > 0) == (won and role in ("carrier", "executor"))
        return self.observation(), reward, won or self.turn >= self.max_turns, invalid

    def listen(self, words: tuple[str, ...]) -> bool:
        """Takes what the one that sees everything says; whether it is invalid."""
        invalid = words[0] not in self.house.places or words[1] != ""
        self.told = self.told if invalid else words[0]
        return invalid

    def move(self) -> None:
        """What comes of where the other one stands now."""


@dataclass
class PlainPlan(PlainTeam):
    """A planner who writes places down once, and an executor."""

    left: list[str] = field(default_factory=list)
    longest: int = 0  # words of a blueprint

    @classmethod
    def begin(cls, env, state):
        plain = super().begin(env, state)
        plain.longest = max(PLACES_NAMED[task] for task in env.house.tasks)
        return plain

    @property
    def role(self) -> str:
        return "executor" if self.turn else "planner"

    def said(self) -> list[str]:
        return [*self.left, *[""] * (self.longest - len(self.left))]

    def listen(self, words: tuple[str, ...]) -> bool:
        named = " ".join(words).rstrip().split(" ")
        invalid = any(word not in self.house.places for word in named)
        self.left = [] if invalid else named
        return invalid

    def move(self) -> None:
        if self.left and self.house.at == self.left[0]:
            self.left = self.left[1:]
