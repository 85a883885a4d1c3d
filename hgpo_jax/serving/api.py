"""The web application: OpenAI's chat and text completions over an `Engine`.

    POST /v1/chat/completions, POST /v1/completions    whole or streamed
    POST /v1/sessions/NAME/reward                      of an episode that is recorded (`sessions.py`)
    GET /v1/models, /health, /metrics

Errors have OpenAI's form. A request that finds no room is answered 429 with Retry-After; one whose client leaves gives its
slots back.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from hgpo_jax.rollout.chat_format import MAX_CHARACTERS_PER_TOKEN
from hgpo_jax.sampling import Decoding
from hgpo_jax.serving.answers import ChatForm, Choice, Form, Piece, TextForm, ToolForm, usage
from hgpo_jax.serving.engine import Busy, Engine, Generation, Progress
from hgpo_jax.serving.metrics import ServerMetrics
from hgpo_jax.serving.requests import ApiError, ChatRequest, RewardRequest, Sampling, TextRequest, parse
from hgpo_jax.serving.sessions import OpenSessions, Session, Sessions, Turn, state_of
from hgpo_jax.serving.text import ServedText, TextStream

GRACE = 30.0  # seconds that a body may take to arrive, and the rest of an answer to be read
LEFT = 499  # the status, for the metrics alone, where the client did not wait


class Exchange:
    """A request's responses as they come; use as a context, so that what nobody waits for is cancelled.

    session: whose next turn it is. seconds: until the last token, after which it is given up. Raises ApiError where there is
    no room.
    """

    def __init__(
        self, engine: Engine, texts: ServedText, asked: Sampling, ids: list[int], limit: int, session: Session | None,
        state: str, *, seconds: float,
    ):  # fmt: skip
        self._engine, self._session, self._state, self._seconds = engine, session, state, seconds
        self.choices = [Choice(TextStream(texts.decode, asked.stops)) for _ in range(asked.n)]
        self._news: asyncio.Queue[tuple[int, Progress]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(index: int):
            def told(progress: Progress) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                    loop.call_soon_threadsafe(self._news.put_nowait, (index, progress))

            return told

        decoding = Decoding(temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k)
        seed: int | np.ndarray = secrets.randbits(32) if asked.seed is None else asked.seed % 2**32
        first = 0
        if session:
            first, decoding = session.begin(), session.decoding or decoding
            seed = seed if session.seed is None else session.seed
        self._generations = [Generation(ids, limit, decoding, seed, first + i, tell(i)) for i in range(asked.n)]

    def __enter__(self) -> Exchange:
        try:
            self._engine.submit(self._generations)
        except (Busy, RuntimeError) as error:
            self._left()
            if isinstance(error, RuntimeError):
                raise ApiError(503, str(error), "server_error") from None
            raise ApiError(
                429, "every slot is taken and as many requests wait as may; try again", "rate_limit_error",
                code="rate_limit_exceeded", headers={"Retry-After": "1"},
            ) from None  # fmt: skip
        return self

    def __exit__(self, *_) -> None:
        self._cancel(range(len(self.choices)))
        self._left()

    def _left(self) -> None:
        """Tells the session of its turn, which did not happen unless it was sampled to its end."""
        session, self._session = self._session, None
        if session:
            (choice,), ids = self.choices, list(self._generations[0].ids)
            done = choice.finish_reason is not None
            session.end(Turn(ids, self._state, choice.tokens, choice.logp, choice.text) if done else None)

    def _cancel(self, indices: Iterable[int]) -> None:
        left = [self._generations[i] for i in indices if self.choices[i].finish_reason is None]
        if left:
            self._engine.cancel(left)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Until all choices have ended. Raises ApiError."""
        until = time.monotonic() + self._seconds
        while any(choice.finish_reason is None for choice in self.choices):
            try:
                index, progress = await asyncio.wait_for(self._news.get(), until - time.monotonic())
            except TimeoutError:
                raise ApiError(504, f"not done within {self._seconds:g} seconds", "server_error", code="timeout") from None
            choice = self.choices[index]
            if progress.error:
                raise ApiError(503, progress.error, "server_error")
            if choice.finish_reason is not None:
                continue  # told before the engine heard of the stop string
            text, count = choice.stream.push(progress.tokens, last=progress.ended)
            tokens, logp = progress.tokens[:count], progress.logp[:count]
            if choice.stream.stopped and not progress.ended:
                self._cancel([index])
            if choice.stream.stopped or progress.ended:
                stopped = choice.stream.stopped or (tokens and tokens[-1] in self._engine.end_tokens)
                choice.finish_reason = "stop" if stopped else "length"
            choice.text += text
            choice.tokens += tokens
            choice.logp += logp
            if all(choice.finish_reason is not None for choice in self.choices):
                self._left()  # before the client can hear of it and ask again
            yield Piece(index, text, tokens, logp, choice.finish_reason)


class Api:
    """The application of one served policy.

    Args:
      model: the name that clients give; where it is empty, any name will do.
      tokenizer: the policy's.
      key: clients must send it; none if empty.
      sessions: that are recorded; `Sessions` have keys of their own, in the place of `key`. None: none.
      body_limit: bytes of a request.
      time_limit: seconds until a request's last token, after which it is given up.
    """

    def __init__(
        self, engine: Engine, tokenizer, model: str, *, key: str, body_limit: int, time_limit: float,
        sessions: Sessions | OpenSessions | None = None,
    ):  # fmt: skip
        self._engine, self._model, self._key, self._sessions = engine, model, key, sessions
        # What is longer than any prompt need not be parsed, which others would wait for; a character takes 6 bytes at most.
        self._body_limit = min(body_limit, 6 * MAX_CHARACTERS_PER_TOKEN * engine.prompt_limit + 2**18)
        self._time_limit = time_limit
        self._texts, self._began = ServedText(tokenizer), int(time.time())
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
        """The ASGI application: checks the key, counts answers."""
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
        elif not all(is_loopback(_host(headers[name])) for name in (b"host", b"origin") if name in headers):
            # A page in this machine's browser can reach what listens here, also under a name of its own.
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
        """Before anything is tokenized."""
        if characters > self._engine.prompt_limit * MAX_CHARACTERS_PER_TOKEN:
            raise self._too_long(f"{characters:,} characters")

    def _too_long(self, size: str) -> ApiError:
        limit = self._engine.prompt_limit
        return ApiError(
            400, f"the prompt has {size}, this server reads {limit:,} tokens", code="context_length_exceeded"
        )  # fmt: skip

    async def _body(self, request: Request) -> bytearray:
        body = bytearray()
        try:
            async with asyncio.timeout(GRACE):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self._body_limit:
                        raise ApiError(413, f"the body has more than {self._body_limit:,} bytes", code="body_too_large")
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {GRACE:g} seconds") from None
        except ClientDisconnect:
            raise ApiError(LEFT, "the client has left") from None
        return body

    async def _chat(self, request: Request) -> Response:
        asked = parse(ChatRequest, await self._body(request))
        messages = [message.plain() for message in asked.messages]
        tools = asked.shown_tools
        shown = [*tools, *(message["tool_calls"] for message in messages if "tool_calls" in message)]
        self._check_length(sum(len(json.dumps(one)) for one in shown) + sum(len(message["content"]) for message in messages))
        try:
            ids = await asyncio.to_thread(self._texts.conversation, messages, tools)
        except ValueError as error:
            raise ApiError(400, str(error), param="tools" if str(error).startswith("tools:") else "messages") from None
        seen = next((message["content"] for message in reversed(messages) if message["role"] != "assistant"), "")
        return await self._answer(request, asked, ids, seen, (ToolForm if tools else ChatForm)(asked, self._texts))

    async def _text(self, request: Request) -> Response:
        asked = parse(TextRequest, await self._body(request))
        prompt = asked.only_prompt
        seen = str(prompt)
        if isinstance(prompt, str):
            self._check_length(len(prompt))
            prompt = await asyncio.to_thread(self._texts.prompt, prompt)
        elif max(prompt) >= self._engine.vocabulary:
            raise ApiError(400, f"prompt: {max(prompt)} is no token id of this model", param="prompt")
        return await self._answer(request, asked, prompt, seen, TextForm(asked, self._texts))

    async def _reward(self, request: Request) -> Response:
        if self._sessions is None:
            raise ApiError(404, "this server records no sessions; start it with --record FOLDER")
        posted = parse(RewardRequest, await self._body(request))
        session = self._sessions.named(_key_of(request), request.path_params["name"])
        session.post(posted)
        if session.ended and isinstance(self._sessions, OpenSessions):
            self._sessions.ended(session)
        return JSONResponse(session.described())

    def _session_of(self, request: Request, asked: Sampling) -> Session | None:
        """Whose turn a request is. Raises ApiError."""
        if self._sessions is None:
            return None
        session = self._sessions.of(_key_of(request), request.headers, asked.metadata or {})
        if session and asked.n > 1:
            raise ApiError(400, f"n: {asked.n} answers are no turn of a session; leave it out", param="n")
        return session

    async def _answer(self, request: Request, asked: Sampling, ids: list[int], seen: str, form: Form) -> Response:
        self._check_model(asked.model)
        if not ids:
            raise ApiError(400, "the prompt is empty")
        if len(ids) > self._engine.prompt_limit:
            raise self._too_long(f"{len(ids):,} tokens")
        most = self._engine.response_limit
        if asked.limit is not None and asked.limit > most:
            raise ApiError(400, f"max_tokens: {asked.limit:,} is more than this server samples, {most:,}", param="max_tokens")
        if asked.n > self._engine.slots:
            raise ApiError(400, f"n: {asked.n} is more than this server's {self._engine.slots} slots", param="n")
        session, state = self._session_of(request, asked), state_of(request.headers, asked.metadata or {}, seen)
        exchange = Exchange(
            self._engine, self._texts, asked, ids, asked.limit or most, session, state, seconds=self._time_limit
        )
        answer = {"id": f"{form.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": asked.model}
        if asked.stream:
            exchange.__enter__()  # refused before the stream begins
            return _Stream(self._events(exchange, answer, form, asked, ids), exchange, self._time_limit + GRACE)
        with exchange:
            if not await self._whole(request, self._observed(exchange, ids)):
                return Response(status_code=LEFT)
        return JSONResponse(answer | form.whole(exchange.choices, ids) | {"usage": usage(exchange.choices, ids)})

    async def _observed(self, exchange: Exchange, ids: list[int]) -> AsyncIterator[Piece]:
        """The exchange's pieces, for the metrics."""
        began, first, done = time.perf_counter(), True, False
        try:
            async for piece in exchange.pieces():
                if first:
                    self._metrics.first_token.observe(time.perf_counter() - began)
                first = False
                yield piece
            done = True
            self._metrics.duration.observe(time.perf_counter() - began)
            self._metrics.tokens.labels("prompt").inc(len(ids))
            self._metrics.tokens.labels("sampled").inc(sum(len(choice.tokens) for choice in exchange.choices))
        finally:
            if not done:
                self._metrics.cancelled.inc()

    async def _whole(self, request: Request, pieces: AsyncIterator[Piece]) -> bool:
        """Waits for all pieces, or until the client leaves; whether it stayed."""

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
        self, exchange: Exchange, answer: dict[str, Any], form: Form, asked: Sampling, ids: list[int]
    ) -> AsyncIterator[str]:
        """A streamed answer's events."""
        try:
            for opening in form.opening(ids):
                yield _event(answer | opening)
            async for piece in self._observed(exchange, ids):
                yield _event(answer | form.piece(piece))
            if asked.stream_options and asked.stream_options.include_usage:
                yield _event(answer | form.closing() | {"usage": usage(exchange.choices, ids)})
            yield "data: [DONE]\n\n"
        except ApiError as error:  # too late for a status
            yield _event(error.body)


class _Stream(StreamingResponse):
    """Server-sent events; however the answer ends, its exchange is left. A client that reads too slowly is left, too."""

    def __init__(self, events: AsyncIterator[str], exchange: Exchange, seconds: float):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._exchange, self._seconds = exchange, seconds

    async def __call__(self, scope, receive, send) -> None:
        with contextlib.suppress(TimeoutError), self._exchange_left():
            async with asyncio.timeout(self._seconds):
                await super().__call__(scope, receive, send)

    @contextlib.contextmanager
    def _exchange_left(self):
        try:
            yield
        finally:
            self._exchange.__exit__()


def _refusal(error: ApiError) -> Response:
    # What is left of the request is not read: no other can follow it.
    close = {"Connection": "close"} if error.status in (401, 403, 408, 413) else {}
    return JSONResponse(error.body, error.status, close | (error.headers or {}))


async def _refused(request: Request, error: Exception) -> Response:
    """What no handler catches: our own refusals, unknown paths and methods, and defects, which are also logged."""
    if isinstance(error, ApiError):
        return _refusal(error)
    if isinstance(error, HTTPException):
        return _refusal(ApiError(error.status_code, error.detail, headers=dict(error.headers or {}) or None))
    return _refusal(ApiError(500, "the server has failed", "server_error"))


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, allow_nan=False)}\n\n"


def is_loopback(host: str) -> bool:
    """Whether only this machine's own programs reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _key_in(header: bytes) -> str:
    """The API key in an Authorization."""
    return header.removeprefix(b"Bearer ").decode("latin-1")


def _key_of(request: Request) -> str:
    return _key_in(dict(request.scope["headers"]).get(b"authorization", b""))  # the last one, as where it is checked


def _host(header: bytes) -> str:
    """The name in a Host or an Origin."""
    text = header.decode("latin-1")
    try:
        return urlsplit(text if "://" in text else f"//{text}").hostname or ""
    except ValueError:
        return ""


class Connection(H11Protocol):
    """Uvicorn's, closed if no request came within GRACE seconds to twice that: its own timer begins after the first one.

    Of an answer that is not read nothing is kept for longer, either.
    """

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        # asyncio does it for sockets of its own making only; without it a piece waits up to 40 ms for the one before it.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._look(object(), 0)

    def _look(self, cycle: Any, unread: int) -> None:
        """What a look GRACE seconds ago saw: the latest request, and bytes of answers that the client had not read."""
        now = self.transport.get_write_buffer_size()
        if self.cycle is cycle and not self.transport.is_closing():
            busy = self.cycle is not None and not self.cycle.response_complete
            if not busy or (self.flow.write_paused and now == unread):
                self.transport.close()
        if self.transport.is_closing():
            self.loop.call_later(GRACE, self._leave)
        else:
            self.loop.call_later(GRACE, self._look, self.cycle, now)

    def _leave(self) -> None:
        if self in self.connections:  # closing alone waits until the client has read everything
            self.transport.abort()
