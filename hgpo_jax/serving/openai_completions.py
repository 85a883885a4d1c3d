"""The dialects of OpenAI's chat completions, and of its older completions of a text."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AliasChoices, Field

from hgpo_jax.policy.answers import Call
from hgpo_jax.serving.dialect import Dialect, event, token_logprobs
from hgpo_jax.serving.exchange import Exchange, Piece
from hgpo_jax.serving.pictures import ImageUrlPart
from hgpo_jax.serving.requests import (
    ApiError,
    CalledFunction,
    ChoiceForm,
    Conversation,
    FunctionType,
    JsonSchema,
    OpenBody,
    SamplingBody,
    SamplingRequest,
    StopStrings,
    TextPart,
    function_call,
    function_tool,
    joined,
    or_text,
    parse,
    strict_tools,
    tool_result,
)


class Part(TextPart):
    """A part of a message's content that is text."""

    type: Literal["text", "refusal"]


class Function(OpenBody):
    """A tool's function, as the chat template shows it. The arguments of a call obey the parameters if it is strict."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(OpenBody):
    type: FunctionType
    function: Function


class ResponseFormat(OpenBody):
    """The response format. Where json_object cannot be enforced, an answer that is not an object has a `warning` beside it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema = JsonSchema()


class TemplateOptions(OpenBody):
    """The switch for thoughts of a chat template, by either name."""

    thinking: bool | None = Field(None, validation_alias=AliasChoices("enable_thinking", "thinking"))


class ToolCall(OpenBody):
    """A tool call in an assistant's message."""

    id: Any = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(OpenBody):
    """A message of a conversation; a developer's is a system message, a tool's is the result of a call."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[Annotated[Part | ImageUrlPart, Field(discriminator="type")]] | None, or_text("text")] = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Any = None

    @pydantic.model_validator(mode="after")
    def _says_something(self):
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the {self.role} needs content")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of the {self.role} calls no tools")
        return self

    def plain(self) -> dict[str, Any]:
        """Returns the message as a chat template takes it."""
        text = joined(self.content or (), self.role)
        if self.role == "tool":
            return tool_result(text, self.tool_call_id)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            calls = ((call.function.name, call.function.arguments, call.id) for call in self.tool_calls)
            message["tool_calls"] = list(itertools.starmap(function_call, calls))
        return message


class StreamOptions(OpenBody):
    include_usage: bool = False


class CompletionBody(SamplingBody):
    """The common fields of chat and text completions.

    max_tokens: limits an answer, together with the server's own limit.
    return_token_ids: as in other servers; the ids are those of the prompt and of the sampled tokens.
    """

    max_tokens: int | None = Field(None, ge=1)
    stop: StopStrings = Field(default_factory=list)
    n: int = Field(1, ge=1)
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False


class ChatBody(CompletionBody):
    """A request's body.

    tool_choice: if an answer must call a tool, the prompt begins the call; an answer that still cannot be read as a call has a
    `warning` beside it. With parallel_tool_calls=false only the first call is returned.
    """

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Annotated[Literal["auto", "none", "required"] | Tool, ChoiceForm] = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()

    def request(self) -> SamplingRequest:
        """Translates the body."""
        tools = [] if self.tool_choice == "none" else [tool.function for tool in self.tools]
        call = {"required": ""}.get(self.tool_choice) if isinstance(self.tool_choice, str) else self.tool_choice.function.name
        conversation = Conversation(
            [message.plain() for message in self.messages],
            [function_tool(tool.name, tool.description, tool.parameters) for tool in tools],
            call,
            self.chat_template_kwargs.thinking,
            strict_tools(tools),
        )
        request = self.sampling(conversation, self.max_completion_tokens or self.max_tokens, self.stop)
        request.n, request.parallel_calls = self.n, self.parallel_tool_calls
        request.json_object = self.response_format is not None and self.response_format.type == "json_object"
        if self.response_format is not None and self.response_format.type == "json_schema":
            schema = self.response_format.json_schema
            request.schema, request.lenient = schema.json_schema, schema.strict is False
        return request


def _one_prompt(value: Any) -> Any:
    """Takes one prompt out of a list of one, as some clients send it. Raises ValueError for a list of several."""
    if isinstance(value, list) and value and all(isinstance(each, str | list) for each in value):
        if len(value) > 1:
            raise ValueError(f"{len(value)} prompts were sent; send one a request")
        return value[0]
    return value


class TextBody(CompletionBody):
    """The body of a text completion; a prompt is a text or token ids, or one of them in a list.

    best_of: of how many answers n are returned; here of n, so that 1 and n change nothing.
    """

    prompt: Annotated[
        str | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)], pydantic.BeforeValidator(_one_prompt)
    ]
    logprobs: int | None = Field(None, ge=0, le=1)  # only for sampled tokens, for either value
    best_of: int | None = None

    @pydantic.model_validator(mode="after")
    def _returns_all(self):
        if self.best_of not in (None, 1, self.n):
            said = f"best_of: {self.best_of} is not n, {self.n}, and all answers are returned; leave it out"
            raise ApiError(400, said, param="best_of")
        return self

    def request(self) -> SamplingRequest:
        """Translates the body."""
        request = self.sampling(self.prompt, self.max_tokens, self.stop)
        request.n = self.n
        return request


class ChatCompletions(Dialect):
    """OpenAI's chat completions.

    body: the model of a request's body. prefix, whole_name, streamed_name: the prefix of ids, the names of both objects.
    """

    body: type[ChatBody] | type[TextBody] = ChatBody
    prefix, whole_name, streamed_name = "chatcmpl", "chat.completion", "chat.completion.chunk"
    limit_field, thinking_field = "max_tokens", "chat_template_kwargs"
    schema_field, strict_field = "response_format", "tools.function.strict"

    def __init__(self, body: bytes | bytearray):
        self._body: Any = parse(self.body, body)
        self.request = self._body.request()
        identity = f"{self.prefix}-{secrets.token_hex(12)}"
        self._same = {"id": identity, "created": int(time.time()), "model": self.request.model}

    def response(self, exchange: Exchange) -> dict[str, Any]:
        choices = [self._choice(choice, exchange, "message") for choice in exchange.choices]
        ids = self._ids("prompt_token_ids", exchange.prompt)
        return self._same | {"object": self.whole_name, "choices": choices, "usage": usage(exchange)} | ids

    async def events(self, exchange: Exchange) -> AsyncIterator[str]:
        same = self._same | {"object": self.streamed_name}
        opening, ids = self._opening(), self._ids("prompt_token_ids", exchange.prompt)
        if opening or ids:  # clients read the first choice of what they get
            yield event(same | {"choices": opening} | ids)
        try:
            async for piece in exchange.pieces():
                yield event(same | {"choices": [self._choice(piece, exchange, "delta")]})
        except ApiError as error:
            yield event(self.error(error))
            return
        if self._body.stream_options.include_usage:
            yield event(same | {"choices": [], "usage": usage(exchange)})
        yield "data: [DONE]\n\n"

    @staticmethod
    def error(error: ApiError) -> dict[str, Any]:
        return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}

    def _opening(self) -> list[dict[str, Any]]:
        """Builds the choices of a stream's first event."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": i, "delta": delta, "finish_reason": None, "logprobs": None} for i in range(self.request.n)]

    def _ids(self, name: str, ids: list[int]) -> dict[str, list[int]]:
        return {name: ids} if self._body.return_token_ids else {}

    def _choice(self, piece: Piece, exchange: Exchange, where: str) -> dict[str, Any]:
        """Builds a choice of a whole answer or of a chunk. where: the name of its message."""
        message: dict[str, Any] = ({"role": "assistant"} if where == "message" else {}) | {"content": piece.text}
        choice = {"index": piece.index, "finish_reason": piece.finish_reason, where: message}
        if piece.calls:
            calls = [_call(index, call) for index, call in enumerate(piece.calls)]
            message |= {"content": piece.text or None, "tool_calls": calls}
            choice["finish_reason"] = "tool_calls"
        elif piece.finish_reason and (warning := exchange.warning(piece.index)):
            choice["warning"] = warning
        return choice | {"logprobs": self._logprobs(piece, exchange)} | self._ids("token_ids", piece.tokens)

    def _logprobs(self, piece: Piece, exchange: Exchange) -> dict[str, Any] | None:
        """Builds the log-probabilities of the sampled tokens, if the request asks for them."""
        if not self._body.logprobs:
            return None
        return {"content": token_logprobs(exchange, piece.tokens, piece.logp), "refusal": None}


class TextCompletions(ChatCompletions):
    """OpenAI's older completions, of a text."""

    body = TextBody
    prefix, whole_name, streamed_name = "cmpl", "text_completion", "text_completion"

    def _opening(self) -> list[dict[str, Any]]:
        """Builds empty choices for an event with the prompt's ids; otherwise no event opens a stream."""
        same = {"text": "", "finish_reason": None, "logprobs": None}
        return [{"index": i} | same for i in range(self.request.n if self._body.return_token_ids else 0)]

    def _choice(self, piece: Piece, exchange: Exchange, where: str) -> dict[str, Any]:
        choice = {"index": piece.index, "text": piece.text, "finish_reason": piece.finish_reason}
        return choice | {"logprobs": self._logprobs(piece, exchange)} | self._ids("token_ids", piece.tokens)

    def _logprobs(self, piece: Piece, exchange: Exchange) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        tokens = list(map(exchange.texts.token, piece.tokens))
        return {"tokens": tokens, "token_logprobs": piece.logp, "top_logprobs": None, "text_offset": None}


def usage(exchange: Exchange) -> dict[str, int]:
    """Counts the tokens of the prompt and of all responses."""
    prompt, answers = len(exchange.prompt), sum(len(choice.tokens) for choice in exchange.choices)
    return {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}


def _call(index: int, call: Call) -> dict[str, Any]:
    """Writes a call as a client takes it."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
