"""Progress of a long loop: a live line on a terminal, plain lines elsewhere, as in a log file."""

from __future__ import annotations

import time

from tqdm import tqdm

PLAIN_EVERY = 5.0  # seconds between plain lines


class Progress:
    """Counts to `total`, from `done`.

    Args:
      name: of the live line, and what the plain ones begin with unless `plain` says otherwise.
      unit: of the live line's rate, as in `it`.
    """

    def __init__(self, name: str, total: int, unit: str, done: int = 0, plain: str | None = None):
        self._plain, self._printed = plain or name, 0.0
        self._bar = tqdm(total=total, initial=done, desc=name, unit=unit, disable=None, dynamic_ncols=True)
        self._done = done

    def update(self, count: int, numbers: dict[str, str], seconds: float | None = None) -> None:
        """Adds `count` and shows `numbers`. seconds: what one more will take, for the plain line to say what is left."""
        self._done += count
        self._bar.set_postfix(numbers, refresh=False)
        self._bar.update(count)
        total, now = self._bar.total, time.perf_counter()
        if self._bar.disable and (self._done >= total or now - self._printed > PLAIN_EVERY):
            self._printed = now
            shown = [f"{name} {value}" for name, value in numbers.items()]
            left = [] if seconds is None else [f"left {(total - self._done) * seconds:.0f}s"]
            print("  ".join([f"{self._plain} {self._done}/{total}", *shown, *left]), flush=True)

    def close(self) -> None:
        self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self.close()
