"""Launch files of a plan, checked by what would read them."""

import os
import shlex
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from small_plan import SMALL, write_plan

from hgpo_jax import config as configuration
from hgpo_jax.policy.mesh import abstract_mesh
from hgpo_jax.tables import __main__ as tables
from hgpo_jax.tables import launch
from hgpo_jax.tables import plan as planning
from hgpo_jax.tables.plan import Cell
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.shell import shellcheck


def check_train(words: list[str], plan, cell: Cell, devices: int) -> None:
    """Words of a train command: this cell's configuration but for its folders and mesh, on so many devices."""
    arguments = words[words.index("--config") + 1 :]
    config = configuration.load(arguments[0], [word for word in arguments[1:] if "=" in word])
    assert abstract_mesh(config.mesh).size == devices
    same = {"run_dir": "", "cache_dir": "", "mesh": ""}
    other = planning.config_of(plan, cell)
    env = {"env": other.env.model_copy(update={"data": config.env.data})}
    assert config.model_copy(update=same) == other.model_copy(update=same | env)
    assert cell.name in config.run_dir


PAPER_CELLS = {"alfworld_1.5b/hgpo-k2/s0": 2, "alfworld_7b/gigpo-k4/s0": 4, "webshop_1.5b/hgpo-k4-alpha0/s0": 2}


def launched(kind: str, to: Path) -> list[tuple[Cell, int, str]]:
    """(cell, devices, file) of some cells of the paper's plan."""
    tables.main(["plan", "paper", "--launch", kind, "--to", str(to)])
    plan = planning.read(planning.find("paper"))
    cells = {cell.name: cell for cell in planning.cells(plan)}
    assert len(list(to.iterdir())) == len(cells)
    suffix = "sh" if kind in ("tpu", "slurm") else "yaml"
    return [(plan, cells[n], d, (to / f"{launch.label(cells[n])}.{suffix}").read_text()) for n, d in PAPER_CELLS.items()]


def said_by(script: str, tmp_path: Path, command: str, **variables) -> list[list[str]]:
    """The arguments of every call that a script makes of a command, which here only writes them down and says 7, 8, ..."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    said = tmp_path / "said"
    said.unlink(missing_ok=True)
    stand_in = tmp_path / "bin" / Path(command).name
    said_so = 'printf "%s\\n" "$(printf "%q " "COMMAND=${COMMAND:-}" "$@")"'
    stand_in.write_text(f"#!/usr/bin/env bash\n{said_so} >> {said}\necho $((6 + $(wc -l < {said})))\n")
    stand_in.chmod(0o755)
    environment = os.environ | variables | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", script.replace(command, stand_in.name)], env=environment, check=True, capture_output=True)
    return [shlex.split(line) for line in said.read_text().splitlines()]


def check_evaluations(lines: list[list[str]], plan, cell: Cell) -> None:
    """The commands after training: one evaluation of the run for each split."""
    assert [line[2] for line in lines] == ["hgpo_jax.evaluate"] * len(plan.settings[cell.setting].splits)
    assert [line[line.index("--split") + 1] for line in lines] == list(plan.settings[cell.setting].splits)
    assert lines and all(any(word.endswith(cell.name) for word in line) for line in lines)


def test_slurm_files_submit_training_and_then_evaluations(tmp_path, capsys):
    for plan, cell, devices, text in launched("slurm", tmp_path / "out"):
        shellcheck(text)
        train, *rest = said_by(text, tmp_path, "sbatch", ALFWORLD_DATA="/d/a", WEBSHOP_DATA="/d/w")
        assert f"--gpus-per-node={devices}" in train
        assert "--nodes=1" in train
        check_train(train[train.index("configs/launch/slurm.sh") :], plan, cell, devices)
        assert any(word in ("data=/d/a", "data=/d/w") for word in train)
        assert [words[-1] for words in rest] == list(plan.settings[cell.setting].splits)
        for words in rest:
            assert "--dependency=afterok:7" in words
            assert "--export=ALL,COMMAND=evaluate" in words


def test_tpu_files_train_evaluate_and_give_the_slice_back(tmp_path, capsys):
    for plan, cell, _, text in launched("tpu", tmp_path / "out"):
        shellcheck(text)
        variables = {"PROJECT": "p", "ZONE": "z", "BUCKET": "b"}
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "gcloud").write_text("#!/usr/bin/env bash\n")
        (tmp_path / "bin" / "gcloud").chmod(0o755)
        train, *rest = said_by(text, tmp_path, "configs/launch/tpu_pod.sh", **variables)
        assert train[:3] == ["COMMAND=train", launch.label(cell), "b"]
        check_train(train, plan, cell, 16 if "7b" in cell.setting else 8)
        assert [words[0] for words in rest] == ["COMMAND=evaluate"] * len(plan.settings[cell.setting].splits)
        assert text.splitlines()[-1].startswith(f"gcloud compute tpus tpu-vm delete {launch.label(cell)} --quiet")


def test_kubernetes_files_are_valid_jobs(tmp_path, capsys):
    for plan, cell, devices, text in launched("kubernetes", tmp_path / "out"):
        service, job = yaml.safe_load_all(text)
        for item in (service, job):
            kubernetes_validate.validate(item, "1.32", strict=True)
        [container] = job["spec"]["template"]["spec"]["containers"]
        shellcheck(container["args"][0])
        lines = [shlex.split(line) for line in container["args"][0].splitlines() if "--distributed" in line]
        assert lines[0][2] == "hgpo_jax.train"
        check_evaluations(lines[1:], plan, cell)
        check_train(lines[0], plan, cell, devices)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == devices
        assert job["metadata"]["name"] == service["spec"]["selector"]["job-name"] == launch.label(cell)


def test_skypilot_files_are_tasks(tmp_path, capsys):
    for plan, cell, devices, text in launched("skypilot", tmp_path / "out"):
        task = yaml.safe_load(text)
        shellcheck(task["run"])
        lines = [shlex.split(line) for line in task["run"].splitlines() if "hgpo_jax" in line]
        check_train(lines[0], plan, cell, devices)
        check_evaluations(lines[1:], plan, cell)
        assert (task["num_nodes"], task["resources"]["accelerators"]) == (1, f"H100:{devices}")
        assert len(lines) == 1 + len(plan.settings[cell.setting].splits)


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "skypilot"])
def test_launched_commands_have_the_plans_variables(kind, tmp_path, capsys):
    plan = write_plan(tmp_path, variables={"XLA_FLAGS": "--one --two=2"})
    tables.main(["plan", str(plan), "--launch", kind, "--to", str(tmp_path / "out")])
    text = next((tmp_path / "out").iterdir()).read_text()
    if kind == "slurm":
        script = text.replace("sbatch", "true") + 'sh -c "echo [\\$XLA_FLAGS]"'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[--one --two=2]"
    elif kind == "kubernetes":
        _, job = yaml.safe_load_all(text)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert {"name": "XLA_FLAGS", "value": "--one --two=2"} in container["env"]
    else:
        assert yaml.safe_load(text)["envs"]["XLA_FLAGS"] == "--one --two=2"


def test_what_cannot_be_launched_is_refused(tmp_path):
    def launch_files(kind, **changes):
        tables.main(["plan", str(write_plan(tmp_path, **changes)), "--launch", kind, "--to", str(tmp_path / "out")])

    with pytest.raises(ConfigError, match="variables: launch files for TPUs"):
        launch_files("tpu", variables={"A": "b"})
    with pytest.raises(ConfigError, match=r"settings\.near\.tpu: missing"):
        launch_files("tpu")
    methods = {name: SMALL["methods"]["hgpo"] for name in ("hgpo-k2", "hgpo.k2")}
    table = SMALL["tables"][0] | {"methods": list(methods), "baseline": None}
    with pytest.raises(ConfigError, match=r"near/hgpo\.k2/s0: is named near-hgpo-k2-s0 on a cluster, as near/hgpo-k2/s0"):
        launch_files("slurm", methods=methods, tables=[table], published=None)
    with pytest.raises(ConfigError, match="12 devices do not fill machines of 8"):
        launch_files("slurm", fields=["mesh=data=3,fsdp=4"])
    assert not (tmp_path / "out").exists()
    for mesh, sizes in (("data=3,fsdp=8", (3, 8)), ("data=1,fsdp=4", (1, 4))):
        plan = planning.read(write_plan(tmp_path, fields=[f"mesh={mesh}"]))
        assert launch.nodes(plan, Cell("near", "hgpo", 0)) == sizes
