"""What an answer must be, JSON of a schema or calls of tools, and its grammar.

The grammars are in the variant of Lark's language that llguidance reads (docs/syntax.md of its repository).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from hgpo_jax.policy.call_formats import CALL, THINK, THINK_END, CallFormat, HermesCalls
from hgpo_jax.serving.requests import Conversation, SamplingRequest
from hgpo_jax.serving.text import ServedText
from hgpo_jax.utils.errors import one_line

MAX_CHARACTERS, MAX_DEPTH = 2**16, 100  # of a schema, written as JSON
# Blanks are bounded, so that no answer is an endless line of them. oneOf is read as anyOf.
_STYLE = {"whitespace_pattern": r"\n?[ \t]{0,16}", "coerce_one_of": True}
_ANY = "/(?s:.*)/"
_OBJECT = {"type": "object"}
_WORDS = re.compile(r'"[^"]*"|[{}\[\]:,]|\s+|[^"{}\[\]:,\s]+')


class Json(NamedTuple):
    """JSON in an answer. field: the request's field that asks for it. strict: whether what cannot be enforced is refused."""

    field: str
    schema: Mapping[str, Any]
    strict: bool = True

    def check(self) -> None:
        """Raises ValueError for a schema that is too large to be compiled for every client."""
        depth, level = 0, [self.schema]
        while level:
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"{self.field}: the schema is nested more than {MAX_DEPTH} levels deep; make it simpler")
            nested = (one.values() if isinstance(one, Mapping) else one for one in level if isinstance(one, Mapping | list))
            level = [one for some in nested for one in some]
        if (length := len(json.dumps(self.schema))) > MAX_CHARACTERS:
            raise ValueError(
                f"{self.field}: the schema has {length:,} characters, of at most {MAX_CHARACTERS:,}; make it simpler"
            )

    @property
    def lark(self) -> str:
        return "%json " + json.dumps({**self.schema, "x-guidance": _STYLE | {"lenient": not self.strict}})


@dataclasses.dataclass(frozen=True)
class AnswerForm:
    """What an answer must be.

    thought: whether its prompt has begun one, or it may begin with one; what it must be comes after that.
    json: what it is, if it calls no tool; None: it may be any text.
    calls, arguments: the form of calls, and for each tool that it may call the arguments.
    begun: the beginning of the call that the prompt has begun; None: the answer need not call a tool.
    several: whether it may have several calls.
    """

    thought: Literal["none", "possible", "begun"] = "none"
    json: Json | None = None
    calls: CallFormat | None = None
    arguments: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    begun: str | None = None
    several: bool = False

    def parts(self) -> Iterator[Json]:
        """Yields all JSON that it may have."""
        yield from [self.json] if self.json else []
        yield from self.arguments.values()

    def lark(self, special: Mapping[str, int]) -> str:
        """Writes the grammar. special: token -> the id of each token that no text of the grammar spells."""
        if self.begun is not None:
            answer = "rest"
        elif self.json:
            answer = "json | calls" if self.arguments else "json"
        else:
            answer = "text | past_call rest"
        thought = {"none": "", "begun": "past_thought /\\s*/", "possible": f"({_written(THINK, special)} past_thought /\\s*/)?"}
        rules = [f"start: {thought[self.thought]} answer", f"answer: {answer}"]
        rules += [] if self.thought == "none" else _past("past_thought", THINK_END, special)
        rules += [f"json: {self.json.lark}"] if self.json else []
        if "text" in answer:
            free = f"{_ANY} & ~/{THINK}(?s:.*)/" if self.thought == "possible" and THINK not in special else _ANY
            rules += [*_past("past_call", CALL, special, free), f"text: TEXT\nTEXT: {free} & ~{_with(CALL)}"]
        return "\n".join([*rules, *self._call_rules(special)])

    def _call_rules(self, special: Mapping[str, int]) -> list[str]:
        """Writes the rules `calls`, and `rest`, which follows the beginning of the first call."""
        if not self.arguments or self.calls is None:
            return []
        begun, whole, rest = CALL if self.begun is None else self.begun, list[str](), list[str]()
        for name, arguments in self.arguments.items():
            if call := self.calls.written(name):
                end = f"{arguments.lark} {_written(call.after, special)}"
                whole.append(f"{_in_words(call.before, special)} {end}")
                rest += [f"{_written(call.before[len(begun) :], special)} {end}"] if call.before.startswith(begun) else []
        if not whole:  # its arguments are no JSON, and free
            return [f"calls: {_written(CALL, special)} {_ANY}"]
        between = self.calls.between
        more = f"({_written(between, special)} call)*" if self.several and between else ""
        rules = [f"call: {' | '.join(whole)}", f"calls: call {more}"]
        return [*rules, f"rest: first {more}", f"first: {' | '.join(rest)}"] if rest else rules


def form_of(request: SamplingRequest, texts: ServedText, field: str) -> AnswerForm | None:
    """Returns what the answers to a request must be; None if they are free, or in a form that has no grammar.

    That is Qwen3-Coder's form of calls. Where no call is asked for, tools are strict in Hermes' form alone: its tag tells a
    call from text. field: the name of the schema's field.
    """
    prompt = request.prompt
    if not isinstance(prompt, Conversation):
        return None
    frame, forced = texts.frame_with(prompt.thinking), prompt.call is not None
    schema = _OBJECT if request.json_object else request.schema
    calls, arguments = None, dict[str, Json]()
    if frame and prompt.tools:
        calls = frame.call_format(prompt.tools)
        for name, parameters in calls.parameters.items():
            strict = name in prompt.strict
            if not prompt.call or name == prompt.call:
                obeyed = _OBJECT | parameters if strict or forced else _OBJECT
                arguments[name] = Json(f"tools: {one_line(name)[:50]}", obeyed, strict)
    several = request.parallel_calls and frame is not None and frame.most_calls is None
    if forced:
        begun = texts.call_beginning(prompt.tools, prompt.call)
        has_grammar = calls and any(map(calls.written, arguments))
        return AnswerForm(calls=calls, arguments=arguments, begun=begun, several=several) if has_grammar else None
    if schema is None and not (isinstance(calls, HermesCalls) and prompt.strict & arguments.keys()):
        return None
    thought: Literal["none", "possible", "begun"] = "none"
    if frame and frame.inside_thought:
        thought = "begun"
    elif frame and frame.has_switch and not frame.opened:
        thought = "possible"
    json = None if schema is None else Json(field, schema, not request.lenient)
    return AnswerForm(thought, json, calls, arguments, several=several)


def _written(text: str, special: Mapping[str, int]) -> str:
    """Writes a text of ours as part of a rule; it may spell special tokens."""
    if not text:
        return '""'
    pieces = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    parts = [f"<[{special[piece]}]>" if at % 2 else json.dumps(piece, ensure_ascii=False) for at, piece in enumerate(pieces)]
    return " ".join(part for part in parts if part != '""')


def _in_words(text: str, special: Mapping[str, int]) -> str:
    """Writes a text of ours like `_written`, in the words of JSON: longer ones would rule out other JSON that begins alike."""
    return " ".join(_written(word, special) for word in _WORDS.findall(text))


def _with(tag: str) -> str:
    """Writes a terminal for all texts that spell a tag."""
    return f"/(?s:.*){tag.replace('/', chr(92) + '/')}(?s:.*)/"


def _past(name: str, tag: str, special: Mapping[str, int], text: str = _ANY) -> list[str]:
    """Writes the rules for a text up to the first such tag, and the tag, as a token or spelled. text: what else it must be."""
    spelled, before = f"{name}_spelled", f"BEFORE_{name.upper()}"
    rules = [f"{spelled}[suffix={json.dumps(tag)}]: {before}_SPELLED", f"{before}_SPELLED: {text}"]
    if tag not in special:
        return [f"{name}: {spelled}", *rules]
    return [f"{name}: {spelled} | {before} <[{special[tag]}]>", *rules, f"{before}: {text} & ~{_with(tag)}"]
