"""Checkpoints: every damaged file is noticed and the one before is taken, and those that should stay do."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from hgpo_jax.config import LogConfig
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.trainer.checkpoint import ITEM, Checkpoints, damage, newest_intact
from hgpo_jax.utils.errors import RunError
from tests.helpers.refusals import refused

STATE = {"params": {"w": jax.random.normal(jax.random.key(0), (20_000,))}, "count": jnp.int32(3)}


def write(folder, steps, success=None, **settings):
    checkpoints = Checkpoints(folder, LogConfig(**settings))
    for step in steps:
        checkpoints.save(step, jax.tree.map(lambda a, step=step: a + step, STATE), (success or {}).get(step))
    checkpoints.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "checkpoints"
    write(folder, [1, 2, 3], keep_checkpoints=3)
    return folder


def restored(folder, step, like=STATE):
    checkpoints = Checkpoints(folder, LogConfig(keep_checkpoints=9))
    try:
        return checkpoints.restore(step, like)
    finally:
        checkpoints.close()


def assert_is(state, step):
    np.testing.assert_array_equal(state["params"]["w"], STATE["params"]["w"] + step)
    assert state["count"] == 3 + step


def files(checkpoint):
    return sorted(path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file())


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture
def folder(written, tmp_path):
    """A copy of the three checkpoints."""
    return shutil.copytree(written, tmp_path / "checkpoints")


@pytest.mark.parametrize("harm", [flip, truncate, lambda path: path.unlink()], ids=["flipped", "truncated", "missing"])
def test_no_harm_to_any_file_changes_what_is_restored(written, tmp_path, harm):
    """Either it is noticed, or Orbax does not need the file; the largest ones hold the numbers and are needed."""
    noticed = []
    for number, name in enumerate(files(written / "3")):
        folder = shutil.copytree(written, tmp_path / str(number), ignore=shutil.ignore_patterns("1"))
        harm(folder / "3" / name)
        step, wrong = newest_intact(folder)
        if wrong:
            noticed.append(name)
            assert step == 2
            assert f"checkpoint {folder / '3'} is damaged" in wrong[0] and "\n" not in wrong[0]
        else:
            assert step == 3
            assert_is(restored(folder, 3), 3)
    unneeded = {name.name for name in set(files(written / "3")) - set(noticed)}
    assert unneeded <= {"commit_success.txt", "_CHECKPOINT_METADATA", "metrics"}


def test_the_last_good_one_is_restored_and_the_run_goes_on_from_there(folder):
    for _ in range(2):  # what is damaged twice is put aside twice
        for step in ("2", "3"):
            flip(max((folder / step / ITEM).rglob("*"), key=lambda path: path.stat().st_size))
        assert newest_intact(folder)[0] == 1
        assert_is(restored(folder, 1), 1)
        write(folder, [2, 3], keep_checkpoints=9)
        assert newest_intact(folder) == (3, [])
        assert {path.name for path in folder.iterdir()} == {"1", "2", "3", "2.damaged", "3.damaged"}


def test_without_a_good_one_there_is_nothing(folder, tmp_path):
    assert newest_intact(tmp_path / "none") == (None, [])
    for step in "123":
        truncate(folder / step / ITEM / "digests.json")
    step, wrong = newest_intact(folder)
    assert step is None
    assert len(wrong) == 3


def test_what_was_interrupted_while_it_was_written_does_not_count(folder):
    (folder / "3").rename(folder / "4.orbax-checkpoint-tmp")
    assert newest_intact(folder) == (2, [])
    write(folder, [3], keep_checkpoints=9)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "3"]


def kept(folder):
    return sorted(int(path.name) for path in folder.iterdir())


def test_what_is_kept(tmp_path):
    write(tmp_path / "last", range(1, 4), keep_checkpoints=2)
    assert kept(tmp_path / "last") == [2, 3]
    write(tmp_path / "best", range(1, 6), {1: 0.5, 2: 0.9, 3: 0.7}, keep_checkpoints=1, keep_best=2)
    assert kept(tmp_path / "best") == [2, 3, 5]
    # What was best is known again after a resumption.
    write(tmp_path / "best", [6, 7], {6: 0.8}, keep_checkpoints=1, keep_best=2)
    assert kept(tmp_path / "best") == [2, 6, 7]


def test_one_that_was_saved_before_its_validation_can_still_be_the_best(tmp_path):
    """A run that is interrupted in a validation is saved without its success, and validates again."""
    keep = {"keep_checkpoints": 1, "keep_best": 1}
    write(tmp_path / "c", [1], keep_checkpoints=1)
    before = (tmp_path / "c" / "1" / ITEM / "digests.json").stat().st_mtime_ns
    write(tmp_path / "c", [1, 2, 3], {1: 0.9, 2: 0.5}, **keep)
    assert kept(tmp_path / "c") == [1, 3]
    assert_is(restored(tmp_path / "c", 1), 1)
    assert Checkpoints(tmp_path / "c", LogConfig(**keep), read_only=True).best() == 1
    # It was the only one there was, and is not written again, which might fail.
    assert (tmp_path / "c" / "1" / ITEM / "digests.json").stat().st_mtime_ns == before


def test_those_from_before_the_best_were_kept_go(tmp_path):
    write(tmp_path / "c", [1, 2], keep_checkpoints=2)
    assert Checkpoints(tmp_path / "c", LogConfig(keep_checkpoints=2), read_only=True).best() is None
    write(tmp_path / "c", [3, 4, 5, 6], {4: 0.5}, keep_checkpoints=2, keep_best=1)
    assert kept(tmp_path / "c") == [4, 5, 6]


def test_who_only_reads_leaves_what_is_being_written(folder):
    partial = folder / "4.orbax-checkpoint-tmp"
    partial.mkdir()
    reader = Checkpoints(folder, LogConfig(keep_checkpoints=1), read_only=True)
    assert_is(reader.restore(3, STATE), 3)
    reader.close()
    assert partial.is_dir() and newest_intact(folder) == (3, [])


def test_it_is_restored_to_where_the_run_has_its_arrays(written):
    mesh = make_mesh("data=8")
    split = NamedSharding(mesh, PartitionSpec("data"))
    like = {"params": {"w": jax.device_put(STATE["params"]["w"], split)},
            "count": jax.device_put(STATE["count"], NamedSharding(mesh, PartitionSpec()))}  # fmt: skip
    state = restored(written, 2, like)
    assert_is(state, 2)
    assert jax.tree.map(lambda a: a.sharding, state) == jax.tree.map(lambda a: a.sharding, like)


def test_the_digests_are_on_the_disk_before_the_checkpoint_counts(tmp_path, monkeypatch):
    """A machine that loses its power may keep the new name of a folder and lose what was not flushed."""
    flushed, counts, fsync = [], [], os.fsync

    def watched(file):
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)
        flushed.append(os.path.basename(path))
        counts.append((tmp_path / "checkpoints" / "1").exists())
        return fsync(file)

    monkeypatch.setattr(os, "fsync", watched)
    write(tmp_path / "checkpoints", [1])
    assert "digests.json" in flushed
    assert not counts[flushed.index("digests.json")]


def test_another_shape_is_refused_in_one_line(written):
    with refused("does not fit this run", RunError):
        restored(written, 3, {"params": {"w": jnp.zeros(7)}, "count": jnp.int32(0)})
    assert damage(written / "3") is None


def test_a_checkpoint_that_cannot_be_written_ends_in_one_line(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", LogConfig())
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("in the way")
    with refused("cannot be written", RunError):
        checkpoints.save(1, STATE)
        checkpoints.close()
