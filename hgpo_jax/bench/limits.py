"""Limits of benchmarks: the machine's rates, measured in the same run, and the operations and bytes of the work."""

from __future__ import annotations

import concurrent.futures
import ctypes
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.policy import ModelConfig, shapes

GiB = 2**30
# Linux's names of the vector and matrix instructions that decide a processor's rate of products.
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")


def row(name: str, value: float | str, unit: str, limit_share: float | None = None, ratio: float | None = None) -> dict:
    """Returns a line of a benchmark's table. limit_share: of the machine's limit. ratio: ours to the peer's."""
    return {"name": name, "value": value, "unit": unit, "limit_share": limit_share, "ratio": ratio}


def machine() -> dict:
    """Returns a row that describes the machine: jax's devices, the processor and its instructions for matrix products."""
    devices = jax.devices()
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""  # only on Linux
    model = re.search(r"model name\s*: (.*)", cpuinfo)
    flags = re.search(r"(?:flags|Features)\s*: (.*)", cpuinfo)
    found = [name for name in INSTRUCTIONS if flags and name in flags[1].split()]
    processor = f"{model[1].strip() if model else platform.machine()}, {os.cpu_count()} cores ({' '.join(found)})"
    kind = devices[0].device_kind
    return row("machine", f"{len(devices)} x {kind}, {processor}" if kind != "cpu" else processor, "")


def forward_flops(c: ModelConfig, tokens: int, predictions: int) -> float:
    """Counts operations of `Qwen2.hidden` and the head for one row of `tokens` slots with `predictions` predictions."""
    D, F, E = c.hidden_size, c.intermediate_size, c.head_size
    H, G = c.num_attention_heads, c.num_key_value_heads

    def block(queries):
        projections = 2 * D * 2 * G * E * tokens + 2 * queries * (2 * D * H * E + 3 * D * F)
        return projections + 4 * queries * tokens * H * E

    return (c.num_hidden_layers - 1) * block(tokens) + block(predictions) + 2 * predictions * D * c.vocab_size


def decode_flops(c: ModelConfig, slots: int) -> float:
    """Counts operations of `Qwen2.decode` and the head for one token that sees `slots` slots."""
    D, F, E = c.hidden_size, c.intermediate_size, c.head_size
    H, G = c.num_attention_heads, c.num_key_value_heads
    block = 2 * D * (2 * G + 2 * H) * E + 6 * D * F + 4 * slots * H * E
    return c.num_hidden_layers * block + 2 * D * c.vocab_size


def read_bytes(c: ModelConfig, rows: int, slots: int, itemsize: int) -> int:
    """Counts bytes that one pass must read: every weight that multiplies, and the keys and values of `slots` slots per row."""
    head = c.vocab_size * c.hidden_size
    blocks = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes(c))) - head * (1 if c.tie_word_embeddings else 2)
    heads = rows * slots * c.num_hidden_layers * 2 * c.num_key_value_heads
    return (head + blocks + heads * c.head_size) * itemsize


def fastest(call: Callable[[], object], repeats: int = 5) -> float:
    """Returns the seconds of the fastest call after a first one."""
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def matmul_rate(mesh, dtype: str = "float32") -> float:
    """Measures operations per second of products [size, size] x [size, size], one on each device at once."""
    size = 1536 if mesh.devices.flat[0].platform == "cpu" else 8192
    spec = jax.sharding.PartitionSpec(mesh.axis_names)
    a = jnp.ones((mesh.size, size, size), dtype)
    a = jax.device_put(a, jax.sharding.NamedSharding(mesh, spec))
    multiply = jax.jit(lambda a: jnp.einsum("nij,njk->nik", a, a))
    return 2 * size**3 * mesh.size / fastest(lambda: jax.block_until_ready(multiply(a)))


def read_rate(mesh) -> float:
    """Measures bytes per second of reading 1 GiB per device once, by the fastest of a few simple kernels.

    These are XLA's sum and maximum of each row, its product with a vector from the right and, on a CPU, NumPy's maximum with
    one thread per core. The fastest of them depends on the machine.
    """
    spec = jax.sharding.PartitionSpec(mesh.axis_names)
    place = jax.sharding.NamedSharding(mesh, spec)
    a = jax.jit(lambda: jnp.ones((mesh.size * 2**16, 2**12), jnp.float32), out_shardings=place)()
    vector = jnp.ones(a.shape[1], jnp.float32)
    kernels = [jax.jit(lambda a: a.sum(1)), jax.jit(lambda a: a.max(1)), jax.jit(lambda a: a @ vector)]

    def seconds_of(kernel: Callable) -> float:
        return fastest(lambda: jax.block_until_ready(kernel(a)))

    seconds = [seconds_of(kernel) for kernel in kernels]
    if mesh.devices.flat[0].platform == "cpu":
        cores = mesh.devices.flat[0].client.device_count()
        parts = np.array_split(np.asarray(a.addressable_shards[0].data), cores)
        with concurrent.futures.ThreadPoolExecutor(cores) as pool:
            seconds.append(fastest(lambda: list(pool.map(np.max, parts))) * mesh.size)
    return a.nbytes / min(seconds)


class Rates:
    """The machine's rates: the best over some meshes and over every `measure()`, the first of which is made here.

    reading: bytes per second. multiplying: operations per second.
    """

    def __init__(self, meshes: Iterable, dtype: str = "float32"):
        self._meshes, self._dtype = list(meshes), dtype
        self.reading = self.multiplying = 0.0
        self.measure()

    def measure(self) -> None:
        for mesh in self._meshes:
            self.reading = max(self.reading, read_rate(mesh))
            self.multiplying = max(self.multiplying, matmul_rate(mesh, self._dtype))

    def seconds(self, bytes_read: float, operations: float) -> float:
        """Returns the least time that the work can take."""
        return max(bytes_read / self.reading, operations / self.multiplying)

    def rows(self) -> list[dict]:
        return [
            row("reading memory (limit)", self.reading / 1e9, "GB/s"),
            row(f"matmul rate, {self._dtype} (limit)", self.multiplying / 1e9, "GFLOP/s"),
        ]


Name = TypeVar("Name")


def alternate(calls: Mapping[Name, Callable[[], object]], repeats: int) -> dict[Name, list[float]]:
    """Times each call in `repeats` rounds through all of them, so that a slow minute affects all of them alike."""
    seconds: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - began)
    return seconds


def memory_rise(call: Callable[[], object]) -> int | None:
    """Measures the largest rise of this process's resident memory during a call, in bytes; None if Linux does not report it, or
    if the work uses the memory of an accelerator.

    Freed memory is returned to the system first and, from now on, blocks above 1 MiB as soon as they are freed, so that
    everything that the call allocates counts, even if it could reuse memory. This is slow: time nothing afterwards.
    """
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not sys.platform.startswith("linux") or not status.exists() or jax.default_backend() != "cpu":
        return None
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 2**20)  # M_MMAP_THRESHOLD
        libc.malloc_trim(0)

    def kilobytes(field: str) -> int:
        found = re.search(rf"{field}:\s+(\d+) kB", status.read_text())
        assert found is not None  # every process has these lines
        return int(found[1])

    try:
        reset.write_text("5")  # the peak starts again from here
    except OSError:
        return None
    before = kilobytes("VmRSS")
    jax.block_until_ready(call())
    return 1024 * (kilobytes("VmHWM") - before)


def memory_rows(name: str, rise: dict[str, int | None], ours: str) -> list[dict]:
    """Returns the row of our memory_rise and, if there is one, the peer's; the ratio is ours to the peer's."""
    mine, theirs = rise[ours], rise.get("peer")
    if mine is None:
        return []
    return [row(name, mine / GiB, "GiB", ratio=None if theirs is None else mine / max(theirs, 1))]
