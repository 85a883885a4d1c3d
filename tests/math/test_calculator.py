"""The calculator beside Python's own arithmetic of fractions, and what it refuses."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hgpo_jax.envs.math.calculator import DEPTH, DIGITS, LENGTH, PLACES, CalculatorError, calculate, written
from tests.helpers.refusals import refused

ATOMS = st.integers(0, 99).map(str)
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner).map("".join),
        inner.map("({})".format),
        inner.map("-{}".format),
        st.tuples(ATOMS, st.sampled_from(["^", "**"]), st.sampled_from(["0", "1", "2", "-2", "(3-1)", "2^2"])).map("".join),
    ),
    max_leaves=6,
)


def by_python(expression: str) -> Fraction:
    return Fraction(eval(re.sub(r"\d+", r"Fraction(\g<0>)", expression.replace("^", "**")), {"Fraction": Fraction}))


@given(EXPRESSIONS)
def test_it_computes_what_python_does(expression):
    try:
        wanted = by_python(expression)
    except ZeroDivisionError:
        with refused("division by zero", CalculatorError):
            calculate(expression)
        return
    spelled, value = calculate(expression)
    assert spelled == expression.replace("**", "^") and Fraction(value) == wanted


@pytest.mark.parametrize(("expression", "value"), [
    ("(12 + 7) * 3", "57"), ("7/3", "7/3"), ("-7/8", "-0.875"), ("10/4", "2.5"), ("1,234.50*2", "2469"), (".5+.25", "0.75"),
    ("20% * 15", "3"), ("50%%", "0.005"), ("6 × 7 − 2", "40"), ("9÷3·2", "6"), ("-2^2", "-4"), ("2^-3", "0.125"),
    ("2^3^2", "512"), ("0^0", "1"), ("(-1)^999999999999", "-1"), ("0.1+0.2", "0.3"), ("1/7*7", "1"),
    ("1/2^12", "0.000244140625"), ("1/2^13", "1/8192"), ("9" * DIGITS, "9" * DIGITS),
])  # fmt: skip
def test_worked_examples(expression, value):
    assert calculate(expression)[1] == value


@given(st.fractions(max_denominator=10**6))
def test_a_written_value_reads_as_itself(value):
    text = written(value)
    assert Fraction(text) == value and len(text.partition(".")[2]) <= PLACES
    assert calculate(f"({text})")[1] == text


@pytest.mark.parametrize(("expression", "why"), [
    ("", "a number is missing"), ("1+", "a number is missing"), ("()", ") is out of place"), ("3 4", "4 is out of place"),
    ("(1", "not closed"), ("1)", ") is out of place"), ("*2", "* is out of place"), ("1/0", "division by zero"),
    ("0^-1", "division by zero"), ("2^0.5", "whole number"), ("x+1", "cannot read 'x'"), ("1//2", "/ is out of place"),
    ("__import__('os')", "cannot read '_'"), ("1e9", "cannot read 'e'"), ("٣", "cannot read"), ("1.2.3", "out of place"),
    ("9**9**9", "digits"), ("9^9^9^9", "digits"), ("10^-99", "digits"), ("9^60*999", "digits"), ("1/(7^50)/(7^50)", "digits"),
    ("9" * (DIGITS + 1), "digits"), ("1" * 100_000, f"more than {LENGTH} characters"), ("(" * LENGTH, f"than {DEPTH} levels"),
    ("-" * LENGTH, f"more than {DEPTH} levels"), ("2^" * 99 + "2", f"more than {DEPTH} levels"), ("\n", "is missing"),
])  # fmt: skip
def test_refusals(expression, why):
    with refused(why, CalculatorError):
        calculate(expression)


@given(st.text("0123456789.,+-*/^%() x\n", max_size=LENGTH))
def test_any_text_has_a_value_or_a_short_error(text):
    try:
        _, value = calculate(text)
    except CalculatorError as error:
        assert len(str(error)) < 100 and "\n" not in str(error)
    else:
        assert len(value) <= 2 * DIGITS + 2
