"""A request and its answer, during sampling or repeated."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.serving.answers import Choice, Piece
from hgpo_jax.serving.engine import Busy, Engine, Generation, Progress
from hgpo_jax.serving.requests import ApiError, Sampling
from hgpo_jax.serving.sessions import Session, Turn
from hgpo_jax.serving.text import ServedText, TextStream


class NextTurn(NamedTuple):
    """The turn that a request will become in its session. state, begun, key: as in `Turn`."""

    session: Session
    state: str
    begun: str
    key: str | None


class Exchange:
    """A request's responses as they arrive; a context manager, so that abandoned ones are cancelled.

    prompts: choice number p * n + i is the i-th of n to prompt p. limit: tokens of the longest response. turn: a session's, for
    one prompt and one response; it joins the session once all of it is sampled. usual: the decoding for fields not in the
    request. seconds: timeout until the last token.

    Raises ApiError if there is no room.
    """

    def __init__(
        self,
        engine: Engine,
        texts: ServedText,
        asked: Sampling,
        prompts: Sequence[list[int]],
        limit: int,
        turn: NextTurn | None,
        usual: Decoding,
        *,
        seconds: float,
    ):
        self._engine, self._next, self._seconds = engine, turn, seconds
        self.turn: Turn | None = None  # once it has joined the session
        self.choices = [Choice(TextStream(texts.decode, asked.stops)) for _ in range(len(prompts) * asked.n)]
        self._news: asyncio.Queue[tuple[int, Progress]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(index: int):
            def told(progress: Progress) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended, and no one waits
                    loop.call_soon_threadsafe(self._news.put_nowait, (index, progress))

            return told

        wanted = {name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(asked, name)) is not None}
        if wanted.get("top_k") == -1:
            wanted["top_k"] = 0
        decoding, given, first = usual.replace(**wanted), None, 0
        if turn:
            decoding, given, first = turn.session.decoding or decoding, turn.session.seed, len(turn.session.turns)
        self._generations: list[Generation] = []
        for ids in prompts:
            seed: int | np.ndarray = secrets.randbits(32) if asked.seed is None else asked.seed % 2**32
            seed = seed if given is None else given
            for number in range(first, first + asked.n):
                told = tell(len(self._generations))
                self._generations.append(Generation(ids, limit, decoding, seed, number, told))

    def __enter__(self) -> Exchange:
        try:
            self._engine.submit(self._generations)
        except RuntimeError as error:
            raise ApiError(503, str(error), "server_error") from None
        except Busy:
            raise ApiError(
                429,
                "every slot is taken and as many requests wait as may; try again",
                "rate_limit_error",
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            ) from None
        return self

    def __exit__(self, *_) -> None:
        self._cancel(range(len(self.choices)))

    def _cancel(self, indices: Iterable[int]) -> None:
        left = [self._generations[i] for i in indices if self.choices[i].finish_reason is None]
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
            choice = self.choices[index]
            if progress.error:
                raise ApiError(503, progress.error, "server_error")
            if choice.finish_reason is not None:
                continue  # reported before the engine knew of the stop string
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
            if choice.finish_reason and self._next:
                self._be_a_turn(choice, self._next)
            yield Piece(index, text, choice.text, tokens, logp, choice.finish_reason)

    def _be_a_turn(self, choice: Choice, turn: NextTurn) -> None:
        assert choice.finish_reason
        self.turn = Turn(
            list(self._generations[0].ids),
            turn.state,
            choice.tokens,
            choice.logp,
            choice.text,
            choice.finish_reason,
            turn.begun,
            turn.key,
        )
        turn.session.add(self.turn)


class Replay:
    """The repeated answer of a turn, in place of an Exchange."""

    def __init__(self, turn: Turn, texts: ServedText):
        self.turn = turn
        self.choices = [Choice(TextStream(texts.decode, []), turn.text, turn.tokens, turn.logp, turn.finish_reason)]

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_) -> None:
        """Does nothing, because nothing is sampled."""

    async def pieces(self) -> AsyncIterator[Piece]:
        turn = self.turn
        yield Piece(0, turn.text, turn.text, turn.tokens, turn.logp, turn.finish_reason)
