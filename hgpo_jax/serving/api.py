"""The web application: OpenAI's chat and text completions over an `Engine`.

    POST /v1/chat/completions, POST /v1/completions    whole or streamed
    POST /v1/sessions/NAME/reward                      for a recorded episode (`sessions.py`)
    GET /v1/models, /health, /metrics

Errors have OpenAI's form. A request without room is answered 429 with Retry-After; if its client leaves, its slots are
released. The header X-Ignored names fields of the request that were ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hgpo_jax.policy.chat_frame import ChatFrame
from hgpo_jax.policy.tokenizer import generation_of
from hgpo_jax.rollout.chat_prompts import MAX_CHARACTERS_PER_TOKEN
from hgpo_jax.sampling.generate import Decoding, published_decoding
from hgpo_jax.serving import connections
from hgpo_jax.serving.answers import ChatForm, Form, Piece, TextForm, ToolForm, usage
from hgpo_jax.serving.earlier_answers import prompt_ids
from hgpo_jax.serving.engine import Engine
from hgpo_jax.serving.metrics import ServerMetrics
from hgpo_jax.serving.pending_request import Exchange, NextTurn, Replay
from hgpo_jax.serving.requests import ApiError, ChatRequest, RewardRequest, Sampling, TextRequest, parse
from hgpo_jax.serving.sessions import OpenSessions, Session, Sessions, Turn, state_of
from hgpo_jax.serving.text import ServedText

log = logging.getLogger(__name__)

LEFT = 499  # the status, only for metrics, of a client that did not wait
TOO_LONG = "context_length_exceeded"
MAX_SAID = 100  # names of ignored fields that are logged
_said: set[str] = set()  # those names, for all servers of a process: a trainer starts one for every rollout


class Api:
    """The application of one served policy.

    Args:
      model: the name that clients use; if it is empty, any name is accepted.
      tokenizer: the policy's.
      key: clients must send it; none if empty.
      sessions: those to record; `Sessions` have keys of their own, instead of `key`. None: none.
      body_limit: bytes of a request.
      frame: the frame of the tokenizer's chat template; by default unchanged, with today's date.
      time_limit: timeout in seconds until a request's last token.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer,
        model: str,
        *,
        key: str,
        body_limit: int,
        time_limit: float,
        sessions: Sessions | OpenSessions | None = None,
        frame: ChatFrame | None = None,
    ):
        self._engine, self._model, self._key, self._sessions = engine, model, key, sessions
        # A body longer than any prompt is not parsed, since other requests would wait; a character takes at most 6 bytes.
        self._body_limit = min(body_limit, 6 * MAX_CHARACTERS_PER_TOKEN * engine.prompt_limit + 2**18)
        self._time_limit = time_limit
        self._texts, self._began = ServedText(tokenizer, frame), int(time.time())
        # In training a session's own decoding applies.
        self._usual = Decoding() if isinstance(sessions, Sessions) else published_decoding(generation_of(tokenizer))
        self._metrics = ServerMetrics(engine)
        routes = {
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._show_metrics),
            "/v1/models": ("GET", self._models),
            "/v1/models/{name:path}": ("GET", self._a_model),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._text),
            "/v1/sessions/{name}/reward": ("POST", self._reward),
        }
        self._paths = frozenset(routes)
        self.app = Starlette(
            routes=[Route(path, endpoint, methods=[method]) for path, (method, endpoint) in routes.items()],
            exception_handlers={kind: _refused for kind in (ApiError, HTTPException, Exception)},
        )

    async def __call__(self, scope, receive, send) -> None:
        """Runs the ASGI application: checks the key, counts answers."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"
        path = "/v1/sessions" if scope["path"].startswith("/v1/sessions/") else path
        headers = dict(scope["headers"])

        async def counted(message):
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(path, message["status"]).inc()
            await send(message)

        if self._key or isinstance(self._sessions, Sessions):
            if path != "/health" and not self._allows(_key_in(headers.get(b"authorization", b""))):
                error = ApiError(401, "the API key is missing or wrong", "authentication_error", code="invalid_api_key")
                await _refusal(error)(scope, receive, counted)
                return
        elif not all(connections.is_local(headers[name]) for name in (b"host", b"origin") if name in headers):
            # A page in this machine's browser can reach local servers, also under a host name of its own.
            error = ApiError(403, "without a key only this machine's own programs are answered", "permission_error")
            await _refusal(error)(scope, receive, counted)
            return
        await self.app(scope, receive, counted)

    def _allows(self, key: str) -> bool:
        if isinstance(self._sessions, Sessions):
            return self._sessions.allows(key)
        return hmac.compare_digest(key.encode("latin-1"), self._key.encode())

    async def _health(self, request: Request) -> Response:
        if self._engine.failure:
            return JSONResponse({"status": self._engine.failure}, 503)
        return JSONResponse({"status": "ok", "active": self._engine.active, "waiting": self._engine.waiting})

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def _described(self) -> dict[str, Any]:
        return {"id": self._model or "policy", "object": "model", "created": self._began, "owned_by": "hgpo_jax"}

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _a_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._described())

    def _check_model(self, name: str) -> None:
        if self._model and name != self._model:
            raise ApiError(404, f"model: {name[:100]!r} is not served here, {self._model!r} is", code="model_not_found")

    def _check_length(self, characters: int) -> None:
        """Checks a text's length before it is tokenized."""
        if characters > self._engine.prompt_limit * MAX_CHARACTERS_PER_TOKEN:
            raise self._too_long(f"{characters:,} characters")

    def _too_long(self, size: str) -> ApiError:
        limit = self._engine.prompt_limit
        return ApiError(400, f"the prompt has {size}, this server reads {limit:,} tokens", code=TOO_LONG)

    async def _body(self, request: Request) -> bytearray:
        body = bytearray()
        try:
            async with asyncio.timeout(connections.GRACE):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self._body_limit:
                        raise ApiError(413, f"the body has more than {self._body_limit:,} bytes", code="body_too_large")
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {connections.GRACE:g} seconds") from None
        except ClientDisconnect:
            raise ApiError(LEFT, "the client has left") from None
        return body

    async def _chat(self, request: Request) -> Response:
        asked = parse(ChatRequest, await self._body(request))
        messages = [message.plain() for message in asked.messages]
        tools = asked.shown_tools
        form = (ToolForm if tools else ChatForm)(asked, self._texts)
        shown = [*tools, *(message["tool_calls"] for message in messages if "tool_calls" in message)]
        length = sum(len(json.dumps(one)) for one in shown) + sum(len(message["content"]) for message in messages)

        async def read(turns: Sequence[Turn]) -> list[list[int]]:
            self._check_length(length)
            try:
                return [await asyncio.to_thread(prompt_ids, self._texts, messages, tools, form.begun, turns, asked.thinking)]
            except ValueError as error:
                raise ApiError(400, str(error), param="tools" if str(error).startswith("tools:") else "messages") from None

        seen = next((message["content"] for message in reversed(messages) if message["role"] != "assistant"), "")
        return await self._answer(request, asked, form, seen, read)

    async def _text(self, request: Request) -> Response:
        asked = parse(TextRequest, await self._body(request))

        async def read(turns: Sequence[Turn]) -> list[list[int]]:
            return [await self._ids(prompt) for prompt in asked.prompts]

        return await self._answer(request, asked, TextForm(asked, self._texts), str(asked.prompts[0]), read)

    async def _ids(self, prompt: str | list[int]) -> list[int]:
        """Returns the ids of a text, or the given ids. Raises ApiError."""
        if isinstance(prompt, str):
            self._check_length(len(prompt))
            return await asyncio.to_thread(self._texts.prompt, prompt)
        if max(prompt) >= self._engine.vocabulary:
            raise ApiError(400, f"prompt: {max(prompt)} is no token id of this model", param="prompt")
        return prompt

    async def _reward(self, request: Request) -> Response:
        if self._sessions is None:
            raise ApiError(404, "this server records no sessions; start it with --record FOLDER")
        posted = parse(RewardRequest, await self._body(request))
        session = self._sessions.named(_key_of(request), request.path_params["name"])
        await self._begin(session)
        try:
            session.post(posted)
        finally:
            session.end()
        if session.ended and isinstance(self._sessions, OpenSessions):
            self._sessions.ended(session)
        return JSONResponse(session.described())

    def _session_of(self, request: Request, asked: Sampling) -> Session | None:
        """Returns the session of a request. Raises ApiError."""
        if self._sessions is None:
            return None
        session = self._sessions.of(_key_of(request), request.headers, asked.metadata or {})
        if session and asked.answers > 1:
            field = "n" if asked.n > 1 else "prompt"
            raise ApiError(400, f"{field}: {asked.answers} answers are no turn of a session; ask for one", param=field)
        return session

    async def _begin(self, session: Session) -> None:
        """Waits for a session's earlier requests. Raises ApiError; otherwise the session's `end` must follow."""
        try:
            async with asyncio.timeout(self._time_limit):
                await session.begin()
        except TimeoutError:
            message = f"session {session.name}: its earlier requests were not done within {self._time_limit:g} seconds"
            raise ApiError(504, message, "server_error", code="timeout") from None

    async def _answer(
        self,
        request: Request,
        asked: Sampling,
        form: Form,
        seen: str,
        read: Callable[[Sequence[Turn]], Awaitable[list[list[int]]]],
    ) -> Response:
        """Answers a request. read: returns the prompts' ids, in a session based on its earlier turns."""
        self._check_model(asked.model)
        if asked.answers > self._engine.room:
            raise ApiError(400, f"n: {asked.answers} answers are more than this server's {self._engine.room} places", param="n")
        session, state = self._session_of(request, asked), state_of(request.headers, asked.metadata or {}, seen)
        key, again = request.headers.get("idempotency-key"), request.headers.get("x-stainless-retry-count", "0") != "0"
        most, ignored = self._engine.response_limit, asked.ignored()
        if asked.limit is not None and asked.limit > most:
            ignored.append("max_tokens")
        if isinstance(asked, ChatRequest) and asked.thinking is not None and not self._texts.has_switch:
            ignored.append("chat_template_kwargs")
        if session and session.decoding:
            ignored += sorted(asked.model_fields_set & {"temperature", "top_p", "top_k", "seed"})
        with contextlib.ExitStack() as stack:
            if session:
                await self._begin(session)
                stack.callback(session.end)
            try:
                prompts = await read(session.turns if session else ())
                self._check_prompts(prompts)
            except ApiError as error:
                if session and error.code == TOO_LONG:
                    session.check_turns()  # the length of a surplus turn does not matter
                    session.overflowed = True
                raise
            if session and (turn := session.repeated(prompts[0], key, again)):
                exchange: Exchange | Replay = Replay(turn, self._texts)
            else:
                if session:
                    session.check_turns()
                exchange = Exchange(
                    self._engine,
                    self._texts,
                    asked,
                    prompts,
                    min(asked.limit or most, most),
                    NextTurn(session, state, form.begun, key) if session else None,
                    self._usual,
                    seconds=self._time_limit,
                )
            stack.enter_context(exchange)  # rejections come before a stream begins
            answer = {"id": f"{form.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": asked.model}
            headers = self._saying(ignored)
            if asked.stream:
                events = self._events(exchange, answer, form, asked, prompts)
                return _Stream(events, headers, stack.pop_all(), self._time_limit + connections.GRACE)
            if not await self._whole(request, self._observed(exchange, prompts)):
                return Response(status_code=LEFT)
            answer |= form.whole(exchange.choices, prompts) | {"usage": usage(exchange.choices, prompts)}
            return _Whole(answer, headers, stack.pop_all(), request, exchange)

    def _check_prompts(self, prompts: Sequence[list[int]]) -> None:
        """Checks the lengths of prompts. Raises ApiError."""
        for ids in prompts:
            if not ids:
                raise ApiError(400, "the prompt is empty")
            if len(ids) > self._engine.prompt_limit:
                raise self._too_long(f"{len(ids):,} tokens")

    def _saying(self, ignored: Sequence[str]) -> dict[str, str]:
        """Returns an answer's headers if some fields of the request are ignored; new ones are also logged."""
        for name in ignored:
            if name not in _said and len(_said) < MAX_SAID:
                _said.add(name)
                limit = f"no answer has more than {self._engine.response_limit:,}" if name == "max_tokens" else "it is ignored"
                log.warning("a request's %s: %s", name, limit)
        return {"X-Ignored": ", ".join(ignored)} if ignored else {}

    async def _observed(self, exchange: Exchange | Replay, prompts: Sequence[list[int]]) -> AsyncIterator[Piece]:
        """Passes on the exchange's pieces, and counts them in the metrics."""
        began, first, done = time.perf_counter(), True, False
        try:
            async for piece in exchange.pieces():
                if first:
                    self._metrics.first_token.observe(time.perf_counter() - began)
                first = False
                yield piece
            done = True
            self._metrics.duration.observe(time.perf_counter() - began)
            self._metrics.tokens.labels("prompt").inc(sum(map(len, prompts)))
            self._metrics.tokens.labels("sampled").inc(sum(len(choice.tokens) for choice in exchange.choices))
        finally:
            if not done:
                self._metrics.cancelled.inc()

    async def _whole(self, request: Request, pieces: AsyncIterator[Piece]) -> bool:
        """Waits for all pieces, or until the client leaves; returns whether it stayed."""

        async def wait() -> None:
            async for _ in pieces:
                pass

        async def leaves() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        waiting, leaving = asyncio.ensure_future(wait()), asyncio.ensure_future(leaves())
        try:
            await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting.result()
            return waiting.done()
        finally:
            waiting.cancel()
            leaving.cancel()

    async def _events(
        self, exchange: Exchange | Replay, answer: dict[str, Any], form: Form, asked: Sampling, prompts: Sequence[list[int]]
    ) -> AsyncIterator[str]:
        """Yields a streamed answer's events."""
        try:
            for opening in form.opening(prompts):
                yield _event(answer | opening)
            async for piece in self._observed(exchange, prompts):
                yield _event(answer | form.piece(piece))
            if asked.stream_options and asked.stream_options.include_usage:
                yield _event(answer | form.closing() | {"usage": usage(exchange.choices, prompts)})
            yield "data: [DONE]\n\n"
            if exchange.turn:
                exchange.turn.delivered = True
        except ApiError as error:  # too late for a status
            yield _event(error.body)


class _Stream(StreamingResponse):
    """Server-sent events; however the answer ends, its resources are released. A client that reads too slowly is dropped."""

    def __init__(self, events: AsyncIterator[str], headers: dict[str, str], held: contextlib.ExitStack, seconds: float):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"} | headers)
        self._held, self._seconds = held, seconds

    async def __call__(self, scope, receive, send) -> None:
        with contextlib.suppress(TimeoutError), self._held:
            async with asyncio.timeout(self._seconds):
                await super().__call__(scope, receive, send)


class _Whole(JSONResponse):
    """An answer in one piece; afterwards its resources are released."""

    def __init__(
        self,
        content: dict[str, Any],
        headers: dict[str, str],
        held: contextlib.ExitStack,
        request: Request,
        exchange: Exchange | Replay,
    ):
        super().__init__(content, headers=headers)
        self._held, self._request, self._exchange = held, request, exchange

    async def __call__(self, scope, receive, send) -> None:
        with self._held:
            stayed = not await self._request.is_disconnected()
            await super().__call__(scope, receive, send)
            if stayed and self._exchange.turn:
                self._exchange.turn.delivered = True


def _refusal(error: ApiError) -> Response:
    # The rest of the request is not read, so no other can follow it.
    close = {"Connection": "close"} if error.status in (401, 403, 408, 413) else {}
    return JSONResponse(error.body, error.status, close | (error.headers or {}))


async def _refused(request: Request, error: Exception) -> Response:
    """Answers uncaught errors: our own rejections, unknown paths and methods, and defects, which are also logged."""
    if isinstance(error, ApiError):
        return _refusal(error)
    if isinstance(error, HTTPException):
        return _refusal(ApiError(error.status_code, error.detail, headers=dict(error.headers or {}) or None))
    return _refusal(ApiError(500, "the server has failed", "server_error"))


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, allow_nan=False)}\n\n"


def _key_in(header: bytes) -> str:
    """Returns the API key in an Authorization header."""
    return header.removeprefix(b"Bearer ").decode("latin-1")


def _key_of(request: Request) -> str:
    return _key_in(dict(request.scope["headers"]).get(b"authorization", b""))  # the last one, as in the check
