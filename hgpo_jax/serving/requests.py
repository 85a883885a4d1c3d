"""What clients may ask: the fields of OpenAI's chat and text completions that are honoured. Others are refused, not ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import Field

MAX_STOPS, MAX_CHOICES = 16, 128
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
    model_config = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    """One of a conversation; a developer's is a system message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None  # not shown to the model

    def plain(self) -> dict[str, str]:
        """As a chat template takes it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class Sampling(_Strict):
    """What chat and text completions have in common.

    top_k, return_token_ids: as other servers have them; the ids are of the prompt and of what was sampled.
    """

    model: str
    temperature: float = Field(1.0, ge=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    max_tokens: int | None = Field(None, ge=1)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
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

    @pydantic.field_validator("presence_penalty", "frequency_penalty", mode="before")
    @classmethod
    def _is_zero(cls, value):
        return 0 if value == 0 else value  # 0.0, too

    @pydantic.field_validator("temperature", "top_p", "n", "stream", mode="before")
    @classmethod
    def _default(cls, value, info):
        return cls.model_fields[info.field_name].default if value is None else value  # some clients write null

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

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)


class TextRequest(Sampling):
    """The body of POST /v1/completions; a prompt is a text or token ids."""

    prompt: str | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=1)  # of what was sampled alone, which either asks for
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


def parse(model: type[Body], body: bytes) -> Body:
    """Raises ApiError, in a line that names the field."""
    try:
        return model.model_validate_json(body)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("str", "list", "constrained")))
        what = {"extra_forbidden": "this server has no such field; leave it out"}.get(first["type"], first["msg"])
        raise ApiError(400, f"{where}: {what}" if where else what, param=where or None) from None
