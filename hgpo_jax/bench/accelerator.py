"""All measurements that need an accelerator, in one command: the most valuable first, and every result is kept.

    python -m hgpo_jax.bench accelerator --minutes 9 --json accelerator.json --alfworld $ALFWORLD_DATA --tokenizer QWEN_FOLDER

Fused attention with its errors; learning and sampling with policies of 0.5 and 1.5 billion parameters in bfloat16, each
against the machine's own rates and, where torch finds it too, against transformers, with memory as the compiler plans it and as
the device counts it; one HGPO iteration of compiled ALFWorld by phase, for which two folders are needed; the whole default run
from a cold start, and its iteration by phase; answers of very different lengths; decisions of 8,192 tokens; an update whose
optimizer lies in the host's memory. Each part is a process of its own: one that fails, or for which no time is left, says so in
its row, and the others go on. --json is written after every part. --tiny tries the same with small shapes.
"""

from __future__ import annotations

import argparse
import contextlib
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
from hgpo_jax.policy.presets import QWEN2_5
from hgpo_jax.utils.errors import ConfigError
from hgpo_jax.utils.files import atomic_write

ATTENTION = "bench attention --dtype bfloat16 --rows 4 --tokens 2048 --policy"
SAMPLE = "bench sample --dtype bfloat16 --prompt 512 --new 128 --policy"
UPDATE = "bench update --dtype bfloat16 --remat full --policy"
PEER = "--against transformers"  # left out where torch does not find the accelerator
FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
ALFWORLD = (
    "bench train --config alfworld_qwen2.5_1.5b mesh=data=1 env.compiled=true data={alfworld} policy.source= "
    "policy.tokenizer={tokenizer} policy.rope_theta=1e6 rollout.prompt_limit=2048 rollout.response_limit=128 env.max_turns=3 "
    "--repeats 1 " + " ".join(f"policy.{name}={size}" for name, size in zip(FIELDS, QWEN2_5["0.5B"][1:-1], strict=True))
)
# Title and command, the most valuable first.
PARTS = {
    "attention, 1.5B": f"{ATTENTION} Qwen2.5-1.5B",
    "update, 0.5B": f"{UPDATE} Qwen2.5-0.5B --rows 64 --tokens 1024 --microbatch 16 {PEER}",
    "sampling, 0.5B": f"{SAMPLE} Qwen2.5-0.5B --batch 1 64 {PEER}",
    "update, 1.5B": f"{UPDATE} Qwen2.5-1.5B --rows 64 --tokens 1024 --microbatch 16 {PEER}",
    "iteration of ALFWorld, 0.5B": ALFWORLD,
    "iteration of the default run": "bench train",
    "default run": "train log.tensorboard=false",
    "sampling, 1.5B": f"{SAMPLE} Qwen2.5-1.5B --batch 1 64 {PEER}",
    "update, 1.5B, the paper's lengths": f"{UPDATE} Qwen2.5-1.5B --rows 16 --tokens 4608 --response 512 --microbatch 8",
    "rollout, 0.5B": "bench rollout --dtype bfloat16 --policy Qwen2.5-0.5B --episodes 64 --slots 64 --turns 4",
    "attention, 0.5B": f"{ATTENTION} Qwen2.5-0.5B",
    "update, long": f"{UPDATE} Qwen2.5-1.5B --rows 8 --tokens 8192 --microbatch 2",
    "update, offload": f"{UPDATE} Qwen2.5-1.5B --rows 16 --tokens 1024 --offload",
}
SHARE = 0.3  # of the minutes, for one part
LINES = 40  # of the output of a part that fails
SAYING_WHERE = 5  # seconds
# What --tiny adds to a command; the last value of an option counts.
ITERATION = "rollout.prompt_groups=8 rollout.group_size=2 env.max_turns=3"
TINY = {
    "train": f"iterations=2 cloning.max_steps=2 cloning.episodes=64 evaluation.episodes=16 {ITERATION}",
    "bench attention": "--policy household --rows 2 --tokens 64 --repeats 1",
    "bench sample": "--policy household --prompt 8 --new 4 --batch 2 --repeats 1",
    "bench update": "--policy household --rows 4 --tokens 16 --response 4 --microbatch 2 --repeats 1",
    "bench train --config": f"--repeats 1 {ITERATION} rollout.response_limit=4 policy.hidden_size=112",
    "bench train": f"--repeats 1 {ITERATION}",
    "bench rollout": "--policy household --episodes 4 --slots 2 --turns 2 --mean 4 --longest 8 --repeats 1",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=cli.positive, default=9.0, help="time for all parts together; default 9")
    parser.add_argument("--tiny", action="store_true", help="small shapes: to try the command, on a CPU too")
    for name, meaning in (("alfworld", "of ALFWorld's games"), ("tokenizer", "with Qwen2.5's tokenizer")):
        parser.add_argument(f"--{name}", metavar="FOLDER", help=f"folder {meaning}, for the iteration of ALFWorld")


def run(args: argparse.Namespace) -> list[dict]:
    """Returns the rows of all parts, named "part: what"; a failed part is one row."""
    if not args.tiny and python("import jax; print(jax.default_backend())") in ("cpu", ""):
        raise ConfigError("bench accelerator: jax finds no accelerator here; --tiny tries the command on a CPU")
    began, rows = time.monotonic(), list[dict]()
    for number, (title, text) in enumerate(PARTS.items(), 1):
        left = 60 * args.minutes - (time.monotonic() - began)
        if "{alfworld}" in text and not (args.alfworld and args.tokenizer):
            part_rows = [failed("needs --alfworld and --tokenizer")]
        elif left > 0:
            print(f"[{number}/{len(PARTS)}] {title}, {left:.0f} s left", file=sys.stderr, flush=True)
            part_rows = part(words(text, args), min(left, 60 * args.minutes * SHARE))
        else:
            part_rows = [failed("no time was left")]
        rows += [line | {"name": f"{title}: {line['name']}"} for line in part_rows if line["name"] != "machine"]
        if args.json:
            with atomic_write(args.json) as file:
                file.write(json.dumps(rows, indent=2) + "\n")
    return rows


def python(program: str) -> str:
    """Runs a short program in a process of its own, because this one must not hold the accelerator's memory."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stdout.strip()


@functools.cache
def peer_works() -> bool:
    """Whether torch is installed and finds the accelerator."""
    return python("from hgpo_jax.bench.policy_options import load_peer; load_peer('transformers'); print('yes')") == "yes"


def words(text: str, args: argparse.Namespace) -> list[str]:
    """Returns the words of a part's command."""
    kind = next(kind for kind in TINY if text.startswith(kind))
    command = f"{text} {TINY[kind]}" if args.tiny else text
    split = (command if PEER not in command or peer_works() else command.replace(PEER, "")).split()
    return [word.format(alfworld=args.alfworld, tokenizer=args.tokenizer) for word in split]


def part(command: list[str], seconds: float) -> list[dict]:
    """Runs one part and returns its rows; after `seconds` the part and all its children are killed."""
    # Without preallocation a peer finds memory beside jax. With Triton's products, of which XLA tries dozens for every shape, a
    # program was not compiled on an H100 after five minutes; without them all were in 2 to 18 s.
    defaults = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"}
    environment = defaults | os.environ
    with tempfile.TemporaryDirectory() as folder:
        log, result, run = (Path(folder, name) for name in ("log", "rows.json", "run"))
        where = [f"run_dir={run}", f"cache_dir={folder}/cache"] if command[0] == "train" else ["--json", str(result)]
        began = time.monotonic()
        with open(log, "w") as out:
            # -u: unbuffered, so that its last output comes last. faulthandler: a part that is stopped says where it was.
            words = [sys.executable, "-u", "-X", "faulthandler", "-m", "hgpo_jax", *command, *where]
            child = subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True, env=environment)
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
                child.send_signal(signal.SIGABRT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(SAYING_WHERE)
            finally:  # after Ctrl-C, too
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        if code != 0:
            lines = [line for line in log.read_text(errors="replace").split("\n") if line.strip()]
            print(*lines[-LINES:], sep="\n", file=sys.stderr, flush=True)
            last = lines[-1].strip()[:200] if lines else "no output"
            return [failed(f"stopped after {seconds:.0f} s" if code is None else f"exit code {code}: {last}")]
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
