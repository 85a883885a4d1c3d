"""A planner that knows everything: it shows that a generated task can be done, and in how many actions.

It works on `PlainHousehold` alone. From anywhere to anywhere is one `go_to`, so a plan is fetching (go, open, take),
treating (go, heat) and delivering (go, open, put) in that order; the only choices are which thing and which receptacle.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

from plain_household import MIDDLE, QUALITY, ROOM_FOR, Action, PlainHousehold, kind_of

from hgpo_jax.envs.household import world


class Unsolvable(Exception):
    """No choice of things and receptacle does the task; the message says why."""


def plan(start: PlainHousehold) -> list[Action]:
    """A shortest of the plans that fetch, treat and deliver, from a state whose task is still to do, empty-handed."""
    assert not start.won() and not start.carried
    things = [thing for thing in start.lies if kind_of(thing) == start.goal_thing]
    needed = 2 if start.task == "two" else 1
    if len(things) < needed:
        raise Unsolvable(f"{len(things)} of {needed} things of the kind {start.goal_thing}")
    if start.task == "look":
        choices = [((thing,), world.LAMP_AT[start.room]) for thing in things]
    else:
        goals = [p for p in start.places if kind_of(p) == start.goal_place]
        goals = [p for p in goals if len(start.contents(p)) + needed <= ROOM_FOR]
        if not goals:
            raise Unsolvable(f"no {start.goal_place} has space for {needed}")
        choices = [(chosen, goal) for chosen in permutations(things, needed) for goal in goals]
    return min((_script(start, chosen, goal) for chosen, goal in choices), key=len)


def _script(start: PlainHousehold, things: tuple[str, ...], goal: str) -> list[Action]:
    actions: list[Action] = []
    opened, at = set(start.opened), start.at

    def reach(place: str, touch: bool) -> None:
        nonlocal at
        if at != place:
            actions.append(("go_to", place))
            at = place
        if touch and kind_of(place) in world.OPENABLE and place not in opened:
            actions.append(("open", place))
            opened.add(place)

    for thing in things:
        reach(start.lies[thing], touch=True)
        actions.append(("take", thing))
        if start.task in QUALITY:
            reach(world.TOOL[start.task], touch=False)
            actions.append((start.task, thing))
        reach(goal, touch=start.task != "look")
        actions.append(("use", world.LAMP) if start.task == "look" else ("put", thing))
    return actions


def solve(start: PlainHousehold) -> int:
    """Plays the plan by the rules: every action admissible, paid at the last and not before. Returns its length."""
    assert start.turn == 0 and start.at == MIDDLE and not start.opened and not any(start.quality.values())
    household = replace(start, lies=dict(start.lies), quality=dict(start.quality), opened=set())
    actions = plan(start)
    for number, (verb, argument) in enumerate(actions, 1):
        _, reward, done, invalid = household.step(verb, argument)
        last = number == len(actions)
        assert not invalid, f"{verb} {argument} is not admissible"
        assert (reward, done) == ((10.0, True) if last else (0.0, False)), f"{verb} {argument}: {reward}, {done}"
    return len(actions)
