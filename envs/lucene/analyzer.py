"""Conversion of text to search terms, exactly as in Lucene's English analyzer, as the original WebShop and Pyserini use it.

Words by Unicode's word-break rules (UAX #29) as Lucene's StandardTokenizer reads them, then: possessive 's stripped,
lower case, stop words dropped, Porter stem. Checked term for term against Lucene 9.9.
"""

import re

try:
    import regex  # the standard `re` has no Word_Break property
except ImportError:
    raise ImportError("the package regex is missing; pip install 'hgpo_jax[webshop]'") from None

from hgpo_jax.envs.lucene.porter import stem

STOP_WORDS = frozenset(
    (
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "but",
        "by",
        "for",
        "if",
        "in",
        "into",
        "is",
        "it",
        "no",
        "not",
        "of",
        "on",
        "or",
        "such",
        "that",
        "the",
        "their",
        "then",
        "there",
        "these",
        "they",
        "this",
        "to",
        "was",
        "will",
        "with",
    )
)
MAX_TOKEN_LENGTH = 255  # a longer run of letters is cut into pieces of this length

# Unicode 12's Extended_Pictographic, the set Lucene knows. Later Unicode versions dropped stars, hearts and arrows that
# stand in product texts, so `regex`'s own property would lose them.
_PICTOGRAPHS = (
    r"\xA9\xAE\u203C\u2049\u2122\u2139\u2194-\u2199\u21A9\u21AA\u231A\u231B\u2328\u2388\u23CF\u23E9-\u23F3\u23F8-\u23FA"
    r"\u24C2\u25AA\u25AB\u25B6\u25C0\u25FB-\u25FE\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2708-\u2712\u2714"
    r"\u2716\u271D\u2721\u2728\u2733\u2734\u2744\u2747\u274C\u274E\u2753-\u2755\u2757\u2763-\u2767\u2795-\u2797\u27A1"
    r"\u27B0\u27BF\u2934\u2935\u2B05-\u2B07\u2B1B\u2B1C\u2B50\u2B55\u3030\u303D\u3297\u3299\U0001F000-\U0001F0FF"
    r"\U0001F10D-\U0001F10F\U0001F12F\U0001F16C-\U0001F171\U0001F17E\U0001F17F\U0001F18E\U0001F191-\U0001F19A"
    r"\U0001F1AD-\U0001F1E5\U0001F201-\U0001F20F\U0001F21A\U0001F22F\U0001F232-\U0001F23A\U0001F23C-\U0001F23F"
    r"\U0001F249-\U0001F3FA\U0001F400-\U0001F53D\U0001F546-\U0001F64F\U0001F680-\U0001F6FF\U0001F774-\U0001F77F"
    r"\U0001F7D5-\U0001F7FF\U0001F80C-\U0001F80F\U0001F848-\U0001F84F\U0001F85A-\U0001F85F\U0001F888-\U0001F88F"
    r"\U0001F8AE-\U0001F8FF\U0001F90C-\U0001F93A\U0001F93C-\U0001F945\U0001F947-\U0001FAFF\U0001FC00-\U0001FFFD"
)


def _unicode_pattern() -> regex.Pattern:
    """Compiles the word rules for any text; names follow the Word_Break classes of UAX #29."""
    # Leading characters are counted only so that endless rows of them do not take quadratic time.
    x = r"[\p{WB=Format}\p{WB=Extend}\p{WB=ZWJ}]*+"  # marks stay with the character before them
    letter = rf"[\p{{WB=ALetter}}\p{{WB=Hebrew_Letter}}]{x}"
    digit = rf"[\p{{WB=Numeric}}\uFF10-\uFF19]{x}"
    low_line = rf"\p{{WB=ExtendNumLet}}{x}"
    any_mid = r".\u2018\u2019\u2024\uFE52\uFF07\uFF0E'"
    mid_letter = rf"[:\xB7\u0387\u05F4\u2027\uFE13\uFE55\uFF1A{any_mid}]{x}"
    mid_digit = rf"[,;\u037E\u0589\u060C\u060D\u066C\u07F8\u2044\uFE10\uFE14\uFE50\uFE54\uFF0C\uFF1B{any_mid}]{x}"
    hebrew = rf"\p{{WB=Hebrew_Letter}}{x}(?:'{x}|\"{x}\p{{WB=Hebrew_Letter}}{x})"
    letters = rf"{letter}(?:{mid_letter}{letter}|(?!{hebrew}){letter})*+"
    digits = rf"{digit}(?:(?:{mid_digit})?{digit})*+"
    run = rf"(?:(?:{hebrew}|{letters}|{digits})++|(?:\p{{WB=Katakana}}{x})++)"
    word = rf"(?:{low_line}){{0,254}}{run}(?:(?:{low_line})+{run})*(?:{low_line})*"

    skin = r"\U0001F3FB-\U0001F3FF"
    mark = rf"(?!\uFE0E|\uFE0F|\u200D[{_PICTOGRAPHS}{skin}])[\p{{WB=Format}}\p{{WB=Extend}}\p{{WB=ZWJ}}]"
    picture = rf"(?:\u200D{{0,254}}[{_PICTOGRAPHS}](?:{mark})*\uFE0F?|[{skin}](?:{mark})*)"
    emoji = rf"{picture}(?:[\U000E0020-\U000E007E]+\U000E007F|(?:\u200D{picture})*)"
    keycap = rf"[0-9#*](?:{mark})*\uFE0F?\u20E3(?:{mark})*"
    flag = rf"(?:\p{{WB=Regional_Indicator}}{x}){{2}}"
    south_east_asian = rf"(?:\p{{LB=Complex_Context}}{x})++"
    ideograph = rf"[\p{{Script=Han}}\p{{Script=Hiragana}}]{x}"
    return regex.compile("|".join((word, emoji, keycap, flag, south_east_asian, ideograph)))


# The same rules, several times faster. Nothing in it is possessive: Python before 3.11.5 loses the end of such repetitions.
_ASCII_RUN = r"(?:[a-z]+(?:[.:'][a-z]+)*|[0-9]+(?:[.,;'][0-9]+)*)+"
_ASCII = re.compile(rf"(?<!_)_*{_ASCII_RUN}(?:_+{_ASCII_RUN})*_*")
_UNICODE = _unicode_pattern()


def tokens(text: str) -> list[str]:
    """Returns the words of a lower-case `text`, before stop words and stemming."""
    result: list[str] = []
    for piece in [text] if text.isascii() else text.split(" "):  # no word spans a space
        pattern = _ASCII if piece.isascii() else _UNICODE
        words = pattern.findall(piece)
        # A character outside the BMP counts twice.
        if len(piece) > MAX_TOKEN_LENGTH // 2 and any(len(word) > MAX_TOKEN_LENGTH // 2 for word in words):
            words = [part for word in words for part in _cut(word, pattern)]
        result += words
    return result


def _cut(word: str, pattern) -> list[str]:
    """Returns the words that Lucene's scanner, which sees MAX_TOKEN_LENGTH UTF-16 units at a time, makes of one long word."""
    parts = []
    while word:
        units, end = 0, 0
        while end < len(word) and (units := units + 1 + (word[end] > "\uffff")) <= MAX_TOKEN_LENGTH:
            end += 1
        match = pattern.match(word[:end])
        if match:
            parts.append(match.group())
        word = word[match.end() if match else 1 :]
    return parts


def term(token: str) -> str:
    """Returns the search term of one token, or "" for a stop word."""
    if len(token) > 1 and token[-1] == "s" and token[-2] in "'\u2019\uff07":
        token = token[:-2]
    return "" if token in STOP_WORDS else stem(token)


def analyze(text: str) -> list[str]:
    """Returns the search terms of `text`, in order, repeats kept.

    >>> analyze("The women's T-Shirts, 3.5 oz")
    ['women', 't', 'shirt', '3.5', 'oz']
    """
    return [t for token in tokens(text.lower()) if (t := term(token))]
