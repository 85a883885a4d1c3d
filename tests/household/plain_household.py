"""The household's rules told again in plain Python: words, dicts and sets, one episode, no arrays.

It follows the docstrings of `hgpo_jax.envs.household` and the tables of `world.py`, and shares no code with `env.py`. Only the
facts that an episode starts from are read out of a JAX `State`; from there on the two step independently. Two of these
are equal when all their facts are, so a JAX state at any later turn can be read and compared with `==`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hgpo_jax.envs.household import world

CARRIED = "carried"
MIDDLE = "middle of the room"
ROOM_FOR = 3  # things in one receptacle
SLOTS = 6  # words of an observation
PRIZE = 10.0
QUALITY = {"heat": "hot", "cool": "cold", "clean": "clean_now"}
HOW_READ = ("", "hot", "cold", "clean_now")  # by the numbers of `State.condition`

Action = tuple[str, str]


def kind_of(name: str) -> str:
    return name[: name.rindex("_")]


def allowed_kinds(verb: str) -> frozenset[str]:
    return {"heat": world.HEATABLE, "cool": world.COOLABLE, "clean": world.CLEANABLE}[verb]


@dataclass
class PlainHousehold:
    room: str
    task: str
    goal_thing: str  # a kind
    goal_place: str  # a kind, "" when the task is to look
    places: tuple[str, ...]
    max_turns: int
    lies: dict[str, str]  # thing -> receptacle or CARRIED; its order is that of contents in an observation
    quality: dict[str, str] = field(default_factory=dict)  # thing -> "hot", "cold", "clean_now" or ""
    opened: set[str] = field(default_factory=set)
    at: str = MIDDLE
    lamp_on: bool = False
    turn: int = 0

    @classmethod
    def read(cls, env, state) -> PlainHousehold:
        """The facts of one JAX state (its arrays as numpy)."""
        room = env.rooms[int(state.room)]
        places = world.ROOMS[room][: env.places]
        kinds = world.KINDS[room]
        things = [f"{kinds[k]}_{c + 1}" for k, c in zip(state.kind.tolist(), state.copy.tolist(), strict=True)]
        stands = [*places, CARRIED]
        return cls(
            room=room,
            task=list(world.TASKS)[int(state.task)],
            goal_thing=kinds[int(state.goal_kind)],
            goal_place=env.words[int(state.goal_place)],
            places=places,
            max_turns=env.max_turns,
            lies={thing: stands[p] for thing, p in zip(things, state.where.tolist(), strict=True)},
            quality={thing: HOW_READ[c] for thing, c in zip(things, state.condition.tolist(), strict=True)},
            opened={place for place, is_open in zip(places, state.opened.tolist(), strict=True) if is_open},
            at=[*places, MIDDLE][int(state.at)],
            lamp_on=bool(state.lamp_on),
            turn=int(state.turn),
        )

    # -- facts --------------------------------------------------------------------------------------------------

    def contents(self, place: str) -> list[str]:
        return [thing for thing, spot in self.lies.items() if spot == place]

    @property
    def carried(self) -> str:
        """The thing in hand, "" when the hand is empty."""
        held = self.contents(CARRIED)
        assert len(held) <= 1
        return held[0] if held else ""

    def closed(self, place: str) -> bool:
        return kind_of(place) in world.OPENABLE and place not in self.opened

    def wanted(self) -> list[str]:
        """Things that would do: of the kind asked for and in the condition asked for."""
        asked = QUALITY.get(self.task)
        return [t for t in self.lies if kind_of(t) == self.goal_thing and asked in (None, self.quality[t])]

    def won(self) -> bool:
        if self.task == "look":
            return self.lamp_on and self.at == world.LAMP_AT[self.room] and self.carried in self.wanted()
        needed = 2 if self.task == "two" else 1
        goals = [place for place in self.places if kind_of(place) == self.goal_place]
        return any(sum(self.lies[t] == place for t in self.wanted()) >= needed for place in goals)

    # -- actions ------------------------------------------------------------------------------------------------

    def allows(self, verb: str, argument: str) -> bool:
        """Whether this action does anything now."""
        touch = self.at != MIDDLE and not self.closed(self.at)  # what lies here can be taken, and more be added
        if verb in ("look", "inventory"):
            return argument == ""
        if verb == "go_to":
            return argument in self.places and argument != self.at
        if verb in ("open", "close"):
            here = argument == self.at and argument in self.places and kind_of(argument) in world.OPENABLE
            return here and self.closed(argument) == (verb == "open")
        if verb == "take":
            return touch and not self.carried and argument in self.lies and self.lies[argument] == self.at
        if verb == "use":
            return argument == world.LAMP and self.at == world.LAMP_AT.get(self.room)
        if not argument or argument != self.carried:
            return False
        if verb == "put":
            return touch and len(self.contents(self.at)) < ROOM_FOR
        return verb in world.TOOL and self.at == world.TOOL[verb] and kind_of(argument) in allowed_kinds(verb)

    def admissible(self) -> set[Action]:
        """All actions that do something, found by trying every verb with every name there is."""
        names = ("", *self.places, *self.lies, world.LAMP)
        return {(verb, name) for verb in world.VERBS for name in names if self.allows(verb, name)}

    def step(self, verb: str, argument: str = "") -> tuple[list[str], float, bool, bool]:
        """Does one action: (observation's words with "" for empty slots, reward, done, invalid)."""
        self.turn += 1
        invalid = not self.allows(verb, argument)
        seen = ["nothing_happens"] if invalid else list(self._do(verb, argument))
        assert len(seen) <= SLOTS
        won = self.won()
        return seen + [""] * (SLOTS - len(seen)), PRIZE if won else 0.0, won or self.turn >= self.max_turns, invalid

    def _do(self, verb: str, argument: str) -> Iterator[str]:
        """Changes the facts and says what is seen."""
        if verb == "go_to":
            self.at = argument
            yield from self._view("you_arrive_at")
        elif verb == "open":
            self.opened.add(argument)
            yield from self._view("you_open")
        elif verb == "look":
            yield from self._view("you_are_facing")
        elif verb == "close":
            self.opened.remove(argument)
            yield from ("you_close", argument)
        elif verb == "use":
            self.lamp_on = True
            yield from ("you_turn_on", argument)
        elif verb == "inventory":
            held = self.carried
            yield from ("you_carry", self.quality[held], held) if held else ("you_carry_nothing",)
        elif verb == "take":
            self.lies[argument] = CARRIED
            yield from ("you_pick_up", argument, "from", self.at)
        elif verb == "put":
            self.lies[argument] = self.at
            yield from ("you_put", argument, "in", self.at)
        else:
            self.quality[argument] = QUALITY[verb]
            yield from (f"you_{verb}", argument, "using", self.at)

    def _view(self, first: str) -> Iterator[str]:
        if self.at == MIDDLE:
            yield from ("you_are_in_the_middle_of_the", self.room)
            return
        yield from (first, self.at)
        if self.closed(self.at):
            yield "it_is_closed"
        elif inside := self.contents(self.at):
            yield from ("you_see", *inside)
        else:
            yield "you_see_nothing"
