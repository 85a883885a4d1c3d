"""Mathematics as text tasks: a calculator in some turns, an answer in the last.

    env = GeneratedMath(Problems())
    observation, commands = env.reset(0)
    observation, commands, reward, done, info = env.step("That makes <calculate>(12 + 7) * 3</calculate>")
    observation, commands, reward, done, info = env.step("<answer>57</answer>")

An action is a whole response: any thought, then one call of the calculator or one answer. An observation lists all that has
been calculated in the episode, sorted, so states are equal where the same is known.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hgpo_jax.envs.math.answers import LENGTH, is_right
from hgpo_jax.envs.math.calculator import CalculatorError, calculate
from hgpo_jax.envs.math.problems import Problem, Problems

REWARD = 10.0  # of a right answer
NOTHING = "Nothing is calculated yet."
NO_ACTION = "Error: write one <calculate> or one <answer> and its end."
ACTIONS = ("calculate", "answer")


def read_action(response: str, actions: Sequence[str] = ACTIONS) -> tuple[str, str, bool]:
    """Returns a response's action or "", the text in its first pair of tags, and whether it is well formed.

    A well-formed response has no tag in that pair, and nothing after it. A tag without its end, as reasoning may mention
    it, counts as words.
    """
    names = "|".join(actions)
    pair = re.search(rf"<({names})>((?:(?!<\1>).)*?)</\1>", response, re.DOTALL)
    if pair is None:
        return "", "", False
    well_formed = not response[pair.end() :].strip() and not re.search(f"<({names})>", pair[2])
    return pair[1], pair[2].strip(), well_formed


class MathText:
    """Problems played one at a time; derived classes say which (`_problem`).

    Args:
      task_types: names of the problems' kinds.
      max_turns: calls and answers after which an episode ends.
      latex: whether answers may be in LaTeX (`answers.is_right`).

    Attributes:
      goal: the problem. task_type: its kind, an index into task_types.
      signals: of each turn, 0 or -1 for a fault. `format`: the response is not well formed. `calculation`: a call that has
        no value, or has been made before.
    """

    signals: tuple[str, ...] = ("format", "calculation")

    def __init__(self, task_types: Sequence[str], max_turns: int, latex: bool = False):
        self.task_types, self.max_turns, self._latex = tuple(task_types), max_turns, latex

    def _problem(self, task: int) -> Problem:
        raise NotImplementedError

    def reset(self, task: int) -> tuple[str, list[str]]:
        """Starts a problem; returns the first observation and no commands: answers are free text."""
        self._current = self._problem(task)
        self.goal, self.task_type = self._current.question, self._current.kind
        self._values: dict[str, str] = {}  # expression -> value
        self._turn = 0
        return NOTHING, []

    def step(self, action: str) -> tuple[str, list[str], float, bool, dict]:
        """Calculates or takes the answer; returns (observation, [], reward, done, info)."""
        self._turn += 1
        name, content, well_formed = read_action(action)
        won, sensible, message = False, well_formed, ""
        if name == "calculate":
            message, sensible = self._calculate(content)
        elif name == "answer":
            won = bool(content) and is_right(content, self._current.answer, self._latex)
            sensible = 0 < len(content) <= LENGTH
            message = "Right." if won else "Wrong."
        else:
            message = NO_ACTION
        signals = {"format": float(well_formed) - 1, "calculation": float(sensible or name != "calculate") - 1}
        done = name == "answer" or self._turn >= self.max_turns
        truncated = done and name != "answer"
        info = {"won": won, "admissible": well_formed and sensible, "truncated": truncated, "signals": signals}
        return self._observation(message), [], REWARD * won, done, info

    def _calculate(self, expression: str) -> tuple[str, bool]:
        """Calculates; returns (an error or "", whether the call was of use)."""
        try:
            written, value = calculate(expression)
        except CalculatorError as error:
            return f"Error: {error}.", False
        new = written not in self._values
        self._values[written] = value
        return "", new

    def _known(self) -> list[str]:
        return [f"{expression}={value}" for expression, value in sorted(self._values.items())]

    def _observation(self, message: str) -> str:
        return "\n".join([*self._known(), message]).strip("\n") or NOTHING


class GeneratedMath(MathText):
    """Generated problems, numbered by 64 bits; those held out share no chain of operations with the others."""

    def __init__(self, problems: Problems, max_turns: int = 20, held_out: bool = False):
        super().__init__(problems.kinds, max_turns)
        self._problems, self._held_out = problems, held_out

    def _problem(self, task: int) -> Problem:
        if not 0 <= task < 2**64:
            raise IndexError(f"task={task}: must be a whole number below 2**64")
        return self._problems.problem(task, self._held_out)

    def expert(self, history_length: int) -> str:
        """Returns the next call of the problem's solution that is still to be made, or the answer."""
        for step in self._current.steps:
            if step not in self._values:
                return f"<calculate>{step}</calculate>"
        return f"<answer>{self._current.answer}</answer>"


class ListedMath(MathText):
    """Problems of a list, such as `data.load` reads."""

    def __init__(self, problems: Sequence[Problem], task_types: Sequence[str], max_turns: int = 20, latex: bool = False):
        super().__init__(task_types, max_turns, latex)
        self._problems = problems

    def __len__(self) -> int:
        return len(self._problems)

    def _problem(self, task: int) -> Problem:
        return self._problems[task]
