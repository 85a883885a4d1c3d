"""The household with a plan told again in plain Python, around the plain household."""

from __future__ import annotations

from dataclasses import dataclass, field

from plain_household import PlainHousehold, kind_of

from hgpo_jax.envs.household import world

PLACES_NAMED = {"place": 2, "two": 4, "look": 2, "clean": 3, "heat": 3, "cool": 3}


@dataclass
class PlainPlan:
    house: PlainHousehold
    max_turns: int
    longest: int  # words of a blueprint
    left: list[str] = field(default_factory=list)
    seen: tuple[str, ...] = ()
    turn: int = 0

    @classmethod
    def begin(cls, env, state) -> PlainPlan:
        """From the first JAX state of an episode (its arrays as numpy)."""
        house = PlainHousehold.read(env.house, state.house)
        longest = max(PLACES_NAMED[task] for task in env.house.tasks)
        return cls(house, env.max_turns, longest, seen=("you_are_in_the_middle_of_the", house.room))

    @property
    def role(self) -> str:
        return "executor" if self.turn else "planner"

    def observation(self) -> list[str]:
        """The words for the role whose turn it is, without empty slots at the end."""
        if self.role == "executor":
            words = ["executor", *self.left, *[""] * (self.longest - len(self.left)), *self.seen]
        else:
            kinds, words = world.KINDS[self.house.room], ["planner"]
            for thing in sorted(self.house.lies, key=lambda thing: (kinds.index(kind_of(thing)), thing)):
                words += [thing, self.house.lies[thing]]
        while words[-1] == "":
            words.pop()
        return words

    def step(self, *words: str) -> tuple[list[str], float, bool, bool]:
        """Takes a blueprint or does one action: (the next observation, reward, done, invalid)."""
        reward = 0.0
        if self.role == "planner":
            named = list(words)
            while named and named[-1] == "":
                named.pop()
            invalid = not named or any(word not in self.house.places for word in named)
            self.left = [] if invalid else named
        else:
            first, second, *more = words
            seen, reward, _, invalid = self.house.step(*(("", "") if any(more) else (first, second)))
            self.seen = tuple(seen)
            if self.left and self.house.at == self.left[0]:
                self.left = self.left[1:]
        self.turn += 1
        won = self.house.won()
        assert (reward > 0) == won
        return self.observation(), reward, won or self.turn >= self.max_turns, invalid
