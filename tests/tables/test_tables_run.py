"""Runs that continue where they stopped."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest
from small_plan import write_plan

from hgpo_jax.tables import __main__ as tables
from hgpo_jax.tables import advantage_errors, run
from hgpo_jax.tables import plan as planning
from hgpo_jax.utils import heartbeat
from hgpo_jax.utils.errors import ConfigError

STAND_IN = """
import os, sys
said, bad, lazy, *proofs = sys.argv[1:]
with open(said, "a") as file:
    file.write(proofs[0] + "\\n")
if bad in proofs[0]:
    sys.exit(3)
for proof in proofs:
    os.makedirs(os.path.dirname(proof), exist_ok=True)
    if lazy not in proof:
        with open(proof, "w") as file:
            file.write("{}")
print(os.environ.get("OF_THE_PLAN"))
"""


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Commands that only leave their proofs and are written down. Those with `stand_in.bad` in the first of them fail; proofs
    with `stand_in.lazy` in them are not left. `stand_in(words)` runs cells of the small plan and returns what was called."""
    said = tmp_path / "said"

    def expanded(step, environment):
        proofs = map(str, step.proofs)
        return [sys.executable, "-I", "-S", "-c", STAND_IN, str(said), call.bad, call.lazy, *proofs]

    def call(*words):
        said.unlink(missing_ok=True)
        try:
            tables.main(["run", str(tmp_path / "small.yaml"), "--runs", str(tmp_path / "runs"), *words])
        except SystemExit as ended:
            assert ended.code == 1 and (call.bad, call.lazy) != ("nothing", "nothing")
        else:
            assert (call.bad, call.lazy) == ("nothing", "nothing")
        lines = said.read_text().split() if said.exists() else []
        return [str(Path(line).relative_to(tmp_path / "runs")) for line in lines]

    call.bad, call.lazy = "nothing", "nothing"
    monkeypatch.setattr(run, "expand", expanded)
    return call


def test_a_run_goes_on_where_it_was(tmp_path, stand_in, capsys):
    write_plan(tmp_path, variables={"OF_THE_PLAN": "yes"})
    runs = tmp_path / "runs"
    stand_in.bad = "far/hgpo/s1/evaluations"
    first = stand_in()
    assert "far/hgpo/s1: evaluate ended with code 3" in capsys.readouterr().out
    assert len(first) == 8 + 2 * 8
    assert first[:2] == ["near/gigpo/s0/evaluation.json", "far/gigpo/s0/evaluation.json"]  # seed by seed, settings alternate
    assert first[3] == "near/hgpo/s0/evaluation.json"
    assert (runs / "near/hgpo/s0.log").read_text() == "yes\n"

    stand_in.bad, stand_in.lazy = "nothing", "near/hgpo/s3/transcripts"  # as a run that is killed while it ends
    (runs / "near/hgpo/s3/transcripts.txt").unlink()
    steps = planning.steps(planning.read(tmp_path / "small.yaml"), planning.Cell("near", "hgpo", 3), runs)
    assert [step.done for step in steps] == [False]
    wanted = {"far/hgpo/s1/evaluations/held_out-t1-n512-s1-2-3.json", "near/hgpo/s3/evaluation.json"}
    assert set(stand_in("--jobs", "2", "cache_dir=C")) == wanted
    said = capsys.readouterr().out
    assert "near/hgpo/s3: train left no " in said and "near/hgpo/s3: done" not in said and "far/hgpo/s1: done" in said
    stand_in.lazy = "nothing"
    assert stand_in() == ["near/hgpo/s3/evaluation.json"]
    assert stand_in() == []
    assert "16 of 16 cells are done" in capsys.readouterr().out
    assert (runs / "plan.yaml").read_text() == (tmp_path / "small.yaml").read_text()


def test_only_some_cells_are_run(tmp_path, small, stand_in, capsys):
    assert {taken.partition("/eval")[0] for taken in stand_in("near/*/s[01]", "cache_dir=C", "far/hgpo/s3")} == {
        "near/gigpo/s0", "near/gigpo/s1", "near/hgpo/s0", "near/hgpo/s1", "far/hgpo/s3",
    }  # fmt: skip
    assert "0 of 5 cells are done" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"near/gigpo/s9: no such cell; .* as near/gigpo/s0"):
        stand_in("near/hgpo/s2", "near/gigpo/s9")
    with open(tmp_path / "runs" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process runs cells here"):
            stand_in("near/hgpo/s2")
    assert not (tmp_path / "said").exists()


def test_variables_are_filled_in_or_asked_for():
    step = planning.Step("train", ("--config", "x", "data=$SOME_DATA", "seed=1"), (Path("p"),))
    assert run.expand(step, {"SOME_DATA": "/a b"})[1:] == ["-m", "hgpo_jax.train", "--config", "x", "data=/a b", "seed=1"]
    inside = planning.Step("train", ("data=$SOME_DATA/in$OTHER",), (Path("p"),))
    assert run.expand(inside, {"SOME_DATA": "/a b", "OTHER": "side"})[-1] == "data=/a b/inside"
    with pytest.raises(ConfigError, match="set the variable SOME_DATA"):
        run.expand(step, {})
    braces = planning.Step("train", ("data=${SOME_DATA}s",), (Path("p"),))
    assert run.expand(braces, {"SOME_DATA": "/a b"})[-1] == "data=/a bs"
    assert subprocess.run(
        ["bash", "-c", step.shell({"X": "1 2"}).replace("python -m", "printf %s,")], env={"SOME_DATA": "/a b"},
        capture_output=True, text=True, check=True,
    ).stdout == "hgpo_jax.train,--config,x,data=/a b,seed=1,"  # fmt: skip


def test_a_command_that_takes_long_says_what_it_does(tmp_path, monkeypatch):
    """The heartbeat names the cells that run; `bias` measures under one, too."""
    small, heard = write_plan(tmp_path), []

    def names(*_, **options):
        heard.append([one.name for one in heartbeat.current()._running])
        return ""

    monkeypatch.setattr(run, "_fault", names)
    monkeypatch.setattr(advantage_errors, "measure_all", names)
    for arguments in (["run", small, "far/hgpo/s1"], ["bias", small]):
        tables.main([*map(str, arguments), "--runs", str(tmp_path / "runs")])
    assert heard == [["far/hgpo/s1"], []]
