"""Questions that are answered by searching: `reset(task)` and `step(action)`.

    env = GeneratedSearch.open("runs/cache/search")
    observation, commands = env.reset(7)
    observation, commands, reward, done, info = env.step("<search> nomor leholm</search>")
    observation, commands, reward, done, info = env.step("<answer> fenwick dunstead</answer>")

An action is a response after its thought: one `<search>...</search>`, which is answered by the best passages, or one
`<answer>...</answer>`, which ends the episode. Commands are not listed, because any words may be searched for.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from hgpo_jax.envs.search import scores
from hgpo_jax.envs.search.passages import Passages
from hgpo_jax.envs.search.world import TASK_TYPES, Question, World

WON_REWARD = 10.0  # as in the other environments
MAX_ACTION, MAX_PASSAGE = 10_000, 4000  # characters: of an action that is read at all, and of a passage that is shown
BEGINNING, NOTHING, END = "nothing searched yet.", "no passage has any of these words.", "the answer is given."
VERBS = ("search", "answer")


class Retriever(Protocol):
    """Finds passages: `passages.Passages` here, `retrieval_client.RetrievalServer` elsewhere."""

    def retrieve(self, queries: Sequence[str], k: int) -> list[list[tuple[str, float]]]:
        """retrieve(queries, k) -> for each query at most k passages with their scores, best first"""
        ...


class Action(NamedTuple):
    """What an action asks for. verb: "" if it is malformed. alone: whether nothing stands around it."""

    verb: str
    text: str = ""
    alone: bool = False


def parse(action: str, verbs: Sequence[str] = VERBS) -> Action:
    """Reads an action: the first pair of tags of a verb. A tag that is mentioned before has no end, and counts as words.

    One without a pair of tags, without words between them, or longer than `MAX_ACTION` is malformed.
    """
    if len(action) > MAX_ACTION:
        return Action("")
    names = "|".join(verbs)
    pair = re.search(rf"<({names})>((?:(?!<\1>).)*?)</\1>", action, re.DOTALL)
    if pair is None or not (text := " ".join(pair[2].split())):
        return Action("")
    return Action(pair[1], text, not (action[: pair.start()] + action[pair.end() :]).strip())


def shown(passage: str) -> str:
    """Returns a passage as it is read: in one line, and without a title that its text begins with.

    passage: `"title"` in quotes and a line break before the text, as in Search-R1's corpora, or a text alone.
    """
    head, line_break, rest = passage.partition("\n")
    quoted, text = head.strip(), " ".join(rest.split())
    if not line_break or len(quoted) < 3 or not quoted[0] == quoted[-1] == '"':
        return " ".join(passage.split())[:MAX_PASSAGE]
    title = quoted.strip('"')
    return (text if re.match(rf"{re.escape(title)}(?!\w)", text) else f"{title}: {text}")[:MAX_PASSAGE]


class SearchText:
    """Questions answered one at a time, with at most `max_turns` actions each.

    Args:
      question: returns the question of a task.
      retriever: what answers searches.
      top_k: passages for a search.

    Attributes:
      goal: the question of the running episode. task_type: its type, an index into task_types.
      signals: `exact_match` and `f1` of an answer, 0 before it, and `format`, whether a response is one action and no more.
    """

    signals: tuple[str, ...] = ("exact_match", "f1", "format")
    task_types: tuple[str, ...] = ("question",)

    def __init__(self, question: Callable[[int], Question], retriever: Retriever, top_k: int = 3, max_turns: int = 20):
        if top_k < 1 or max_turns < 1:
            raise ValueError(f"top_k={top_k}, max_turns={max_turns}: must both be at least 1")
        self._question_of, self._retriever, self._top_k, self.max_turns = question, retriever, top_k, max_turns

    def reset(self, task: int) -> tuple[str, list[str]]:
        """Starts a task; returns the first observation, and no commands."""
        self._question = self._question_of(task)
        self.goal, self.task_type = self._question.text, self._question.task_type
        self._turns, self._observation = 0, BEGINNING
        self._passages: list[str] = []  # found since the reset, by the newest search first
        return self._observation, []

    def step(self, action: str) -> tuple[str, list[str], float, bool, dict]:
        """Performs one action; a malformed one shows the same passages again.

        Returns: (observation, no commands, reward, done, info). The reward is 10 for an answer that matches exactly, else 0.
        `info` holds `won`, `admissible`, `truncated`, `score`, which is F1, and `signals`. An observation is only what was
        found, so that episodes that found the same are in the same state. Raises what the retriever raises.
        """
        verb, text, alone = parse(action)
        signals = {"exact_match": 0.0, "f1": 0.0, "format": float(alone)}
        if verb == "answer":
            signals |= self._scores(text)
            self._observation = END
        elif verb == "search":
            lines = self._search(text)
            self._observation = "\n".join(f"({number}) {line}" for number, line in enumerate(lines, 1)) or NOTHING
        reward, done, info = self._outcome(verb, signals)
        return self._observation, [], reward, done, info

    def _search(self, query: str) -> list[str]:
        """Returns the passages found, which are remembered."""
        ((*found,),) = self._retriever.retrieve([query], self._top_k)
        lines = [shown(passage) for passage, _ in found]
        self._passages = [*lines, *self._passages]
        return lines

    def _scores(self, answer: str) -> dict[str, float]:
        """Returns an answer's signals."""
        accepted = self._question.answers
        return {"exact_match": scores.exact_match(answer, accepted), "f1": scores.f1(answer, accepted)}

    def _outcome(self, verb: str, signals: dict[str, float]) -> tuple[float, bool, dict]:
        """Counts a turn, which took the action `verb`; returns (reward, done, info)."""
        self._turns += 1
        match, done = signals["exact_match"], verb == "answer" or self._turns >= self.max_turns
        info = {"won": match == 1, "admissible": bool(verb), "truncated": done and verb != "answer", "score": signals["f1"]}
        return WON_REWARD * match, done, info | {"signals": signals}


class GeneratedSearch(SearchText):
    """Questions about a generated world (`world.World`). A task is a 64-bit number.

    Args:
      world: what is asked about. held_out: whether the held-out entities are, or the others.
      Others as in `SearchText`.
    """

    task_types = TASK_TYPES

    def __init__(self, world: World, retriever: Retriever, held_out: bool = False, top_k: int = 3, max_turns: int = 20):
        super().__init__(functools.partial(world.question, held_out=held_out), retriever, top_k, max_turns)

    @classmethod
    def open(
        cls,
        cache: str | Path,
        passages: int = 3000,
        held_out: bool = False,
        retriever: Retriever | None = None,
        top_k: int = 3,
        max_turns: int = 20,
    ) -> GeneratedSearch:
        """Opens a world; its index is built in the folder `cache` once. Raises ValueError."""
        world = _world(passages)
        return cls(world, retriever or world_passages(Path(cache), world), held_out, top_k, max_turns)

    def expert(self, history_length: int) -> str:
        """Returns the action of a player that searches for the entities to read about, one after another, and then answers.

        It knows whom to ask for next as soon as the passage that tells it has been found.
        """
        missing = self._missing()
        return f"<search> {missing}</search>" if missing else f"<answer> {self._question.answers[0]}</answer>"

    def _missing(self) -> str:
        """Returns the entity whose passage is needed next, or "" where all have been found."""
        unread = (name for name in self._question.chain if not any(p.startswith(f"{name} was") for p in self._passages))
        return next(unread, "")


@functools.lru_cache(maxsize=2)
def _world(passages: int) -> World:
    """Makes a world; environments of one process share it."""
    return World(passages)


def world_passages(cache: Path, world: World) -> Passages:
    """Returns the passages of a world as a corpus. Raises ValueError, also for a folder that cannot be written."""
    source = lambda: (f'"{title}"\n{text}' for title, text in map(world.passage, range(len(world))))  # noqa: E731
    try:
        return Passages.open(cache, f"world-{world.key}-{len(world)}", source)
    except OSError as error:
        raise ValueError(f"cannot build the index of the passages: {error}") from None
