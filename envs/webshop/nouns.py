"""Finders of nouns in product titles, which only the type part of the reward needs.

The original asks spaCy's English model. The engine takes any callable `title -> list of lower-case nouns` instead
(`load_shop(..., nouns=...)`); `spacy_nouns` wraps a spaCy model for those who have one, `title_nouns` is the default
and needs nothing. The choice can only matter when a product other than the wanted one is bought.
"""

import re
from collections.abc import Callable

_TOKEN = re.compile(r"\w+(?:'\w+)?")
# Articles, pronouns, prepositions, conjunctions, auxiliaries, numbers. Adjectives are left in: in a title they are
# mostly tagged as part of a name, and leaving them out agreed less often with a trained tagger.
_NO_NOUNS = frozenset(
    (
        "a",
        "about",
        "above",
        "after",
        "all",
        "also",
        "an",
        "and",
        "any",
        "are",
        "as",
        "at",
        "be",
        "before",
        "between",
        "both",
        "but",
        "by",
        "can",
        "do",
        "does",
        "don't",
        "down",
        "each",
        "every",
        "for",
        "from",
        "get",
        "has",
        "have",
        "he",
        "her",
        "his",
        "i",
        "if",
        "in",
        "inside",
        "into",
        "is",
        "it",
        "it's",
        "its",
        "just",
        "like",
        "made",
        "make",
        "me",
        "more",
        "most",
        "my",
        "no",
        "non",
        "not",
        "of",
        "off",
        "on",
        "one",
        "only",
        "or",
        "other",
        "our",
        "out",
        "outside",
        "over",
        "own",
        "per",
        "she",
        "so",
        "some",
        "such",
        "than",
        "that",
        "the",
        "their",
        "them",
        "then",
        "there",
        "these",
        "they",
        "this",
        "those",
        "three",
        "through",
        "to",
        "two",
        "under",
        "up",
        "use",
        "very",
        "via",
        "was",
        "we",
        "were",
        "what",
        "when",
        "which",
        "while",
        "who",
        "will",
        "with",
        "within",
        "without",
        "you",
        "your",
    )
)


def title_nouns(title: str) -> list[str]:
    """Returns the words of `title` that are probably nouns: all but function words and numbers.

    >>> title_nouns("Women's Shoes for Running, Size 42")
    ["women's", 'shoes', 'running', 'size']
    """
    words = (word.lower() for word in _TOKEN.findall(title))
    return [w for w in words if w[0].isalpha() and w not in _NO_NOUNS]


def spacy_nouns(model: str = "en_core_web_sm") -> Callable[[str], list[str]]:
    """Returns the original's noun finder on a spaCy model.

    Raises:
        ImportError: spaCy is not installed.
        OSError: the model is not.
    """
    import spacy  # optional: large, and its models are downloads of their own

    parse = spacy.load(model)
    return lambda title: [token.text.lower() for token in parse(title) if token.pos_ in ("NOUN", "PROPN")]
