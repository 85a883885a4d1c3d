"""The dialect of Anthropic's messages."""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from hgpo_jax.serving.dialect import Dialect, event
from hgpo_jax.serving.exchange import Exchange, Piece
from hgpo_jax.serving.pictures import ImageBlock
from hgpo_jax.serving.requests import (
    ApiError,
    Content,
    Conversation,
    JsonSchema,
    OpenBody,
    SamplingBody,
    SamplingRequest,
    StopStrings,
    TextPart,
    TooLong,
    function_call,
    function_tool,
    joined,
    of_the_client,
    or_text,
    parse,
    strict_tools,
    tool_result,
)

# A line that Claude Code puts before its system prompt, with a number that differs from request to request: no turn would go on
# from another, nothing that was read be used again, and no two episodes begin alike.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
# The `type` of an error by its status; of others `api_error` from 500 on, else `invalid_request_error`.
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


class Text(TextPart):
    type: Literal["text"]


class Thinking(OpenBody):
    """A thought that another server has split from an answer. Chat templates do not show it, so its fields are ignored."""

    type: Literal["thinking", "redacted_thinking"]


class ToolUse(OpenBody):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: Any = None
    name: str
    input: dict[str, Any] = Field(default_factory=dict)


class ToolResult(OpenBody):
    type: Literal["tool_result"]
    tool_use_id: Any = None
    content: Annotated[list[Annotated[Text | ImageBlock, Field(discriminator="type")]], or_text("text")] = Field(
        default_factory=list
    )
    is_error: bool = False

    def told(self) -> Content:
        """Returns the content; an error without one is told from a result without one."""
        return joined(self.content) or ("Error" if self.is_error else "")


Block = Annotated[Text | ImageBlock | Thinking | ToolUse | ToolResult, Field(discriminator="type")]
# The blocks that a message may hold, by its role.
BLOCKS: dict[str, tuple[type[OpenBody], ...]] = {
    "system": (Text,),
    "user": (Text, ImageBlock, ToolResult),
    "assistant": (Text, Thinking, ToolUse),
}


class Message(OpenBody):
    """A message of a conversation; results of tools are blocks of the user's."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[list[Block], or_text("text")]

    @pydantic.model_validator(mode="after")
    def _holds_its_blocks(self):
        if wrong := [block.type for block in self.content if not isinstance(block, BLOCKS[self.role])]:
            raise ValueError(f"a message of the {self.role} has no blocks of type {wrong[0]}")
        if not self.content and self.role != "assistant":
            raise ValueError(f"a message of the {self.role} needs content")
        return self

    def plain(self) -> list[dict[str, Any]]:
        """Returns the message as chat templates take it, to which each result of a tool is a message of its own."""
        if self.role == "assistant":
            calls = [function_call(block.name, block.input, block.id) for block in self.content if isinstance(block, ToolUse)]
            texts = (block for block in self.content if isinstance(block, Text))
            return [{"role": "assistant", "content": joined(texts, self.role)} | ({"tool_calls": calls} if calls else {})]
        messages: list[dict[str, Any]] = []
        for are_results, blocks in itertools.groupby(self.content, lambda block: isinstance(block, ToolResult)):
            if are_results:
                messages += [tool_result(block.told(), block.tool_use_id) for block in blocks]  # type: ignore[union-attr]
            else:
                messages.append({"role": self.role, "content": joined(blocks)})
        return messages


class Tool(OpenBody):
    type: Annotated[Literal["custom"], of_the_client("custom")] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False


class ToolChoice(OpenBody):
    """Which tool an answer must call, if any; done as `tool_choice` of OpenAI's chat completions is."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @pydantic.model_validator(mode="after")
    def _names_a_tool(self):
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a name goes with the type tool, and with no other")
        return self


class ThinkingSwitch(OpenBody):
    """The switch for thoughts of a chat template; a budget of tokens is ignored."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(JsonSchema):
    type: Literal["json_schema"]


class OutputConfig(OpenBody):
    """What an answer must be; its effort is ignored."""

    format: OutputFormat | None = None


class MessagesBody(SamplingBody):
    """A request's body."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    system: Annotated[list[Text], or_text("text")] = Field(default_factory=list)
    stop_sequences: StopStrings = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice()
    thinking: ThinkingSwitch | None = None
    output_config: OutputConfig = OutputConfig()
    _is_answered: ClassVar[bool] = True

    def request(self) -> SamplingRequest:
        """Translates the body. Raises ApiError for an answer that is to go on from what is given."""
        if self.messages[-1].role == "assistant" and self._is_answered:
            last = "the last one is the assistant's, from which this server does not go on"
            raise ApiError(400, f"messages: {last}", param="messages")
        blocks = [text for block in self.system if (text := _BILLING.sub("", block.text, count=1)) or not block.text]
        system = [{"role": "system", "content": "\n".join(blocks)}] if blocks else []
        tools = [] if self.tool_choice.type == "none" else self.tools
        conversation = Conversation(
            [*system, *(plain for message in self.messages for plain in message.plain())],
            [function_tool(tool.name, tool.description, tool.input_schema) for tool in tools],
            {"any": "", "tool": self.tool_choice.name}.get(self.tool_choice.type),
            None if self.thinking is None else self.thinking.type != "disabled",
            strict_tools(tools),
        )
        request = self.sampling(conversation, self.max_tokens, self.stop_sequences)
        if schema := self.output_config.format:
            request.schema, request.lenient = schema.json_schema, schema.strict is False
        request.parallel_calls = not self.tool_choice.disable_parallel_tool_use
        return request


class CountBody(MessagesBody):
    """The body of a request to count a prompt's tokens, to which no answer is sampled."""

    max_tokens: int = Field(1, ge=1)
    _is_answered: ClassVar[bool] = False


class Messages(Dialect):
    """Anthropic's messages."""

    limit_field, thinking_field = "max_tokens", "thinking"
    schema_field, strict_field = "output_config.format", "tools.strict"

    def __init__(self, body: bytes | bytearray):
        self.request = parse(MessagesBody, body).request()
        self._identity = secrets.token_hex(12)

    def response(self, exchange: Exchange) -> dict[str, Any]:
        (whole,) = exchange.choices
        text = [{"type": "text", "text": whole.text}] if whole.text else []
        return self._message(exchange, [*text, *self._calls(whole)]) | _ending(exchange)

    async def events(self, exchange: Exchange) -> AsyncIterator[str]:
        yield _event("message_start", message=self._message(exchange, []))
        (whole,) = exchange.choices
        begun = False
        try:
            async for piece in exchange.pieces():
                if piece.text and not begun:
                    yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
                    begun = True
                if piece.text:
                    yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece.text})
        except ApiError as error:
            yield event(self.error(error), "error")
            return
        if begun:
            yield _event("content_block_stop", index=0)
        for index, call in enumerate(self._calls(whole), int(begun)):
            arguments = {"type": "input_json_delta", "partial_json": json.dumps(call["input"])}
            yield _event("content_block_start", index=index, content_block=call | {"input": {}})
            yield _event("content_block_delta", index=index, delta=arguments)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_ending(exchange), usage=_usage(exchange))
        yield _event("message_stop")

    @staticmethod
    def error(error: ApiError) -> dict[str, Any]:
        kind = ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        message = error.message
        if isinstance(error, TooLong):  # in Anthropic's words, by which its clients know when to compact a conversation
            message = f"prompt is too long: {error.length} {error.unit} > {error.limit} maximum"
        told: dict[str, Any] = {"type": kind, "message": message}
        if error.param == "thread":  # by which Anthropic's tool runner knows that it has to send the whole conversation
            told["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return {"type": "error", "error": told}

    def _message(self, exchange: Exchange, content: list[dict[str, Any]]) -> dict[str, Any]:
        """Builds a message that has not ended."""
        return {
            "id": f"msg_{self._identity}",
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(exchange),
        }

    def _calls(self, whole: Piece) -> list[dict[str, Any]]:
        """Builds the blocks of an answer's calls."""
        return [
            {"type": "tool_use", "id": f"toolu_{self._identity}{index}", "name": call.name, "input": call.arguments}
            for index, call in enumerate(whole.calls)
        ]


def _event(kind: str, **content: Any) -> str:
    return event({"type": kind} | content, kind)


def _usage(exchange: Exchange) -> dict[str, int]:
    return {"input_tokens": len(exchange.prompt), "output_tokens": len(exchange.choices[0].tokens)}


def _ending(exchange: Exchange) -> dict[str, Any]:
    """Says how an answer has ended, and in a `warning` what it does not do that was asked for."""
    (whole,) = exchange.choices
    if whole.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reason = "stop_sequence" if whole.stopped else "end_turn" if whole.finish_reason == "stop" else "max_tokens"
    ending: dict[str, Any] = {"stop_reason": reason, "stop_sequence": whole.stopped or None}
    return ending | ({"warning": warning} if (warning := exchange.warning(0)) else {})
