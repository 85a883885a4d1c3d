"""Launch files of a plan, run with stand-ins for the programs that they call."""

import errno
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from small_plan import SMALL, write_plan

from hgpo_jax import config as configuration
from hgpo_jax.policy.mesh import abstract_mesh
from hgpo_jax.tables import __main__ as tables
from hgpo_jax.tables import launch
from hgpo_jax.tables import plan as planning
from hgpo_jax.tables.plan import Cell
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.shell import shellcheck

PAPER_CELLS = {"alfworld_1.5b/hgpo-k2/s0": 2, "alfworld_7b/gigpo-k4/s0": 4, "webshop_1.5b/hgpo-k4-alpha0/s0": 2}


def said_by(script: str, tmp_path: Path, command: str) -> list[list[str]]:
    """The arguments of every call that a script makes of a command, which here only writes them down and says 7, 8, ..."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    said, stand_in = tmp_path / "said", tmp_path / "bin" / command
    said.unlink(missing_ok=True)
    stand_in.write_text(f'#!/usr/bin/env bash\nprintf "%q " "$@" >> {said}\necho >> {said}\necho $((6 + $(wc -l < {said})))\n')
    stand_in.chmod(0o755)
    variables = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "ALFWORLD_DATA": "/d/a b", "WEBSHOP_DATA": "/d/w"}
    subprocess.run(["bash", "-c", script], env=os.environ | variables, check=True, capture_output=True)
    return [shlex.split(line) for line in said.read_text().splitlines()]


@pytest.mark.parametrize(("kind", "command"), [("slurm", "sbatch"), ("shell", "python")])
def test_files_train_a_cell_and_then_evaluate_it(kind, command, tmp_path, capsys):
    tables.main(["plan", "paper", "--launch", kind, "--to", str(tmp_path / "out")])
    plan = planning.read(planning.find("paper"))
    cells = {cell.name: cell for cell in planning.cells(plan)}
    assert len(list((tmp_path / "out").iterdir())) == len(cells)
    for name, devices in PAPER_CELLS.items():
        text, cell = (tmp_path / "out" / f"{launch.label(cells[name])}.sh").read_text(), cells[name]
        shellcheck(text)
        train, *evaluations = said_by(text, tmp_path, command)
        at = train.index("--config")
        config = configuration.load(train[at + 1], [word for word in train[at + 2 :] if "=" in word])
        data = "/d/a b" if cell.setting.startswith("alfworld") else "/d/w"
        assert config.env.data == data and config.run_dir.endswith(cell.name)
        wanted = planning.config_of(plan, cell)
        wanted = wanted.model_copy(update={"env": wanted.env.model_copy(update={"data": data}), "run_dir": config.run_dir})
        assert config == wanted and abstract_mesh(config.mesh).size == devices
        assert [words[-1] for words in evaluations] == list(plan.settings[cell.setting].splits)
        if kind == "slurm":
            assert {"--nodes=1", f"--gpus-per-node={devices}"} <= set(train) and "--resume" not in train
            waits = {"--kill-on-invalid-dep=yes", "--dependency=afterok:7", "--export=ALL,COMMAND=evaluate"}
            assert all(waits <= set(words) for words in evaluations)
        else:
            assert train[:2] == ["-m", "hgpo_jax.train"] and train[train.index("--resume") + 1] == "auto"
            assert all(words[1] == "hgpo_jax.evaluate" for words in evaluations)


@pytest.mark.parametrize(("kind", "command"), [("slurm", "sbatch"), ("shell", "python")])
def test_an_evaluation_that_is_there_is_not_repeated(kind, command, tmp_path, capsys):
    runs = tmp_path / "my runs"
    tables.main(["plan", "paper", "--launch", kind, "--to", str(tmp_path / "out"), "--runs", str(runs)])
    plan = planning.read(planning.find("paper"))
    cell = next(cell for cell in planning.cells(plan) if plan.settings[cell.setting].seeds)
    first = planning.steps(plan, cell, runs)[1]
    first.proofs[0].parent.mkdir(parents=True)
    first.proofs[0].touch()
    _, *evaluations = said_by((tmp_path / "out" / f"{launch.label(cell)}.sh").read_text(), tmp_path, command)
    assert [words[-1] for words in evaluations] == list(plan.settings[cell.setting].splits)[1:]


@pytest.mark.parametrize("kind", launch.WRITERS)
def test_launched_commands_have_the_plans_variables(kind, tmp_path, capsys):
    plan = write_plan(tmp_path, variables={"XLA_FLAGS": "--one --two=2"})
    tables.main(["plan", str(plan), "--launch", kind, "--to", str(tmp_path / "out")])
    text = next((tmp_path / "out").iterdir()).read_text()
    script = text.replace("sbatch", "true").replace("python ", "true ") + 'sh -c "echo [\\$XLA_FLAGS]"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[--one --two=2]"


def test_a_file_that_cannot_be_written_is_left_as_it_was(tmp_path, monkeypatch, capsys):
    arguments = ["plan", str(write_plan(tmp_path)), "--launch", "shell", "--to", str(tmp_path / "out")]
    tables.main(arguments)
    before = {path: path.read_text() for path in (tmp_path / "out").iterdir()}
    write_plan(tmp_path, variables={"X": "1"})

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        tables.main(arguments)
    assert {path: path.read_text() for path in (tmp_path / "out").iterdir()} == before


def test_what_cannot_be_launched_is_refused(tmp_path):
    def launch_files(**changes):
        tables.main(["plan", str(write_plan(tmp_path, **changes)), "--launch", "slurm", "--to", str(tmp_path / "out")])

    methods = {name: SMALL["methods"]["hgpo"] for name in ("hgpo-k2", "hgpo.k2")}
    table = SMALL["tables"][0] | {"methods": list(methods), "baseline": None}
    with pytest.raises(ConfigError, match=r"near/hgpo\.k2/s0: is named near-hgpo-k2-s0 on a cluster, as near/hgpo-k2/s0"):
        launch_files(methods=methods, tables=[table], published=None)
    with pytest.raises(ConfigError, match="12 devices do not fill machines of 8"):
        launch_files(fields=["mesh=data=3,fsdp=4"])
    assert not (tmp_path / "out").exists()
    for mesh, sizes in (("data=3,fsdp=8", (3, 8)), ("data=1,fsdp=4", (1, 4))):
        plan = planning.read(write_plan(tmp_path, fields=[f"mesh={mesh}"]))
        assert launch.nodes(plan, Cell("near", "hgpo", 0)) == sizes
