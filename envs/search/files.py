"""Questions and passages in JSON Lines, as NQ, HotpotQA, FlashRAG and Search-R1 publish them.

    train.jsonl, test.jsonl    questions to train on, held-out ones; FlashRAG's dev.jsonl is read where there is no test.jsonl
    questions.jsonl            instead of both: every tenth one is held out
    passages.jsonl             passages; corpus.jsonl is read where there is none. Not needed with a retrieval server

A question is {"question": "...", "golden_answers": ["...", ...]}, or has "answers", "answer" or "possible_answers": a text, a
list, also a printed one, SQuAD's "text", or TriviaQA's value and aliases; MuSiQue's "answer_aliases" count, too, and verl's
"reward_model" where there is nothing else. A passage is {"id": "...", "contents": "\"title\"\ntext"} as in Search-R1 and
FlashRAG, or {"title": "...", "text": "..."} as in BEIR. Other fields are ignored.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hgpo_jax.envs.search.passages import Passages
from hgpo_jax.envs.search.text import Retriever, SearchText
from hgpo_jax.envs.search.world import Question

PASSAGES = ("passages.jsonl", "corpus.jsonl")
HELD_OUT = 10  # of questions.jsonl, every tenth
MAX_QUESTION, MAX_LINE = 4000, 10_000_000  # characters of a question and of each of its answers; bytes of a line
_QUESTION = '{"question": "...", "golden_answers": ["..."]}'
_PASSAGE = '{"id": "...", "contents": "..."}'


class FileSearch(SearchText):
    """Questions of a file. Task n is the question of number n.

    Args:
      questions: at least one. Others as in `SearchText`.
    """

    def __init__(self, questions: tuple[Question, ...], retriever: Retriever, top_k: int = 3, max_turns: int = 20):
        super().__init__(self._numbered, retriever, top_k, max_turns)
        self._questions = questions

    @classmethod
    def open(
        cls, folder: Path, cache: Path, held_out: bool, retriever: Retriever | None = None, top_k: int = 3, max_turns: int = 20
    ) -> FileSearch:
        """Opens a folder; an index of its passages is built in the folder `cache` once. Raises ValueError."""
        questions = read_folder(str(folder))[held_out]
        return cls(questions, retriever or folder_passages(folder, cache), top_k, max_turns)

    def __len__(self) -> int:
        return len(self._questions)

    def _numbered(self, task: int) -> Question:
        if not 0 <= task < len(self):
            raise IndexError(f"task={task}: there are {len(self)} questions")
        return self._questions[task]


@functools.lru_cache(maxsize=2)
def read_folder(folder: str) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Reads the questions of a folder: those for training, and the held-out ones. Raises ValueError."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"{folder} is no folder; give one with questions in JSON Lines (envs/search/files.py)")
    train, together = path / "train.jsonl", path / "questions.jsonl"
    held_out = next((path / name for name in ("test.jsonl", "dev.jsonl") if (path / name).is_file()), None)
    if train.is_file() and held_out:
        return read_questions(train), read_questions(held_out)
    if not together.is_file():
        raise ValueError(
            f"{folder}: holds neither train.jsonl with test.jsonl or dev.jsonl, nor questions.jsonl; put them there"
        )
    questions = read_questions(together)
    if len(questions) < HELD_OUT:
        raise ValueError(f"{together}: has {len(questions)} questions; give {HELD_OUT} or more, since every tenth is held out")
    return tuple(q for n, q in enumerate(questions, 1) if n % HELD_OUT), questions[HELD_OUT - 1 :: HELD_OUT]


_TEXT = r"""(?:'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")"""
_QUOTED, _OF_NUMPY = re.compile(_TEXT), re.compile(rf"\[\s*{_TEXT}(?:\s+{_TEXT})+\s*\]")


def read_questions(file: Path) -> tuple[Question, ...]:
    """Reads a file of questions. Raises ValueError, which names the file and the line."""
    questions = []
    for place, record in _records(file):
        text, answers = record.get("question"), _answers(record)
        if not answers or not all(map(_is_text, [text, *answers])):
            raise ValueError(f"{place}: is no question; expected {_QUESTION}, texts of 1 to {MAX_QUESTION} characters")
        questions.append(Question(" ".join(str(text).split()), tuple(answers)))
    if not questions:
        raise ValueError(f"{file}: has no questions; give one a line, {_QUESTION}")
    return tuple(questions)


def _answers(record: dict[str, Any]) -> list[Any]:
    """Returns the answers of a record, each once, without empty ones."""
    of_reward = record.get("reward_model")
    truth = of_reward.get("ground_truth") if isinstance(of_reward, dict) else None
    given = [record.get(name) for name in ("golden_answers", "answers", "answer", "possible_answers")]
    given.append(truth.get("target") if isinstance(truth, dict) else truth)
    value: Any = next((value for value in given if value not in (None, [], "")), [])
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        value = _printed_list(value) or value
    if isinstance(value, dict) and isinstance(value.get("text"), list):  # SQuAD's
        value = value["text"]
    elif isinstance(value, dict):  # TriviaQA's
        value = [value.get("value"), *(value.get("aliases") or [])]
    aliases = record.get("answer_aliases") or []  # MuSiQue's
    found = [*(value if isinstance(value, list) else [value]), *(aliases if isinstance(aliases, list) else [aliases])]
    found = [str(each) if type(each) in (int, float) else each for each in found]
    empty = lambda each: each is None or (isinstance(each, str) and not each.strip())  # noqa: E731
    return [each for n, each in enumerate(found) if not empty(each) and each not in found[:n]]


def _printed_list(text: str) -> list[str]:
    """Returns the texts in a list that was printed: by NumPy, whose lists have no commas, as JSON, or by Python; else []."""
    if _OF_NUMPY.fullmatch(text):
        return list(map(ast.literal_eval, _QUOTED.findall(text)))
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found = read(text)
            return found if isinstance(found, list) and all(isinstance(each, str) for each in found) else []
    return []


def read_passages(file: Path) -> Iterator[str]:
    """Yields the passages of a file. Raises ValueError, which names the file and the line."""
    for place, record in _records(file):
        contents = record.get("contents")
        if contents is None and isinstance(record.get("title"), str) and isinstance(record.get("text"), str):
            contents = f'"{record["title"]}"\n{record["text"]}'
        if not isinstance(contents, str) or not contents.strip():
            raise ValueError(f"{place}: is no passage; expected {_PASSAGE}")
        yield contents


def folder_passages(folder: Path, cache: Path, instead: str = "") -> Passages:
    """Returns the passages of a folder, whose index is found by the hash of their file. Raises ValueError.

    instead: what may be done where there are none, for the error.
    """
    file = next((folder / name for name in PASSAGES if (folder / name).is_file()), None)
    if file is None:
        raise ValueError(f"{folder}: holds no {' or '.join(PASSAGES)}; put it there{instead}")
    about = file.stat()
    try:
        return Passages.open(cache, f"corpus-{_digest(file, about.st_size, about.st_mtime_ns)}", lambda: read_passages(file))
    except OSError as error:
        raise ValueError(f"{folder}: cannot build the index of its passages: {error}") from None


@functools.lru_cache(maxsize=4)
def _digest(file: Path, size: int, changed: int) -> str:
    """Returns the hash of a file; size and time of its last change tell when it has to be read again."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:32]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and len(value) <= MAX_QUESTION


def _records(file: Path) -> Iterator[tuple[str, dict]]:
    """Yields the place (file and line number) and the JSON object of every line that is not blank. Raises ValueError."""
    number = 0
    with open(file, "rb") as opened:
        while line := opened.readline(MAX_LINE + 1):
            number += 1
            place = f"{file} line {number}"
            if len(line) > MAX_LINE:
                raise ValueError(f"{place}: is longer than {MAX_LINE:,} bytes; give one JSON object a line")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: is no JSON ({error}); mend or remove it") from None
            if not isinstance(record, dict):
                raise ValueError(f"{place}: is no JSON object; give one a line")
            yield place, record
