"""Files that appear complete or not at all, and places outside this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

CACHE_DIR = "runs/cache"  # the default


def is_remote(place: str | Path) -> bool:
    """Whether the place is a URL, not a path on this machine."""
    return "://" in str(place)


def check_scheme(url: str) -> None:
    """Raises ValueError, in a few words, if no installed package can access such a place."""
    import fsspec  # few runs are in a bucket

    scheme = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        extra = {"gs": "gcs", "gcs": "gcs", "s3": "s3"}.get(scheme)
        raise ValueError(f"{error}" if extra is None else f"needs a package more: pip install 'hgpo_jax[{extra}]'") from None
    except ValueError:
        places = "a folder of this machine, gs://, s3:// or another scheme that fsspec knows"
        raise ValueError(f"{scheme}:// is not known; give {places}") from None


@contextlib.contextmanager
def atomic_write(path: str | Path, mode: str = "w", **options) -> Iterator[IO]:
    """Opens a file that replaces `path` when the block ends; if the block raises, `path` is unchanged.

    mode, options: as in `open`; text is UTF-8 unless `encoding` is set. Raises OSError if the file cannot be written.
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
