"""Runs of the main command in one process, or in two that are one program."""

import json
import os
import socket
import tempfile
from pathlib import Path

from hgpo_jax.run import distributed
from tests.helpers import fork_server
from tests.helpers.xla import xla_flags

LIMIT = 400  # seconds, after which processes that wait for each other have failed


def environment(devices, **more):
    flags = xla_flags(devices, optimized=os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "0")
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(fork_server.ROOT)} | more


def alone(cwd, *arguments) -> None:
    """One process of two devices."""
    done = fork_server.run(["-m", "hgpo_jax.train", *arguments], cwd, environment(2), LIMIT)
    assert done.returncode == 0, done.stderr


def together(cwd, *arguments, code=0, meanwhile=lambda running: None) -> tuple[list[str], list[str]]:
    """Two processes of one device each; returns the standard output and the standard error of each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    program = ["-m", "hgpo_jax.train", "--distributed", *arguments]
    with tempfile.TemporaryDirectory() as scratch:
        files = [[Path(scratch, f"{name}{i}") for i in range(2)] for name in ("out", "error")]
        rank = lambda i: dict(zip(distributed.VARIABLES, (address, "2", str(i)), strict=True))  # noqa: E731
        running = [fork_server.start(program, cwd, environment(1, **rank(i)), files[0][i], files[1][i]) for i in range(2)]
        try:
            meanwhile(running)
            codes = [process.wait(LIMIT) for process in running]
        finally:
            for process in running:
                process.kill()
        said, errors = ([file.read_text() for file in both] for both in files)
    assert codes == [code, code], "\n".join(errors)
    # The library that connects the processes reports that by itself.
    return ["".join(line for line in out.splitlines(True) if not line.startswith("[Gloo]")) for out in said], errors


def metrics(folder) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if "second" not in name} for row in rows]
