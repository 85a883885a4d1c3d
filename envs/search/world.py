"""A generated world of people, places and works: passages about them, and questions that the passages answer.

    world = World(3000)
    world.passage(0)                                   # ('miholm ...', '... was born in ... in 1612 and learned from ...')
    world.question(task=7, held_out=False)             # Question(text, answers, task_type, start, relations)

Everything follows from the key and the number of passages; there is one passage for each entity. A name is two words, or up to
four in a large world, each out of 32, so the words of held-out names are familiar ones and their combinations are not.
The entities fall into four quarters whose facts name only their own quarter. Held-out questions are about the last one: no
training question mentions any of its entities, neither as its subject, on the way, nor as its answer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

KINDS = ("person", "place", "work")
QUARTERS = 4  # the last is held out
LEAST = len(KINDS) * QUARTERS * 2  # passages: two of each kind in every quarter
MOST = 900_000
YEARS = (1400, 2000)
# Of each kind the beginnings of words, and for each place in a name the ends: 32 words a place. They are distinct after
# stemming, no stop words, and none is a word of the texts below (tests/search/test_search_world.py).
_SYLLABLES = {
    "person": "ba de fi ka le mi no ru; lan mor rik vek; dahl gren holm stad; bert lund quist rud; bo ja ta zo",
    "place": "ash bel cor dun elm fen glen hol; bury ford mere wick; combe dale haven stead; gate moor ridge wood; "
    "cross field brook well",
    "work": "ember frost moon night rain snow star wind; light song fall shade; bird leaf stone thorn; path door wheel bell; "
    "glass iron silk wool",
}
WORDS = {
    kind: [[begin + end for begin in begins.split() for end in place.split()] for place in places]
    for kind, syllables in _SYLLABLES.items()
    for begins, *places in [syllables.split("; ")]
}
CHOICES = 32  # words for a place in a name
# Every fact: whose it is, and what it is, an entity of a kind or a year.
RELATIONS = {
    "birthplace": ("person", "place"),
    "birth": ("person", "year"),
    "teacher": ("person", "person"),
    "founder": ("place", "person"),
    "founding": ("place", "year"),
    "maker": ("work", "person"),
    "finish": ("work", "year"),
}
PASSAGES = {
    "person": "{name} was born in {birthplace} in {birth} and learned from {teacher}.",
    "place": "{name} was founded by {founder} in {founding}.",
    "work": "{name} was made by {maker} and finished in {finish}.",
}
# The relations to follow one after another, and ways to ask for the last.
QUESTIONS = (
    (("birthplace",), "where was {} born?", "which place does {} come from?"),
    (("birth",), "when was {} born?", "in which year was {} born?"),
    (("teacher",), "who taught {}?", "from whom did {} learn?"),
    (("founder",), "who founded {}?", "by whom was {} founded?"),
    (("founding",), "when was {} founded?", "in which year was {} founded?"),
    (("maker",), "who made {}?", "whose work is {}?"),
    (("finish",), "when was {} finished?", "in which year was {} finished?"),
    (("maker", "birthplace"), "where was the maker of {} born?", "which place does the maker of {} come from?"),
    (("maker", "teacher"), "who taught the maker of {}?", "from whom did the maker of {} learn?"),
    (("maker", "birth"), "when was the maker of {} born?", "in which year was the maker of {} born?"),
    (("birthplace", "founder"), "who founded the place where {} was born?", "by whom was the birthplace of {} founded?"),
    (("birthplace", "founding"), "when was the birthplace of {} founded?", "in which year was the birthplace of {} founded?"),
    (("teacher", "birthplace"), "where was the teacher of {} born?", "which place does the teacher of {} come from?"),
    (("founder", "birthplace"), "where was the founder of {} born?", "which place does the founder of {} come from?"),
    (("founder", "teacher"), "who taught the founder of {}?", "from whom did the founder of {} learn?"),
)
TASK_TYPES = ("one hop", "two hops")


class Question(NamedTuple):
    """A question with its accepted answers. chain: the entities whose passages answer it, in the order of reading."""

    text: str
    answers: tuple[str, ...]
    task_type: int = 0
    chain: tuple[str, ...] = ()


class World:
    """The world of a key.

    Args:
      passages: how many, rounded up to a multiple of 12 so that kinds and quarters are of equal size.
      key: any whole number of 64 bits.

    Raises ValueError for a number of passages that it cannot have.
    """

    def __init__(self, passages: int = 3000, key: int = 0):
        if not LEAST <= passages <= MOST:
            raise ValueError(f"passages={passages}: must be {LEAST} to {MOST}")
        self.key = key
        self._count = count = QUARTERS * -(-passages // (len(KINDS) * QUARTERS))  # entities of each kind
        self._words = next(n for n in (2, 3, 4) if CHOICES**n >= count)  # of a name
        random = np.random.default_rng([key, passages])
        self._codes = {kind: random.permutation(CHOICES**self._words)[:count] for kind in KINDS}
        quarter = np.arange(count) % QUARTERS
        self._facts = {}
        for name, (owner, value) in RELATIONS.items():
            if value == "year":
                self._facts[name] = random.integers(*YEARS, count)
            elif owner == value:  # nobody else's quarter, and not oneself
                self._facts[name] = (np.arange(count) + QUARTERS * random.integers(1, count // QUARTERS, count)) % count
            else:
                self._facts[name] = QUARTERS * random.integers(0, count // QUARTERS, count) + quarter

    def __len__(self) -> int:
        return len(KINDS) * self._count

    def name(self, kind: str, number: int) -> str:
        """Returns the name of one of the entities of a kind, which are numbered from 0."""
        code = int(self._codes[kind][number])
        return " ".join(WORDS[kind][place][code // CHOICES**place % CHOICES] for place in range(self._words))

    def fact(self, relation: str, number: int) -> str:
        """Returns the value of a relation of an entity, as a text."""
        kind, value = RELATIONS[relation][1], int(self._facts[relation][number])
        return str(value) if kind == "year" else self.name(kind, value)

    def passage(self, index: int) -> tuple[str, str]:
        """Returns the title and the text of a passage."""
        number, kind = index // len(KINDS), KINDS[index % len(KINDS)]
        facts = {name: self.fact(name, number) for name, (owner, _) in RELATIONS.items() if owner == kind}
        name = self.name(kind, number)
        return name, PASSAGES[kind].format(name=name, **facts)

    def question(self, task: int, held_out: bool) -> Question:
        """Returns the question of a task, a number below 2**64, about held-out entities or about the others."""
        random = np.random.default_rng([task, self.key])
        relations, *wordings = QUESTIONS[random.integers(len(QUESTIONS))]
        quarter = QUARTERS - 1 if held_out else random.integers(QUARTERS - 1)
        number = int(QUARTERS * random.integers(self._count // QUARTERS) + quarter)
        chain, answer = [], ""
        for relation in relations:
            chain.append(self.name(RELATIONS[relation][0], number))
            answer, number = self.fact(relation, number), int(self._facts[relation][number])
        text = str(wordings[random.integers(len(wordings))]).format(chain[0])
        return Question(text, (answer,), len(relations) - 1, tuple(chain))
