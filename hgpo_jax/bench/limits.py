"""Limits of benchmarks: the machine's two rates, measured in the same run, and the operations and bytes of the work."""

from __future__ import annotations

import functools
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from hgpo_jax.policy import ModelConfig, shapes

GiB = 2**30
# Linux's names of the vector and matrix instructions that decide a processor's rate of products.
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
Name = TypeVar("Name", bound=Hashable)


def row(name: str, value: float | str, unit: str, limit_share: float | None = None, ratio: float | None = None) -> dict:
    """Returns a line of a benchmark's table. limit_share: of the limit. ratio: ours to the peer's."""
    return {"name": name, "value": value, "unit": unit, "limit_share": limit_share, "ratio": ratio}


def machine() -> dict:
    """Returns a row that describes the machine: jax's devices, the processor and its instructions for matrix products."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""  # only on Linux
    model = re.search(r"model name\s*: (.*)", cpuinfo)
    flags = set(cpuinfo.split())
    instructions = " ".join(name for name in INSTRUCTIONS if name in flags)
    processor = f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores ({instructions})"
    kind = jax.devices()[0].device_kind
    return row("machine", processor if kind == "cpu" else f"{jax.device_count()} x {kind}, {processor}", "")


class Timing(NamedTuple):
    """Seconds of a call: of the first one, which compiles, and of those after it."""

    first: float
    median: float
    least: float


def timed(calls: Mapping[Name, Callable[[], object]], repeats: int, profile: str | None = None) -> dict[Name, Timing]:
    """Times each call once, then in `repeats` rounds through all of them, so that a slow minute affects all of them alike.

    profile: a folder for jax's trace of one more round.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in range(1 + repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - began)
    if profile:
        with jax.profiler.trace(profile):
            jax.block_until_ready([call() for call in calls.values()])
    return {name: Timing(first, statistics.median(rest), min(rest)) for name, (first, *rest) in seconds.items()}


class Rates(NamedTuple):
    """Operations per second of matrix products, and bytes per second of memory."""

    operations: float
    reading: float

    def seconds(self, bytes_read: float, operations: float) -> float:
        """Returns the least time that the work can take."""
        return max(bytes_read / self.reading, operations / self.operations)

    def rows(self, dtype: str) -> list[dict]:
        return [
            row("reading memory (limit)", self.reading / 1e9, "GB/s"),
            row(f"matmul rate, {dtype} (limit)", self.operations / 1e9, "GFLOP/s"),
        ]


def measure_rates(mesh, dtype: str) -> Rates:
    """Measures the rates of a mesh: of one large product on each device at once, and of reading 1 GiB on each.

    Which of three simple kernels reads fastest depends on the machine.
    """
    size = 1536 if mesh.devices.flat[0].platform == "cpu" else 8192
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))
    square = jax.jit(lambda: jnp.ones((mesh.size, size, size), dtype), out_shardings=place)()
    long = jax.jit(lambda: jnp.ones((mesh.size * 2**16, 2**12)), out_shardings=place)()
    vector = jnp.ones(long.shape[1])
    multiply = jax.jit(lambda a: jnp.einsum("nij,njk->nik", a, a))
    kernels = [jax.jit(lambda a: a.sum(1)), jax.jit(lambda a: a.max(1)), jax.jit(lambda a: a @ vector)]
    product = timed({"product": functools.partial(multiply, square)}, 5)["product"].least
    reads = timed({number: functools.partial(kernel, long) for number, kernel in enumerate(kernels)}, 5)
    return Rates(2 * size**3 * mesh.size / product, long.nbytes / min(timing.least for timing in reads.values()))


def forward_flops(c: ModelConfig, tokens: int, predictions: int) -> float:
    """Counts operations of `Qwen2.hidden` and the head for one row of `tokens` slots with `predictions` predictions, its last.

    Of attention, the pairs that see each other: kernels skip the others.
    """
    D, F, E = c.hidden_size, c.intermediate_size, c.head_size
    H, G = c.num_attention_heads, c.num_key_value_heads

    def block(queries):
        projections = 2 * D * 2 * G * E * tokens + 2 * queries * (2 * D * H * E + 3 * D * F)
        return projections + 4 * queries * (tokens - (queries - 1) / 2) * H * E

    return (c.num_hidden_layers - 1) * block(tokens) + block(predictions) + 2 * predictions * D * c.vocab_size


def decode_flops(c: ModelConfig, slots: int) -> float:
    """Counts operations of `Qwen2.decode` and the head for one token that sees `slots` slots."""
    D, F, E = c.hidden_size, c.intermediate_size, c.head_size
    H, G = c.num_attention_heads, c.num_key_value_heads
    block = 2 * D * (2 * G + 2 * H) * E + 6 * D * F + 4 * slots * H * E
    return c.num_hidden_layers * block + 2 * D * c.vocab_size


def read_bytes(c: ModelConfig, rows: int, slots: int, itemsize: int) -> int:
    """Counts bytes that one pass of the language model must read: every weight that multiplies, and the keys and values of
    `slots` slots per row."""
    head = c.vocab_size * c.hidden_size
    weights = [part for name, part in shapes(c).items() if name != "visual"]
    blocks = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights)) - head * (1 if c.tie_word_embeddings else 2)
    heads = rows * slots * c.num_hidden_layers * 2 * c.num_key_value_heads
    return (head + blocks + heads * c.head_size) * itemsize


def compiled_bytes(compiled) -> int:
    """Returns the peak bytes on each device of a compiled program, by the compiler's own analysis."""
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


def peak_rows(mesh) -> list[dict]:
    """Returns a row with the most memory that a device of this process held until now; none where jax does not count it."""
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    most = max(each.get("peak_bytes_in_use", 0) for each in stats)
    return [row("peak memory of the process, counted by the device", most / GiB, "GiB")] if most else []
