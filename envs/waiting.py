"""An artificial environment that only takes time, as one behind a network or with a slow engine does."""

from __future__ import annotations

import random
import time


class Waiting:
    """An environment in which any action counts; a step takes the time drawn for it, the same whenever its task is played.

    Args:
      mean: seconds of a step on average.
      spread: whether steps are drawn from the exponential distribution; otherwise each takes the mean.
      max_turns: actions of every episode.
    """

    task_types = ("waiting",)
    task_type = 0
    goal = "wait"

    def __init__(self, mean: float, spread: bool = True, max_turns: int = 20):
        self.mean, self.spread, self.max_turns = mean, spread, max_turns

    def times(self, task: int) -> list[float]:
        """Returns the seconds of an episode's steps."""
        draw = random.Random(task)
        return [draw.expovariate(1 / self.mean) if self.spread else self.mean for _ in range(self.max_turns)]

    def reset(self, task: int) -> tuple[str, list[str]]:
        self._times = self.times(task)
        return "0", ["wait"]

    def step(self, action: str):
        time.sleep(self._times.pop(0))
        done = not self._times
        return f"{len(self._times)}", ["wait"], float(done), done, {"won": done, "admissible": True}
