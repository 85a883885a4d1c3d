"""Words of the compiled game: phrases, kinds of things and names such that every text is its words written together.

A word includes the blank before it, so that `"".join` of an observation's words is exactly the engine's observation:
"You arrive at", " desk 1", ". On the", " desk 1", ", you see a", " pen 2", ".". Cutting a text into words is as simple: always
take the longest word that fits. An action is a verb and its arguments without "from", "with" and the like ("take", " pen 2",
" desk 1"), which `command` adds again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

# Sorted, because the engine sorts its commands. "put" is the verb of release 2.1.1 where later ones say "move".
VERBS = (
    "clean",
    "close",
    "cool",
    "examine",
    "go to",
    "heat",
    "help",
    "inventory",
    "look",
    "move",
    "open",
    "put",
    "slice",
    "take",
    "use",
)
LINKS = {
    "clean": " with",
    "cool": " with",
    "heat": " with",
    "slice": " with",
    "take": " from",
    "move": " to",
    "put": " in/on",
}

WELCOME = "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see a"
TASK = ".\n\nYour task is to: "
MIDDLE = "You are in the middle of a room. Looking quickly around you, you see nothing."
NOTHING_HAPPENS, NOT_CARRYING = "Nothing happens.", "You are not carrying anything."
ITEM, COMMA, AND, STOP = " a", ",", ", and", "."
# Beginnings of lists: (word before a list, word for an empty list).
ON = (", you see a", ", you see nothing.")
IN = (" is open. In it, you see a", " is open. In it, you see nothing.")
INSIDE = (". In it, you see a", ". In it, you see nothing.")
BESIDE = (". Next to it, you see a", ". Next to it, you see nothing.")
SENTENCES = (
    "You arrive at",
    "You open the",
    "You close the",
    "You pick up the",
    "You put the",
    "You move the",
    "You clean the",
    "You heat the",
    "You cool the",
    "You sliced the",
    "You turn on the",
    "You are facing the",
    "You are carrying: a",
    " from the",
    " in/on the",
    " to the",
    " using the",
    " with the",
    "On the",
    "The",
    ". On the",
    ". The",
    " is closed.",
)
# The appearance of an examined object, by its treatment; the other cases are in `examined`.
LOOKS = (
    "This is a hot and clean sliced",
    "This is a cool and clean sliced",
    "This is a clean sliced",
    "This is a hot sliced",
    "This is a cool sliced",
    "This is a hot and clean",
    "This is a cool and clean",
    "This is a hot",
    "This is a clean",
    "This is a cold",
    "This is a normal",
    "This",
    " is on.",
    "This is a sliced",
    "There's nothing special about",
)
HELP = """\
Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""
GOALS = (
    "put some",
    "put two",
    "put a clean",
    "put a hot",
    "put a cool",
    "clean some",
    "heat some",
    "cool some",
    "find two",
    "look at",
    "examine the",
    " in",
    " on",
    " under the",
    " and put it in",
    " and put them in",
)
PHRASES = (
    *VERBS,
    WELCOME,
    TASK,
    MIDDLE,
    NOTHING_HAPPENS,
    NOT_CARRYING,
    ITEM,
    COMMA,
    AND,
    STOP,
    *ON,
    *IN,
    *INSIDE,
    *BESIDE,
    *SENTENCES,
    *LOOKS,
    HELP,
    *GOALS,
)
FIXED = ("", *PHRASES)  # word 0 is the empty slot
ID = {phrase: number for number, phrase in enumerate(FIXED)}
# A word only for prompts (`short_prompts.py`), when there are more commands than a prompt holds. The LINKS are words, too, so
# that commands are texts of words.
MORE = " ..."
# A name must not extend a phrase to a longer one, as " armchair 1" would with the word ", and a".
_NAME = re.compile(r"[a-z]+ [0-9]+")
_KIND = re.compile(r"[a-z]+")


def vocabulary(kinds: Collection[str], names: Collection[str]) -> tuple[str, ...]:
    """Lists all words: the fixed ones, " apple" for each kind, " apple 1" for each name, and words of prompts and commands.

    A word's id is its index.

    Raises:
      ValueError: a kind that is not a word of small letters, or a name that is not such a word with a number.
    """
    for pattern, texts in ((_KIND, kinds), (_NAME, names)):
        strange = sorted(name for name in texts if not pattern.fullmatch(name))
        if strange:
            raise ValueError(f"cannot make a word of {strange[0]!r}")
    numbered = sorted((name.split()[0], int(name.split()[1])) for name in names)
    named = (f" {kind} {number}" for kind, number in numbered)
    return (*FIXED, *(f" {kind}" for kind in sorted(kinds)), *named, MORE, *dict.fromkeys(LINKS.values()))


class Splitter:
    """Splits texts into words: `split("You arrive at desk 1")` -> ids."""

    def __init__(self, words: Sequence[str]):
        self._id = {word: number for number, word in enumerate(words) if word}
        self._lengths = sorted({len(word) for word in self._id}, reverse=True)

    def __call__(self, text: str) -> list[int]:
        """Splits a text. Raises ValueError if no word fits."""
        ids, at = [], 0
        while at < len(text):
            fitting = (text[at : at + length] for length in self._lengths)
            word = next((part for part in fitting if part in self._id), None)
            if word is None:
                raise ValueError(f"no word for {text[at : at + 40]!r}")
            ids.append(self._id[word])
            at += len(word)
        return ids


def join(words: Sequence[str], ids: Iterable[int]) -> str:
    """Returns the text of an observation or a task."""
    return "".join([words[i] for i in ids])


def command(words: Sequence[str], ids: Sequence[int]) -> str:
    """Returns the command of an action, ids of (verb, first argument or 0, second argument or 0)."""
    verb, *arguments = (words[i] for i in ids)
    return verb + LINKS.get(verb, "").join(filter(None, arguments))
