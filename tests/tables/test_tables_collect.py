"""What is collected from run folders, against plain arithmetic."""

import csv
import errno
import json
import math
import shutil
import statistics
import types

import numpy as np
import pytest
from scipy import stats
from small_plan import SMALL, finish, write_plan

from hgpo_jax import config as configuration
from hgpo_jax.tables import __main__ as tables
from hgpo_jax.tables import advantage_errors, compare, figures, plan_results, run_results
from hgpo_jax.tables import plan as planning
from hgpo_jax.tables.compare import Row
from hgpo_jax.tables.documents import table_csv
from hgpo_jax.tables.plan import Cell
from hgpo_jax.utils.errors import ConfigError


def test_paired_differences_are_scipys():
    rng = np.random.default_rng(0)
    ours = dict(enumerate(rng.normal(1.0, 2.0, 12).tolist()))
    theirs = dict(enumerate(rng.normal(0.0, 2.0, 14).tolist()))  # two seeds that only one side has
    found = compare.paired_difference(ours, theirs)
    pairs = [(ours[s], theirs[s]) for s in range(12)]
    test = stats.ttest_rel(*zip(*pairs, strict=True))
    assert found.n == 12
    assert found.mean == pytest.approx(statistics.mean(a - b for a, b in pairs))
    assert found.error == pytest.approx(stats.sem([a - b for a, b in pairs]))
    assert found.interval == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert found.p == pytest.approx(test.pvalue)
    assert (found.positive, found.negative) == (sum(a > b for a, b in pairs), sum(a < b for a, b in pairs))
    assert compare.paired_difference({0: 1.0}, {0: 2.0, 1: 3.0}) is None
    assert compare.paired_difference({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}).p == 1
    same = compare.paired_difference({0: 1.5, 1: 2.5, 2: 4.0}, {0: 1.0, 1: 2.0, 2: 3.5})  # of numbers with few values
    assert (same.mean, same.interval, same.p) == (0.5, (-math.inf, math.inf), 1)
    more, fewer = ({seed: 100 * (k + one) / 140 for seed, k in enumerate((5, 6, 9))} for one in (1, 0))
    one_task = compare.paired_difference(more, fewer)
    assert (one_task.error, one_task.interval, one_task.p) == (0, (-math.inf, math.inf), 1)
    none = compare.paired_difference({0: 0.1 + 0.2, 1: 0.1}, {0: 0.3, 1: 0.1})
    assert (none.mean, none.interval, none.positive, none.p) == (0, (0, 0), 0, 1)
    row = Row("T", "near", "hgpo", "AUC", 12, 12, 0, 12, 1.0, None, None, "gigpo", found._replace(p=1.23456e-12))
    assert table_csv([row]).splitlines()[1].endswith(f",12,{found.positive},{found.negative},1.235e-12")


@pytest.mark.parametrize(("pairs", "std"), [(2, 1.0), (12, 6.0)])
def test_the_smallest_difference_that_is_found(pairs, std):
    """By its definition, the noncentral t distribution."""
    smallest = compare.detectable(pairs, std)
    found_from = stats.t.ppf(0.975, pairs - 1)
    assert stats.nct.sf(found_from, pairs - 1, smallest * math.sqrt(pairs) / std) == pytest.approx(0.8, abs=1e-3)
    needed = compare.pairs_for(2.0, std)
    assert compare.detectable(needed, std) <= 2.0 < compare.detectable(needed - 1, std)
    assert compare.pairs_for(2.0, 0.0) == 2


def test_existing_cells_are_filled_and_missing_ones_marked(tmp_path, small, collect):
    runs = tmp_path / "runs"
    curves = {("gigpo", 0): [0.1, 0.2, 0.6], ("gigpo", 1): [0.2, 0.4, 0.6], ("gigpo", 2): [0.0, 0.3, 0.3],
              ("hgpo", 0): [0.4, 0.5, 0.9], ("hgpo", 1): [0.1, 0.4, 0.7]}  # fmt: skip
    for (method, seed), curve in curves.items():
        finish(runs, small, Cell("near", method, seed), curve, success=curve[-1])
    finish(runs, small, Cell("near", "gigpo", 3), [0.9, 0.9, 0.9])
    (runs / "near/gigpo/s3/transcripts.txt").unlink()  # trained, not ended
    begun = runs / Cell("near", "hgpo", 2).name
    begun.mkdir(parents=True)
    row = {"iteration": 0, "success": 1.0, "seconds": {"rollout": 1, "update": 1}}
    (begun / "metrics.jsonl").write_text(json.dumps(row) + '\n{"iter')
    finish(runs, small, Cell("far", "hgpo", 0), [0.1, 0.1, 0.1], evaluated=[0.5, 0.6, 0.55])
    finish(runs, small, Cell("far", "hgpo", 1), [0.1, 0.1, 0.1])  # trained, not evaluated

    said, record = collect()
    out = tmp_path / "out"
    assert (out / "small.md").read_text().strip() == said.strip()
    assert {path.name for path in out.glob("*.png")} == {"small.png"}  # two pairs say too little for a forest
    rows = {(r["setting"], r["method"], r["column"]): r for r in csv.DictReader((out / "small.csv").read_text().splitlines())}
    assert len(rows) == 2 * 3 + 2
    auc = rows["near", "hgpo", "AUC"]
    wanted, other = ([100 * statistics.mean(curves[method, seed]) for seed in (0, 1)] for method in ("hgpo", "gigpo"))
    assert float(auc["mean"]) == pytest.approx(statistics.mean(wanted), abs=1e-4)
    assert float(auc["std"]) == pytest.approx(statistics.stdev(wanted), abs=1e-4)
    assert [auc[name] for name in ("wanted", "done", "begun", "n", "paired_n", "published")] == ["4", "2", "1", "2", "2", ""]
    difference = statistics.mean(a - b for a, b in zip(wanted, other, strict=True))
    assert float(auc["paired_mean"]) == pytest.approx(difference, abs=1e-4)
    assert float(rows["near", "gigpo", "last"]["mean"]) == pytest.approx(100 * statistics.mean([0.4, 0.5, 0.3]), abs=1e-4)

    far = rows["far", "hgpo", "success"]
    assert (far["done"], far["begun"], far["n"]) == ("1", "1", "1")
    assert (float(far["mean"]), float(far["std"])) == pytest.approx((55, 5))  # over its evaluation seeds
    assert (float(far["published"]), float(far["published_std"]), float(far["difference"])) == pytest.approx((50.25, 1.5, 4.75))
    assert "| HGPO | 1 of 4, 1 begun | 55.0 ± 5.0 | 50.25 ± 1.5 | +4.8 |" in said
    assert "| GiGPO | missing | - |" in said
    assert r"HGPO & 1 of 4, 1 begun & 55.0 $\pm$ 5.0" in (out / "small.tex").read_text()

    assert {cell["cell"] for cell in record["cells"] if cell["done"]} == {
        *(f"near/{method}/s{seed}" for method, seed in curves), "far/hgpo/s0",
    }  # fmt: skip
    assert len(record["missing"]) == 16 - 9
    one = next(cell for cell in record["cells"] if cell["cell"] == "near/hgpo/s1")
    assert (one["curve"], one["seconds"]) == ([0.1, 0.4, 0.7], 4.5)
    kept, read = plan_results.read_record(small, out / "small.json").cells, run_results.read_all(small, runs)
    for cell, result in read.items():
        assert (kept[cell] is None) == (result is None)
        if result:
            for name, number in result.numbers.items():
                assert kept[cell].numbers[name] == pytest.approx(number, abs=1e-3)
            assert kept[cell].model_copy(update={"numbers": {}}) == result.model_copy(update={"numbers": {}})


def measured(seed, bias2):
    shares = {str(k): bias2 for k in advantage_errors.LEVELS}
    truth = {name: {"cosine": bias2, "mse": 2 * bias2} for name in advantage_errors.AT_START}
    return {
        "seed": seed, "fields": SMALL["fields"], "success": 0.5, "turns": 9.0, "steps": 5, "return_variance": 4.0,
        "peers": [1, 0.5, 0.25], "bias2": shares, "variance": shares, "mse": shares,
        "oracle": dict.fromkeys(advantage_errors.AT_START, bias2 / 2), "truth": truth,
    }  # fmt: skip


def test_what_is_outside_the_noise_is_listed_once_and_stands_beside_the_bias(tmp_path, collect):
    """Of two tables with the same comparison that of more pairs counts."""
    tables = [SMALL["tables"][0] | {"title": title, "seeds": seeds} for title, seeds in (("T", [0, 1]), ("U", [0, 1, 2]))]
    plan, runs = planning.read(write_plan(tmp_path, tables=tables, bias_seeds=[8])), tmp_path / "runs"
    for seed, lift in enumerate((0.1, 0.12, 0.08)):
        finish(runs, plan, Cell("near", "gigpo", seed), [0.2, 0.3, 0.4 + seed / 10], success=0.5 + seed / 10)
        finish(runs, plan, Cell("near", "hgpo", seed), [0.2, 0.3 + 3 * lift, 0.4 + seed / 10], success=0.7 - seed / 10)
    (runs / "bias.json").write_text(json.dumps({"near": [measured(7, 0.5), measured(8, 0.25)], "gone": [measured(7, 0.5)]}))
    said, _ = collect()
    half = stats.t.ppf(0.975, 2) * 2 / 3**0.5
    assert f"* U, Near: HGPO minus GiGPO, AUC +10.0 ± 1.2 ({10 - half:+.1f} to {10 + half:+.1f}), 3 of 3, p = " in said
    assert "* T, Near" not in said
    # AUC and the last two iterations, not the evaluation.
    assert "leaves out 0 in 2 of 3 different comparisons of 3 pairs or more" in said
    half = stats.t.ppf(0.975, 1)
    gain = f"+11.0 ± 1.0 ({11 - half:+.1f} to {11 + half:+.1f}), 2 of 2"  # of the first table
    assert f"| Near | 8 | 50% | 1.00, 0.50, 0.25 | 0.250 + 0.250 |{' 0.250 + 0.250 |' * 3} {gain} |" in said


def test_runs_with_other_settings_are_named(tmp_path, small, collect):
    runs = tmp_path / "runs"
    for seed, (changes, curve) in enumerate((({"run_dir": "elsewhere", "mesh": "data=2"}, [0.1, 0.2, 0.3]),
                                             ({"iterations": 2}, [0.1, 0.2]))):  # fmt: skip
        finish(runs, small, cell := Cell("near", "hgpo", seed), curve)
        config = planning.config_of(small, cell).model_copy(update=changes)
        (runs / cell.name / "config.yaml").write_text(configuration.dump(config))
    said, record = collect()
    assert said.endswith("## Runs with other settings than the plan's\n\n* near/hgpo/s1: iterations=2\n\n")
    assert [cell.get("changed") for cell in record["cells"]] == [None, ["iterations=2"]]
    before, now = ["a=1", "b=2", "b=3", "env.data=x"], ["a=1", "b=2", "c=4", "env.data=y"]
    assert run_results.changed_fields(before, now) == ["b=3", "without c=4"]


def test_pairs_that_did_not_start_alike_are_named_and_left_out(tmp_path, small, collect):
    runs = tmp_path / "runs"
    for method, seed, weights, last in (("gigpo", 0, b"a", 0.3), ("hgpo", 0, b"a", 0.6), ("gigpo", 1, b"b", 0.3),
                                        ("hgpo", 1, b"c", 0.9), ("gigpo", 2, b"d", 0.3), ("hgpo", 2, None, 0.9)):  # fmt: skip
        finish(runs, small, cell := Cell("near", method, seed), [0.1, 0.2, last])
        if weights:
            (runs / cell.name / "start").mkdir()
            (runs / cell.name / "start" / "model.safetensors").write_bytes(weights)
    said, record = collect()
    assert said.endswith(
        "## Pairs left out, which did not start from equal weights or had not the same settings\n\n"
        "* near/hgpo/s1, near/gigpo/s1\n\n"
    )
    assert "| HGPO | 3 of 4 | 36.7 ± 5.8 | +15.0 ± 5.0 (" in said  # (30 + 60) / 3 / 2: without seed 1
    starts = [cell.get("start") for cell in record["cells"]]
    assert len(starts) == 6 and len(set(starts)) == 5 and starts.count(None) == 1
    assert {pair["n"] for pair in record["paired"]} == {2}
    kept, read = plan_results.read_record(small, tmp_path / "out" / "small.json").cells, run_results.read_all(small, runs)
    assert [cell and cell.start for cell in kept.values()] == [cell and cell.start for cell in read.values()]


def test_settings_are_pooled_from_two_pairs_of_each_on(tmp_path, collect):
    near = SMALL["settings"]["near"]
    settings = {
        "near": near,
        "near-2": near | {"title": "Near 2", "fields": ["seed=0"]},
        "nears": {"title": "Both", "pools": ["near", "near-2"], "columns": {"AUC": "train/auc"}},
    }
    table = SMALL["tables"][0] | {"settings": list(settings), "seeds": {"near": [0, 1], "near-2": [1, 2]}}
    plan, runs = planning.read(write_plan(tmp_path, settings=settings, tables=[table], published=None)), tmp_path / "runs"
    gain = {("near", 0): 0.3, ("near", 1): 0.6, ("near-2", 1): 0.0, ("near-2", 2): 0.6}
    for (setting, seed), lift in gain.items():
        if (setting, seed) == ("near-2", 2):
            assert {pair["setting"] for pair in collect()[1]["paired"]} == {"near"}
        finish(runs, plan, Cell(setting, "gigpo", seed), [0.0, 0.0, 0.0])
        finish(runs, plan, Cell(setting, "hgpo", seed), [0.0, 0.0, lift])
    said, record = collect()
    paired = {pair["setting"]: pair for pair in record["paired"] if pair["column"] == "AUC"}
    assert [paired[name]["n"] for name in ("near", "near-2", "nears")] == [2, 2, 4]
    theirs = stats.ttest_1samp([100 * lift / 3 for lift in gain.values()], 0)
    assert paired["nears"]["mean"] == pytest.approx(12.5)
    assert paired["nears"]["interval"] == pytest.approx(theirs.confidence_interval())
    assert "### Both\n" in said and "| HGPO | 4 of 4 | 12.5 ± 9.6 | +12.5 ± 4.8 (" in said
    # A pool of four pairs is neither counted among the different comparisons nor drawn as curves.
    assert "different comparisons" not in said
    panels = figures.draw_curves(plan, run_results.read_all(plan, runs)).axes
    assert [axis.get_title() for axis in panels] == ["T\nNear", "T\nNear 2"]


def test_what_was_collected_elsewhere_is_kept(tmp_path, small, collect):
    """The runs of other machines are gone; what was collected of them is not."""
    first, second, old = tmp_path / "first", tmp_path / "second", tmp_path / "out" / "small.json"
    for seed in (0, 1):
        finish(first, small, Cell("near", "gigpo", seed), [0.1, 0.2, 0.3])
        finish(first, small, Cell("near", "hgpo", seed), [0.1, 0.2, 0.5 + seed / 10])
    begun = first / Cell("near", "hgpo", 2).name
    begun.mkdir(parents=True)
    (begun / "metrics.jsonl").write_text(json.dumps({"iteration": 0, "success": 0.5, "seconds": {}}) + "\n")
    (first / "bias.json").write_text(json.dumps({"near": [measured(7, 0.5)]}))
    collect("first")
    before = {file.name: file.read_bytes() for file in old.parent.iterdir()}

    finish(second, small, Cell("near", "hgpo", 1), [0.1, 0.2, 0.9])
    finish(second, small, Cell("near", "hgpo", 2), [0.1, 0.2, 0.8])
    finish(second, small, Cell("near", "gigpo", 2), [0.1, 0.2, 0.3])
    (second / "bias.json").write_text(json.dumps({"near": [measured(8, 0.25)]}))
    with pytest.raises(ConfigError, match=r"small\.json: 4 results would be lost, as near/gigpo/s0; add --record"):
        collect("second")
    assert {file.name: file.read_bytes() for file in old.parent.iterdir()} == before
    _, kept = collect("second", f"--record={old}")
    assert {cell["cell"]: cell["curve"][-1] for cell in kept["cells"] if cell["done"]} == {
        "near/gigpo/s0": 0.3, "near/gigpo/s1": 0.3, "near/gigpo/s2": 0.3,
        "near/hgpo/s0": 0.5, "near/hgpo/s1": 0.9, "near/hgpo/s2": 0.8,  # the newer, and what has ended
    }  # fmt: skip
    assert all(cell["done"] for cell in kept["cells"])
    assert sorted(one["seed"] for one in kept["bias"]["near"]) == [7, 8]
    assert {pair["n"] for pair in kept["paired"]} == {3}
    assert collect("second", f"--record={old}")[1] == kept
    # Several records are united, too.
    (tmp_path / "one.json").write_bytes(before["small.json"])
    assert collect("nothing", f"--record={tmp_path}/one.json", f"--record={old}")[1]["missing"] == kept["missing"]

    other = kept | {"cells": [kept["cells"][0] | {"cell": "a/b/s0"}]}
    for text, reason in (
        (None, "no such file"), ('{"cells": [{}]}', "is not a record of runs"),
        (json.dumps(other), "is a record of another plan, 'small'"),
        ('{"fields": {}, "cells": [], "bias": {"near": [{}]}}', "is not a record of runs"),
    ):  # fmt: skip
        if text:
            (tmp_path / "odd.json").write_text(text)
        with pytest.raises(ConfigError, match=reason):
            collect("second", f"--record={tmp_path}/odd.json")


def test_a_record_of_an_earlier_plan_says_so(tmp_path, small, collect):
    """What the plan has changed since is named, runs of another length have no mean over it, and lost cells are not lost."""
    for seed in (0, 1):
        for method in ("gigpo", "hgpo"):
            finish(tmp_path / "runs", small, Cell("near", method, seed), [0.1, 0.2, 0.3 + seed])
    collect()
    old, record = tmp_path / "out" / "small.json", tmp_path / "record.json"
    old.rename(record)
    write_plan(tmp_path, fields=["iterations=2", "mesh=data=1"], methods=SMALL["methods"] | {
        "hgpo": {"title": "HGPO", "fields": ["method=hgpo", "advantage.alpha=3"]}
    })  # fmt: skip
    said, _ = collect("empty", f"--record={record}")
    assert "* near/hgpo/s1: advantage.alpha=2, iterations=3" in said and "* near/gigpo/s0: iterations=3" in said
    assert "| HGPO | 2 of 4 | - |  | - |  | 50.0 ± 0.0 |" in said
    said, _ = collect("empty", f"--record={old}")
    assert "* near/hgpo/s1: advantage.alpha=2, iterations=3" in said  # it is not forgotten

    # What one side has only now is another setting, too: the runs had it not.
    write_plan(tmp_path, methods=SMALL["methods"] | {
        "gigpo": {"title": "GiGPO", "fields": ["method=gigpo", "learner.lr=1e-4"]}
    })  # fmt: skip
    said, kept = collect("empty", f"--record={record}")
    assert "* near/gigpo/s1: without learner.lr=1e-4" in said and "* near/hgpo/s1, near/gigpo/s1" in said
    assert not kept["paired"]

    write_plan(tmp_path, tables=[SMALL["tables"][0] | {"seeds": [1, 2]}])
    before = old.read_bytes()
    for more in ([], [f"--record={record}"]):
        with pytest.raises(ConfigError, match=r"2 results would be lost, as near/gigpo/s0"):
            collect("runs", *more)
    assert old.read_bytes() == before


def test_success_that_is_unknown_is_no_damage(tmp_path, small, collect):
    """An environment may not report it, in one iteration or at all."""
    runs = tmp_path / "runs"
    finish(runs, small, Cell("near", "gigpo", 0), [0.1, None, 0.3])
    finish(runs, small, Cell("near", "hgpo", 0), [None, None, None], success=None)
    results = run_results.read_all(small, runs)
    one, none = (results[Cell("near", method, 0)] for method in ("gigpo", "hgpo"))
    assert one.numbers["train/auc"] == (pytest.approx(20.0), None) and one.numbers["train/last"] == (pytest.approx(30.0), None)
    assert none.numbers == {"final/greedy": (100.0, None)}
    collect()
    record = (tmp_path / "out" / "small.json").read_text()
    assert "NaN" not in record and "Infinity" not in record and "[0.1, null, 0.3]" in record
    again = plan_results.read_record(small, tmp_path / "out" / "small.json").cells[Cell("near", "gigpo", 0)]
    assert again.curve == [0.1, None, 0.3]


def test_a_line_is_named_where_its_last_known_point_is(tmp_path, small, collect):
    for seed in range(2):
        finish(tmp_path / "runs", small, Cell("near", "gigpo", seed), [0.1, 0.2, None])
        finish(tmp_path / "runs", small, Cell("near", "hgpo", seed), [0.1, 0.3, 0.4])
    figure = figures.draw_curves(small, run_results.read_all(small, tmp_path / "runs"))
    ends = {text.get_text().partition(" (")[0]: text.xy for axis in figure.axes for text in axis.texts if hasattr(text, "xy")}
    assert ends == {small.methods["gigpo"].title: (1, pytest.approx(0.2)), small.methods["hgpo"].title: (2, pytest.approx(0.4))}
    collect()
    assert (tmp_path / "out" / "small.png").is_file()


def test_numbers_of_evaluations_are_not_lost(tmp_path, small, collect):
    runs = tmp_path / "runs"
    finish(runs, small, Cell("far", "hgpo", 0), [0.1, 0.1, 0.1], evaluated=[0.5, 0.6, 0.55])
    collect()
    shutil.rmtree(runs / "far/hgpo/s0/evaluations")
    with pytest.raises(ConfigError, match="1 results would be lost, as far/hgpo/s0"):
        collect()
    shutil.copy(tmp_path / "out" / "small.json", tmp_path / "before.json")
    _, record = collect("runs", "--record", str(tmp_path / "before.json"))
    assert "held_out/success" in next(cell for cell in record["cells"] if cell["cell"] == "far/hgpo/s0")["numbers"]


def test_a_longer_run_counts_before_its_record_and_a_shorter_does_not(tmp_path, small, collect):
    """The plan got more iterations, and a run that had ended goes on, or begins anew."""
    folder = tmp_path / "runs" / "near/hgpo/s0"
    finish(tmp_path / "runs", small, Cell("near", "hgpo", 0), [0.1, 0.2, 0.3])
    collect()
    record = shutil.copy(tmp_path / "out" / "small.json", tmp_path / "record.json")
    (folder / "evaluation.json").unlink()
    write_plan(tmp_path, fields=["iterations=5", "mesh=data=1"])
    ended = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(ended.partition("\n")[0] + "\n")
    with pytest.raises(ConfigError, match="1 results would be lost, as near/hgpo/s0"):
        collect()
    (folder / "metrics.jsonl").write_text(ended + json.dumps({"iteration": 3, "success": 0.4, "seconds": {}}) + "\n")
    for more in ([], [f"--record={record}"]):
        (kept,) = collect("runs", *more)[1]["cells"]
        assert (kept["done"], kept["iterations"]) == (False, 4)


def test_bias_is_measured_for_the_seeds_that_lack(tmp_path, monkeypatch, capsys):
    asked = []

    def measure(config, fields):
        asked.append(config.seed)
        return advantage_errors.Bias(**measured(config.seed, 0.125))

    monkeypatch.setattr(advantage_errors, "measure", measure)
    for seeds, wanted in (([7], [7, 7]), ([7, 8], [8, 8]), ([9], [9, 9]), ([8, 7], [])):
        tables.main(["bias", str(write_plan(tmp_path, bias_seeds=seeds)), "--runs", str(tmp_path / "runs")])
        assert asked == wanted
        asked.clear()
    said = capsys.readouterr().out
    assert said.count("| Near | 7, 8 | 50% |") == 2
    assert said.count("| Near | true advantages | 0.12, 0.25 | 0.12, 0.25 |") == 4
    assert said.count("| Near | Oracle groups | 0.06 | 0.06 |") == 4
    changed = SMALL["settings"] | {"near": SMALL["settings"]["near"] | {"fields": ["env.size=7"]}}
    tables.main(["bias", str(write_plan(tmp_path, bias_seeds=[7], settings=changed)), "--runs", str(tmp_path / "runs")])
    assert asked == [7]  # of the setting that has changed
    assert "| Near |" not in capsys.readouterr().out  # the stand-in measured with the old one
    with pytest.raises(ConfigError, match="bias_seeds: the plan has none"):
        tables.main(["bias", str(write_plan(tmp_path)), "--runs", str(tmp_path / "runs")])
    (tmp_path / "runs" / "bias.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bias\.json: is damaged"):
        tables.main(["bias", str(write_plan(tmp_path)), "--runs", str(tmp_path / "runs")])


@pytest.mark.parametrize(
    ("file", "text", "fragment"),
    [
        ("bias.json", "[" * 100_000, r"bias\.json: is damaged"),
        ("bias.json", '{"near": [{"seed": 7}]}', r"bias\.json: is damaged"),
        ("near/hgpo/s0/metrics.jsonl", "x\n", r"metrics\.jsonl: line 1 is not a row"),
        ("near/hgpo/s0/metrics.jsonl", "x", r"metrics\.jsonl: is damaged, it holds 0 of 3 iterations"),
        ("near/hgpo/s0/metrics.jsonl", '{"iteration": 0}\n', r"metrics\.jsonl: is damaged"),
        ("near/hgpo/s0/metrics.jsonl", '{"iteration": 0, "success": "x", "seconds": {}}\n', r"metrics\.jsonl: is damaged"),
        ("near/hgpo/s0/config.yaml", "x\n", r"config\.yaml: is damaged"),
        ("near/hgpo/s0/evaluation.json", "{", r"evaluation\.json: is not an evaluation"),
        ("near/hgpo/s0/evaluation.json", "[]", r"evaluation\.json: is not an evaluation"),
    ],
)
def test_damaged_results_are_refused_in_one_line(tmp_path, small, collect, file, text, fragment):
    finish(tmp_path / "runs", small, Cell("near", "hgpo", 0), [0.1, 0.2, 0.3])
    (tmp_path / "runs" / file).write_text(text)
    with pytest.raises(ConfigError, match=fragment) as refused:
        collect()
    assert "\n" not in str(refused.value)


def test_a_picture_that_cannot_be_written_leaves_the_last_one(small, tmp_path, monkeypatch):
    def half(file, **options):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(figures, "draw_curves", lambda plan, cells: types.SimpleNamespace(savefig=half))
    monkeypatch.setattr(figures, "draw_differences", lambda plan, rows: None)
    picture = tmp_path / "small.png"
    picture.write_bytes(b"whole")
    with pytest.raises(OSError, match="No space left"):
        figures.draw(small, types.SimpleNamespace(cells={}, measured={}), [], "small", tmp_path)
    assert [path.read_bytes() for path in tmp_path.glob("small.png*")] == [b"whole"]
