"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

CACHE_DIR = "runs/cache"  # where no other is given


@contextlib.contextmanager
def atomic_write(path: str | Path, mode: str = "w", **options) -> Iterator[IO]:
    """An open file that replaces `path` when the block ends; if the block raises, `path` stays as it was.

    mode, options: as of `open`; text is UTF-8 unless `encoding` says otherwise. Raises OSError where it cannot be written.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    if "b" not in mode:
        options.setdefault("encoding", "utf-8")
    try:
        with open(partial, mode, **options) as file:
            yield file
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
