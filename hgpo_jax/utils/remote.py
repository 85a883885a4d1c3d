"""Runs in buckets: `gs://bucket/run`, `s3://bucket/run` and any other place that fsspec can access.

A run is written and read in a working copy on this machine, `CACHE_DIR/remote/SCHEME/PLACE`, so that the lock, files that
appear complete or not at all, and checkpoints with digests are those of a local run. `fetch` makes the copy equal to the
bucket, `Upload` keeps the bucket equal to the copy while a run trains, and `send` does so once.

A checkpoint is uploaded after the rows and dumps that it relies on, and its digests after its other files, so an interrupted
upload leaves a run that can be resumed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from hgpo_jax.utils.errors import ConfigError, RunError, one_line
from hgpo_jax.utils.files import CACHE_DIR, atomic_write, check_scheme, is_remote
from hgpo_jax.utils.progress import Progress, warn

STATE, WRITER = ".remote.json", "writer.json"
LOCK = ".lock"
DIGESTS = "/state/digests.json"  # a complete checkpoint has this file (`checkpoint.py`)
EVERY = 30.0  # seconds between uploads
BLOCK = 2**22  # bytes per read


def working_copy(url: str, cache_dir: str = CACHE_DIR) -> Path:
    """Returns the place on this machine of a run in a bucket."""
    scheme, _, place = url.partition("://")
    return Path(cache_dir, "remote", scheme, *(part for part in place.split("/") if part not in ("", ".", "..")))


def url_of(folder: Path) -> str:
    """Returns the URL of the bucket whose working copy this is; empty for any other folder."""
    return _State.read(folder).url


def shown(folder: Path) -> str:
    """Returns the run's place as its user knows it."""
    return url_of(folder) or str(folder)


def fetch(url: str, cache_dir: str = CACHE_DIR, checkpoints: bool = True, begins: bool = False) -> Path:
    """Makes the working copy equal to the bucket and returns it; a copy that only has more than the last upload is not changed.

    checkpoints: whether to fetch them; a command that only reads does not need them.
    begins: whether a run may begin there.

    Raises ConfigError: the place cannot be read, or is not a run's.
    """
    with _refusals(url):
        check_scheme(url)
        if not begins and not _Bucket(url).has("config.yaml"):
            raise ConfigError(f"{url}: not the folder of a run, it holds no config.yaml")
    folder = working_copy(url, cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return folder  # a process on this machine is writing the run, so nothing is newer
    try:
        with _refusals(url):
            _download(url, folder, checkpoints)
    finally:
        lock.release()
    return folder


def local(place: str) -> str:
    """Returns a path on this machine for a run that a command reads: itself, or the working copy without checkpoints.

    Raises ConfigError: it is in a bucket and cannot be read, or is not a run.
    """
    return str(fetch(place, checkpoints=False)) if is_remote(place) else place


def send(path: Path) -> None:
    """Uploads the changes in the working copy that holds `path`; does nothing elsewhere. Raises RunError."""
    folder = next((folder for folder in (path, *path.parents) if (folder / STATE).is_file()), None)
    if folder is not None:
        state = _State.read(folder)
        try:
            _upload(folder, state)
        except Exception as error:  # any error of a file system
            raise RunError(f"{state.url}: cannot be written: {_reason(error)}; it is in {path}") from None


@dataclasses.dataclass(frozen=True)
class _State:
    """The content of the bucket when it last equalled the working copy.

    writer: the name under which this machine last wrote the run, or empty if it only read it.
    files: relative path -> size and time of the local file, and a token of the remote one, which changes with that file.
    """

    url: str = ""
    writer: str = ""
    files: dict[str, tuple[int, int, str]] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> _State:
        try:
            found = json.loads((folder / STATE).read_text())
            return cls(found["url"], found["writer"], {name: tuple(known) for name, known in found["files"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls()  # everything is transferred again

    def write(self, folder: Path) -> None:
        with atomic_write(folder / STATE) as file:
            json.dump(dataclasses.asdict(self), file)


class _Bucket:
    """A folder that fsspec can access."""

    def __init__(self, url: str):
        import fsspec

        folders = {"auto_mkdir": True} if url.startswith(("file://", "local://")) else {}  # object stores have no folders
        self.fs, root = fsspec.core.url_to_fs(url, **folders)
        self.root = root.rstrip("/")

    def place(self, name: str) -> str:
        return f"{self.root}/{name}"

    def has(self, name: str) -> bool:
        self.fs.invalidate_cache()
        return self.fs.exists(self.place(name))

    def files(self) -> dict[str, str]:
        """Returns relative path -> token of every file that counts."""
        from fsspec.utils import tokenize

        self.fs.invalidate_cache()
        try:
            found = self.fs.find(self.root, detail=True)
        except FileNotFoundError:
            return {}
        files = {name.removeprefix(self.place("")): tokenize(info) for name, info in found.items()}
        files.pop(WRITER, None)
        return _complete(files)

    def writer(self) -> str:
        """Returns the name under which the run was last written."""
        self.fs.invalidate_cache()
        try:
            return json.loads(self.fs.cat_file(self.place(WRITER)))["writer"]
        except FileNotFoundError:
            return ""

    def claim(self, writer: str) -> None:
        self.fs.pipe_file(self.place(WRITER), json.dumps({"writer": writer}).encode())


def _complete(files: dict) -> dict:
    """Leaves out checkpoints without digests, which are not complete (yet)."""
    done = {name.removesuffix(DIGESTS) for name in files if name.endswith(DIGESTS)}
    return {name: known for name, known in files.items() if not _checkpoint(name) or _checkpoint(name) in done}


def _checkpoint(name: str) -> str:
    """Returns checkpoints/N for a file of it, otherwise an empty string."""
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == "checkpoints" and len(parts) > 2 else ""


def _local_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns relative path -> size and time, without unfinished files and those that belong to this machine."""
    found = {}
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if any(part.startswith(".") or ".partial" in part or ".orbax-checkpoint-tmp" in part for part in parts):
            continue
        with contextlib.suppress(FileNotFoundError):  # removed in the meantime
            if path.is_file():
                found["/".join(parts)] = _stamp(path)
    return _complete(found)


def _stamp(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_size, about.st_mtime_ns


def _download(url: str, folder: Path, checkpoints: bool) -> None:
    bucket, state = _Bucket(url), _State.read(folder)
    if state.url != url:
        state = _State()
    if state.writer and state.writer == bucket.writer():
        return  # nobody else has written since
    there = bucket.files()
    if there and "config.yaml" not in there:
        raise ConfigError(f"{url}: is not empty and not a run; choose another folder, or remove this one")
    if not checkpoints:
        there = {name: token for name, token in there.items() if not _checkpoint(name)}
    here, files = _local_files(folder), {}
    for name in here.keys() - there.keys():
        (folder / name).unlink()
    new = [name for name, token in there.items() if state.files.get(name) != (*here.get(name, (0, 0)), token)]
    with Progress(f"download {url}", len(new), "file") as progress:
        for name in new:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path, "wb") as file, bucket.fs.open(bucket.place(name), "rb") as source:
                shutil.copyfileobj(source, file, BLOCK)
            progress.update(1, {})
    files = {name: (*_stamp(folder / name), token) for name, token in there.items()}
    _State(url, "", files).write(folder)


def _upload(folder: Path, state: _State, shows: bool = True) -> _State:
    """Uploads the changes and returns the new state. shows: whether to show progress."""
    bucket, here = _Bucket(state.url), _local_files(folder)
    new = [name for name, stamp in here.items() if state.files.get(name, (0, 0, ""))[:2] != stamp]
    old = [name for name in state.files if name not in here]
    if not new and not old:
        return state
    last = lambda name: (bool(_checkpoint(name)), name.endswith(DIGESTS), name)  # noqa: E731
    with Progress(f"upload {state.url}", len(new), "file") if shows else contextlib.nullcontext() as progress:
        for name in sorted(new, key=last):
            with contextlib.suppress(FileNotFoundError):  # removed in the meantime
                bucket.fs.put_file(str(folder / name), bucket.place(name))
            if progress:
                progress.update(1, {})
    for name in sorted(old, key=last, reverse=True):  # a checkpoint without digests does not count
        with contextlib.suppress(FileNotFoundError):
            bucket.fs.rm_file(bucket.place(name))
    there = bucket.files()
    kept = {name: known for name, known in state.files.items() if name in here and name not in new}
    state = dataclasses.replace(state, files=kept | {name: (*here[name], there[name]) for name in new if name in there})
    state.write(folder)
    return state


@contextlib.contextmanager
def _refusals(url: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # any error of a file system
        raise ConfigError(f"{url}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error!s:.300}" if not isinstance(error, ValueError) else f"{error!s:.300}")


class Upload:
    """`with Upload(folder, url):` keeps a bucket equal to the working copy of a run, every `EVERY` seconds and at the end.

    An upload that fails is tried again; only the last one has to succeed. If another process begins to write the run, this one
    receives a SIGTERM, so that it saves its state and ends.

    Raises:
      ConfigError: at the start, if the bucket cannot be written.
      RunError: at the end, for the same reason, or if another process has written the run.
    """

    def __init__(self, folder: Path, url: str):
        before = _State.read(folder)
        self._folder = folder
        self._state = _State(url, uuid.uuid4().hex, before.files if before.url == url else {})
        self._ended, self._lost = threading.Event(), False
        self._thread = threading.Thread(target=self._repeat, name="upload", daemon=True)

    def __enter__(self) -> Upload:
        with _refusals(self._state.url):
            _Bucket(self._state.url).claim(self._state.writer)
        self._state.write(self._folder)
        self._thread.start()
        return self

    def __exit__(self, kind, *_) -> None:
        self._ended.set()
        self._thread.join()
        try:
            self._push(shows=True)
        except Exception as error:
            if kind is None or not issubclass(kind, Exception):
                raise RunError(self._failed(error)) from None

    def _repeat(self) -> None:
        told = False
        while not self._ended.wait(EVERY):
            try:
                self._push()
                told = False
            except Exception as error:
                if self._lost:
                    return os.kill(os.getpid(), signal.SIGTERM)
                if not told:
                    warn(self._failed(error))
                told = True

    def _push(self, shows: bool = False) -> None:
        self._lost = self._lost or _Bucket(self._state.url).writer() != self._state.writer
        if self._lost:
            raise RunError(f"{self._state.url}: another process writes this run by now; what this one has is in {self._folder}")
        self._state = _upload(self._folder, self._state, shows)

    def _failed(self, error: Exception) -> str:
        if isinstance(error, RunError):
            return str(error)
        return f"{self._state.url}: cannot be written: {_reason(error)}; everything is in {self._folder}"
