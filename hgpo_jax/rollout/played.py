"""A batch of episodes while a host rollout plays it, and the report of it afterwards."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from envs.cli import printable
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.players import Failed, Seen
from hgpo_jax.rollout.text import Answer, View

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Report:
    """What a batch's Episodes do not hold.

    texts: `texts[states[b, t]]` is the observation before turn t of episode b.
    goals: each episode's task as text.
    responses: what each episode's policy wrote, turn by turn.
    scores: f32[B], the environment's own score at the end (1 for success where it has none).
    failures: episode -> why it was excluded; its rows in the Episodes are empty.
    counts: sums over the batch, for metrics.
    """

    texts: list[str]
    goals: list[str]
    responses: list[list[str]]
    scores: np.ndarray
    failures: dict[int, str]
    counts: dict[str, int]

    def save(self, path: str | Path) -> None:
        """Writes JSON, whole or not at all."""
        path = Path(path)
        partial = path.with_suffix(".partial")
        content = dataclasses.asdict(self) | {"scores": self.scores.tolist()}
        partial.write_text(json.dumps(content, indent=1), encoding="utf-8")  # ASCII: lone surrogates survive
        os.replace(partial, path)

    def transcript(self, episodes: Episodes, index: int) -> str:
        """One episode as a person would read it, in a terminal too."""
        outcome = "success" if episodes.success[index] else "failure"
        lines = [f"task: {self.goals[index]} ({self.failures.get(index, outcome)})"]
        for t in range(int(episodes.mask[index].sum())):
            invalid = "   (invalid)" if episodes.invalid[index, t] else ""
            lines += [f"  {self.texts[episodes.states[index, t]]}", f"    > {self.responses[index][t]}{invalid}"]
        return printable("\n".join(lines))


class Played:
    """A batch of episodes while it is played."""

    def __init__(self, history_length: int):
        self._history_length = history_length
        self.now: dict[int, Seen] = {}  # the latest answer of each episode that has not failed
        self._observations: dict[int, list[str]] = defaultdict(list)
        self._actions: dict[int, list[str]] = defaultdict(list)
        self.responses: dict[int, list[str]] = defaultdict(list)
        self.failures: dict[int, str] = {}
        self.counts = Counter(malformed=0, unfinished=0, pairs_dropped=0, prompts_cut=0)
        self.inadmissible = 0

    def see(self, row: int, shown: Seen | Failed) -> Seen | None:
        """Takes what an environment shows; None if the episode has failed."""
        if isinstance(shown, Failed):
            self.failures[row] = shown.reason
            self.now.pop(row, None)
            log.warning("episode %d is excluded: %s", row, shown.reason)
            return None
        self.now[row] = shown
        self._observations[row].append(shown.observation)
        self.inadmissible += not shown.admissible
        return shown

    def turns(self, row: int) -> int:
        """Actions taken in an episode."""
        return len(self._actions[row])

    def view(self, row: int) -> View:
        """What the agent of an episode knows."""
        seen, actions = self.now[row], self._actions[row]
        begin = max(0, len(actions) - self._history_length)
        history = list(zip(self._observations[row][begin:], actions[begin:], strict=False))
        return View(seen.goal, history, len(actions), seen.observation, seen.commands)

    def act(self, row: int, answer: Answer) -> tuple[str, ...]:
        """All actions of an episode with this new one."""
        self._actions[row].append(answer.action)
        self.responses[row].append(answer.text)
        return tuple(self._actions[row])

    def states(self) -> tuple[list[str], dict[int, list[int]]]:
        """All texts seen in episodes that have not failed, and for each such episode which of them it saw, turn by turn.

        Texts are numbered by episode and turn: which environment was faster than another does not show.
        """
        texts: dict[str, int] = {}
        rows = {row: [texts.setdefault(text, len(texts)) for text in self._observations[row]] for row in sorted(self.now)}
        return list(texts), rows

    def count(self, prompt, ended: bool, well_formed: bool) -> None:
        self.counts["malformed"] += not well_formed
        self.counts["unfinished"] += not ended
        self.counts["pairs_dropped"] += prompt.pairs_dropped
        self.counts["prompts_cut"] += prompt.tokens_cut > 0
