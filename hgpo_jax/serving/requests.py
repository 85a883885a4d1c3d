"""What clients may ask: the fields of OpenAI's chat and text completions that are honoured. Others are refused, not ignored."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import Field

from hgpo_jax.errors import one_line

MAX_STOPS, MAX_CHOICES, MAX_MESSAGES, MAX_PARTS, MAX_CALLS = 16, 128, 4096, 256, 128
MAX_STATE = 10_000  # characters
_MEMBER = re.compile(r"str|list\[.*|constrained-.*|fail-fast.*")  # of a union, in the place of an error
Body = TypeVar("Body", bound=pydantic.BaseModel)


class ApiError(Exception):
    """An answer with an error, in OpenAI's form.

    kind: OpenAI's `type`. param: the field at fault. headers: of the answer.
    """

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", *, param: str | None = None,
        code: str | None = None, headers: dict[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Strict(pydantic.BaseModel):
    """Unknown fields are refused; null says the same as nothing, as some clients write it."""

    model_config = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class _FirstErrorOnly(pydantic.FailFast):
    """Of a long list; pydantic's own cannot be a part of a union."""

    __hash__ = object.__hash__


def _at_most(kind: Any, length: int, least: int = 0) -> Any:
    return Annotated[list[kind], _FirstErrorOnly(), Field(min_length=least, max_length=length)]


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Function(_Strict):
    """What a tool does, as the chat template shows it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: Function


class CalledFunction(_Strict):
    name: str
    arguments: str  # a JSON object


class ToolCall(_Strict):
    """Of an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of a streamed one

    @pydantic.model_validator(mode="after")
    def _has_arguments(self):
        self.arguments()
        return self

    def arguments(self) -> dict[str, Any]:
        """Raises ValueError."""
        try:
            found = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ValueError("arguments must be a JSON object, in a text")
        return found


class Message(_Strict):
    """One of a conversation; a developer's is a system message, a tool's is what a call of it gave."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | _at_most(TextPart, MAX_PARTS) | None = None  # type: ignore[valid-type]
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
        """As a chat template takes it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.function.name, "arguments": call.arguments()}}
                for call in self.tool_calls
            ]
        return message


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class Sampling(_Strict):
    """What chat and text completions have in common.

    top_k, return_token_ids: as other servers have them; the ids are of the prompt and of what was sampled.
    """

    model: str
    temperature: float = Field(1.0, ge=0, le=10)
    top_p: float = Field(1.0, ge=1e-9, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    max_tokens: int | None = Field(None, ge=1)
    stop: str | _at_most(str, MAX_STOPS) | None = None  # type: ignore[valid-type]
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    # What changes nothing here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @pydantic.field_validator("presence_penalty", "frequency_penalty", mode="before")
    @classmethod
    def _is_zero(cls, value):
        return 0 if value == 0 else value  # 0.0, too

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def limit(self) -> int | None:
        """Tokens of the longest response."""
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        raise NotImplementedError


class ChatRequest(Sampling):
    """The body of POST /v1/chat/completions."""

    messages: _at_most(Message, MAX_MESSAGES, 1)  # type: ignore[valid-type]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    tools: _at_most(Tool, MAX_CALLS) | None = None  # type: ignore[valid-type]
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """As a chat template takes them."""
        if not self.tools or self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)


_Ids = _at_most(Annotated[int, Field(ge=0)], 2**20, 1)


class TextRequest(Sampling):
    """The body of POST /v1/completions; a prompt is a text or token ids, perhaps as the only one of a list."""

    prompt: str | _Ids | _at_most(str, 1, 1) | _at_most(_Ids, 1, 1)  # type: ignore[valid-type]
    logprobs: int | None = Field(None, ge=0, le=1)  # of what was sampled alone, which either asks for
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None

    @property
    def only_prompt(self) -> str | list[int]:
        prompt = self.prompt
        return prompt[0] if isinstance(prompt, list) and not isinstance(prompt[0], int) else prompt

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class RewardRequest(_Strict):
    """The body of POST /v1/sessions/NAME/reward.

    reward: is added to that of the turn; of the last one, and the session ends, where no turn is given.
    turn: its number, from 0; -1 is the last one so far.
    admissible: whether the turn's answer could be used; if not, it is penalized (`advantage.invalid_penalty`).
    success, state: with the session's end: whether it succeeded, by default if its rewards sum to more than 0; what was seen.
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
    """Raises ApiError, in a line that names the field."""
    try:
        return model.model_validate_json(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(part for part in map(str, first["loc"]) if not _MEMBER.fullmatch(part))
        what = {"extra_forbidden": "this server has no such field; leave it out"}.get(first["type"], first["msg"])
        where, what = one_line(where)[:100], one_line(what)[:200]
        raise ApiError(400, f"{where}: {what}" if where else what, param=where or None) from None
