"""MiniGrid's levels in words: the agent's view of the grid, its actions, and BabyAI's bot as a scripted player.

The idea, a list of things with their distances in steps, is that of BabyAI-Text (Carta et al. 2023, arXiv 2302.02662); the
wording differs. As there, the agent's compass direction is not included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from minigrid.core.actions import Actions
from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, STATE_TO_IDX
from minigrid.envs.babyai.core.levelgen import LevelGen
from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel
from minigrid.minigrid_env import MiniGridEnv
from minigrid.utils.baby_ai_bot import BabyAIBot

__all__ = ["Bot", "MiniGridEnv", "action_names", "describe", "has_bot", "longest", "reset"]

_NAMES = {"left": "turn left", "right": "turn right", "forward": "go forward", "pickup": "pick up"}
_STATES = {number: name for name, number in STATE_TO_IDX.items()}
_SQUARES = ("floor", "goal", "lava")  # squares that one can stand on
_SUBGOALS = 100  # maximum that the bot adds to its plan in one turn; plans that ended needed at most 8
_NO_BOT = ("Carrying", "KeyInBox")  # levels that the bot cannot solve, by its own documentation


def reset(env, task: int):
    """Calls `env.reset(seed=task)` without its output when a level has to be drawn again."""
    with contextlib.redirect_stdout(None):
        return env.reset(seed=task)


def action_names(env) -> tuple[str, ...]:
    """Returns the names of a level's actions, in the order of their numbers."""
    return tuple(_NAMES.get(action.name, action.name) for action in env.unwrapped.actions)


def longest(env) -> int:
    """Returns the maximum number of actions in a level's episodes. Resets it."""
    level = env.unwrapped
    reset(env, 0)
    if not isinstance(level, LevelGen) or level.fixed_max_steps:
        return level.max_steps
    # Its missions join up to four errands, and putting one thing next to another counts twice.
    errands = max({"action": 1, "and": 2, "seq": 4}[kind] for kind in level.instr_kinds)
    walks = errands * (2 if "putnext" in level.action_kinds else 1)
    return level.max_steps // level.num_navs_needed(level.instrs) * walks


def describe(observation: dict) -> str:
    """Describes the agent's view, nearest first, the first wall ahead and on either side, and the carried thing.

    observation: `image` is u8[W, W, 3], kind, colour and state of the cells of its view. The agent stands in the middle of the
    last row and looks towards the first; the thing that it carries is in its own cell.
    """
    image = observation["image"].tolist()
    middle, last = len(image) // 2, len(image[0]) - 1
    things, walls = [], []
    carried = "nothing"
    for column, cells in enumerate(image):
        for row, (kind, colour, state) in enumerate(cells):
            name, right, forward = IDX_TO_OBJECT[kind], column - middle, last - row
            if name == "wall" and (right == 0 or forward == 0):
                walls.append((right, forward))
            elif name not in ("unseen", "empty", "wall"):
                thing = _describe_thing(name, IDX_TO_COLOR[colour], state)
                if right == forward == 0:
                    carried = thing
                else:
                    things.append((right, forward, thing))
    view = "; ".join(f"{thing} {_where(right, forward)}" for right, forward, thing in sorted(things, key=_nearest))
    sides = {_side(*wall): _where(*wall) for wall in sorted(walls, key=_nearest, reverse=True)}  # the nearest of a side stays
    sentences = [f"You see {view or 'no things'}."]
    if sides:
        sentences.append(f"Walls: {'; '.join(sides[side] for side in ('ahead', 'left', 'right') if side in sides)}.")
    return " ".join([*sentences, f"You carry {carried}."])


def _describe_thing(name: str, colour: str, state: int) -> str:
    if name == "door":
        state_name = _STATES[state]
        return f"{'an' if state_name == 'open' else 'a'} {state_name} {colour} door"
    return f"a {colour} {name} square" if name in _SQUARES else f"a {colour} {name}"


def _nearest(place: tuple) -> tuple[int, int, int]:
    right, forward, *_ = place
    return abs(right) + forward, abs(right), right


def _side(right: int, forward: int) -> str:
    return "ahead" if forward else "left" if right < 0 else "right"


def _where(right: int, forward: int) -> str:
    steps = {"forward": forward, "left": -right, "right": right}
    return " and ".join(f"{n} step{'s' if n > 1 else ''} {way}" for way, n in steps.items() if n > 0)


def has_bot(env) -> bool:
    """Whether BabyAI's bot can play a level."""
    return isinstance(env.unwrapped, RoomGridLevel) and not any(name in env.spec.name for name in _NO_BOT)


class Bot:
    """BabyAI's bot, which follows an episode in a copy of the level.

    It follows on demand, so it may be asked at any turn, and episodes without it cost nothing. It uses only the parts of the
    level that the agent has seen since the episode's start.
    """

    def __init__(self, level):
        self._level, self._task = level, -1
        self._followed: list[int] = []

    def action(self, task: int, actions: Sequence[int]) -> int:
        """Returns its action in a task after these actions."""
        if task != self._task or list(actions[: len(self._followed)]) != self._followed:
            reset(self._level, task)
            self._task, self._followed = task, []
            self._bot = _Player(self._level)
            self._action = _next_action(self._bot, None)
        for action in actions[len(self._followed) :]:
            self._level.step(action)
            self._followed.append(action)
            self._action = _next_action(self._bot, action)
        return self._action


class _Plan(list):
    """The bot's stack of subgoals, which rejects endless growth: with two locked doors the bot can go round in circles, each
    waiting for the other."""

    added = 0  # since the turn began

    def append(self, subgoal) -> None:
        self.added += 1
        if self.added > _SUBGOALS:
            raise RecursionError("the bot's plan has no end")
        super().append(subgoal)


class _Player(BabyAIBot):
    """BabyAI's bot with such a stack."""

    stack: _Plan

    def __init__(self, level):
        super().__init__(level)
        self.stack = _Plan(self.stack)


def _next_action(bot: _Player, last: int | None) -> int:
    """Returns its action after the last one: nothing for a turn if it gives up, for example after a box was opened."""
    bot.stack.added = 0
    try:
        return bot.replan(last)
    except Exception:  # many kinds, often an AssertionError
        del bot.stack[_SUBGOALS:]  # it tries again from there
        return Actions.done
