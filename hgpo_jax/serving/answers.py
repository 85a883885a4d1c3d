"""Answers in the format of OpenAI's API."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from hgpo_jax.policy.chat_frame import sanitized
from hgpo_jax.serving.requests import ChatRequest, NamedTool, Sampling
from hgpo_jax.serving.text import ServedText, TextStream

_CALL, _CALL_END, _THOUGHT, _THOUGHT_END = "<tool_call>", "</tool_call>", "<think>", "</think>"
_TAG, _CALL_OR_END = re.compile(f"{_CALL}|{_THOUGHT}"), re.compile(f"{_CALL}|{_THOUGHT_END}")
_SPACE = re.compile(r"\s*")
_JSON = json.JSONDecoder()


@dataclasses.dataclass
class Choice:
    """A response to a request during sampling."""

    stream: TextStream
    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logp: list[float] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None  # stop or length, once the response has ended


@dataclasses.dataclass
class Piece:
    """The addition of one step to a choice. so_far: its text including this piece."""

    index: int
    text: str
    so_far: str
    tokens: list[int]
    logp: list[float]
    finish_reason: str | None


def usage(choices: Sequence[Choice], prompts: Sequence[list[int]]) -> dict[str, int]:
    read, sampled = sum(map(len, prompts)), sum(len(choice.tokens) for choice in choices)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


class Form:
    """The format of the answers to one request: whole, or as a stream of an opening, pieces and perhaps a closing.

    begun: the beginning of each answer that is the end of its prompt and is not sampled.
    """

    begun = ""
    prefix = whole_name = streamed_name = ""  # prefix of ids; the names of the two kinds of objects

    def __init__(self, asked: Sampling, texts: ServedText):
        self._asked, self._texts = asked, texts

    def whole(self, choices: Sequence[Choice], prompts: Sequence[list[int]]) -> dict[str, Any]:
        """Builds the non-streaming response body."""
        written = [
            self._choice(Piece(i, c.text, c.text, c.tokens, c.logp, c.finish_reason), "message") for i, c in enumerate(choices)
        ]
        return {"object": self.whole_name, "choices": written} | self._prompt_ids(prompts)

    def opening(self, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
        """Builds the chunks before the first piece."""
        return [self._streamed([], self._prompt_ids(prompts))] if self._asked.return_token_ids else []

    def piece(self, piece: Piece) -> dict[str, Any]:
        return self._streamed([self._choice(piece, "delta")])

    def closing(self) -> dict[str, Any]:
        """Builds the final chunk of a stream, which carries the usage."""
        return self._streamed([])

    def _streamed(self, choices: list[dict[str, Any]], more: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"object": self.streamed_name, "choices": choices} | (more or {})

    def _prompt_ids(self, prompts: Sequence[list[int]]) -> dict[str, Any]:
        """Returns one list for each prompt, if there are several."""
        return {"prompt_token_ids": prompts[0] if len(prompts) == 1 else prompts} if self._asked.return_token_ids else {}

    def _choice(self, piece: Piece, where: str) -> dict[str, Any]:
        choice = {"index": piece.index, "finish_reason": piece.finish_reason, "logprobs": self._logprobs(piece)}
        ids = {"token_ids": piece.tokens} if self._asked.return_token_ids else {}
        return choice | self._said(piece, where) | ids

    def _said(self, piece: Piece, where: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        raise NotImplementedError


class ChatForm(Form):
    """The format of /v1/chat/completions."""

    prefix, whole_name, streamed_name = "chatcmpl", "chat.completion", "chat.completion.chunk"
    _asked: ChatRequest

    def opening(self, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
        roles = [
            {"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}
            for i in range(self._asked.n)
        ]
        return [self._streamed(roles, self._prompt_ids(prompts))]

    def _choice(self, piece: Piece, where: str) -> dict[str, Any]:
        choice, wanted = super()._choice(piece, where), self._asked.response_format
        if piece.finish_reason and wanted and wanted.type == "json_object" and not _is_object(piece.so_far):
            choice["warning"] = "response_format: the answer is no JSON object"
        return choice

    def _said(self, piece: Piece, where: str) -> dict[str, Any]:
        return {where: ({"role": "assistant"} if where == "message" else {}) | {"content": piece.text}}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._asked.wants_logprobs:
            return None
        content = []
        for token, logp in zip(map(self._texts.token, piece.tokens), piece.logp, strict=True):
            # A part of a character has no text, and only the tokenizer's own model knows its bytes.
            coded = None if "\ufffd" in token else list(token.encode())
            content.append({"token": token, "logprob": logp, "bytes": coded, "top_logprobs": []})
        return {"content": content, "refusal": None}


class ToolForm(ChatForm):
    """The format of /v1/chat/completions with tools. Calls are recognized at the end, so a stream's text comes then, whole."""

    def __init__(self, asked: ChatRequest, texts: ServedText):
        super().__init__(asked, texts)
        self.begun = call_begun(asked)
        self._inside = not self.begun and texts.inside_thought(asked.thinking)

    def _choice(self, piece: Piece, where: str) -> dict[str, Any]:
        text = self.begun + piece.so_far if piece.finish_reason else ""
        choice = super()._choice(dataclasses.replace(piece, text=text, so_far=text), where)
        # An answer that was cut makes no calls: the call that is cut off may be the one that the others depend on.
        content, calls = tool_calls(text, self._inside) if piece.finish_reason == "stop" else ("", [])
        calls = calls if self._asked.parallel_tool_calls else calls[:1]
        if calls and not self._texts.spells_token(json.dumps(calls, ensure_ascii=False)):
            choice["finish_reason"] = "tool_calls"
            choice[where] |= {"content": content or None, "tool_calls": calls}
            choice.pop("warning", None)  # text has none
        elif self.begun and piece.finish_reason:
            choice["warning"] = "tool_choice: the answer is no call that can be read"
        return choice


def call_begun(asked: ChatRequest) -> str:
    """Returns the beginning of an answer that must call a tool, as `tool_calls` reads it; "" if it need not."""
    if isinstance(asked.tool_choice, NamedTool):
        name = json.dumps(asked.tool_choice.function.name, ensure_ascii=False)
        return f'{_CALL}\n{{"name": {name}, "arguments":'  # the blank belongs to the next token
    return f'{_CALL}\n{{"name": "' if asked.tool_choice == "required" else ""


def _is_object(text: str) -> bool:
    """Whether an answer, perhaps after a thought, is a JSON object."""
    try:
        return isinstance(json.loads(text.rpartition(_THOUGHT_END)[2]), dict)
    except (ValueError, RecursionError):
        return False


def tool_calls(text: str, inside_thought: bool = False) -> tuple[str, list[dict[str, Any]]]:
    """Returns the text of an answer before its tool calls, and the calls; if one of them cannot be read, there are none.

    Calls are written <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen2.5's chat template asks; several may
    stand between two tags, and arguments may be absent, null or JSON in a string. The closing tag may be missing at the
    answer's end, which must not have been cut. Text inside a thought is not a call. The prompt may have begun the thought
    (`inside_thought`), or its beginning may be missing if the answer does not begin with a call. A <think> in prose without
    a </think> is prose.
    """
    calls: list[dict[str, Any]] = []
    first, end = len(text), _thought_end(text, 0)
    if inside_thought and end < 0:
        return text, []
    begun_by_nobody = not text.lstrip().startswith(_CALL) and _THOUGHT not in text[: max(end, 0)]
    part = at = max(end, 0) if inside_thought or begun_by_nobody else 0  # a thought without an end begins a part
    while tag := _TAG.search(text, at):
        if tag[0] == _THOUGHT:
            end = _thought_end(text, tag.end())
            if end < 0 and not text[part : tag.start()].strip():
                break
            at, part = (end, end) if end >= 0 else (tag.end(), part)
            continue
        first = min(first, tag.start())
        try:
            written, at = _between_tags(text, tag.end())
            functions = [_function(call) for call in written]
        except (ValueError, KeyError, TypeError, RecursionError):
            return text, []
        part = at
        for function in functions:
            identity = f"call_{secrets.token_hex(12)}"
            calls.append({"index": len(calls), "id": identity, "type": "function", "function": function})
    return text[:first].strip() if calls else text, calls


def _thought_end(text: str, at: int) -> int:
    """Returns the end of the first </think> from `at` on that is not in a string of a call; -1 if there is none."""
    while tag := _CALL_OR_END.search(text, at):
        at = tag.end()
        if tag[0] == _THOUGHT_END:
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
        if values and text.startswith(_CALL_END, at):
            return values, at + len(_CALL_END)
        value, at = _JSON.raw_decode(text, at)
        values += value if isinstance(value, list) else [value]


def _function(call: Any) -> dict[str, str]:
    """Returns a call in the API's format. Raises ValueError, KeyError or TypeError if it is not a call."""
    name, arguments = call["name"], call.get("arguments", call.get("parameters"))  # the second name is Llama 3's
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not (isinstance(name, str) and isinstance(arguments, dict) and sanitized(name) == name):
        raise TypeError("a call has a name and an object of arguments")
    return {"name": name, "arguments": json.dumps(arguments, allow_nan=False)}


class TextForm(Form):
    """The format of /v1/completions."""

    prefix = "cmpl"
    whole_name = streamed_name = "text_completion"

    def _said(self, piece: Piece, where: str) -> dict[str, Any]:
        return {"text": piece.text}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._asked.wants_logprobs:
            return None
        tokens = list(map(self._texts.token, piece.tokens))
        return {"tokens": tokens, "token_logprobs": piece.logp, "top_logprobs": None, "text_offset": None}
