"""The parsing of answers: from sampled ids to text, and from text to a thought, a text and tool calls.

Training, serving, chat and cloning all read answers with what stands here. An answer is text in which tags mark a thought and
an action, and which calls tools in its family's form (`call_formats`); its prompt may already contain its beginning
(`ChatFrame.opened`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hgpo_jax.policy.call_formats import CALL, CALL_END, NO_CALL, THINK, THINK_END, Call, CallFormat, HermesCalls, overlap

ACTION, ACTION_END = "<action>", "</action>"
TAGS = (THINK, THINK_END, ACTION, ACTION_END, CALL, CALL_END)
_ACTION, _ACTION_END = (re.compile(tag, re.ASCII | re.IGNORECASE) for tag in (ACTION, ACTION_END))
_CHINESE = re.compile("[\u4e00-\u9fff]")


class Answer(NamedTuple):
    """A parsed answer. thought: with its tags, as far as they were sampled. text: what follows, up to the first call."""

    thought: str
    text: str
    calls: Sequence[Call] = ()

    @property
    def content(self) -> str:
        """Everything before the first call."""
        return self.thought + self.text


class AnswerParser:
    """Parses answers to one prompt.

    Args:
      calls: the form of tool calls; None: none are read.
      inside_thought: whether the prompt has begun a thought that the answer has to end.
      forges: whether a text must not stand in a call, since no later prompt could show it.
      most: the number of calls that a later prompt can show; the others are dropped. None: any number.
    """

    def __init__(
        self,
        calls: CallFormat | None = None,
        inside_thought: bool = False,
        forges: Callable[[str], Any] = lambda text: False,
        most: int | None = None,
    ):
        self._calls, self._inside_thought, self._forges, self._most = calls, inside_thought, forges, most

    def parse(self, text: str, complete: bool = True) -> Answer:
        """Parses an answer. If one of its calls cannot be read, or if it was cut, it has no calls, and all of it is text.

        In a cut answer the call that is missing may be the one that the others depend on.
        """
        thought, rest = split_thought(text, self._inside_thought, self._calls)
        if self._calls is None or not complete:
            return Answer(thought, rest)
        try:
            first, calls = self._calls.read(rest)
        except NO_CALL:
            return Answer(thought, rest)
        if not calls or self._forges(json.dumps(calls, ensure_ascii=False)):
            return Answer(thought, rest)
        return Answer(thought, rest[:first].rstrip(), calls[: self._most])

    def settled(self, text: str) -> int:
        """Returns how much of the answer that begins with this text belongs to its content, whatever follows."""
        return len(text) if self._calls is None else len(text[: self._calls.before(text)].rstrip())


def split_thought(text: str, inside: bool = False, calls: CallFormat | None = None) -> tuple[str, str]:
    """Splits an answer after its thought, which its prompt may have begun (`inside`): (thought with its tags, the rest).

    The prompt may also have begun a thought unnoticed, so that a </think> alone ends one, unless the answer begins with a call.

    calls: the form of tool calls, by default that of Hermes; a </think> in a call ends no thought.
    """
    form = calls or HermesCalls()
    begins, end = text.lstrip(), form.thought_end(text)
    inside |= begins.startswith(THINK)
    if end < 0:
        return (text, "") if inside else ("", text)
    if inside or not (form.opening.match(begins) or THINK in text[:end]):
        return text[:end], text[end:]
    return "", text


def find_action(text: str, fallback: int, opened: str = "", *, lower_case: bool = False) -> tuple[str, bool]:
    """Returns the action of an answer, and whether the answer is well formed, by verl-agent's rules.

    The action is the text between the first <action> and the first </action>, in capitals or not; without both tags it is the
    last `fallback` characters. A well-formed answer also has <think> and </think>, which `opened` may hold. Whether the action
    is admissible is not checked here.

    lower_case: whether the action loses its capitals, and an answer with a Chinese character is malformed, as verl-agent's.
    """
    answer = text.lower() if lower_case else text
    begin, end = _ACTION.search(answer), _ACTION_END.search(answer)
    if not (begin and end):
        return answer[-fallback:], False
    action = answer[begin.end() : end.start()].strip()
    tagged = all(tag in opened + text for tag in (THINK, THINK_END))
    return action, tagged and not (lower_case and _CHINESE.search(text))


class TextStream:
    """The text of sampled ids during sampling, up to the first of some stop strings.

    Attributes:
      stopped: the stop string that has occurred, after which tokens are not reported; "" before.
    """

    BEHIND = 8  # tokens before the new ones that are decoded again: a token's text can depend on those before it

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()):
        self._decode, self._stop = decode, [text for text in stop if text]
        self._ids: list[int] = []
        self._begin = self._end = 0  # ids[begin:end] have been decoded and reported, except for the text held back
        self._held = ""  # possible beginning of a stop string
        self.stopped = ""

    def push(self, ids: Sequence[int], *, last: bool) -> tuple[str, int]:
        """Returns the text that further tokens, if any, add, and how many of them there are until a stop string is complete.

        last: no others follow, so that nothing is held back.
        """
        if not self._stop:
            return self._push(ids, last), len(ids)
        text = ""
        for count, index in enumerate(ids, 1):
            text += self._push([index], last and count == len(ids))
            if self.stopped:
                return text, count
        return text + ("" if ids else self._push([], last)), len(ids)

    def _push(self, ids: Sequence[int], last: bool) -> str:
        self._ids += ids
        before, text = self._decode(self._ids[self._begin : self._end]), self._decode(self._ids[self._begin :])
        if last or not text.endswith("\ufffd"):  # otherwise the rest of a character is still to come
            self._held += text[len(before) :]
            self._end = len(self._ids)
            self._begin = max(self._begin, self._end - self.BEHIND)
        places = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if places:
            at, self.stopped = min(places)
            return self._held[:at]
        num_held = 0 if last else overlap(self._held, self._stop)
        text, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
        return text
