"""A dialect: a public API's words for requests and answers. `api.Api` serves the dialects that it lists."""

from __future__ import annotations

import abc
import json
from collections.abc import AsyncIterator
from typing import Any

from hgpo_jax.serving.exchange import Exchange
from hgpo_jax.serving.requests import ApiError, SamplingRequest


class Dialect(abc.ABC):
    """One request in a dialect's words, and its answer.

    Raises ApiError for a body that is none of the dialect's.
    """

    request: SamplingRequest

    @abc.abstractmethod
    def __init__(self, body: bytes | bytearray): ...

    @abc.abstractmethod
    def response(self, exchange: Exchange) -> dict[str, Any]:
        """Builds the whole answer, once all of it is sampled."""

    @abc.abstractmethod
    def events(self, exchange: Exchange) -> AsyncIterator[str]:
        """Yields the server-sent events of a streamed answer."""

    @staticmethod
    @abc.abstractmethod
    def error(error: ApiError) -> dict[str, Any]:
        """Builds the body, or the event, that tells of an error."""


def event(content: dict[str, Any]) -> str:
    """Writes a server-sent event, which is one line whatever the content's text."""
    return f"data: {json.dumps(content, allow_nan=False)}\n\n"
