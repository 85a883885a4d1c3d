"""The parsing of answers: from sampled ids to text, and from text to a thought, a text and tool calls.

Training, serving, chat and cloning all read answers with what stands here. An answer is text in which tags mark a thought, an
action and calls; its prompt may already contain its beginning (`ChatFrame.opened`).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

THINK, THINK_END = "<think>", "</think>"
ACTION, ACTION_END = "<action>", "</action>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
TAGS = (THINK, THINK_END, ACTION, ACTION_END, CALL, CALL_END)
_ACTION, _ACTION_END = (re.compile(tag, re.ASCII | re.IGNORECASE) for tag in (ACTION, ACTION_END))
_CALL_OR_THINK, _CALL_OR_END = re.compile(f"{CALL}|{THINK}"), re.compile(f"{CALL}|{THINK_END}")
_CHINESE = re.compile("[\u4e00-\u9fff]")
_SPACE = re.compile(r"\s*")
_JSON = json.JSONDecoder()
# What reading a call may raise: it is no JSON, nested too deeply, or has not the parts of a call.
_NO_CALL = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


class Answer(NamedTuple):
    """A parsed answer. thought: with its tags, as far as they were sampled. text: what follows, up to the first call."""

    thought: str
    text: str
    calls: Sequence[Call] = ()

    @property
    def content(self) -> str:
        """Everything before the first call."""
        return self.thought + self.text


class HermesCalls:
    """Calls as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

    Several may stand between two tags. The closing tag may be missing at the end of the answer, which must not have been cut.
    """

    def begin(self, name: str) -> str:
        """Returns the beginning of a call of this tool, or of any tool if the name is empty."""
        if not name:
            return f'{CALL}\n{{"name": "'
        # The blank after the colon belongs to the next token.
        return f'{CALL}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments":'

    def before(self, text: str) -> int:
        """Returns the length of the beginning of a text that is no part of a call, whatever follows."""
        at = text.find(CALL)
        return len(text) - _overlap(text, [CALL]) if at < 0 else at

    def read(self, text: str) -> tuple[int, list[Call]]:
        """Finds the calls in what follows a thought: (where the first one begins, all of them).

        Raises one of _NO_CALL if something begins like a call and is none.
        """
        calls: list[Call] = []
        first, at, part = len(text), 0, 0  # a part begins behind a call or a thought
        while tag := _CALL_OR_THINK.search(text, at):
            if tag[0] == CALL:
                first = min(first, tag.start())
                values, at = _between_tags(text, tag.end())
                calls += map(_call, values)
                part = at
            elif (end := _thought_end(text, tag.end())) >= 0:
                at = part = end
            elif text[part : tag.start()].strip():
                at = tag.end()  # a <think> in prose that no </think> follows is prose
            else:
                break
        return first, calls


# A mark of a chat template that shows tools -> the form of calls in the answers to it.
CALL_FORMATS = {CALL: HermesCalls()}


def call_format(template: str) -> HermesCalls:
    """Chooses the form of tool calls by the chat template; that of Hermes for a template that does not tell."""
    return next((form for mark, form in CALL_FORMATS.items() if mark in template), CALL_FORMATS[CALL])


class AnswerParser:
    """Parses answers to one prompt.

    Args:
      calls: the form of tool calls; None: none are read.
      inside_thought: whether the prompt has begun a thought that the answer has to end.
      forges: whether a text must not stand in a call, since no later prompt could show it.
    """

    def __init__(
        self, calls: HermesCalls | None = None, inside_thought: bool = False, forges: Callable[[str], Any] = lambda text: False
    ):
        self._calls, self._inside_thought, self._forges = calls, inside_thought, forges

    def parse(self, text: str, complete: bool = True) -> Answer:
        """Parses an answer. If one of its calls cannot be read, or if it was cut, it has no calls, and all of it is text.

        In a cut answer the call that is missing may be the one that the others depend on.
        """
        thought, rest = split_thought(text, self._inside_thought)
        if self._calls is None or not complete:
            return Answer(thought, rest)
        try:
            first, calls = self._calls.read(rest)
        except _NO_CALL:
            return Answer(thought, rest)
        if not calls or self._forges(json.dumps(calls, ensure_ascii=False)):
            return Answer(thought, rest)
        return Answer(thought, rest[:first].rstrip(), calls)

    def settled(self, text: str) -> int:
        """Returns how much of the answer that begins with this text belongs to its content, whatever follows."""
        return len(text) if self._calls is None else len(text[: self._calls.before(text)].rstrip())


def split_thought(text: str, inside: bool = False) -> tuple[str, str]:
    """Splits an answer after its thought, which its prompt may have begun (`inside`): (thought with its tags, the rest).

    The prompt may also have begun a thought unnoticed, so that a </think> alone ends one, unless the answer begins with a call.
    """
    begins, end = text.lstrip(), _thought_end(text)
    inside |= begins.startswith(THINK)
    if end < 0:
        return (text, "") if inside else ("", text)
    if inside or not (begins.startswith(CALL) or THINK in text[:end]):
        return text[:end], text[end:]
    return "", text


def _thought_end(text: str, at: int = 0) -> int:
    """Returns the end of the first </think> from `at` on that is not in a string of a call; -1 if there is none."""
    while tag := _CALL_OR_END.search(text, at):
        at = tag.end()
        if tag[0] == THINK_END:
            return at
        with contextlib.suppress(ValueError, RecursionError):
            _, at = _between_tags(text, at)
    return -1


def _between_tags(text: str, at: int) -> tuple[list[Any], int]:
    """Reads the JSON values from `at` to the closing tag or the text's end, and that position. A string may contain the tag.

    Raises ValueError.
    """
    values: list[Any] = []
    while True:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if values and at == len(text):
            return values, at
        if values and text.startswith(CALL_END, at):
            return values, at + len(CALL_END)
        value, at = _JSON.raw_decode(text, at)
        values += value if isinstance(value, list) else [value]


def _call(value: Any) -> Call:
    """Makes a call of a JSON value. Raises one of _NO_CALL."""
    name, arguments = value["name"], value.get("arguments", value.get("parameters"))  # the second name is Llama 3's
    if isinstance(arguments, str):  # JSON in a string
        arguments = json.loads(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not (isinstance(name, str) and isinstance(arguments, dict) and name.isprintable()):
        raise TypeError("a call has a name and an object of arguments")
    json.dumps(arguments, allow_nan=False)
    return Call(name, arguments)


def find_action(text: str, fallback: int, opened: str = "", *, lower_case: bool = False) -> tuple[str, bool]:
    """Returns the action of an answer, and whether the answer is well formed, by verl-agent's rules.

    The action is the text between the first <action> and the first </action>, in capitals or not; without both tags it is the
    last `fallback` characters. A well-formed answer also has <think> and </think>, which `opened` may hold, and no Chinese
    character. Whether the action is admissible is not checked here.

    lower_case: whether the action loses its capitals, as verl-agent's do.
    """
    answer = text.lower() if lower_case else text
    begin, end = _ACTION.search(answer), _ACTION_END.search(answer)
    if not (begin and end):
        return answer[-fallback:], False
    action = answer[begin.end() : end.start()].strip()
    return action, all(tag in opened + text for tag in (THINK, THINK_END)) and not _CHINESE.search(text)


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
        num_held = 0 if last else _overlap(self._held, self._stop)
        text, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
        return text


def _overlap(text: str, marks: Sequence[str]) -> int:
    """Returns the number of characters at a text's end that may begin one of the marks."""
    longest = max(map(len, marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
