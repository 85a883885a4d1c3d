"""What a container may use of its machine: the limits of its control group, by either version of Linux's interface."""

from __future__ import annotations

import math
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def memory_limit(root: Path = ROOT) -> int | None:
    """Returns the bytes that the processes here may hold, or None if only the machine limits them."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        if (limit := _numbers(root / name)) and limit[0] < 2**60:  # an unlimited group has the largest number of pages
            return limit[0]
    return None


def processor_limit(root: Path = ROOT) -> int | None:
    """Returns how many processors the processes here may keep busy, or None if only the machine limits them."""
    of_one = _numbers(root / "cpu.max")
    quota = of_one or [*_numbers(root / "cpu/cpu.cfs_quota_us"), *_numbers(root / "cpu/cpu.cfs_period_us")]
    return max(1, math.ceil(quota[0] / quota[1])) if len(quota) == 2 and min(quota) > 0 else None


def processors() -> int:
    """Returns how many processors this process may keep busy."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(there, processor_limit() or there)


def _numbers(file: Path) -> list[int]:
    """Reads whole numbers; [] if there is no such file, or if it holds a word such as `max`."""
    try:
        return [int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []
