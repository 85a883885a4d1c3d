"""Launch files for a plan's cells: a script for each, which takes the plan's folders and runs from the project's folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from hgpo_jax.policy.mesh import abstract_mesh
from hgpo_jax.tables.plan import Cell, Plan, Step, cells, config_of, quote, steps
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.files import atomic_write

PER_NODE = 8  # GPUs of a machine


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


def shell(plan: Plan, cell: Cell, runs: str) -> list[str]:
    """Returns the commands that train and evaluate on this machine."""
    return [_unless_done(step, step.shell({})) for step in steps(plan, cell, runs)]


def _unless_done(step: Step, command: str) -> str:
    """Returns a command that does nothing where an evaluation's result is there; a training finds out by itself."""
    if step.module == "train":
        return command
    there = " && ".join(f"[ -f {quote(str(file))} ]" for file in step.proofs)
    return f"{there} || {command}" if len(step.proofs) == 1 else f"{{ {there}; }} || {command}"


def slurm(plan: Plan, cell: Cell, runs: str) -> list[str]:
    """Returns the commands that submit training, and evaluations that wait for it."""
    machines, gpus = nodes(plan, cell)
    config = config_of(plan, cell)
    if config.rollout.mesh or (config.env.name == "agent" and machines * gpus > 1):
        given = f"rollout.mesh={config.rollout.mesh}" if config.rollout.mesh else "env.name=agent"
        raise ConfigError(f"{cell.name}: {given} works in a single process; give --launch shell")
    submit = f"sbatch --parsable --job-name={label(cell)} --nodes={machines} --ntasks-per-node={gpus} --gpus-per-node={gpus}"
    lines = []
    for step in steps(plan, cell, runs):
        after, words = "", list(step.arguments)
        if step.module == "train":
            at = words.index("--resume")  # which slurm.sh adds
            del words[at : at + 2]
        else:
            after = f'--dependency=afterok:"$train" --kill-on-invalid-dep=yes --export=ALL,COMMAND={step.module} '
        job = f"{step.module}=$({submit} {after}configs/launch/slurm.sh {' '.join(map(quote, words))})"
        lines.append(_unless_done(step, f'{{ {job}; echo "${step.module}"; }}'))
    return lines


WRITERS = {"shell": shell, "slurm": slurm}


def write(plan: Plan, kind: str, to: Path, runs: str) -> list[Path]:
    """Writes one file per cell; returns their paths. Raises ConfigError."""
    head = "#!/usr/bin/env bash\n# {}, from the project's folder with its virtual environment active.\nset -euo pipefail\n"
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in plan.variables.items())
    scripts: dict[str, str] = {}
    labels: dict[str, str] = {}
    for cell in cells(plan):
        if (other := labels.setdefault(label(cell), cell.name)) != cell.name:
            raise ConfigError(f"{cell.name}: is named {label(cell)} on a cluster, as {other}; rename its setting or method")
        commands = "\n".join(WRITERS[kind](plan, cell, runs))
        scripts[f"{label(cell)}.sh"] = f"{head.format(cell.name)}{exports}{commands}\n"
    to.mkdir(parents=True, exist_ok=True)
    for name, text in scripts.items():
        with atomic_write(to / name) as file:
            file.write(text)
    return [to / name for name in scripts]
