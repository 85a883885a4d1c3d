"""`python -m hgpo_jax.bench envs`: its rows, and what it leaves out or refuses."""

import argparse
import shutil
import sys
from pathlib import Path

import pytest

from hgpo_jax.bench import environments
from hgpo_jax.policy.tokenizer import text_tokenizer
from hgpo_jax.utils.errors import ConfigError

TESTS = Path(__file__).parents[1]
KEYS = {"name", "value", "unit", "limit_share", "ratio"}


def run(**given):
    p = argparse.ArgumentParser()
    environments.add_arguments(p)
    options = [f"--{name}={value}" for name, value in {"batch": 16, "repeats": 2, **given}.items()]
    return environments.run(p.parse_args(options))


def test_without_data_its_rows_are_left_out_in_one_line(capsys):
    rows = run()
    assert all(set(row) == KEYS and row["value"] > 0 for row in rows)
    assert {row["name"].split()[0] for row in rows} == {"household"}
    assert capsys.readouterr().out.splitlines() == ["left out, because not given: --alfworld, --webshop, --products, --waiting"]


def test_limits_and_recorded_times():
    row = environments.row("alfworld step", 0.15, "ms")
    assert set(row) == KEYS
    assert row["limit_share"] == pytest.approx(0.5) and row["ratio"] == pytest.approx(166 / 0.15)
    row = environments.row("alfworld step, slowest game", 0.2, "ms")
    assert row["limit_share"] is None and row["ratio"] is None


@pytest.mark.parametrize("name", ["alfworld", "webshop"])
def test_a_folder_without_the_data_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match=f"^--{name} {tmp_path}: ") as refusal:
        run(**{name: tmp_path})
    assert "\n" not in str(refusal.value)


@pytest.mark.slow
def test_every_row(tmp_path, capsys):
    sys.path.insert(0, str(TESTS / "webshop"))
    from webshop_tiny import write

    for file, name in zip(write(tmp_path), ("items_shuffle_5.json", "items_ins_5.json"), strict=False):
        shutil.move(file, tmp_path / name)
    text_tokenizer(["look"]).save_pretrained(tmp_path / "tokenizer")
    games = {"alfworld": TESTS / "alfworld" / "data", "tokenizer": tmp_path / "tokenizer"}
    rows = run(**games, repeats=1, webshop=tmp_path, products=300, waiting=2, episodes=4, workers=2)
    assert capsys.readouterr().out == ""
    assert all(set(row) == KEYS and row["value"] > 0 for row in rows)
    names = {row["name"] for row in rows}
    assert set(environments.LIMITS) <= names and set(environments.RECORDED) <= names
    assert len(names) == len(rows) and "alfworld told in chat, 64 prompts" in names
    assert {"webshop, 300 products: build", "alfworld compiled step, batch 256"} <= names
    asynchronous = [row for row in rows if row["name"].startswith("waiting, ") and "ready_fraction=0.25" in row["name"]]
    assert len(asynchronous) == 2 and all(row["ratio"] > 0 for row in asynchronous)
