"""The launch files: what they would run, by stand-ins for the commands that they call."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from hgpo_jax import config as configuration
from hgpo_jax.policy.mesh import abstract_mesh
from hgpo_jax.utils.distributed import VARIABLES
from tests.helpers.shell import shellcheck

LAUNCH = Path(__file__).parents[2] / "configs" / "launch"


def check_train(command: list[str]) -> None:
    """The arguments of `python -m hgpo_jax.train` in a command: fields that exist, a mesh for two machines of eight."""
    arguments = command[command.index("hgpo_jax.train") + 1 :]
    config, mesh = (arguments[arguments.index(name) + 1] for name in ("--config", "--mesh"))
    assert abstract_mesh(mesh).size == 16
    assert "--distributed" in arguments
    assert arguments[arguments.index("--resume") + 1] == "auto"
    overrides = [word for word in arguments if "=" in word and word != mesh]
    loaded = configuration.load(config, [*overrides, f"mesh={mesh}"])
    assert loaded.run_dir and loaded.env.data


def example(name: str) -> list[str]:
    """The words of the command that a launch file gives as its example."""
    lines = (LAUNCH / name).read_text().replace("\\\n#", "").splitlines()
    return shlex.split(next(line for line in lines if f"configs/launch/{name}" in line).removeprefix("#"))


@pytest.fixture
def stand_in(tmp_path):
    """`stand_in(name, what)` puts a command on the path that writes its arguments down, a line each, and then does `what`."""

    def make(name, what=""):
        command = tmp_path / name
        command.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "$*" >> {tmp_path / "said"}\n{what}\n')
        command.chmod(0o755)

    make.file = tmp_path / "said"
    make.environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    make.said = lambda: (tmp_path / "said").read_text().splitlines()
    return make


def test_scripts_pass_shellcheck():
    for path in LAUNCH.glob("*.sh"):
        assert os.access(path, os.X_OK)
        shellcheck(path.read_text())


def test_slurm_starts_one_process_for_each_gpu(stand_in):
    stand_in("srun")
    text = (LAUNCH / "slurm.sh").read_text()
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if "#SBATCH" in line)
    assert int(options["ntasks-per-node"]) == int(options["gpus-per-node"])
    subprocess.run([LAUNCH / "slurm.sh", *example("slurm.sh")[2:]], env=stand_in.environment, check=True)
    check_train(shlex.split(stand_in.said()[0]))


@pytest.mark.parametrize(("command", "code", "requeued"), [("train", 143, True), ("train", 1, False), ("evaluate", 143, False)])
def test_slurm_queues_a_training_again_that_its_time_has_ended(stand_in, command, code, requeued):
    stand_in("srun", f'echo "cores $SRUN_CPUS_PER_TASK" >> {stand_in.file}; exit {code}')
    stand_in("scontrol")
    slurm = {"COMMAND": command, "SLURM_JOB_ID": "17", "SLURM_CPUS_PER_TASK": "6"}
    done = subprocess.run([LAUNCH / "slurm.sh", "seed=1"], env=stand_in.environment | slurm)
    srun, cores, *others = stand_in.said()
    assert srun.endswith("seed=1") and cores == "cores 6"
    assert (done.returncode, others) == ((0, ["requeue 17"]) if requeued else (code, []))


def test_over_ssh_the_variables_come_along(stand_in, tmp_path):
    stand_in("python", 'echo "$XLA_FLAGS|$HF_HOME" >> ' + str(tmp_path / "seen"))
    stand_in("ssh", 'exec env -u XLA_FLAGS -u HF_HOME bash -c "$2"')
    environment = stand_in.environment | {"HOSTS": "a", "XLA_FLAGS": "--one --two='x y'", "HF_HOME": "/h f"}
    subprocess.run([LAUNCH / "ssh.sh", "seed=1"], env=environment, cwd=tmp_path, check=True)
    assert (tmp_path / "seen").read_text() == "--one --two='x y'|/h f\n"


def test_over_ssh_each_machine_gets_its_number(stand_in, tmp_path):
    numbers = tmp_path / "numbers"
    stand_in("python", f'echo "$JAX_COORDINATOR_ADDRESS $JAX_NUM_PROCESSES $JAX_PROCESS_ID $PWD" >> {numbers}')
    stand_in("ssh", 'exec bash -c "$2"')
    hosts, _, *arguments = example("ssh.sh")
    arguments.append("env.data=/a b")
    environment = stand_in.environment | {"HOSTS": hosts.partition("=")[2]}
    subprocess.run([LAUNCH / "ssh.sh", *arguments], env=environment, cwd=tmp_path, check=True)
    assert VARIABLES == ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    assert sorted(numbers.read_text().splitlines()) == [f"gpu1:12345 2 {process} {tmp_path}" for process in range(2)]
    started = [line for line in stand_in.said() if line.startswith("-m")]
    assert len(started) == 2 and all("env.data=/a b" in line for line in started)
    connections = [shlex.split(line) for line in stand_in.said() if line.startswith("gpu")]
    assert sorted(words[0] for words in connections) == ["gpu1", "gpu2"]
    check_train(connections[0])


def test_over_ssh_a_process_that_fails_ends_all(stand_in, tmp_path):
    stand_in("ssh", '[ "$1" = good ] && exec sleep 600; exit 3')
    environment = stand_in.environment | {"HOSTS": "good bad"}
    done = subprocess.run([LAUNCH / "ssh.sh", "seed=1"], env=environment, cwd=tmp_path, timeout=60)
    assert done.returncode == 3
