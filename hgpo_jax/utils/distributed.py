"""Several processes, usually one per machine, as one program: JAX's own multi-process runtime (`--distributed`).

On TPU pods, under Slurm and Open MPI jax finds out which process is which. Elsewhere three variables must be set in every
process:

    JAX_COORDINATOR_ADDRESS=host-of-process-0:1234  JAX_NUM_PROCESSES=2  JAX_PROCESS_ID=0

All processes run the same command. Process 0 writes and prints; all of them see the folders run_dir and cache_dir.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from hgpo_jax.utils.errors import ConfigError, RunError

KINDS = (ConfigError, RunError, OSError, ValueError)  # errors that processes send to each other; a ConfigError is a ValueError
SHARED = ".shared"  # the file by which processes find out whether they see one folder
WAIT = 60.0  # seconds for which a network file system may still show what it read before
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join(environment=os.environ) -> None:
    """Joins the other processes, before anything else uses jax.

    Raises:
      ConfigError: variables are missing or inconsistent, or the other processes do not answer.
    """
    arguments = _initialize_arguments(environment)
    try:
        jax.distributed.initialize(**arguments, shutdown_timeout_seconds=60)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--distributed: {' '.join(str(error).split())}") from None


def mute_other_processes() -> None:
    """Discards the standard output of all processes but process 0; their standard error stays."""
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process


def _initialize_arguments(environment) -> dict:
    """Returns the variables as arguments of `jax.distributed.initialize`; none if the cluster provides them."""
    variables = [name for name in VARIABLES if environment.get(name)]
    if not variables:
        return {}
    address, *numbers = (environment.get(name, "") for name in VARIABLES)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{VARIABLES[0]}={address}: expected host:port of the first process, as in 10.0.0.1:1234")
    for name, number in zip(VARIABLES[1:], numbers, strict=True):
        if not number.isdecimal():
            raise ConfigError(f"{name}={number}: expected a whole number together with {variables[0]}")
    count, index = map(int, numbers)
    if index >= count:
        raise ConfigError(f"{VARIABLES[2]}={index}: processes are numbered 0 to {VARIABLES[1]} - 1 = {count - 1}")
    # Without the last argument jax still asks the cluster for the devices to use, which may need more packages.
    return {
        "coordinator_address": address,
        "num_processes": count,
        "process_id": index,
        "cluster_detection_method": "deactivate",
    }


def broadcast_from_process_0(call: Callable):
    """Returns the result of `call()` in process 0 to all processes, so that they cannot read different content from a file.

    Args:
      call: returns a value that JSON can hold.

    If `call` raises in process 0, all processes raise, so that none waits for another: the others a similar ConfigError,
    RunError, OSError or ValueError, or a RunError that names the original error.
    """
    if jax.process_count() == 1:
        return call()
    encoded, raised = b"", None
    if jax.process_index() == 0:
        try:
            encoded = json.dumps([call(), None]).encode()
        except Exception as error:  # after any error, since the others wait for a message
            raised = error
            encoded = json.dumps([None, _encode(error)]).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(encoded))))
    content = np.zeros(size, np.uint8)
    content[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    value, failure = json.loads(bytes(multihost_utils.broadcast_one_to_all(content)))
    if raised:
        raise raised
    if failure:
        kind, arguments = failure
        raise next(one for one in KINDS if one.__name__ == kind)(*arguments)
    return value


def check_shared(folder: Path, field: str) -> None:
    """Raises ConfigError in all processes unless each of them sees what process 0 writes in a folder, which is made.

    field: the one that names the folder.
    """
    if jax.process_count() == 1:
        return
    file = folder / SHARED

    def write() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(word := secrets.token_hex(8))
        return word

    word, until = broadcast_from_process_0(write), time.monotonic() + WAIT
    while not (sees := _holds(file, word)) and time.monotonic() < until:
        time.sleep(0.2)
    blind = np.flatnonzero(~multihost_utils.process_allgather(np.bool_(sees)))
    if jax.process_index() == 0:
        file.unlink()
    if blind.size:
        where = f"{field}={folder}: process {blind[0]} does not see what process 0 writes there"
        raise ConfigError(f"{where}; give a folder on a file system that all machines share")


def _holds(file: Path, word: str) -> bool:
    try:
        return file.read_text() == word
    except OSError:
        return False


def _encode(error: Exception) -> tuple[str, list]:
    """Returns the name of one of KINDS and the arguments that recreate the error."""
    kind = next((kind for kind in KINDS if isinstance(error, kind)), None)
    if isinstance(error, OSError) and error.errno is not None:
        return "OSError", [error.errno, error.strerror, error.filename and str(error.filename)]
    if kind is None:
        return "RunError", [f"process 0 has failed: {type(error).__name__}: {error}"]
    return kind.__name__, [str(error)]
