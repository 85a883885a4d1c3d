"""The fuzzy comparison of WebShop's reward: `token_set_ratio(a, b) > 85` of thefuzz 0.19 without python-Levenshtein.

That version compares with the standard library's difflib and keeps underscores in words; later ones do neither, and
decide some option values differently. So the rule is written out here on difflib instead of calling a newer release.
"""

import re
from difflib import SequenceMatcher
from functools import lru_cache

THRESHOLD = 85
_DROPPED = dict.fromkeys(range(128, 256))  # thefuzz's "force ascii" removes just these
_NO_WORD = re.compile(r"\W")


@lru_cache(maxsize=1 << 16)
def similar(first: str, second: str) -> bool:
    """Whether the sets of words of two texts are alike.

    >>> similar("machine wash", "machine washable"), similar("red", "('color', 'dark red')"), similar("red", "blue")
    (True, True, False)
    """
    words, others = _words(first), _words(second)
    if not words or not others:
        return False
    shared = " ".join(sorted(words & others))
    with_rest = f"{shared} {' '.join(sorted(words - others))}".strip()
    with_other_rest = f"{shared} {' '.join(sorted(others - words))}".strip()
    return _close(shared, with_rest) or _close(shared, with_other_rest) or _close(with_rest, with_other_rest)


def _words(text: str) -> set[str]:
    return set(_NO_WORD.sub(" ", text.translate(_DROPPED)).lower().split())


def _close(first: str, second: str) -> bool:
    if first == second or not first or not second:
        return first == second
    matcher = SequenceMatcher(None, first, second)
    # quick_ratio is an upper bound of ratio and far cheaper.
    return round(100 * matcher.quick_ratio()) > THRESHOLD and round(100 * matcher.ratio()) > THRESHOLD
