"""The request that every dialect translates to, refusals, and what the bodies of all dialects have in common.

Frameworks send fields that their users cannot leave out. An unknown field is ignored; the header X-Ignored of the answer and,
once, the log name it. It is rejected if the answer would be wrong (`CHANGING`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BeforeValidator, Field

from hgpo_jax.policy.call_formats import without_surrogates
from hgpo_jax.serving.tool_results import in_order, tool_state
from hgpo_jax.utils.errors import one_line

# Of a request's place (`sessions.Place`), what may also stand beside its metadata; values of other forms are ignored there.
PLACE = {name: re.compile(r"[\w.-]{1,100}") for name in ("session_id", "branch_id")}
PLACE |= {name: re.compile(".{1,10000}", re.DOTALL) for name in ("task_id", "state_key")}
SEE = ("user", "tool")  # the roles whose messages may hold pictures
MAX_IGNORED = 16  # names of ignored fields that an answer's header holds
# Fields of OpenAI and of other servers that would change the answer and that this server lacks, with the values that change
# nothing.
CHANGING: dict[str, tuple] = {
    name: harmless
    for harmless, names in (
        ((0,), "presence_penalty frequency_penalty min_p top_a min_tokens truncate_prompt_tokens top_logprobs prompt_logprobs"),
        ((1,), "repetition_penalty length_penalty typical_p best_of"),
        ((False,), "use_beam_search ignore_eos echo continue_final_message include_stop_str_in_output background"),
        ((True,), "skip_special_tokens add_generation_prompt"),
        (({}, []), "logit_bias logits_processors allowed_token_ids bad_words stop_token_ids functions documents mcp_servers"),
        (("",), "suffix chat_template"),
        (("auto", "none"), "function_call"),
        ((["text"],), "modalities"),
        ((), "guided_json guided_regex guided_choice guided_grammar structured_outputs regex ebnf audio web_search_options"),
        ((), "format output_format container thread compaction"),
    )
    for name in names.split()
}
# Fields that need not have an effect here, so that nobody is told of them.
SILENT = frozenset(["user", "store", "include_obfuscation", "detail"]) | frozenset(
    ["name", "id", "call_id", "index", "status", "annotations"]  # of earlier answers
)
_MAY_BE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]")
Content = str | list[dict[str, str]]  # of a message: a text, or parts with pictures among them
AnyBody = TypeVar("AnyBody", bound=pydantic.BaseModel)
StopStrings = Annotated[
    list[str], BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop), Field(max_length=16)
]


class ApiError(Exception):
    """An answer with an error. kind: OpenAI's `type`. param: the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code


class TooLong(ApiError):
    """The refusal of a prompt that is longer than this server reads, in tokens or, before it is tokenized, in characters.

    The words are those of OpenAI's API, by which clients know this error.
    """

    def __init__(self, length: int, limit: int, unit: str = "tokens"):
        said = f"this model's maximum context length is {limit} {unit}, and the prompt has {length}"
        super().__init__(400, said, code="context_length_exceeded")
        self.length, self.limit, self.unit = length, limit, unit


@dataclasses.dataclass
class Conversation:
    """A prompt of messages.

    messages, tools: as a chat template takes them; messages are put `in_order`. A content with pictures is parts, texts and
      those with a picture's `data` in base64.
    call: the tool that the answer must call, "" for any; None if it need not.
    thinking: whether the answer begins with a thought, if the chat template has a switch for it; None: the template's default.
    strict: the tools whose arguments must be what their schemas say.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    call: str | None = None
    thinking: bool | None = None
    strict: frozenset[str] = frozenset()

    def __post_init__(self):
        """Raises ApiError for a tool that is to be called and is not there, and for a picture in a message that holds none."""
        self._given, self.messages = self.messages, in_order(self.messages)
        names = [tool["function"]["name"] for tool in self.tools]
        if self.call and self.call not in names:
            raise ApiError(400, f"tool_choice: {self.call[:50]!r} is none of the tools", param="tool_choice")
        if other := [one["role"] for one in self.messages if isinstance(one["content"], list) and one["role"] not in SEE]:
            raise ApiError(400, f"messages: a message of the {other[0]} holds no picture", param="messages")
        if self.call is not None and not names:
            raise ApiError(400, "tool_choice: a call needs tools; give some, or leave it out", param="tool_choice")

    @property
    def state(self) -> str:
        """The results of the last tools (`tool_results.py`), or else the last message that is not the assistant's."""
        if (state := tool_state(self._given)) is not None:
            return state
        return next((one["content"] for one in reversed(self.messages) if one["role"] != "assistant"), "")

    @property
    def pictures(self) -> list[str]:
        """The data of all pictures, in their order."""
        parts = (part for one in self.messages if isinstance(one["content"], list) for part in one["content"])
        return [part["data"] for part in parts if "data" in part]


@dataclasses.dataclass
class SamplingRequest:
    """A client's request for n responses to one prompt, in whatever dialect.

    decoding: those of temperature, top_p and top_k that it names. limit: tokens of the longest response. parallel_calls:
    whether an answer may call several tools. json_object: whether an answer should be a JSON object. schema: of the JSON that
    it must be; None: it need not. lenient: whether what of the schema cannot be enforced is left out, not refused. ignored: the
    fields without an effect.
    """

    model: str
    prompt: Conversation | str | list[int]
    decoding: dict[str, float] = dataclasses.field(default_factory=dict)
    n: int = 1
    limit: int | None = None
    stop: list[str] = dataclasses.field(default_factory=list)
    seed: int | None = None
    parallel_calls: bool = True
    json_object: bool = False
    schema: dict[str, Any] | None = None
    lenient: bool = False
    stream: bool = False
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    ignored: list[str] = dataclasses.field(default_factory=list)


class Body(pydantic.BaseModel):
    """A body without unknown fields; null means the same as a missing field, as some clients write it."""

    model_config = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


class OpenBody(Body):
    """A part of an API that grows: unknown fields are ignored, unless the answer would be wrong."""

    model_config = pydantic.ConfigDict(extra="allow", allow_inf_nan=False)

    @pydantic.model_validator(mode="after")
    def _changes_no_answer(self):
        for name, value in (self.model_extra or {}).items():
            if name in CHANGING and value not in CHANGING[name]:
                raise ApiError(400, f"{name}: this server cannot do that, leave it out", param=name)
        return self

    def unknown(self) -> Iterator[str]:
        """Yields the names of the ignored fields, with their locations; a name may be repeated."""
        yield from (name for name in self.model_extra or () if name not in CHANGING.keys() | SILENT | self._place().keys())
        for name in self.model_fields_set & type(self).model_fields.keys():
            value = getattr(self, name)
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, OpenBody):
                    yield from (f"{name}.{unknown}" for unknown in part.unknown())

    def _place(self) -> dict[str, str]:
        """Returns the parts of the request's place that stand beside its metadata."""
        extra = {name: str(value) for name, value in (self.model_extra or {}).items() if type(value) in (str, int)}
        return {name: extra[name] for name, form in PLACE.items() if name in extra and form.fullmatch(extra[name])}

    def ignored(self) -> list[str]:
        """Returns the names of the ignored fields, in a form that a header can hold."""
        return sorted({_NO_NAME.sub("?", name)[:60] for name in self.unknown()})[:MAX_IGNORED]


class SamplingBody(OpenBody):
    """The fields that the bodies of all dialects have in common.

    temperature, top_p, top_k: by default from generation_config.json, or else 1, 1 and 0 (all tokens).
    top_k, seed: also in dialects that lack them, as in other servers.
    """

    model: str
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, ge=0, le=1)  # 0: the most likely token
    top_k: int | None = Field(None, ge=-1, lt=2**31)  # -1, as in other servers: all tokens, like 0
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    metadata: dict[str, Any] = Field(default_factory=dict)

    def sampling(self, prompt: Conversation | str | list[int], limit: int | None, stop: list[str]) -> SamplingRequest:
        """Translates the common fields."""
        decoding = {name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(self, name)) is not None}
        if decoding.get("top_k") == -1:
            decoding["top_k"] = 0
        if "top_p" in decoding:
            decoding["top_p"] = max(decoding["top_p"], 1e-9)
        same = {name: getattr(self, name) for name in ("model", "seed", "stream")}
        same["metadata"] = self._place() | self.metadata
        return SamplingRequest(prompt=prompt, decoding=decoding, limit=limit, stop=stop, ignored=self.ignored(), **same)


class JsonSchema(OpenBody):
    """A schema for an answer, which is strict unless it says that it is not. name, description: without an effect."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] = Field(default_factory=lambda: {"type": "object"}, alias="schema")


class CalledFunction(OpenBody):
    """A call in an earlier answer, in OpenAI's words. What is no JSON object, as in a call that was cut, is shown as a text."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)

    @pydantic.field_validator("arguments", mode="before")
    @classmethod
    def _may_be_any_text(cls, arguments: Any) -> Any:
        if not isinstance(arguments, str):
            return arguments
        try:
            read = without_surrogates(json.loads(arguments or "{}"))
        except (ValueError, RecursionError):
            read = None
        return read if isinstance(read, dict) else {"arguments": arguments}


class TextPart(OpenBody):
    """A part of a message's content that is text; an earlier answer's refusal is."""

    type: str
    text: str

    @pydantic.model_validator(mode="before")
    @classmethod
    def _may_be_a_refusal(cls, part: Any) -> Any:
        if isinstance(part, dict) and part.get("type") == "refusal" and "text" not in part:
            return {name: value for name, value in part.items() if name != "refusal"} | {"text": part.get("refusal")}
        return part


def joined(parts: Iterable[Any], role: str = "user") -> Content:
    """Returns the text of a message's parts: each on lines of its own, as in vLLM, but those of an answer as they were said.

    With pictures among them (`pictures.py`), the parts stay apart, as chat templates take them.
    """
    parts = list(parts)
    if not all(isinstance(part, TextPart) for part in parts):
        texts = [{"type": "text", "text": part.text} if isinstance(part, TextPart) else None for part in parts]
        return [text or {"type": "image", "data": part.data} for text, part in zip(texts, parts, strict=True)]
    return ("" if role == "assistant" else "\n").join(part.text for part in parts)


def of_the_client(kind: str) -> BeforeValidator:
    """Refuses a tool of another type than this, as web_search, which the API's own server runs."""

    def check(given: Any) -> Any:
        if given != kind:
            raise ValueError(f"{given!r:.50} is not served here; give tools of type {kind}, which the client runs")
        return given

    return BeforeValidator(check)


FunctionType = Annotated[Literal["function"], of_the_client("function")]


def _is_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        raise ValueError("allowed_tools is not served here; give those tools alone as tools")
    return choice


ChoiceForm = BeforeValidator(_is_choice)  # of OpenAI's tool_choice


def or_text(kind: str) -> BeforeValidator:
    """Lets a text stand for a list of one part of this type."""
    return BeforeValidator(lambda content: [{"type": kind, "text": content}] if isinstance(content, str) else content)


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Builds a tool as a chat template takes it."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {field: value for field, value in function.items() if value is not None}}


def strict_tools(tools: Iterable[Any]) -> frozenset[str]:
    """Returns the names of the tools of a body that are strict."""
    return frozenset(tool.name for tool in tools if tool.strict)


def function_call(name: str, arguments: dict[str, Any], identity: Any) -> dict[str, Any]:
    """Builds a call in an earlier answer, as a chat template takes it. identity: the call's id, None without one."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if identity is None else call | {"id": identity}


def tool_result(content: Content, identity: Any) -> dict[str, Any]:
    """Builds the result of the call with this id, as a chat template takes it."""
    return {"role": "tool", "content": content, "tool_call_id": identity}


def _without_surrogates(body: bytes | bytearray) -> bytes | bytearray:
    """Returns a body without lone surrogates, as texts have them that were cut inside a character; pydantic takes none.

    What is no JSON is returned as it is.
    """
    try:
        return json.dumps(without_surrogates(json.loads(body)), ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return body


def _finite(written: str) -> float:
    """Reads a number. Raises ApiError for NaN and infinite ones, as 1e999: an answer that tells them would be no JSON."""
    if not math.isfinite(number := float(written)):
        raise ApiError(400, f"the body holds {written[:20]}, which is no finite number; write one, or null")
    return number


def parse(model: type[AnyBody], body: bytes | bytearray | dict[str, Any]) -> AnyBody:
    """Parses a request's body, or fields of a request. Raises ApiError, in a line that names the field."""
    try:
        if isinstance(body, dict):
            return model.model_validate(body)
        parsed = model.model_validate_json(_without_surrogates(body) if _MAY_BE_SURROGATE.search(body) else body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # A location also names members of unions and validators, such as list[int].
        where = one_line(".".join(str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier()))[:100]
        what = {"extra_forbidden": "this server has no such field; leave it out"}.get(
            first["type"], one_line(first["msg"].removeprefix("Value error, "))[:200]
        )
        raise ApiError(400, f"{where}: {what}" if where else what, param=where or None) from None
    # In fields of any form pydantic takes them. To read again costs less than to search the bytes for what may be one.
    json.loads(body, parse_constant=_finite, parse_float=_finite)
    return parsed
