"""The launch files: each by its own validator, and what they would run by stand-ins for the commands they call."""

import os
import shlex
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from hgpo_jax import config as configuration
from hgpo_jax.policy.mesh import abstract_mesh
from hgpo_jax.utils.distributed import VARIABLES
from tests.helpers.shell import shellcheck

LAUNCH = Path(__file__).parents[1] / "configs" / "launch"
CONFIGS = LAUNCH.parent


def check_train(command: list[str], **variables) -> None:
    """The arguments of `python -m hgpo_jax.train` in a command: fields that exist, a mesh for two machines of eight."""
    command = [_expand(word, variables) for word in command]
    arguments = command[command.index("hgpo_jax.train") + 1 :]
    config = arguments[arguments.index("--config") + 1]
    mesh = arguments[arguments.index("--mesh") + 1]
    assert (CONFIGS / f"{config}.yaml").is_file()
    assert abstract_mesh(mesh).size == 16
    assert "--distributed" in arguments
    assert arguments[arguments.index("--resume") + 1] == "auto"
    overrides = [word for word in arguments if "=" in word and word != mesh]
    loaded = configuration.load(config, [*overrides, f"mesh={mesh}"])
    assert loaded.run_dir and loaded.cache_dir and loaded.env.data


def _expand(word: str, variables: dict) -> str:
    for name, value in variables.items():
        word = word.replace(f"${name}", value)
    return word


def test_scripts_pass_shellcheck():
    for path in LAUNCH.glob("*.sh"):
        assert os.access(path, os.X_OK)
        shellcheck(path.read_text())


def test_kubernetes_accepts_its_objects():
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    for item in (service, job):
        for version in ("1.28", "1.32"):
            kubernetes_validate.validate(item, version, strict=True)
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    [container] = pod["containers"]
    given = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert list(given) == list(VARIABLES)
    assert given["JAX_COORDINATOR_ADDRESS"].partition(":")[0] == f"{name}-0.{pod['subdomain']}"
    assert int(given["JAX_NUM_PROCESSES"]) == spec["completions"] == spec["parallelism"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    [script] = container["args"]
    shellcheck(script)
    check_train(shlex.split(script))


@pytest.mark.needs("skypilot")
def test_skypilot_accepts_its_task():
    import sky

    task = sky.Task.from_yaml(str(LAUNCH / "skypilot.yaml"))
    assert task.num_nodes == 2


def test_skypilots_variables_become_jaxs():
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    shellcheck(task["setup"])
    shellcheck(task["run"])
    check_train(shlex.split(task["run"]), **task["envs"])
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    script = task["run"].replace("python ", "env #")
    said = subprocess.run(
        ["bash", "-euc", script], env=os.environ | nodes | task["envs"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    wanted = dict(zip(VARIABLES, ("10.0.0.1:12345", "2", "1"), strict=True))
    assert {f"{name}={value}" for name, value in wanted.items()} <= set(said)


@pytest.fixture
def stand_in(tmp_path):
    """`stand_in(name, code)` puts a command on the path that writes its arguments down, a line each; returns the path."""
    (tmp_path / "bin").mkdir()

    def make(name, condition=""):
        command = tmp_path / "bin" / name
        command.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "$*" >> {tmp_path / "said"}\n{condition}\n')
        command.chmod(0o755)

    make.environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    make.said = lambda: (tmp_path / "said").read_text()
    return make


def test_slurm_starts_one_process_for_each_gpu(stand_in):
    stand_in("srun")
    text = (LAUNCH / "slurm.sh").read_text()
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if "#SBATCH" in line)
    assert int(options["ntasks-per-node"]) == int(options["gpus-per-node"])
    example = next(line for line in text.splitlines() if "sbatch configs/launch/slurm.sh" in line)
    arguments = shlex.split(example)[3:]
    subprocess.run([LAUNCH / "slurm.sh", *arguments], env=stand_in.environment, check=True)
    check_train([*shlex.split(stand_in.said()), "cache_dir=CACHE"])


def tpu_pod(stand_in, *arguments, **variables):
    given = {"PROJECT": "mine", "ZONE": "z", "TYPE": "v6e-16"} | variables
    return subprocess.run(
        [LAUNCH / "tpu_pod.sh", *arguments], env=stand_in.environment | given, capture_output=True, text=True, cwd=LAUNCH
    )


@pytest.mark.parametrize("exists", [False, True])
def test_a_tpu_slice_is_made_once_and_trains_on_all_machines(stand_in, exists):
    stand_in("gcloud", "" if exists else '[[ "$*" != *describe* ]]')
    fields = ["--config", "alfworld_qwen2.5_1.5b", "--mesh", "fsdp=16", "data=/hgpo/a b", "run_dir=r", "cache_dir=c"]
    done = tpu_pod(stand_in, "slice", "bucket", *fields)
    assert done.returncode == 0, done.stderr
    said = stand_in.said()
    assert ("tpu-vm create slice" in said) is not exists
    assert "--version=v2-alpha-tpuv6e" in said or exists
    assert "gcsfuse --implicit-dirs bucket /hgpo" in said
    last = said.splitlines()[-1]
    assert "--worker=all" in last
    check_train(shlex.split(last.partition("--command=")[2]))
    assert "data=/hgpo/a b" in shlex.split(last.partition("--command=")[2])


def test_a_tpu_slice_that_cannot_be_is_refused_first(stand_in):
    stand_in("gcloud")
    for arguments, variables, fragment in (
        (("slice", "bucket"), {"TYPE": "v9-8"}, "TYPE=v9-8"), (("slice",), {}, "a bucket"),
        (("slice", "bucket"), {"ZONE": ""}, "ZONE"),
    ):  # fmt: skip
        done = tpu_pod(stand_in, *arguments, **variables)
        assert done.returncode != 0
        assert fragment in done.stderr
    with pytest.raises(FileNotFoundError):
        stand_in.said()
