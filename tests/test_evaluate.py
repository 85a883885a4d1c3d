"""Evaluation under several seeds: its numbers against plain loops, what it writes, what it refuses."""

import json
import statistics
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from hgpo_jax import config as configuration
from hgpo_jax import evaluate, evaluation, evaluation_files, intervals
from hgpo_jax.errors import ConfigError
from hgpo_jax.sampling import Decoding
from tests.helpers.pretended import FakeJob, Runner
from tests.helpers.training import TINY, command, rows_of


@pytest.fixture
def job():
    return FakeJob(configuration.load(None, ["evaluation.episodes=10", "evaluation.temperature=0.4"]), Runner())


def test_numbers_are_those_of_a_plain_loop(job):
    seeds = [123, 456, 789]
    result, episodes = evaluation.evaluate_seeds(job, None, seeds)
    assert len(episodes) == 30  # more than the three tasks: they are played again
    by_seed = [[e for e in episodes if e["seed"] == seed] for seed in seeds]
    wins = [statistics.mean(e["success"] for e in part) for part in by_seed]
    found = result["over_seeds"]["success"]
    assert found["mean"] == pytest.approx(statistics.mean(wins))
    assert found["std"] == pytest.approx(statistics.stdev(wins))
    assert found["interval"] == list(intervals.korn_graubard(wins, [10, 10, 10]))
    for kind in ("place", "look"):
        part = [e["success"] for e in episodes if e["task"] == kind]
        pool = result["over_episodes"][f"success/{kind}"]
        assert (pool["episodes"], pool["successes"]) == (len(part), sum(part))
        assert pool["interval"] == list(intervals.wilson(sum(part), len(part)))
    turns = [statistics.mean(e["turns"] for e in part) for part in by_seed]
    found = result["over_seeds"]["turns"]
    half = 4.302653 * statistics.stdev(turns) / 3**0.5  # Student's t with two degrees of freedom
    assert found["interval"] == pytest.approx([found["mean"] - half, found["mean"] + half], rel=1e-5)
    assert found["mean"] == pytest.approx(statistics.mean(turns))
    assert result["over_seeds"]["score"]["mean"] == pytest.approx(statistics.mean(e["score"] for e in episodes))
    assert all(e["transcript"] == f"{e['turns']} turns" for e in episodes)
    assert json.loads(json.dumps(result))["by_seed"]["123"]["success"] == wins[0]
    shown = evaluation.describe_seeds(result)
    found = result["over_seeds"]["success"]
    low, high = found["interval"]
    assert f"{found['mean']:.1%}" in shown
    assert f"   {low:.1%} to {high:.1%}" in shown
    low, high = result["over_episodes"]["success"]["interval"]
    assert f"{low:.1%} to {high:.1%} of 30" in shown


def test_an_interval_counts_what_a_share_is_of(job):
    """Of a type of task its episodes, of the valid actions the steps."""
    result, episodes = evaluation.evaluate_seeds(job, None, [123, 456, 789])
    of = {"success/place": lambda e: e["task"] == "place", "valid_actions": lambda e: e["turns"], "score": lambda e: 1}
    for name, weight in of.items():
        sizes = [sum(weight(e) for e in episodes if e["seed"] == seed) for seed in (123, 456, 789)]
        values = [numbers[name] for numbers in result["by_seed"].values()]
        assert result["over_seeds"][name]["interval"] == list(intervals.korn_graubard(values, sizes))


def test_scores_that_are_no_shares_get_students_interval(job):
    seeds, rollout = [1, 2, 3], job.runner.rollout

    def scored(*args, **options):
        result = rollout(*args, **options)
        result.report.scores *= 10
        return result

    job.runner.rollout = scored
    result, _ = evaluation.evaluate_seeds(job, None, seeds)
    means = [numbers["score"] for numbers in result["by_seed"].values()]
    assert max(means) > 1
    assert result["over_seeds"]["score"] == intervals.over_seeds(means)
    json.loads(json.dumps(result, allow_nan=False))


def test_failed_episodes_are_told_apart_from_lost_ones(job):
    rollout = job.runner.rollout

    def unlucky(*args, **options):
        result = rollout(*args, **options)
        result.episodes.mask[1], result.episodes.success[1] = False, False
        return result

    job.runner.rollout = unlucky
    _, episodes = evaluation.evaluate_seeds(job, None, [1])
    failed = [e["episode"] for e in episodes if e["success"] is None]
    assert failed == [1, 5, 9] and all(episodes[i]["task"] is None and episodes[i]["score"] is None for i in failed)
    result, _ = evaluation.play_both(job, None)
    assert result["episodes"] == 3 and result["played"] == {"sampled": 2, "greedy": 2}
    assert "of 2 tasks" in (shown := evaluation.describe_evaluation(result))
    assert "in 1 of 3 tasks the environment failed" in shown


def test_tokens_and_valid_actions_are_per_step(job):
    result, _ = evaluation.evaluate_seeds(job, None, [5])
    plays = []
    for first in range(0, 10, 4):  # the same episodes, batch by batch
        tasks = job.runner.select_tasks("held_out", 5, range(first, first + 4))
        plays.append(Runner().rollout(None, tasks, None, None, Decoding(temperature=0.4), held_out=True).episodes)
    steps = [(e.prompt_lengths[b, t], e.response_lengths[b, t], e.invalid[b, t])
             for e in plays for b in range(4) for t in range(5) if e.mask[b, t]]  # fmt: skip
    steps = steps[: len(steps) - sum(int(plays[-1].mask[b].sum()) for b in (2, 3))]
    numbers = result["by_seed"][5]
    for name, column in (("prompt_tokens_per_step", 0), ("response_tokens_per_step", 1)):
        assert numbers[name] == pytest.approx(statistics.mean(float(step[column]) for step in steps))
    assert numbers["valid_actions"] == pytest.approx(1 - statistics.mean(float(step[2]) for step in steps))
    assert result["over_seeds"]["success"]["std"] is None


def test_without_a_seed_tasks_are_played_once_and_a_few_are_shown(job):
    episodes, _, shown = evaluation.play_held_out(job, None, Decoding(temperature=0.4))
    assert len(episodes.success) == 3
    assert len(shown) == evaluation.SHOWN
    assert jax.tree.leaves(episodes.prompts) == []


class ManyTypes(Runner):
    """Five types of tasks, the last of them once, in the second batch; a transcript names its task's place in the batch."""

    def rollout(self, *args, **options):
        result = super().rollout(*args, **options)
        first = int(np.asarray(args[3])[0])
        kinds = [4 if first + i == 7 else (first + i) % 4 // 2 for i in range(4)]
        self.at = first
        return result._replace(episodes=result.episodes.replace(task=np.array(kinds)))

    def story(self, result, i):
        at = self.at + i
        return types.SimpleNamespace(text=lambda: f"episode {at}, type {int(result.episodes.task[i])}")


def test_one_of_each_task_type_is_shown():
    job = FakeJob(configuration.load(None, ["evaluation.episodes=10"]), ManyTypes(num_held_out_tasks=None))
    _, _, shown = evaluation.play_held_out(job, None, Decoding())
    assert shown == ["episode 0, type 0", "episode 2, type 1", "episode 7, type 4"]
    job = FakeJob(configuration.load(None, ["evaluation.episodes=4"]), ManyTypes(num_held_out_tasks=None))
    _, _, shown = evaluation.play_held_out(job, None, Decoding())
    assert shown == ["episode 0, type 0", "episode 2, type 1", "episode 1, type 0"]


def test_files_hold_everything(job, tmp_path):
    result, episodes = evaluation.evaluate_seeds(job, None, [1, 2])
    file = tmp_path / "new" / evaluation_files.file_name("valid_seen", 0.4, 10, [1, 2])
    assert file.name == "valid_seen-t0.4-n10-s1-2.json"
    evaluation_files.write(file, result, episodes)
    assert json.loads(file.read_text())["seeds"] == [1, 2]
    lines = file.with_suffix(".jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == episodes
    assert len(list(file.parent.iterdir())) == 2


def test_splits():
    alfworld = configuration.load(None, ["env.name=alfworld", "warm_start=none"])
    assert evaluate.split_of(alfworld, None) == ("valid_seen", [])
    assert evaluate.split_of(alfworld, "valid_unseen") == ("valid_unseen", ["env.held_out=valid_unseen"])
    assert evaluate.split_of(configuration.Config(), None) == ("held_out", [])
    with pytest.raises(ConfigError, match="--split valid_seen: household"):
        evaluate.split_of(configuration.Config(), "valid_seen")


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["RUN", "--seeds", "1,1"], "--seeds 1,1"),
        (["RUN", "--seeds", "1;2"], "--seeds 1;2"),
        (["RUN", "--split", "valid_seen"], "--split valid_seen: household"),
        (["RUN", "--seeds", "1", "--split", "somewhere"], "--split somewhere"),
        (["RUN", "--config", "household"], "has its own config.yaml"),
        (["nowhere"], "nowhere: not the folder of a run"),
        (["RUN/policy"], "give --config, as in --config household"),
        (["Qwen/Qwen2.5-0.5B", "--config", "household", "--seeds", "1"], "for a policy from the hub give --to"),
        ([], "none is given; name the folder of a run, or two results"),
        (["RUN", "--panel", "nothing"], "--panel nothing: there is none of this name; give one of alfworld-valid_seen,"),
        (["RUN", "--panel", "sokoban"], "env.name=household: --panel sokoban is played in sokoban or sokoban_text"),
        (["RUN", "--panel", "household", "--split", "held_out"], "--split held_out: --panel household decides the tasks"),
        (["RUN", "--panel", "household", "env.max_turns=3"], "--panel household decides env.max_turns; leave it out"),
        (["RUN", "--panel", "household", "evaluation.episodes=3"], "decides evaluation.episodes; leave it out"),
        (["RUN", "--panel", "household", "--seeds", "1,1"], "--seeds 1,1"),
        (["--compare", "RUN/config.yaml", "nowhere.json"], "config.yaml: not the result of a panel"),
        (["RUN", "--compare", "a", "b"], "takes two files and nothing else; leave out run"),
        (["--compare", "a", "b", "--panel", "sokoban", "--seeds", "1"], "leave out seeds, panel"),
        (["RUN", "--panel", ""], "--panel : there is none of this name"),
    ],
)
def test_refusals(arguments, fragment, tmp_path, monkeypatch):
    (tmp_path / "run" / "policy").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("seed: 1\n")
    monkeypatch.setattr(evaluate, "prepare_devices", lambda config, several: None)
    monkeypatch.setattr("sys.argv", ["evaluate", *(a.replace("RUN", str(tmp_path / "run")) for a in arguments)])
    with pytest.raises(ConfigError) as caught:
        evaluate.main()
    assert fragment in str(caught.value)


def test_no_evaluation_takes_the_place_of_another(tmp_path):
    file = tmp_path / "held_out-t1-n12.json"
    settings = evaluation_files.settings_of(configuration.load(None, ["env.max_turns=10", "evaluation.top_k=3"]))
    evaluation_files.write(file, {"policy": "A", "settings": settings})
    evaluation_files.refuse_another(file, settings, "A")
    evaluation_files.refuse_another(file, settings)
    evaluation_files.refuse_another(tmp_path / "nothing.json", settings)
    with pytest.raises(ConfigError, match="policy=A; choose another folder with --to"):
        evaluation_files.refuse_another(file, settings, "B")
    other = evaluation_files.settings_of(configuration.load(None, ["evaluation.top_k=3"]))
    with pytest.raises(ConfigError, match=r"n12\.json: holds an evaluation with env\.max_turns=10; choose"):
        evaluation_files.refuse_another(file, other)


@pytest.mark.parametrize("change", ["env.tasks=two", "evaluation.min_response=2", "rollout.history_length=1", "rollout.stop=x",
                                    "env.held_out=valid_unseen", "policy.compute_dtype=bfloat16",
                                    "policy.sample_dtype=int8"])  # fmt: skip
def test_fields_that_an_evaluation_depends_on(change):
    default = evaluation_files.settings_of(configuration.Config())
    name = change.partition("=")[0]
    changed = evaluation_files.settings_of(configuration.load(None, [change]))
    assert {n for n in default if changed[n] != default[n]} == {name}


@pytest.mark.parametrize("change", ["env.data=x", "env.workers=2", "evaluation.every=3", "mesh=data=1", "learner.lr=1"])
def test_fields_that_no_evaluation_depends_on(change):
    changed = configuration.load(None, [change])
    assert evaluation_files.settings_of(changed) == evaluation_files.settings_of(configuration.Config())


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """`evaluated(*arguments)`: what the command prints and writes where the policy and its play are stand-ins."""
    run = tmp_path / "run"
    (run / "policy").mkdir(parents=True)
    (tmp_path / "exported").mkdir()
    (run / "config.yaml").write_text("seed: 1\nevaluation: {episodes: 6}\npolicy: {sample_dtype: int8}\n")
    (run / "evaluation.json").write_text("{}")
    monkeypatch.setattr(evaluate, "prepare_devices", lambda config, several: None)
    monkeypatch.setattr(evaluate, "build", lambda config, mesh: FakeJob(config, Runner(num_held_out_tasks=None)))
    monkeypatch.chdir(tmp_path)

    def command(*arguments) -> set[str]:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}
        monkeypatch.setattr("sys.argv", ["evaluate", *arguments])
        evaluate.main()
        return {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.json*") if before.get(p) != p.read_bytes()}

    return command


def test_only_an_evaluation_with_the_runs_settings_is_its_own(evaluated):
    assert evaluated("run", "evaluation.temperature=1", "mesh=data=1") == {"run/evaluation.json"}
    own = Path("run/evaluation.json").read_text()
    assert evaluated("run", "evaluation.episodes=8") == {"run/evaluations/held_out-t1-n8.json"}
    assert json.loads(Path("run/evaluations/held_out-t1-n8.json").read_text())["episodes"] == 8
    assert evaluated("run", "env.max_turns=3") == {"run/evaluations/held_out-t1-n6.json"}
    assert evaluated("run", "--to", "there") == {"there/held_out-t1-n6.json"}
    assert evaluated("run", "--seeds", "1,2") == {f"run/evaluations/held_out-t1-n6-s1-2.{end}" for end in ("json", "jsonl")}
    assert evaluated("run", "policy.sample_dtype=int8", "--to", "rounded") == {"rounded/held_out-t1-n6.json"}
    files = Path("there/held_out-t1-n6.json"), Path("rounded/held_out-t1-n6.json")
    assert [json.loads(file.read_text())["settings"]["policy.sample_dtype"] for file in files] == ["compute_dtype", "int8"]
    assert Path("run/evaluation.json").read_text() == own
    with pytest.raises(ConfigError, match=r"n6\.json: holds an evaluation with env\.max_turns=3; choose another folder"):
        evaluated("run", "env.max_turns=4")
    with pytest.raises(ConfigError, match="policy=run; choose another folder"):
        evaluated("exported", "--config", "run/config.yaml", "--to", "there")


def test_a_folder_that_is_no_run_needs_only_its_configuration(evaluated, capsys):
    assert evaluated("exported", "--config", "household") == {"exported/evaluations/held_out-t1-n512.json"}
    assert "held-out sampled" in capsys.readouterr().out
    found = json.loads(Path("exported/evaluations/held_out-t1-n512.json").read_text())
    assert (found["policy"], found["env"], found["split"], found["episodes"]) == ("exported", "household", "held_out", 512)


@pytest.mark.slow
def test_a_run_and_its_exported_policy_score_alike(tmp_path):
    run, exported, cache = tmp_path / "run", tmp_path / "exported", f"cache_dir={tmp_path / 'cache'}"
    fields = ("iterations=3", "learner.final_lr=0.25", "policy.sample_dtype=int8", cache, f"run_dir={run}")
    command("-m", "hgpo_jax.train", *TINY, *fields, cwd=tmp_path)
    assert [row["lr"] for row in rows_of(run)] == pytest.approx([2e-3, 1.25e-3, 5e-4])
    before = (run / "evaluation.json").read_text()

    shown = command("-m", "hgpo_jax.watch", run, "--task", "1", cwd=tmp_path).stdout.splitlines()
    told = (run / "transcripts.txt").read_text().split("\n\n")[1].splitlines()  # of the evaluation's second task
    assert [line for line in shown[:-2] if "probability" not in line] == [told[0].rpartition(" (")[0], *told[1:]]
    assert sum("probability" in line for line in shown) == 4  # turns
    refused = command("-m", "hgpo_jax.watch", run, "--config", "household", cwd=tmp_path, code=2).stderr
    assert "has its own config.yaml" in refused

    command("-m", "hgpo_jax.export", run, "--to", exported, cwd=tmp_path)
    fields = [field for field in TINY if field.startswith(("env.", "evaluation.", "rollout."))]
    command("-m", "hgpo_jax.evaluate", exported, "--config", "household", *fields, cache, cwd=tmp_path)
    there = json.loads((exported / "evaluations" / "held_out-t1-n12.json").read_text())
    assert {name: there[name] for name in json.loads(before)} == json.loads(before)

    seeds = ["--seeds", "3,4", "evaluation.episodes=12"]
    out = command("-m", "hgpo_jax.evaluate", run, *seeds, cwd=tmp_path).stdout
    assert "response_tokens_per_step" in out
    (tmp_path / "tiny.yaml").write_text((run / "config.yaml").read_text())
    hf = [exported, "--config", tmp_path / "tiny.yaml", "--to", tmp_path / "there"]
    command("-m", "hgpo_jax.evaluate", *hf, *seeds, cwd=tmp_path)
    name = "held_out-t1-n12-s3-4.json"
    one, other = (json.loads((folder / name).read_text()) for folder in (run / "evaluations", tmp_path / "there"))
    assert one.pop("policy") != other.pop("policy")
    assert one == other
    assert len((tmp_path / "there" / f"{name}l").read_text().splitlines()) == 24
    assert (run / "evaluation.json").read_text() == before
