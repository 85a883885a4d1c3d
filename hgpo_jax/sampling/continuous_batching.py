"""Continuous batching: a slot whose response has ended takes the next prompt while the other slots go on decoding.

    programs = SlotPrograms(graphdef, mesh, max_new=512, end_tokens=(end,))
    sampler = SlotSampler(programs, params, keys, Decoding(), slots=64, prompt_limit=4096)
    sampler.add([SlotRequest(episode, turn, ids), ...])  # at most sampler.free of them
    for response in sampler.step(): ...  # those that have ended

The state of all slots stays on the devices; after every step the host receives the responses that have ended. The tokens of
a request depend on its key, its turn and its prompt alone, and equal those of `sampling.generate`. If most of the prompts
that are added together are equal, such as the first ones of prompt groups, equal ones are prefilled once.

Source: iteration-level scheduling, Orca (Yu et al., OSDI 2022).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hgpo_jax.policy.kv_cache import KVCache
from hgpo_jax.policy.pictures import Pictures, PromptPictures
from hgpo_jax.sampling.constraint import padded
from hgpo_jax.sampling.generate import Decoding, buckets
from hgpo_jax.sampling.held_prefixes import HeldPrefixes
from hgpo_jax.sampling.slot_plan import Copy, Extend, Piece, Plan, Prefill, Shapes, SlotRequest
from hgpo_jax.sampling.slot_programs import SlotPrograms
from hgpo_jax.sampling.slots import MAX_STEPS, Continued, NewPrompts

# What is left of a prompt that is continued is computed in pieces of these widths, so that few shapes are compiled and little
# is padding. A shorter beginning than the first is not worth a program of its own.
PIECES = (32, 128, 512)
MOST_PICTURES = (4, 16, 64)  # in a prompt; programs are compiled for each of these numbers
KEPT_PICTURES = 64  # whose features are kept, since the next prompt of a conversation shows its pictures again
NO_ROW = np.iinfo(np.int32).max  # which nothing is written to


class SlotResponse(NamedTuple):
    """A sampled response to a request."""

    episode: int
    tokens: np.ndarray  # i32[n], including the end token
    logp: np.ndarray  # f32[n]


class SlotSampler:
    """Samples responses to prompts that come and go.

    Args:
      programs: compiled for the policy.
      params: those of the policy.
      keys: [B], the episodes' random keys, or [B, 2] as for `sampling.turn_keys`.
      decoding: None if every request has its own.
      words: W of the sets of tokens (`constraint.py`), if requests have answers or constraints. While a response with a
        constraint is sampled, a step is one token, and its program another one.
      slots: maximum number of simultaneous responses, rounded up to a multiple of `programs.shards`.
      prompt_limit: P, tokens of the longest prompt.
      read_limit: tokens of the longest prompt with what has been `said` of its response; 0: nothing is.
      reuse: whether a prompt that begins with what a slot holds is computed from there on (`held_prefixes.py`). Its response is
        then the same up to rounding.
      store: bytes, over all devices, to keep what slots held when others took them; with `reuse`. Longer caches empty it.

    Attributes:
      keys: the argument; it may be replaced by others of the same shape for later requests.
      steps: decoding steps so far.
      busy: the sum over these steps of the fraction of active slots, among the slots at that time.
      shapes: those of the programs that compute prompts.
      prompt_counts: numbers of prompts that are prefilled at a time, ascending.
      prompt_tokens, reused_tokens: tokens of all prompts so far, and those of them that a slot held.
    """

    def __init__(
        self,
        programs: SlotPrograms,
        params,
        keys,
        decoding: Decoding | None,
        *,
        words: int = 0,
        slots: int,
        prompt_limit: int,
        read_limit: int = 0,
        reuse: bool = False,
        store: int = 0,
    ):
        self._programs, self._words = programs, words
        shards = programs.shards
        self.shapes = Shapes(
            buckets(-(-slots // shards), factor=4, smallest=1)[-3:],
            prompts=_widths(prompt_limit, read_limit),
            pieces=[width for width in PIECES if width < prompt_limit] or [prompt_limit],
        )
        self.prompt_counts = [count * shards for count in self.shapes.counts]
        self._room = buckets(prompt_limit, factor=4, smallest=128)  # cache slots for prompts
        self._length = 0  # tokens that a cache holds
        self._state: Any = None
        self._requests: list[list[SlotRequest | None]] = [[None] * self.shapes.counts[-1] for _ in range(shards)]
        self._held = HeldPrefixes(shards, self.shapes.counts[-1], PIECES[0]) if reuse else None
        self._store_limit = store
        self._store: list[KVCache] = []  # one for each layer, if there is room for a row
        self._store_rows = 0  # of each shard
        self.prompt_tokens, self.reused_tokens = 0, 0
        self._params, self._begun_before = None, set[int]()  # episodes whose responses earlier weights have begun
        self._sampled: dict[int, tuple[list, list]] = {}  # episode -> (tokens, log-probabilities) so far
        self._seen = OrderedDict[bytes, np.ndarray]()  # features of pictures under these weights, the last used last
        self._first: list[tuple[list[int], Any, Any]] = []  # for responses that have begun: episodes, tokens, log-probabilities
        self.steps, self.busy = 0, 0.0
        self.use(params, keys, decoding)

    def use(self, params, keys, decoding: Decoding | None) -> None:
        """Samples with other weights, keys and distribution from now on.

        A response that has begun goes on with its own key, from what earlier weights have computed of it. Other
        prompts are read anew.
        """
        if self._held and params is not self._params:
            self._held.forget()
            self._begun_before = set(self._sampled)
        if params is not self._params:
            self._seen.clear()
        self._params, self.keys, self._decoding = params, keys, decoding
        self._blocks = self._programs("decode_blocks", "all layers", params)

    def pause(self) -> None:
        """Forgets the weights, so that they take no memory, and the figures; `use` goes on."""
        self._params = self._blocks = None
        self.prompt_tokens, self.reused_tokens, self.steps, self.busy = 0, 0, 0, 0.0

    @property
    def active(self) -> int:
        """Number of responses that have not ended."""
        return len(self._sampled)

    @property
    def free(self) -> int:
        """Number of slots for further requests."""
        return len(self._requests) * len(self._requests[0]) - self.active

    @property
    def counts(self) -> dict[str, float]:
        """Returns figures for a rollout's report (`result.py`)."""
        reused = self.reused_tokens / max(1, self.prompt_tokens)
        return {"decode_steps": self.steps, "slot_use": self.busy / max(1, self.steps), "reused_share": reused}

    @property
    def bytes(self) -> int:
        """Bytes of the caches and the store, over all devices."""
        return (len(self._requests[0]) + self._store_rows) * self._row_bytes(self._length) if self._state else 0

    @property
    def longest_row_bytes(self) -> int:
        """Bytes, over all devices, of the smallest store that holds a row for each shard, once the caches have grown."""
        return self._row_bytes(self.shapes.prompts[-1] + self._programs.max_new)

    def add(self, requests: Sequence[SlotRequest]) -> None:
        """Begins responses to some prompts, at most `free`; an episode has only one at a time."""
        if not requests:
            return
        self._make_room(max(len(request.ids) - request.said for request in requests))
        self.prompt_tokens += sum(len(request.ids) for request in requests)
        plan = Plan.cheapest(requests, self._requests, self._held, self.shapes)
        self._requests, self._held = plan.slots, plan.held
        self.reused_tokens += plan.reused
        for request in requests:
            self._sampled[request.episode] = [], []
        for step in plan.steps:
            match step:
                case Copy():
                    self._copy_row(*step)
                case Prefill():
                    self._prefill(*step)
                case Extend():
                    self._extend(step.pieces)

    @property
    def episodes(self) -> list[int]:
        """Those whose responses have begun and not ended."""
        return [*self._sampled]

    def so_far(self, episode: int) -> tuple[list[int], list[float]]:
        """Returns the tokens of an unfinished response from before the end of the last `step`, and their log-probabilities."""
        return self._sampled[episode]

    def cancel(self, episode: int) -> None:
        """Ends a response that is no longer wanted and frees its slot."""
        tokens, _ = self._sampled.pop(episode)
        for shard, requests in enumerate(self._requests):
            for slot, request in enumerate(requests):
                if request and request.episode == episode:
                    self._free(shard, slot, tokens)

    def _free(self, shard: int, slot: int, tokens: list[int]) -> None:
        """Frees a slot in which these tokens of a response have been sampled."""
        request, self._requests[shard][slot] = self._requests[shard][slot], None
        assert request is not None
        if self._held and request.episode not in self._begun_before:
            self._held.hold(shard, slot, [*request.ids, *tokens[:-1]])
        self._begun_before.discard(request.episode)

    def step(self, most: int = MAX_STEPS) -> list[SlotResponse]:
        """Decodes up to `most` tokens, MAX_STEPS or fewer; returns the responses that have ended."""
        slots = [request for requests in self._requests for request in requests]
        constrained = any(request and request.constraint for request in slots)
        if constrained:
            self._take_first(jax.device_get(self._first))  # what comes next depends on them
        self._state, out = self._programs(
            "decode",
            self._shape() + ", constrained" * constrained,
            self._params,
            self._blocks,
            self._state,
            np.array([slot is None for slot in slots]),
            self._limits(slots),
            np.int32(1 if constrained else most),
            self._decodings(slots, sets=constrained),
        )
        first, out = jax.device_get((self._first, out))
        self._take_first(first)
        self.steps += int(out.counts.max())
        self.busy += float(out.counts.sum()) / len(out.counts)
        responses = []
        for shard, requests in enumerate(self._requests):
            for slot, request in enumerate(requests):
                if request is None:
                    continue
                at = shard * len(requests) + slot
                tokens, logp = self._sampled[request.episode]
                tokens.extend(out.tokens[at, : out.counts[at]].tolist())
                logp.extend(out.logp[at, : out.counts[at]].tolist())
                if out.ended[at]:
                    responses.append(SlotResponse(request.episode, np.array(tokens, np.int32), np.array(logp, np.float32)))
                    del self._sampled[request.episode]
                    self._free(shard, slot, tokens)
        return responses

    def _take_first(self, first: list[tuple[list[int], Any, Any]]) -> None:
        """Begins the record of responses with their first tokens, which are now on the host."""
        self._first = []
        for episodes, tokens, logp in first:
            for i, episode in enumerate(episodes):
                if episode in self._sampled:  # otherwise it was cancelled, or is padding
                    self._sampled[episode] = [int(tokens[i])], [float(logp[i])]

    def shrink(self, num_slots: int) -> None:
        """Drops free slots that are no longer needed, once the rest is a quarter or less."""
        busiest = max(sum(request is not None for request in requests) for requests in self._requests)
        needed = max(busiest, -(-num_slots // len(self._requests)))
        size = next((size for size in self.shapes.counts[-2:] if size >= needed), self.shapes.counts[-1])
        if size >= len(self._requests[0]) or self._state is None:
            return
        # Of the free slots those stay that were taken last: their conversations are the likeliest to go on.
        last = self._held.last_first if self._held else lambda shard, slots: slots
        rows = [
            sorted(last(shard, range(len(requests))), key=lambda slot: requests[slot] is None)[:size]
            for shard, requests in enumerate(self._requests)
        ]
        self._resize(np.concatenate(rows), self._length)
        if self._held:
            self._held.take(rows)
        self._requests = [[requests[slot] for slot in some] for requests, some in zip(self._requests, rows, strict=True)]

    def _make_room(self, length: int) -> None:
        """Makes the caches long enough for a prompt of this length and its response."""
        slots = len(self._requests[0])
        width = self.shapes.of_prompt(length)
        needed = max(width, next(room for room in self._room if room >= length)) + self._programs.max_new
        if self._state is None:
            self._length = needed
            self._state = self._programs("empty", self._shape(), self._params, len(self._requests) * slots, needed)
        elif needed > self._length:
            self._resize(np.tile(np.arange(slots), len(self._requests)), needed)
        else:
            return
        if self._held:
            self._make_store(self._held)

    def _make_store(self, held: HeldPrefixes) -> None:
        """Makes a store of rows that are as long as the caches, as many as there is room for."""
        self._store_rows = rows = self._store_limit // self._row_bytes(self._length)
        held.make_store(rows)
        self._store = []  # before the new one takes its memory
        if rows:
            shape, rows = f"store of {rows} rows of {self._length} tokens", rows * len(self._requests)
            self._store = self._programs("empty", shape, self._params, rows, self._length).cache
            slots = len(self._requests[0])
            for source, row in ((0, slots), (slots, 0)):  # changes nothing, so that no request waits for the compiler
                self._copy_row(0, source, row)

    def _row_bytes(self, length: int) -> int:
        return self._programs.row_bytes(self._params, length)

    def _resize(self, rows: np.ndarray, length: int) -> None:
        shape = f"{self._shape()} to {len(rows)} of {length}"
        rows, state = rows.astype(np.int32), self._state
        self._state = self._programs("take", shape, state, rows)
        while state.cache:  # one layer at a time, so that the caches never exist twice
            self._state.cache.append(self._programs("resize", shape, state.cache.pop(0), rows, length))
        self._length = length

    def _shape(self) -> str:
        return f"{len(self._requests) * len(self._requests[0])} slots of {self._length} tokens"

    def _copy_row(self, shard: int, source: int, row: int) -> None:
        """Copies what a row of a shard holds to another one; the rows after the slots are those of the store."""
        slots, caches = len(self._requests[0]), (self._state.cache, self._store)
        from_store, to_store = source >= slots, row >= slots
        sources, rows = np.zeros(len(self._requests), np.int32), np.full(len(self._requests), NO_ROW, np.int32)
        sources[shard], rows[shard] = source - slots * from_store, row - slots * to_store
        shape = f"{('slot', 'store')[from_store]} to {('slot', 'store')[to_store]}, {self._shape()}"
        other = None if from_store == to_store else caches[from_store]
        cache = self._programs("copy", shape, caches[to_store], other, sources, rows)
        if to_store:
            self._store = cache
        else:
            self._state = self._state.replace(cache=cache)

    def _extend(self, pieces: list[Piece]) -> None:
        """Computes pieces of one width, and begins the response after the last one of a prompt."""
        shards, slots, count, width = len(self._requests), len(self._requests[0]), self.shapes.counts[0], pieces[0].width
        tokens = np.zeros((shards, count, width), np.int32)
        begin, turn, offset = np.zeros((3, shards, count), np.int32)
        lengths, slot = np.ones((shards, count), np.int32), np.full((shards, count), slots, np.int32)
        episode = np.full((shards, count), -1, np.int32)
        rows: list[list[SlotRequest | None]] = [[None] * count for _ in range(shards)]
        for shard in range(shards):
            for i, piece in enumerate(piece for piece in pieces if piece.shard == shard):
                request, length = piece.request, piece.end - piece.begin
                tokens[shard, i, :length] = request.ids[piece.begin : piece.end]
                lengths[shard, i], begin[shard, i] = length, piece.begin
                offset[shard, i] = request.pictures.offset if request.pictures else 0
                slot[shard, i], rows[shard][i] = piece.slot, request
                episode[shard, i], turn[shard, i] = request.episode, request.turn
        flat = lambda a: a.reshape(-1, *a.shape[2:])  # noqa: E731
        of_rows = [request for some in rows for request in some]
        self._state, *first = self._programs(
            "extend",
            f"{episode.size} prompts by {width} tokens in {self._shape()}",
            self._params,
            self._blocks,
            self._state,
            Continued(
                flat(tokens), flat(lengths), flat(begin), flat(offset), flat(slot), self._limits(of_rows), _said(of_rows)
            ),
            self.keys,
            flat(np.maximum(episode, 0)),
            flat(turn),
            self._decodings(of_rows),
        )
        # A token sampled after an earlier piece of a prompt is replaced by the one after its last piece.
        self._first.append((flat(episode).tolist(), *first))

    def _prefill(self, width: int, count: int, prompts: list[list[list[tuple[int, SlotRequest]]]]) -> None:
        """Prefills up to `count` prompts of every shard."""
        slots = len(self._requests[0])
        shared = any(len(same) > 1 for some in prompts for same in some)
        m = slots if shared else count
        tokens, lengths = np.zeros((len(prompts), count, width), np.int32), np.ones((len(prompts), count), np.int32)
        source, slot, turn = np.zeros((3, len(prompts), m), np.int32)
        episode = np.full((len(prompts), m), -1, np.int32)
        begun: list[list[SlotRequest | None]] = [[None] * m for _ in prompts]
        slot[:] = slots  # no slot
        pictures = dict[int, PromptPictures]()  # by the prompt's number
        for shard, some in enumerate(prompts):
            row = 0
            for i, same in enumerate(some):
                ids = same[0][1].ids
                tokens[shard, i, : len(ids)], lengths[shard, i] = ids, len(ids)
                if (shown := same[0][1].pictures) is not None:
                    pictures[shard * count + i], tokens[shard, i] = shown, shown.unmark(tokens[shard, i])
                for at, request in same:
                    source[shard, row], slot[shard, row] = i, at
                    episode[shard, row], turn[shard, row], begun[shard][row] = request.episode, request.turn, request
                    row += 1
        flat = lambda a: a.reshape(-1, *a.shape[2:])  # noqa: E731
        shape = f"{tokens.size // width} prompts of {width} tokens, {episode.size} responses in {self._shape()}"
        rows = [request for some in begun for request in some]
        seen = self._see(pictures, tokens.size // width, width) if pictures else None
        shape += f", {seen.first.shape[1]} pictures each" if seen else ""
        self._state, *first = self._programs(
            "prefill",
            shape,
            self._params,
            self._blocks,
            self._state,
            NewPrompts(flat(tokens), flat(lengths), flat(source), flat(slot), self._limits(rows), _said(rows)),
            self.keys,
            flat(np.maximum(episode, 0)),
            flat(turn),
            self._decodings(rows),
            seen,
        )
        self._first.append((flat(episode).tolist(), *first))

    def _see(self, pictures: dict[int, PromptPictures], count: int, width: int) -> Pictures:
        """Computes the pictures of some of `count` prompts, by the prompts' numbers.

        The features of `count` times `width` slots, which all prompts' pictures fit in, are one shape.
        """
        features: Any = None
        begin = 0
        most = next(most for most in MOST_PICTURES if most >= max(len(shown.grids) for shown in pictures.values()))
        first, sizes = np.zeros((count, most), np.int32), np.zeros((count, most, 3), np.int32)
        for row, shown in pictures.items():
            sizes[row, : len(shown.grids)] = shown.sizes
            for k, (grid, patches, digest) in enumerate(zip(shown.grids, shown.patches, shown.digests, strict=True)):
                if digest not in self._seen:
                    shape = f"a picture of {grid[1]} x {grid[2]} patches"
                    self._seen[digest] = jax.device_get(self._programs("see", shape, self._params, patches, grid))
                self._seen.move_to_end(digest)
                one = self._seen[digest]
                features = np.zeros((count * width, one.shape[1]), one.dtype) if features is None else features
                features[begin : begin + len(one)], first[row, k] = one, begin
                begin += len(one)
        while len(self._seen) > KEPT_PICTURES:
            self._seen.popitem(last=False)
        return Pictures(features, first, sizes)

    def _limits(self, requests: list[SlotRequest | None]) -> np.ndarray:
        """Returns the limit of each request's response, i32[n]."""
        most = self._programs.max_new
        return np.array([request.limit if request and request.limit else most for request in requests], np.int32)

    def _decodings(self, requests: list[SlotRequest | None], *, sets: bool = True) -> Decoding:
        """Returns the distribution for all requests, or arrays [n] with each one's.

        sets: whether to say what tokens each one's next may be, if the sampler has constraints. First tokens always have sets:
        one more number in a prompt's program costs nothing, other programs would have to be compiled.
        """
        if self._decoding is not None:
            if not self._words:
                return self._decoding
            of_each = (request.answers if request else () for request in requests)
            return self._decoding.replace(answers=padded(of_each, self._programs.max_new, self._words))
        each = [request.decoding if request and request.decoding else Decoding() for request in requests]
        return Decoding(
            temperature=np.array([one.temperature for one in each], np.float32),
            top_k=np.array([one.top_k for one in each], np.int32),
            top_p=np.array([one.top_p for one in each], np.float32),
            min_new=np.array([one.min_new for one in each], np.int32),
            allowed=self._sets(requests) if sets and self._words else None,
        )

    def _sets(self, requests: list[SlotRequest | None]) -> np.ndarray:
        """Returns what the next token of each request may be, u32[n, W]; an empty set allows everything."""
        sets = np.zeros((len(requests), self._words), np.uint32)
        for row, request in zip(sets, requests, strict=True):
            if request and request.constraint:
                row[:] = request.constraint.next_set(self._sampled[request.episode][0])
        return sets


def _widths(prompt_limit: int, read_limit: int) -> list[int]:
    """Returns the widths of prompts, and further ones for those with the beginning of a response."""
    widths = buckets(prompt_limit, factor=2, smallest=128)
    return widths + [width for width in buckets(read_limit, factor=2, smallest=128) if width > prompt_limit]


def _said(requests: list[SlotRequest | None]) -> np.ndarray:
    """Returns how many tokens of each response its prompt ends with, i32[n]."""
    return np.array([request.said if request else 0 for request in requests], np.int32)
