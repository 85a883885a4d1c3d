"""What the slots of a sampler hold: token ids whose keys and values a prompt that begins with them need not compute again.

A slot holds its last prompt and the response to it, but for the response's last token, which was never decoded. That stays so
after the response has ended, until another one takes the slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Match(NamedTuple):
    """A slot of one shard whose first `length` ids begin a prompt, and the slot of the same shard for the response."""

    shard: int
    source: int
    slot: int
    length: int


class HeldPrefixes:
    """The ids that each slot of each shard holds.

    Args:
      shards: parts that the slots are split into.
      slots: of each shard.
    """

    def __init__(self, shards: int, slots: int):
        self._ids = [[_NOTHING] * slots for _ in range(shards)]
        self._used = [[0] * slots for _ in range(shards)]  # when a slot was last taken, in calls of `hold`
        self._calls = 0

    def hold(self, shard: int, slot: int, ids: Sequence[int]) -> None:
        """Notes what a slot holds from now on."""
        self._calls += 1
        self._ids[shard][slot], self._used[shard][slot] = np.asarray(ids, np.int32), self._calls

    def last_first(self, shard: int, slots: Sequence[int]) -> list[int]:
        """Sorts slots of a shard: the one that was taken last comes first."""
        return sorted(slots, key=lambda slot: -self._used[shard][slot])

    def take(self, rows: Sequence[Sequence[int]]) -> None:
        """Keeps some slots of each shard, in this order."""
        self._ids = [[ids[slot] for slot in some] for ids, some in zip(self._ids, rows, strict=True)]
        self._used = [[used[slot] for slot in some] for used, some in zip(self._used, rows, strict=True)]

    def match(self, prompt: Sequence[int], free: Sequence[Sequence[int]]) -> Match | None:
        """Finds the slot that holds the longest beginning of a prompt, in a shard that has a free slot.

        free: the free slots of each shard. At least one token of the prompt is left to compute. What continues the whole of a
        free slot goes on in it; else the response goes into the slot that was taken the longest time ago.
        """
        ids = np.asarray(prompt, np.int32)
        lengths = [
            (_common(ids[:-1], held), shard, slot)
            for shard, of_shard in enumerate(self._ids)
            for slot, held in enumerate(of_shard)
            if free[shard]
        ]
        length, shard, source = max(lengths, default=(0, 0, 0))
        if not length:
            return None
        goes_on = source in free[shard] and length >= min(len(self._ids[shard][source]), len(ids) - 1)
        return Match(shard, source, source if goes_on else self.last_first(shard, free[shard])[-1], length)


_NOTHING = np.zeros(0, np.int32)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Counts the first ids that are the same."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n
