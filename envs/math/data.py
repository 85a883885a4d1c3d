"""Problems from JSON Lines in the layouts of GSM8K, MATH and those that follow them: a folder with train.jsonl and test.jsonl.

A line has a `question`, `problem` or `prompt`, a text or chat messages, of which the user's last is asked (DAPO-Math, verl).
Its `answer`, `final_answer` or verl's `reward_model.ground_truth` is the answer, or ends with "#### " and it, as GSM8K's; else
a `solution` is, or has it in \\boxed{}, as MATH's. `type` or `subject`, if there is one, is the kind of the problem.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from hgpo_jax.envs.math import answers
from hgpo_jax.envs.math.problems import Problem

FILES = ("train.jsonl", "test.jsonl")
QUESTIONS = ("question", "problem", "Question", "Problem", "prompt")
ANSWERS = ("answer", "Answer", "final_answer")
_WORD, _VERB = (
    re.compile(r"[^\W\d_]{2,}"),
    re.compile(r"=|\b(?:is|are|was|were|has|have|had|will|gives?|gets?|equals?)\b", re.IGNORECASE),
)
_BEGINNING = re.compile(r"(?:(?:so|thus|hence|therefore),? )?the (?:final )?answer is\b", re.IGNORECASE)
NO_VERIFIER = "needs math-verify to compare it; pip install 'hgpo_jax[math]'"


class Data(NamedTuple):
    """The problems of a folder. kinds: their names in both files. latex: whether some answers are no plain numbers."""

    train: list[Problem]
    test: list[Problem]
    kinds: tuple[str, ...]
    latex: bool


def load(folder: str | Path) -> Data:
    """Reads the problems in a folder.

    Raises:
      ValueError: a file is missing or empty, a line is damaged or has another layout, or needs math-verify, which is missing
        or does not work.
    """
    parts = []
    for name in FILES:
        if not (file := Path(folder, name)).is_file():
            raise ValueError(f"has no {name}; give a folder with {' and '.join(FILES)}")
        lines = enumerate(file.read_bytes().splitlines(), 1)
        parts.append([_read(line, f"{name}, line {number}") for number, line in lines if line.strip()])
        if not parts[-1]:
            raise ValueError(f"{name}: is empty; give a problem on each line")
    kinds = tuple(sorted({kind for part in parts for kind, *_ in part}))
    train, test = ([Problem(question, answer, kinds.index(kind)) for kind, question, answer in part] for part in parts)
    latex = any(answers.number(answer) is None for part in parts for *_, answer in part)
    if latex and (fault := answers.verifier_fault()):
        mend = "; pip install antlr4-python3-runtime==4.13.2" if "antlr" in fault.lower() else ""
        raise ValueError(f"math-verify cannot compare its answers here: {fault}{mend}")
    return Data(train, test, kinds, latex)


def _read(line: bytes, where: str) -> tuple[str, str, str]:
    """Reads a line: (kind, question, answer). Raises ValueError, naming the line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        mend = "give one object on each line, no array" if line.lstrip().startswith(b"[") else "mend or remove it"
        raise ValueError(f"{where}: is no JSON; {mend}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: is no JSON object; give one with question and answer, or with problem and solution")
    question = next(filter(None, (_text(record.get(name)) for name in QUESTIONS)), "")
    if not question:
        raise ValueError(f"{where}: unknown layout; give question and answer as GSM8K, or problem and solution as MATH")
    answer = _answer(record)
    if not answer:
        marks = "an answer, \"#### \" and a number at its end as GSM8K's, or \\boxed{} in a solution as MATH's"
        raise ValueError(f"{where}: has no answer; give {marks}")
    if len(answer) > answers.LENGTH:
        raise ValueError(f"{where}: its answer has more than {answers.LENGTH} characters; shorten it, or remove the line")
    if answers.number(answer) is None and _is_sentence(answer):
        raise ValueError(f"{where}: its answer is a sentence, {answer!r:.60}, which none would give; give the result alone")
    if answers.number(answer) is None and not answers.has_verifier():
        raise ValueError(f"{where}: the answer {answer!r:.40} {NO_VERIFIER}")
    return _text(record.get("type")) or _text(record.get("subject")) or "problem", question, answer


def _is_sentence(answer: str) -> bool:
    """Whether an answer is a whole sentence, as of a solution, which nobody would give word for word."""
    ends = answer.rstrip().endswith((".", "!", "?")) and len(_WORD.findall(answer)) >= 3
    return "\\" not in answer and bool((ends and _VERB.search(answer)) or _BEGINNING.match(answer))


def _answer(record: dict[str, Any]) -> str:
    """Returns the answer of a record, "" if none is found."""
    of_reward = record.get("reward_model")
    values = [record.get(name) for name in ANSWERS] + [of_reward.get("ground_truth") if isinstance(of_reward, dict) else None]
    for text in filter(None, map(_text, values)):
        _, mark, last = text.rpartition("####")
        if mark:
            return last.strip() if "\n" not in last.strip() else ""
        if answer := answers.boxed(text) or (text if "\n" not in text else ""):
            return answer
    solution = _text(record.get("solution"))
    return answers.boxed(solution) or (solution if answers.number(solution) is not None else "")


def _text(value: Any) -> str:
    """Returns a text or number as text, of a list with one item that, and of chat messages the user's last; "" for others."""
    if isinstance(value, list) and value:
        if all(isinstance(message, dict) for message in value):
            asked = [message for message in value if message.get("role", "user") == "user"]
            return _text(asked[-1].get("content")) if asked else ""
        return _text(value[0]) if len(value) == 1 else ""
    return value.strip() if isinstance(value, str) else str(value) if type(value) in (int, float) else ""
