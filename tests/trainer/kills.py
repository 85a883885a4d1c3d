"""`kill -9` at random moments of a short run: every time it resumes, and ends as if nothing had happened.

Three of four kills fall between the first rollout of a process and its end, the others before.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np

from tests.helpers import runs

RUN = (
    "iterations=4", "env.max_turns=6", "policy.hidden_size=32", "policy.intermediate_size=64",
    "policy.num_hidden_layers=1", "rollout.prompt_groups=2", "rollout.group_size=4", "rollout.history_length=1",
    "learner.minibatch_size=8", "cloning.episodes=512", "cloning.max_steps=200", "cloning.stop_at=0.05",
    "log.checkpoint_every=1", "log.dump_every=2", "log.tensorboard=false", "evaluation.episodes=8", "evaluation.every=5",
    "run_dir=run", "--resume=auto",
)  # fmt: skip


def timeless(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if "second" not in name} for row in rows]


def arrays(path: Path) -> dict:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def assert_same_run(folder: Path, wanted: Path) -> None:
    """Equal to the bit: start, policy, evaluation, transcripts, metrics but for the times, and every dump."""
    assert timeless(folder) == timeless(wanted)
    weights = [path for part in ("start", "policy", "adapter") for path in (wanted / part).rglob("*.safetensors")]
    assert {path.relative_to(wanted).parts[0] for path in weights} >= {"start", "policy"}
    names = ["evaluation.json", "transcripts.txt", *(path.relative_to(wanted) for path in weights)]
    for name in names:
        assert (folder / name).read_bytes() == (wanted / name).read_bytes(), name
    dumps = [sorted(path.name for path in (run / "episodes").iterdir()) for run in (folder, wanted)]
    assert dumps[0] == dumps[1]
    for name in dumps[1]:
        if name.endswith(".npz"):
            ours, theirs = (arrays(run / "episodes" / name) for run in (folder, wanted))
            assert ours.keys() == theirs.keys()
            for field, array in theirs.items():
                np.testing.assert_array_equal(ours[field], array, err_msg=f"{name}: {field}")
        else:
            assert (folder / "episodes" / name).read_text() == (wanted / "episodes" / name).read_text(), name


def moment(run: Path, child: runs.Run) -> str:
    """What a killed process was doing, as far as its folder shows."""
    if not child.trains():
        return "before the first rollout"
    if (run / "policy").exists():
        return "evaluation"
    if list((run / "checkpoints").glob("*-tmp*")):
        return "checkpoint writing"
    if list((run / "episodes").glob("*.partial")):
        return "episode dump"
    return "rollout, update and the rest"


def undisturbed(folder: Path) -> tuple[float, float]:
    """Makes the run without a kill, in folder/whole/run; returns its seconds before the first rollout and after that."""
    began = time.monotonic()
    child = runs.start(folder / "whole", *RUN, f"cache_dir={folder / 'cache'}")
    child.wait_for(child.trains)
    trains = time.monotonic()
    assert child.wait() == 0, child.log.read_text()
    return trains - began, time.monotonic() - trains


def kill_again_and_again(folder: Path, seconds: tuple[float, float], kills: int) -> Counter:
    """Kills runs so often, and brings each to its end; returns how often at which moment.

    folder, seconds: of `undisturbed`.
    """
    chance, killed, number, fields = random.Random(0), Counter(), 0, (*RUN, f"cache_dir={folder / 'cache'}")
    while True:
        home, last = folder / f"{number:03d}", killed.total() == kills
        child = runs.start(home, *fields, dies=not last)
        if last:
            code = child.wait()
        elif chance.random() < 0.25:
            code = child.wait(chance.uniform(0.0, seconds[0]))
        else:
            while not child.trains() and child.wait(0.02) is None:  # only the evaluation may be left
                pass
            code = child.wait(chance.uniform(0.0, seconds[1]))
        if code is None:
            child.send_signal(signal.SIGKILL)
            code = child.wait()  # 0 where it ended in the moment before
        if code == -signal.SIGKILL:
            where = moment(home / "run", child)
            killed[where] += 1
            print(f"{killed.total()}: killed at {where}", flush=True)
            continue
        assert code == 0, child.log.read_text()
        assert_same_run(home / "run", folder / "whole" / "run")
        print(f"run {number} ended equal to the undisturbed one", flush=True)
        if last:
            return killed
        number += 1
        # On a machine that has become faster every moment would otherwise come too late.
        seconds = 0.8 * seconds[0], 0.8 * seconds[1]
