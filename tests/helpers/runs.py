"""Runs of the main command that are watched, stopped and killed.

child = start(folder, "run_dir=...", ...)      # as `python -m hgpo_jax.train run_dir=...` in this folder
text = run(folder, "run_dir=...", ...)         # to its end
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.helpers import fork_server
from tests.helpers.xla import programs_of_its_own, xla_flags

LIMIT = 1200.0  # seconds, after which a run hangs; a busy machine is slow
ENVIRONMENT = os.environ | {
    "XLA_FLAGS": xla_flags(2, optimized=False), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(fork_server.ROOT),
    "HF_HUB_OFFLINE": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}  # fmt: skip
ANNOUNCES_ITS_ROLLOUTS = """
def announce(sample):
    from pathlib import Path
    def announced(*given):
        Path("training").touch()
        return sample(*given)
    return announced
from hgpo_jax.trainer import loop as training
training.sample = announce(training.sample)
"""


class Run(fork_server.Child):
    """A run that was started; its output is in `log`."""

    def __init__(self, pid: int, folder: Path):
        super().__init__(pid)
        self.log, self._training = folder / "log", folder / "training"

    def trains(self) -> bool:
        """Whether the first rollout has begun."""
        return self._training.exists()

    def wait(self, seconds: float = LIMIT) -> int | None:
        return super().wait(seconds)

    def wait_for(self, condition, seconds: float = LIMIT) -> None:
        """Waits until `condition()` holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.log.read_text()
            assert self.poll() is None, self.log.read_text()
            time.sleep(0.01)


def start(folder: Path, *arguments, code: str = "", dies: bool = False) -> Run:
    """Starts a run.

    code: Python to execute in it before.
    dies: whether it is killed, maybe while it writes a compiled program.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "training").unlink(missing_ok=True)
    environment = ENVIRONMENT | (programs_of_its_own() if dies and "JAX_COMPILATION_CACHE_DIR" in os.environ else {})
    child = fork_server.start(
        ["-m", "hgpo_jax.train", *arguments], folder, environment, folder / "log", folder / "log",
        ANNOUNCES_ITS_ROLLOUTS + code,
    )  # fmt: skip
    return Run(child.pid, folder)


def run(folder: Path, *arguments, code: str = "", expect: int = 0) -> str:
    """Runs to the end; returns the output."""
    child = start(folder, *arguments, code=code, dies=expect < 0)
    status = child.wait()
    assert status == expect, f"ended with {status}:\n{child.log.read_text()}"
    return child.log.read_text()
