"""Runs of the main command that start in a moment: a process that has imported everything forks one for each.

    with Zygote() as zygote:
        child = zygote.start(folder, "run_dir=...", ...)      # as `python -m hgpo_jax.train run_dir=...`, output in folder

Forked before jax has a back end, so that each run sets up its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers.xla import xla_flags

LIMIT = 1200.0  # seconds, after which a run hangs; a busy machine is slow
ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "XLA_FLAGS": xla_flags(2, optimized=False), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}  # fmt: skip


class Child:
    """A run that was started."""

    def __init__(self, zygote: Zygote, pid: int, log: Path, training: Path):
        self._zygote, self.pid, self.log, self._training = zygote, pid, log, training

    def trains(self) -> bool:
        """Whether the first rollout has begun."""
        return self._training.exists()

    def wait(self, seconds: float = LIMIT) -> int | None:
        """The exit code, negative for a signal; None if it still runs after that many seconds."""
        return self._zygote.ask("wait", self.pid, seconds)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait_for(self, condition, seconds: float = LIMIT) -> None:
        """Waits until `condition()` holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.log.read_text()
            assert self.wait(0.0) is None, self.log.read_text()
            time.sleep(0.01)


class Zygote:
    def __enter__(self) -> Zygote:
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_) -> None:
        self._process.stdin.close()
        self._process.wait(60)

    def ask(self, *request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, folder: Path, *arguments, code: str = "") -> Child:
        """Starts a run with output in folder/log and its rollouts announced by folder/training.

        code: Python to execute in it before.
        """
        folder.mkdir(parents=True, exist_ok=True)
        log, training = folder / "log", folder / "training"
        training.unlink(missing_ok=True)
        pid = self.ask("start", str(folder), str(log), str(training), list(map(str, arguments)), code)
        return Child(self, pid, log, training)

    def run(self, folder: Path, *arguments, code: str = "", expect: int = 0) -> str:
        """Runs to the end; returns the output."""
        child = self.start(folder, *arguments, code=code)
        status = child.wait()
        assert status == expect, f"ended with {status}:\n{child.log.read_text()}"
        return child.log.read_text()


def _begin(folder: str, log: str, announcement: str, arguments: list[str], code: str) -> None:
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(output, number)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["train", *arguments]
    sample = training.sample

    def announced(*given):
        Path(announcement).touch()
        return sample(*given)

    training.sample = announced
    exec(code, {})
    cli.run(train.main)


def _serve() -> None:
    children = {}
    for line in sys.stdin:
        name, *request = json.loads(line)
        if name == "start":
            answer = os.fork()
            if answer == 0:
                return _begin(*request)
            children[answer] = None
        else:
            answer = _wait(children, *request)
        print(json.dumps(answer), flush=True)
    for pid, code in children.items():
        if code is None:
            os.kill(pid, signal.SIGKILL)


def _wait(children: dict, pid: int, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while children[pid] is None:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            children[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() >= end:
            return None
        else:
            time.sleep(0.01)
    return children[pid]


if __name__ == "__main__":
    from hgpo_jax import cli, train, training

    _serve()
