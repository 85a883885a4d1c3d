"""Prompts and texts of a served policy, whether its tokenizer has a chat template or only the words of an environment."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hgpo_jax.policy.chat_frame import ChatFrame, sanitized
from hgpo_jax.policy.tokenizer import ACT


class ServedText:
    """Token ids of clients' texts, and the text of sampled ids.

    frame: that of a tokenizer with a chat template; by default as the policy was trained, or else with today's date.

    A word-level tokenizer without a chat template belongs to a small policy: it reads the last message of a conversation, and
    then the token that asks for an action.
    """

    def __init__(self, tokenizer, frame: ChatFrame | None = None):
        self._tokenizer, self.frame = tokenizer, frame
        if frame is None and getattr(tokenizer, "chat_template", None):
            self.frame = ChatFrame(tokenizer, usual_date=datetime.date.today())
        self._text = self.frame.text if self.frame else None
        self._special = frozenset(tokenizer.all_special_ids)
        self._switched: dict[bool, ChatFrame] = {}

    @property
    def has_switch(self) -> bool:
        """Whether the chat template has a switch for thoughts."""
        return self.frame is not None and self.frame.has_switch

    def frame_with(self, thinking: bool | None) -> ChatFrame | None:
        """Returns the frame, with this switch if it has one; None without a chat template."""
        if thinking is None or self.frame is None or not self.frame.has_switch:
            return self.frame
        return self._switched.setdefault(thinking, self.frame.switched(thinking))

    def inside_thought(self, thinking: bool | None) -> bool:
        """Whether an answer begins inside a thought."""
        frame = self.frame_with(thinking)
        return frame is not None and frame.inside_thought

    def tags(self, text: str) -> list[int]:
        """Encodes text of our own."""
        return self._text.tags(text) if self._text and text else []

    def conversation(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        begun: str = "",
        sampled: Mapping[int, list[int]] | None = None,
        thinking: bool | None = None,
    ) -> list[int]:
        """Builds the prompt that asks for the assistant's next message, or for the rest of one with this beginning.

        The beginning follows a thought that the template has opened, and is not part of it. sampled: number of a message -> the
        ids of its content, used instead of encoding it. Raises ValueError if the chat template rejects a message.
        """
        if frame := self.frame_with(thinking):
            if begun and frame.inside_thought:
                begun = "\n</think>\n\n" + begun
            return frame.conversation(messages, tools, sampled) + self.tags(begun)
        if tools:
            raise ValueError("tools: this policy's chat template does not show any; leave them out")
        return [*self.prompt(messages[-1]["content"]), self._tokenizer.convert_tokens_to_ids(ACT)]

    def sampled(self, ids: Sequence[int], text: str) -> list[int] | None:
        """Returns the ids of a sampled text, without the end token; None if others are special, or decode differently."""
        if not self.frame or self.frame.plain or (self.frame.hides_thoughts and "</think>" in text):
            return None  # earlier answers are not read, or not as a whole
        assert self._text
        ids = list(ids)
        if ids and ids[-1] in self._text.hidden:
            ids.pop()
        return ids if self._text.hidden.isdisjoint(ids) and self.decode(ids) == text else None

    def show_the_same(self, one: dict[str, Any], other: dict[str, Any], tools: Sequence[dict[str, Any]]) -> bool:
        """Whether the chat template shows the same text for two messages. Raises ValueError if it rejects one."""
        shown = ([{"role": "user", "content": ""}, message] for message in (one, other))
        first, second = (self._tokenizer.decode(self.conversation(messages, tools)) for messages in shown)
        return first == second

    def spells_token(self, text: str) -> bool:
        """Whether a text could not be part of a tool call in a later prompt (`ChatFrame.conversation`)."""
        return bool(self._text and self._text.marker_in(text))

    def prompt(self, text: str) -> list[int]:
        """Encodes a text unchanged: a special token spelled in it is text."""
        if self._text:
            return self._text.encode([text])[0]
        ids = self._tokenizer(sanitized(text), add_special_tokens=False).input_ids
        return [index for index in ids if index not in self._special]

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes sampled ids, without special tokens."""
        if self._text:
            return self._text.decode(ids)
        return self._tokenizer.decode([index for index in ids if index not in self._special])

    def token(self, index: int) -> str:
        """Returns a single token, special or not, as it is reported with its log-probability."""
        return self._tokenizer.decode([index])


class TextStream:
    """The text of a response during sampling, up to the first of some stop strings.

    Attributes:
      stopped: whether a stop string has occurred; later tokens are not reported.
    """

    BEHIND = 8  # tokens before the new ones that are decoded again: a token's text can depend on those before it

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]):
        self._decode, self._stop = decode, [text for text in stop if text]
        self._ids: list[int] = []
        self._begin = self._read = 0  # ids[begin:read] have been decoded and reported, except for the text held back
        self._held = ""  # possible beginning of a stop string
        self.stopped = False

    def push(self, ids: Sequence[int], *, last: bool) -> tuple[str, int]:
        """Returns the text that further tokens, if any, add, and how many of them there are until a stop string is complete.

        last: no others follow, so that nothing is held back.
        """
        if not self._stop:
            return self._push(ids, last), len(ids)
        said = ""
        for count, index in enumerate(ids, 1):
            said += self._push([index], last and count == len(ids))
            if self.stopped:
                return said, count
        return said + ("" if ids else self._push([], last)), len(ids)

    def _push(self, ids: Sequence[int], last: bool) -> str:
        self._ids += ids
        before, text = self._decode(self._ids[self._begin : self._read]), self._decode(self._ids[self._begin :])
        if last or not text.endswith("\ufffd"):  # otherwise the rest of a character is still to come
            self._held += text[len(before) :]
            self._read = len(self._ids)
            self._begin = max(self._begin, self._read - self.BEHIND)
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)]
        keep = 0 if last else self._beginning()
        said, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return said

    def _beginning(self) -> int:
        """Returns the number of characters at the end of the text held back that may begin a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
