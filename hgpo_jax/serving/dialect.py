"""A dialect: a public API's words for requests and answers. `web_app.DIALECTS` lists those that are served."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from hgpo_jax.serving.exchange import Exchange
from hgpo_jax.serving.requests import ApiError, SamplingRequest


class Dialect(Protocol):
    """One request in a dialect's words, and its answer.

    limit_field, thinking_field, schema_field, strict_field: its names for the length of an answer, for the chat template's
      switch for thoughts, for the JSON that an answer must be, and for tools whose calls obey their schemas.
    """

    limit_field: str
    thinking_field: str
    schema_field: str
    strict_field: str
    request: SamplingRequest

    def __init__(self, body: bytes | bytearray):
        """Parses a request's body. Raises ApiError."""

    def response(self, exchange: Exchange) -> dict[str, Any]:
        """Builds the whole answer, once all of it is sampled."""

    def events(self, exchange: Exchange) -> AsyncIterator[str]:
        """Yields the server-sent events of a streamed answer. An error that comes too late for a status is one of them."""

    @staticmethod
    def error(error: ApiError) -> dict[str, Any]:
        """Builds the body that tells of an error."""


def token_logprobs(exchange: Exchange, tokens: Sequence[int], logp: Sequence[float]) -> list[dict[str, Any]]:
    """Builds the log-probabilities of sampled tokens, in OpenAI's words."""
    content = []
    for index, value in zip(tokens, logp, strict=True):
        told = {"token": exchange.texts.token(index), "logprob": value, "bytes": exchange.texts.token_bytes(index)}
        content.append(told | {"top_logprobs": []})
    return content


def event(content: dict[str, Any], name: str = "") -> str:
    """Writes a server-sent event, which is one line of data whatever the content's text."""
    line = f"data: {json.dumps(content, allow_nan=False)}\n\n"
    return f"event: {name}\n{line}" if name else line
