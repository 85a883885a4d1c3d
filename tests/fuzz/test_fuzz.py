"""Fuzzing: what reads a user's files and words accepts or refuses anything, in one line and in bounded time.

The quick test gives each target a few inputs, the slow one `targets.TARGETS[name].count`. To look at one target longer:

    FUZZ=20 FUZZ_SEED=7 pytest -m slow tests/fuzz -k webshop          # 20 times as many inputs, others than usual

An input that fails is kept in the folder that the failure names; once mended it goes into `corpus/NAME` for good.
"""

import os
import signal
import sys
import time
import zlib
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "webshop"))
from mutations import inputs
from targets import TARGETS

SECONDS = 2.0  # of processor time that one input may take
QUICK = 60


class Hang(BaseException):
    """Not an Exception, so that nobody takes it for a broken file."""


def too_long(*_):
    raise Hang(f"took {SECONDS:g} s of processor time")


def fuzz(name: str, count: int, seed: int, folder: Path) -> tuple[int, float]:
    """Gives a target its inputs; returns (how many it refused, the most seconds that one took)."""
    target, refused, slowest = TARGETS[name], 0, 0.0
    before = signal.signal(signal.SIGPROF, too_long)
    try:
        for number, data in enumerate(inputs(target.corpus(name), count, seed, target.parts)):
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                target.run(data, folder)
            except target.refusal as error:
                refused += 1
                assert str(error) and "\n" not in str(error), f"not one line: {str(error)!r}"
            except (Exception, Hang) as error:
                kept = folder / f"failed-{name}-{zlib.crc32(data):08x}"
                kept.write_bytes(data)
                raise AssertionError(f"input {number}, {data[:300]!r}, kept as {kept}: {error!r}") from error
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            slowest = max(slowest, time.process_time() - began)
    finally:
        signal.signal(signal.SIGPROF, before)
    assert slowest < SECONDS  # such as in C code, which no signal stops
    return refused, slowest


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_inputs(name, tmp_path):
    fuzz(name, QUICK, 0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_many_inputs(name, tmp_path):
    count = TARGETS[name].count * int(os.environ.get("FUZZ", "1"))
    began = time.perf_counter()
    refused, slowest = fuzz(name, count, 1 + int(os.environ.get("FUZZ_SEED", "0")), tmp_path)
    print(f"{name}: {count:,} inputs, {refused:,} refused, {time.perf_counter() - began:.1f} s, slowest {slowest:.3f} s")
    assert refused > 0 or not TARGETS[name].refusal
    assert refused < count, "no input was accepted: the target does not reach what it should"


def test_the_slow_test_has_a_hundred_thousand_inputs():
    assert sum(target.count for target in TARGETS.values()) >= 100_000
