"""Settings of all tests: eight fake CPU devices, so that meshes are real, no access to a hub, compiled programs that are kept
from session to session; the ten slowest files at the end; and `--skips=FILE`, with which a skipped test that FILE does not
list fails the session."""

import gc
import os
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.helpers.needs import missing
from tests.helpers.xla import compiled_programs, xla_flags

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(compiled_programs()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")


def pytest_addoption(parser):
    parser.addoption("--skips", metavar="FILE", help="fail if a test is skipped that FILE does not list; * is a wildcard")
    parser.addoption("--xla-defaults", action="store_true", help="compile by XLA's own settings: for tests about rounding")


def pytest_configure(config):
    os.environ["XLA_FLAGS"] = xla_flags(8, optimized=config.getoption("--xla-defaults"))  # of all tests of this process
    if hasattr(config, "workerinput"):
        return  # pytest-xdist's main process hears of every test
    allowed = config.getoption("--skips") and Path(config.getoption("--skips")).read_text()
    config.pluginmanager.register(Skips(allowed), "skips")
    config.pluginmanager.register(SlowestFiles(), "slowest_files")


def pytest_collection_finish():
    """Tracing makes millions of short-lived objects; looking through all that imports made for each of them takes a tenth."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


def pytest_sessionfinish():
    """Skips three collections of garbage as the session ends, which find nothing."""
    gc.freeze()


# The longest files: first those whose slow tests take minutes, then those whose quick ones take ten seconds and more. One that
# began last would leave the other processes idle. What test_train.py compiles test_python_api.py finds in the cache.
LONGEST = (
    "test_text_training.py", "test_runs.py", "test_tpu.py", "test_bfloat16.py", "test_tables_gradients.py",
    "test_distributed.py", "test_train.py", "test_methods.py", "test_notebooks.py", "test_alfworld_device_text.py",
    "test_user_code.py", "test_examples.py", "test_tables_run.py", "test_host_agreement.py", "test_memory.py",
    "test_policies.py", "test_slots.py", "test_agents.py", "test_train_step.py", "test_update.py", "test_workers.py",
    "test_qwen2.py", "test_compiled.py", "test_roles.py", "test_household_roles.py", "test_served.py", "test_python_api.py",
    "test_lora.py", "test_attention.py", "test_gguf.py", "test_household.py", "test_generate.py",
    "test_host.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.hookimpl(tryfirst=True)  # before the fixtures, which compile too
def pytest_runtest_setup(item):
    """Tests and the processes that they start compile without LLVM's optimization, which took half of their time for
    programs that run once or twice. Tests marked `optimized`, about rounding, memory or learning, or with programs that run
    for long, compile with it, and the processes that they start as users' do.

    Compiled programs are cached by shape: marked tests must not share theirs with others of the same process.
    """
    import jax

    if absent := missing(item):
        pytest.skip(f"needs {', '.join(absent)}")
    optimized = item.get_closest_marker("optimized") is not None
    jax.config.update("jax_disable_most_optimizations", not optimized)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(not optimized))


# Each compiled program holds several memory mappings. Linux by default allows a process 65,530; XLA crashes at the next.
MANY_MAPPINGS = 20_000  # one file was seen to add 16,000


@pytest.hookimpl(wrapper=True)  # around the fixtures' end, which hold programs
def pytest_runtest_teardown(item, nextitem):
    """A job sets its mesh for the whole process, and jax keeps every program: the next file's tests must not meet them."""
    import jax

    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            jax.set_mesh(None)
            if mappings() > MANY_MAPPINGS:
                jax.clear_caches()
                gc.collect()


def mappings() -> int:
    """How many memory mappings this process has, 0 where that is not known."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


class SlowestFiles:
    """Prints the ten files whose tests took longest, with their fixtures."""

    def __init__(self):
        self.seconds = Counter()

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter):
        for file, seconds in self.seconds.most_common(10):
            terminalreporter.write_line(f"{seconds:7.1f} s  {file}")


class Skips:
    """Prints every skipped test, and makes the session fail for one that is not allowed."""

    def __init__(self, allowed: str | None):
        lines = (line.partition("#")[0].strip() for line in (allowed or "").splitlines())
        self.patterns, self.strict = [line for line in lines if line], allowed is not None
        self.skipped = {}

    def pytest_runtest_logreport(self, report):
        if report.skipped:
            self.skipped[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")

    pytest_collectreport = pytest_runtest_logreport  # `importorskip` at the head of a file

    def unlisted(self, test: str) -> bool:
        return self.strict and not any(fnmatchcase(test, pattern.replace("[", "[[]")) for pattern in self.patterns)

    def pytest_sessionfinish(self, session):
        if session.exitstatus == 0 and any(map(self.unlisted, self.skipped)):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for test, reason in sorted(self.skipped.items()):
            terminalreporter.write_line(f"SKIPPED {'and not listed: ' if self.unlisted(test) else ''}{test}: {reason}")
