"""Sampling of responses to prompts from other threads: one thread alone uses the devices, and drives a SlotSampler."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from hgpo_jax.policy import Policy
from hgpo_jax.policy.pictures import PromptPictures
from hgpo_jax.sampling.constraint import Constraint, words_of
from hgpo_jax.sampling.continuous_batching import SlotSampler
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.sampling.slot_plan import SlotRequest
from hgpo_jax.sampling.slot_programs import SlotPrograms
from hgpo_jax.utils.errors import RunError

log = logging.getLogger(__name__)

# Tokens per step: streams come in pieces of this many, and a new prompt waits for no more than these.
STEPS = 8
# Freed slots wait this long for further requests: a share of the step's time, but at most MAX_GATHER seconds. A program that
# has its answer often asks again at once; if the next step has begun by then, it waits while its slot is idle.
GATHER, MAX_GATHER = 0.1, 0.05


class _Anything(Constraint):
    """A constraint that allows everything, with which programs for constraints are compiled."""

    failure = ""

    def __init__(self, words: int):
        self._set = np.zeros(words, np.uint32)

    def next_set(self, sampled: Sequence[int]) -> np.ndarray:
        return self._set


class Progress(NamedTuple):
    """The part of a response sampled since the last report."""

    tokens: list[int]
    logp: list[float]
    ended: bool
    error: str = ""  # a one-line reason why the response cannot continue


@dataclasses.dataclass(eq=False)
class Generation:
    """A requested response.

    ids: token ids of the prompt, at least one and at most the engine's prompt_limit.
    limit: tokens of the longest response, at least one and at most the engine's response_limit.
    seed, number: the same two with the same prompt, decoding and weights give the same response; the number distinguishes
      several responses to one prompt, or the turns of an episode. seed: a number below 2**32, or a random key's data, u32[2].
    constraint: what the response may be, for an engine that constrains; None: anything.
    pictures: those of the prompt, each with as many image tokens as features in the ids; None: there are none.
    tell: called in the engine's thread after every step that sampled something, the last time with `ended`.
    """

    ids: Sequence[int]
    limit: int
    decoding: Decoding
    seed: int | np.ndarray
    number: int
    tell: Callable[[Progress], None]
    constraint: Constraint | None = None
    pictures: PromptPictures | None = None
    reported_tokens: int = 0


class Busy(Exception):
    """Raised if the maximum number of requests is waiting."""


def _key_data(seed: int | np.ndarray) -> np.ndarray:
    return np.asarray(jax.random.key_data(jax.random.key(np.uint32(seed)))) if isinstance(seed, int) else seed


@jax.jit
def _as_keys(data) -> jax.Array:
    """Makes random keys [N] from their data u32[N, 2]."""
    return jax.random.wrap_key_data(data)


class Engine:
    """A sampling thread; a context manager that ends the thread and notifies everything that waits.

    Args:
      policy: its parameters are on the mesh's devices.
      slots: responses at a time, rounded up to a multiple of the mesh's parts.
      prompt_limit, response_limit: tokens.
      waiting_limit: maximum responses that wait for a slot.
      constrains: whether generations may have constraints.
      store: bytes to keep what ended responses have read when others take their slots.
      programs: compiled programs of the policy's network with this response_limit, to be reused.

    Attributes:
      failed: called in the engine's thread if it fails; nothing is sampled after that.
      vocabulary: upper bound of token ids.
      vision: how pictures are prepared; None: the policy sees none.
      end_tokens: the tokens that end a response.
      failure: the message for clients once the thread has failed; "" until then. The log says why.
    """

    def __init__(
        self,
        policy: Policy,
        mesh: Mesh,
        *,
        slots: int,
        prompt_limit: int,
        response_limit: int,
        waiting_limit: int,
        constrains: bool = False,
        store: int = 0,
        programs: SlotPrograms | None = None,
    ):
        self.prompt_limit, self.response_limit, self._waiting_limit = prompt_limit, response_limit, waiting_limit
        self.vocabulary, self.vision = policy.config.vocab_size, policy.config.vision
        self.failure = ""
        self.failed: Callable[[], None] = lambda: None
        self._mesh = mesh
        programs = programs or SlotPrograms(policy.graphdef, mesh, max_new=response_limit, end_tokens=policy.end_tokens)
        self.end_tokens = programs.end_tokens
        with jax.set_mesh(mesh):
            seats = -(-slots // programs.shards) * programs.shards
            self._keys = np.tile(_key_data(0), (seats, 1))
            keys = _as_keys(self._keys.copy())
            self._words = words_of(self.vocabulary) if constrains else 0
            limits = {"slots": slots, "prompt_limit": prompt_limit, "store": store}
            self._sampler = SlotSampler(programs, policy.params, keys, None, words=self._words, reuse=True, **limits)
        self._change = threading.Condition()  # guards the fields below
        self._waiting: deque[Generation] = deque()
        self._cancelled: set[Generation] = set()
        self._closing = False
        self._seated: dict[int, Generation] = {}  # seat, the sampler's episode -> generation; the engine's thread only
        self._freed, self._gather_until = 0, 0.0  # slots that the last step freed; when to stop waiting for requests
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.close()
        self._thread.join()
        del self._sampler  # its caches at once: the web application is in a cycle of references, which is collected much later

    def close(self) -> None:
        """Ends the thread soon and notifies pending requests. May be called by a signal's handler."""
        with self._change:
            self._closing = True
            self._change.notify()

    def shapes(self) -> list[tuple[int, int, int, int]]:
        """Lists (tokens of a prompt, prompts, responses to each, tokens of a continuation) for `warm_up`: all that are compiled
        separately."""
        # The longest prompts come first, so that the caches have room for all and never grow.
        counts = [(prompts, 1) for prompts in self._sampler.prompt_counts] + [(1, 2)][: self.slots - 1]
        whole = [(length, *count, 0) for length in self._sampler.shapes.prompts[::-1] for count in counts]
        return whole + [(self.prompt_limit, 1, 1, rest) for rest in self._sampler.shapes.pieces if rest < self.prompt_limit]

    def warm_up(self, length: int, prompts: int, responses: int, rest: int) -> None:
        """Compiles the programs for such requests, so that no client waits for it later. Raises RunError if that fails.

        rest: tokens of which an earlier request has only those before them; 0: there is none.
        """
        # Prompts of different calls must not begin alike: they would be continued.
        random = np.random.default_rng((length, prompts, responses, rest))
        ids = random.integers(0, self.vocabulary, (prompts, length))
        if rest:
            earlier = ids[:, : length - rest + 1].copy()
            earlier[:, -1] = (earlier[:, -1] + 1) % self.vocabulary  # so it is not continued in its own slot
            self._sample_two_tokens(earlier.tolist(), responses)
        self._sample_two_tokens(ids.tolist(), responses)
        if self._words and prompts == 1:  # the program for constraints, where no prompt is continued either
            again = random.integers(0, self.vocabulary, (1, length)).tolist()
            self._sample_two_tokens(again, 1, _Anything(self._words))
        self._sampler.prompt_tokens = self._sampler.reused_tokens = 0  # clients' alone count

    def _sample_two_tokens(self, prompts: Sequence[list[int]], responses: int, constraint: Constraint | None = None) -> None:
        reports: queue.Queue[Progress] = queue.Queue()
        limit = min(2, self.response_limit)
        choices = [(ids, number) for ids in prompts for number in range(responses)]
        self.submit([Generation(ids, limit, Decoding(), 0, number, reports.put, constraint) for ids, number in choices])
        for _ in range(len(prompts) * responses):
            while not (progress := reports.get()).ended:
                pass
            if progress.error:
                raise RunError(progress.error)

    @property
    def waiting(self) -> int:
        """Number of responses that wait for a slot."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Number of responses that have a slot."""
        return len(self._seated)

    @property
    def slots(self) -> int:
        """Maximum number of responses with a slot."""
        return len(self._keys)

    @property
    def room(self) -> int:
        """Maximum number of responses that have a slot or wait for one."""
        return self.slots + self._waiting_limit

    @property
    def cache_bytes(self) -> int:
        """Bytes of the caches, once `warm_up` has made them."""
        return self._sampler.bytes

    @property
    def smallest_store(self) -> int:
        """Bytes of the smallest store that keeps anything."""
        return self._sampler.longest_row_bytes

    @property
    def counts(self) -> dict[str, float]:
        """The figures of the sampler."""
        return self._sampler.counts

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queues all of the generations or none. Raises Busy, or RuntimeError if the engine has ended."""
        with self._change:
            if self.failure or self._closing:
                raise RuntimeError(self.failure or "the server is shutting down")
            free = self.slots - self.active
            if len(self._waiting) + len(generations) > self._waiting_limit + free:
                raise Busy
            self._waiting.extend(generations)
            self._change.notify()

    def cancel(self, generations: Sequence[Generation]) -> None:
        """Stops sampling and reports for these generations soon; those that have ended are ignored."""
        with self._change:
            self._cancelled.update(generations)
            self._change.notify()

    def _run(self) -> None:
        try:
            with jax.set_mesh(self._mesh):  # applies to this thread
                while self._admit():
                    self._step()
        except Exception:  # after any error, waiting requests must be notified
            log.exception("the sampler has failed")
            self.failure = "the sampler has failed; the server's log says why"
        with self._change:
            self._closing = True
            left = [*self._seated.values(), *self._waiting]
            self._seated.clear()
            self._waiting.clear()
        for generation in left:
            generation.tell(Progress([], [], True, self.failure or "the server is shutting down"))
        if self.failure:
            self.failed()

    def _admit(self) -> bool:
        """Waits until there is something to decode, and gives waiting requests free slots; False once the engine closes."""
        with self._change:
            self._change.wait_for(lambda: self._closing or self._waiting or self._seated)
            left = max(0.0, self._gather_until - time.monotonic())
            self._change.wait_for(lambda: self._closing or len(self._waiting) >= self._freed, left)
            if self._closing:
                return False
            cancelled, self._cancelled = self._cancelled, set()
            self._waiting = deque(generation for generation in self._waiting if generation not in cancelled)
            for seat in [seat for seat, generation in self._seated.items() if generation in cancelled]:
                self._sampler.cancel(seat)
                del self._seated[seat]
            starting = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._sampler.free))]
            seats = [seat for seat in range(self.slots) if seat not in self._seated]
            new = dict(zip(seats, starting, strict=False))
            self._seated |= new
        if new:
            for seat, generation in new.items():
                self._keys[seat] = _key_data(generation.seed)
            self._sampler.keys = _as_keys(self._keys.copy())
            # Equal prompts are shared by separate calls of `add`, so that few shapes are compiled.
            by_prompt: dict[tuple[int, ...], list[SlotRequest]] = {}
            for seat, g in new.items():
                ids = g.pictures.mark(g.ids) if g.pictures else g.ids
                request = SlotRequest(seat, g.number, ids, g.limit, g.decoding, constraint=g.constraint, pictures=g.pictures)
                by_prompt.setdefault(tuple(ids), []).append(request)
            self._sampler.add([same[0] for same in by_prompt.values() if len(same) == 1])
            for same in by_prompt.values():
                if len(same) > 1:
                    self._sampler.add(same)
        return True

    def _step(self) -> None:
        began = time.monotonic()
        ended = {response.episode: response for response in self._sampler.step(STEPS)} if self._seated else {}
        now = time.monotonic()
        self._freed, self._gather_until = len(ended), now + min(GATHER * (now - began), MAX_GATHER)
        for seat, generation in list(self._seated.items()):
            if seat in ended:
                tokens, logp = ended[seat].tokens.tolist(), ended[seat].logp.tolist()
                with self._change:
                    del self._seated[seat]
            else:
                tokens, logp = self._sampler.so_far(seat)
            start, generation.reported_tokens = generation.reported_tokens, len(tokens)
            error = generation.constraint.failure if generation.constraint and seat in ended else ""
            generation.tell(Progress(tokens[start:], logp[start:], seat in ended, error))
