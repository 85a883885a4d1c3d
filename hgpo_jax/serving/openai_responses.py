"""The dialect of OpenAI's responses. Nothing is stored: each request holds its whole conversation."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, Field

from hgpo_jax.serving.dialect import Dialect, event, token_logprobs
from hgpo_jax.serving.exchange import Exchange, Piece
from hgpo_jax.serving.openai_completions import ChatCompletions, TemplateOptions
from hgpo_jax.serving.pictures import InputImagePart
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

LOGPROBS = "message.output_text.logprobs"  # what `include` may ask for
STORED = ("previous_response_id", "conversation", "prompt")  # fields that name what OpenAI's own server has stored


class Part(TextPart):
    """A part of a message's content that is text. logprobs: those of an earlier answer, without an effect."""

    type: Literal["input_text", "output_text", "refusal"]
    logprobs: list[Any] = Field(default_factory=list)


AnyPart = Annotated[Part | InputImagePart, Field(discriminator="type")]


class Message(OpenBody):
    """A message; a developer's is a system message."""

    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[AnyPart], or_text("input_text")]


class FunctionCall(CalledFunction):
    type: Literal["function_call"]
    call_id: Any = None


class FunctionCallOutput(OpenBody):
    type: Literal["function_call_output"]
    call_id: Any = None
    output: Annotated[list[AnyPart], or_text("input_text")]


class Reasoning(OpenBody):
    """A thought that another server has split from an answer. Chat templates do not show it, so its fields are ignored."""

    type: Literal["reasoning"]


def _items(given: Any) -> Any:
    """Makes a list of items with types of what may be a text, or have messages without a type."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    if any(isinstance(item, dict) and item.get("type") == "item_reference" for item in given):
        raise ValueError("item_reference names what OpenAI's own server has stored; give the item itself")
    return [item | {"type": item.get("type") or "message"} if isinstance(item, dict) else item for item in given]


class Tool(OpenBody):
    type: FunctionType
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ChosenTool(OpenBody):
    type: FunctionType
    name: str


class TextFormat(JsonSchema):
    """As `response_format` of OpenAI's chat completions."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(OpenBody):
    format: TextFormat = TextFormat()


class ResponsesBody(SamplingBody):
    """A request's body.

    include: what else to tell; the log-probabilities of the sampled tokens, as in chat completions, or else it is ignored.
    tool_choice, parallel_tool_calls: as in OpenAI's chat completions. stop, chat_template_kwargs: as in other servers.
    """

    input: Annotated[
        list[Annotated[Message | FunctionCall | FunctionCallOutput | Reasoning, Field(discriminator="type")]],
        Field(min_length=1),
        BeforeValidator(_items),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stop: StopStrings = Field(default_factory=list)
    include: list[str] = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Annotated[Literal["auto", "none", "required"] | ChosenTool, ChoiceForm] = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    stream_options: OpenBody = OpenBody()

    @pydantic.model_validator(mode="after")
    def _needs_nothing_stored(self):
        if name := next((name for name in STORED if name in (self.model_extra or {})), ""):
            raise ApiError(400, f"{name}: this server stores nothing; send the whole conversation as input", param=name)
        return self

    def unknown(self) -> Iterator[str]:
        yield from super().unknown()
        yield from ["include"] if {*self.include} - {LOGPROBS} else []

    def request(self) -> SamplingRequest:
        """Translates the body."""
        tools = [] if self.tool_choice == "none" else self.tools
        call = {"required": ""}.get(self.tool_choice) if isinstance(self.tool_choice, str) else self.tool_choice.name
        conversation = Conversation(
            self._messages(),
            [function_tool(tool.name, tool.description, tool.parameters) for tool in tools],
            call,
            self.chat_template_kwargs.thinking,
            strict_tools(tools),
        )
        request = self.sampling(conversation, self.max_output_tokens, self.stop)
        request.parallel_calls, request.json_object = self.parallel_tool_calls, self.text.format.type == "json_object"
        if self.text.format.type == "json_schema":
            request.schema, request.lenient = self.text.format.json_schema, self.text.format.strict is False
        return request

    def _messages(self) -> list[dict[str, Any]]:
        """Returns the conversation as a chat template takes it.

        Calls and texts of the assistant that stand together are one message, whichever comes first: results of tools follow it.
        """
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            if isinstance(item, Message):
                role = "system" if item.role == "developer" else item.role
                last, content = messages[-1] if messages else {}, joined(item.content, role)
                texts = [text for text in (last.get("content"), content) if isinstance(text, str)]
                if role == "assistant" and "tool_calls" in last and len(texts) == 2:
                    last["content"] = "\n".join(filter(None, texts))
                else:
                    messages.append({"role": role, "content": content})
            elif isinstance(item, FunctionCallOutput):
                messages.append(tool_result(joined(item.output), item.call_id))
            elif isinstance(item, FunctionCall):
                if not (messages and messages[-1]["role"] == "assistant"):
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(function_call(item.name, item.arguments, item.call_id))
        return messages


class InputTokensBody(ResponsesBody):
    """The body of a request to count a prompt's tokens. model: by default the one that is served."""

    model: str = ""


class Responses(Dialect):
    """OpenAI's responses."""

    limit_field, thinking_field = "max_output_tokens", "chat_template_kwargs"
    schema_field, strict_field = "text.format", "tools.strict"

    def __init__(self, body: bytes | bytearray):
        self._body = parse(ResponsesBody, body)
        self.request = self._body.request()
        self._identity, self._created, self._numbers = secrets.token_hex(12), int(time.time()), itertools.count()

    def response(self, exchange: Exchange) -> dict[str, Any]:
        (whole,) = exchange.choices
        status = "completed" if whole.finish_reason == "stop" else "incomplete"
        ended = self._response(status) | {"output": self._output(whole, status, exchange), "usage": _usage(exchange)}
        if status == "incomplete":
            ended["incomplete_details"] = {"reason": "max_output_tokens"}
        if not whole.calls and (warning := exchange.warning(0)):
            ended["warning"] = warning
        return ended

    async def events(self, exchange: Exchange) -> AsyncIterator[str]:
        yield self._event("created", response=self._response("in_progress"))
        yield self._event("in_progress", response=self._response("in_progress"))
        begun, told = False, 0  # tokens whose log-probabilities have been told
        try:
            async for piece in exchange.pieces():
                if not begun and (piece.text or (piece.finish_reason and not piece.calls)):
                    yield self._event("output_item.added", output_index=0, item=self._text_item("in_progress"))
                    yield self._text_event("content_part.added", part=_part(""))
                    begun = True
                if piece.text:
                    logprobs = self._logprobs(exchange, told)
                    told = len(exchange.choices[0].tokens)
                    yield self._text_event("output_text.delta", delta=piece.text, logprobs=logprobs)
        except ApiError as error:
            failure = {"error": {"code": "server_error", "message": error.message}}
            yield self._event("failed", response=self._response("failed") | failure)
            return
        response = self.response(exchange)
        for index, item in enumerate(response["output"]):
            yield "".join(self._text_end(item) if item["type"] == "message" else self._call(index, item))
            yield self._event("output_item.done", output_index=index, item=item)
        yield self._event(response["status"], response=response)

    error = staticmethod(ChatCompletions.error)

    def _response(self, status: str) -> dict[str, Any]:
        """Builds a response without its output."""
        body = self._body
        same = ("model", "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature", "top_p")
        choice = body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump()
        return {name: getattr(body, name) for name in same} | {
            "id": f"resp_{self._identity}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": body.text.format.type}},
            "tool_choice": choice,
            "tools": [tool.model_dump() for tool in body.tools],
            "truncation": "disabled",
            "usage": None,
        }

    def _output(self, whole: Piece, status: str, exchange: Exchange) -> list[dict[str, Any]]:
        """Builds the items of an answer: its text, unless there are calls alone, and its calls."""
        calls = [
            {
                "type": "function_call",
                "id": f"fc_{self._identity}{index}",
                "call_id": f"call_{self._identity}{index}",
                "name": call.name,
                "arguments": json.dumps(call.arguments),
                "status": "completed",
            }
            for index, call in enumerate(whole.calls)
        ]
        text = _part(whole.text, self._logprobs(exchange))
        return [self._text_item(status, text), *calls] if whole.text or not calls else calls

    def _logprobs(self, exchange: Exchange, begin: int = 0) -> list[dict[str, Any]]:
        """Builds the log-probabilities of the answer's tokens from `begin` on, its calls' too, if they are asked for."""
        if LOGPROBS not in self._body.include:
            return []
        whole = exchange.choices[0]
        told = token_logprobs(exchange, whole.tokens[begin:], whole.logp[begin:])
        return [one | {"bytes": one["bytes"] or []} for one in told]  # the client requires a list

    def _text_item(self, status: str, *content: dict[str, Any]) -> dict[str, Any]:
        """Builds the item of an answer's text, with the part that holds it, if it is there."""
        return {"type": "message", "id": f"msg_{self._identity}", "role": "assistant", "status": status, "content": [*content]}

    def _text_end(self, item: dict[str, Any]) -> Iterator[str]:
        """Yields the events that end a text's part."""
        (part,) = item["content"]
        yield self._text_event("output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._text_event("content_part.done", part=part)

    def _call(self, index: int, item: dict[str, Any]) -> Iterator[str]:
        """Yields the events of a whole call."""
        place = {"output_index": index, "item_id": item["id"]}
        arguments = item["arguments"]
        begun = item | {"arguments": "", "status": "in_progress"}
        yield self._event("output_item.added", output_index=index, item=begun)
        yield self._event("function_call_arguments.delta", **place, delta=arguments)
        yield self._event("function_call_arguments.done", **place, name=item["name"], arguments=arguments)

    def _event(self, kind: str, **content: Any) -> str:
        name = f"response.{kind}"
        return event({"type": name, "sequence_number": next(self._numbers)} | content, name)

    def _text_event(self, kind: str, **content: Any) -> str:
        """Writes an event of the text's only part."""
        return self._event(kind, output_index=0, item_id=f"msg_{self._identity}", content_index=0, **content)


def _part(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}


def _usage(exchange: Exchange) -> dict[str, Any]:
    prompt, answer = len(exchange.prompt), len(exchange.choices[0].tokens)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + answer,
    }
