"""Tables: what a plan lists, what is collected from run folders against plain arithmetic, and runs that go on."""

import csv
import fcntl
import itertools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats
from test_launch import shellcheck
from test_train import TINY

from hgpo_jax import config as configuration
from hgpo_jax import evaluate, memory
from hgpo_jax.config import ConfigError
from hgpo_jax.mesh import abstract_mesh
from hgpo_jax.tables import __main__ as tables
from hgpo_jax.tables import bias, launch, results, run
from hgpo_jax.tables import plan as planning
from hgpo_jax.tables.plan import Cell

PLANS = Path(__file__).parents[1] / "configs" / "tables"
SMALL = {
    "title": "small",
    "fields": ["iterations=3", "mesh=data=1"],
    "window": 2,
    "settings": {
        "near": {
            "title": "Near", "config": "sokoban_tiny",
            "columns": {"AUC": "train/auc", "last": "train/last", "sampled": "final/sampled"},
        },
        "far": {
            "title": "Far & 100 %", "config": "household", "seeds": [1, 2, 3], "splits": ["held_out"],
            "columns": {"success": "held_out/success"},
        },
    },
    "methods": {
        "gigpo": {"title": "GiGPO", "fields": ["method=gigpo"]},
        "hgpo": {"title": "HGPO", "fields": ["method=hgpo", "advantage.alpha=2"]},
    },
    "tables": [
        {"title": "T", "settings": ["near", "far"], "methods": ["gigpo", "hgpo"], "seeds": [0, 1, 2, 3], "baseline": "gigpo"},
    ],
    "published": {"source": "a paper", "numbers": {"far": {"hgpo": {"success": [50.25, 1.5]}}}},
}  # fmt: skip


def write_plan(folder: Path, **changes) -> Path:
    file = folder / "small.yaml"
    file.write_text(yaml.safe_dump(SMALL | changes, sort_keys=False))
    return file


@pytest.fixture
def small(tmp_path):
    return planning.read(write_plan(tmp_path))


def finish(runs: Path, plan, cell: Cell, curve, success=0.5, evaluated=None) -> None:
    """A run folder as training and evaluation leave it."""
    folder = runs / cell.name
    folder.mkdir(parents=True)
    rows = [{"iteration": i, "success": s, "seconds": {"rollout": 0.5, "update": 1.0}} for i, s in enumerate(curve)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "evaluation.json").write_text(json.dumps({"success": {"sampled": success, "greedy": 1.0}}))
    if evaluated:
        result = {"seeds": [1, 2, 3], "temperature": 1.0, "episodes_per_seed": 512, "split": "held_out",
                  "over_seeds": {"success": evaluate.over_seeds(evaluated)}}  # fmt: skip
        evaluate.write_seeds(result, [], folder / "evaluations", "held_out")


# -- plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), [("paper", 7 * 4 + 3 * 2 + 2 * 2), ("household", 12 * 2 * 2 + 4 * 7 * 2)])
def test_every_cell_is_listed_once_and_its_commands_are_what_it_says(name, count):
    plan = planning.read(planning.find(name))
    cells = planning.cells(plan)
    assert len(cells) == len(set(cells)) == count
    wanted = {
        (s, m, seed) for t in plan.tables for s, m, seed in itertools.product(t.settings, t.methods, t.seeds)
    }  # fmt: skip
    assert {(c.setting, c.method, c.seed) for c in cells} == wanted
    for cell in cells:
        train, *rest = planning.steps(plan, cell, "RUNS")
        words = shlex.split(train.shell({}))
        assert words[:5] == ["python", "-m", "hgpo_jax.train", "--config", plan.settings[cell.setting].config]
        loaded = configuration.load(words[4], words[words.index("auto") + 1 :])
        assert loaded.model_copy(update={"run_dir": ""}) == planning.config_of(plan, cell)
        assert (loaded.run_dir, loaded.seed) == (f"RUNS/{cell.name}", cell.seed)
        assert [step.arguments[-1] for step in rest] == list(plan.settings[cell.setting].splits)
        for step in rest:
            evaluate.split_of(loaded, step.arguments[-1])
            assert evaluate.parse_seeds(step.arguments[2]) == list(plan.settings[cell.setting].seeds)


def test_the_papers_methods_are_the_papers():
    plan = planning.read(planning.find("paper"))
    config = planning.config_of(plan, Cell("webshop_1.5b", "hgpo-k4-level1", 0))
    assert (config.rollout.history_length, config.advantage.history_length) == (4, 1)
    config = planning.config_of(plan, Cell("alfworld_7b", "gigpo-k4", 0))
    assert (config.method, config.rollout.history_length, config.policy.source) == ("gigpo", 4, "Qwen/Qwen2.5-7B-Instruct")
    assert planning.config_of(plan, Cell("alfworld_1.5b", "hgpo-k4-alpha0", 0)).advantage.alpha == 0
    shown = {name: set(setting.columns) for name, setting in plan.settings.items()}
    for setting, methods in plan.published.numbers.items():
        for method, numbers in methods.items():
            assert method in plan.methods
            assert set(numbers) <= shown[setting]


def test_paired_methods_share_warm_start_and_tasks():
    plan = planning.read(planning.find("household"))
    for setting in plan.settings:
        configs = [planning.config_of(plan, Cell(setting, method, 5)) for method in plan.methods]
        shared = {"seed", "env", "policy", "cloning", "rollout", "learner", "iterations"}
        alike = [config.model_dump(include=shared) for config in configs]
        assert all(one == alike[0] for one in alike)
    assert not set(plan.bias_seeds) & {cell.seed for cell in planning.cells(plan)}  # chosen on other seeds


def test_cost_is_memorys_plan_and_the_counted_tokens():
    plan = planning.read(planning.find("paper"))
    cell = Cell("webshop_7b", "hgpo-k2", 0)
    config, cost = planning.config_of(plan, cell), planning.cost(plan, cell)
    mesh = abstract_mesh("data=1,fsdp=4")
    assert cost.devices == 4
    assert cost.bytes == memory.peak(memory.plan(config, mesh, memory.work_of(config, mesh)))
    episodes = 160 * 16 * 8 + 512 * (2 + 3)
    assert cost.limit == episodes * 30 * (4096 + 512)
    assert cost.tokens == episodes * 8 * 1200


def test_a_listing_says_all(small, capsys, tmp_path):
    tables.main(["plan", str(tmp_path / "small.yaml"), "--runs", "R"])
    said = capsys.readouterr().out
    assert "far/hgpo/s2: 1 device, 0.0" in said
    assert "python -m hgpo_jax.evaluate R/far/hgpo/s2 --seeds 1,2,3 --split held_out" in said
    assert said.splitlines()[-1].startswith("16 cells, ")


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"titel": "x"}, "titel: no such field"),
        ({"tables": [SMALL["tables"][0] | {"methods": ["hpgo"]}]}, "hpgo is none of the methods gigpo, hgpo"),
        ({"tables": [SMALL["tables"][0] | {"baseline": "x"}]}, "x is none of the methods"),
        ({"settings": {"A B": SMALL["settings"]["near"]}}, "settings.A B"),
        ({"settings": {"near": SMALL["settings"]["near"] | {"columns": {"A": "train/acu"}}}}, "A: train/acu is none of"),
        ({"settings": {"far": SMALL["settings"]["far"] | {"splits": ["valid"]}}}, "success: held_out/success is none of"),
        ({"fields": ["learner.lt=3"]}, "near/gigpo/s0: learner.lt=3: no such field"),
        ({"fields": ["mesh=auto"]}, "near/gigpo/s0: mesh='auto'"),
    ],
)
def test_a_wrong_plan_is_refused_in_one_line(tmp_path, changes, fragment):
    with pytest.raises(ConfigError) as refused:
        tables.main(["plan", str(write_plan(tmp_path, **changes))])
    assert fragment in str(refused.value)
    assert "\n" not in str(refused.value)


STAIRS = "\n".join(" " * i + "a:" for i in range(3000))


@pytest.mark.parametrize("text", [STAIRS, "[" * 3000, "title: 2024-99-99", "a: [", "\0"])
def test_a_plan_that_is_no_yaml_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"plan\.yaml: not a YAML file") as refused:
        tables.main(["plan", str(tmp_path / "plan.yaml")])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["plan", "nothing"], "configs/tables has household, paper"),
        (["plan", "paper", "--launch", "slurm"], "--to: needed"),
        (["run", "household", "--jobs", "0"], "--jobs 0"),
        (["run", "household", "--runs", "NOWHERE", "nosuch=1"], "nosuch=1: no such field"),
        (["bias", "household", "--runs", "NOWHERE", "learner.lr=x"], "learner.lr='x'"),
        (["collect", "NOWHERE"], "NOWHERE: no such folder"),
        (["collect", str(PLANS)], "give --plan"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, fragment):
    with pytest.raises(ConfigError) as refused:
        tables.main(arguments)
    assert fragment in str(refused.value)
    assert "\n" not in str(refused.value)


# -- collect ------------------------------------------------------------------------------------------------------


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
    assert (tmp_path / "out" / "small.png").stat().st_size > 1000


def measured(seed, bias2):
    shares = {str(k): bias2 for k in bias.LEVELS}
    return {"seed": seed, "success": 0.5, "peers": [1, 0.5, 0.25], "bias2": shares, "variance": shares}


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
    assert "leaves out 0 in 2 of 3 differences" in said  # AUC and the last two iterations, not the evaluation
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
    assert capsys.readouterr().out.count("| Near | 7, 8 | 50% |") == 2
    with pytest.raises(ConfigError, match="bias_seeds: the plan has none"):
        tables.main(["bias", str(write_plan(tmp_path)), "--runs", str(tmp_path / "runs")])


@pytest.mark.parametrize(
    ("file", "text", "fragment"),
    [
        ("bias.json", '{"near": [{"seed": 7}]}', r"bias\.json: is damaged"),
        ("near/hgpo/s0/metrics.jsonl", "x\n", r"metrics\.jsonl: line 1 is no row"),
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
    assert not (tmp_path / "runs" / "small.png").exists()


@pytest.mark.parametrize(("text", "fragment"), [("{", "is damaged"), ("[]", "is no evaluation")])
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
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: (is damaged|line 1 is no row)"):
        results.read_all(small, tmp_path / "runs")


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[1]", '{"near": 3}', '{"near": [{}]}', "\0"])
def test_a_damaged_measurement_of_bias_is_refused_in_one_line(tmp_path, small, text):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "bias.json").write_text(text)
    for command in (["collect", str(tmp_path / "runs"), "--plan"], ["bias", "--runs", str(tmp_path / "runs")]):
        with pytest.raises(ConfigError, match=r"bias\.json: is damaged") as refused:
            tables.main([*command, str(tmp_path / "small.yaml")])
        assert "\n" not in str(refused.value)


# -- run ----------------------------------------------------------------------------------------------------------

STAND_IN = """
import pathlib, sys
proof, said, bad = sys.argv[1:]
with open(said, "a") as file:
    file.write(proof + "\\n")
if bad in proof:
    sys.exit(3)
path = pathlib.Path(proof)
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text("{}")
"""


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Commands that only leave their proof and are written down; those with `stand_in.bad` in it fail."""
    said = tmp_path / "said"

    def expanded(step):
        return [sys.executable, "-c", STAND_IN, str(step.proof), str(said), expanded.bad]

    def taken():
        lines = said.read_text().split() if said.exists() else []
        said.unlink(missing_ok=True)
        return [str(Path(line).relative_to(tmp_path / "runs")) for line in lines]

    expanded.bad, expanded.taken = "nothing", taken
    monkeypatch.setattr(run, "expanded", expanded)
    return expanded


def test_a_run_goes_on_where_it_was(tmp_path, small, stand_in, capsys):
    file, runs = tmp_path / "small.yaml", tmp_path / "runs"
    stand_in.bad = "far/hgpo/s1/evaluations"
    with pytest.raises(SystemExit) as ended:
        tables.main(["run", str(file), "--runs", str(runs)])
    assert ended.value.code == 1
    assert "far/hgpo/s1: evaluate ended with code 3" in capsys.readouterr().out
    first = stand_in.taken()
    assert len(first) == 8 + 2 * 8
    assert first[:2] == ["near/gigpo/s0/evaluation.json", "far/gigpo/s0/evaluation.json"]  # seed by seed, settings alternate
    assert first[3] == "near/hgpo/s0/evaluation.json"

    stand_in.bad = "nothing"
    (runs / "near/hgpo/s3/evaluation.json").unlink()
    tables.main(["run", str(file), "--runs", str(runs), "--jobs", "2", "cache_dir=C"])
    assert set(stand_in.taken()) == {"far/hgpo/s1/evaluations/held_out-t1-n512-s1-2-3.json", "near/hgpo/s3/evaluation.json"}
    tables.main(["run", str(file), "--runs", str(runs)])
    assert stand_in.taken() == []
    assert "16 of 16 cells are done" in capsys.readouterr().out
    assert (runs / "plan.yaml").read_text() == file.read_text()


def test_two_runs_in_one_folder_are_refused(tmp_path, small, stand_in):
    (tmp_path / "runs").mkdir()
    with open(tmp_path / "runs" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process runs cells here"):
            tables.main(["run", str(tmp_path / "small.yaml"), "--runs", str(tmp_path / "runs")])
    assert stand_in.taken() == []


def test_variables_are_filled_in_or_asked_for():
    step = planning.Step("train", ("--config", "x", "data=$SOME_DATA", "seed=1"), Path("p"))
    assert run.expanded(step, {"SOME_DATA": "/a b"})[1:] == ["-m", "hgpo_jax.train", "--config", "x", "data=/a b", "seed=1"]
    with pytest.raises(ConfigError, match="set the variable SOME_DATA"):
        run.expanded(step, {})
    assert subprocess.run(
        ["bash", "-c", step.shell({"X": "1 2"}).replace("python -m", "printf %s,")], env={"SOME_DATA": "/a b"},
        capture_output=True, text=True, check=True,
    ).stdout == "hgpo_jax.train,--config,x,data=/a b,seed=1,"  # fmt: skip


@pytest.mark.slow
def test_a_real_cell_that_was_interrupted_is_resumed(tmp_path):
    tiny = [field for field in TINY if not field.startswith(("warm_start", "iterations"))]
    file = write_plan(tmp_path, fields=[*tiny, "iterations=3", "mesh=data=1", "warm_start=none", f"cache_dir={tmp_path}/cache"],
                      variables={"XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
                      tables=[SMALL["tables"][0] | {"settings": ["far"], "methods": ["hgpo"], "seeds": [0]}])  # fmt: skip
    runs = tmp_path / "runs"
    tables.main(["run", str(file), "--runs", str(runs)])
    folder = runs / "far/hgpo/s0"
    before = (folder / "metrics.jsonl").read_text()
    # As a run that was killed after its second iteration leaves it.
    for proof in ("evaluation.json", "evaluations/held_out-t1-n12-s1-2-3.json"):
        (folder / proof).unlink()
    shutil.rmtree(folder / "checkpoints" / "3")
    tables.main(["run", str(file), "--runs", str(runs)])
    assert "resumed after iteration 2" in (runs / "far/hgpo/s0.log").read_text()
    after = (folder / "metrics.jsonl").read_text()
    success = [[json.loads(line)["success"] for line in text.splitlines()] for text in (before, after)]
    assert success[0] == success[1]
    tables.main(["collect", str(runs)])
    assert json.loads((runs / "runs.json").read_text())["cells"][0]["done"]


# -- launch -------------------------------------------------------------------------------------------------------


def check_train(words: list[str], plan, cell: Cell, devices: int) -> None:
    """Words of a train command: this cell's configuration but for its folders and mesh, on so many devices."""
    arguments = words[words.index("--config") + 1 :]
    config = configuration.load(arguments[0], [word for word in arguments[1:] if "=" in word])
    assert abstract_mesh(config.mesh).size == devices
    same = {"run_dir": "", "cache_dir": "", "mesh": ""}
    other = planning.config_of(plan, cell)
    env = {"env": other.env.model_copy(update={"data": config.env.data})}
    assert config.model_copy(update=same) == other.model_copy(update=same | env)
    assert cell.name in config.run_dir


PAPER_CELLS = {"alfworld_1.5b/hgpo-k2/s0": 2, "alfworld_7b/gigpo-k4/s0": 4, "webshop_1.5b/hgpo-k4-alpha0/s0": 2}


def launched(kind: str, to: Path) -> list[tuple[Cell, int, str]]:
    """(cell, devices, file) of some cells of the paper's plan."""
    tables.main(["plan", "paper", "--launch", kind, "--to", str(to)])
    plan = planning.read(planning.find("paper"))
    cells = {cell.name: cell for cell in planning.cells(plan)}
    assert len(list(to.iterdir())) == len(cells)
    suffix = "sh" if kind in ("tpu", "slurm") else "yaml"
    return [(plan, cells[n], d, (to / f"{launch.label(cells[n])}.{suffix}").read_text()) for n, d in PAPER_CELLS.items()]


def said_by(script: str, tmp_path: Path, command: str, **variables) -> list[list[str]]:
    """The arguments of every call that a script makes of a command, which here only writes them down."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    said = tmp_path / "said"
    said.unlink(missing_ok=True)
    stand_in = tmp_path / "bin" / Path(command).name
    said_so = 'printf "%s\\n" "$(printf "%q " "COMMAND=${COMMAND:-}" "$@")"'
    stand_in.write_text(f"#!/usr/bin/env bash\n{said_so} >> {said}\necho 7\n")
    stand_in.chmod(0o755)
    environment = os.environ | variables | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", script.replace(command, stand_in.name)], env=environment, check=True, capture_output=True)
    return [shlex.split(line) for line in said.read_text().splitlines()]


def test_slurm_files_submit_training_and_then_evaluations(tmp_path, capsys):
    for plan, cell, devices, text in launched("slurm", tmp_path / "out"):
        shellcheck(text)
        train, *rest = said_by(text, tmp_path, "sbatch", ALFWORLD_DATA="/d/a", WEBSHOP_DATA="/d/w")
        assert f"--gpus-per-node={devices}" in train
        assert "--nodes=1" in train
        check_train(train[train.index("configs/launch/slurm.sh") :], plan, cell, devices)
        assert any(word in ("data=/d/a", "data=/d/w") for word in train)
        assert [words[-1] for words in rest] == list(plan.settings[cell.setting].splits)
        for words in rest:
            assert "--dependency=afterok:7" in words
            assert "--export=ALL,COMMAND=evaluate" in words


def test_tpu_files_train_evaluate_and_give_the_slice_back(tmp_path, capsys):
    for plan, cell, _, text in launched("tpu", tmp_path / "out"):
        shellcheck(text)
        variables = {"PROJECT": "p", "ZONE": "z", "BUCKET": "b"}
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "gcloud").write_text("#!/usr/bin/env bash\n")
        (tmp_path / "bin" / "gcloud").chmod(0o755)
        train, *rest = said_by(text, tmp_path, "configs/launch/tpu_pod.sh", **variables)
        assert train[:3] == ["COMMAND=train", launch.label(cell), "b"]
        check_train(train, plan, cell, 16 if "7b" in cell.setting else 8)
        assert [words[0] for words in rest] == ["COMMAND=evaluate"] * len(plan.settings[cell.setting].splits)
        assert text.splitlines()[-1].startswith(f"gcloud compute tpus tpu-vm delete {launch.label(cell)} --quiet")


def test_kubernetes_files_are_valid_jobs(tmp_path, capsys):
    validator = pytest.importorskip("kubernetes_validate")
    for plan, cell, devices, text in launched("kubernetes", tmp_path / "out"):
        service, job = yaml.safe_load_all(text)
        for item in (service, job):
            validator.validate(item, "1.32", strict=True)
        [container] = job["spec"]["template"]["spec"]["containers"]
        shellcheck(container["args"][0])
        lines = [shlex.split(line) for line in container["args"][0].splitlines() if "--distributed" in line]
        assert [line[2] for line in lines] == ["hgpo_jax.train", *["hgpo_jax.evaluate"] * (len(lines) - 1)]
        check_train(lines[0], plan, cell, devices)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == devices
        assert job["metadata"]["name"] == service["spec"]["selector"]["job-name"] == launch.label(cell)


def test_skypilot_files_are_tasks(tmp_path, capsys):
    for plan, cell, devices, text in launched("skypilot", tmp_path / "out"):
        task = yaml.safe_load(text)
        shellcheck(task["run"])
        lines = [shlex.split(line) for line in task["run"].splitlines() if "hgpo_jax" in line]
        check_train(lines[0], plan, cell, devices)
        assert (task["num_nodes"], task["resources"]["accelerators"]) == (1, f"H100:{devices}")
        assert len(lines) == 1 + len(plan.settings[cell.setting].splits)


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "skypilot"])
def test_launched_commands_have_the_plans_variables(kind, tmp_path, capsys):
    plan = write_plan(tmp_path, variables={"XLA_FLAGS": "--one --two=2"})
    tables.main(["plan", str(plan), "--launch", kind, "--to", str(tmp_path / "out")])
    text = next((tmp_path / "out").iterdir()).read_text()
    if kind == "slurm":
        script = text.replace("sbatch", "true") + 'sh -c "echo [\\$XLA_FLAGS]"'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[--one --two=2]"
    elif kind == "kubernetes":
        _, job = yaml.safe_load_all(text)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert {"name": "XLA_FLAGS", "value": "--one --two=2"} in container["env"]
    else:
        assert yaml.safe_load(text)["envs"]["XLA_FLAGS"] == "--one --two=2"


def test_tpu_files_refuse_variables(tmp_path):
    with pytest.raises(ConfigError, match="variables: launch files for TPUs"):
        tables.main(["plan", str(write_plan(tmp_path, variables={"A": "b"})), "--launch", "tpu", "--to", str(tmp_path)])


def test_more_devices_than_a_machine_has_are_whole_machines(tmp_path):
    def sizes(mesh):
        return launch.nodes(planning.read(write_plan(tmp_path, fields=[f"mesh={mesh}"])), Cell("near", "hgpo", 0))

    assert sizes("data=3,fsdp=8") == (3, 8)
    assert sizes("data=1,fsdp=4") == (1, 4)
    with pytest.raises(ConfigError, match="12 devices are no whole number of machines"):
        sizes("data=3,fsdp=4")
