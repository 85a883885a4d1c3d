"""Where `env.workers` are: processes of this machine, or actors on a Ray cluster."""

from __future__ import annotations

import re
from typing import NamedTuple

MOST_HERE, MOST_ON_RAY = 256, 1024  # each has a thread of the trainer


class Workers(NamedTuple):
    """How many workers play, and whether they are actors on a Ray cluster."""

    number: int
    ray: bool


def workers_of(value: int | str) -> Workers:
    """Reads N or `ray:N`. Raises ValueError."""
    match = re.fullmatch(r"(ray:)?([0-9]{1,4})", str(value))
    workers = Workers(int(match[2]), bool(match[1])) if match else Workers(-1, False)
    if not workers.ray <= workers.number <= (MOST_ON_RAY if workers.ray else MOST_HERE):
        raise ValueError(f"must be 0 to {MOST_HERE}, or ray:N with N from 1 to {MOST_ON_RAY}")
    return workers


def at_most(value: int | str, most: int) -> int | str:
    """Returns the field's value with no more workers than these."""
    number, ray = workers_of(value)
    return f"ray:{min(number, most)}" if ray else min(number, most)
