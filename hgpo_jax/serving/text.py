"""Prompts and texts of a served policy, whether its tokenizer has a chat template or only the words of an environment."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from hgpo_jax.policy.answers import THINK_END, AnswerParser
from hgpo_jax.policy.chat_template import ChatFrame, sanitized
from hgpo_jax.policy.tokenizer import ACT

_BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}  # of the letters of byte-level vocabularies


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
        if thinking not in self._switched:  # which takes a quarter of a second to make
            self._switched[thinking] = self.frame.switched(thinking)
        return self._switched[thinking]

    def parser(self, tools: Sequence[dict[str, Any]], beginning: str, thinking: bool | None) -> AnswerParser:
        """Returns the parser of answers to such a prompt; `beginning` as in `conversation`."""
        frame = self.frame_with(thinking)
        return frame.parser(tools, beginning) if frame else AnswerParser()

    def call_beginning(self, tools: Sequence[dict[str, Any]], name: str | None) -> str:
        """Returns the beginning of an answer that must call this tool, or any if the name is empty; "" if it is None."""
        return self.frame.call_format(tools).begin(name) if self.frame and name is not None else ""

    def opened_thought(self, thinking: bool | None) -> str:
        """Returns the beginning of a thought with which prompts end, where the answer has to go on with it; else ""."""
        frame = self.frame_with(thinking)
        return frame.opened if frame and frame.inside_thought else ""

    def tags(self, text: str) -> list[int]:
        """Encodes text of our own."""
        return self._text.tags(text) if self._text and text else []

    def conversation(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        beginning: str = "",
        sampled: Mapping[int, list[int]] | None = None,
        thinking: bool | None = None,
    ) -> list[int]:
        """Builds the prompt that asks for the assistant's next message, or for the rest of one with this beginning.

        The beginning follows a thought that the template has opened, and is not part of it. sampled: number of a message -> the
        ids of its content, used instead of encoding it. Several system messages at the beginning are joined where the template
        does not take them. Raises ValueError if the chat template rejects a message.
        """
        if frame := self.frame_with(thinking):
            if beginning and frame.inside_thought:
                beginning = f"\n{THINK_END}\n\n{beginning}"
            try:
                ids = frame.conversation(messages, tools, sampled)
            except ValueError as error:
                system = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
                if len(system) < 2:
                    raise
                joined = {"role": "system", "content": "\n\n".join(message["content"] for message in system)}
                moved = {number - len(system) + 1: ids for number, ids in (sampled or {}).items()}
                try:
                    ids = frame.conversation([joined, *messages[len(system) :]], tools, moved)
                except ValueError:
                    raise error from None  # which counts the messages as they are
            return ids + self.tags(beginning)
        if tools:
            raise ValueError("tools: this policy's chat template does not show any; leave them out")
        return [*self.prompt(messages[-1]["content"]), self._tokenizer.convert_tokens_to_ids(ACT)]

    def sampled(self, ids: Sequence[int], text: str) -> list[int] | None:
        """Returns the ids of a sampled text, without the end token; None if others are special, or decode differently."""
        if not self.frame or self.frame.plain or (self.frame.hides_thoughts and THINK_END in text):
            return None  # earlier answers are not read, or not as a whole
        assert self._text
        ids = list(ids)
        if ids and ids[-1] in self._text.hidden:
            ids.pop()
        return ids if self._text.hidden.isdisjoint(ids) and self.decode(ids) == text else None

    def show_the_same(self, one: dict[str, Any], other: dict[str, Any], tools: Sequence[dict[str, Any]]) -> bool:
        """Whether the chat template shows the same text for two messages. Raises ValueError if it rejects one."""
        conversations = ([{"role": "user", "content": ""}, message] for message in (one, other))
        first, second = (self._tokenizer.decode(self.conversation(messages, tools)) for messages in conversations)
        return first == second

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

    def token_bytes(self, index: int) -> list[int] | None:
        """Returns the bytes of a single token; None for a part of a character in a vocabulary that is not byte-level."""
        text = self.token(index)
        if "\ufffd" not in text:
            return list(text.encode())
        piece = self._tokenizer.convert_ids_to_tokens(index)
        code = bytes(_BYTE_OF[letter] for letter in piece) if _BYTE_OF.keys() >= set(piece) else b""
        return list(code) if code.decode(errors="replace") == text else None
