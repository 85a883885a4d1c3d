"""What a rollout returns: its episodes and, of a host rollout, a report of what these cannot hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.utils.errors import printable
from hgpo_jax.utils.files import atomic_write


class Story(NamedTuple):
    """One episode in words: its task, what was seen and done in each turn, and how it ended."""

    task: str
    turns: list[str]
    outcome: str

    def text(self) -> str:
        return "\n".join([f"task: {self.task} ({self.outcome})", *self.turns])


def outcome_of(episodes: Episodes, index: int) -> str:
    """How an episode ended, in a word."""
    return "unknown" if not episodes.judged[index] else "success" if episodes.success[index] else "failure"


def told_turns(
    episodes: Episodes, index: int, roles: Sequence[str], observations: Sequence[str], responses: Sequence[str]
) -> list[str]:
    """The turns of one episode in words; says whose each one is where there are several roles."""
    turns = []
    for t in range(int(episodes.mask[index].sum())):
        role = f"{roles[int(episodes.agents[index, t])]} " if len(roles) > 1 else ""
        invalid = "   (invalid)" if episodes.invalid[index, t] else ""
        turns.append(f"  {observations[t]}\n    {role}> {responses[t]}{invalid}")
    return turns


@dataclasses.dataclass(frozen=True)
class RolloutReport:
    """What the Episodes of B episodes over a text environment do not hold.

    texts: `texts[observations[b, t, 0]]` is the observation before turn t of episode b, `texts[states[b, t]]` an equal one
      unless `state_keys.py` says what is equal.
    goals: each episode's task as text.
    responses: what the policy wrote in each episode, turn by turn.
    actions: what was found in each response and given to the environment.
    admissible: whether the environment took each of these actions for one of its commands.
    scores: f32[B], the environment's own score at the end (1 for success where it has none, NaN where that is unknown).
    failures: episode -> why it was excluded; its rows in the Episodes are empty.
    counts: for metrics: sums over the batch and, of the sampler, `decode_steps`, tokens decoded one after the other, and
      `slot_use`, the mean share of its slots, fewer towards the end, that decoded.
    """

    texts: list[str]
    goals: list[str]
    responses: list[list[str]]
    actions: list[list[str]]
    admissible: list[list[bool]]
    scores: np.ndarray
    failures: dict[int, str]
    counts: dict[str, float]

    def save(self, path: str | Path) -> None:
        """Writes JSON, atomically."""
        content = dataclasses.asdict(self) | {"scores": self.scores.tolist()}
        with atomic_write(path) as file:
            file.write(json.dumps(content, indent=1))  # ASCII: lone surrogates survive

    def story(self, episodes: Episodes, index: int, roles: Sequence[str]) -> Story:
        """One episode as a person would read it, in a terminal too. roles: names of the environment's."""
        observations = [self.texts[number] for number in episodes.observations[index, episodes.mask[index], 0]]
        turns = told_turns(episodes, index, roles, observations, self.responses[index])
        outcome = self.failures.get(index, outcome_of(episodes, index))
        return Story(printable(self.goals[index]), list(map(printable, turns)), printable(outcome))


class RolloutResult(NamedTuple):
    """What a rollout made.

    episodes: Episodes, of jax arrays from a compiled rollout (which may still be running) and of NumPy arrays from a host
      rollout.
    report: None from a compiled rollout.
    """

    episodes: Episodes
    report: RolloutReport | None
