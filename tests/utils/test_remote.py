"""Runs in buckets: an in-memory file system stands for one, folders of this machine for its working copies."""

import itertools
import json
import signal
import time
from pathlib import Path

import fsspec
import pytest

from hgpo_jax.config import cli
from hgpo_jax.trainer import checkpoint
from hgpo_jax.trainer.folder import find_run
from hgpo_jax.utils import remote
from hgpo_jax.utils.errors import ConfigError, RunError
from hgpo_jax.utils.files import check_scheme

BUCKETS = (f"memory://bucket{number}/runs/a" for number in itertools.count())


@pytest.fixture
def url():
    return next(BUCKETS)


@pytest.fixture
def run(url, tmp_path) -> Path:
    """The working copy of a run that has begun, on the first machine."""
    folder = remote.fetch(url, str(tmp_path / "first"), begins=True)
    written(folder, {"config.yaml": "name: a", "metrics.jsonl": "{}\n", "episodes/iteration-00000.npz": "dump"})
    with_checkpoint(folder, 1)
    return folder


def written(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def with_checkpoint(folder: Path, number: int) -> None:
    files = {f"checkpoints/{number}/state/arrays": f"arrays {number}", f"checkpoints/{number}/metrics/metrics": "0.5"}
    written(folder, files | {f"checkpoints/{number}{remote.DIGESTS}": "{}"})


def texts(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def in_bucket(url: str) -> dict[str, str]:
    fs, root = fsspec.core.url_to_fs(url)
    return {name.removeprefix(f"{root}/"): fs.cat_file(name).decode() for name in fs.find(root)}


def uploaded(folder: Path, url: str) -> None:
    with remote.Upload(folder, url):
        pass


def test_a_run_on_two_machines(url, run, tmp_path):
    uploaded(run, url)
    held = in_bucket(url)
    assert json.loads(held.pop(remote.WRITER))["writer"]
    assert held == texts(run)
    second = remote.fetch(url, str(tmp_path / "second"))
    assert second != run and texts(second) == texts(run)

    (second / "checkpoints/1/state/arrays").unlink()
    (second / f"checkpoints/1{remote.DIGESTS}").unlink()
    with_checkpoint(second, 2)
    written(second, {"metrics.jsonl": "{}\n{}\n"})
    uploaded(second, url)
    first = remote.fetch(url, str(tmp_path / "first"))
    assert first == run
    assert texts(first) == {name: text for name, text in texts(second).items() if not name.startswith("checkpoints/1")}


def test_only_what_is_new_is_transferred(url, run, tmp_path, monkeypatch):
    uploaded(run, url)
    fs, _ = fsspec.core.url_to_fs(url)
    put, opened = [], []
    send, read = type(fs).put_file, type(fs).open
    monkeypatch.setattr(type(fs), "put_file", lambda self, here, there, **_: put.append(there) or send(self, here, there))
    written(run, {"metrics.jsonl": "{}\n{}\n"})
    uploaded(run, url)
    assert [name.rpartition("/")[2] for name in put] == ["metrics.jsonl"]
    second = remote.fetch(url, str(tmp_path / "second"))
    written(run, {"transcripts.txt": "won"})
    uploaded(run, url)
    monkeypatch.setattr(type(fs), "open", lambda self, path, *more, **_: opened.append(path) or read(self, path, *more))
    assert texts(remote.fetch(url, str(tmp_path / "second"))) == texts(run)
    assert [name.rpartition("/")[2] for name in opened if "writer" not in name] == ["transcripts.txt"]
    assert (second / "transcripts.txt").read_text() == "won"


def test_what_is_being_written_stays_here(url, run):
    held = texts(run)
    written(run, {"episodes/iteration-00001.npz.partial": "du", ".policy.1.partial/config.json": "{", ".lock": ""})
    written(run, {"checkpoints/2.orbax-checkpoint-tmp-0/state/arrays": "a", "checkpoints/3/state/arrays": "no digests"})
    uploaded(run, url)
    assert in_bucket(url).keys() - {remote.WRITER} == held.keys()


def test_digests_come_last_and_go_first(url, run, monkeypatch):
    uploaded(run, url)
    fs, root = fsspec.core.url_to_fs(url)
    done = []
    for method in ("put_file", "rm_file"):
        call = getattr(type(fs), method)
        monkeypatch.setattr(
            type(fs), method, lambda self, *given, call=call, **_: done.append(given[-1]) or call(self, *given)
        )
    with_checkpoint(run, 2)
    written(run, {"metrics.jsonl": "{}\n{}\n"})
    for path in sorted((run / "checkpoints/1").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    uploaded(run, url)
    names = [name.removeprefix(f"{root}/") for name in done]
    assert names[0] == "metrics.jsonl"
    assert names[3:5] == [f"checkpoints/2{remote.DIGESTS}", f"checkpoints/1{remote.DIGESTS}"]
    assert len(names) == 7


def test_an_upload_that_breaks_off_leaves_the_checkpoint_before(url, run, tmp_path, monkeypatch):
    uploaded(run, url)
    with_checkpoint(run, 2)
    fs, _ = fsspec.core.url_to_fs(url)
    put = type(fs).put_file

    def failing(self, here, there, **_):
        if there.endswith(f"2{remote.DIGESTS}"):
            raise OSError("no network")
        put(self, here, there)

    monkeypatch.setattr(type(fs), "put_file", failing)
    with pytest.raises(RunError, match=r"memory://.*: cannot be written: OSError: no network; everything is in "):
        uploaded(run, url)
    monkeypatch.undo()
    second = remote.fetch(url, str(tmp_path / "second"))
    assert {name.split("/")[1] for name in texts(second) if name.startswith("checkpoints/")} == {"1"}
    assert remote.fetch(url, str(tmp_path / "first")) == run  # this machine wrote last, and goes on with what it has
    assert (run / "checkpoints/2/state/arrays").exists()
    uploaded(run, url)
    assert f"checkpoints/2{remote.DIGESTS}" in in_bucket(url)


def test_uploads_while_it_trains_survive_a_failure(url, run, monkeypatch, capsys):
    monkeypatch.setattr(remote, "EVERY", 0.01)
    fs, _ = fsspec.core.url_to_fs(url)
    put, failures, mended = type(fs).put_file, [], []

    def put_or_fail(self, *given, **_):
        if not mended:
            failures.append(given)
            raise OSError("no network")
        put(self, *given)

    monkeypatch.setattr(type(fs), "put_file", put_or_fail)
    with remote.Upload(run, url):
        waited_for(lambda: len(failures) > 2)
        mended.append(True)
        waited_for(lambda: "metrics.jsonl" in in_bucket(url))
    assert in_bucket(url).keys() - {remote.WRITER} == texts(run).keys()
    said = capsys.readouterr().err
    assert said == f"warning: {url}: cannot be written: OSError: no network; everything is in {run}\n"


def waited_for(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_another_writer_ends_this_one(url, run, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "EVERY", 0.01)
    killed = []
    monkeypatch.setattr(remote.os, "kill", lambda _, number: killed.append(number))
    ends = pytest.raises(RunError, match=r"another process writes this run by now; what this one has is in ")
    with ends, remote.Upload(run, url):
        waited_for(lambda: "config.yaml" in in_bucket(url))
        second = remote.fetch(url, str(tmp_path / "second"))
        written(second, {"config.yaml": "name: b"})
        uploaded(second, url)
        waited_for(lambda: killed)
        written(run, {"config.yaml": "name: c"})
    assert killed == [signal.SIGTERM]
    assert in_bucket(url)["config.yaml"] == "name: b"


def test_a_failure_of_the_run_is_not_hidden_but_one_after_a_signal_is_said(url, run, monkeypatch):
    def failing(*_):
        raise OSError("no network")

    for ends, said in ((ZeroDivisionError, ZeroDivisionError), (KeyboardInterrupt, RunError)):
        with pytest.raises(said), remote.Upload(run, url):
            monkeypatch.setattr(remote, "_upload", failing)
            raise ends


def test_what_commands_read_and_write(url, run, tmp_path, monkeypatch):
    uploaded(run, url)
    monkeypatch.chdir(tmp_path)
    place = Path(remote.local(url))
    assert texts(place) == {name: text for name, text in texts(run).items() if not name.startswith("checkpoints/")}
    written(place, {"evaluations/held_out.json": "{}"})
    remote.send(place / "evaluations")
    assert {"evaluations/held_out.json", f"checkpoints/1{remote.DIGESTS}"} <= in_bucket(url).keys()
    assert texts(remote.fetch(url)).keys() == in_bucket(url).keys() - {remote.WRITER}  # with checkpoints, to train on
    assert remote.local("runs/here") == "runs/here"
    remote.send(tmp_path)  # no working copy
    assert remote.shown(place) == url
    assert remote.shown(tmp_path) == str(tmp_path)


def test_a_run_that_is_being_written_here_is_left_alone(url, run, tmp_path):
    from hgpo_jax.trainer.folder import lock

    uploaded(run, url)
    held = lock(run)
    written(run, {"metrics.jsonl": "{}\n{}\n"})
    assert remote.fetch(url, str(tmp_path / "first")) == run
    assert (run / "metrics.jsonl").read_text() == "{}\n{}\n"
    held.release()


def test_where_a_run_is_found(url, run, tmp_path):
    (run / "config.yaml").write_text("{}")
    uploaded(run, url)
    cache = str(tmp_path / "other")
    with pytest.raises(ConfigError, match=f"run_dir={url}: already holds a run; give --resume {url} or"):
        find_run({"run_dir": url, "cache_dir": cache}, "never")
    for resume in ("auto", url):
        found = find_run({"run_dir": url, "cache_dir": cache}, resume)
        assert (found.folder, found.resuming) == (remote.working_copy(url, cache), True)
    found = find_run({"run_dir": f"{url}2", "cache_dir": cache}, "never")
    assert (found.resuming, remote.url_of(found.folder)) == (False, f"{url}2")


def test_refusals(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fs, root = fsspec.core.url_to_fs(url)
    with pytest.raises(ConfigError, match=f"{url}: not the folder of a run, it holds no config.yaml"):
        remote.local(url)
    assert not list(tmp_path.iterdir())
    fs.pipe_file(f"{root}/photo.png", b"")
    with pytest.raises(ConfigError, match=f"{url}: is not empty and not a run"):
        remote.fetch(url, str(tmp_path), begins=True)
    with pytest.raises(ConfigError, match="nothing://x: nothing:// is not known; give a folder of this machine, gs://"):
        remote.fetch("nothing://x", str(tmp_path))
    with pytest.raises(cli.argparse.ArgumentTypeError, match="gs://bucket: must be a place of this machine"):
        cli.local_path("gs://bucket")


def test_a_package_that_is_missing_is_named(monkeypatch):
    def missing(_):
        raise ImportError("gone")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    for scheme, extra in (("gs", "gcs"), ("s3", "s3")):
        with pytest.raises(ValueError, match=rf"needs a package more: pip install 'hgpo_jax\[{extra}\]'"):
            check_scheme(f"{scheme}://bucket")


def test_names_and_places(tmp_path):
    assert f"/{checkpoint.ITEM}/{checkpoint.DIGESTS}" == remote.DIGESTS
    assert remote.working_copy("file:///../../etc/../x", str(tmp_path)) == tmp_path / "remote/file/etc/x"  # not outside of it
