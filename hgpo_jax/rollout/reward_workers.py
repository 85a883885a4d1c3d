"""Outside rewards for text episodes: a user's function of an episode's texts, which worker processes call.

    def score(episode: EpisodeTexts) -> float | list[float]

A number is the reward of the last turn; a list has one for each turn. A function with signals returns (reward, signals)
(`signals.py`).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from hgpo_jax.envs import user_code
from hgpo_jax.rollout.signals import declared, in_order
from hgpo_jax.rollout.workers import MAX_REWARD, EnvFailure, described
from hgpo_jax.utils.errors import ConfigError


class EpisodeTexts(NamedTuple):
    """The argument of a reward function: an episode of T turns."""

    goal: str
    observations: list[str]  # T + 1: before each turn, and after the last
    responses: list[str]  # T, the policy's responses
    rewards: list[float]  # T, the environment's
    success: bool | None  # None: the environment did not report it


class LocalReward:
    """A reward function in this process, with the interface of `workers.LocalWorkers`. An error in it costs that episode only.

    load: returns (module, function), for example `outside.load` of a place.
    """

    spec = ()
    limit = "reward.time_limit"

    def __init__(self, load: Callable):
        _, self._function = load()
        self._answers: list[tuple[int, list[list[float]] | EnvFailure]] = []

    def send(self, requests: Iterable[tuple[int, EpisodeTexts]]) -> None:
        """Computes each episode's rewards, for `receive`."""
        for number, episode in requests:
            answer: list[list[float]] | EnvFailure
            try:
                answer = read_streams(self._function(episode), len(episode.responses), declared(self._function))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # any error of the user's function
                answer = EnvFailure(described(error))
            self._answers.append((number, answer))

    @staticmethod
    def describe(request: tuple[int, EpisodeTexts]) -> str:
        """Describes a request as `workers.LocalWorkers.describe` does; here the reason says that it is about a reward."""
        return ""

    def receive(self, minimum: int) -> list[tuple[int, list[list[float]] | EnvFailure]]:
        """Returns (number, the `read_streams` of its turns or why there are none) for the episodes that were sent."""
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Does nothing: a function has nothing to end."""


def reward_function(source: str) -> Callable:
    """Returns the function of `reward=source`. Raises ConfigError if there is none."""
    try:
        return user_code.load_function(source, user_code.REWARDS, "score(episode)")
    except ValueError as error:
        raise ConfigError(f"reward.source={source}: {error}") from None


def read_streams(returned, turns: int, names: Sequence[str]) -> list[list[float]]:
    """Returns the rewards of each turn, and those of each signal that the function declares."""
    if not names:
        return [read_rewards(returned, turns)]
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(f"{returned!r:.80} was returned; with signals return (reward, dict of {', '.join(names)})")
    rewards, signals = returned
    of_signals = zip(names, in_order(names, signals), strict=True)
    return [read_rewards(rewards, turns), *(read_rewards(values, turns, f"signal {name}") for name, values in of_signals)]


def read_rewards(returned, turns: int, name: str = "a reward") -> list[float]:
    """Converts a reward function's result to one reward per turn. Raises TypeError or ValueError for all but finite numbers."""
    if isinstance(returned, numbers.Real):
        rewards = [0.0] * (turns - 1) + [returned]
    elif isinstance(returned, Sequence) and not isinstance(returned, str):
        rewards = list(returned)
    else:
        raise TypeError(f"a {type(returned).__name__} was returned; return a number, or a list with one for each turn")
    if len(rewards) != turns:
        raise ValueError(f"{len(rewards)} numbers were returned for {turns} turns")
    for reward in rewards:
        if not isinstance(reward, numbers.Real):
            raise TypeError(f"{name} is a {type(reward).__name__}, not a number")
        if not math.isfinite(reward) or abs(float(reward)) > MAX_REWARD:
            raise ValueError(f"{name} is {reward}; give a finite number, at most {MAX_REWARD:.0e}")
    return [float(reward) for reward in rewards]
