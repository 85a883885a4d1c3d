"""`python -m hgpo_jax.bench envs`: its rows, and what it refuses."""

import shutil
import sys
from pathlib import Path

import pytest

from hgpo_jax.bench import environments

TESTS = Path(__file__).parents[1]


def test_limits_and_recorded_times():
    row = environments.mean("step", [0.1, 0.2], 0.3, 166)
    assert row["value"] == pytest.approx(0.15)
    assert row["limit_share"] == pytest.approx(0.5) and row["ratio"] == pytest.approx(166 / 0.15)
    row = environments.mean("open", [0.2])
    assert row["limit_share"] is None and row["ratio"] is None


@pytest.mark.parametrize("name", ["alfworld", "webshop"])
def test_a_folder_without_the_data_is_refused(name, tmp_path, refused):
    assert refused("envs", f"--{name}", str(tmp_path)).startswith(f"error: --{name} {tmp_path}: ")


@pytest.mark.slow
def test_every_row(tmp_path, bench, monkeypatch):
    sys.path.insert(0, str(TESTS / "webshop"))
    from webshop_tiny import write

    monkeypatch.setattr(environments, "WAITING", 2)
    for file, name in zip(write(tmp_path), ("items_shuffle_5.json", "items_ins_5.json"), strict=False):
        shutil.move(file, tmp_path / name)
    games = "--alfworld", str(TESTS / "alfworld" / "data")
    *rows, _ = bench("envs", *games, "--webshop", str(tmp_path), "--products", "300", "--passages", "200", "--waiting", "2")
    assert all(row["value"] > 0 for row in rows)
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names) and {name.split()[0] for name in names} == {"alfworld", "webshop", "200", "waiting"}
    assert [row["name"] for row in rows if row["ratio"]] == [
        "alfworld load and reset", "alfworld step", "webshop reset", "webshop click",
        *(f"waiting 2 ms, {kind} times, 2 episodes: ready_fraction=0.25" for kind in ("exponential", "constant")),
    ]  # fmt: skip
