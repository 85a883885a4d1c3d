"""All measurements that need an accelerator, in one command: the most valuable first, and every result is kept.

    python -m hgpo_jax.bench accelerator --minutes 9 --json accelerator.json

The whole default run from a cold start; its iteration by phase; sampling and learning with policies of 0.5 and 1.5 billion
parameters in bfloat16, each against the machine's own rates and, where torch finds it too, against transformers; rollouts
with answers of very different lengths; decisions of 8,192 tokens; an update whose optimizer lies in the host's memory. Each
part is a process of its own: one that fails, or for which no time is left, says so in its row, and the others go on. --json is
written after every part. --tiny tries the same with small shapes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hgpo_jax.bench.limits import row
from hgpo_jax.config import cli
from hgpo_jax.utils.errors import ConfigError

SAMPLE = "bench sample --dtype bfloat16 --prompt 512 --new 128 --policy"
UPDATE = "bench update --dtype bfloat16 --remat full --policy"
PEER = "--against transformers"  # left out where torch does not find the accelerator
# Title and command, the most valuable first.
PARTS = {
    "default run": "train log.tensorboard=false",
    "sampling, 0.5B": f"{SAMPLE} Qwen2.5-0.5B --batch 1 8 64 {PEER}",
    "update, 0.5B": f"{UPDATE} Qwen2.5-0.5B --rows 64 --tokens 1024 --microbatch 16 {PEER}",
    "iteration of the default run": "bench train",
    "update, 1.5B": f"{UPDATE} Qwen2.5-1.5B --rows 64 --tokens 1024 --microbatch 16 {PEER}",
    "sampling, 1.5B": f"{SAMPLE} Qwen2.5-1.5B --batch 1 64 {PEER}",
    "rollout, 0.5B": "bench rollout --dtype bfloat16 --policy Qwen2.5-0.5B --episodes 64 --slots 64 --turns 4",
    "update, long": f"{UPDATE} Qwen2.5-1.5B --rows 8 --tokens 8192 --microbatch 2",
    "update, offload": f"{UPDATE} Qwen2.5-1.5B --rows 16 --tokens 1024 --offload",
}
# What --tiny adds to a command; the last value of an option counts.
ITERATION = "rollout.prompt_groups=8 rollout.group_size=2 env.max_turns=3"
TINY = {
    "train": f"iterations=2 cloning.max_steps=2 cloning.episodes=64 evaluation.episodes=16 {ITERATION}",
    "bench sample": "--policy household --prompt 8 --new 4 --batch 2 --repeats 1",
    "bench update": "--policy household --rows 4 --tokens 16 --microbatch 2 --repeats 1",
    "bench train": f"--repeats 1 {ITERATION}",
    "bench rollout": "--policy household --episodes 4 --slots 2 --turns 2 --mean 4 --longest 8 --repeats 1",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=cli.positive, default=9.0, help="time for all parts together; default 9")
    parser.add_argument("--tiny", action="store_true", help="small shapes: to try the command, on a CPU too")


def run(args: argparse.Namespace) -> list[dict]:
    """Returns the rows of all parts, named "part: what"; a failed part is one row."""
    if not args.tiny and python("import jax; print(jax.default_backend())") in ("cpu", ""):
        raise ConfigError("bench accelerator: jax finds no accelerator here; --tiny tries the command on a CPU")
    deadline, rows = time.monotonic() + 60 * args.minutes, list[dict]()
    for number, (title, text) in enumerate(PARTS.items(), 1):
        left = deadline - time.monotonic()
        if left > 0:
            print(f"[{number}/{len(PARTS)}] {title}, {left:.0f} s left", file=sys.stderr, flush=True)
            part_rows = part(words(text, tiny=args.tiny), left)
        else:
            part_rows = [failed("no time was left")]
        rows += [line | {"name": f"{title}: {line['name']}"} for line in part_rows if line["name"] != "machine"]
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
    return rows


def python(program: str) -> str:
    """Runs a short program in a process of its own, because this one must not hold the accelerator's memory."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stdout.strip()


@functools.cache
def peer_works() -> bool:
    """Whether torch is installed and finds the accelerator."""
    return python("from hgpo_jax.bench.policies import load_peer; load_peer('transformers'); print('yes')") == "yes"


def words(text: str, *, tiny: bool) -> list[str]:
    """Returns the words of a part's command."""
    kind = next(kind for kind in TINY if text.startswith(kind))
    command = f"{text} {TINY[kind]}" if tiny else text
    return (command if PEER not in command or peer_works() else command.replace(PEER, "")).split()


def part(command: list[str], seconds: float) -> list[dict]:
    """Runs one part and returns its rows; after `seconds` the part and all its children are killed."""
    with tempfile.TemporaryDirectory() as folder:
        log, result, run = (Path(folder, name) for name in ("log", "rows.json", "run"))
        where = [f"run_dir={run}", f"cache_dir={folder}/cache"] if command[0] == "train" else ["--json", str(result)]
        began = time.monotonic()
        with open(log, "w") as out:
            # -u: unbuffered, so that its last output comes last.
            words = [sys.executable, "-u", "-m", "hgpo_jax", *command, *where]
            child = subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True)
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                return [failed(f"stopped after {seconds:.0f} s: no time was left")]
            finally:  # after Ctrl-C, too
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        if code:
            lines = log.read_text(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "no output")
            return [failed(f"exit code {code}: {last.strip()[:200]}")]
        return json.loads(result.read_text()) if result.exists() else of_run(run, time.monotonic() - began)


def failed(why: str) -> dict:
    return row(why, 0.0, "not measured")


def of_run(run: Path, seconds: float) -> list[dict]:
    """Returns rows with the figures of a run's folder."""
    phases = [json.loads(line)["seconds"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    held_out = json.loads((run / "evaluation.json").read_text())["success"]
    return [
        row("whole command, nothing cached", seconds, "s"),
        *(row(f"{name}, median", statistics.median(times[name] for times in phases), "s") for name in ("rollout", "update")),
        *(row(f"held-out success, {mode}", 100 * held_out[mode], "%") for mode in ("sampled", "greedy")),
    ]
