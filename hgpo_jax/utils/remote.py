"""Runs in buckets: `gs://bucket/run`, `s3://bucket/run` and any other place that fsspec can access.

A run is written in a working folder of this machine, which is copied to the bucket when the run begins, at checkpoints and at
its end. A manifest lists the bucket's files, and names the process that writes the run. It is replaced after the new files are
there and before the old ones go, so an upload that breaks off leaves the run as it was.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from hgpo_jax.utils.errors import ConfigError, RunError, one_line
from hgpo_jax.utils.files import CACHE_DIR, atomic_write, check_scheme, is_remote
from hgpo_jax.utils.heartbeat import phase
from hgpo_jax.utils.progress import warn

# STATE is the manifest that the working folder last agreed with, and the bucket's URL; its writer is empty unless that was a
# process of this machine.
MANIFEST, STATE, LOCK = "manifest.json", ".remote.json", ".remote.lock"
CHECKPOINTS = "checkpoints/"
EMPTY = {"writer": "", "files": {}}  # files: relative path -> size and modification time in the writer's folder


def shown(folder: Path) -> str:
    """Returns the run's place as its user knows it."""
    return _state(folder)["url"] or str(folder)


def fetch(url: str, cache_dir: str = CACHE_DIR, checkpoints: bool = True, begins: bool = False) -> Path:
    """Makes the working folder equal to the bucket, unless this machine wrote the run last, and returns it.

    What a command that only reads has written here and could not send stays.

    checkpoints: whether they are needed. begins: whether a run may begin there.

    Raises ConfigError: the place cannot be read, or is not a run's.
    """
    scheme, _, place = url.partition("://")
    folder = Path(cache_dir, "remote", scheme, *(part for part in place.split("/") if part not in ("", ".", "..")))
    with _one_line(ConfigError, url):
        check_scheme(url)
        fs, root, there = _open(url)
        if not there["writer"] and (not begins or fs.find(root)):
            raise ConfigError(f"{url}: not the folder of a run, it holds no {MANIFEST}; give another one")
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / LOCK):
            if not there["writer"] or there["writer"] != _state(folder)["writer"]:
                _download(fs, root, folder, there | {"url": url, "writer": ""}, checkpoints)
    return folder


def local(place: str, checkpoints: bool = False) -> str:
    """Returns a path on this machine for a run that a command reads. Raises ConfigError as `fetch` does."""
    return str(fetch(place, checkpoints=checkpoints)) if is_remote(place) else place


def send(path: Path, again: bool = False) -> None:
    """Uploads what is new in the working folder that holds `path`; does nothing elsewhere.

    Raises ConfigError if another process has written the run; RunError, or a warning if it is tried `again`, for a failure.
    """
    for folder in (path, *path.parents):
        if url := _state(folder)["url"]:
            try:
                with _one_line(RunError, f"{url}: cannot be written, everything is in {folder}"):
                    _upload(folder)
            except RunError as error:
                if not again:
                    raise
                warn(str(error))


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Claims the bucket of a working folder for the run that the block writes, and sends the run at the end.

    Raises ConfigError at the start if the bucket cannot be written, and as `send` at the end.
    """
    if url := _state(folder)["url"]:
        with _one_line(ConfigError, f"{url}: cannot be written"):
            _upload(folder, claim=os.urandom(16).hex())
    try:
        yield
    except BaseException:
        send(folder, again=True)  # a failure must not hide this error
        raise
    send(folder)


def _state(folder: Path) -> dict:
    try:
        return json.loads((folder / STATE).read_text())
    except (OSError, ValueError):  # none, or one that a loss of power has emptied
        return EMPTY | {"url": ""}


def _open(url: str) -> tuple:
    """Returns the bucket's file system, the folder in it, and its manifest."""
    import fsspec  # few runs are in a bucket

    folders = {"auto_mkdir": True} if url.startswith(("file://", "local://")) else {}  # object stores have no folders
    fs, root = fsspec.core.url_to_fs(url, **folders)
    fs.invalidate_cache()
    try:
        return fs, root, json.loads(fs.cat_file(f"{root}/{MANIFEST}"))
    except FileNotFoundError:
        return fs, root, EMPTY


@phase("copying the run from the bucket")
def _download(fs, root: str, folder: Path, there: dict, checkpoints: bool) -> None:
    here, state = _files(folder), _state(folder)
    for name in here.keys() - there["files"].keys():
        if not (state["writer"] or name in state["files"] or name.startswith(CHECKPOINTS)):
            continue  # what a command of this machine could not send; what a former writer could not is another history
        (folder / name).unlink()
        with contextlib.suppress(OSError):  # it holds more; Orbax would take an empty folder for a checkpoint
            os.removedirs((folder / name).parent)
    files = {name: about for name, about in there["files"].items() if checkpoints or not name.startswith(CHECKPOINTS)}
    new = [name for name, about in files.items() if here.get(name) != about]
    # So that the leftovers of a download that breaks off are known to be the bucket's.
    _write_state(folder, there | {"writer": state["writer"], "files": state["files"] | files})
    fs.get([f"{root}/{name}" for name in new], [str(folder / name) for name in new])
    for name in new:
        os.utime(folder / name, ns=(files[name][1], files[name][1]))
    _write_state(folder, there | {"files": files})


@phase("copying the run to the bucket")
def _upload(folder: Path, claim: str = "") -> None:
    """claim: the name of a process that begins to write the run."""
    with FileLock(folder / LOCK):  # another command may be reading the run into this folder
        _upload_alone(folder, claim)


def _upload_alone(folder: Path, claim: str) -> None:
    state, here = _state(folder), _files(folder)
    fs, root, there = _open(state["url"])
    if not claim and state["writer"] and state["writer"] != there["writer"]:
        raise ConfigError(f"{state['url']}: another process writes this run by now; what this one has is in {folder}")
    if claim and not there["writer"]:  # else a process that dies while it copies would leave files of no run
        fs.pipe_file(f"{root}/{MANIFEST}", json.dumps({"writer": claim, "files": {}}).encode())
    # A command that only reads sends what it has written, not its copies of what the writer may have renewed or deleted by now.
    own = {n: about for n, about in here.items() if state["files"].get(n) != about and not n.startswith(CHECKPOINTS)}
    writes = claim or state["writer"]
    changed = here if writes else own
    new = [name for name, about in changed.items() if there["files"].get(name) != about]
    gone = (state["files"].keys() - here.keys()) & there["files"].keys()  # other commands may have added more
    old = gone if writes else set()
    fs.put([str(folder / name) for name in new], [f"{root}/{name}" for name in new])
    files = {name: about for name, about in there["files"].items() if name not in old} | changed
    fs.pipe_file(f"{root}/{MANIFEST}", json.dumps({"writer": claim or there["writer"], "files": files}).encode())
    agreed = {name: about for name, about in state["files"].items() if name in here} | changed
    _write_state(folder, state | {"writer": claim or state["writer"], "files": agreed})
    for name in old:
        fs.rm_file(f"{root}/{name}")


def _files(folder: Path) -> dict[str, list[int]]:
    """Lists the complete files that do not belong to this machine alone, as in a manifest."""
    files = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if name.startswith("wandb/") and name != "wandb/id.txt":
            continue  # its own files come and go while it sends them
        if path.is_file() and not any(part in f"/{name}" for part in ("/.", ".partial", ".orbax-checkpoint-tmp")):
            files[name] = [path.stat().st_size, path.stat().st_mtime_ns]
    return files


def _write_state(folder: Path, state: dict) -> None:
    with atomic_write(folder / STATE) as file:
        json.dump(state, file)


@contextlib.contextmanager
def _one_line(kind: type[Exception], about: str) -> Iterator[None]:
    """Raises any error of a file system as one of this kind."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise kind(one_line(f"{about}: {name}{error!s:.300}")) from None
