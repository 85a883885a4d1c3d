"""`bench accelerator`: whatever happens to one part, the others' rows are kept."""

import json
import time

import pytest

from hgpo_jax.bench import __main__ as command
from hgpo_jax.bench import accelerator, policies
from hgpo_jax.config import load

PART = """
import json, sys, time
what, path = sys.argv[1], sys.argv[-1]
if what == "hangs":
    time.sleep(600)
if what == "fails":
    print("first line")
    sys.exit("no such kernel")
rows = [{"name": "speed", "value": 2.0, "unit": "s", "limit_share": 0.5, "ratio": None}, {"name": "machine"}]
json.dump(rows, open(path, "w"))
"""


def test_a_part_that_fails_or_hangs_costs_the_others_nothing(bench, tmp_path, monkeypatch, capfd):
    (tmp_path / "fake_part.py").write_text(PART)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    whats = ("fails", "works", "hangs", "works later")
    monkeypatch.setattr(accelerator, "PARTS", [(what, "fake_part", [what], False) for what in whats])
    monkeypatch.setattr(accelerator, "TINY", {what: [] for what in whats})
    began, seen, part = time.monotonic(), [], accelerator._part

    def noted(*given):
        file = tmp_path / "rows.json"
        seen.append(len(json.loads(file.read_text())) if file.exists() else 0)
        return part(*given)

    monkeypatch.setattr(accelerator, "_part", noted)
    rows = {row["name"]: row for row in bench("accelerator", "--minutes", "0.04", "--tiny")}
    assert time.monotonic() - began < 60  # what hangs sleeps for ten minutes
    assert seen == [0, 1, 2]  # rows are written after every part
    assert "fails: exit code 1: no such kernel" in rows
    assert rows["works: speed"] == {"name": "works: speed", "value": 2.0, "unit": "s", "limit_share": 0.5, "ratio": None}
    assert "works: machine" not in rows and "cores" in rows["machine"]["value"]
    assert any(name.startswith("hangs: stopped after") for name in rows)
    assert "works later: no time was left" in rows
    out, err = capfd.readouterr()
    assert "[1/4] fails" in err and "| works: speed | 2 | s | 50% |" in out


def test_without_an_accelerator_it_is_refused(monkeypatch, refused):
    monkeypatch.setattr(accelerator, "_backend", lambda: "cpu")
    assert "jax finds no accelerator here; --tiny" in refused("accelerator")


@pytest.mark.parametrize("tiny", [False, True])
def test_every_part_is_one_that_its_command_takes(tiny, monkeypatch):
    monkeypatch.setattr(accelerator, "_peer_works", lambda: True)
    for _, module, arguments, has_peer in accelerator.PARTS:
        name, *rest = accelerator._arguments(module, arguments, has_peer, tiny=tiny)
        if module == accelerator.TRAIN:
            load(None, [name, *rest])
            continue
        parser = command.cli.parser(name, "")
        command.BENCHES[name][0].add_arguments(parser)
        args = parser.parse_intermixed_args(rest)
        if name != "train":
            policies.workload(args)


@pytest.mark.slow
def test_a_part_of_each_kind_runs_with_small_shapes(bench, monkeypatch):
    first = {accelerator.PARTS[n][0]: accelerator.PARTS[n] for n in (0, len(accelerator.PARTS) - 1)}
    monkeypatch.setattr(accelerator, "PARTS", tuple(first.values()))
    rows = {row["name"]: row for row in bench("accelerator", "--tiny", "--minutes", "20")}
    assert not [name for name, row in rows.items() if row["unit"] == "not measured"]
    for title in first:
        assert any(name.startswith(f"{title}: ") for name in rows), title
    assert rows["default run: whole command, nothing cached"]["value"] > 1
