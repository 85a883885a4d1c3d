"""The comparison of an answer with the accepted ones, as SQuAD defines it (Rajpurkar et al., 2016, arXiv 1606.05250).

Both texts are normalized: lower case; punctuation, then the articles a, an and the, left out; white space made single blanks.
An answer scores what it scores against the accepted answer that is nearest to it.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize(text: str) -> str:
    """Returns a text in the form in which answers are compared.

    >>> normalize("The  Silver-Bridge, (an island)")
    'silverbridge island'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, accepted: Iterable[str]) -> float:
    """Returns 1 if the answer equals an accepted one after normalization, else 0."""
    return float(normalize(answer) in map(normalize, accepted))


def f1(answer: str, accepted: Iterable[str]) -> float:
    """Returns the harmonic mean of precision and recall over the words of the answer and of the nearest accepted one.

    Words count as often as they occur. If one of the two has no words, it is 1 if both have none, else 0, as for SQuAD 2.0.
    """
    return max((_f1(normalize(answer).split(), normalize(each).split()) for each in accepted), default=0.0)


def _f1(words: list[str], wanted: list[str]) -> float:
    common = (Counter(words) & Counter(wanted)).total()
    if not words or not wanted:
        return float(words == wanted)
    return 2 * common / (len(words) + len(wanted))
