"""Panels: equal tasks for everybody, digests that notice a change, comparisons against plain counts."""

import json
import tarfile
from contextlib import nullcontext

import jax
import numpy as np
import pytest

from hgpo_jax import config as configuration
from hgpo_jax.evaluation import panels
from hgpo_jax.evaluation.statistics import paired_difference, wilson
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.needs import DATA
from tests.helpers.pretended import FakeJob, Runner
from tests.helpers.refusals import refused

# Whoever sees another digest has other tasks: results from before are then not comparable, which has to be a decision.
DIGESTS = {
    "household": "292bc063a1da9c20", "household-two": "97252b749ad62168", "household-six": "7a6ce7b5635aa1e5",
    "sokoban": "ede0edc3314fe14e",
}  # fmt: skip


def config_of(name: str, *overrides: str, face: int = 0) -> configuration.Config:
    fields = panels.panel_fields(name, list(overrides))
    env = panels.PANELS[name].environments[face]
    return configuration.load(None, [f"env.name={env}", "warm_start=none", *overrides, *fields])


SLOW = {"sokoban": pytest.mark.slow}  # to make its rooms takes seven seconds


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in DIGESTS])
def test_generated_tasks_stay_what_they_are(name):
    tasks = panels.panel_tasks(name, config_of(name))
    assert len(set(tasks)) == 512
    assert panels.digest(name, tasks)[:16] == DIGESTS[name]
    # Neither the run's seed, nor another number of episodes at once, nor the way the tasks are told changes them.
    if name == "household":
        assert panels.panel_tasks(name, config_of(name, "seed=7", "rollout.prompt_groups=3", face=1)) == tasks


def test_what_a_digest_covers():
    tasks = ["one", "two"]
    seen = {panels.digest("household", tasks), panels.digest("household", tasks[::-1]), panels.digest("household", ["one"]),
            panels.digest("household-two", tasks)}  # fmt: skip
    assert len(seen) == 4


def test_alfworld_games_by_their_content(tmp_path):
    """Two tiny games: the order is that of their names, and the digest notices one byte."""
    for trial in ("b", "a"):
        folder = tmp_path / "json_1" / "valid_seen" / "look_at_obj_in_light-Book-None-DeskLamp-302" / trial
        folder.mkdir(parents=True)
        (folder / "traj_data.json").write_text(json.dumps({"task_type": "look_at_obj_in_light"}))
        (folder / "game.tw-pddl").write_text(json.dumps({"solvable": True}))
    config = config_of("alfworld-valid_seen", f"data={tmp_path}")
    before = panels._games(config, 140)
    assert [line.split()[0].rpartition("/")[2] for line in before] == ["a", "b"]
    with pytest.raises(ConfigError, match="has 140 tasks, here are 2"):
        panels.panel_tasks("alfworld-valid_seen", config)
    (folder / "game.tw-pddl").write_text(json.dumps({"solvable": True}) + " ")
    changed = panels._games(config, 140)
    assert (changed[0] == before[0], changed[1] == before[1]) == (False, True)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """ALFWorld's official games and WebShop's catalogue, by the names of their environments."""
    with tarfile.open(DATA / "alfworld" / "json_2.1.1.tar.xz") as opened:
        opened.extractall(folder := tmp_path_factory.mktemp("games"), filter="data")
    return {"alfworld": folder, "webshop": DATA / "webshop"}


@pytest.mark.needs("data")
@pytest.mark.parametrize(("name", "count", "expected"), [
    ("alfworld-valid_seen", 140, "55bbc8af61e4c318"), ("alfworld-valid_unseen", 134, "5c0bfd26689e9814"),
    ("webshop", 500, "5b784ee67eeb2b23"),
])  # fmt: skip
def test_listed_tasks_stay_what_they_are(name, count, expected, data):
    tasks = panels.panel_tasks(name, config_of(name, f"data={data[name.partition('-')[0]]}"))
    assert len(tasks) == count and (name == "webshop" or len(set(tasks)) == count)
    assert panels.digest(name, tasks)[:16] == expected


@pytest.mark.parametrize(("env", "panel", "data"), [("alfworld", "alfworld-valid_seen", "nowhere"), ("webshop", "webshop", "")])
def test_tasks_that_are_not_there(env, panel, data, tmp_path):
    with refused(f"env.data={tmp_path}", ConfigError):
        panels.panel_tasks(panel, config_of(panel, f"data={tmp_path / data}"))


@pytest.mark.parametrize(("panel", "fields", "refused"), [
    ("webshop", ["env.name=webshop", "env.goal_order=verl-agent"], "env.goal_order=verl-agent"),
    ("webshop", ["env.name=webshop", "env.goal_order=original"], None),
    ("household", [], None),
    ("household", ["env.name=webshop", "env.goal_order=verl-agent"], None),  # of which it has no task
])  # fmt: skip
def test_a_run_is_not_judged_on_what_it_was_trained_on(panel, fields, refused):
    trained = configuration.load(None, ["warm_start=none", *fields])
    with pytest.raises(ConfigError, match=f"trained on some of its tasks, by {refused}") if refused else nullcontext():
        panels.refuse_trained_on(panel, trained)


class Unlucky(Runner):
    """Its episodes depend on their keys, too, and the fourth task's environment always fails."""

    def select_tasks(self, stream, seed, index):
        assert seed is None  # the environment's own order, under every seed
        return super().select_tasks(stream, seed, index)

    def rollout(self, params, tasks, keys, index, decoding, held_out):
        drawn = np.asarray(jax.random.key_data(keys))[:, -1]
        tasks = [task + 2 * int(d) for task, d in zip(tasks, drawn, strict=True)]
        result = super().rollout(params, tasks, keys, index, decoding, held_out)
        failed = np.asarray(index) == 3
        result.episodes.mask[failed], result.episodes.success[failed] = False, False
        return result


@pytest.fixture
def played():
    """The result of a panel of ten tasks and its episodes, made up."""
    job = FakeJob(configuration.load(None, ["evaluation.episodes=10", "evaluation.temperature=0.4"]), Unlucky(10))
    tasks = [f"task {i}" for i in range(10)]
    return panels.evaluate_panel(panels.player(job, None), Runner.task_types, job.config.evaluation, "household", tasks, [3, 4])


def test_every_episode_is_recorded(played):
    result, episodes = played
    assert [(e["mode"], e["seed"], e["task"]) for e in episodes] == [
        (mode, seed, task) for mode, seed in (("greedy", 0), ("sampled", 3), ("sampled", 4)) for task in range(10)
    ]
    assert all(e["transcript"] == f"{e['turns']} turns" for e in episodes)
    assert {e["task"] for e in episodes if e["success"] is None} == {3} and "type" not in result["tasks"][3]
    assert [e["turns"] for e in episodes[10:20]] != [e["turns"] for e in episodes[20:]]  # each seed draws its own
    for task, outcome in enumerate(result["tasks"]):
        mine = [e for e in episodes if e["task"] == task]
        assert outcome["task"] == f"task {task}" and outcome.get("type") == (None if task == 3 else ("place", "look")[task % 2])
        assert outcome["success"] == {"greedy": [mine[0]["success"]], "sampled": [e["success"] for e in mine[1:]]}
        assert outcome["score"]["sampled"] == [e["score"] for e in mine[1:]]
    for seed in (3, 4):
        wins = [e["success"] for e in episodes if (e["mode"], e["seed"]) == ("sampled", seed) and e["task"] != 3]
        assert result["sampled"][str(seed)]["success"] == np.mean(wins)
    shown = panels.describe(result)
    assert f"10 tasks, digest {result['panel']['digest'][:16]}" in shown
    mean = np.mean([e["success"] for e in episodes[10:] if e["success"] is not None])
    low, high = wilson(9 * mean, 9)  # of nine tasks: the second play of a task is no other task
    assert f"sampled  {mean:6.1%} mean of 2 seeds" in shown and f"(95 % interval {low:.1%} to {high:.1%})" in shown
    wins = sum(bool(e["success"]) for e in episodes[:10])
    assert f"greedy: only 9 of 10 tasks were played, the others failed; {wins / 10:.1%} if these count as lost" in shown


def result_of(successes, digest="x", types="a"):
    """A panel's result with these outcomes of each task: (greedy, [sampled, ...])."""
    tasks = [
        {"task": str(i), "type": types[i % len(types)], "success": {"greedy": [greedy], "sampled": sampled}}
        for i, (greedy, sampled) in enumerate(successes)
    ]
    panel = {"name": "household", "digest": digest}
    return {"panel": panel, "policy": "p", "settings": {"evaluation.temperature": 1.0}, "tasks": tasks}


def test_a_comparison_is_paired_by_task():
    a = result_of([(True, [True, False]), (False, [False, False]), (True, [True, True]), (None, [None, True])], types="ab")
    b = result_of([(True, [True, True]), (True, [False, True]), (False, [True, True]), (True, [False, None])], types="ab")
    found = panels.compare(a, b)
    assert set(found) == {"success, greedy", "success, sampled"}
    greedy = found["success, greedy"]
    assert list(greedy) == ["all", "a", "b"]
    every = greedy["all"]  # the fourth task was not finished by A
    assert (every["tasks"], every["only_a"], every["only_b"], every["p"]) == (3, 1, 1, 1.0)
    assert (every["a"], every["b"], every["difference"]) == (2 / 3, 2 / 3, 0)
    assert (greedy["a"]["only_a"], greedy["a"]["only_b"], greedy["b"]["only_b"]) == (1, 0, 1)
    assert (greedy["a"]["difference"], greedy["b"]["difference"]) == (-0.5, 1)
    sampled = found["success, sampled"]["all"]
    assert "p" not in sampled and sampled["tasks"] == 4  # several plays of a task are no single outcome
    assert sampled["a"] == (0.5 + 0 + 1 + 1) / 4 and sampled["b"] == (1 + 0.5 + 1 + 0) / 4
    assert sampled["difference"] == pytest.approx(sampled["b"] - sampled["a"])
    table = panels.describe_comparison(a, b, found)
    assert "success, greedy" in table and "+0.0%" in table
    assert table.endswith("A, greedy: 1 of 4 tasks failed and are left out of both")
    swapped = panels.compare(b, a)["success, sampled"]["all"]
    assert swapped["interval"] == pytest.approx([-x for x in sampled["interval"][::-1]])


def test_scores_outside_0_and_1_are_no_shares():
    """Students's t instead of an interval that ends at 1, and no percents; shares keep theirs."""
    a, b = result_of([(True, [True])] * 4), result_of([(False, [True])] * 4)
    for result, scores in ((a, (10, 20, 30, 40)), (b, (12, 24, 36, 44))):
        for task, score in zip(result["tasks"], scores, strict=True):
            task["score"] = {"greedy": [score], "sampled": [score / 100]}
    found = panels.compare(a, b)
    score = found["score, greedy"]["all"]
    half = 3.182446 * np.std([2, 4, 6, 4], ddof=1) / 2  # with three degrees of freedom
    assert score["difference"] == 4 and score["interval"] == pytest.approx([4 - half, 4 + half], rel=1e-6)
    within = found["score, sampled"]["all"]
    assert tuple(within["interval"]) == tuple(paired_difference(np.array([0.02, 0.04, 0.06, 0.04]))[1])
    row, share = (
        line for line in panels.describe_comparison(a, b, found).splitlines() if line.startswith("all") and "4.0" in line
    )
    assert row.split()[1:] == ["4", "25.00", "29.00", "+4.00", f"{4 - half:+.2f}", "to", f"{4 + half:+.2f}"]
    assert share.split()[4] == "+4.0%"
    one = {**a, "tasks": a["tasks"][:1]}, {**b, "tasks": b["tasks"][:1]}
    assert panels.compare(*one)["score, greedy"]["all"]["interval"] is None  # of one number nothing tells the spread
    assert "+2.00   -" in panels.describe_comparison(*one, panels.compare(*one))


def test_a_removed_setting_is_at_the_value_that_holds_now():
    a, b = result_of([(True, [True])]), result_of([(True, [False])])
    older = b | {"settings": b["settings"] | {"evaluation.top_p": 1.0, "policy.sample_dtype": "compute_dtype"}}
    assert set(panels.compare(a, older)) == {"success, greedy", "success, sampled"}
    assert "different" not in panels.describe_comparison(a, older, {})


def test_what_is_not_compared():
    a, b = result_of([(True, [True])]), result_of([(True, [False])])
    with pytest.raises(ConfigError, match="different digest, x and y"):
        panels.compare(a, result_of([(True, [True])], digest="y"))
    with pytest.raises(ConfigError, match="different length, 1 and 2"):
        panels.compare(a, result_of([(True, [True])] * 2))
    assert set(panels.compare(a, b)) == {"success, greedy", "success, sampled"}
    for change, compared, said in (
        ({"evaluation.temperature": 0.4}, {"greedy"}, "different: evaluation.temperature=1.0 and 0.4"),
        ({"evaluation.top_p": 0.1}, {"greedy"}, "therefore not compared: sampled plays"),
        ({"evaluation.min_response": 5}, set(), "therefore not compared: greedy and sampled plays"),
        ({"rollout.response_limit": 9}, {"greedy", "sampled"}, "different: rollout.response_limit=None and 9"),
    ):
        other = b | {"settings": b["settings"] | change}
        assert set(panels.compare(a, other)) == {f"success, {mode}" for mode in compared}
        shown = panels.describe_comparison(a, other, {})
        assert said in shown and ("therefore" in shown) == (len(compared) < 2)
    newer = b | {"hgpo_jax": "0.2.0", "seeds": [1]}
    said = panels.describe_comparison(a | {"hgpo_jax": "0.1.0", "seeds": [0]}, newer, {})
    assert "different: seeds=[0] and [1], hgpo_jax=0.1.0 and 0.2.0" in said and "therefore" not in said


WHOLE = {"panel": {"name": "household", "digest": "x"}, "policy": "p", "settings": {}}


@pytest.mark.parametrize("text", [
    "", "[]", "{}", "3", '{"panel": {"digest": 1}, "tasks": []}', json.dumps(WHOLE | {"tasks": []}),
    *(json.dumps(WHOLE | {"tasks": [{"success": {"greedy": [True], "sampled": [value]}}]}) for value in ("yes", [1], 10**400)),
    json.dumps(WHOLE | {"tasks": [{"success": {"greedy": [True], "sampled": [None]}, "score": {"greedy": ["1"]}}]}),
    json.dumps(WHOLE | {"tasks": [{"success": {"greedy": [True], "sampled": [None]}, "type": 3}]}),
    json.dumps(WHOLE | {"tasks": [{"success": {"greedy": [True]}}]}), json.dumps(WHOLE | {"tasks": [3]}),
])  # fmt: skip
def test_a_file_that_is_no_result(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match="not the result of a panel; make one with --panel"):
        panels.read(str(tmp_path / "x.json"))
