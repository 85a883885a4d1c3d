"""Profile of a program: one call under jax's profiler, with the self times of its operations added up by kind.

The profiler itself costs time, most for small operations, so the shares are evidence and not a measurement.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import jax

from hgpo_jax.bench.limits import row

KINDS = 8  # shown; the rest is one row

# An instruction of a compiled program: name, shape (or several in brackets), opcode, and its origin in the source.
INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = (?:\(.*?\)|\S+) ([\w-]+)\((?:.*?op_name="([^"]*)")?', re.MULTILINE)


def add_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile",
        metavar="FOLDER",
        type=folder,
        help="also trace a call into this folder, for Perfetto or TensorBoard, and list what kinds of operations took longest",
    )


def folder(text: str) -> Path:
    """Reads the option's value, a folder, created if missing. Raises ArgumentTypeError, which argparse reports in one line."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text:.200}: {error.strerror}; give a folder that can be written") from None
    return Path(text)


def rows(into: Path, title: str, call: Callable[[], object], compiled) -> list[dict]:
    """Returns rows of the kinds of operations of a compiled program by their share of its time during a call."""
    with jax.profiler.trace(str(into / title)):
        jax.block_until_ready(call())
    newest = max((into / title).rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    kinds = {name: kind(opcode, source) for name, opcode, source in INSTRUCTION.findall(compiled.as_text())}
    spent: dict[str, float] = collections.defaultdict(float)
    for plane in jax.profiler.ProfileData.from_file(str(newest)).planes:
        for line in plane.lines:
            # If an event is a kernel's, it names the instruction that the kernel is part of.
            events = ((dict(e.stats).get("hlo_op", e.name), e.start_ns, e.duration_ns) for e in line.events)
            for name, own in own_times(events):
                if name in kinds:
                    spent[kinds[name]] += own
    total = sum(spent.values())
    if not total:
        print(f"warning: the trace in {into / title} names no operation of the program", file=sys.stderr)
        return []
    shown = sorted(spent.items(), key=lambda found: -found[1])[:KINDS]
    shown.append(("all else", total - sum(value for _, value in shown)))
    return [row(f"{title}: time in {name}", 100 * value / total, "%") for name, value in shown]


def kind(opcode: str, source: str) -> str:
    """Classifies an instruction by its opcode and the path of jax's operation."""
    if opcode.startswith(("all-", "reduce-scatter", "collective-")):
        return "exchange between devices, waiting included"
    if opcode in ("dot", "convolution") or source.endswith("dot_general"):
        return "products (dot_general)"
    if re.search("threefry|_uniform|_gumbel|random", source):
        return "random numbers"
    return re.split(r"[/()]+", source.rstrip("/()"))[-1] or opcode


def own_times(events: Iterable[tuple[str, float, float]]) -> list[tuple[str, float]]:
    """Maps events (name, start, duration) of one thread to (name, self time: its duration less that of events within it)."""
    out: list[tuple[str, float]] = []
    open_: list[list] = []  # for each open event: name, end, remaining duration
    for name, start, duration in sorted(events, key=lambda e: (e[1], -e[2])):
        while open_ and open_[-1][1] <= start:
            done = open_.pop()
            out.append((done[0], done[2]))
        if open_:
            open_[-1][2] -= duration
        open_.append([name, start + duration, duration])
    return out + [(name, left) for name, _, left in open_]
