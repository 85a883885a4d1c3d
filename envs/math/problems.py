"""Generated problems: expressions, linear equations and short stories, whose operations follow one another.

    problem = Problems().problem(7, held_out=False)
    problem.question, problem.answer, problem.steps     # "Solve for x: (x-8)*4=92.", "31", ("92/4", "23+8")

A problem begins with a number and changes it by `operations` operations; all values in between are whole numbers. Problems with
the same operations on the same numbers are either all for training or all held out: a hash of the operations decides.
"""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np

from hgpo_jax.envs.math.calculator import calculate

KINDS = ("arithmetic", "equation", "story")
HELD_OUT = 8  # one of so many chains of operations is held out
FACTORS = range(2, 10)  # of multiplications and divisions
_INVERSE = {"+": "-", "-": "+", "*": "/", "/": "*"}

NAMES = ("Ada", "Ben", "Cleo", "Dev", "Ines", "Juri", "Lena", "Omar")
THINGS = ("apples", "books", "coins", "marbles", "pens", "shells", "stamps", "tickets")
# Of a story: its beginning, another for one that begins with a multiplication, a sentence for each operation, its question.
STORIES = (
    (
        "{name} has {a} {things}.",
        "{name} owns {b} boxes with {a} {things} in each.",
        {
            "+": ("{name} finds {b} more.", "A friend brings {b} more."),
            "-": ("{name} gives away {b}.", "Then {b} get lost."),
            "*": ("Soon there are {b} times as many.",),
            "/": ("{name} keeps one of {b} equal parts.",),
        },
        "How many {things} does {name} have now?",
    ),
    (
        "A ticket costs {a} francs.",
        "A ticket costs {a} francs and {name} wants {b} of them.",
        {
            "+": ("A fee of {b} francs is added.", "{name} also orders tea for {b} francs."),
            "-": ("A voucher takes {b} francs off.",),
            "*": ("{name} pays this for {b} people.",),
            "/": ("The sum is split among {b} people.",),
        },
        "What does {name} pay in francs?",
    ),
    (
        "A bus has {a} km to go.",
        "A bus has {b} rounds of {a} km to go.",
        {
            "+": ("A detour adds {b} km.",),
            "-": ("It drives {b} km.", "A bridge saves {b} km."),
            "*": ("Then the way becomes {b} times as long.",),
            "/": ("It stops when 1 of {b} equal parts is left.",),
        },
        "How many km are left?",
    ),
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem as text. kind: an index into the names of the kinds. steps: expressions for the calculator that solve it in
    this order, the last one's value being the answer; () for a problem that came without them."""

    question: str
    answer: str
    kind: int = 0
    steps: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Problems:
    """A family of generated problems.

    kinds: of KINDS, all equally likely.
    operations: in a problem.
    digits: of its numbers, at most.

    Raises ValueError, naming the field of `env`, for a value out of range.
    """

    kinds: tuple[str, ...] = KINDS
    operations: int = 2
    digits: int = 2

    def __post_init__(self):
        if not self.kinds or set(self.kinds) - set(KINDS) or len(set(self.kinds)) < len(self.kinds):
            raise ValueError(f"problems={list(self.kinds)}: give different ones of {', '.join(KINDS)}")
        for name, high in (("operations", 8), ("digits", 6)):
            if not 1 <= getattr(self, name) <= high:
                raise ValueError(f"{name}={getattr(self, name)}: must be from 1 to {high}")

    def problem(self, task: int, held_out: bool) -> Problem:
        """Makes the problem with this number, below 2**64. Training and held-out problems share no chain of operations."""
        random = np.random.default_rng(task)
        while True:
            kind = self.kinds[random.integers(len(self.kinds))]
            first, chain = self._chain(random)
            if (zlib.crc32(repr((first, chain)).encode()) % HELD_OUT == 0) == held_out:
                return _TELL[kind](first, chain, random, self.kinds.index(kind))

    def _chain(self, random: np.random.Generator) -> tuple[int, tuple[tuple[str, int], ...]]:
        """Draws a number and the operations on it, each possible one equally likely."""
        most = 10**self.digits - 1
        value = first = int(random.integers(2, most + 1))
        chain = []
        for _ in range(self.operations):
            divisors = [factor for factor in FACTORS if value % factor == 0]
            possible = ["+"] + ["-"] * (value > 2) + ["*"] * (value <= most) + ["/"] * bool(divisors)
            sign = possible[random.integers(len(possible))]
            if sign == "/":
                number = divisors[random.integers(len(divisors))]
            else:
                low, high = {"+": (2, most), "-": (2, min(value - 1, most)), "*": (FACTORS[0], FACTORS[-1])}[sign]
                number = int(random.integers(low, high + 1))
            chain.append((sign, number))
            value = _applied(value, sign, number)
        return first, tuple(chain)


def _applied(value: int, sign: str, number: int) -> int:
    return {"+": value + number, "-": value - number, "*": value * number, "/": value // number}[sign]


def _forward(first: int, chain) -> tuple[str, ...]:
    """Returns the calculations from the first number to the last."""
    steps, value = [], first
    for sign, number in chain:
        steps.append(f"{value}{sign}{number}")
        value = _applied(value, sign, number)
    return tuple(steps)


def _nested(first: object, chain) -> str:
    """Writes the chain as one expression."""
    text = f"{first}{chain[0][0]}{chain[0][1]}"
    for sign, number in chain[1:]:
        text = f"({text}){sign}{number}"
    return text


def _arithmetic(first: int, chain, random, kind: int) -> Problem:
    steps = _forward(first, chain)
    return Problem(f"What is {_nested(first, chain)}?", calculate(steps[-1])[1], kind, steps)


def _equation(first: int, chain, random, kind: int) -> Problem:
    _, last = calculate(_forward(first, chain)[-1])
    back = [(_INVERSE[sign], number) for sign, number in reversed(chain)]
    return Problem(f"Solve for x: {_nested('x', chain)}={last}.", str(first), kind, _forward(int(last), back))


def _story(first: int, chain, random, kind: int) -> Problem:
    beginning, product, sentences, question = STORIES[random.integers(len(STORIES))]
    words = {"name": NAMES[random.integers(len(NAMES))], "things": THINGS[random.integers(len(THINGS))]}
    rest, texts = chain, [beginning.format(a=first, **words)]
    if chain[0][0] == "*" and random.random() < 0.5:
        rest, texts = chain[1:], [product.format(a=first, b=chain[0][1], **words)]
    for sign, number in rest:
        choice = sentences[sign]
        texts.append(choice[random.integers(len(choice))].format(b=number, **words))
    steps = _forward(first, chain)
    return Problem(" ".join([*texts, question.format(**words)]), calculate(steps[-1])[1], kind, steps)


_TELL = {"arithmetic": _arithmetic, "equation": _equation, "story": _story}
