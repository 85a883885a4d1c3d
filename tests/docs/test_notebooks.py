"""Every notebook runs from top to bottom on the CPU without a warning, and its committed copy was executed and is small."""

import json
import os
import shutil
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "notebooks"
BOOKS = sorted(HERE.glob("*.ipynb"))
SHORTER = {
    "quickstart": {
        "iterations=12": "iterations=2", "log.dump_every=6": "log.dump_every=2", "cloning.stop_at=0.3": "cloning.max_steps=50",
    },
    "your_own_environment": {
        '"iterations": 40': '"iterations": 5', "hgpo.episodes(24)": "hgpo.episodes(4)",
        'config(method="./deepest.py:deepest")': 'config(method="./deepest.py:deepest", iterations=2)',
    },
}  # fmt: skip


def complaints(outputs: list[dict]) -> list[dict]:
    """Errors, and warnings, which go to standard error."""
    return [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_the_committed_copy_was_executed_in_order(book):
    assert book.stat().st_size < 400_000
    cells = [cell for cell in json.loads(book.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not complaints(outputs)
    assert "/tmp/" not in json.dumps(outputs)


@pytest.mark.needs("notebooks")
@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_it_runs(book, tmp_path, monkeypatch):
    """The long trainings of two are shorter ones, of which they show the same."""
    import nbclient
    import nbformat

    shutil.copytree(HERE, tmp_path / "notebooks", ignore=shutil.ignore_patterns("runs"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("XLA_FLAGS")  # a reader's devices, not the tests' eight
    if main_run := os.environ.get("HGPO_MAIN_RUN"):  # whose rollout the quickstart compiles, too
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(Path(main_run).resolve().parent / "cache" / "compiled"))
    notebook = nbformat.read(book, as_version=4)
    for cell in notebook.cells:
        for long, short in SHORTER.get(book.stem, {}).items():
            cell.source = cell.source.replace(long, short)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path / "notebooks"}}).execute()
    assert not complaints([output for cell in notebook.cells for output in cell.get("outputs", ())])
