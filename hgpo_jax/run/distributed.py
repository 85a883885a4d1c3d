"""Several processes, usually one a machine, as one program: JAX's own multi-process runtime (`--distributed`).

On TPU pods, under Slurm and Open MPI jax finds out which process is which. Elsewhere three variables tell it, in every
process:

    JAX_COORDINATOR_ADDRESS=host-of-process-0:1234  JAX_NUM_PROCESSES=2  JAX_PROCESS_ID=0

All processes run the same command. Process 0 writes and prints; run_dir and cache_dir are folders that all of them see.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from hgpo_jax.errors import ConfigError

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join(environment=os.environ) -> None:
    """Joins the other processes, before anything else uses jax.

    Raises:
      ConfigError: variables that are missing or do not fit, or no word from the other processes.
    """
    given = _given(environment)
    try:
        jax.distributed.initialize(**given, shutdown_timeout_seconds=60)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--distributed: {' '.join(str(error).split())}") from None


def mute_other_processes() -> None:
    """Drops what all processes but process 0 print; their standard error stays."""
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process


def _given(environment) -> dict:
    """The variables as arguments of `jax.distributed.initialize`; none where the cluster provides them."""
    given = [name for name in VARIABLES if environment.get(name)]
    if not given:
        return {}
    address, *numbers = (environment.get(name, "") for name in VARIABLES)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{VARIABLES[0]}={address}: expected host:port of the first process, as in 10.0.0.1:1234")
    for name, number in zip(VARIABLES[1:], numbers, strict=True):
        if not number.isdecimal():
            raise ConfigError(f"{name}={number}: expected a whole number together with {given[0]}")
    count, index = map(int, numbers)
    if index >= count:
        raise ConfigError(f"{VARIABLES[2]}={index}: processes are numbered 0 to {VARIABLES[1]} - 1 = {count - 1}")
    # Without the last argument jax still asks the cluster which devices to use, which may need more packages.
    return {"coordinator_address": address, "num_processes": count, "process_id": index,
            "cluster_detection_method": "deactivate"}  # fmt: skip


def broadcast_from_process_0(call: Callable):
    """The result of `call()` in process 0, in all processes, so that what they read from a file cannot differ.

    Args:
      call: returns what JSON can hold.

    Raises:
      ConfigError: in all processes if `call` raises it in process 0.
    """
    if jax.process_count() == 1:
        return call()
    encoded = b""
    if jax.process_index() == 0:
        try:
            encoded = json.dumps([call(), None]).encode()
        except ConfigError as error:
            encoded = json.dumps([None, str(error)]).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(encoded))))
    content = np.zeros(size, np.uint8)
    content[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    value, error_message = json.loads(bytes(multihost_utils.broadcast_one_to_all(content)))
    if error_message is not None:
        raise ConfigError(error_message)
    return value
