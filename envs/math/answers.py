"""Whether an answer is right: exact for plain numbers, by math-verify for answers in LaTeX (extra `math`).

math-verify computes what an answer says, so a hostile one could keep it busy for ever. It runs in a process of its own, in
which a comparison that takes over TIME_LIMIT seconds, or too much memory, counts as wrong; the next one has a new process.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import resource
import select
import signal
import subprocess
import sys
from fractions import Fraction
from importlib.util import find_spec

LENGTH = 200  # characters of an answer; a longer one is wrong
TIME_LIMIT = 5.0  # seconds for a comparison in LaTeX
START_LIMIT = 60.0  # seconds until its process has imported what it needs
MEMORY = 4 * 2**30  # bytes for that process
_NUMBER = re.compile(r"([-+]?)\$?(\d+(?:,\d{3})*|(?=\.\d))(\.\d+)?(?:/(\d+))?\.?", re.ASCII)
_WRITTEN = {r"\$": "$", "{,}": ",", r",\!": ",", "\u2212": "-"}  # in LaTeX, or by a typesetter -> plain
# What is still to be calculated. A sign alone, and degrees, are not.
_OPERATION = re.compile(
    r"[+*!|\u00d7\u00f7\u00b7]|[\d)}]\s*[-\u2212]|\^(?!\s*\{?\s*\\circ)"
    r"|\\(?:times|cdot|div|sqrt|d?t?binom|log|ln|lg|exp|gcd|lcm|max|min|[lr]floor|[lr]ceil|(?:arc)?(?:sin|cos|tan)h?|sec|csc|cot|sum|prod|int"
    r"|[bp]?mod|over|operatorname|[lr]?[vV]ert|arg|Pr)"
    r"(?![A-Za-z])"
)
_DIVISION = re.compile(r"[\d)}]\s*[/:]\s*[\d({\\]")  # not \frac, which math-verify takes as a number
# A unit with its power, and a power of ten: no calculation.
_AS_WRITTEN = re.compile(
    r"\\(?:text|mathrm|mbox|textrm)\s*\{[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?|(?<=\d)\s*(?:\\times|\\cdot|\u00d7)\s*10\s*\^\s*\{?-?\d+\}?"
)
_IN_MATHS = re.compile(r"\$(.+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
_BOXED = re.compile(r"\\f?boxed\s*")


def number(text: str) -> Fraction | None:
    """Reads a plain number: a whole one, a decimal or a/b, also with a sign, a dollar or commas; None for anything else.

    It may stand in the signs that begin and end mathematics, as in $18$.
    """
    text = text.strip()
    if len(text) <= LENGTH and (inner := _IN_MATHS.fullmatch(text)):
        text = next(filter(None, inner.groups())).strip()
    for written, plain in _WRITTEN.items():
        text = text.replace(written, plain)
    if len(text) > LENGTH or not (match := _NUMBER.fullmatch(text)):
        return None
    sign, whole, part, below = match.groups()
    if (part and below) or (below is not None and not int(below)):
        return None
    return Fraction(f"{sign}{whole.replace(',', '') or 0}{part or ''}") / int(below or 1)


def boxed(text: str) -> str | None:
    """Returns what is in the last \\boxed of a text, which MATH puts around an answer; None if there is none."""
    marks = list(_BOXED.finditer(text))
    if not marks:
        return None
    begin = marks[-1].end()
    if text[begin : begin + 1] != "{":  # a few solutions of MATH leave the braces out
        return text[begin:].partition("$")[0].strip() or None
    depth = 0
    for at in range(begin, len(text)):
        if text[at - 1] == "\\" and text[at - 2] != "\\":
            continue  # a brace that is shown, as in \left\{
        depth += (text[at] == "{") - (text[at] == "}")
        if not depth:
            return text[begin + 1 : at].strip()
    return None


def is_right(answer: str, right: str, latex: bool = False) -> bool:
    """Whether an answer means the same as the right one. It may be in a \\boxed, and is at most LENGTH characters long.

    latex: whether math-verify compares what is no plain number; otherwise only plain numbers are right. Where the right one
      is, an expression that would have to be calculated first is wrong, and so is a division for a whole number: the
      calculator would be of no use.
    """
    if len(answer) > LENGTH:
        return False
    answer = (boxed(answer) or answer).strip()
    wanted, found = number(right), number(answer)
    if wanted is not None and answer != right:
        written = _AS_WRITTEN.sub("", answer)
        divides = wanted.denominator == 1 and _DIVISION.search(written)
        if divides or (found is None and _OPERATION.search(written)):
            return False
    if wanted is not None and found is not None:
        return wanted == found
    return latex and bool(answer) and (answer == right or _VERIFIER.agrees(right, answer))


def has_verifier() -> bool:
    """Whether math-verify is installed."""
    return find_spec("math_verify") is not None


def verifier_fault() -> str:
    """Says why math-verify, which is installed, cannot compare answers on this machine; "" if it can."""
    if _VERIFIER.agrees(r"\frac{1}{2}", "0.5"):
        return ""
    try:
        done = subprocess.run([sys.executable, "-P", __file__], input=b"", capture_output=True, timeout=START_LIMIT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if not done.returncode:
        return f"it did not compare 1/2 and 0.5 within {TIME_LIMIT:g} s; try again where less runs"
    return (done.stderr.decode(errors="replace").strip().splitlines() or [f"its process ended with {done.returncode}"])[-1]


class _Verifier:
    """A process that compares answers in LaTeX, one at a time; it is started when it is first needed."""

    def __init__(self):
        self._process: subprocess.Popen[bytes] | None = None

    def agrees(self, right: str, answer: str) -> bool:
        """Whether math-verify finds two answers equal; False if it fails or takes too long."""
        try:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                self._read(START_LIMIT)
            assert self._process.stdin
            self._process.stdin.write(json.dumps([right, answer]).encode() + b"\n")
            self._process.stdin.flush()
            return self._read(TIME_LIMIT) == b"true\n"
        except (OSError, TimeoutError):
            self.close()
            return False

    def _read(self, limit: float) -> bytes:
        assert self._process and self._process.stdout
        if not select.select([self._process.stdout], [], [], limit)[0]:
            raise TimeoutError
        if not (line := self._process.stdout.readline()):
            raise OSError("it has ended")
        return line

    def close(self) -> None:
        if self._process:
            self._process.kill()
            self._process.communicate()
        self._process = None


_VERIFIER = _Verifier()


def serve() -> None:
    """Answers lines of JSON, [right, answer], with true or false; the other end of `_Verifier`."""
    with contextlib.suppress(ValueError, OSError):  # macOS knows no such limit; a lower one stays
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from math_verify import parse, verify

    verify(parse("$\\frac{1}{2}$"), parse("$0.5$"))  # the first comparison takes longer
    print("ready", flush=True)
    for line in sys.stdin:
        signal.alarm(math.ceil(TIME_LIMIT) + 1)  # ends this process if the other one, which has its limit, has ended before
        try:
            # math-verify's own limits are errors, which sympy may catch.
            right, answer = (parse(f"${text}$", parsing_timeout=None) for text in json.loads(line))
            agree = bool(right and answer and verify(right, answer, timeout_seconds=None))
        except Exception:  # any error of a library that reads anything; RecursionError and MemoryError are among them
            agree = False
        signal.alarm(0)
        print(json.dumps(agree), flush=True)


if __name__ == "__main__":
    serve()
