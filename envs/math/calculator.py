"""The calculator: exact arithmetic on the text of an expression.

    calculate("(12 + 7) * 3")     # ("(12+7)*3", "57")
    calculate("7 / 3")            # ("7/3", "7/3")

An expression has decimal numbers, brackets, + - * / and ^ (also written **, × ÷ − ·), and % after a number for hundredths.
Numbers are fractions, so nothing is rounded. A value is written as a whole number, as a decimal if it ends within PLACES
digits, or as a fraction a/b. The text is read by recursive descent, never run as a program; every size has a bound that is
checked before anything is computed, so that a call takes a millisecond at most.
"""

from __future__ import annotations

import re
from fractions import Fraction

LENGTH = 200  # characters of an expression
DEPTH = 20  # brackets, signs and powers inside one another
DIGITS = 60  # of a number, and of the numerator and the denominator of a value
PLACES = 12  # digits after the point of a value that is not written as a fraction
_LARGEST = 10**DIGITS
_TOKEN = re.compile(r"\s*(?:(\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)|(\*\*|[-+*/^%()]))", re.ASCII)
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})


class CalculatorError(ValueError):
    """An expression without a value; its message is one short line for whoever wrote it."""


def calculate(expression: str) -> tuple[str, str]:
    """Returns (the expression in one spelling, its value). Raises CalculatorError."""
    tokens = _tokens(expression)
    reader = _Reader(tokens)
    value = reader.sum()
    if reader.at < len(tokens):
        raise CalculatorError(f"{tokens[reader.at]} is out of place")
    return "".join(tokens), written(value)


def written(value: Fraction) -> str:
    """Writes a value: a whole number, a decimal of at most PLACES digits after the point, or a/b."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = value * 10**PLACES
    if scaled.denominator > 1:
        return f"{value.numerator}/{value.denominator}"
    whole, part = divmod(abs(scaled.numerator), 10**PLACES)
    return f"{'-' * (value < 0)}{whole}.{part:0{PLACES}d}".rstrip("0")


def _tokens(expression: str) -> list[str]:
    if len(expression) > LENGTH:
        raise CalculatorError(f"more than {LENGTH} characters")
    text, tokens, at = expression.translate(_SIGNS).strip(), list[str](), 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise CalculatorError(f"cannot read {text[at:].lstrip()[:1]!a}")
        number, sign = match.groups()
        tokens.append(number.replace(",", "") if number else sign.replace("**", "^"))
        at = match.end()
    return tokens


class _Reader:
    """Reads tokens from left to right; `at` is the next one's index.

    Grammar: sum = product (+|- product)*; product = signed (*|/ signed)*; signed = (+|-) signed | power;
    power = atom %* [^ signed]; atom = number | ( sum ). A power binds more than a sign and groups to the right.
    """

    def __init__(self, tokens: list[str]):
        self._tokens, self._depth, self.at = tokens, 0, 0

    def _take(self, *signs: str) -> str:
        """Returns the next token and moves on if it is one of these signs; else ""."""
        if self.at < len(self._tokens) and self._tokens[self.at] in signs:
            self.at += 1
            return self._tokens[self.at - 1]
        return ""

    def sum(self) -> Fraction:
        value = self._product()
        while sign := self._take("+", "-"):
            other = self._product()
            value = _bounded(value + other if sign == "+" else value - other)
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while sign := self._take("*", "/"):
            other = self._signed()
            if sign == "/" and not other:
                raise CalculatorError("division by zero")
            value = _bounded(value * other if sign == "*" else value / other)
        return value

    def _signed(self) -> Fraction:
        self._depth += 1
        if self._depth > DEPTH:
            raise CalculatorError(f"more than {DEPTH} levels")
        if sign := self._take("+", "-"):
            value = self._signed() if sign == "+" else -self._signed()
        else:
            value = self._atom()
            while self._take("%"):
                value = _bounded(value / 100)
            if self._take("^"):
                value = _power(value, self._signed())
        self._depth -= 1
        return value

    def _atom(self) -> Fraction:
        if self._take("("):
            value = self.sum()
            if not self._take(")"):
                raise CalculatorError("a bracket is not closed")
            return value
        if self.at == len(self._tokens):
            raise CalculatorError("a number is missing at the end")
        token = self._tokens[self.at]
        if not token[-1].isdecimal():
            raise CalculatorError(f"{token} is out of place")
        if len(token) > DIGITS:
            raise CalculatorError(f"a number has more than {DIGITS} digits")
        self.at += 1
        return Fraction(token)


def _bounded(value: Fraction) -> Fraction:
    if abs(value.numerator) >= _LARGEST or value.denominator >= _LARGEST:
        raise CalculatorError(f"the value has more than {DIGITS} digits")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Raises a number to a whole power whose size is bounded before it is computed."""
    if exponent.denominator > 1:
        raise CalculatorError("an exponent must be a whole number")
    if not base and exponent < 0:
        raise CalculatorError("division by zero")
    bits = (
        max(abs(base.numerator).bit_length(), base.denominator.bit_length()) - 1
    )  # 0 for 0, 1 and -1, whose powers stay small
    if bits * abs(exponent.numerator) >= _LARGEST.bit_length():
        raise CalculatorError(f"the value has more than {DIGITS} digits")
    if not bits:
        return base if exponent.numerator % 2 else base * base if exponent else Fraction(1)
    return _bounded(base**exponent.numerator)
