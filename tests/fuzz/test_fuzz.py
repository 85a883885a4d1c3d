"""Fuzzing: what reads a user's files and words accepts or refuses anything, in one line and in bounded time.

The quick tests give each target a few inputs, the slow one `targets.TARGETS[name].count`. To look at one target longer:

    FUZZ=80 FUZZ_SEED=7 pytest -m slow tests/fuzz -k webshop          # 80 times as many inputs, others than usual

An input that fails is kept in the folder that the failure names; once mended it goes into `corpus/NAME` for good.
"""

import gc
import os
import signal
import sys
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "webshop"))
from mutations import inputs
from targets import TARGETS

from hgpo_jax.config import fields

SECONDS = 2.0  # of its thread's processor time that one input may take
QUICK = 40


class Hang(BaseException):
    """Not an Exception, so that nobody takes it for a broken file."""


@pytest.fixture(scope="module", autouse=True)
def no_garbage_of_others():
    """An input pays for its own garbage, not for walks through what earlier tests of the process have left."""
    gc.freeze()


def fuzz(name: str, given: Iterable[bytes], folder: Path) -> int:
    """Gives a target its inputs; returns how many it refused."""
    target, refused, slowest, began = TARGETS[name], 0, 0.0, 0.0

    def too_long(*_):
        left = SECONDS - (time.thread_time() - began)  # the timer counts other threads, too
        if left <= 0:
            raise Hang(f"took {SECONDS:g} s of processor time")
        signal.setitimer(signal.ITIMER_PROF, max(left, 0.01))

    before = signal.signal(signal.SIGPROF, too_long)
    try:
        for number, data in enumerate(given):
            began = time.thread_time()
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
            slowest = max(slowest, time.thread_time() - began)
    finally:
        signal.signal(signal.SIGPROF, before)
    assert slowest < SECONDS  # such as in C code, which no signal stops
    return refused


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_inputs(name, tmp_path):
    fuzz(name, inputs(TARGETS[name].corpus(name), QUICK, 0, TARGETS[name].parts), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_many_inputs(name, tmp_path):
    target, seed = TARGETS[name], 1 + int(os.environ.get("FUZZ_SEED", "0"))
    count = target.count * int(os.environ.get("FUZZ", "1"))
    refused = fuzz(name, inputs(target.corpus(name), count, seed, target.parts), tmp_path)
    assert refused > 0 or not target.refusal
    assert refused < count, "no input was accepted: the target does not reach what it should"


no_folder_each = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


values = st.one_of(
    st.integers().map(str), st.floats().map(str), st.text(max_size=20), st.booleans().map(str), st.none().map(str),
    st.lists(st.one_of(st.integers(), st.text(max_size=5), st.none()), max_size=3).map(str),
)  # fmt: skip


@no_folder_each
@given(st.lists(st.tuples(st.sampled_from(sorted(fields())), values), max_size=3))
def test_every_field_takes_or_refuses_any_value(tmp_path, overrides):
    lines = "\n".join(f"{name}={value}" for name, value in overrides)
    fuzz("overrides", [lines.encode("utf-8", "surrogatepass")], tmp_path)
