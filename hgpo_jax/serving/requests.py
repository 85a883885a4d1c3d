"""Requests of clients: the fields of OpenAI's chat and text completions, and the handling of unsupported ones.

Frameworks send fields that their users cannot leave out. An unknown field is ignored; the header X-Ignored of the answer and,
once, the log name it. It is rejected if the answer would be wrong (`CHANGING`), or if its name looks like a misspelled field.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from itertools import filterfalse
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError

from hgpo_jax.utils.errors import one_line

MAX_STOPS, MAX_CHOICES, MAX_MESSAGES, MAX_PARTS, MAX_CALLS = 16, 128, 4096, 256, 128
MAX_STATE = 10_000  # characters
MAX_UNKNOWN, MAX_IGNORED = 64, 16  # fields that are ignored, and their names that an answer's header holds
_MEMBER = re.compile(r"str|list\[.*|constrained-.*|fail-fast.*|literal\[.*|NamedTool")  # union members in error locations
# Fields of OpenAI and of other servers that would change the answer and that this server lacks, with the values that change
# nothing.
CHANGING: dict[str, tuple] = {
    name: harmless
    for harmless, names in (
        ((0,), "presence_penalty frequency_penalty min_p top_a min_tokens truncate_prompt_tokens top_logprobs prompt_logprobs"),
        ((1,), "repetition_penalty length_penalty typical_p best_of"),
        ((False,), "use_beam_search ignore_eos echo continue_final_message include_stop_str_in_output"),
        ((True,), "skip_special_tokens add_generation_prompt"),
        (({}, []), "logit_bias logits_processors allowed_token_ids bad_words stop_token_ids functions documents"),
        (("",), "suffix chat_template"),
        (("auto", "none"), "function_call"),
        ((["text"],), "modalities"),
        ((), "guided_json guided_regex guided_choice guided_grammar structured_outputs regex ebnf audio web_search_options"),
    )
    for name in names.split()
}
# Fields of other servers, ignored like all that are unknown, whose names are near those of fields here.
NO_SLIPS = {"models", "parse_tool_calls", "return_prompt_token_ids", "return_tokens", "top_n"}
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]")
THERE_IS = "temperature, top_p, top_k, stop, seed, max_tokens, n and logprobs"
Body = TypeVar("Body", bound=pydantic.BaseModel)


class ApiError(Exception):
    """An answer with an error, in OpenAI's form.

    kind: OpenAI's `type`. param: the field at fault. headers: those of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Body(pydantic.BaseModel):
    """A body without unknown fields; null means the same as a missing field, as some clients write it."""

    model_config = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class _Open(_Body):
    """A part of OpenAI's API, which grows: unknown fields are ignored, unless the answer would be wrong."""

    model_config = pydantic.ConfigDict(extra="allow", allow_inf_nan=False)

    @pydantic.model_validator(mode="after")
    def _changes_no_answer(self):
        for name, value in (self.model_extra or {}).items():
            if name in CHANGING and value not in CHANGING[name]:
                raise ApiError(400, f"{name}: this server cannot do that, leave it out; there is {THERE_IS}", param=name)
        return self

    def unknown(self) -> Iterator[str]:
        """Yields the names of the ignored fields, with their locations; a name may be repeated."""
        yield from (name for name in self.model_extra or () if name not in CHANGING)
        for name in self.model_fields_set & type(self).model_fields.keys():
            value = getattr(self, name)
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, _Open):
                    yield from (f"{name}.{unknown}" for unknown in part.unknown())


class _FirstErrorOnly(pydantic.FailFast):
    """Reports only the first error of a long list; pydantic's own class cannot be part of a union."""

    __hash__ = object.__hash__


def _at_most(kind: Any, length: int, least: int = 0) -> Any:
    return Annotated[list[kind], _FirstErrorOnly(), Field(min_length=least, max_length=length)]


class Part(_Open):
    """A part of a message's content."""

    type: str
    text: str = ""

    @pydantic.model_validator(mode="after")
    def _is_text(self):
        if self.type != "text" or "text" not in self.model_fields_set:
            kind = "a part of the type text needs a text" if self.type == "text" else f"no {self.type[:50]}; leave the part out"
            raise PydanticCustomError("part", "this policy reads texts only, {kind}", {"kind": kind})
        return self


class Function(_Open):
    """A tool's function, as the chat template shows it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # the arguments of an answer may violate the parameters

    def unknown(self) -> Iterator[str]:
        yield from super().unknown()
        yield from ["strict"] if self.strict else []


class Tool(_Open):
    type: Literal["function"]
    function: Function


class ChosenFunction(_Open):
    name: str


class NamedTool(_Open):
    """The tool that an answer must call."""

    type: Literal["function"]
    function: ChosenFunction


class ResponseFormat(_Open):
    """The response format. json_object is not enforced: an answer that is not an object has a `warning` beside it."""

    type: Literal["text", "json_object"]


class TemplateOptions(_Open):
    """The switch for thoughts of a chat template, by either name."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class CalledFunction(_Open):
    name: str
    arguments: str  # a JSON object


class ToolCall(_Open):
    """A tool call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # only in a streamed call

    @pydantic.model_validator(mode="after")
    def _has_arguments(self):
        self.arguments()
        return self

    def arguments(self) -> dict[str, Any]:
        """Parses the arguments. Raises ValueError."""
        try:
            found = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ValueError("arguments must be a JSON object, in a text")
        return found


class Message(_Open):
    """A message of a conversation; a developer's is a system message, a tool's is the result of a call."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | _at_most(Part, MAX_PARTS) | None = None  # type: ignore[valid-type]
    tool_calls: _at_most(ToolCall, MAX_CALLS) | None = None  # type: ignore[valid-type]
    tool_call_id: str | None = None  # not shown to the model
    name: str | None = None  # not shown either
    annotations: _at_most(Any, 0) | None = None  # type: ignore[valid-type]  # what the official client makes of an answer

    @pydantic.model_validator(mode="after")
    def _says_something(self):
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the {self.role} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of the {self.role} calls no tools")
        return self

    def plain(self) -> dict[str, Any]:
        """Returns the message as a chat template takes it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.function.name, "arguments": call.arguments()}}
                for call in self.tool_calls
            ]
        return message


class StreamOptions(_Open):
    include_usage: bool = False
    include_obfuscation: bool = False


class Sampling(_Open):
    """The common fields of chat and text completions.

    temperature, top_p, top_k: by default from generation_config.json, or else 1, 1 and 0 (all tokens).
    max_tokens: limits an answer, together with the server's own limit.
    top_k, return_token_ids: as in other servers; the ids are those of the prompt and of the sampled tokens.
    """

    model: str
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, ge=1e-9, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)  # -1, as in other servers: all tokens, like 0
    max_tokens: int | None = Field(None, ge=1)
    stop: str | _at_most(str, MAX_STOPS) | None = None  # type: ignore[valid-type]
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    # Fields that need not have an effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    @pydantic.model_validator(mode="after")
    def _has_no_slip(self):
        if (count := len(self.model_extra or ())) > MAX_UNKNOWN:
            raise ApiError(400, f"{count:,} fields that this server does not have; give at most {MAX_UNKNOWN}")
        for name in filterfalse((CHANGING.keys() | NO_SLIPS).__contains__, self.model_extra or ()):
            if meant := difflib.get_close_matches(name[:40], type(self).model_fields, 1, 0.8):
                raise ApiError(400, f"{one_line(name)[:40]}: there is no such field; did you mean {meant[0]}?")
        return self

    def ignored(self) -> list[str]:
        """The names of the ignored fields of this request, in a form that a header can hold."""
        return sorted({_NO_NAME.sub("?", name)[:60] for name in self.unknown()})[:MAX_IGNORED]

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of a response."""
        return self.max_tokens

    @property
    def answers(self) -> int:
        return self.n

    @property
    def wants_logprobs(self) -> bool:
        raise NotImplementedError


class ChatRequest(Sampling):
    """The body of POST /v1/chat/completions.

    tool_choice: if an answer must call a tool, the prompt begins the call; an answer that still cannot be read as a call has a
    `warning` beside it. With parallel_tool_calls=false only the first call is returned.
    """

    messages: _at_most(Message, MAX_MESSAGES, 1)  # type: ignore[valid-type]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    tools: _at_most(Tool, MAX_CALLS) | None = None  # type: ignore[valid-type]
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @pydantic.model_validator(mode="after")
    def _can_choose(self):
        choice, names = self.tool_choice, [tool.function.name for tool in self.tools or ()]
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ApiError(400, f"tool_choice: {choice.function.name[:50]!r} is none of the tools", param="tool_choice")
        if choice == "required" and not names:
            raise ApiError(400, "tool_choice: required needs tools; give some, or leave it out", param="tool_choice")
        return self

    @property
    def thinking(self) -> bool | None:
        """Whether answers begin with a thought, if the chat template has a switch for it; None: the template's default."""
        given = self.chat_template_kwargs or TemplateOptions()
        return given.thinking if given.enable_thinking is None else given.enable_thinking

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """Returns the tools as a chat template takes them."""
        if not self.tools or self.tool_choice == "none":
            return []
        shown = {"type": True, "function": {"name", "description", "parameters"}}
        return [tool.model_dump(include=shown, exclude_none=True) for tool in self.tools]

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)


_Ids = _at_most(Annotated[int, Field(ge=0)], 2**20, 1)


class TextRequest(Sampling):
    """The body of POST /v1/completions; a prompt is a text or token ids, and there may be a list of several."""

    prompt: str | _Ids | _at_most(str, MAX_CHOICES, 1) | _at_most(_Ids, MAX_CHOICES, 1)  # type: ignore[valid-type]
    logprobs: int | None = Field(None, ge=0, le=1)  # only for sampled tokens, for either value

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        return self.prompt if isinstance(self.prompt, list) and not isinstance(self.prompt[0], int) else [self.prompt]

    @property
    def answers(self) -> int:
        return self.n * len(self.prompts)

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class RewardRequest(_Body):
    """The body of POST /v1/sessions/NAME/reward.

    reward: added to that of the turn; if no turn is given, to that of the last turn, and the session ends.
    turn: its number, from 0; -1 is the last one so far.
    admissible: whether the turn's answer was usable; if not, it is penalized (`advantage.invalid_penalty`).
    success, state: with the session's end: whether it succeeded, by default unknown; the final observation.
    """

    reward: float
    turn: int | None = None
    admissible: bool = True
    success: bool | None = None
    state: str = Field("", max_length=MAX_STATE)

    @pydantic.model_validator(mode="after")
    def _at_the_end_only(self):
        if self.turn is not None and (self.success is not None or self.state):
            raise ValueError("success and state go with the session's end, without a turn")
        return self


def parse(model: type[Body], body: bytes | bytearray) -> Body:
    """Parses a request's body. Raises ApiError, in a line that names the field."""
    try:
        return model.model_validate_json(body)
    except pydantic.ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        # For a union, the member that the value comes closest to, which is a text only if all members are.
        first = min(errors, key=lambda one: (one["type"] == "string_type", -len(one["loc"])))
        where = ".".join(part for part in map(str, first["loc"]) if not _MEMBER.fullmatch(part))
        what = {"extra_forbidden": "this server has no such field; leave it out"}.get(first["type"], first["msg"])
        where, what = one_line(where)[:100], one_line(what)[:200]
        raise ApiError(400, f"{where}: {what}" if where else what, param=where or None) from None
