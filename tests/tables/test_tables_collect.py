"""What is collected from run folders, against plain arithmetic."""

import csv
import dataclasses
import json
import math
import statistics

import numpy as np
import pytest
from scipy import stats
from small_plan import SMALL, finish, write_plan

from hgpo_jax import config as configuration
from hgpo_jax.errors import ConfigError
from hgpo_jax.tables import __main__ as tables
from hgpo_jax.tables import bias, curves, results
from hgpo_jax.tables import plan as planning
from hgpo_jax.tables.plan import Cell


def test_paired_differences_are_scipys():
    rng = np.random.default_rng(0)
    ours = dict(enumerate(rng.normal(1.0, 2.0, 12).tolist()))
    theirs = dict(enumerate(rng.normal(0.0, 2.0, 14).tolist()))  # two seeds that only one side has
    found = results.paired(ours, theirs)
    pairs = [(ours[s], theirs[s]) for s in range(12)]
    test = stats.ttest_rel(*zip(*pairs, strict=True))
    assert found["n"] == 12
    assert found["mean"] == pytest.approx(statistics.mean(a - b for a, b in pairs))
    assert found["error"] == pytest.approx(stats.sem([a - b for a, b in pairs]))
    assert found["interval"] == pytest.approx(list(test.confidence_interval(0.95)))
    assert found["p"] == pytest.approx(test.pvalue)
    assert (found["positive"], found["negative"]) == (sum(a > b for a, b in pairs), sum(a < b for a, b in pairs))
    assert results.paired({0: 1.0}, {0: 2.0, 1: 3.0}) is None
    assert results.paired({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})["p"] == 1


@pytest.mark.parametrize(("pairs", "std"), [(2, 1.0), (4, 3.0), (12, 6.0), (60, 6.0)])
def test_the_smallest_difference_that_is_found(pairs, std):
    """By its definition, the noncentral t distribution; and in repetitions."""
    smallest = results.detectable(pairs, std)
    found_from = stats.t.ppf(0.975, pairs - 1)
    assert stats.nct.sf(found_from, pairs - 1, smallest * math.sqrt(pairs) / std) == pytest.approx(0.8, abs=1e-3)
    draws = np.random.default_rng(0).normal(smallest, std, (4000, pairs))
    t = draws.mean(axis=1) / (draws.std(axis=1, ddof=1) / math.sqrt(pairs))
    assert (t > found_from).mean() == pytest.approx(0.8, abs=0.025)


def test_how_many_pairs_find_a_difference():
    needed = results.pairs_for(2.0, 6.0)
    assert results.detectable(needed, 6.0) <= 2.0 < results.detectable(needed - 1, 6.0)
    assert results.pairs_for(2.0, 0.0) == 2


def test_existing_cells_are_filled_and_missing_ones_marked(tmp_path, small, capsys):
    runs = tmp_path / "runs"
    curves = {("gigpo", 0): [0.1, 0.2, 0.6], ("gigpo", 1): [0.2, 0.4, 0.6], ("gigpo", 2): [0.0, 0.3, 0.3],
              ("hgpo", 0): [0.4, 0.5, 0.9], ("hgpo", 1): [0.1, 0.4, 0.7]}  # fmt: skip
    for (method, seed), curve in curves.items():
        finish(runs, small, Cell("near", method, seed), curve, success=curve[-1])
    begun = runs / Cell("near", "hgpo", 2).name
    begun.mkdir(parents=True)
    row = {"iteration": 0, "success": 1.0, "seconds": {"rollout": 1, "update": 1}}
    (begun / "metrics.jsonl").write_text(json.dumps(row) + '\n{"iter')
    finish(runs, small, Cell("far", "hgpo", 0), [0.1, 0.1, 0.1], evaluated=[0.5, 0.6, 0.55])
    finish(runs, small, Cell("far", "hgpo", 1), [0.1, 0.1, 0.1])  # trained, not evaluated

    tables.main(["collect", str(runs), "--plan", str(tmp_path / "small.yaml"), "--to", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert (tmp_path / "out" / "small.md").read_text().strip() == said.strip()
    with open(tmp_path / "out" / "small.csv") as file:
        rows = {(r["setting"], r["method"], r["column"]): r for r in csv.DictReader(file)}
    assert len(rows) == 2 * 3 + 2
    auc = rows["near", "hgpo", "AUC"]
    wanted = [100 * statistics.mean(curves["hgpo", seed]) for seed in (0, 1)]
    assert float(auc["mean"]) == pytest.approx(statistics.mean(wanted), abs=1e-4)
    assert float(auc["std"]) == pytest.approx(statistics.stdev(wanted), abs=1e-4)
    assert [auc[name] for name in ("wanted", "done", "begun", "n", "paired_n", "published")] == ["4", "2", "1", "2", "2", ""]
    other = [100 * statistics.mean(curves["gigpo", seed]) for seed in (0, 1)]
    difference = [a - b for a, b in zip(wanted, other, strict=True)]
    assert float(auc["paired_mean"]) == pytest.approx(statistics.mean(difference), abs=1e-4)
    assert float(rows["near", "gigpo", "last"]["mean"]) == pytest.approx(100 * statistics.mean([0.4, 0.5, 0.3]), abs=1e-4)
    assert float(rows["near", "gigpo", "sampled"]["mean"]) == pytest.approx(50, abs=1e-4)

    far = rows["far", "hgpo", "success"]
    assert (far["done"], far["begun"], far["n"]) == ("1", "1", "1")
    assert float(far["mean"]) == pytest.approx(55)
    assert float(far["std"]) == pytest.approx(5)  # over its evaluation seeds
    assert (float(far["published"]), float(far["published_std"]), float(far["difference"])) == pytest.approx((50.25, 1.5, 4.75))
    assert "| HGPO | 1 of 4, 1 begun | 55.0 ± 5.0 | 50.25 ± 1.5 | +4.8 |" in said
    assert "| GiGPO | missing | - |" in said

    record = json.loads((tmp_path / "out" / "small.json").read_text())
    assert {cell["cell"] for cell in record["cells"] if cell["done"]} == {
        *(f"near/{method}/s{seed}" for method, seed in curves), "far/hgpo/s0",
    }  # fmt: skip
    assert len(record["missing"]) == 16 - 8
    assert next(c for c in record["cells"] if c["cell"] == "near/hgpo/s1")["curve"] == [0.1, 0.4, 0.7]
    assert next(c for c in record["cells"] if c["cell"] == "near/hgpo/s1")["seconds"] == 4.5
    tex = (tmp_path / "out" / "small.tex").read_text()
    assert r"HGPO & 1 of 4, 1 begun & 55.0 $\pm$ 5.0" in tex
    assert tex.count(r"\begin{tabular}") == tex.count(r"\end{tabular}") == 2
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"small.png"}  # two pairs say too little for a forest
    kept, read = results.read_record(small, tmp_path / "out" / "small.json"), results.read_all(small, runs)
    for cell, result in read.items():
        assert (kept[cell] is None) == (result is None)
        if result:
            for name, number in result.numbers.items():
                assert kept[cell].numbers[name] == pytest.approx(number, abs=1e-3)
            assert dataclasses.replace(kept[cell], numbers={}) == dataclasses.replace(result, numbers={})


def measured(seed, bias2):
    shares = {str(k): bias2 for k in bias.LEVELS}
    truth = {name: {"cosine": bias2, "mse": 2 * bias2} for name in bias.AT_START}
    return {
        "seed": seed, "fields": SMALL["fields"], "success": 0.5, "peers": [1, 0.5, 0.25], "bias2": shares, "variance": shares,
        "oracle": dict.fromkeys(bias.AT_START, bias2 / 2), "truth": truth,
    }  # fmt: skip


def test_what_is_outside_the_noise_is_listed_and_stands_beside_the_bias(tmp_path, small, capsys):
    runs = tmp_path / "runs"
    for seed, lift in enumerate((0.1, 0.12, 0.08)):
        finish(runs, small, Cell("near", "gigpo", seed), [0.2, 0.3, 0.4 + seed / 10], success=0.5 + seed / 10)
        finish(runs, small, Cell("near", "hgpo", seed), [0.2, 0.3 + 3 * lift, 0.4 + seed / 10], success=0.7 - seed / 10)
    (runs / "bias.json").write_text(json.dumps({"near": [measured(7, 0.5), measured(8, 0.25)], "gone": [measured(7, 0.5)]}))
    plan = str(write_plan(tmp_path, bias_seeds=[8]))
    tables.main(["collect", str(runs), "--plan", plan])
    said = capsys.readouterr().out
    half = stats.t.ppf(0.975, 2) * 2 / 3**0.5
    interval = f"({10 - half:+.1f} to {10 + half:+.1f}), 3 of 3"
    assert f"* T, Near: HGPO minus GiGPO, AUC +10.0 ± 1.2 {interval}, p = " in said
    # AUC and the last two iterations, not the evaluation.
    assert "leaves out 0 in 2 of 3 different comparisons of 3 pairs or more" in said
    assert f"| Near | 8 | 50% | 1.00, 0.50, 0.25 | 0.250 + 0.250 |{' 0.250 + 0.250 |' * 3} +10.0 ± 1.2 {interval} |" in said


def test_runs_with_other_settings_are_named(tmp_path, small, capsys):
    runs = tmp_path / "runs"
    for seed, changes in enumerate(({"run_dir": "elsewhere", "mesh": "data=2"}, {"iterations": 2})):
        cell = Cell("near", "hgpo", seed)
        finish(runs, small, cell, [0.1, 0.2])
        if seed == 0:
            with open(runs / cell.name / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"iteration": 2, "success": 0.3, "seconds": {}}) + "\n")
        config = planning.config_of(small, cell).model_copy(update=changes)
        (runs / cell.name / "config.yaml").write_text(configuration.dump(config))
    tables.main(["collect", str(runs), "--plan", str(tmp_path / "small.yaml"), "--to", str(tmp_path)])
    said = capsys.readouterr().out
    assert said.endswith("## Runs with other settings than the plan's\n\n* near/hgpo/s1: iterations=2\n\n")
    first, second = json.loads((tmp_path / "small.json").read_text())["cells"]
    assert "changed" not in first
    assert second["changed"] == ["iterations=2"]


def test_pairs_that_did_not_start_alike_are_named_and_left_out(tmp_path, small, capsys):
    runs = tmp_path / "runs"
    for method, seed, weights, last in (("gigpo", 0, b"a", 0.3), ("hgpo", 0, b"a", 0.6), ("gigpo", 1, b"b", 0.3),
                                        ("hgpo", 1, b"c", 0.9), ("gigpo", 2, b"d", 0.3), ("hgpo", 2, None, 0.9)):  # fmt: skip
        finish(runs, small, cell := Cell("near", method, seed), [0.1, 0.2, last])
        if weights:
            (runs / cell.name / "start").mkdir()
            (runs / cell.name / "start" / "model.safetensors").write_bytes(weights)
    tables.main(["collect", str(runs), "--plan", str(tmp_path / "small.yaml"), "--to", str(tmp_path)])
    said = capsys.readouterr().out
    assert said.endswith("## Pairs left out, which did not start from equal weights or had not the same settings\n\n"
                         "* near/hgpo/s1, near/gigpo/s1\n\n")
    assert "| HGPO | 3 of 4 | 36.7 ± 5.8 | +15.0 ± 5.0 (" in said  # (30 + 60) / 3 / 2: without seed 1
    record = json.loads((tmp_path / "small.json").read_text())
    starts = [cell.get("start") for cell in record["cells"]]
    assert len(starts) == 6 and len(set(starts)) == 5 and starts.count(None) == 1
    assert {pair["n"] for pair in record["paired"]} == {2}
    kept, read = results.read_record(small, tmp_path / "small.json"), results.read_all(small, runs)
    assert [cell and cell.start for cell in kept.values()] == [cell and cell.start for cell in read.values()]


POOLED = {
    "settings": SMALL["settings"] | {
        "near-2": SMALL["settings"]["near"] | {"title": "Near 2", "fields": ["seed=0"]},
        "nears": {"title": "Both", "pools": ["near", "near-2"], "columns": {"AUC": "train/auc"}},
    },
    "tables": [SMALL["tables"][0] | {"settings": ["near", "near-2", "nears"], "seeds": {"near": [0, 1], "near-2": [1, 2]}}],
}  # fmt: skip


def test_settings_are_pooled(tmp_path, capsys):
    plan, runs = planning.read(write_plan(tmp_path, **POOLED)), tmp_path / "runs"
    gain = {("near", 0): 0.3, ("near", 1): 0.6, ("near-2", 1): 0.0, ("near-2", 2): 0.6}
    for (setting, seed), lift in gain.items():
        finish(runs, plan, Cell(setting, "gigpo", seed), [0.0, 0.0, 0.0])
        finish(runs, plan, Cell(setting, "hgpo", seed), [0.0, 0.0, lift])
    tables.main(["collect", str(runs), "--plan", str(tmp_path / "small.yaml"), "--to", str(tmp_path)])
    paired = {p["setting"]: p for p in json.loads((tmp_path / "small.json").read_text())["paired"] if p["column"] == "AUC"}
    assert [paired[name]["n"] for name in ("near", "near-2", "nears")] == [2, 2, 4]
    theirs = stats.ttest_1samp([100 * lift / 3 for lift in gain.values()], 0)
    assert paired["nears"]["mean"] == pytest.approx(12.5)
    assert paired["nears"]["interval"] == pytest.approx(theirs.confidence_interval())
    said = capsys.readouterr().out
    assert "### Both\n" in said and "| HGPO | 4 of 4 | 12.5 ± 9.6 | +12.5 ± 4.8 (" in said
    panels = curves.draw_curves(plan, results.read_all(plan, runs)).axes
    assert [axis.get_title() for axis in panels] == ["T\nNear", "T\nNear 2"]


def test_a_pool_waits_for_two_pairs_of_each_setting(tmp_path, capsys):
    plan, runs = planning.read(write_plan(tmp_path, **POOLED)), tmp_path / "runs"
    for setting, seed in (("near", 0), ("near", 1), ("near-2", 1)):
        finish(runs, plan, Cell(setting, "gigpo", seed), [0.0, 0.0, 0.0])
        finish(runs, plan, Cell(setting, "hgpo", seed), [0.0, 0.0, 0.3 + seed / 10])
    tables.main(["collect", str(runs), "--plan", str(tmp_path / "small.yaml"), "--to", str(tmp_path)])
    assert {pair["setting"] for pair in json.loads((tmp_path / "small.json").read_text())["paired"]} == {"near"}


def test_what_was_collected_elsewhere_is_kept(tmp_path, small, capsys):
    """The runs of another machine are gone; what was collected of them is not."""
    first, second, to = tmp_path / "first", tmp_path / "second", tmp_path / "out"
    for seed in (0, 1):
        finish(first, small, Cell("near", "gigpo", seed), [0.1, 0.2, 0.3])
        finish(first, small, Cell("near", "hgpo", seed), [0.1, 0.2, 0.5 + seed / 10])
    begun = first / Cell("near", "hgpo", 2).name
    begun.mkdir(parents=True)
    (begun / "metrics.jsonl").write_text(json.dumps({"iteration": 0, "success": 0.5, "seconds": {}}) + "\n")
    (first / "bias.json").write_text(json.dumps({"near": [measured(7, 0.5)]}))
    collect = ["collect", "--plan", str(tmp_path / "small.yaml"), "--to", str(to)]
    tables.main([*collect, str(first)])
    before = {file.name: file.read_bytes() for file in to.iterdir()}

    finish(second, small, Cell("near", "hgpo", 1), [0.1, 0.2, 0.9])
    finish(second, small, Cell("near", "hgpo", 2), [0.1, 0.2, 0.8])
    finish(second, small, Cell("near", "gigpo", 2), [0.1, 0.2, 0.3])
    (second / "bias.json").write_text(json.dumps({"near": [measured(8, 0.25)]}))
    with pytest.raises(ConfigError, match=r"small\.json: 4 results would be lost, as near/gigpo/s0; add --record"):
        tables.main([*collect, str(second)])
    assert {file.name: file.read_bytes() for file in to.iterdir()} == before
    tables.main([*collect, str(second), "--record", str(to / "small.json")])
    kept = json.loads((to / "small.json").read_text())
    assert {cell["cell"]: cell["curve"][-1] for cell in kept["cells"] if cell["done"]} == {
        "near/gigpo/s0": 0.3, "near/gigpo/s1": 0.3, "near/gigpo/s2": 0.3,
        "near/hgpo/s0": 0.5, "near/hgpo/s1": 0.9, "near/hgpo/s2": 0.8,  # the newer, and what has ended
    }  # fmt: skip
    assert all(cell["done"] for cell in kept["cells"])
    assert sorted(one["seed"] for one in kept["bias"]["near"]) == [7, 8]
    tables.main([*collect, str(second), "--record", str(to / "small.json")])
    assert json.loads((to / "small.json").read_text()) == kept
    (tmp_path / "stale.json").write_text('{"fields": {}, "cells": [], "bias": {"near": [{}]}}')
    (tmp_path / "none.json").write_text('{"cells": [{}]}')
    (tmp_path / "other.json").write_text(json.dumps(kept | {"cells": [kept["cells"][0] | {"cell": "a/b/s0"}]}))
    for name, reason in (
        ("nowhere.json", "no such file"), ("none.json", "is not a record of runs"),
        ("other.json", "is a record of another plan, 'small'"), ("stale.json", 'its "bias" is not what'),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=reason):
            tables.main([*collect, str(second), "--record", str(tmp_path / name)])


def test_records_of_several_machines_are_united(tmp_path, small):
    collect = ["collect", "--plan", str(tmp_path / "small.yaml"), "--to"]
    for machine in (0, 1):
        for method in ("gigpo", "hgpo"):
            finish(tmp_path / f"{machine}", small, Cell("near", method, machine), [0.1, 0.2, 0.3])
        tables.main([*collect, str(tmp_path / f"out{machine}"), str(tmp_path / f"{machine}")])
    (tmp_path / "empty").mkdir()
    records = [f"--record={tmp_path}/out{machine}/small.json" for machine in (0, 1)]
    tables.main([*collect, str(tmp_path / "both"), str(tmp_path / "empty"), *records])
    kept = json.loads((tmp_path / "both" / "small.json").read_text())
    assert len([cell for cell in kept["cells"] if cell["done"]]) == 4 and {pair["n"] for pair in kept["paired"]} == {2}


def test_a_record_of_an_earlier_plan_says_so(tmp_path, small, capsys):
    """What the plan has changed since is named, runs of another length have no mean over it, and lost cells are not lost."""
    runs, to = tmp_path / "runs", tmp_path / "out"
    for seed in (0, 1):
        for method in ("gigpo", "hgpo"):
            finish(runs, small, Cell("near", method, seed), [0.1, 0.2, 0.3 + seed])
    collect = ["collect", "--plan", str(tmp_path / "small.yaml"), "--to", str(to)]
    tables.main([*collect, str(runs)])
    (tmp_path / "empty").mkdir()
    record = f"--record={to}/small.json"

    write_plan(tmp_path, fields=["iterations=2", "mesh=data=1"], methods=SMALL["methods"] | {
        "hgpo": {"title": "HGPO", "fields": ["method=hgpo", "advantage.alpha=3"]}
    })  # fmt: skip
    capsys.readouterr()
    tables.main([*collect, str(tmp_path / "empty"), record, "--to", str(tmp_path)])
    said = capsys.readouterr().out
    assert "* near/hgpo/s1: advantage.alpha=2, iterations=3" in said and "* near/gigpo/s0: iterations=3" in said
    assert "| HGPO | 2 of 4 | - |  | - |  | 50.0 ± 0.0 |" in said
    tables.main([*collect, str(tmp_path / "empty"), f"--record={tmp_path}/small.json", "--to", str(tmp_path)])
    assert "* near/hgpo/s1: advantage.alpha=2, iterations=3" in capsys.readouterr().out  # it is not forgotten

    # What one side has only now is another setting, too: the runs had it not.
    gigpo = {"title": "GiGPO", "fields": ["method=gigpo", "learner.lr=1e-4"]}
    write_plan(tmp_path, methods=SMALL["methods"] | {"gigpo": gigpo})
    tables.main([*collect, str(tmp_path / "empty"), record, "--to", str(tmp_path)])
    said = capsys.readouterr().out
    assert "* near/gigpo/s1: without learner.lr=1e-4" in said and "* near/hgpo/s1, near/gigpo/s1" in said
    assert not json.loads((tmp_path / "small.json").read_text())["paired"]

    write_plan(tmp_path, tables=[SMALL["tables"][0] | {"seeds": [1, 2]}])
    before = (to / "small.json").read_bytes()
    for more in ([], [record]):
        with pytest.raises(ConfigError, match=r"2 results would be lost, as near/gigpo/s0"):
            tables.main([*collect, str(runs), *more])
    assert (to / "small.json").read_bytes() == before


def test_a_longer_run_counts_before_its_record(tmp_path, small):
    """The plan got more iterations, and a run that had ended goes on."""
    runs, to = tmp_path / "runs", tmp_path / "out"
    cell = Cell("near", "hgpo", 0)
    finish(runs, small, cell, [0.1, 0.2, 0.3])
    collect = ["collect", "--plan", str(tmp_path / "small.yaml"), "--to", str(to), str(runs)]
    tables.main(collect)
    (runs / cell.name / "evaluation.json").unlink()
    with open(runs / cell.name / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"iteration": 3, "success": 0.4, "seconds": {}}) + "\n")
    write_plan(tmp_path, fields=["iterations=5", "mesh=data=1"])
    for more in ([], [f"--record={to}/small.json"]):
        tables.main([*collect, *more])
        (kept,) = json.loads((to / "small.json").read_text())["cells"]
        assert (kept["done"], kept["iterations"]) == (False, 4)


def test_what_several_tables_compare_counts_once(tmp_path, capsys):
    plan = planning.read(write_plan(tmp_path, tables=[SMALL["tables"][0] | {"title": title, "seeds": seeds}
                                                      for title, seeds in (("T", [0, 1]), ("U", [0, 1, 2]))]))  # fmt: skip
    for seed in range(3):
        finish(tmp_path / "runs", plan, Cell("near", "gigpo", seed), [0.1, 0.2, 0.3])
        finish(tmp_path / "runs", plan, Cell("near", "hgpo", seed), [0.1, 0.2, 0.9 + seed / 100])
    tables.main(["collect", str(tmp_path / "runs"), "--plan", str(tmp_path / "small.yaml"), "--to", str(tmp_path)])
    said = capsys.readouterr().out
    # AUC and the last two iterations, not the evaluation.
    assert "leaves out 0 in 2 of 3 different comparisons of 3 pairs or more" in said
    assert "* U, Near: HGPO minus GiGPO, AUC" in said and "* T, Near" not in said


def test_fields_that_differ():
    before, now = ["a=1", "b=2", "b=3", "env.data=x"], ["a=1", "b=2", "c=4", "env.data=y"]
    assert results.changed_fields(before, now) == ["b=3", "without c=4"]
    assert not results.changed_fields(now, now)


def test_small_p_values_are_written(tmp_path, small):
    for seed in range(4):
        finish(tmp_path / "runs", small, Cell("near", "gigpo", seed), [0.1, 0.2, 0.3])
        finish(tmp_path / "runs", small, Cell("near", "hgpo", seed), [0.1, 0.2, 0.9 + seed / 1e6])
    tables.main(["collect", str(tmp_path / "runs"), "--plan", str(tmp_path / "small.yaml"), "--to", str(tmp_path)])
    with open(tmp_path / "small.csv") as file:
        p = [float(row["paired_p"]) for row in csv.DictReader(file) if row["method"] == "hgpo" and row["column"] == "AUC"]
    assert 0 < p[0] < 1e-8


def test_bias_is_measured_for_the_seeds_that_lack(tmp_path, small, monkeypatch, capsys):
    asked = []

    def measure(config):
        asked.append(config.seed)
        return measured(config.seed, 0.125)

    monkeypatch.setattr(bias, "measure", measure)
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


@pytest.mark.parametrize(
    ("file", "text", "fragment"),
    [
        ("bias.json", '{"near": [{"seed": 7}]}', r"bias\.json: is damaged"),
        ("near/hgpo/s0/metrics.jsonl", "x\n", r"metrics\.jsonl: line 1 is not a row"),
        ("near/hgpo/s0/metrics.jsonl", "x", r"metrics\.jsonl: is damaged, it holds 0 of 3 iterations"),
        ("near/hgpo/s0/config.yaml", "x\n", r"config\.yaml: is damaged"),
    ],
)
def test_damaged_results_are_refused_in_one_line(tmp_path, small, file, text, fragment):
    finish(tmp_path / "runs", small, Cell("near", "hgpo", 0), [0.1, 0.2, 0.3])
    (tmp_path / "runs" / file).write_text(text)
    plan = str(write_plan(tmp_path, bias_seeds=[7]))
    with pytest.raises(ConfigError, match=fragment) as refused:
        tables.main(["collect", str(tmp_path / "runs"), "--plan", plan])
    assert "\n" not in str(refused.value)


def test_nothing_run_is_all_missing(tmp_path, small, capsys):
    (tmp_path / "runs").mkdir()
    tables.main(["collect", str(tmp_path / "runs"), "--plan", str(tmp_path / "small.yaml")])
    said = capsys.readouterr().out
    assert said.count("| missing |") == 4
    assert not list((tmp_path / "runs").glob("*.png"))


@pytest.mark.parametrize(("text", "fragment"), [("{", "is damaged"), ("[]", "is not an evaluation")])
def test_a_damaged_evaluation_is_refused_in_one_line(tmp_path, small, text, fragment):
    cell = Cell("near", "hgpo", 0)
    finish(tmp_path / "runs", small, cell, [0.1, 0.2, 0.3])
    (tmp_path / "runs" / cell.name / "evaluation.json").write_text(text)
    with pytest.raises(ConfigError, match=fragment):
        results.read_all(small, tmp_path / "runs")


@pytest.mark.parametrize("line", ['{"iteration": 0}', '{"iteration": 0, "success": "x", "seconds": {}}',
                                  '{"iteration": 0, "success": 1, "seconds": 3}', "[1]"])  # fmt: skip
def test_damaged_rows_are_refused_in_one_line(tmp_path, small, line):
    cell = Cell("near", "hgpo", 0)
    finish(tmp_path / "runs", small, cell, [0.1, 0.2, 0.3])
    (tmp_path / "runs" / cell.name / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: (is damaged|line 1 is not a row)"):
        results.read_all(small, tmp_path / "runs")


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[1]", '{"near": 3}', '{"near": [{}]}', "\0"])
def test_a_damaged_measurement_of_bias_is_refused_in_one_line(tmp_path, small, text):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "bias.json").write_text(text)
    for command in (["collect", str(tmp_path / "runs"), "--plan"], ["bias", "--runs", str(tmp_path / "runs")]):
        with pytest.raises(ConfigError, match=r"bias\.json: is damaged") as refused:
            tables.main([*command, str(tmp_path / "small.yaml")])
        assert "\n" not in str(refused.value)
