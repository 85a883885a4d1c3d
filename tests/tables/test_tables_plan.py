"""What a plan lists: cells, commands, cost, refusals."""

import itertools
import shlex

import pytest
from small_plan import PLANS, SMALL, write_plan

from hgpo_jax import config as configuration
from hgpo_jax import evaluate
from hgpo_jax.policy.mesh import abstract_mesh
from hgpo_jax.setup import memory
from hgpo_jax.tables import __main__ as tables
from hgpo_jax.tables import plan as planning
from hgpo_jax.tables.plan import Cell
from hgpo_jax.utils.errors import ConfigError


@pytest.mark.parametrize(("name", "count"), [("paper", 7 * 4 + 3 * 2 + 2 * 2), ("household", 24 * 3 * 2 + 4 * 4 * 2)])
def test_every_cell_is_listed_once_and_its_commands_are_what_it_says(name, count):
    plan = planning.read(planning.find(name))
    cells = planning.cells(plan)
    assert len(cells) == len(set(cells)) == count
    wanted = {
        (s, m, seed) for t in plan.tables for s, m in itertools.product(t.settings, t.methods) for seed in t.seeds[s]
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


def test_evaluations_are_asked_for_with_the_plans_settings(tmp_path):
    """A run that began with others would write another file than the one that is waited for."""
    fields = [*SMALL["fields"], "evaluation.episodes=64", "evaluation.temperature=0.4"]
    plan = planning.read(write_plan(tmp_path, fields=fields))
    _, step = planning.steps(plan, Cell("far", "hgpo", 2), "R", ("evaluation.episodes=32",))
    assert step.arguments[5:] == ("evaluation.episodes=64", "evaluation.temperature=0.4", "evaluation.episodes=32")
    assert step.proofs[0].name == "held_out-t0.4-n32-s1-2-3.json"
    # The run's policy plays; `evaluate` refuses fields of another.
    more = "policy=x", "lora.rank=2", "policy.compute_dtype=bfloat16", "iterations=2"
    train, step = planning.steps(plan, Cell("far", "hgpo", 2), "R", more)
    assert step.arguments[7:] == more[2:] and set(more) < set(train.arguments)


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
    assert cost.bytes == memory.peak(memory.bytes_by_phase(config, mesh, memory.workload_of(config, mesh)))
    episodes = 160 * 16 * 8 + 512 * (2 + 3)
    assert cost.limit == episodes * 30 * (4096 + 512)
    assert cost.tokens == episodes * 8 * 1200


def test_cost_counts_validations_and_the_policies_of_all_roles(tmp_path):
    team = ["env.name=household_team", "mesh=data=1", "iterations=12", "evaluation.episodes=100", "method=dr_mas"]
    costs = []
    for more in (["evaluation.every=0"], ["evaluation.every=5"], ["evaluation.every=5", "roles.carrier.policy=own"]):
        table = SMALL["tables"][0] | {"settings": ["far"], "methods": ["own"], "baseline": None}
        own = {"own": {"title": "O", "fields": []}}
        plan = planning.read(write_plan(tmp_path, fields=[*team, *more], tables=[table], methods=own, published=None))
        cell = planning.cells(plan)[0]
        costs.append(planning.cost(plan, cell))
    plain, validated, apart = costs
    rollout = planning.config_of(plan, cell).rollout
    once = 12 * rollout.prompt_groups * rollout.group_size + 100 * (2 + 3)
    assert validated.limit / plain.limit == pytest.approx((once + 3 * 100) / once)
    assert apart.disk == 2 * validated.disk and apart.bytes > validated.bytes == plain.bytes


def test_a_listing_says_all(small, capsys, tmp_path):
    tables.main(["plan", str(tmp_path / "small.yaml"), "--runs", "R"])
    said = capsys.readouterr().out
    assert "far/hgpo/s2: 1 device, 0.0" in said
    assert "python -m hgpo_jax.evaluate R/far/hgpo/s2 --seeds 1,2,3 --split held_out" in said
    assert said.splitlines()[-1].startswith("16 cells, ")


def pools(*others, seeds=(0, 1), **changes):
    """Changes of the small plan: a setting that pools, in a table beside others."""
    both = {"title": "B", "pools": ["near", "far"], "columns": {"A": "train/auc"}} | changes
    table = SMALL["tables"][0] | {"settings": [*others, "both"], "seeds": seeds if isinstance(seeds, dict) else list(seeds)}
    return {"settings": SMALL["settings"] | {"both": both}, "tables": [table]}


def far(**changes):
    """Changes of the small plan: another setting `far`."""
    return {"settings": SMALL["settings"] | {"far": SMALL["settings"]["far"] | changes}}


def test_pooled_settings_have_no_cells_and_seeds_may_differ(tmp_path):
    plan = planning.read(write_plan(tmp_path, **pools("near", "far", seeds={"near": [3, 1], "far": [1, 2]})))
    assert [cell.name for cell in planning.cells(plan)] == [
        "near/gigpo/s3", "near/hgpo/s3", "near/gigpo/s1", "far/gigpo/s1", "near/hgpo/s1", "far/hgpo/s1",
        "far/gigpo/s2", "far/hgpo/s2",
    ]  # fmt: skip
    assert [cell.name for cell in planning.cells_of(plan, plan.tables[0], "both", "hgpo")] == [
        "near/hgpo/s3", "near/hgpo/s1", "far/hgpo/s1", "far/hgpo/s2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"titel": "x"}, "titel: no such field"),
        ({"tables": [SMALL["tables"][0] | {"methods": ["hpgo"]}]}, "hpgo is not one of the methods gigpo, hgpo"),
        ({"settings": {"A B": SMALL["settings"]["near"]}}, "settings.A B"),
        ({"settings": {"near": SMALL["settings"]["near"] | {"columns": {"A": "train/acu"}}}}, "columns: train/acu is not one"),
        ({"tables": SMALL["tables"] * 2}, "two tables have the title 'T'"),
        ({"published": {"source": "p", "numbers": {"fra": {}}}}, "published.numbers: fra is not one of the settings near, far"),
        ({"published": {"source": "p", "numbers": {"far": {"hgpo": {"A": [1, 2]}}}}}, "A is not one of the columns success"),
        ({"settings": {"near": {"title": "N", "columns": {}}}}, "settings.near: give config, or the settings that it pools"),
        (pools("far", pools=["farther"]), "settings.both.pools: farther is not one of the settings with a config near, far"),
        (pools("far", pools=["near", "near"]), "settings.both.pools: near, near: give near once"),
        (pools("far", fields=["seed=1"]), "settings.both: fields: has no effect with pools"),
        (pools("far", "near", columns={"A": "held_out/success"}), "both.columns: held_out/success is not one of the numbers"),
        ({"tables": [SMALL["tables"][0] | {"seeds": {"near": 3, "far": [1]}}]}, "tables.0.seeds.near: Input should"),
        ({"tables": [SMALL["tables"][0] | {"methods": ["hgpo"]}]}, "baseline: gigpo is not one of the methods of the"),
        (pools("far"), "table 'T': both pools: near is not one of the settings of the table far"),
        (pools("far", "near", seeds={"bth": [1]}), "table 'T': seeds: bth is not one of the settings of the table far, near"),
        (pools("far", "near", seeds={"far": [1]}), "table 'T': settings: near is not one of the settings with seeds far"),
        ({"tables": [SMALL["tables"][0] | {"seeds": [0, 1, 0]}]}, "tables.0.seeds: near: 0, 1, 0: give 0 once"),
        ({"tables": [SMALL["tables"][0] | {"settings": ["near", "near"]}]}, "tables.0.settings: near, near: give near once"),
        ({"tables": [SMALL["tables"][0] | {"methods": ["gigpo", "gigpo"]}]}, "tables.0.methods: gigpo, gigpo: give gigpo once"),
        ({"bias_seeds": [7, 7]}, "bias_seeds: 7, 7: give 7 once"),
        (far(splits=["held_out", "held_out"]), "settings.far.splits: held_out, held_out: give held_out once"),
        (far(splits=[]), "settings.far: seeds: nothing is evaluated without splits; give both, or leave them out"),
        (far(seeds=[]), "settings.far: splits: nothing is evaluated without seeds; give both"),
        ({"fields": ["learner.lt=3"]}, "near/gigpo/s0: learner.lt=3: no such field"),
        ({"fields": ["mesh=auto"]}, "near/gigpo/s0: mesh='auto'"),
    ],
)
def test_a_wrong_plan_is_refused_in_one_line(tmp_path, changes, fragment):
    with pytest.raises(ConfigError) as refused:
        tables.main(["plan", str(write_plan(tmp_path, **changes))])
    assert fragment in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["plan", "nothing"], "configs/tables has alfworld_small, household, household_g2po, paper"),
        (["plan", "paper", "--launch", "slurm"], "--to: needed"),
        (["plan", "household", "--to", "DIR"], "--to DIR: is where --launch writes its files"),
        (["run", "household", "--jobs", "0"], "--jobs 0"),
        (["run", "household", "--runs", "NOWHERE", "nosuch=1"], "nosuch=1: no such field"),
        (["bias", "household", "--runs", "NOWHERE", "learner.lr=x"], "learner.lr='x'"),
        (["bias", "household", "--runs", "NOWHERE", "cache_dir=C", "seed=1"], "seed=1: would measure other settings"),
        (["collect", "NOWHERE"], "NOWHERE: no such folder"),
        (["collect", str(PLANS)], "give --plan"),
        (["plan", "STAIRS"], "STAIRS: not a YAML file"),
        (["run", "EMPTY", "--runs", "NOWHERE"], "small: the plan has no cells"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, fragment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "STAIRS").write_text("\n".join(" " * i + "a:" for i in range(3000)))
    write_plan(tmp_path, tables=[]).rename(tmp_path / "EMPTY")
    with pytest.raises(ConfigError) as refused:
        tables.main(arguments)
    assert fragment in str(refused.value)
    assert "\n" not in str(refused.value)
