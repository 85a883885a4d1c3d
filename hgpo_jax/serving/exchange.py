"""A request and its answer, during sampling or repeated."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from hgpo_jax.policy.answers import AnswerParser, Call, TextStream, split_thought
from hgpo_jax.policy.call_formats import THINK, THINK_END
from hgpo_jax.policy.pictures import PromptPictures
from hgpo_jax.sampling.constraint import Constraint
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.serving.engine import Busy, Engine, Generation, Progress
from hgpo_jax.serving.requests import ApiError, Conversation, SamplingRequest
from hgpo_jax.serving.sessions import Session, Turn
from hgpo_jax.serving.text import ServedText


class ServedPrompt(NamedTuple):
    """A prompt's ids.

    beginning: the beginning of the answer that stands at their end, that of a call or of a thought. parser: that of the
    answers. parent: `Turn.parent`. constraints: what each answer must be; none: anything. is_json: whether the answers are
    JSON, so that clients see no thought before it. pictures: those of the prompt.
    """

    ids: list[int]
    beginning: str = ""
    parser: AnswerParser = AnswerParser()
    parent: int | None = None
    constraints: Sequence[Constraint | None] = ()
    is_json: bool = False
    pictures: PromptPictures | None = None


@dataclasses.dataclass
class Piece:
    """A part of a response, or all parts so far.

    text: what the client sees, up to the calls. stopped: the stop string that has ended the response, if one has.
    """

    index: int
    text: str = ""
    calls: list[Call] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    logp: list[float] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None  # stop or length, once the response has ended
    stopped: str = ""


class _Response:
    """A response during sampling. whole: all its pieces. text: what was sampled, up to a stop string."""

    def __init__(self, index: int, prompt: ServedPrompt, stream: TextStream, parallel_calls: bool):
        self.whole, self.text, self.stream = Piece(index), "", stream
        self._prompt, self._calls = prompt, None if parallel_calls else 1  # the number of calls that are told

    def push(self, progress: Progress, end_tokens: tuple[int, ...]) -> Piece:
        """Returns what a report adds; the texts of all pieces add up to the parsed answer's."""
        more, count = self.stream.push(progress.tokens, last=progress.ended)
        piece = Piece(self.whole.index, tokens=progress.tokens[:count], logp=progress.logp[:count])
        self.text += more
        text, parser = self._prompt.beginning + self.text, self._prompt.parser
        content = self._shown(text[: parser.settled(text)])
        if self.stream.stopped or progress.ended:
            stopped = self.stream.stopped or (piece.tokens and piece.tokens[-1] in end_tokens)
            piece.finish_reason = "stop" if stopped else "length"
            answer = parser.parse(text, complete=bool(stopped))
            content, piece.calls = self._shown(answer.content), list(answer.calls[: self._calls])
            self.whole.stopped = piece.stopped = self.stream.stopped
        piece.text = content[len(self.whole.text) :]
        self.whole.text += piece.text
        self.whole.tokens += piece.tokens
        self.whole.logp += piece.logp
        self.whole.calls, self.whole.finish_reason = piece.calls, piece.finish_reason
        return piece

    def _shown(self, content: str) -> str:
        """Returns what clients see of an answer's content, or of its beginning."""
        if not self._prompt.is_json or not (content.startswith(THINK) or THINK.startswith(content)):
            return content
        return content.partition(THINK_END)[2].lstrip()


class Exchange:
    """A request's responses as they arrive; a context manager, so that abandoned ones are cancelled.

    Args:
      usual: the decoding for fields that are not in the request.
      seconds: timeout until the last token.
      session: the one that the request belongs to; it has a single response.
      turn: the turn that the request becomes in its session once all of it is sampled, or the one that it repeats.

    Attributes:
      prompt: the token ids. choices: the responses so far.

    Raises ApiError if there is no room.
    """

    def __init__(
        self,
        engine: Engine,
        texts: ServedText,
        request: SamplingRequest,
        prompt: ServedPrompt,
        usual: Decoding,
        seconds: float,
        session: Session | None = None,
        turn: Turn | None = None,
    ):
        self.prompt, self.texts, self.turn, self._request = prompt.ids, texts, turn, request
        self._engine, self._seconds, self._session = engine, seconds, session
        self._news: asyncio.Queue[tuple[int, Progress]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        seed: int | np.ndarray = secrets.randbits(32) if request.seed is None else request.seed % 2**32
        decoding, first = usual.replace(**request.decoding), 0
        if session:
            assert turn
            decoding, first = session.decoding or decoding, session.sampling_number(turn.name)
            seed = seed if session.seed is None else session.seed
        limit = min(request.limit or engine.response_limit, engine.response_limit)
        self._responses = [
            _Response(index, prompt, TextStream(texts.decode, request.stop), request.parallel_calls)
            for index in range(request.n)
        ]
        constraints = prompt.constraints or [None] * request.n
        self._generations = [
            Generation(
                prompt.ids,
                limit,
                decoding,
                seed,
                first + index,
                functools.partial(self._tell, index),
                constraint,
                prompt.pictures,
            )
            for index, constraint in enumerate(constraints)
        ]

    def _tell(self, index: int, progress: Progress) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and no one waits
            self._loop.call_soon_threadsafe(self._news.put_nowait, (index, progress))

    @property
    def choices(self) -> list[Piece]:
        return [response.whole for response in self._responses]

    def warning(self, index: int) -> str:
        """Returns what a whole response without calls does not do that was asked for; "" if it does all."""
        prompt = self._request.prompt
        if isinstance(prompt, Conversation) and prompt.call is not None:
            return "tool_choice: the answer is no call that can be read"
        if self._request.json_object and not _is_object(split_thought(self.choices[index].text)[1]):
            return "the answer is no JSON object"
        return ""

    def __enter__(self) -> Exchange:
        if self.turn and self.turn.tokens:  # a repeated one
            self._news.put_nowait((0, Progress(self.turn.tokens, self.turn.logp, True)))
            self._session = None
            return self
        try:
            self._engine.submit(self._generations)
        except RuntimeError as error:
            raise ApiError(503, str(error), "server_error") from None
        except Busy:
            message = "every slot is taken and as many requests wait as may; try again"
            raise ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded") from None
        if self._session:
            self._session.sampling += 1
        return self

    def __exit__(self, *_) -> None:
        if self._session:
            self._session.sampling -= 1
        self._cancel(range(len(self._responses)))

    def _cancel(self, indices: Iterable[int]) -> None:
        left = [self._generations[index] for index in indices if self.choices[index].finish_reason is None]
        if left:
            self._engine.cancel(left)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields pieces until all choices have ended. Raises ApiError."""
        until = time.monotonic() + self._seconds
        while any(choice.finish_reason is None for choice in self.choices):
            try:
                index, progress = await asyncio.wait_for(self._news.get(), until - time.monotonic())
            except TimeoutError:
                raise ApiError(504, f"not done within {self._seconds:g} seconds", "server_error", code="timeout") from None
            if progress.error:
                raise ApiError(503, progress.error, "server_error")
            response = self._responses[index]
            if response.whole.finish_reason is not None:
                continue  # reported before the engine knew of the stop string
            piece = response.push(progress, self._engine.end_tokens)
            if piece.finish_reason and not progress.ended:
                self._engine.cancel([self._generations[index]])
            if piece.finish_reason and self._session and self.turn:
                self.turn.tokens, self.turn.logp = response.whole.tokens, response.whole.logp
                self.turn.text, self.turn.finished = response.text, piece.finish_reason == "stop"
                self._session.add(self.turn)
                self._session.sampling -= 1
                self._session = None
            yield piece


def _is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
