"""Problems from JSON Lines in the layouts of GSM8K and MATH: a folder with train.jsonl and test.jsonl.

GSM8K's lines have `question` and `answer`, whose last line is "#### " and a number. MATH's have `problem`, and `answer` or a
`solution` with the answer in \\boxed{}; `type` or `subject`, if they have one, is the kind of the problem.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from hgpo_jax.envs.math import answers
from hgpo_jax.envs.math.problems import Problem

FILES = ("train.jsonl", "test.jsonl")
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
    text = lambda name: value if isinstance(value := record.get(name), str) and value.strip() else ""  # noqa: E731
    if not isinstance(record, dict):
        raise ValueError(f"{where}: is no JSON object; give one with question and answer, or with problem and solution")
    if question := text("question"):
        _, mark, answer = text("answer").rpartition("####")
        if not mark or answers.number(answer) is None:
            raise ValueError(f'{where}: answer has no "#### " and a number at its end, as GSM8K\'s do')
    elif question := text("problem"):
        plain = record.get("answer")
        answer = str(plain) if type(plain) in (int, float) else text("answer") or answers.boxed(text("solution")) or ""
        if not answer:
            raise ValueError(f"{where}: has no answer, and no \\boxed{{}} in its solution, as MATH's do")
    else:
        raise ValueError(f"{where}: unknown layout; give question and answer as GSM8K, or problem and solution as MATH")
    answer = answer.strip()
    if len(answer) > answers.LENGTH:
        raise ValueError(f"{where}: its answer has more than {answers.LENGTH} characters; shorten it, or remove the line")
    if answers.number(answer) is None and not answers.has_verifier():
        raise ValueError(f"{where}: the answer {answer!r:.40} {NO_VERIFIER}")
    return text("type") or text("subject") or "problem", question.strip(), answer
