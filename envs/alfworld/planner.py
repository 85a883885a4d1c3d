"""Solves games from the engine's own state: `plan(game)` returns commands that lead to the goal.

It sees everything (including the contents of closed receptacles), so its plans are an upper bound for agents and warm-start
data, not a policy. It identifies ALFWorld's actions by their PDDL names; the wording of commands comes from the game. Every
plan is played on a copy of the game before it is returned.
"""

from collections.abc import Callable
from typing import NamedTuple

from hgpo_jax.envs.alfworld.game import Game
from hgpo_jax.envs.alfworld.pddl import Formula

TREATMENTS = {  # state in the goal -> (PDDL action that achieves it, receptacle types where it is possible)
    "ishot": ("heatobject", ("microwavetype",)),
    "iscool": ("coolobject", ("fridgetype",)),
    "isclean": ("cleanobject", ("sinkbasintype", "sinktype")),
}


class Unsolvable(ValueError):
    """No plan was found; the message says what is missing."""


class Goal(NamedTuple):
    """The goal of a game.

    Attributes:
        kind: object type to bring.
        target: receptacle type to bring it to, or None (the goal is to hold it under a lamp).
        number: number of objects.
        states: states they must have (keys of `TREATMENTS`).
        lamp: type of the lamp to switch on, or None.
    """

    kind: str
    target: str | None
    number: int
    states: tuple[str, ...]
    lamp: str | None


def read_goal(formula: Formula) -> Goal:
    """Recognises the six task types in a goal formula.

    Raises:
        Unsolvable: another kind of goal.
    """
    atoms: list[tuple[str, tuple[str, ...]]] = []
    todo = [formula]
    while todo:
        node = todo.pop()
        if node[0] == "atom":
            atoms.append((node[1], node[2]))
        elif node[0] == "not" and node[1][0] != "atom":
            raise Unsolvable("the goal has a condition on all objects, which no task type of the benchmark has")
        elif node[0] != "not":
            todo += node[1] if node[0] in ("and", "or") else node[2:]
    types = {terms[0]: terms[1] for name, terms in atoms if name == "objecttype"}
    target = next((terms[1] for name, terms in atoms if name == "receptacletype"), None)
    lamps = {terms[0] for name, terms in atoms if name == "istoggled"}
    things = [name for name in types if name not in lamps]
    states = tuple(sorted({name for name, _ in atoms if name in TREATMENTS}))
    supported = {"objecttype", "receptacletype", "istoggled", "inreceptacle", "holds", "toggleable", *TREATMENTS}
    supported |= {"heatable", "coolable", "cleanable", "receptacleatlocation", "atlocation", "="}
    strange = sorted({name for name, _ in atoms if name not in supported and not name.startswith("type ")})
    if strange or len({types[name] for name in things}) != 1 or (target is None) != bool(lamps):
        raise Unsolvable(f"the goal is none of the six task types ({', '.join(strange) or 'unusual form'})")
    lamp = types[next(iter(lamps))] if lamps else None
    return Goal(types[things[0]], target, len(things), states, lamp)


def plan(game: Game, max_steps: int = 50) -> list[str]:
    """Returns commands from the game's present state to its goal, the shortest of the plans tried. `game` is not changed.

    Raises:
        Unsolvable: no plan of at most `max_steps` commands was found; says why.
    """
    if game.won:
        return []
    goal = read_goal(game.data.goal_formula)
    things = _of_type(game, "objecttype", goal.kind)
    places = _of_type(game, "receptacletype", goal.target) if goal.target else [None]
    if not things:
        raise Unsolvable(f"there is no object of type {goal.kind}")
    if not places:
        raise Unsolvable(f"there is no receptacle of type {goal.target}")
    best: list[str] | None = None
    reason = "nothing to try"
    for place in places:
        costs = []
        for thing in things:  # each object's own costs decide which ones to bring
            try:
                costs.append((len(_Attempt(game, goal).bring([thing], place)), thing))
            except Unsolvable as failure:
                reason = str(failure)
        cheapest = [thing for _, thing in sorted(costs)[: goal.number]]
        if len(cheapest) < goal.number:
            reason = f"only {len(cheapest)} of {goal.number} {goal.kind} can be brought: {reason}"
            continue
        try:
            commands = _until_won(game, _Attempt(game, goal).bring(cheapest, place))
        except Unsolvable as failure:
            reason = str(failure)
            continue
        if best is None or len(commands) < len(best):
            best = commands
    if best is None:
        raise Unsolvable(reason)
    if len(best) > max_steps:
        raise Unsolvable(f"the shortest plan found has {len(best)} commands, more than {max_steps}")
    return best


def _until_won(game: Game, commands: list[str]) -> list[str]:
    """Plays `commands` on a copy and drops those after the goal is reached.

    In a few games an object lies in two receptacles at once; taken from one, it is still in the other, and the goal is
    reached before the object is put back.
    """
    game = game.copy()
    for i, command in enumerate(commands):
        if game.step(command)[2]:
            return commands[: i + 1]
    raise Unsolvable("the plan's end does not fulfil the goal")


def _of_type(game: Game, predicate: str, kind: str | None) -> list[str]:
    return sorted(name for name, type_name in game.data.fixed.get(predicate, ()) if type_name == kind)


class _Attempt:
    """One way to the goal, played on a copy of the game."""

    def __init__(self, game: Game, goal: Goal) -> None:
        self.game = game.copy()
        self.goal = goal
        self.done: list[str] = []

    def bring(self, things: list[str], place: str | None) -> list[str]:
        """Takes, treats and delivers `things`; to `place`, or under a lamp if that is None."""
        for thing in things:
            if place is not None and self.where(thing) == place and not self.untreated(thing):
                continue
            self.take(thing)
            for state in self.untreated(thing):
                action, kinds = TREATMENTS[state]
                spots = [name for kind in kinds for name in _of_type(self.game, "receptacletype", kind)]

                def treat(spot: str, action: str = action, thing: str = thing) -> None:
                    self.go(spot)
                    self.do(action, thing, spot)

                self.first(spots, treat, f"no place to make {thing} {state[2:]}")
            if place is not None:
                self.put(thing, place)
        if place is None:
            lamps = _of_type(self.game, "objecttype", self.goal.lamp)
            self.first(lamps, self.switch_on, f"no {self.goal.lamp} that can be switched on")
        return self.done

    def untreated(self, thing: str) -> list[str]:
        return [state for state in self.goal.states if (thing,) not in self.game.state.get(state, ())]

    def where(self, thing: str) -> str | None:
        return min((place for name, place in self.game.state.get("inreceptacle", ()) if name == thing), default=None)

    def held(self) -> str | None:
        return next((row[1] for row in self.game.state.get("holds", ())), None)

    def spot(self, place: str) -> str | None:
        return next((row[1] for row in self.game.data.fixed.get("receptacleatlocation", ()) if row[0] == place), None)

    def find(self, action: str, *arguments: str) -> str | None:
        """Returns the admissible command of an action that has all `arguments` among its own; shortest, then first by name."""
        terms = set(arguments)
        choices = self.game.choices.items()
        fitting = [text for text, (rule, values) in choices if rule.name == action and terms <= set(values)]
        return min(fitting, key=lambda text: (len(text), text), default=None)

    def do(self, action: str, *arguments: str) -> None:
        command = self.find(action, *arguments)
        if command is None:
            raise Unsolvable(f"{action} is not possible with {', '.join(arguments)}")
        self.game.step(command)
        self.done.append(command)

    def first(self, options: list[str], attempt: Callable[[str], object], failure: str) -> None:
        """Applies `attempt` to the first of `options` that works."""
        for option in options:
            saved, done = self.game.copy(), list(self.done)
            try:
                attempt(option)
                return
            except Unsolvable:
                self.game, self.done = saved, done
        raise Unsolvable(failure)

    def go(self, place: str) -> None:
        if not any(row[1] == self.spot(place) for row in self.game.state.get("atlocation", ())):
            self.do("gotolocation", place)

    def reach(self, place: str) -> None:
        """Goes to `place` and opens it if it is closed."""
        self.go(place)
        if self.find("openobject", place):
            self.do("openobject", place)

    def take(self, thing: str) -> None:
        held = self.held()
        if held == thing:
            return
        place = self.where(thing)
        if place is None:
            raise Unsolvable(f"{thing} is in no receptacle")
        if held is not None:  # hands must be empty: leave it in the first receptacle that accepts it
            every = sorted(row[0] for row in self.game.data.fixed.get("receptacleatlocation", ()))
            self.first(every, lambda spot: self.put(held, spot), f"nowhere to put {held}")
        self.reach(place)
        self.do("pickupobject", thing, place)

    def put(self, thing: str, place: str) -> None:
        self.reach(place)
        self.do("putobject", thing, place)

    def switch_on(self, lamp: str) -> None:
        place = self.where(lamp)
        if place is None:
            raise Unsolvable(f"{lamp} is in no receptacle")
        self.go(place)
        if not self.game.won:
            self.do("toggleobject", lamp, place)
