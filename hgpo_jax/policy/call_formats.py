"""The forms in which families of models write tool calls, chosen by the chat template.

A form reads what follows the thought of an answer, and says how a call begins that an answer must contain.
"""

from __future__ import annotations

import abc
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
# What reading a call may raise: it is no JSON, nested too deeply, or has not the parts of a call.
NO_CALL = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_SURROGATE = re.compile("[\ud800-\udfff]")
_CALL_OR_THINK = re.compile(f"{CALL}|{THINK}")
_SPACE, _SEPARATOR = re.compile(r"\s*"), re.compile(r"\s*;?\s*")
_JSON = json.JSONDecoder()
_Value = TypeVar("_Value")


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


class WrittenCall(NamedTuple):
    """How a call of one tool is written: a text, its arguments as JSON, a text. name: the tool's."""

    name: str
    before: str
    after: str


class CallFormat(abc.ABC):
    """A family's form of tool calls.

    Args:
      tools: those that the prompt shows, as a chat template takes them.

    Attributes:
      opening: what a call begins with.
      parameters: name of a tool -> the JSON schema of its parameters.
      between: what stands between two calls of an answer, for a form that is written as JSON; None: only one can be shown.
    """

    opening: ClassVar[re.Pattern[str]]
    between: ClassVar[str | None] = None

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()):
        functions = [tool.get("function", tool) for tool in tools]
        self.parameters = {function["name"]: function.get("parameters") or {} for function in functions}
        self._opening_or_end = re.compile(f"{self.opening.pattern}|{THINK_END}")

    @abc.abstractmethod
    def begin(self, name: str) -> str:
        """Returns the beginning of a call of this tool, or of any tool if the name is empty."""

    def written(self, name: str) -> WrittenCall | None:
        """Returns how a whole call of a tool is written; None for a form whose arguments are no JSON."""
        return None

    @abc.abstractmethod
    def before(self, text: str) -> int:
        """Returns the length of the beginning of an answer that is no part of a call, whatever follows."""

    @abc.abstractmethod
    def read(self, text: str) -> tuple[int, list[Call]]:
        """Finds the calls in what follows a thought: (where the first one begins, all of them).

        Raises one of NO_CALL if something begins like a call and is none.
        """

    @abc.abstractmethod
    def values(self, text: str, at: int) -> tuple[list[Any], int]:
        """Reads what an opening at this place opens: (the values that may be calls, where it ends).

        What spells a closing tag in a string closes nothing. Raises ValueError or RecursionError.
        """

    def thought_end(self, text: str, at: int = 0) -> int:
        """Returns the end of the first </think> from `at` on that is not in a call; -1 if there is none."""
        last = text.rfind(THINK_END) + len(THINK_END)  # what is opened behind it does not matter
        while tag := self._opening_or_end.search(text, at, last):
            at = tag.end()
            if tag[0] == THINK_END:
                return at
            with contextlib.suppress(ValueError, RecursionError):
                _, at = self.values(text, tag.start())
        return -1


class TaggedCalls(CallFormat):
    """Calls between <tool_call> and </tool_call>.

    Several may stand between two tags. The closing tag may be missing at the end of the answer, which must not have been cut.
    """

    opening = re.compile(CALL)

    @abc.abstractmethod
    def call(self, value: Any) -> Call:
        """Makes a call of a value. Raises one of NO_CALL."""

    def before(self, text: str) -> int:
        at = text.find(CALL)
        return len(text) - overlap(text, [CALL]) if at < 0 else at

    def read(self, text: str) -> tuple[int, list[Call]]:
        calls: list[Call] = []
        first, at, part = len(text), 0, 0  # a part begins behind a call or a thought
        while tag := _CALL_OR_THINK.search(text, at):
            if tag[0] == CALL:
                first = min(first, tag.start())
                values, at = self.values(text, tag.start())
                calls += map(self.call, values)
                part = at
            elif (end := self.thought_end(text, tag.end())) >= 0:
                at = part = end
            elif text[part : tag.start()].strip():
                at = tag.end()  # a <think> in prose that no </think> follows is prose
            else:
                break
        return first, calls


class HermesCalls(TaggedCalls):
    """Calls as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

    between = "\n"

    def written(self, name: str) -> WrittenCall:
        return WrittenCall(name, f"{self.begin(name)} ", f"}}\n{CALL_END}")

    def begin(self, name: str) -> str:
        if not name:
            return f'{CALL}\n{{"name": "'
        # The blank after the colon belongs to the next token.
        return f'{CALL}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments":'

    def values(self, text: str, at: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        at += len(CALL)
        while True:
            at = _skip(_SPACE, text, at)
            if values and at == len(text):
                return values, at
            if values and text.startswith(CALL_END, at):
                return values, at + len(CALL_END)
            value, at = _JSON.raw_decode(text, at)
            values += value if isinstance(value, list) else [value]

    def call(self, value: Any) -> Call:
        return _json_call(value)


class QwenCoderCalls(TaggedCalls):
    """Calls as Qwen3-Coder, Qwen3.5 and Nemotron 3 write them, a tag for the function and one for each parameter.

    <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>

    The form quotes nothing. So a value ends at the first </parameter> that another parameter, or the end of the call, follows.
    """

    _FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
    _FUNCTION_END = re.compile(rf"\s*</function>\s*({CALL_END})?")
    _PARAMETER = re.compile(
        rf"\s*<parameter=([^<>\n]+)>(.*?)</parameter>"
        rf"(?=\s*(?:<parameter=[^<>\n]+>|</function>\s*(?:{CALL}|{CALL_END}|<function=[^<>\n]+>|\Z)))",
        re.DOTALL,
    )

    def begin(self, name: str) -> str:
        # The equals sign belongs to the token of a name.
        return f"{CALL}\n<function={name}>\n" if name else f"{CALL}\n<function"

    def values(self, text: str, at: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        at += len(CALL)
        while function := self._FUNCTION.match(text, at):
            at, arguments = function.end(), dict[str, str]()
            while parameter := self._PARAMETER.match(text, at):
                at = parameter.end()
                arguments[parameter[1]] = parameter[2].removeprefix("\n").removesuffix("\n")
            end = self._FUNCTION_END.match(text, at)
            if not end:
                raise ValueError("something else than parameters stands in a function")
            values.append((function[1], arguments))
            at = end.end()
            if end[1] or at == len(text):
                return values, at
        raise ValueError("no function stands in a call")

    def call(self, value: Any) -> Call:
        name, texts = value
        schemas = _keyword(self.parameters.get(name), "properties", dict)
        return _checked(name, {key: _typed(text, _types(schemas.get(key))) for key, text in texts.items()})


class LlamaCalls(CallFormat):
    """Calls as Llama 3 writes them: {"name": ..., "parameters": {...}}, several with or without a semicolon between them.

    No tag tells a call from JSON of another meaning. So an answer calls tools only if all that follows its thought is calls,
    perhaps behind a <|python_tag|>, and if each of them names a tool of the prompt and has no other fields.
    """

    _KEYS = ('"name"', '"parameters"', '"arguments"', '"type"')
    _FIELDS = ({"name", "parameters"}, {"name", "arguments"})
    opening = re.compile(rf"\{{\s*(?:{'|'.join(_KEYS)})")

    def written(self, name: str) -> WrittenCall:
        return WrittenCall(name, f"{self.begin(name)} ", "}")

    def begin(self, name: str) -> str:
        if not name:
            return '{"name": "'
        # The blank after the colon belongs to the next token.
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters":'

    def before(self, text: str) -> int:
        if self._may_begin(text):
            return 0
        thought = self.thought_end(text)
        return thought if thought >= 0 and self._may_begin(text[thought:]) else len(text)

    def _may_begin(self, text: str) -> bool:
        """Whether a text, or what may follow it, begins with a call."""
        text = text.lstrip()
        if PYTHON_TAG.startswith(text):
            return True
        text = text.removeprefix(PYTHON_TAG).lstrip()
        inner = text.removeprefix("{").lstrip()
        return not text or (text[0] == "{" and any(key.startswith(inner[: len(key)]) for key in self._KEYS))

    def read(self, text: str) -> tuple[int, list[Call]]:
        calls: list[Call] = []
        if not self._may_begin(text):
            return len(text), calls
        text = text.strip().removeprefix(PYTHON_TAG)
        at = _skip(_SPACE, text, 0)
        while at < len(text):
            values, at = self.values(text, at)
            calls += map(self._call, values)
            at = _skip(_SEPARATOR, text, at)
        return 0, calls

    def values(self, text: str, at: int) -> tuple[list[Any], int]:
        value, at = _JSON.raw_decode(text, at)
        return [value], at

    def _call(self, value: Any) -> Call:
        """Makes a call of a JSON value. Raises one of NO_CALL."""
        if value["name"] not in self.parameters or value.keys() - {"type"} not in self._FIELDS:
            raise ValueError("it is no tool's name, or has other fields")
        if value.get("type", "function") != "function":
            raise ValueError("it is of another type")
        return _json_call(value)


# Marks that a chat template has all of -> the form of calls in the answers to it. The first line that applies counts.
CALL_FORMATS: dict[tuple[str, ...], type[CallFormat]] = {
    (CALL, "<parameter="): QwenCoderCalls,
    (CALL,): HermesCalls,
    ("ipython", '"parameters": '): LlamaCalls,
}


def call_format(template: str, tools: Sequence[Mapping[str, Any]] = ()) -> CallFormat:
    """Chooses the form of calls of these tools by the chat template; that of Hermes for a template that does not tell."""
    forms = (form for marks, form in CALL_FORMATS.items() if all(mark in template for mark in marks))
    return next(forms, HermesCalls)(tools)


def overlap(text: str, marks: Sequence[str]) -> int:
    """Returns the number of characters at a text's end that may begin one of the marks."""
    longest = max(map(len, marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Returns the end of what a pattern that matches anywhere matches here."""
    return pattern.match(text, at).end()  # type: ignore[union-attr]


def _json_call(value: Any) -> Call:
    """Makes a call of a JSON value. Raises one of NO_CALL."""
    name, arguments = value["name"], value.get("arguments", value.get("parameters"))  # the second name is Llama 3's
    if isinstance(arguments, str):  # JSON in a string
        arguments = json.loads(arguments or "{}")
    return _checked(name, {} if arguments is None else arguments)


def _checked(name: Any, arguments: Any) -> Call:
    """Makes a call of its parts. Raises one of NO_CALL."""
    if not (isinstance(name, str) and isinstance(arguments, dict) and name.isprintable()):
        raise TypeError("a call has a name and an object of arguments")
    json.dumps(arguments, allow_nan=False)
    return Call(name, without_surrogates(arguments))


def without_surrogates(value: Any) -> Any:
    """Returns a JSON value with U+FFFD in place of lone surrogates, as an escape may spell them; many clients take none."""
    written = json.dumps(value, ensure_ascii=False)
    return json.loads(_SURROGATE.sub("\ufffd", written)) if _SURROGATE.search(written) else value


_WORDS = {"True": True, "False": False, "None": None}  # as chat templates written in Jinja spell them
_TYPE_NAMES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
    str: "string",
}


def _types(schema: Any) -> set[str]:
    """Returns the names of the types that a JSON schema allows; none if it does not tell, as with a reference."""
    types = [_keyword(schema, "type", str), *_keyword(schema, "type", list)]
    names = {name for name in types if isinstance(name, str) and name}
    for part in [*_keyword(schema, "anyOf", list), *_keyword(schema, "oneOf", list)]:
        names |= _types(part)
    return names or {_TYPE_NAMES[type(value)] for value in _keyword(schema, "enum", list)}


def _keyword(schema: Any, name: str, kind: type[_Value]) -> _Value:
    """Returns a keyword of a JSON schema; an empty one where a client's schema has none of this kind, or is no schema."""
    value = schema.get(name) if isinstance(schema, dict) else None
    return value if isinstance(value, kind) else kind()


def _typed(text: str, types: set[str]) -> Any:
    """Returns what a text without quotes spells: JSON of one of these types, or else itself, a string."""
    try:
        value = _WORDS[text] if text in _WORDS else json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not types:
        return value if isinstance(value, dict | list) else text
    name = _TYPE_NAMES[type(value)]
    fits = name in types - {"string"} or (name == "integer" and "number" in types)
    return value if fits or "string" not in types else text
