"""Sessions: the requests of one episode of a program that plays with the policy, stored like a rollout's.

A session's requests are answered one after the other, in order of arrival; each is a turn. The program posts rewards: with a
turn's number while it plays, without one at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import numpy as np
import pydantic

from hgpo_jax.rollout.chat_prompts import ParsedResponse, Prompt
from hgpo_jax.rollout.episode_buffer import EpisodeBuffer
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.result import RolloutResult
from hgpo_jax.rollout.workers import MAX_REWARD, EnvFailure, EnvOutput
from hgpo_jax.sampling.continuous_batching import SlotResponse
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.serving.requests import ApiError, Body, parse

MAX_STATE = 10_000  # characters
SILENT = 3600.0  # seconds after which a session may be dropped if there is no room for others


class RewardRequest(Body):
    """The body of POST /v1/sessions/NAME/reward.

    reward: added to that of the turn; if no turn is given, to that of the last turn, and the session ends.
    turn: its number, from 0; -1 is the last one so far.
    admissible: whether the turn's answer was usable; if not, it is penalized (`advantage.invalid_penalty`).
    success, state: with the session's end: whether it succeeded, by default unknown; the final observation.
    """

    reward: float
    turn: int | None = None
    admissible: bool = True
    success: bool | None = None
    state: str = pydantic.Field("", max_length=MAX_STATE)

    @pydantic.model_validator(mode="after")
    def _at_the_end_only(self):
        if self.turn is not None and (self.success is not None or self.state):
            raise ValueError("success and state go with the session's end, without a turn")
        return self


class Place(Body):
    """The place of a request: its session, that one's task, and the state for the step groups; each may be left out.

    They are given by headers (X-Session-Id, X-Task-Id, X-State-Key) or by the request's metadata (session_id, ...).
    """

    session_id: str | None = pydantic.Field(None, pattern=r"^[\w.-]{1,100}$")
    task_id: str | None = pydantic.Field(None, max_length=MAX_STATE)
    state_key: str | None = pydantic.Field(None, max_length=MAX_STATE)


def place_of(headers: Mapping[str, str], metadata: Mapping) -> Place:
    """Returns the place of a request. Raises ApiError."""
    names = Place.model_fields
    return parse(Place, {name: headers.get(f"x-{name.replace('_', '-')}") or metadata.get(name) for name in names})


@dataclasses.dataclass
class Turn:
    """A request and its answer.

    ids: those of the prompt. state: identifies the agent's state. tokens, logp: as sampled, up to a stop string. admissible:
      whether the program could use the answer.
    beginning: that of the answer, if it is part of the prompt. key: the request's Idempotency-Key. delivered: whether the whole
      answer has been sent to a client that was still connected.
    """

    ids: list[int]
    state: str
    tokens: list[int] = dataclasses.field(default_factory=list)
    logp: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    beginning: str = ""
    key: str | None = None
    delivered: bool = False
    reward: float = 0.0
    admissible: bool = True


class Session:
    """One episode.

    Args:
      name: the name that clients use.
      max_turns: T; a further request is rejected, and the episode counts as it is then.
      task: the task, by which it is compared with others; None: the first prompt decides.
      decoding, seed: the sampling of all its turns (`engine.Generation`), whatever is requested; None: as each request asks.

    Attributes:
      success: the value posted at its end, None if there was none; False before, and for a lost session.
      state: the program's state after its last turn, if it reported one.
      ended: whether its last reward has been posted. spent: whether it has asked for more than its maximum turns.
      overflowed: whether its last request exceeded the longest prompt. lost: whether its program failed.
    """

    def __init__(
        self,
        name: str,
        max_turns: int,
        decoding: Decoding | None = None,
        seed: np.ndarray | None = None,
        task: str | None = None,
    ):
        self.name, self.task, self.decoding, self.seed, self.max_turns = name, task, decoding, seed, max_turns
        self.turns: list[Turn] = []
        self.state, self.ended, self.spent, self.overflowed, self.lost = "", False, False, False, False
        self._success: bool | None = None
        self._line, self._in_line = asyncio.Lock(), 0  # requests, one of which is being answered
        self._moved_on = False  # whether there has been a new request since the last turn
        self._heard = time.monotonic()

    @property
    def reward(self) -> float:
        """The sum of the rewards so far."""
        return sum(turn.reward for turn in self.turns)

    @property
    def success(self) -> bool | None:
        return False if self.lost or not self.ended else self._success

    @property
    def silent(self) -> float:
        """Seconds since its last turn, or since it was started; 0 while it waits for an answer."""
        return 0.0 if self._in_line else time.monotonic() - self._heard

    def started(self) -> None:
        """Notes that its program has begun."""
        self._heard = time.monotonic()

    @contextlib.asynccontextmanager
    async def in_line(self, seconds: float) -> AsyncIterator[None]:
        """Waits until earlier requests have been answered; later ones wait for this one. Raises ApiError."""
        self._in_line += 1
        try:
            async with asyncio.timeout(seconds) as limit, self._line:
                limit.reschedule(None)
                if self.ended:
                    raise ApiError(400, f"session {self.name} has ended: its last reward has been posted")
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            message = f"session {self.name}: its earlier requests were not done within {seconds:g} seconds"
            raise ApiError(504, message, "server_error", code="timeout") from None
        finally:
            self._in_line -= 1

    def repeated(self, ids: list[int], key: str | None, again: bool) -> Turn | None:
        """Returns the last turn if a request with this prompt asks for its answer again; None if it is a new turn.

        A program may ask the same twice. So it is the same turn only if the answer has not been delivered, if both requests
        have this Idempotency-Key, or if the client says that it asks `again` and has made no new request since.
        """
        last = self.turns[-1] if self.turns else None
        if last and last.ids == ids and (not last.delivered or (key and key == last.key) or (again and not self._moved_on)):
            return last
        self._moved_on |= not again
        return None

    def check_turns(self) -> None:
        """Raises ApiError if the session already has its maximum number of turns."""
        if len(self.turns) >= self.max_turns:
            self.spent = True
            raise ApiError(400, f"session {self.name} has had its {self.max_turns} turns", code="no_turns_left")

    def add(self, turn: Turn) -> None:
        """Adds a turn that was sampled to its end."""
        self.turns.append(turn)
        self._moved_on, self.overflowed, self._heard = False, False, time.monotonic()

    def post(self, posted: RewardRequest) -> None:
        """Accepts a reward. Raises ApiError."""
        count = len(self.turns)
        if not count and posted.turn is None:
            self.ended = True  # without anything to learn from
            return
        number = count - 1 if posted.turn is None else posted.turn
        if not -count <= number < count:
            raise ApiError(400, f"turn: session {self.name} has {count} turns, counted from 0", param="turn")
        turn = self.turns[number]
        if not max(abs(turn.reward + posted.reward), abs(self.reward + posted.reward)) <= MAX_REWARD:
            raise ApiError(400, f"reward: {posted.reward} is too large", param="reward")
        turn.reward += posted.reward
        turn.admissible &= posted.admissible
        if posted.turn is None:
            self.ended, self._success, self.state = True, posted.success, posted.state

    def describe(self) -> dict:
        """Describes the session for clients."""
        return {"id": self.name, "object": "session", "turns": len(self.turns), "reward": self.reward, "ended": self.ended}


class Sessions:
    """The sessions of a server, each identified by its API key: its name is secret."""

    def __init__(self, sessions: Sequence[Session]):
        self._by_name = {session.name: session for session in sessions}

    def allows(self, key: str) -> bool:
        """Whether a request with this API key is answered."""
        return key in self._by_name

    def of(self, key: str, place: Place) -> Session | None:
        """Returns the session of a request. Raises ApiError."""
        return self._by_name[key]

    def find(self, key: str, name: str) -> Session:
        """Returns the session that a reward is posted to. Raises ApiError."""
        if name != key:
            raise ApiError(404, "there is no such session")
        return self._by_name[name]

    def ended(self, session: Session) -> None:
        """Does nothing: the rollout collects all of them."""


class OpenSessions:
    """Sessions that requests name, which begin with their first turn. It may also name their task.

    Args:
      max_turns: maximum turns of a session.
      most: maximum number of open sessions; beyond it, those that have been silent for an hour make room.
      done: called with each session that ends.
    """

    def __init__(self, max_turns: int, most: int, done: Callable[[Session], None]):
        self._max_turns, self._most, self._done = max_turns, most, done
        self._by_name: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def of(self, key: str, place: Place) -> Session | None:
        name = place.session_id
        if name is None:
            return None
        if name not in self._by_name and len(self._by_name) >= self._most:
            self._forget_silent()
        if name not in self._by_name and len(self._by_name) >= self._most:
            raise ApiError(429, f"{self._most} sessions have not ended; post their rewards", "rate_limit_error")
        session = self._by_name.setdefault(name, Session(name, self._max_turns))
        if not session.turns:
            session.task = place.task_id
        return session

    def find(self, key: str, name: str) -> Session:
        if name not in self._by_name:
            raise ApiError(404, f"there is no session {name[:100]!r}, or it has ended")
        return self._by_name[name]

    def _forget_silent(self) -> None:
        """Drops sessions with nothing to keep, and those that seem to be abandoned."""
        for name, session in list(self._by_name.items()):
            if session.silent > (SILENT if session.turns else 0):
                del self._by_name[name]

    def ended(self, session: Session) -> None:
        """Drops a session whose last reward has arrived."""
        self._done(self._by_name.pop(session.name))


def episodes_of(
    sessions: Sequence[Session],
    goals: Sequence[str],
    groups,
    empty: Episodes,
    end_tokens: tuple[int, ...],
    failures: Mapping[int, str],
    counts: dict[str, float],
) -> RolloutResult:
    """Builds a rollout's result from sessions.

    Args:
      goals: one for each session.
      groups: i32[B], prompt groups.
      empty: `Episodes.zeros` with room for them, written in place.
      end_tokens: a response that does not end with one of them is unfinished.
      failures: the numbers of omitted sessions -> why.
      counts: further counts for the report.
    """
    buffer = EpisodeBuffer(empty, groups, history_length=0, strict=True)
    for number, (session, goal) in enumerate(zip(sessions, goals, strict=True)):
        if number in failures:
            buffer.add_output(number, EnvFailure(failures[number]))
            continue
        states = [*(turn.state for turn in session.turns), session.state]
        buffer.add_output(number, EnvOutput(states[0], [], goal, 0))
        for turn, after in zip(session.turns, states[1:], strict=True):
            response = SlotResponse(number, np.array(turn.tokens, np.int32), np.array(turn.logp, np.float32))
            text = turn.beginning + turn.text
            answer = ParsedResponse(text, text, True)
            buffer.add_response(Prompt(turn.ids), response, answer, turn.tokens[-1] in end_tokens)
            last = turn is session.turns[-1]
            buffer.add_output(
                number,
                EnvOutput(
                    after,
                    [],
                    goal,
                    0,
                    turn.reward,
                    done=last,
                    won=session.success if last else False,
                    admissible=turn.admissible,
                    score=session.reward,
                    truncated=last and session.spent and not session.ended,
                ),
            )
    return buffer.result(counts)
