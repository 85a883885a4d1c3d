"""Launch files for a plan's cells: those of configs/launch with their commands, sizes and names filled in.

All of them take data and put runs under /hgpo, as the files that they come from say; Slurm takes the folders of the plan.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import yaml

from hgpo_jax.config import CONFIGS
from hgpo_jax.policy.mesh import abstract_mesh
from hgpo_jax.tables.plan import Cell, Plan, Step, cells, config_of, quote, steps
from hgpo_jax.utils.errors import ConfigError

LAUNCH = CONFIGS / "launch"
ROOT = "/hgpo"
PER_NODE = 8  # GPUs of a machine


class _Text(yaml.SafeDumper):
    """A YAML writer for readable scripts: text of several lines is written as a block."""


_Text.add_representer(
    str, lambda d, text: d.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)


def label(cell: Cell) -> str:
    """Returns a cell's name in a form that clusters allow."""
    return re.sub(r"[^a-z0-9]+", "-", cell.name)


def nodes(plan: Plan, cell: Cell) -> tuple[int, int]:
    """Returns (machines, GPUs of each) for a cell's mesh. Raises ConfigError."""
    mesh = config_of(plan, cell).mesh
    try:
        devices = abstract_mesh(mesh).size
    except ValueError as error:
        raise ConfigError(f"{cell.name}: {error}") from None
    if devices > PER_NODE and devices % PER_NODE:
        raise ConfigError(f"{cell.name}: mesh={mesh}: {devices} devices do not fill machines of {PER_NODE}")
    return max(devices // PER_NODE, 1), min(devices, PER_NODE)


def arguments(step: Step) -> list[str]:
    """Returns the arguments without those that the launch files' own command adds, such as `--resume auto`."""
    words = list(step.arguments)
    if step.module == "train":
        at = words.index("--resume")
        del words[at : at + 2]
    return words


def everywhere(words: list[str]) -> list[str]:
    """Replaces `$ALFWORLD_DATA` by /hgpo/alfworld, because the machines do not have the variable."""
    return [re.sub(r"\$([A-Z]+)_DATA", lambda m: f"{ROOT}/{m[1].lower()}", word) for word in words]


def commands(plan: Plan, cell: Cell) -> list[str]:
    """Returns a cell's commands for several processes, one per line."""
    lines = []
    for step in steps(plan, cell, f"{ROOT}/runs", (f"cache_dir={ROOT}/cache",)):
        resume = ["--resume", "auto"] if step.module == "train" else []
        lines.append(
            shlex.join(["python", "-m", f"hgpo_jax.{step.module}", "--distributed", *resume, *everywhere(arguments(step))])
        )
    return lines


def slurm(plan: Plan, cell: Cell, runs: str) -> tuple[str, str]:
    """Builds a script that submits training, and evaluations that wait for it. Run it from the project's folder."""
    machines, gpus = nodes(plan, cell)
    sizes = f"--nodes={machines} --ntasks-per-node={gpus} --gpus-per-node={gpus}"
    lines = [
        "#!/usr/bin/env bash",
        f"# {cell.name}, from the project's folder with its virtual environment active.",
        "set -euo pipefail",
    ]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in plan.variables.items()]
    for step in steps(plan, cell, runs):
        after = "" if step.module == "train" else f'--dependency=afterok:"$train" --export=ALL,COMMAND={step.module} '
        words = " ".join(map(quote, arguments(step)))
        submit = f"sbatch --parsable --job-name={label(cell)} {sizes} {after}configs/launch/slurm.sh {words}"
        lines += [f"{step.module}=$({submit})", f'echo "${step.module}"']
    return f"{label(cell)}.sh", "\n".join(lines) + "\n"


def tpu(plan: Plan, cell: Cell, runs: str) -> tuple[str, str]:
    """Builds a script that makes the slice, trains, evaluates, and deletes the slice. Run it from the project's folder."""
    slice_ = plan.settings[cell.setting].tpu
    if plan.variables:
        raise ConfigError("variables: launch files for TPUs set none; take them out of the plan")
    if not slice_:
        raise ConfigError(f"settings.{cell.setting}.tpu: missing; give {{type: v5litepod-8, mesh: fsdp=8}}")
    lines = [
        "#!/usr/bin/env bash",
        f"# {cell.name}:  PROJECT=my-project ZONE=europe-west4-b BUCKET=my-bucket bash THIS_FILE    from the project's folder.",
        "set -euo pipefail",
        ': "${PROJECT:?give the cloud project}" "${ZONE:?give the zone}" "${BUCKET:?give the bucket}"',
        f"export TYPE={slice_.type}",
    ]
    for step in steps(plan, cell, f"{ROOT}/runs", (f"mesh={slice_.mesh}", f"cache_dir={ROOT}/cache")):
        words = shlex.join(everywhere(arguments(step)))
        lines.append(f'COMMAND={step.module} configs/launch/tpu_pod.sh {label(cell)} "$BUCKET" {words}')
    lines.append(f'gcloud compute tpus tpu-vm delete {label(cell)} --quiet --project="$PROJECT" --zone="$ZONE"')
    return f"{label(cell)}.sh", "\n".join(lines) + "\n"


def kubernetes(plan: Plan, cell: Cell, runs: str) -> tuple[str, str]:
    """Builds a service and a job; the volume is the claim `hgpo`, as in configs/launch/kubernetes.yaml."""
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    (machines, gpus), name = nodes(plan, cell), label(cell)
    service["metadata"]["name"] = job["metadata"]["name"] = name
    service["spec"]["selector"]["job-name"] = name
    spec = job["spec"]
    spec["completions"] = spec["parallelism"] = machines
    pod = spec["template"]["spec"]
    pod["subdomain"] = name
    [container] = pod["containers"]
    install = container["args"][0].partition("exec ")[0]
    container["args"] = [install + "\n".join(commands(plan, cell)) + "\n"]
    container["resources"]["limits"]["nvidia.com/gpu"] = gpus
    for entry in container["env"]:
        if entry["name"] == "JAX_COORDINATOR_ADDRESS":
            entry["value"] = f"{name}-0.{name}:12345"
        if entry["name"] == "JAX_NUM_PROCESSES":
            entry["value"] = str(machines)
    container["env"] += [{"name": variable, "value": value} for variable, value in plan.variables.items()]
    return f"{name}.yaml", yaml.dump_all([service, job], Dumper=_Text, sort_keys=False, width=1000)


def skypilot(plan: Plan, cell: Cell, runs: str) -> tuple[str, str]:
    """Builds a task for `sky launch`; the bucket is BUCKET, as in configs/launch/skypilot.yaml."""
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    machines, gpus = nodes(plan, cell)
    task |= {"name": label(cell), "num_nodes": machines}
    task["resources"]["accelerators"] = f"{task['resources']['accelerators'].partition(':')[0]}:{gpus}"
    task["envs"] = {"BUCKET": task["envs"]["BUCKET"]} | plan.variables
    task["run"] = task["run"].partition("python ")[0] + "\n".join(commands(plan, cell)) + "\n"
    return f"{label(cell)}.yaml", yaml.dump(task, Dumper=_Text, sort_keys=False, width=1000)


WRITERS = {"tpu": tpu, "slurm": slurm, "kubernetes": kubernetes, "skypilot": skypilot}


def write(plan: Plan, kind: str, to: Path, runs: str) -> list[Path]:
    """Writes one file per cell; returns their paths. Raises ConfigError."""
    labels: dict[str, str] = {}
    for cell in cells(plan):
        if (other := labels.setdefault(label(cell), cell.name)) != cell.name:
            raise ConfigError(f"{cell.name}: is named {label(cell)} on a cluster, as {other}; rename its setting or method")
    made = dict(WRITERS[kind](plan, cell, runs) for cell in cells(plan))
    to.mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        (to / name).write_text(text)
    return [to / name for name in made]
