"""Sessions: the requests of one episode of a program that plays with the policy, stored like a rollout's.

Each request is a turn, and the turns are a tree: one that extends an earlier turn's conversation continues that turn's branch,
another opens a branch. Requests that name the same branch, or none, are answered one after the other, in order of arrival. The
program posts rewards: to a turn or to a branch while it plays, and a last one at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import pydantic

from hgpo_jax.policy.answers import AnswerParser
from hgpo_jax.rollout.chat_prompts import ParsedResponse, Prompt
from hgpo_jax.rollout.episode_buffer import EpisodeBuffer
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.result import RolloutResult
from hgpo_jax.rollout.workers import MAX_REWARD, EnvFailure, EnvOutput
from hgpo_jax.sampling.continuous_batching import SlotResponse
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.serving.requests import ApiError, Body, parse

MAX_STATE = 10_000  # characters
State = Annotated[str, pydantic.AfterValidator(lambda text: _shortened(text))]
SILENT = 3600.0  # seconds after which a session may be dropped if there is no room for others


def _shortened(text: str) -> str:
    """Returns a state of at most MAX_STATE characters; of a longer one, its beginning and its digest."""
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return text if len(text) <= MAX_STATE else f"{text[: MAX_STATE - 100]}... (SHA-256 {digest})"


class RewardRequest(Body):
    """The body of POST /v1/sessions/NAME/reward.

    reward: added to that of the turn; if no turn is given, to that of the last turn, and the session ends.
    turn: its number, from 0; -1 is the last one so far.
    branch: the number or the name of a branch, whose last turn so far it is.
    admissible: whether the turn's answer was usable; if not, it is penalized (`advantage.invalid_penalty`).
    success, state: with the session's end: whether it succeeded, by default unknown; the final observation.
    """

    reward: float
    turn: int | None = None
    branch: int | str | None = None
    admissible: bool = True
    success: bool | None = None
    state: State = ""

    @pydantic.model_validator(mode="after")
    def _at_the_end_only(self):
        if self.turn is not None and self.branch is not None:
            raise ValueError("a reward goes to a turn or to a branch, not to both")
        if not self.ends and (self.success is not None or self.state):
            raise ValueError("success and state go with the session's end, without a turn or a branch")
        return self

    @property
    def ends(self) -> bool:
        """Whether the session ends with it."""
        return self.turn is None and self.branch is None


class Place(Body):
    """The place of a request: its session, that one's task, its branch, and the state for the step groups; all optional.

    They are given by headers (X-Session-Id, X-Task-Id, ...), by the request's metadata (session_id, ...), or by fields of the
    request.
    """

    session_id: str | None = pydantic.Field(None, pattern=r"^[\w.-]{1,100}$")
    task_id: str | None = pydantic.Field(None, max_length=MAX_STATE)
    branch_id: str | None = pydantic.Field(None, pattern=r"^[\w.-]{1,100}$")
    state_key: State | None = None


def place_of(headers: Mapping[str, str], metadata: Mapping, *, opens: bool) -> Place:
    """Returns the place of a request. opens: whether it says its session and task, which its key tells otherwise.

    Numbers in the metadata are read as texts. Raises ApiError.
    """
    names = [name for name in Place.model_fields if opens or name not in ("session_id", "task_id")]
    given = {name: str(value) if type(value) is int else value for name, value in metadata.items()}
    return parse(Place, {name: headers.get(f"x-{name.replace('_', '-')}") or given.get(name) for name in names})


@dataclasses.dataclass
class Turn:
    """A request and its answer.

    ids: those of the prompt. state: identifies the agent's state. tokens, logp: as sampled, up to a stop string. admissible:
      whether the program could use the answer.
    finished: whether the answer ended by itself or at a stop string, not at its limit.
    beginning: that of the answer, if it is part of the prompt. key: the request's Idempotency-Key. delivered: whether the whole
      answer has been sent to a client that was still connected.
    messages: those of the prompt; none if it is a text. parser: that of the answer.
    parent: the number of the turn that it continues or branches off from; None if it begins anew. name: the name of the branch
      in its request, "" without one. branch: its branch's number.
    """

    ids: list[int]
    state: str
    tokens: list[int] = dataclasses.field(default_factory=list)
    logp: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    finished: bool = False
    beginning: str = ""
    key: str | None = None
    delivered: bool = False
    reward: float = 0.0
    admissible: bool = True
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    parser: AnswerParser = dataclasses.field(default_factory=AnswerParser)
    parent: int | None = None
    name: str = ""
    branch: int = 0


@dataclasses.dataclass(eq=False)
class _Waiting:
    """A request from its arrival on. name: that of the only branch that it waits for; None: it waits for all."""

    name: str | None
    gone: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


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
      refused: why a request for what cannot be enforced was refused, "" if none was since the last turn.
      overflowed: whether its last request exceeded the longest prompt. lost: whether its program failed.
      sampling: the number of turns that are being sampled.
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
        self.sampling, self.refused = 0, ""
        self._success: bool | None = None
        self._in_line: list[_Waiting] = []  # in order of arrival
        self._moved_on: set[str] = set()  # names of branches with a new request since their last turn
        self._named: dict[str, int] = {}  # a branch's name -> its number
        self._last: list[int] = []  # the number of each branch's last turn
        self._given: dict[Any, tuple[RewardRequest, int]] = {}  # rewards by Idempotency-Key, and the last of each place
        self._described: dict | None = None  # of one whose turns have gone
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
        """Seconds since its last request, or since it was started; 0 while it waits for an answer.

        Requests that follow a refusal, or the end, do not count.
        """
        return 0.0 if self._in_line else time.monotonic() - self._heard

    def started(self) -> None:
        """Notes that its program has begun."""
        self._heard = time.monotonic()

    @property
    def branches(self) -> int:
        """The number of branches so far."""
        return len(self._last)

    @contextlib.asynccontextmanager
    async def in_line(self, seconds: float, name: str | None = None) -> AsyncIterator[None]:
        """Waits until earlier requests have been answered; later ones wait for this one. Raises ApiError.

        name: that of the request's branch, "" if it names none; requests of other names are not waited for. None: all are.
        """
        hopeless = self._hopeless
        before = [other for other in self._in_line if name is None or other.name in (None, name)]
        self._in_line.append(request := _Waiting(name))
        try:
            await self._wait(before, seconds)
            if self.ended:
                raise ApiError(400, f"session {self.name} has ended: its last reward has been posted")
            yield
        finally:
            # A program may ask again for ever; one whose request has succeeded begins anew.
            self._heard = self._heard if hopeless and self._hopeless else time.monotonic()
            self._in_line.remove(request)
            request.gone.set()

    @property
    def _hopeless(self) -> bool:
        return self.ended or self.spent or self.overflowed or bool(self.refused)

    async def _wait(self, requests: list[_Waiting], seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                for request in requests:
                    await request.gone.wait()
        except TimeoutError:
            message = f"session {self.name}: its earlier requests were not done within {seconds:g} seconds"
            raise ApiError(504, message, "server_error", code="timeout") from None

    def repeated(self, ids: list[int], name: str, key: str | None, again: bool) -> Turn | None:
        """Returns the turn of this name whose answer a request with this prompt asks for again; None if it is a new turn.

        A program may ask the same twice. So it is the same turn only if both requests have this Idempotency-Key, or, for the
        last one of this name, if its answer has not been delivered or the client says that it asks `again` and has made no new
        request since.
        """
        same = [turn for turn in self.turns if turn.name == name]
        if key and (keyed := [turn for turn in same if turn.key == key and turn.ids == ids]):
            return keyed[-1]
        moved_on = name in self._moved_on
        if same and same[-1].ids == ids and (not same[-1].delivered or (again and not moved_on)):
            return same[-1]
        if not again:
            self._moved_on.add(name)
        return None

    def waits_for(self, posted: RewardRequest) -> str | None:
        """Returns the name of the only branch that a reward waits for; None if it waits for all.

        An unknown number waits for all, too: its turn may be under way.
        """
        if isinstance(posted.branch, str):
            return posted.branch
        number = posted.turn
        if posted.branch is not None and 0 <= posted.branch < self.branches:
            number = self._last[posted.branch]
        return self.turns[number].name if number is not None and 0 <= number < len(self.turns) else None

    def check_turns(self) -> None:
        """Raises ApiError if the session already has its maximum number of turns."""
        if len(self.turns) + self.sampling >= self.max_turns:
            self.spent = True
            raise ApiError(400, f"session {self.name} has had its {self.max_turns} turns", code="no_turns_left")

    def sampling_number(self, name: str) -> int:
        """Returns the number that distinguishes the samples of the next turn of this name.

        It does not depend on turns of other names, which may be answered sooner or later.
        """
        place = sum(turn.name == name for turn in self.turns)
        return zlib.crc32(f"{name}/{place}".encode()) >> 1 if name else place  # an i32

    def add(self, turn: Turn) -> None:
        """Adds a turn that was sampled to its end, and decides its branch."""
        turn.branch = self._branch_of(turn)
        self._last[turn.branch : turn.branch + 1] = [len(self.turns)]
        self.turns.append(turn)
        self._moved_on.discard(turn.name)
        self.overflowed, self.refused = False, ""  # it went on in spite of a refusal

    def _branch_of(self, turn: Turn) -> int:
        """Returns the branch of a new turn: the one that it names, its parent's if that one has no later turn, or a new one."""
        if turn.name:
            return self._named.setdefault(turn.name, self.branches)
        branch = self.branches if turn.parent is None else self.turns[turn.parent].branch
        return branch if branch == self.branches or self._last[branch] == turn.parent else self.branches

    def has_been_given(self, posted: RewardRequest, key: str | None, again: bool) -> bool:
        """Whether a reward was accepted before: with this Idempotency-Key, or, if its client sends it `again`, as the last one
        of the turn or branch that it names.

        Clients repeat what they have no answer to, and a reward may wait for one for long. If that branch has had another turn
        since, it is a new reward, whose first sending was lost.
        """
        if key:
            return self._given.get(key, (None,))[0] == posted
        return again and self._given.get((posted.turn, posted.branch)) == (posted, self._turns_before(posted))

    def _turns_before(self, posted: RewardRequest) -> int:
        """Returns the number of turns among which a reward's is the last; 0 if it names its turn."""
        if posted.turn is not None and posted.turn >= 0:
            return 0
        if isinstance(posted.branch, int):
            return sum(turn.branch == posted.branch for turn in self.turns)
        return sum(posted.branch in (None, turn.name) for turn in self.turns)

    def post(self, posted: RewardRequest, key: str | None = None) -> None:
        """Accepts a reward, with its Idempotency-Key. Raises ApiError."""
        before = self._turns_before(posted)
        self._accept(posted)
        self._given |= dict.fromkeys([(posted.turn, posted.branch), *([key] if key else [])], (posted, before))

    def _accept(self, posted: RewardRequest) -> None:
        count = len(self.turns)
        if not count and posted.ends:
            self.ended = True  # without anything to learn from
            return
        number = self._last_of(posted.branch) if posted.turn is None else posted.turn
        if not -count <= number < count:
            raise ApiError(400, f"turn: session {self.name} has {count} turns, counted from 0", param="turn")
        turn = self.turns[number]
        if not max(abs(turn.reward + posted.reward), abs(self.reward + posted.reward)) <= MAX_REWARD:
            raise ApiError(400, f"reward: {posted.reward} is too large", param="reward")
        turn.reward += posted.reward
        turn.admissible &= posted.admissible
        if posted.ends:
            self.ended, self._success, self.state = True, posted.success, posted.state

    def _last_of(self, branch: int | str | None) -> int:
        """Returns the number of a branch's last turn; for None the session's. Raises ApiError."""
        if branch is None:
            return len(self.turns) - 1
        number = self._named.get(branch, -1) if isinstance(branch, str) else branch
        if not 0 <= number < self.branches:
            raise ApiError(400, f"branch: session {self.name} has no branch {branch!r:.100}", param="branch")
        return self._last[number]

    def describe(self) -> dict:
        """Describes the session for clients."""
        if self._described:
            return self._described
        counts = {"turns": len(self.turns), "branches": self.branches}
        return {"id": self.name, "object": "session", **counts, "reward": self.reward, "ended": self.ended}

    def without_turns(self) -> Session:
        """Returns what remains of an ended session: it describes itself as before, and accepts nothing more."""
        rest = Session(self.name, self.max_turns)
        rest.ended, rest._described = True, self.describe()
        rest._given = {key: (posted, 0) for key, (posted, _) in self._given.items()}
        return rest


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
      most: maximum number of open sessions; beyond it, those that have been silent for an hour make room. As many ended
        ones are remembered, so that their names are refused: a last request may come after the last reward.
      done: called with each session that ends.

    Attributes:
      abandoned: the number of sessions with turns that have made room.
    """

    def __init__(self, max_turns: int, most: int, done: Callable[[Session], None]):
        self._max_turns, self._most, self._done = max_turns, most, done
        self._by_name: dict[str, Session] = {}
        self._past: dict[str, Session] = {}
        self.abandoned = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def of(self, key: str, place: Place) -> Session | None:
        name = place.session_id
        if name is None:
            return None
        if name in self._past:
            return self._past[name]
        if name not in self._by_name and len(self._by_name) >= self._most:
            self._forget_silent()
        if name not in self._by_name and len(self._by_name) >= self._most:
            raise ApiError(429, f"{self._most} sessions have not ended; post their rewards", "rate_limit_error")
        session = self._by_name.setdefault(name, Session(name, self._max_turns))
        # A request that names no task leaves that of another one which is being answered.
        if not session.turns and (place.task_id is not None or session.silent):
            session.task = place.task_id
        return session

    def find(self, key: str, name: str) -> Session:
        if name not in self._by_name and name not in self._past:
            raise ApiError(404, f"there is no session {name[:100]!r}")
        return self._past.get(name) or self._by_name[name]

    def _forget_silent(self) -> None:
        """Drops sessions with nothing to keep, and those that seem to be abandoned."""
        for name, session in list(self._by_name.items()):
            if session.silent > (SILENT if session.turns else 0):
                self.abandoned += bool(session.turns)
                del self._by_name[name]

    def ended(self, session: Session) -> None:
        """Drops a session whose last reward has arrived, and remembers its name."""
        self._past[session.name] = session.without_turns()
        if len(self._past) > self._most:
            del self._past[next(iter(self._past))]  # the first one
        self._done(self._by_name.pop(session.name))


def episodes_of(
    sessions: Sequence[Session],
    goals: Sequence[str],
    groups,
    empty: Episodes,
    failures: Mapping[int, str],
    counts: dict[str, float],
) -> RolloutResult:
    """Builds a rollout's result from sessions.

    Args:
      goals: one for each session.
      groups: i32[B], prompt groups.
      empty: `Episodes.zeros` with room for them, written in place.
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
            buffer.add_response(Prompt(turn.ids), response, answer, turn.finished)
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
    kept = [[] if number in failures else session.turns for number, session in enumerate(sessions)]
    branches = [[turn.branch for turn in turns] for turns in kept]
    counts["branches"] = sum(len(set(of_turns)) for of_turns in branches) / max(sum(map(bool, branches)), 1)
    episodes, report = buffer.result(counts)
    assert report is not None
    parents = [[turn.parent for turn in turns] for turns in kept]
    return RolloutResult(episodes, dataclasses.replace(report, branches=branches, parents=parents))
