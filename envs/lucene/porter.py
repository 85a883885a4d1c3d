"""Porter's suffix stripper as Lucene applies it.

Source: M. F. Porter, "An algorithm for suffix stripping", Program 14(3), 1980, with the two departures Porter lists on
his own page and Lucene keeps ("bli" -> "ble", "logi" -> "log"). Words of one or two letters are left alone.
"""

from array import array
from functools import lru_cache

_STEP2 = {
    "ational": "ate",
    "tional": "tion",
    "enci": "ence",
    "anci": "ance",
    "izer": "ize",
    "bli": "ble",
    "alli": "al",
    "entli": "ent",
    "eli": "e",
    "ousli": "ous",
    "ization": "ize",
    "ation": "ate",
    "ator": "ate",
    "alism": "al",
    "iveness": "ive",
    "fulness": "ful",
    "ousness": "ous",
    "aliti": "al",
    "iviti": "ive",
    "biliti": "ble",
    "logi": "log",
}
_STEP3 = {"icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": ""}
_STEP4 = dict.fromkeys(
    (
        "al",
        "ance",
        "ence",
        "er",
        "ic",
        "able",
        "ible",
        "ant",
        "ement",
        "ment",
        "ent",
        "ion",
        "ou",
        "ism",
        "ate",
        "iti",
        "ous",
        "ive",
        "ize",
    ),
    "",
)


_ENDS = frozenset(key[-2:] for table in (_STEP2, _STEP3, _STEP4) for key in table)


def _longest(word: str, table: dict[str, str]) -> str:
    """Returns the longest key of `table` that ends `word`, or ""."""
    if word[-2:] in _ENDS:  # most words end in none: not worth seven look-ups
        for length in range(7, 1, -1):
            if word[-length:] in table:
                return word[-length:]
    return ""


def _consonants(word: str) -> str:
    """Returns `word` as a string of "c" and "v"; y is a vowel after a consonant, every non-letter is a consonant."""
    kinds = ""
    for i, letter in enumerate(word):
        vowel = letter in "aeiou" or (letter == "y" and i > 0 and kinds[-1] == "c")
        kinds += "v" if vowel else "c"
    return kinds


def _measure(stem: str) -> int:
    """Returns Porter's m, the number of vowel-consonant changes in `stem`."""
    return _consonants(stem).count("vc")


def _ends_cvc(stem: str) -> bool:
    """Whether `stem` ends consonant-vowel-consonant, the last one none of w, x, y."""
    return _consonants(stem).endswith("cvc") and stem[-1] not in "wxy"


def _step1(word: str) -> str:
    """Handles plurals, -ed, -ing, and y -> i."""
    if word.endswith("sses") or word.endswith("ies"):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    if word.endswith("eed"):
        word = word[:-1] if _measure(word[:-3]) > 0 else word
    else:
        suffix = "ed" if word.endswith("ed") else "ing" if word.endswith("ing") else ""
        stem = word[: len(word) - len(suffix)]
        if suffix and "v" in _consonants(stem):
            word = stem
            if word.endswith(("at", "bl", "iz")):
                word += "e"
            elif len(word) > 1 and word[-1] == word[-2] and _consonants(word)[-1] == "c":
                word = word if word[-1] in "lsz" else word[:-1]
            elif _measure(word) == 1 and _ends_cvc(word):
                word += "e"
    if word.endswith("y") and "v" in _consonants(word[:-1]):
        word = word[:-1] + "i"
    return word


@lru_cache(maxsize=1 << 16)
def stem(word: str) -> str:
    """Returns the stem of a lower-case `word`.

    >>> stem("relational"), stem("hopping"), stem("tops")
    ('relat', 'hop', 'top')
    """
    if word.isascii() or max(word) <= "\uffff":
        return _stem(word)
    # Lucene counts UTF-16 units, so a character outside the BMP is two consonants.
    units = "".join(map(chr, array("H", word.encode("utf-16", "surrogatepass")[2:])))
    return _stem(units).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _stem(word: str) -> str:
    if len(word) < 3:
        return word
    word = _step1(word)
    for table in (_STEP2, _STEP3):
        suffix = _longest(word, table)
        if suffix and _measure(word[: -len(suffix)]) > 0:
            word = word[: -len(suffix)] + table[suffix]
    suffix = _longest(word, _STEP4)
    if suffix:
        rest = word[: -len(suffix)]
        if _measure(rest) > 1 and (suffix != "ion" or rest.endswith(("s", "t"))):
            word = rest
    if word.endswith("e"):
        m = _measure(word[:-1])
        if m > 1 or (m == 1 and not _ends_cvc(word[:-1])):
            word = word[:-1]
    if word.endswith("ll") and _measure(word) > 1:
        word = word[:-1]
    return word
