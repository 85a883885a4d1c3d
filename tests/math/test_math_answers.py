"""Whether answers are right: plain numbers exactly, LaTeX by math-verify, and nothing hangs."""

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hgpo_jax.envs.math import answers, data
from hgpo_jax.envs.math.answers import LENGTH, boxed, is_right, number
from tests.helpers.refusals import refused


@given(st.integers(-(10**9), 10**9), st.integers(0, 999))
def test_numbers_are_read_exactly(whole, part):
    value = abs(whole) + Fraction(part, 1000)
    for text in (f"{abs(whole):,}.{part:03d}", f"  +${abs(whole)}.{part:03d}. "):
        assert number(text) == value
    assert number(f"-{abs(whole)}/7") == Fraction(-abs(whole), 7)


@pytest.mark.parametrize("text", ["", "abc", "1.5/2", "1/0", "1e5", "12,34", "--3", "1 2", "٣", "9**9**9", "nan", "9" * 999])
def test_other_texts_are_no_numbers(text):
    assert number(text) is None


@pytest.mark.parametrize(("answer", "right", "wanted"), [
    ("72", "72", True), (" 72.0 ", "72", True), ("$1,000", "1000", True), ("\\boxed{0.5}", "1/2", True),
    ("71.999", "72", False), ("0.3333333333333333", "1/3", False), ("", "72", False), ("72 apples", "72", False),
    ("9**9**9", "72", False), ("$18$", "18", True), ("\\(18\\)", "18", True), ("\\[ 18. \\]", "18", True),
    ("\\$18", "18", True), ("10{,}000", "10000", True), ("10,\\!000", "10000", True), ("\u22123", "-3", True),
    ("$18", "18", True), ("$5$6$", "56", False),
    ("\\frac{144}{2}", "72", False), ("144/2", "72", False), ("72/1", "72", False), ("144/2", "144/2", True),
    ("6/8", "3/4", True), ("1/2", "0.5", True), ("+5", "5", True), ("7" * LENGTH + "2", "72", False), ("{" * 100, "72", False),
    ("72" + " " * 10**5, "72", False),
])  # fmt: skip
def test_plain_answers(answer, right, wanted):
    assert is_right(answer, right) is wanted


@pytest.mark.parametrize(("text", "wanted"), [
    ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"), ("$\\boxed 5$ it is", "5"), ("\\fbox{3} or \\boxed{a{b}c}", "a{b}c"),
    ("none", None), ("\\boxed{1", None), ("\\boxed", None),
])  # fmt: skip
def test_the_last_box_holds_the_answer(text, wanted):
    assert boxed(text) == wanted


@pytest.mark.needs("math-verify")
def test_latex_is_compared_and_never_hangs(monkeypatch):
    right = [("0.5", "\\frac{1}{2}"), ("\\boxed{\\frac{10}{2}}", "5"), ("1+x^2", "x^2+1"), ("\\sqrt{12}", "2\\sqrt{3}")]
    work = "3+1", "4!", "2\\cdot 2", "2\\cdot2", "1\\times4", "7 - 3", "2^2", "\\sqrt{16}", "x = 5 - 1", "8 / 2", "x=8/2"
    work += "8:2", "8 \\over 2", "\\operatorname{lcm}(2,4)", "\\lvert -4\\rvert"
    for answer in (*work, "\\log_2 16", "\\gcd(8,12)", "\\left|-4\\right|", "\\lfloor 4.5 \\rfloor", "4\\sin(\\frac{\\pi}{2})"):
        assert not is_right(answer, "4", latex=True)
    right += [("Answer: 4", "4"), ("72\\deg", "72")]
    right += [
        ("4\\text{ apples}", "4"),
        ("x=4", "4"),
        ("-\\frac{8}{2}", "-4"),
        ("90^\\circ", "90"),
        ("16\\text{ cm}^2", "16"),
        ("16 \\text{ cm}^{2}", "16"),
        ("5\\times 10^{3}", "5000"),
        ("x - 1", "x-1"),
    ]
    wrong = [("0.51", "\\frac{1}{2}"), ("9^{9^{9}}", "5"), ("100000000!", "5"), ("{" * 99, "\\pi"), ("(" * 150, "5"), ("", "5")]
    for answer, wanted in [*right, *wrong, *right]:  # the process is replaced in between
        monkeypatch.setattr(answers, "TIME_LIMIT", 60.0 if (answer, wanted) in right else 0.5)  # some wrong ones never end
        assert is_right(answer, wanted, latex=True) is ((answer, wanted) in right)


def test_a_process_that_dies_counts_as_wrong_and_is_said_before_a_run_begins(monkeypatch, tmp_path):
    monkeypatch.setattr(answers, "__file__", "/nowhere.py")
    verifier = answers._Verifier()
    monkeypatch.setattr(answers, "_VERIFIER", verifier)
    assert "/nowhere.py" in answers.verifier_fault()
    monkeypatch.setattr(answers, "has_verifier", lambda: True)
    line = json.dumps({"problem": "Half?", "answer": "\\frac{1}{2}"})
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(line)
    with refused("math-verify cannot compare its answers here: "):
        data.load(tmp_path)
    assert not verifier.agrees("x", "x") and not verifier.agrees("x", "x")
    verifier.close()
