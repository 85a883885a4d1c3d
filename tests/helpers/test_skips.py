"""`--skips=FILE` of .ci/run: a skip that FILE does not list fails the session, wherever it was said."""

from pathlib import Path

import pytest

pytest_plugins = "pytester"
TESTS = """
    import pytest
    def test_that_passes(): pass
    @pytest.mark.parametrize("n", [1, 2])
    def test_that_skips(n): pytest.skip("no such thing")
"""


@pytest.fixture
def session(pytester):
    """A session of its own with this project's conftest, and a list in skips.txt."""
    pytester.makeconftest((Path(__file__).parents[1] / "conftest.py").read_text())
    pytester.makepyfile(test_some=TESTS, test_other='import pytest\npytest.importorskip("no_such_module")')
    return lambda skips, *options: (
        pytester.makefile(".txt", skips=skips),
        pytester.runpytest_inprocess("--assert=plain", "-p", "no:cacheprovider", *options),
    )[1]


@pytest.mark.parametrize("processes", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_skip_that_is_not_listed_fails(session, processes):
    result = session("# all\ntest_some.py::*[1]  # for a reason", "--skips=skips.txt", "-n", processes)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([
        "SKIPPED and not listed: test_other.py: could not import 'no_such_module'*",
        "SKIPPED test_some.py::test_that_skips[[]1]: no such thing",
        "SKIPPED and not listed: test_some.py::test_that_skips[[]2]: no such thing",
        "*1 passed, 3 skipped*",
    ])  # fmt: skip


def test_listed_ones_pass(session):
    result = session("test_*", "--skips=skips.txt")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["SKIPPED test_some.py::test_that_skips[[]2]: no such thing", "*1 passed, 3 skipped*"])
