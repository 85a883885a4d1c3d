"""Plans for prompts that are added together: which slots they take, and what is computed for them.

Planning changes nothing on the devices, so that a sampler can compare plans before it follows one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from hgpo_jax.policy.pictures import PromptPictures
from hgpo_jax.sampling.constraint import Constraint
from hgpo_jax.sampling.generate import Decoding, well_filled
from hgpo_jax.sampling.held_prefixes import HeldPrefixes, Match, common_length


class SlotRequest(NamedTuple):
    """A prompt that waits for a response."""

    episode: int  # the index of its random key
    turn: int  # folded into the key
    ids: Sequence[int]  # token ids of the prompt, at least one
    limit: int | None = None  # tokens of the longest response; None: as many as there is room for
    decoding: Decoding | None = None  # scalars, for a sampler without a common one
    said: int = 0  # tokens at the end of ids that begin the response, which goes on from there; none where it is constrained
    answers: Sequence[Sequence[int]] = ()  # what the response may be, with its end token; (): anything
    constraint: Constraint | None = None  # the same, for a sampler without a common decoding; None: anything
    pictures: PromptPictures | None = None  # of the prompt, whose ids it has marked


class Shapes(NamedTuple):
    """The shapes that programs compute, each ascending: every combination that occurs is compiled."""

    counts: list[int]  # prompts that a shard prefills at a time; of pieces it computes the first number
    prompts: list[int]  # widths
    pieces: list[int]  # widths

    def of_prompt(self, length: int) -> int:
        """Returns the width for a prompt."""
        return next(width for width in self.prompts if width >= length)

    def of_pieces(self, length: int) -> list[int]:
        """Lists the widths of the pieces that compute so many tokens, each filled to more than half if there is a choice."""
        widths = []
        while length > 0:
            widths.append(well_filled(self.pieces, length))
            length -= widths[-1]
        return widths


class Piece(NamedTuple):
    """The tokens from `begin` to `end` of a prompt, which go into a slot that holds what comes before them."""

    request: SlotRequest
    shard: int
    slot: int  # of the shard
    begin: int
    end: int
    width: int  # of the program, `end - begin` or more


class Copy(NamedTuple):
    """A step that copies what a row of a shard holds to another one."""

    shard: int
    source: int
    row: int


class Prefill(NamedTuple):
    """A step that computes up to `most` prompts of every shard: for each its responses, as (slot, request)."""

    width: int
    most: int
    prompts: list[list[list[tuple[int, SlotRequest]]]]


class Extend(NamedTuple):
    """A step that computes pieces of one width, of each shard no more than a program takes."""

    pieces: list[Piece]


class Plan:
    """A plan for prompts, no more than there are free slots.

    Args:
      requests: those that begin.
      slots: the request in each slot of each shard, None where it is free.
      held: what the rows hold; None: nothing is reused.
      split: whether a beginning that prompts have in common is computed first, for all of them.

    Attributes:
      slots, held: the arguments, once the plan is followed.
      steps: what is computed, in this order.
      reused: tokens that need not be computed.
      computed: tokens that programs compute, with padding.
    """

    def __init__(
        self,
        requests: Sequence[SlotRequest],
        slots: list[list[SlotRequest | None]],
        held: HeldPrefixes | None,
        shapes: Shapes,
        *,
        split: bool,
    ):
        self.slots, self.held, self._shapes = [list(some) for some in slots], held and held.copy(), shapes
        self.steps: list[Copy | Prefill | Extend] = []
        self.reused, self.computed = 0, 0
        if not self.held:
            return self._read(requests)
        waiting = self._continue(requests, self.held)
        while waiting:
            first, others = self._split(waiting) if split else (waiting, [])
            self._read(first)
            waiting = self._continue(others, self.held)

    @staticmethod
    def cheapest(
        requests: Sequence[SlotRequest], slots: list[list[SlotRequest | None]], held: HeldPrefixes | None, shapes: Shapes
    ) -> Plan:
        """Returns the plan by which the programs compute the fewest tokens."""
        ways = (False, True) if held and len(requests) > 1 else (False,)
        return min((Plan(requests, slots, held, shapes, split=split) for split in ways), key=lambda plan: plan.computed)

    def _free(self) -> list[list[int]]:
        """Lists the free slots of each shard."""
        return [[slot for slot, other in enumerate(some) if other is None] for some in self.slots]

    def _read(self, requests: Sequence[SlotRequest]) -> None:
        """Begins responses to prompts of which no slot holds the beginning."""
        some: list[SlotRequest] = []
        for width in self._shapes.prompts:
            some += [request for request in requests if self._shapes.of_prompt(len(request.ids)) == width]
            # With fewer prompts than shards, some shards would process only padding: these prompts go with longer ones.
            if not some or (len(some) < len(self.slots) and any(len(request.ids) > width for request in requests)):
                continue
            waiting, some = self._assign(some), []
            while any(waiting):
                count = well_filled(self._shapes.counts, max(map(len, waiting)))
                self.steps.append(Prefill(width, count, [prompts[:count] for prompts in waiting]))
                self.computed += width * count * len(self.slots)
                waiting = [prompts[count:] for prompts in waiting]

    def _assign(self, requests: list[SlotRequest]) -> list[list[list[tuple[int, SlotRequest]]]]:
        """Assigns each request to a slot. Returns, for each shard, lists of (slot in it, request) with the same prompt.

        Prompts are shared only if most are equal: its program takes as many responses as slots.
        """
        share = _mostly_equal(requests)
        free = self._free()
        prompts: list[dict] = [{} for _ in free]
        home: dict[tuple, int] = {}  # the shard of each distinct prompt
        for request in requests:
            prompt = tuple(request.ids)
            shard = home.get(prompt, 0) if share else 0
            if not (share and prompt in home and free[shard]):
                shard = max(range(len(free)), key=lambda at: len(free[at]))
            home[prompt] = shard
            slot = self.held.last_first(shard, free[shard])[-1] if self.held else free[shard][0]
            free[shard].remove(slot)
            self._begin(shard, slot, request)
            prompts[shard].setdefault(prompt if share else request.episode, []).append((slot, request))
        return [list(some.values()) for some in prompts]

    def _begin(self, shard: int, slot: int, request: SlotRequest, source: int | None = None) -> None:
        """Gives a request a slot, into which goes what the row `source` holds; what it held before may go to the store."""
        self.slots[shard][slot] = request
        if self.held:
            row = self.held.store(shard, slot, request.ids, source)
            if row is not None:
                self.steps.append(Copy(shard, slot, row))
            if source is not None and source != slot:
                self.steps.append(Copy(shard, source, slot))
            self.held.hold(shard, slot, request.ids)

    def _continue(self, requests: Sequence[SlotRequest], held: HeldPrefixes) -> list[SlotRequest]:
        """Begins the responses whose prompts are worth continuing from what slots hold; returns the other requests."""
        others, waiting = [], dict[tuple[int, int], list[Piece]]()  # of each (shard, slot) the pieces that are to be computed
        for request in requests:
            match, widths = self._match(request, held, waiting)
            if not match or sum(widths) >= self._shapes.of_prompt(len(request.ids)):
                others.append(request)
                continue
            if (match.shard, match.source) in waiting:
                self._extend(list(waiting.values()))
                waiting = {}
            self._begin(match.shard, match.slot, request, match.source)
            self.reused += match.length
            begins = np.cumsum([match.length, *widths[:-1]]).tolist()
            ends = [*begins[1:], len(request.ids)]
            parts = zip(begins, ends, widths, strict=True)
            waiting[match.shard, match.slot] = [Piece(request, match.shard, match.slot, *part) for part in parts]
        self._extend(list(waiting.values()))
        return others

    def _match(
        self, request: SlotRequest, held: HeldPrefixes, waiting: Collection[tuple[int, int]]
    ) -> tuple[Match | None, list[int]]:
        """Finds the row to continue, and the widths of the pieces that are left; one that waits only if that leaves less."""
        matches = [held.match(request.ids, self._free(), without) for without in ((waiting, ()) if waiting else ((),))]
        widths = [self._shapes.of_pieces(len(request.ids) - (match.length if match else 0)) for match in matches]
        return min(zip(matches, widths, strict=True), key=lambda one: sum(one[1]))

    def _extend(self, waiting: list[list[Piece]]) -> None:
        """Computes the pieces of some prompts: those of each one after another, as many at a time as a program takes."""
        while waiting := [pieces for pieces in waiting if pieces]:
            together: list[Piece] = []
            width = max(pieces[0].width for pieces in waiting)  # later pieces are never wider
            for pieces in sorted(waiting, key=len, reverse=True):
                full = sum(pieces[0].shard == other.shard for other in together) == self._shapes.counts[0]
                if pieces[0].width == width and not full:
                    together.append(pieces.pop(0))
            self.steps.append(Extend(together))
            self.computed += width * self._shapes.counts[0] * len(self.slots)

    def _split(self, requests: Sequence[SlotRequest]) -> tuple[list[SlotRequest], list[SlotRequest]]:
        """Separates requests into those to read first, and those to continue from the others' common beginnings.

        One prompt for each shard is read first. Prompts most of which are equal are read at once (`_assign`).
        """
        if _mostly_equal(requests):
            return list(requests), []
        first, others, texts = list[SlotRequest](), list[SlotRequest](), list[np.ndarray]()
        for request in requests:
            ids = np.asarray(request.ids, np.int32)
            in_common = sorted(common_length(ids[:-1], text) for text in texts)[-len(self.slots) :]
            common = in_common[0] if len(in_common) == len(self.slots) else 0
            left = sum(self._shapes.of_pieces(len(ids) - common))
            if common >= self._shapes.pieces[0] and left < self._shapes.of_prompt(len(ids)):
                others.append(request)
            else:
                first.append(request)
                texts.append(ids)
        return first, others


def _mostly_equal(requests: Sequence[SlotRequest]) -> bool:
    """Whether half of the prompts or fewer are distinct."""
    return 2 * len({tuple(request.ids) for request in requests}) <= len(requests)
