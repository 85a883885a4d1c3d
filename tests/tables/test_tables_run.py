"""Runs that continue where they stopped."""

import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_plan import write_plan

from hgpo_jax.errors import ConfigError
from hgpo_jax.tables import __main__ as tables
from hgpo_jax.tables import plan as planning
from hgpo_jax.tables import run
from tests.helpers.training import TINY
from tests.helpers.xla import xla_flags

STAND_IN = """
import pathlib, sys
said, bad, lazy, *proofs = sys.argv[1:]
with open(said, "a") as file:
    file.write(proofs[0] + "\\n")
if bad in proofs[0]:
    sys.exit(3)
for proof in proofs:
    path = pathlib.Path(proof)
    path.parent.mkdir(parents=True, exist_ok=True)
    if lazy not in proof:
        path.write_text("{}")
"""


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Commands that only leave their proofs and are written down. Those with `stand_in.bad` in the first of them fail; proofs
    with `stand_in.lazy` in them are not left."""
    said = tmp_path / "said"

    def expanded(step):
        return [sys.executable, "-c", STAND_IN, str(said), expanded.bad, expanded.lazy, *map(str, step.proofs)]

    def taken():
        lines = said.read_text().split() if said.exists() else []
        said.unlink(missing_ok=True)
        return [str(Path(line).relative_to(tmp_path / "runs")) for line in lines]

    expanded.bad, expanded.lazy, expanded.taken = "nothing", "nothing", taken
    monkeypatch.setattr(run, "expanded", expanded)
    return expanded


def test_a_run_goes_on_where_it_was(tmp_path, small, stand_in, capsys):
    file, runs = tmp_path / "small.yaml", tmp_path / "runs"
    stand_in.bad = "far/hgpo/s1/evaluations"
    with pytest.raises(SystemExit) as ended:
        tables.main(["run", str(file), "--runs", str(runs)])
    assert ended.value.code == 1
    assert "far/hgpo/s1: evaluate ended with code 3" in capsys.readouterr().out
    first = stand_in.taken()
    assert len(first) == 8 + 2 * 8
    assert first[:2] == ["near/gigpo/s0/evaluation.json", "far/gigpo/s0/evaluation.json"]  # seed by seed, settings alternate
    assert first[3] == "near/hgpo/s0/evaluation.json"

    stand_in.bad = "nothing"
    (runs / "near/hgpo/s3/evaluation.json").unlink()
    tables.main(["run", str(file), "--runs", str(runs), "--jobs", "2", "cache_dir=C"])
    assert set(stand_in.taken()) == {"far/hgpo/s1/evaluations/held_out-t1-n512-s1-2-3.json", "near/hgpo/s3/evaluation.json"}
    tables.main(["run", str(file), "--runs", str(runs)])
    assert stand_in.taken() == []
    assert "16 of 16 cells are done" in capsys.readouterr().out
    assert (runs / "plan.yaml").read_text() == file.read_text()


def test_only_some_cells_are_run(tmp_path, small, stand_in, capsys):
    command = ["run", str(tmp_path / "small.yaml"), "--runs", str(tmp_path / "runs")]
    tables.main([*command, "near/*/s[01]", "cache_dir=C", "far/hgpo/s3"])
    assert {taken.partition("/eval")[0] for taken in stand_in.taken()} == {
        "near/gigpo/s0", "near/gigpo/s1", "near/hgpo/s0", "near/hgpo/s1", "far/hgpo/s3",
    }  # fmt: skip
    assert "0 of 5 cells are done" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"near/gigpo/s9: no such cell; .* as near/gigpo/s0"):
        tables.main([*command, "near/hgpo/s2", "near/gigpo/s9"])
    assert stand_in.taken() == []


def test_a_run_that_was_killed_while_it_ended_goes_on(tmp_path, small, stand_in, capsys):
    file, runs = str(tmp_path / "small.yaml"), tmp_path / "runs"
    tables.main(["run", file, "--runs", str(runs)])
    (runs / "near/hgpo/s1/transcripts.txt").unlink()
    cells = [planning.Cell("near", method, 1) for method in ("gigpo", "hgpo")]
    assert [step.done for cell in cells for step in planning.steps(small, cell, runs)] == [True, False]
    stand_in.taken()
    tables.main(["run", file, "--runs", str(runs)])
    assert stand_in.taken() == ["near/hgpo/s1/evaluation.json"]


def test_a_command_that_leaves_no_result_has_failed(tmp_path, small, stand_in, capsys):
    stand_in.lazy = "far/hgpo/s1/evaluations"
    with pytest.raises(SystemExit):
        tables.main(["run", str(tmp_path / "small.yaml"), "--runs", str(tmp_path / "runs")])
    said = capsys.readouterr().out
    assert "far/hgpo/s1: evaluate left no " in said and "far/hgpo/s1: done" not in said


def test_two_runs_in_one_folder_are_refused(tmp_path, small, stand_in):
    (tmp_path / "runs").mkdir()
    with open(tmp_path / "runs" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process runs cells here"):
            tables.main(["run", str(tmp_path / "small.yaml"), "--runs", str(tmp_path / "runs")])
    assert stand_in.taken() == []


def test_variables_are_filled_in_or_asked_for():
    step = planning.Step("train", ("--config", "x", "data=$SOME_DATA", "seed=1"), (Path("p"),))
    assert run.expanded(step, {"SOME_DATA": "/a b"})[1:] == ["-m", "hgpo_jax.train", "--config", "x", "data=/a b", "seed=1"]
    inside = planning.Step("train", ("data=$SOME_DATA/in$OTHER",), (Path("p"),))
    assert run.expanded(inside, {"SOME_DATA": "/a b", "OTHER": "side"})[-1] == "data=/a b/inside"
    with pytest.raises(ConfigError, match="set the variable SOME_DATA"):
        run.expanded(step, {})
    assert subprocess.run(
        ["bash", "-c", step.shell({"X": "1 2"}).replace("python -m", "printf %s,")], env={"SOME_DATA": "/a b"},
        capture_output=True, text=True, check=True,
    ).stdout == "hgpo_jax.train,--config,x,data=/a b,seed=1,"  # fmt: skip


@pytest.mark.slow
def test_a_real_cell_that_was_interrupted_is_resumed(tmp_path):
    tiny = [field for field in TINY if not field.startswith(("warm_start", "iterations"))]
    file = write_plan(tmp_path, fields=[*tiny, "iterations=3", "mesh=data=1", "warm_start=none", f"cache_dir={tmp_path}/cache"],
                      variables={"XLA_FLAGS": xla_flags(1, optimized=False)},
                      tables=[{"title": "T", "settings": ["far"], "methods": ["hgpo"], "seeds": [0]}])  # fmt: skip
    runs = tmp_path / "runs"
    tables.main(["run", str(file), "--runs", str(runs)])
    folder = runs / "far/hgpo/s0"
    before = (folder / "metrics.jsonl").read_text()
    # As a run that was killed after its second iteration leaves it.
    for proof in ("evaluation.json", "transcripts.txt", "evaluations/held_out-t1-n12-s1-2-3.json"):
        (folder / proof).unlink()
    shutil.rmtree(folder / "checkpoints" / "3")
    tables.main(["run", str(file), "--runs", str(runs)])
    assert "resumed after iteration 2" in (runs / "far/hgpo/s0.log").read_text()
    after = (folder / "metrics.jsonl").read_text()
    success = [[json.loads(line)["success"] for line in text.splitlines()] for text in (before, after)]
    assert success[0] == success[1]
    tables.main(["collect", str(runs)])
    assert json.loads((runs / "runs.json").read_text())["cells"][0]["done"]
