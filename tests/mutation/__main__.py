"""Which tests notice which mistakes: every mutant is one changed line of the product, and the tests that fail for it kill it.

    python -m tests.mutation                       # every mutant against all tests named beside it: the whole matrix
    python -m tests.mutation --first advantages    # one list, each mutant only until a test fails

A line of `tests/mutation/*.tsv` is a mutant: a name, a file, the text that stands there once, what replaces it, and the test
files to ask, separated by tabs. The matrix is written to --out as JSON: {mutant: {"killed_by": [test, ...], "asked": number}}.
Each mutant is tried in a copy of the tracked files, in a process forked from one that has imported the libraries.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIMIT = 600.0  # seconds, after which a mutant counts as killed: it hangs


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def mutants(lists: list[str]) -> list[Mutant]:
    """All mutants of these lists, of all if none is named."""
    found = []
    for path in sorted(Path(__file__).parent.glob("*.tsv")):
        if lists and path.stem not in lists:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line and not line.startswith("#"):
                fields = line.split("\t")
                if len(fields) != 5:
                    raise SystemExit(f"{path}:{number}: {len(fields)} fields; a mutant has five, separated by tabs")
                name, file, old, new, tests = fields
                found.append(Mutant(f"{path.stem}/{name}", file, old, new, tuple(tests.split())))
    if len({mutant.name for mutant in found}) < len(found):
        raise SystemExit("two mutants have the same name")
    return found


class Outcomes:
    """A pytest plugin: the tests that failed, and how many were asked."""

    def __init__(self, path: Path):
        self.path, self.asked, self.failed = path, 0, []

    def pytest_runtest_logstart(self, nodeid):
        self.path.with_suffix(".now").write_text(nodeid)  # what ran when a process died

    def pytest_runtest_logreport(self, report):
        self.asked += report.when == "call"
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_sessionfinish(self):
        self.path.write_text(json.dumps({"killed_by": self.failed, "asked": self.asked}))


def ask(tree: Path, tests: tuple[str, ...], slow: bool, first: bool) -> dict:
    """Runs these test files in a forked process."""
    out = tree.parent / "outcome.json"
    out.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        log = os.open(tree.parent / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "hgpo_jax")]:
            del sys.modules[name]
        import pytest

        marks = "slow or not slow" if slow else "not slow and not needs"
        options = ["-n", "0", "-p", "no:cacheprovider", "-m", marks, "--tb", "line", *(["-x"] if first else [])]
        pytest.main([*options, *tests], plugins=[Outcomes(out)])
        os._exit(0)
    end = time.monotonic() + LIMIT
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(0.02)
    if out.exists():
        return json.loads(out.read_text())
    now = out.with_suffix(".now")
    return {"killed_by": [now.read_text() if now.exists() else "the process"], "asked": 0, "died": True}


def measure(listed: list[Mutant], slow: bool, first: bool, out: Path | None) -> dict:
    """Tries the mutants one after the other; tests that fail without a mutant kill nothing."""
    results, clean = {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "project")
        subprocess.run(["git", "checkout-index", "--all", "--prefix", f"{tree}/"], cwd=ROOT, check=True)
        listing = ["git", "ls-files", "--modified", "--others", "--exclude-standard"]
        for changed in subprocess.check_output(listing, cwd=ROOT, text=True).splitlines():
            (tree / changed).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / changed).exists():
                shutil.copy(ROOT / changed, tree / changed, follow_symlinks=False)
            else:
                (tree / changed).unlink(missing_ok=True)
        if (ROOT.parent / "shared").exists():
            Path(scratch, "shared").symlink_to(ROOT.parent / "shared")
        for number, mutant in enumerate(listed, 1):
            path, began = tree / mutant.file, time.monotonic()
            text = path.read_text()
            if text.count(mutant.old) != 1:
                raise SystemExit(f"{mutant.name}: {mutant.old!r} stands {text.count(mutant.old)} times in {mutant.file}")
            for file in mutant.tests:
                if file not in clean:
                    clean[file] = set(ask(tree, (file,), slow, False)["killed_by"])
                    if clean[file]:
                        print(f"fails without a mutant: {sorted(clean[file])}", flush=True)
            path.write_text(text.replace(mutant.old, mutant.new))
            try:
                found = ask(tree, mutant.tests, slow, first)
            finally:
                path.write_text(text)
            found["killed_by"] = [test for test in found["killed_by"] if test not in clean[test.partition("::")[0]]]
            results[mutant.name] = found
            seconds = time.monotonic() - began
            state = f"killed by {len(found['killed_by'])} of {found['asked']}" if found["killed_by"] else "SURVIVES"
            print(f"{number}/{len(listed)} {mutant.name}: {state} ({seconds:.0f} s)", flush=True)
            if out:
                out.write_text(json.dumps(results, indent=1))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("lists", nargs="*", help="names of lists, all if there is none")
    parser.add_argument("--first", action="store_true", help="stop at the first test that fails: killed or not, no matrix")
    parser.add_argument("--slow", action="store_true", help="ask the slow tests too")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where the matrix is written")
    arguments = parser.parse_args()
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutant of equal size within a second would be taken for the file before it
    for library in ("flax.nnx", "hypothesis", "jax", "optax", "orbax.checkpoint", "pytest", "scipy.stats", "transformers"):
        importlib.import_module(library)
    results = measure(mutants(arguments.lists), arguments.slow, arguments.first, arguments.out)
    killed = sum(bool(found["killed_by"]) for found in results.values())
    print(f"{killed} of {len(results)} mutants are killed")


if __name__ == "__main__":
    main()
