"""The main command as a process of its own, and the smallest configuration that trains."""

import json
import os
import subprocess

from tests.helpers import fork_server
from tests.helpers.xla import xla_flags

TINY = (
    "iterations=4", "warm_start=none", "env.max_turns=4", "policy.hidden_size=16",
    "policy.intermediate_size=16", "policy.num_hidden_layers=1", "rollout.prompt_groups=2", "rollout.group_size=4",
    "learner.minibatch_size=8", "learner.final_lr=1", "log.checkpoint_every=1", "log.dump_every=2", "evaluation.episodes=12",
    "log.tensorboard=false",
)  # fmt: skip


def command(*arguments, cwd, code=0, devices=2) -> subprocess.CompletedProcess:
    """Runs Python with these arguments; a process of its own, because a job sets devices and mesh permanently."""
    flags = xla_flags(devices, optimized=os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "0")
    done = fork_server.run(arguments, cwd, os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(fork_server.ROOT)})
    assert done.returncode == code, done.stderr
    return done


def rows_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
