"""Generated problems beside a plain reading of their texts, and those of files."""

import json
import re
from fractions import Fraction

import pytest

from hgpo_jax.config import load
from hgpo_jax.envs.math import data
from hgpo_jax.envs.math.calculator import calculate
from hgpo_jax.envs.math.problems import KINDS, Problems
from hgpo_jax.rollout.environments import environment
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.refusals import refused

SIZES = [(1, 1), (2, 2), (3, 1), (8, 6)]  # operations, digits
# What a sentence of a story does to the number so far.
READ = (
    (r"(?:owns|for|has) (\d+) (?:boxes|rounds)|wants (\d+) of|there are (\d+) times|for (\d+) people|becomes (\d+) times", "*"),
    (r"one of (\d+) equal|among (\d+) people|1 of (\d+) equal", "/"),
    (r"gives away (\d+)|[Tt]hen (\d+) get lost|voucher takes (\d+)|drives (\d+) km|saves (\d+) km", "-"),
    (r"finds (\d+) more|brings (\d+) more|fee of (\d+)|tea for (\d+)|adds (\d+)", "+"),
)


def told(story: str) -> Fraction:
    """The end of a story, sentence by sentence."""
    sentences = story.split(". ")
    value = Fraction(re.search(r"(\d+)(?!.*\d)", re.sub(r"and \w+ wants \d+ of them", "", sentences[0]))[1])
    if "boxes" in sentences[0] or "rounds" in sentences[0] or "wants" in sentences[0]:
        value *= int(next(filter(None, re.search(READ[0][0], sentences[0]).groups())))
    for sentence in sentences[1:-1]:
        ((number, sign),) = [
            (int(next(filter(None, match.groups()))), sign) for text, sign in READ if (match := re.search(text, sentence))
        ]
        value = {"+": value + number, "-": value - number, "*": value * number, "/": value / number}[sign]
    return value


def evaluated(expression: str, **names) -> Fraction:
    return Fraction(eval(re.sub(r"\d+", r"Fraction(\g<0>)", expression), {"Fraction": Fraction, **names}))


@pytest.mark.parametrize(("operations", "digits"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_and_solutions_are_right(kind, operations, digits):
    family = Problems((kind,), operations, digits)
    for task in range(60):
        problem = family.problem(task * 2**57 + task, held_out=task % 4 == 0)
        answer = Fraction(problem.answer)
        if kind == "arithmetic":
            assert evaluated(problem.question.removeprefix("What is ").removesuffix("?")) == answer
        elif kind == "equation":
            left, right = problem.question.removeprefix("Solve for x: ").removesuffix(".").split("=")
            assert evaluated(left, x=answer) == evaluated(right)
        else:
            assert told(problem.question) == answer
        assert len(problem.steps) == operations and calculate(problem.steps[-1])[1] == problem.answer
        values = {calculate(step)[1] for step in problem.steps}
        assert all(value.lstrip("-").isdecimal() for value in values)
        shown = set(re.findall(r"\d+", problem.question))
        # A step uses what the problem shows or an earlier step has found.
        assert all(set(re.findall(r"\d+", step)) <= shown | values for step in problem.steps)


def test_a_number_is_a_problem_for_ever():
    """A change of these texts makes published tasks other ones."""
    assert Problems().problem(0, False).question == (
        "Ada has 64 books. Soon there are 4 times as many. A friend brings 6 more. How many books does Ada have now?"
    )
    assert Problems(("equation",), 3, 1).problem(2**64 - 1, True).question == "Solve for x: ((x*3)+4)-6=25."
    assert {Problems().problem(task, True).kind for task in range(30)} == {0, 1, 2}


@pytest.mark.parametrize(("operations", "digits"), SIZES)
def test_training_and_held_out_problems_share_no_chain(operations, digits):
    family = Problems(("arithmetic", "story"), operations, digits)
    train, held_out = ({family.problem(task, part).steps for task in range(400)} for part in (False, True))
    assert train and held_out and not train & held_out


@pytest.mark.parametrize(("fields", "said"), [
    (["env.problems=poem"], "env.problems='poem'"), (["env.operations=0"], "env.operations=0"),
    (["env.digits=7"], "env.digits=7"),
    (["env.problems=[story, story]"], "env.problems=['story', 'story']: give different ones"),
    (["env.problems=[]"], "env.problems=[]: give different ones"),
])  # fmt: skip
def test_fields_out_of_range(fields, said):
    with pytest.raises(ConfigError) as caught:
        config = load(None, ["env.name=math", *fields])
        environment(config.env).text(config)
    assert said in str(caught.value)


GSM8K = {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 1,004"}
MATH = {"problem": "Half of one?", "solution": "It is $\\boxed{0.5}$.", "type": "Algebra", "level": "Level 1"}
MATH_500 = {"problem": "Ten?", "solution": "...", "answer": "10", "subject": "Number Theory"}


def folder_of(tmp_path, train, test=(GSM8K,)):
    for name, records in (("train.jsonl", train), ("test.jsonl", test)):
        lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in records]
        (tmp_path / name).write_bytes(b"\n".join(lines) + b"\n\n")
    return tmp_path


def test_the_layouts_of_gsm8k_and_math(tmp_path):
    config = load(None, ["env.name=math", f"data={folder_of(tmp_path, [GSM8K, MATH], [MATH_500])}"])
    train, test = (make() for make in environment(config.env).text(config))
    assert (len(train), len(test)) == (2, 1) and train.task_types == ("Algebra", "Number Theory", "problem")
    for env, task, answer in ((train, 0, "1004"), (train, 1, "1/2"), (test, 0, "\\boxed{10}")):
        env.reset(task)
        *_, reward, done, info = env.step(f"so <answer>{answer}</answer>")
        assert (reward, done, info["won"]) == (10.0, True, True)
    train.reset(1)
    assert (train.goal, train.task_types[train.task_type]) == ("Half of one?", "Algebra") and not hasattr(train, "expert")


ASKED = [{"role": "system", "content": "Think."}, {"role": "user", "content": "2?"}]


@pytest.mark.parametrize(("line", "found"), [
    ({"question": "2?", "answer": "72"}, "72"), ({"question": "2?", "answer": 72}, "72"),  # AIME and AMC
    ({"Problem": "2?", "Answer": 204, "Solution": "So."}, "204"),
    ({"question": "2?", "final_answer": ["$2$"]}, "$2$"),  # OlympiadBench
    ({"prompt": ASKED, "reward_model": {"ground_truth": "34", "style": "rule"}}, "34"),  # DAPO-Math, and verl's files
    ({"prompt": "2?", "solution": "34"}, "34"), ({"problem": "2?", "answer": "\\boxed{34}"}, "34"),
    ({"problem": "2?", "answer": "", "solution": "So \\boxed{34}."}, "34"),
    ({"problem": "2?", "solution": "So $\\boxed{\\left\\{ 3 \\right.}$"}, "\\left\\{ 3 \\right."),
    ({"question": "2?", "answer": "1 + 1 = 2\n#### 2", "final_answer": "3"}, "2"),
    ({"question": "2?", "answer": "A half.\n#### \\frac{1}{2}"}, "\\frac{1}{2}"),
    *[({"question": "2?", "answer": some}, some) for some in ("No solution.", "10 sq. in.", "字 " * 60 + "字")],
    ({"question": "2?", "answer": "#### 5 g"}, "5 g"), ({"question": "2?", "answer": "two lines"}, "two lines"),
    ({"prompt": [*ASKED, {"role": "assistant", "content": "So."}], "answer": "3"}, "3"),  # for supervised training
])  # fmt: skip
def test_layouts_of_the_hub(line, found, monkeypatch):
    monkeypatch.setattr(data.answers, "has_verifier", lambda: True)  # without math-verify only plain numbers are read
    assert data._read(json.dumps(line).encode(), "line 1") == ("problem", "2?", found)


@pytest.mark.parametrize(("line", "said"), [
    (b"{", "is no JSON; mend"), (b"[", "is no JSON; give one object on each line, no array"),
    (b"\xff", "is no JSON"), (b"[" * 9999, "is no JSON"), (b"3", "is no JSON object"),
    ({"question": "2?", "answer": "It is\ntwo."}, "has no answer"), ({"question": "2?", "answer": "#### "}, "has no answer"),
    ({"question": "2?", "answer": "It is two. " * 30}, "its answer has more than 200 characters"),
    ({"problem": "2?", "solution": "two"}, "has no answer"),
    ({"problem": "2?", "answer": "1" * 201}, "its answer has more than 200 characters"),
    ({"question": "2?", "answer": "The answer is 42."}, "its answer is a sentence"),
    ({"question": "2?", "answer": "She has 3 + 4 = 7 apples."}, "its answer is a sentence"),
    ({"prompt": [{"role": "assistant", "content": "So."}], "answer": "3"}, "unknown layout"),
    ({"prompt": "2?"}, "has no answer"), ({"question": [3, 4]}, "unknown layout"), ({}, "unknown layout"),
    ({"prompt": "2?", "reward_model": {}}, "has no answer"), ({"question": "2?", "answer": None}, "has no answer"),
])  # fmt: skip
def test_damaged_lines_are_named(line, said, tmp_path):
    folder = folder_of(tmp_path, [GSM8K, line])
    config = load(None, ["env.name=math", f"data={folder}"])
    with refused(f"env.data={folder}: train.jsonl, line 2: {said}", ConfigError):
        environment(config.env).text(config)


def test_files_and_packages_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(data.answers, "has_verifier", lambda: False)
    with refused("train.jsonl, line 1: the answer '\\\\frac{1}{2}' needs math-verify"):
        data.load(folder_of(tmp_path, [{"problem": "Half?", "answer": "\\frac{1}{2}"}]))
    assert not data.load(folder_of(tmp_path, [MATH])).latex  # plain numbers do not need it
    with refused("test.jsonl: is empty"):
        data.load(folder_of(tmp_path, [GSM8K], []))
    (tmp_path / "train.jsonl").unlink()
    with refused("has no train.jsonl"):
        data.load(tmp_path)
    config = load(None, ["env.name=math", f"data={tmp_path}", "env.digits=3"])
    with refused(f"env.digits=3: env.data={tmp_path} has the problems", ConfigError):
        environment(config.env).text(config)
