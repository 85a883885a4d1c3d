"""Turn budgets (`env.budgets`): an episode's prompts say how many turns it should take at most, and a signal holds the number.

The members of a prompt group have them in turn. A budget ends no episode; `method=hbpo` scores a success by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hgpo_jax.rollout.workers import EnvFailure, EnvOutput

Output = TypeVar("Output", EnvOutput, EnvOutput | EnvFailure)
BUDGET = "budget"  # the name of the first of an environment's signals


def with_budget(output: Output, episode: int, budgets: Sequence[int]) -> Output:
    """Returns an environment's output with the budget of this episode, by its number, also as its first signal.

    Without budgets it stays as it is, and so does a failure.
    """
    if not budgets or isinstance(output, EnvFailure):
        return output
    budget = budgets[episode % len(budgets)]
    return output._replace(budget=budget, signals=[float(budget), *(output.signals or ())])


def goal_of(output: EnvOutput) -> str:
    """Returns the goal as prompts state it, with the budget if there is one."""
    goal, budget = output.goal, output.budget
    if budget is None:
        return goal
    end = "" if not goal or goal.endswith((".", "!", "?")) else "."
    return f"{goal}{end} Use at most {budget} turn{'s' * (budget > 1)}.".lstrip()
