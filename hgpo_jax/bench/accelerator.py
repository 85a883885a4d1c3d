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
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from hgpo_jax.bench.limits import row
from hgpo_jax.utils.errors import ConfigError

BENCH, TRAIN = "hgpo_jax.bench", "hgpo_jax.train"
BF16 = ["--dtype", "bfloat16", "--mesh", "data=1"]
SAMPLE = ["sample", *BF16, "--prompt", "512", "--new", "128"]
UPDATE = ["update", *BF16, "--remat", "full"]
HALF, ONE_AND_A_HALF = ["--policy", "Qwen2.5-0.5B"], ["--policy", "Qwen2.5-1.5B"]
# (title, module, arguments, whether transformers can do the same), the most valuable first.
PARTS = (
    ("default run", TRAIN, ["log.tensorboard=false"], False),
    ("sampling, 0.5B", BENCH, [*SAMPLE, *HALF, "--batch", "1", "8", "64"], True),
    ("update, 0.5B", BENCH, [*UPDATE, *HALF, "--rows", "64", "--tokens", "1024", "--microbatch", "16"], True),
    ("iteration of the default run", BENCH, ["train"], True),
    ("update, 1.5B", BENCH, [*UPDATE, *ONE_AND_A_HALF, "--rows", "64", "--tokens", "1024", "--microbatch", "16"], True),
    ("sampling, 1.5B", BENCH, [*SAMPLE, *ONE_AND_A_HALF, "--batch", "1", "64"], True),
    ("rollout, 0.5B", BENCH, ["rollout", *BF16, *HALF, "--episodes", "64", "--slots", "64", "--turns", "4"], False),
    ("update, long", BENCH, [*UPDATE, *ONE_AND_A_HALF, "--rows", "8", "--tokens", "8192", "--microbatch", "2"], False),
    ("update, offload", BENCH, [*UPDATE, *ONE_AND_A_HALF, "--rows", "16", "--tokens", "1024", "--offload"], False),
)
# Arguments that --tiny adds; the last value of an option counts.
TINY = {
    "sample": ["--policy", "household", "--prompt", "8", "--new", "4", "--batch", "2", "--repeats", "1"],
    "rollout": [
        "--policy",
        "household",
        "--episodes",
        "4",
        "--slots",
        "2",
        "--turns",
        "2",
        "--mean",
        "4",
        "--longest",
        "8",
        "--shortest-prompt",
        "10",
        "--longest-prompt",
        "20",
        "--repeats",
        "1",
    ],
    "update": ["--policy", "household", "--rows", "4", "--tokens", "16", "--microbatch", "2", "--repeats", "1"],
    "train": ["--repeats", "1", "rollout.prompt_groups=8", "rollout.group_size=2", "env.max_turns=3"],
}
TINY_JOB = ["iterations=2", "cloning.max_steps=2", "cloning.episodes=64", "evaluation.episodes=16", *TINY["train"][2:]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=minutes, default=9.0, help="time for all parts together; default 9")
    parser.add_argument("--tiny", action="store_true", help="small shapes: to try the command, on a CPU too")


def minutes(text: str) -> float:
    """Reads the option's value. Raises ValueError or ArgumentTypeError, which argparse reports in one line."""
    if not 0 < float(text) <= 1e4:
        raise argparse.ArgumentTypeError(f"{text:.50}: must be a number above 0, at most 10000")
    return float(text)


def run(args: argparse.Namespace) -> list[dict]:
    """Returns rows of name ("part: what"), value, unit, limit_share and ratio from the parts; a failed part is one row."""
    if not args.tiny and _backend() == "cpu":
        raise ConfigError("bench accelerator: jax finds no accelerator here; --tiny tries the command on a CPU")
    deadline, rows = time.monotonic() + 60 * args.minutes, list[dict]()
    for number, (title, module, arguments, has_peer) in enumerate(PARTS, 1):
        began = time.monotonic()
        left = deadline - began
        if left <= 0:
            found = [_failed(title, "no time was left")]
        else:
            print(f"[{number}/{len(PARTS)}] {title}, {left:.0f} s left", file=sys.stderr, flush=True)
            found = _part(title, module, _arguments(module, arguments, has_peer, tiny=args.tiny), left)
        rows += found
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
    return rows


def _backend() -> str:
    """Asks for jax's platform in a separate process: this one must not hold the accelerator's memory."""
    command = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "cpu"


def _arguments(module: str, arguments: list[str], has_peer: bool, *, tiny: bool) -> list[str]:
    small = (TINY_JOB if module == TRAIN else TINY[arguments[0]]) if tiny else []
    return [*arguments, *small, *(["--against", "transformers"] if has_peer and _peer_works() else [])]


@functools.cache
def _peer_works() -> bool:
    """Whether torch is installed and finds the accelerator, checked in a separate process, too."""
    command = [sys.executable, "-c", "from hgpo_jax.bench.policies import load_peer; load_peer('transformers')"]
    return importlib.util.find_spec("torch") is not None and not subprocess.run(command, capture_output=True).returncode


def _part(title: str, module: str, arguments: list[str], seconds: float) -> list[dict]:
    """Runs one part and returns its rows; after `seconds` the part and all its children are killed."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "rows.json")
        cold = [f"run_dir={folder}/run", f"cache_dir={folder}/cache"]
        where = cold if module == TRAIN else ["--json", str(result)]
        log = Path(folder, "log")
        began = time.monotonic()
        with open(log, "w") as out:
            child = subprocess.Popen(
                # -u: unbuffered, so that its last output comes last.
                [sys.executable, "-u", "-m", module, *arguments, *where],
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                return [_failed(title, f"stopped after {seconds:.0f} s: no time was left")]
            finally:  # after Ctrl-C, too
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        took = time.monotonic() - began
        if code:
            lines = log.read_text(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "nothing was printed")
            return [_failed(title, f"exit code {code}: {last.strip()[:200]}")]
        found = _main_job(Path(folder, "run"), took) if module == TRAIN else json.loads(result.read_text())
    return [line | {"name": f"{title}: {line['name']}"} for line in found if line["name"] != "machine"]


def _main_job(run: Path, seconds: float) -> list[dict]:
    """Returns rows with the figures of a run's folder."""
    iterations = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held_out = json.loads((run / "evaluation.json").read_text())["success"]
    median = lambda phase: float(np.median([line["seconds"][phase] for line in iterations]))  # noqa: E731
    return [
        row("whole command, nothing cached", seconds, "s"),
        row(f"rollout, median of {len(iterations)} iterations", median("rollout"), "s"),
        row("update, likewise", median("update"), "s"),
        row("held-out success, sampled", 100 * held_out["sampled"], "%"),
        row("held-out success, greedy", 100 * held_out["greedy"], "%"),
    ]


def _failed(title: str, why: str) -> dict:
    return row(f"{title}: {why}", 0.0, "not measured")
