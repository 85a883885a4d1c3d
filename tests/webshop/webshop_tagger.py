"""NLTK's averaged-perceptron tagger from its published weights: the noun finder the recordings were made with."""

import gzip
import json
import re
from collections import defaultdict

_TOKEN = re.compile(r"\w+(?:'\w+)?|[^\w\s]")


def perceptron_nouns(path):
    """Return a noun finder (title -> lower-case nouns) with the weights in `path`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        data = json.load(file)

    def tag(word, context, i, before, before_that):
        if word in data["tagdict"]:
            return data["tagdict"][word]
        features = (
            "bias", f"i suffix {word[-3:]}", f"i pref1 {word[0]}", f"i-1 tag {before}", f"i-2 tag {before_that}",
            f"i tag+i-2 tag {before} {before_that}", f"i word {context[i]}", f"i-1 tag+i word {before} {context[i]}",
            f"i-1 word {context[i - 1]}", f"i-1 suffix {context[i - 1][-3:]}", f"i-2 word {context[i - 2]}",
            f"i+1 word {context[i + 1]}", f"i+1 suffix {context[i + 1][-3:]}", f"i+2 word {context[i + 2]}",
        )  # fmt: skip
        scores = defaultdict(float)
        for feature in features:
            for label, weight in data["weights"].get(feature, {}).items():
                scores[label] += weight
        return max(data["classes"], key=lambda label: (scores[label], label))

    def nouns(title):
        words = _TOKEN.findall(title)
        context = ["-START-", "-START2-", *map(_normal, words), "-END-", "-END2-"]
        found, before, before_that = [], "-START-", "-START2-"
        for i, word in enumerate(words, 2):
            before, before_that = tag(word, context, i, before, before_that), before
            if before.startswith("NN"):
                found.append(word.lower())
        return found

    return nouns


def _normal(word):
    if "-" in word and word[0] != "-":
        return "!HYPHEN"
    if word.isdigit() and len(word) == 4:
        return "!YEAR"
    return "!DIGITS" if word[0].isdigit() else word.lower()
