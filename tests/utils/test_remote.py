"""Runs in buckets: an in-memory file system stands for one, folders of this machine for its working folders."""

import itertools
import os
import shutil
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from hgpo_jax.config import cli
from hgpo_jax.trainer.run_folder import find_run
from hgpo_jax.utils import remote
from hgpo_jax.utils.errors import ConfigError, RunError
from hgpo_jax.utils.files import check_scheme

BUCKETS = (f"memory://bucket{number}/runs/a" for number in itertools.count())


@pytest.fixture
def url():
    return next(BUCKETS)


@pytest.fixture
def run(url, tmp_path) -> Path:
    """The working folder of a run that has been sent with one checkpoint, on the first machine."""
    folder = remote.fetch(url, str(tmp_path / "first"), begins=True)
    written(folder, {"config.yaml": "{}", "metrics.jsonl": "{}\n", "checkpoints/1/state/arrays": "1"})
    with remote.writing(folder):
        pass
    return folder


def written(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def checkpointed(run: Path) -> None:
    """Adds a second checkpoint and removes the first."""
    written(run, {"metrics.jsonl": "{}\n{}\n", "checkpoints/2/state/arrays": "2"})
    shutil.rmtree(run / "checkpoints/1")


def texts(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def in_bucket(url: str) -> dict[str, str]:
    fs, root = fsspec.core.url_to_fs(url)
    files = {name.removeprefix(f"{root}/"): fs.cat_file(name).decode() for name in fs.find(root)}
    files.pop(remote.MANIFEST)
    return files


def failing(*_, **__):
    raise OSError("no network")


def test_a_run_on_two_machines(url, run, tmp_path):
    assert in_bucket(url) == texts(run)
    second = remote.fetch(url, str(tmp_path / "second"))
    assert second != run and texts(second) == texts(run)
    with remote.writing(second):
        checkpointed(second)
    assert remote.fetch(url, str(tmp_path / "first")) == run
    assert texts(run) == texts(second) == in_bucket(url)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["2"]  # not an empty 1
    (run / remote.STATE).write_text("")  # as a loss of power may leave it
    assert texts(remote.fetch(url, str(tmp_path / "first"))) == texts(second)


def test_only_what_is_new_is_transferred(url, run, tmp_path, monkeypatch):
    second = remote.fetch(url, str(tmp_path / "second"))
    moved = []
    for method in ("put_file", "get_file"):
        call = getattr(MemoryFileSystem, method)
        counted = lambda self, *places, call=call, **_: moved.append(places[0]) or call(self, *places)  # noqa: E731
        monkeypatch.setattr(MemoryFileSystem, method, counted)
    written(run, {"config.yaml": "[]"})  # of the same size
    remote.send(run)
    assert texts(remote.fetch(url, str(tmp_path / "second"))) == texts(run) == texts(second)
    assert [Path(name).name for name in moved] == ["config.yaml"] * 2


def test_what_is_being_written_stays_here(url, run):
    before = in_bucket(url)
    written(run, {"episodes/a.npz.partial": "", ".policy.1.partial/config.json": "", ".lock": ""})
    written(run, {"checkpoints/2.orbax-checkpoint-tmp-0/state/arrays": "", "wandb/latest/files/output.log": ""})
    remote.send(run)
    assert in_bucket(url) == before
    written(run, {"wandb/id.txt": "7"})  # by which a continued run is found there
    remote.send(run)
    assert len(in_bucket(url)) == len(before) + 1


@pytest.mark.parametrize("method", ["put_file", "pipe_file", "rm_file"])
def test_an_upload_that_breaks_off_leaves_a_whole_run(url, run, tmp_path, monkeypatch, method):
    before = texts(run)
    checkpointed(run)
    monkeypatch.setattr(MemoryFileSystem, method, failing)
    with pytest.raises(RunError, match=f"{url}: cannot be written, everything is in {run}: OSError: no network"):
        remote.send(run)
    monkeypatch.undo()
    second = remote.fetch(url, str(tmp_path / "second"))
    wanted = texts(run) if method == "rm_file" else before | {"metrics.jsonl": (second / "metrics.jsonl").read_text()}
    assert texts(second) == wanted
    remote.fetch(url, str(tmp_path / "first"))  # this machine wrote the run last, and goes on with what it has
    assert (run / "checkpoints/2/state/arrays").exists()
    remote.send(run)
    assert texts(remote.fetch(url, str(tmp_path / "second"))) == texts(run)


def test_a_run_that_breaks_off_in_its_first_upload_can_begin_again(url, tmp_path, monkeypatch):
    """Files without a manifest would be none of a run's for ever."""
    folder = remote.fetch(url, str(tmp_path / "first"), begins=True)
    written(folder, {"config.yaml": "{}", "metrics.jsonl": "{}\n"})
    put = MemoryFileSystem.put_file

    def breaks_off(self, here, there, *args, **more):
        put(self, here, there, *args, **more)
        raise OSError("killed")

    monkeypatch.setattr(MemoryFileSystem, "put_file", breaks_off)
    with pytest.raises((RunError, ConfigError), match="killed"), remote.writing(folder):
        pass
    monkeypatch.undo()
    assert in_bucket(url)
    second = remote.fetch(url, str(tmp_path / "second"), begins=True)
    assert texts(second) == {}
    written(second, {"config.yaml": "{}"})
    with remote.writing(second):
        pass
    assert texts(remote.fetch(url, str(tmp_path / "third"))) == {"config.yaml": "{}"}


def test_failures_while_a_run_is_written(url, run, monkeypatch, capsys):
    failed = f"{url}: cannot be written, everything is in {run}: OSError: no network"
    with pytest.raises(RunError, match=failed), remote.writing(run):
        monkeypatch.setattr(MemoryFileSystem, "put_file", failing)
        checkpointed(run)
        remote.send(run, again=True)
        assert capsys.readouterr().err == f"warning: {failed}\n"
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError), remote.writing(run):  # the error of the run is not hidden
        monkeypatch.setattr(MemoryFileSystem, "put_file", failing)
        written(run, {"metrics.jsonl": ""})
        raise ZeroDivisionError
    assert capsys.readouterr().err == f"warning: {failed}\n"
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt), remote.writing(run):
        written(run, {"metrics.jsonl": "{}\n" * 3})
        raise KeyboardInterrupt
    assert in_bucket(url) == texts(run)


def test_a_bucket_that_cannot_be_written_is_refused_before_the_run_begins(url, run, monkeypatch):
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", failing)
    with pytest.raises(ConfigError, match=f"{url}: cannot be written: OSError: no network"), remote.writing(run):
        pytest.fail("it began")


def test_another_writer_ends_this_one(url, run, tmp_path):
    ends = pytest.raises(ConfigError, match="another process writes this run by now; what this one has is in ")
    with ends, remote.writing(run), remote.writing(remote.fetch(url, str(tmp_path / "second"))):
        written(run, {"config.yaml": "name: c"})
        remote.send(run, again=True)
    assert in_bucket(url)["config.yaml"] == "{}"


def test_what_commands_read_and_write(url, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = Path(remote.local(url))
    assert texts(place) == {name: text for name, text in texts(run).items() if not name.startswith("checkpoints/")}
    written(place, {"evaluations/held_out.json": "{}"})
    remote.send(place / "evaluations")
    assert in_bucket(url).keys() == {*texts(run), "evaluations/held_out.json"}
    checkpointed(run)
    remote.send(run)  # the run goes on and keeps the evaluation
    assert in_bucket(url) == texts(run) | {"evaluations/held_out.json": "{}"}
    assert texts(remote.fetch(url)) == in_bucket(url)  # with checkpoints, to train on
    assert remote.local("runs/here") == "runs/here"
    remote.send(tmp_path)  # no working folder
    assert remote.shown(place) == url
    assert remote.shown(tmp_path) == str(tmp_path)


def test_who_only_reads_sends_nothing_but_its_own(url, run, tmp_path, monkeypatch):
    place = remote.fetch(url, str(tmp_path / "reader"), checkpoints=False)
    written(place, {"evaluations/held_out.json": "{}"})
    checkpointed(run)
    remote.send(run)  # what the reader has is old by now
    remote.send(place / "evaluations")
    assert in_bucket(url) == texts(run) | {"evaluations/held_out.json": "{}"}
    for checkpoints in (True, False):  # those of the first are kept, as long as they are in the bucket
        remote.fetch(url, str(tmp_path / "reader"), checkpoints=checkpoints)
    written(run, {"checkpoints/3/state/arrays": "3"})
    shutil.rmtree(run / "checkpoints/2")
    (run / "config.yaml").rename(run / "config-1.yaml")  # as a longer run sets aside the results of a shorter one
    remote.send(run)
    written(place, {"evaluations/other.json": "{}"})
    (place / "metrics.jsonl").unlink()  # as if a download had broken off
    remote.send(place)
    expected = texts(run) | {"evaluations/held_out.json": "{}", "evaluations/other.json": "{}"}
    assert in_bucket(url) == expected  # nothing of the writer's is gone, and nothing that it has deleted is back
    assert texts(remote.fetch(url, str(tmp_path / "reader"))) == expected
    remote.send(place)
    assert in_bucket(url) == expected


def test_what_a_broken_download_has_left_is_not_sent(url, run, tmp_path, monkeypatch):
    put = os.utime
    monkeypatch.setattr(os, "utime", failing)  # after the files are there
    with pytest.raises(ConfigError, match="no network"):
        remote.fetch(url, str(tmp_path / "reader"))
    monkeypatch.setattr(os, "utime", put)
    (run / "config.yaml").rename(run / "config-1.yaml")
    remote.send(run)
    remote.send(remote.fetch(url, str(tmp_path / "reader")))
    assert in_bucket(url) == texts(run)


def test_what_a_former_writer_could_not_send_is_no_part_of_the_run(url, run, tmp_path):
    written(run, {"checkpoints/9/state/arrays": "9", "episodes/9.npz": "9"})
    with remote.writing(second := remote.fetch(url, str(tmp_path / "second"))):
        checkpointed(second)
    assert texts(remote.fetch(url, str(tmp_path / "first"))) == texts(second)


def test_what_could_not_be_sent_is_still_there(url, run, tmp_path, monkeypatch):
    place = remote.fetch(url, str(tmp_path / "reader"), checkpoints=False)
    written(place, {"evaluations/passes/0.npz": "half of it"})
    checkpointed(run)
    remote.send(run)
    assert remote.fetch(url, str(tmp_path / "reader")) == place
    assert texts(place) == texts(run) | {"evaluations/passes/0.npz": "half of it"}


def test_where_a_run_is_found(url, run, tmp_path):
    cache = str(tmp_path / "other")
    with pytest.raises(ConfigError, match=f"run_dir={url}: already holds a run; give --resume {url} or"):
        find_run({"run_dir": url, "cache_dir": cache}, "never")
    for resume in ("auto", url):
        found = find_run({"run_dir": url, "cache_dir": cache}, resume)
        assert (remote.shown(found.folder), found.resuming) == (url, True)
    found = find_run({"run_dir": f"{url}2", "cache_dir": cache}, "never")
    assert (remote.shown(found.folder), found.resuming) == (f"{url}2", False)
    outside = remote.fetch("memory://../../etc/../x", str(tmp_path), begins=True)
    assert outside == tmp_path / "remote/memory/etc/x"  # inside all the same


def test_refusals(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fs, root = fsspec.core.url_to_fs(url)
    with pytest.raises(ConfigError, match=f"{url}: not the folder of a run, it holds no manifest.json"):
        remote.local(url)
    fs.pipe_file(f"{root}/photo.png", b"")
    with pytest.raises(ConfigError, match=f"{url}: not the folder of a run"):
        remote.fetch(url, str(tmp_path), begins=True)
    assert not list(tmp_path.iterdir())
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
