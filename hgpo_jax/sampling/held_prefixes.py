"""What the slots of a sampler hold: token ids whose keys and values a prompt that begins with them need not compute again.

A slot holds its last prompt and the response to it, but for the response's last token, which was never decoded. That stays so
after the response has ended, until another one takes the slot. Then the store may keep it: further rows, that are not decoded.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np


class Match(NamedTuple):
    """A row of one shard whose first `length` ids begin a prompt, and the slot of the same shard for the response."""

    shard: int
    source: int
    slot: int
    length: int


class HeldPrefixes:
    """The ids that each row of each shard holds: those of its slots, and after them those of its store.

    Args:
      shards: parts that the slots are split into.
      slots: of each shard.
      shortest: the fewest ids that are worth holding.
    """

    def __init__(self, shards: int, slots: int, shortest: int):
        self._slots, self._shortest = slots, shortest
        self._ids = [[_NOTHING] * slots for _ in range(shards)]
        self._used = [[0] * slots for _ in range(shards)]  # when a row's slot was last taken, in calls of `hold`
        self._calls = 0

    def copy(self) -> HeldPrefixes:
        """Makes another one, which changes alone; arrays of ids never change."""
        other = copy.copy(self)
        other._ids, other._used = [list(ids) for ids in self._ids], [list(used) for used in self._used]
        return other

    def forget(self) -> None:
        """Drops what all rows hold, as under other weights it is no beginning of theirs."""
        self._ids = [[_NOTHING] * len(ids) for ids in self._ids]
        self._used = [[0] * len(used) for used in self._used]

    def make_store(self, rows: int) -> None:
        """Gives each shard an empty store of so many rows, in place of its last one."""
        for ids, used in zip(self._ids, self._used, strict=True):
            ids[self._slots :], used[self._slots :] = [_NOTHING] * rows, [0] * rows

    def hold(self, shard: int, slot: int, ids: Sequence[int]) -> None:
        """Notes what a slot holds from now on. The store drops what is a part of it."""
        self._calls += 1
        self._ids[shard][slot], self._used[shard][slot] = np.asarray(ids, np.int32), self._calls
        for row in range(self._slots, len(self._ids[shard])):
            if common_length(self._ids[shard][row], self._ids[shard][slot]) == len(self._ids[shard][row]):
                self._ids[shard][row], self._used[shard][row] = _NOTHING, 0

    def store(self, shard: int, slot: int, prompt: Sequence[int], source: int | None) -> int | None:
        """Moves what a slot holds to the row of the store whose slot was taken the longest time ago, which it returns.

        Returns None where nothing is lost when the prompt takes the slot, or too little. source: a row that stays.
        """
        ids, used = self._ids[shard], self._used[shard]
        rows = [row for row in range(self._slots, len(ids)) if row != source]
        others = [np.asarray(prompt, np.int32), *ids[:slot], *ids[slot + 1 :]]
        held_twice = any(common_length(ids[slot], other) == len(ids[slot]) for other in others)
        if not rows or len(ids[slot]) < self._shortest or held_twice:
            return None
        row = self.last_first(shard, rows)[-1]
        ids[row], used[row] = ids[slot], used[slot]
        return row

    def last_first(self, shard: int, slots: Sequence[int]) -> list[int]:
        """Sorts slots of a shard: the one that was taken last comes first."""
        return sorted(slots, key=lambda slot: -self._used[shard][slot])

    def take(self, rows: Sequence[Sequence[int]]) -> None:
        """Keeps some slots of each shard, in this order, and its store."""
        begin, self._slots = self._slots, len(rows[0])
        self._ids = [[ids[slot] for slot in some] + ids[begin:] for ids, some in zip(self._ids, rows, strict=True)]
        self._used = [[used[slot] for slot in some] + used[begin:] for used, some in zip(self._used, rows, strict=True)]

    def match(
        self, prompt: Sequence[int], free: Sequence[Sequence[int]], without: Collection[tuple[int, int]] = ()
    ) -> Match | None:
        """Finds the row that holds the longest beginning of a prompt, in a shard that has a free slot.

        free: the free slots of each shard. At least one token of the prompt is left to compute, and no picture. What
        continues the whole of a free slot goes on in it; else the response goes into the slot that was taken the longest time
        ago. Of rows that hold as much, one of the emptiest shard is taken. without: (shard, row) of rows that are left out.
        """
        ids = np.asarray(prompt, np.int32)
        lengths = [
            (common_length(ids[:-1], held), len(free[shard]), shard, row)
            for shard, of_shard in enumerate(self._ids)
            for row, held in enumerate(of_shard)
            if free[shard] and (shard, row) not in without
        ]
        length, _, shard, source = max(lengths, default=(0,) * 4)
        if length < self._shortest or (ids[length:] < 0).any():
            return None
        goes_on = source in free[shard] and length >= min(len(self._ids[shard][source]), len(ids) - 1)
        return Match(shard, source, source if goes_on else self.last_first(shard, free[shard])[-1], length)


_NOTHING = np.zeros(0, np.int32)


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Counts the first ids that are the same."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n
