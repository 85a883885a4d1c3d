"""`bench accelerator`: whatever happens to one part, the others' rows are kept."""

import argparse
import json
import time

import pytest

from hgpo_jax.bench import __main__ as command
from hgpo_jax.bench import accelerator
from hgpo_jax.config import load
from tests.helpers.clocks import set_clock

PART = """
import json, sys, time
what, path = sys.argv[2], sys.argv[-1]
if what == "hangs":
    time.sleep(600)
if what == "fails":
    print("first line")
    sys.exit("no such kernel")
rows = [{"name": "speed", "value": 2.0, "unit": "s", "limit_share": 0.5, "ratio": None}, {"name": "machine"}]
json.dump(rows, open(path, "w"))
"""


def test_a_part_that_fails_or_hangs_costs_the_others_nothing(bench, tmp_path, monkeypatch, capfd):
    (tmp_path / "hgpo_jax.py").write_text(PART)
    monkeypatch.chdir(tmp_path)  # where `python -m hgpo_jax` is this program
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(accelerator, "PARTS", {what: f"bench {what}" for what in ("fails", "works", "hangs", "late")})
    monkeypatch.setattr(accelerator, "TINY", {"bench": ""})
    monkeypatch.setattr(accelerator, "SHARE", 1)
    seen, spent, part = [], [0], accelerator.part

    def noted(command, seconds):
        file = tmp_path / "rows.json"
        seen.append(len(json.loads(file.read_text())) if file.exists() else 0)
        if "hangs" in command:  # the one part that does not have all the time that it needs
            spent[0], seconds = seconds, 2
        return part(command, seconds)

    monkeypatch.setattr(accelerator, "part", noted)
    set_clock(monkeypatch, accelerator, monotonic=lambda: time.monotonic() + spent[0])
    rows = {row["name"]: row for row in bench("accelerator", "--minutes", "5", "--tiny")}
    assert seen == [0, 1, 2]  # rows are written after every part
    assert "fails: exit code 1: no such kernel" in rows
    assert rows["works: speed"] == {"name": "works: speed", "value": 2.0, "unit": "s", "limit_share": 0.5, "ratio": None}
    assert "works: machine" not in rows and "cores" in rows["machine"]["value"]
    assert any(name.startswith("hangs: stopped after") for name in rows)
    assert "late: no time was left" in rows
    out, err = capfd.readouterr()
    assert "first line" in err  # of a part that failed
    assert 'hgpo_jax.py", line 5' in err  # where a part hung
    assert "[1/4] fails" in err and "| works: speed | 2 | s | 50% |" in out


def test_without_an_accelerator_it_is_refused(monkeypatch, refused):
    monkeypatch.setattr(accelerator, "python", lambda program: "cpu")
    assert "jax finds no accelerator here; --tiny" in refused("accelerator")


def test_a_part_leaves_time_to_the_others(bench, monkeypatch):
    limits = []
    monkeypatch.setattr(accelerator, "peer_works", lambda: False)
    monkeypatch.setattr(accelerator, "part", lambda command, seconds: limits.append(seconds) or [])
    bench("accelerator", "--minutes", "1", "--tiny")
    assert max(limits) <= 60 * accelerator.SHARE < 30


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("peer", [False, True])
def test_every_part_is_one_that_its_command_takes(tiny, peer, monkeypatch):
    monkeypatch.setattr(accelerator, "peer_works", lambda: peer)
    options = argparse.Namespace(tiny=tiny, alfworld="GAMES", tokenizer="WORDS")
    for text in accelerator.PARTS.values():
        name, *rest = accelerator.words(text, options)
        if name == "train":
            load(None, rest)
            continue
        parser = command.cli.parser(name, "")
        command.BENCHES[rest[0]].add_arguments(parser)
        args = parser.parse_intermixed_args(rest[1:])
        assert peer or not getattr(args, "against", None)
        if "{alfworld}" in text:
            assert load(args.config, args.overrides).env.data == "GAMES"


def test_the_iteration_of_alfworld_asks_for_its_folders(bench, monkeypatch):
    monkeypatch.setattr(accelerator, "PARTS", {"games": accelerator.ALFWORLD})
    assert bench("accelerator", "--tiny")[0]["name"] == "games: needs --alfworld and --tokenizer"


@pytest.mark.slow
def test_a_part_of_each_kind_runs_with_small_shapes(bench, monkeypatch):
    chosen = {title: accelerator.PARTS[title] for title in ("default run", "update, offload")}
    monkeypatch.setattr(accelerator, "PARTS", chosen)
    rows = {row["name"]: row for row in bench("accelerator", "--tiny", "--minutes", "20")}
    assert not [name for name, row in rows.items() if row["unit"] == "not measured"]
    for title in chosen:
        assert any(name.startswith(f"{title}: ") for name in rows), title
    assert rows["default run: whole command, nothing cached"]["value"] > 1
