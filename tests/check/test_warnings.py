"""What `python -m hgpo_jax.check` finds odd about an environment that has no fault."""

import numpy as np
import pytest

from hgpo_jax.check import text
from hgpo_jax.check.statistics import GROUP, table, warnings


class Walk:
    """A walk between -2 and 2, where falling off either end ends it."""

    task_types, task_type, max_turns, goal = ("walk",), 0, 6, "walk"

    def reset(self, task):
        self.at, self.turn = 0, 0
        return self.seen(), ["left", "right"]

    def seen(self):
        return f"You are at {self.at}."

    def step(self, action):
        self.turn += 1
        self.at += {"left": -1, "right": 1}.get(action, 0)
        fallen, limit = abs(self.at) > 2, self.turn == self.max_turns
        reward, info = self.judge(fallen, limit)
        return self.seen(), ["left", "right"], reward, fallen or limit, {"admissible": action in ("left", "right")} | info

    def judge(self, fallen, limit):
        """Surviving is the success, and a time limit no end."""
        return 1.0, {"won": limit and not fallen, "truncated": limit and not fallen}


def walk(judge=Walk.judge, seen=Walk.seen):
    return type("Odd", (Walk,), {"judge": judge, "seen": seen})


def place(seen):
    return seen.partition(".")[0]


class Clock(Walk):
    """Shows what time it is, which no other episode of its task has."""

    tasks = 0

    def seen(self):
        return f"You are {'here' if self.at < 0 else 'there'}. It is {self.minute + self.turn // 60}:{self.turn}"

    def reset(self, task):
        type(self).tasks += 1
        self.minute = self.tasks
        return super().reset(task)


class Story(Clock):
    """Never says the same thing twice, nor with numbers."""

    def seen(self):
        digits = str(self.minute * 10 + self.turn)
        return "".join("abcdefghij"[int(digit)] for digit in digits)


ODD = {
    "success: episodes that are won end early with rewards of .* others reach max_turns with 6; if lasting": walk(
        lambda self, fallen, limit: (1.0, {"won": fallen})  # a fall pays and ends
    ),
    "success: none of 64 episodes is won, and rewards are up to 0.6": walk(
        lambda self, fallen, limit: (0.1, {"won": False})  # for effort
    ),
    "success: episodes that are won have rewards of at most -5 in total": walk(
        lambda self, fallen, limit: (-1.0 * (not limit), {"won": limit, "truncated": limit})
    ),
    "success: is unknown in all episodes": walk(lambda self, fallen, limit: (1.0, {"won": None})),
    "truncated: episodes are won where max_turns are used up": walk(
        lambda self, fallen, limit: (1.0, {"won": limit and not fallen})
    ),
    "observation: a number in it changes with every step .* 0.0% of the steps .* env.state_key=FILE.py:NAME": Clock,
    "observation: a number in it changes with every step .* 9": walk(  # episodes of a task count alike
        seen=lambda self: f"You are at {self.at}, {9 - self.turn} to go."
    ),
    "observation: 0.0% of the steps after the first have a peer, of which groups": Story,
}


def play_of(make, state_key=""):
    measure = lambda inputs: ([1] * len(inputs), 0)  # noqa: E731
    tasks = np.repeat(np.arange(8), GROUP).tolist()
    return text.check(make, make(), tasks, 0, 2, measure, state_key)[1]


@pytest.mark.parametrize("line", ODD)
def test_it_is_said_in_one_line(line):
    (said,) = warnings(play_of(ODD[line]))
    begin, *rest = line.split(" .* ")
    assert said.startswith(begin) and all(part in said for part in rest) and "\n" not in said


@pytest.mark.parametrize(("make", "key"), [
    (Walk, ""), (walk(lambda self, fallen, limit: (10.0 * fallen, {"won": fallen})), ""),
    (Clock, f"{__file__}:place"),
])  # fmt: skip
def test_nothing_is_said_of_what_is_as_it_should_be(make, key):
    assert list(warnings(play_of(make, key))) == []


def test_unknown_success_is_no_number_in_the_table():
    play = play_of(ODD["success: is unknown in all episodes"])
    assert table({"random commands": play}, 0, "words").splitlines()[1].split()[2] == "unknown"
