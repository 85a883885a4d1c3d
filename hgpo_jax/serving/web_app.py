"""The web application: dialects of public APIs over an `Engine`.

    POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages    whole or streamed
    POST /v1/messages/count_tokens                                             how long a prompt is
    POST /v1/sessions/NAME/reward                                              for a recorded episode (`sessions.py`)
    GET /v1/models, /health

Clients whose base URL lacks /v1 are answered, too.
A request without room is answered 429 with Retry-After; if its client leaves, its slots are released. The header X-Ignored
names fields of the request that were ignored. Another dialect is a class (`dialect.Dialect`) and a line in DIALECTS.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hgpo_jax.policy.chat_template import ChatFrame
from hgpo_jax.policy.tokenizer import generation_of
from hgpo_jax.rollout.chat_prompts import MAX_CHARACTERS_PER_TOKEN
from hgpo_jax.sampling.generate import Decoding, published_decoding
from hgpo_jax.serving.answer_forms import form_of
from hgpo_jax.serving.anthropic_messages import CountBody, Messages, MessagesBody
from hgpo_jax.serving.branches import parent_of, path, prompt_ids
from hgpo_jax.serving.dialect import Dialect
from hgpo_jax.serving.engine import Engine
from hgpo_jax.serving.exchange import Exchange, ServedPrompt
from hgpo_jax.serving.grammars import INSTALL, Grammars
from hgpo_jax.serving.openai_completions import ChatCompletions, TextCompletions
from hgpo_jax.serving.openai_responses import InputTokensBody, Responses, ResponsesBody
from hgpo_jax.serving.pictures import MAX_BYTES, prepared, with_features
from hgpo_jax.serving.requests import ApiError, Conversation, SamplingRequest, TooLong, parse
from hgpo_jax.serving.sessions import OpenSessions, Place, RewardRequest, Session, Sessions, Turn, place_of
from hgpo_jax.serving.text import ServedText
from hgpo_jax.serving.uvicorn_server import is_loopback

log = logging.getLogger(__name__)

DIALECTS: dict[str, type[Dialect]] = {
    "/chat/completions": ChatCompletions,
    "/completions": TextCompletions,
    "/responses": Responses,
    "/messages": Messages,
}
COUNT_TOKENS = "/messages/count_tokens"
COUNTS: dict[
    str, tuple[type[MessagesBody | ResponsesBody], dict[str, str]]
] = {  # body of the request, further fields of the answer
    COUNT_TOKENS: (CountBody, {}),
    "/responses/input_tokens": (InputTokensBody, {"object": "response.input_tokens"}),
}
COUNTED = 16  # times the longest prompt: tokens of pictures that are counted
GRACE = 30.0  # timeout in seconds for a body to arrive, and for the rest of an answer to be read


class Api:
    """The application of one served policy.

    Args:
      model: the name that clients use; if it is empty, any name is accepted.
      tokenizer: the policy's.
      key: clients must send it; none if empty.
      sessions: those to record; `Sessions` have keys of their own, instead of `key`. None: none.
      grammars: those of constrained answers, for an engine that constrains; or why there are none.
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
        time_limit: float,
        sessions: Sessions | OpenSessions | None = None,
        grammars: Grammars | str = INSTALL,
        frame: ChatFrame | None = None,
    ):
        self._engine, self._model, self._sessions, self._grammars = engine, model, sessions, grammars
        self._allows: Callable[[str], bool] | None = functools.partial(_equal, key) if key else None
        if isinstance(sessions, Sessions):
            self._allows = sessions.allows
        # A body longer than any prompt is not parsed, since other requests would wait; a character takes at most 6 bytes.
        self._body_limit = 6 * MAX_CHARACTERS_PER_TOKEN * engine.prompt_limit + 2**18 + (MAX_BYTES if engine.vision else 0)
        self._time_limit = time_limit
        self._texts, self._began = ServedText(tokenizer, frame), int(time.time())
        # In training a session's own decoding applies.
        self._usual = Decoding() if isinstance(sessions, Sessions) else published_decoding(generation_of(tokenizer))
        posted: dict[str, Any] = {path: functools.partial(self._endpoint, kind) for path, kind in DIALECTS.items()}
        posted |= {path: functools.partial(self._count_tokens, *form) for path, form in COUNTS.items()}
        posted["/sessions/{name}/reward"] = self._reward
        read = {"/models": self._models, "/models/": self._models, "/models/{name:path}": self._a_model}
        self._app = Starlette(
            routes=[
                Route("/health", self._health),
                *(Route(base + path, answer) for base in ("/v1", "") for path, answer in read.items()),
                *(Route(base + path, answer, methods=["POST"]) for base in ("/v1", "") for path, answer in posted.items()),
            ],
            exception_handlers={kind: _respond_to_error for kind in (ApiError, HTTPException, ClientDisconnect, Exception)},
        )

    async def __call__(self, scope, receive, send) -> None:
        """Runs the ASGI application, for clients that may use it."""
        if scope["type"] == "http":
            request = Request(scope)
            try:
                self._admit(request)
            except ApiError as error:
                await _refusal(request, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, request: Request) -> None:
        """Raises ApiError for a request without the key, or, on a server without one, from a page in a browser."""
        if self._allows:
            if request.url.path != "/health" and not any(map(self._allows, _keys_in(request))):
                raise ApiError(401, "the API key is missing or wrong", "authentication_error", code="invalid_api_key")
        # A page in this machine's browser can reach local servers, also under a host name of its own.
        elif not all(_is_local(request.headers[name]) for name in ("host", "origin") if name in request.headers):
            raise ApiError(
                403,
                "without a key only this machine's own programs are answered, at 127.0.0.1 or localhost",
                "permission_error",
            )

    def _key_of(self, request: Request) -> str:
        """Returns the key by which a request was admitted, "" on a server without one."""
        return next(filter(self._allows, _keys_in(request))) if self._allows else ""

    async def _health(self, request: Request) -> Response:
        if self._engine.failure:
            return JSONResponse({"status": self._engine.failure}, 503)
        load = {"active": self._engine.active, "waiting": self._engine.waiting}
        return JSONResponse({"status": "ok", **load, "reused_share": self._engine.counts["reused_share"]})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description()]})

    async def _a_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._description())

    def _description(self) -> dict[str, str | int]:
        return {"id": self._model or "policy", "object": "model", "created": self._began, "owned_by": "hgpo_jax"}

    def _check_model(self, name: str) -> None:
        if self._model and name != self._model:
            raise ApiError(404, f"model: {name[:100]!r} is not served here, {self._model!r} is", code="model_not_found")

    async def _body(self, request: Request) -> bytearray:
        """Reads a request's body. Raises ApiError, or ClientDisconnect."""
        body = bytearray()
        try:
            async with asyncio.timeout(GRACE):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self._body_limit:
                        raise ApiError(413, f"the body has more than {self._body_limit:,} bytes", code="body_too_large")
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {GRACE:g} seconds") from None
        return body

    async def _reward(self, request: Request) -> Response:
        if self._sessions is None:
            raise ApiError(404, "this server records no sessions; start it with --record FOLDER")
        posted = parse(RewardRequest, await self._body(request))
        session = self._sessions.find(self._key_of(request), request.path_params["name"])
        key, again = _repetition(request)
        try:
            async with session.in_line(self._time_limit, session.waits_for(posted)):
                if not session.has_been_given(posted, key, again):
                    session.post(posted, key)
                    if session.ended:
                        self._sessions.ended(session)
        except ApiError:
            if not session.has_been_given(posted, key, again):
                raise
        return JSONResponse(session.describe())

    async def _count_tokens(
        self, form: type[MessagesBody | ResponsesBody], about: dict[str, str], request: Request
    ) -> Response:
        """Counts the tokens of a prompt, which may be longer than this server reads."""
        counted = parse(form, await self._body(request)).request()
        self._check_model(counted.model or self._model)
        prompt = await asyncio.to_thread(self._prompt_of, counted.prompt, (), "", COUNTED * self._engine.prompt_limit)
        return JSONResponse(about | {"input_tokens": len(prompt.ids)})

    async def _endpoint(self, kind: type[Dialect], request: Request):
        """Returns the answer to a request in a dialect, as an ASGI application."""
        try:
            dialect = kind(await self._body(request))
        except ApiError as error:
            if error.status == 413 and isinstance(self._sessions, Sessions):  # longer than any prompt
                key = self._key_of(request)
                self._sessions.find(key, key).overflowed = True
            raise
        self._check_model(dialect.request.model)
        if dialect.request.n > self._engine.room:
            places = f"this server's {self._engine.room} places"
            raise ApiError(400, f"n: {dialect.request.n} answers are more than {places}", param="n")
        return functools.partial(self._answer, request, dialect)

    async def _answer(self, request: Request, dialect: Dialect, scope, receive, send) -> None:
        """Answers a request; what it holds is released however that ends."""
        sampling, place, session = dialect.request, Place(), None
        if self._sessions is not None:  # otherwise an application's own metadata may hold anything
            opens = isinstance(self._sessions, OpenSessions)
            place = place_of(request.headers, dialect.request.metadata, opens=opens)
            session = self._sessions.of(self._key_of(request), place)
        if session and sampling.n > 1:
            raise ApiError(400, f"n: {sampling.n} answers are no turn of a session; ask for one", param="n")
        name = place.branch_id or ""
        async with session.in_line(self._time_limit, name) if session else contextlib.nullcontext():
            prompt = await self._prompt(sampling, session, name)
            prompt = await asyncio.to_thread(self._constrained, dialect, prompt, session)
            turn = _turn(request, sampling, session, prompt, place) if session else None
            # Rejections come before a stream begins.
            with Exchange(
                self._engine, self._texts, sampling, prompt, self._usual, self._time_limit, session, turn
            ) as exchange:
                headers = self._headers(dialect, prompt, session)
                if sampling.stream:
                    events = self._events(dialect, exchange)
                    response: Response = StreamingResponse(events, headers=headers, media_type="text/event-stream")
                elif await _stays(receive, exchange):
                    response = JSONResponse(dialect.response(exchange), headers=headers)
                else:
                    return
                stays = not (sampling.stream or await request.is_disconnected())
                with contextlib.suppress(TimeoutError):  # a client that reads too slowly is dropped
                    async with asyncio.timeout(self._time_limit + GRACE):
                        await response(scope, receive, send)
                        if turn:
                            turn.delivered |= stays

    async def _events(self, dialect: Dialect, exchange: Exchange) -> AsyncIterator[str]:
        """Yields a streamed answer's events, and notes that the client has all of them."""
        async for event in dialect.events(exchange):
            yield event
        if exchange.turn:
            exchange.turn.delivered = True

    async def _prompt(self, sampling: SamplingRequest, session: Session | None, branch: str) -> ServedPrompt:
        """Encodes a prompt, in a session based on its earlier turns. Raises ApiError."""
        try:
            turns = list(session.turns) if session else []  # other branches may go on meanwhile
            if session and isinstance(sampling.prompt, Conversation) and sampling.prompt.pictures:
                session.refused = "messages: pictures are not recorded; send them outside a session"
                raise ApiError(400, session.refused, param="messages")
            return await asyncio.to_thread(self._encode, sampling.prompt, turns, branch)
        except ApiError as error:
            if session and isinstance(error, TooLong):
                session.check_turns()  # the length of a surplus turn does not matter
                session.overflowed = True
            raise

    def _encode(self, prompt: Conversation | str | list[int], turns: Sequence[Turn], branch: str) -> ServedPrompt:
        """Raises ApiError for a prompt that is none, or too long; the length of a text is checked first."""
        limit = self._engine.prompt_limit
        if (characters := sum(map(len, _texts_in(prompt)))) > limit * MAX_CHARACTERS_PER_TOKEN:
            raise TooLong(characters, limit * MAX_CHARACTERS_PER_TOKEN, "characters")
        served = self._prompt_of(prompt, turns, branch, limit)
        if not served.ids:
            raise ApiError(400, "the prompt is empty")
        if max(served.ids) >= self._engine.vocabulary:
            raise ApiError(400, f"prompt: {max(served.ids)} is no token id of this model", param="prompt")
        if len(served.ids) > limit:
            raise TooLong(len(served.ids), limit)
        return served

    def _prompt_of(self, prompt: Conversation | str | list[int], turns: Sequence[Turn], branch: str, most: int) -> ServedPrompt:
        """Builds a prompt of any length, with pictures of at most so many tokens.

        Raises ApiError for messages or tools that the chat template rejects.
        """
        if isinstance(prompt, Conversation):
            beginning = self._texts.call_beginning(prompt.tools, prompt.call)
            try:
                pictures = prepared(prompt.pictures, self._engine.vision, most)
                parent = parent_of(prompt, turns, branch)
                ids = prompt_ids(self._texts, prompt, beginning, turns if parent is None else path(turns, parent))
                ids = with_features(ids, pictures)
            except ValueError as error:
                raise ApiError(400, str(error), param="tools" if str(error).startswith("tools:") else "messages") from None
            parser = self._texts.parser(prompt.tools, beginning, prompt.thinking)
            opened = self._texts.opened_thought(prompt.thinking)
            return ServedPrompt(ids, beginning or opened, parser, parent, pictures=pictures)
        ids = self._texts.prompt(prompt) if isinstance(prompt, str) else prompt
        return ServedPrompt(ids, parent=parent_of(Conversation([]), turns, branch))

    def _constrained(self, dialect: Dialect, prompt: ServedPrompt, session: Session | None) -> ServedPrompt:
        """Returns a prompt with the constraints of its answers. Raises ApiError for a schema that cannot be enforced."""
        request, field = dialect.request, dialect.schema_field
        try:
            if isinstance(self._grammars, str):
                if request.schema is not None:
                    raise ValueError(f"{field}: {self._grammars}")
                return prompt
            if form := form_of(request, self._texts, field):
                constraints = [self._grammars.constraint(form) for _ in range(request.n)]
                return prompt._replace(constraints=constraints, is_json=form.json is not None)
        except ValueError as error:
            if session:
                session.refused = str(error)
                _log_once(field, f"refused: {error}")
            raise ApiError(400, str(error), param="tools" if str(error).startswith("tools:") else field) from None
        return prompt

    def _headers(self, dialect: Dialect, prompt: ServedPrompt, session: Session | None) -> dict[str, str]:
        """Returns an answer's headers, which tell what is ignored; new names are also logged."""
        sampling, most = dialect.request, self._engine.response_limit
        ignored = list(sampling.ignored)
        if sampling.limit is not None and sampling.limit > most:
            ignored.append(dialect.limit_field)
        if isinstance(sampling.prompt, Conversation) and sampling.prompt.thinking is not None and not self._texts.has_switch:
            ignored.append(dialect.thinking_field)
        if isinstance(sampling.prompt, Conversation) and sampling.prompt.strict and not prompt.constraints:
            ignored.append(dialect.strict_field)
        if session and session.decoding:
            ignored += sorted([*sampling.decoding, *(["seed"] if sampling.seed is not None else [])])
        for name in ignored:
            _log_once(name, f"no answer has more than {most:,}" if name == dialect.limit_field else "it is ignored")
        return {"Cache-Control": "no-cache"} | ({"X-Ignored": ", ".join(ignored)} if ignored else {})


@functools.lru_cache(100)  # for all servers of a process: a trainer starts one for every rollout
def _log_once(name: str, consequence: str) -> None:
    log.warning("a request's %s: %s", name, consequence)


def _turn(request: Request, sampling: SamplingRequest, session: Session, prompt: ServedPrompt, place: Place) -> Turn:
    """Returns the turn that a request becomes in its session, or that it repeats. Raises ApiError."""
    key, again = _repetition(request)
    name = place.branch_id or ""
    if turn := session.repeated(prompt.ids, name, key, again):
        return turn
    session.check_turns()
    conversation = sampling.prompt if isinstance(sampling.prompt, Conversation) else None
    state = place.state_key
    if state is None:
        state = conversation.state if conversation else str(sampling.prompt)
    return Turn(
        prompt.ids,
        state,
        beginning=prompt.beginning,
        key=key,
        messages=conversation.messages if conversation else [],
        parser=prompt.parser,
        parent=prompt.parent,
        name=name,
    )


async def _stays(receive, exchange: Exchange) -> bool:
    """Waits for all of an answer, or until the client leaves; returns whether it stayed."""

    async def whole_answer() -> None:
        async for _ in exchange.pieces():
            pass

    async def disconnection() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    answering, leaving = asyncio.ensure_future(whole_answer()), asyncio.ensure_future(disconnection())
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            answering.result()
        return answering.done()
    finally:
        answering.cancel()
        leaving.cancel()


def _texts_in(prompt: Conversation | str | list[int]) -> Iterator[str]:
    """Yields the texts of a prompt that are to be tokenized."""
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, Conversation):
        for content in (message["content"] for message in prompt.messages):
            yield from [content] if isinstance(content, str) else (part.get("text", "") for part in content)
        structures = (*prompt.tools, *(message["tool_calls"] for message in prompt.messages if "tool_calls" in message))
        yield from map(json.dumps, structures)


def _refusal(request: Request, error: ApiError) -> Response:
    path = request.url.path.removeprefix("/v1")
    kind = DIALECTS.get(path, Messages if path == COUNT_TOKENS else ChatCompletions)
    # The rest of the request is not read, so no other can follow it.
    headers = {"Connection": "close"} if error.status in (401, 403, 408, 413) else {}
    headers |= {"Retry-After": "1"} if error.status == 429 else {}
    return JSONResponse(kind.error(error), error.status, headers)


async def _respond_to_error(request: Request, error: Exception) -> Response:
    """Answers uncaught errors: our own rejections, unknown paths and methods, and defects, which are also logged."""
    if isinstance(error, ApiError):
        return _refusal(request, error)
    if isinstance(error, HTTPException):
        return _refusal(request, ApiError(error.status_code, error.detail))
    return _refusal(request, ApiError(500, "the server has failed", "server_error"))


def _is_local(header: str) -> bool:
    """Whether a Host or an Origin names this machine itself."""
    try:
        return is_loopback(urlsplit(header if "://" in header else f"//{header}").hostname or "")
    except ValueError:
        return False


def _keys_in(request: Request) -> list[str]:
    """Returns the API keys that a request sends; some clients send an empty or a made-up one beside the right one."""
    given = request.headers.get("authorization", "")
    scheme, _, token = given.partition(" ")
    return [
        token.strip() if scheme.lower() == "bearer" else given,
        *(request.headers.get(name, "") for name in ("x-api-key", "api-key")),
    ]


def _repetition(request: Request) -> tuple[str | None, bool]:
    """Returns a request's Idempotency-Key, and whether the client says that it sends the request again."""
    return request.headers.get("idempotency-key"), request.headers.get("x-stainless-retry-count", "0") != "0"


def _equal(one: str, other: str) -> bool:
    """Compares secrets in a time that does not depend on them."""
    return hmac.compare_digest(one.encode(), other.encode())
