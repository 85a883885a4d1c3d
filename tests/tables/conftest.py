"""The small plan, the command that collects its runs, and figures that are built but not rendered."""

import json

import pytest
from matplotlib.figure import Figure
from small_plan import write_plan

from hgpo_jax.tables import __main__ as tables
from hgpo_jax.tables import plan as planning


@pytest.fixture
def small(tmp_path):
    return planning.read(write_plan(tmp_path))


@pytest.fixture
def sketches(monkeypatch):
    """Pictures are empty files: rendering them takes most of the time of `collect`."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **options: None)


@pytest.fixture
def collect(tmp_path, capsys, sketches):
    """Collects the runs of tmp_path/RUNS into tmp_path/out by the plan tmp_path/small.yaml: what it prints, and its record."""

    def call(runs: str = "runs", *more: str) -> tuple[str, dict]:
        (tmp_path / runs).mkdir(exist_ok=True)
        capsys.readouterr()
        tables.main([
            "collect", str(tmp_path / runs), "--plan", str(tmp_path / "small.yaml"), "--to", str(tmp_path / "out"), *more
        ])  # fmt: skip
        return capsys.readouterr().out, json.loads((tmp_path / "out" / "small.json").read_text())

    return call
