"""Evaluation under several seeds: its numbers against plain loops, what it writes, what it refuses."""

import json
import statistics
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from hgpo_jax import config as configuration
from hgpo_jax import evaluate
from hgpo_jax.config import cli
from hgpo_jax.envs.household import Household
from hgpo_jax.evaluation import files as evaluation_files
from hgpo_jax.evaluation import held_out, panels, passes
from hgpo_jax.evaluation import pass_at_k as samples
from hgpo_jax.evaluation import statistics as intervals
from hgpo_jax.rollout.tasks import task_keys
from hgpo_jax.sampling.generate import Decoding
from hgpo_jax.trainer import curves
from hgpo_jax.utils.errors import ConfigError, RunError
from tests.helpers.pretended import FakeJob, Runner
from tests.helpers.refusals import refused
from tests.helpers.training import TINY, command, rows_of


def fake_job():
    return FakeJob(configuration.load(None, ["evaluation.episodes=10", "evaluation.temperature=0.4"]), Runner())


@pytest.fixture
def job():
    return fake_job()


def test_numbers_are_those_of_a_plain_loop(job):
    seeds = [123, 456, 789]
    result, episodes = held_out.evaluate_seeds(job, None, seeds)
    assert len(episodes) == 30  # more than the three tasks: they are played again
    by_seed = [[e for e in episodes if e["seed"] == seed] for seed in seeds]
    assert len({tuple(e["turns"] for e in part) for part in by_seed}) == 3  # each seed has its own
    wins = [statistics.mean(e["success"] for e in part) for part in by_seed]
    found = result["over_seeds"]["success"]
    assert found["mean"] == pytest.approx(statistics.mean(wins))
    assert found["std"] == pytest.approx(statistics.stdev(wins))
    of = {"success": lambda e: 1, "success/place": lambda e: e["task"] == "place", "valid_actions": lambda e: e["turns"],
          "score": lambda e: 1}  # fmt: skip
    for name, weight in of.items():  # what each share is of
        sizes = [sum(weight(e) for e in part) for part in by_seed]
        values = [numbers[name] for numbers in result["by_seed"].values()]
        assert result["over_seeds"][name]["interval"] == list(intervals.korn_graubard(values, sizes))
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
    shown = held_out.describe_seeds(result)
    found = result["over_seeds"]["success"]
    low, high = found["interval"]
    assert f"{found['mean']:.1%}" in shown
    assert f"   {low:.1%} to {high:.1%}" in shown
    low, high = result["over_episodes"]["success"]["interval"]
    assert f"{low:.1%} to {high:.1%} of 30" in shown


def test_scores_that_are_no_shares_and_types_that_a_seed_has_not(job):
    seeds, rollout = [1, 2, 3], job.runner.rollout

    def scored(params, tasks, *args, **options):
        result = rollout(params, tasks, *args, **options)
        result.report.scores *= 10
        if tasks[0] >= 3000:  # of the last seed
            result.episodes.task[:] = 0
        return result

    job.runner.rollout = scored
    result, _ = held_out.evaluate_seeds(job, None, seeds)
    looks = [numbers["success/look"] for numbers in list(result["by_seed"].values())[:2]]
    assert result["over_seeds"]["success/look"]["mean"] == statistics.mean(looks)
    means = [numbers["score"] for numbers in result["by_seed"].values()]
    assert max(means) > 1
    assert result["over_seeds"]["score"] == intervals.over_seeds(means)
    json.loads(json.dumps(result, allow_nan=False))


def test_failed_episodes_are_told_apart_from_lost_ones(job):
    rollout, temperatures, parts = job.runner.rollout, [], []

    def unlucky(params, tasks, keys, index, decoding, **options):
        temperatures.append(decoding.temperature)
        result = rollout(params, tasks, keys, index, decoding, **options)
        result.episodes.mask[1], result.episodes.success[1] = False, False
        result.episodes.task[:] = 0
        parts.append(result.episodes)
        return result

    job.runner.rollout = unlucky
    _, episodes = held_out.evaluate_seeds(job, None, [1])
    failed = [e["episode"] for e in episodes if e["success"] is None]
    assert failed == [1, 5, 9] and all(episodes[i]["task"] is None and episodes[i]["score"] is None for i in failed)
    result, transcripts = held_out.play_both(job, None)
    assert temperatures[-2:] == [0.4, 0.0]
    for mode, e in zip(("sampled", "greedy"), parts[-2:], strict=True):
        assert result["turns"][mode] == e.mask[[0, 2]].sum() / 2
        assert result["by_task"][mode] == {"place": e.success[[0, 2]].mean()}
    assert transcripts == [f"{e} turns" for e in parts[-2].mask[:3].sum(1)]  # of the sampled ones
    assert result["episodes"] == 3 and result["played"] == {"sampled": 2, "greedy": 2}
    assert "of 2 tasks" in (shown := held_out.describe_evaluation(result))
    assert "in 1 of 3 tasks the environment failed" in shown
    lowest = result["success_at_least"]["greedy"]
    assert lowest == parts[-1].success.sum() / 3 and f"{lowest:.1%} if they count as lost" in shown


def test_success_that_the_environment_does_not_say(job, tmp_path):
    """Is null in files, left out of curves, and said in words."""
    rollout = job.runner.rollout

    def silent(*args, **options):
        result = rollout(*args, **options)
        return result._replace(episodes=result.episodes.replace(judged=np.zeros(4, bool), success=np.zeros(4, bool)))

    job.runner.rollout = silent
    result, _ = held_out.play_both(job, None)
    assert "success unknown in 3 tasks" in held_out.describe_evaluation(result)
    evaluation_files.write(tmp_path / "evaluation.json", result)
    written = json.loads((tmp_path / "evaluation.json").read_text())
    assert written["success"] == {"sampled": None, "greedy": None} and written["by_task"]["greedy"] == {}
    assert curves.read_held_out(tmp_path)["greedy"].keys() == {"turns", "valid"}
    known = held_out.play_held_out

    def greedy_alone_is_unknown(job, params, decoding, *more):
        episodes, _, transcripts = known(job, params, decoding, *more)
        sampled = bool(decoding.temperature)
        judged = np.full(len(episodes.mask), sampled)
        return episodes.replace(judged=judged), np.where(judged, 0.5, np.nan), transcripts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_out, "play_held_out", greedy_alone_is_unknown)
        evaluation_files.write(tmp_path / "evaluation.json", held_out.play_both(job, None)[0])
    of_modes = curves.read_held_out(tmp_path)
    assert "success" in of_modes["sampled"] and "success" not in of_modes["greedy"]
    assert curves.draw([{"iteration": 0, "success": 0.5}], held_out=of_modes)
    result, episodes = held_out.evaluate_seeds(job, None, [1, 2])
    assert {e["success"] for e in episodes} == {None} and not any("success" in name for name in result["over_seeds"])


def test_tokens_and_valid_actions_are_per_step(job):
    parts, rollout = [], job.runner.rollout
    job.runner.rollout = lambda *args, **options: parts.append(rollout(*args, **options)) or parts[-1]
    result, _ = held_out.evaluate_seeds(job, None, [5])
    played = [(part.episodes, b) for part in parts for b in range(4)][:10]  # of the last batch only two
    steps = [(e.prompt_lengths[b, t], e.response_lengths[b, t], not e.invalid[b, t])
             for e, b in played for t in range(5) if e.mask[b, t]]  # fmt: skip
    for column, name in enumerate(("prompt_tokens_per_step", "response_tokens_per_step", "valid_actions")):
        assert result["by_seed"][5][name] == pytest.approx(statistics.mean(float(step[column]) for step in steps))
    assert result["over_seeds"]["success"]["std"] is None


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
    for count, expected in ((10, ["episode 0, type 0", "episode 2, type 1", "episode 7, type 4"]),
                            (4, ["episode 0, type 0", "episode 2, type 1", "episode 1, type 0"])):  # fmt: skip
        job = FakeJob(configuration.load(None, [f"evaluation.episodes={count}"]), ManyTypes(num_held_out_tasks=None))
        episodes, _, shown = held_out.play_held_out(job, None, Decoding())
        assert shown == expected
        assert jax.tree.leaves(episodes.prompts) == []


SERVED = "openai:http://127.0.0.1:9/v1#small"


def test_splits():
    alfworld = configuration.load(None, ["env.name=alfworld", "warm_start=none"])
    assert evaluate.split_of(alfworld, None) == ("valid_seen", [])
    assert evaluate.split_of(alfworld, "valid_unseen") == ("valid_unseen", ["env.held_out=valid_unseen"])
    assert evaluate.split_of(configuration.Config(), None) == ("held_out", [])


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["RUN", "--seeds", "1,1"], "--seeds 1,1"),
        (["RUN", "--seeds", "1;2"], "--seeds 1;2"),
        (["RUN", "--samples", "4", "--seeds", "1"], "--samples 4: --seeds 1 decides the plays; leave out one of the two"),
        (["RUN", "--samples", "4", "--panel", "household"], "--samples 4: --panel household decides the plays"),
        (["RUN", "--split", "valid_seen"], "--split valid_seen: household"),
        (["RUN", "--seeds", "1", "--split", "somewhere"], "--split somewhere"),
        (["RUN", "--config", "household"], "has its own config.yaml"),
        (["nowhere"], "nowhere: not the folder of a run"),
        (["RUN/policy"], "give --config, as in --config household"),
        (["Qwen/Qwen2.5-0.5B", "--config", "household", "--seeds", "1"], "for a policy from the hub give --to"),
        ([], "none is given; name the folder of a run, or two results"),
        (["RUN", "--panel", "nothing"], "--panel nothing: there is none of this name; give one of alfworld-valid_seen,"),
        (["RUN", "--panel", "sokoban"], "env.name=household: --panel sokoban is played in sokoban or sokoban_pixels or"),
        (["RUN", "--panel", "household", "--split", "held_out"], "--split held_out: --panel household decides the tasks"),
        (["RUN", "--panel", "household", "env.max_turns=3"], "--panel household decides env.max_turns; leave it out"),
        (["RUN", "--panel", "household", "evaluation.episodes=3"], "decides evaluation.episodes; leave it out"),
        (["RUN", "--panel", "household", "--seeds", "1,1"], "--seeds 1,1"),
        (["--compare", "RUN/config.yaml", "nowhere.json"], "config.yaml: not the result of a panel"),
        (["RUN", "--compare", "a", "b"], "takes two files and nothing else; leave out run"),
        (["--compare", "a", "b", "--panel", "sokoban", "--seeds", "1"], "leave out seeds, panel"),
        ([SERVED], "give --panel NAME; a served policy plays panels"),
        ([SERVED, "--panel", "household"], "give --to FOLDER"),
        ([SERVED, "--panel", "household", "--to", "x"], "env.name=household: a served policy needs texts"),
        ([SERVED, "--panel", "household", "--to", "x", "--mesh", "data=1"], "--mesh: nothing is computed"),
        (["RUN", "--panel", ""], "--panel : there is none of this name"),
        (["RUN", "seed=1", "policy=x"], "policy=x: the policy is that of "),
        (["RUN", "policy.source=x"], "RUN; leave it out"),
        (["RUN", "policy.hidden_size=8"], "policy.hidden_size=8: the policy is that of "),
        (["RUN", "warm_start=none"], "warm_start=none: the policy is that of "),
        (["RUN", "lora.rank=2"], "lora.rank=2: the policy is that of "),
        (["RUN_OF_TEAM", "roles.carrier.policy=x"], "roles.carrier.policy=x: the policy is that of "),
        (["RUN_OF_TEAM", "roles.carrier.lora_rank=2"], "roles.carrier.lora_rank=2: the policy is that of "),
        (["RUN/policy", "--config", "household", "policy=x"], "RUN/policy; leave it out"),
        ([SERVED, "--panel", "household", "--to", "x", "policy=y"], f"policy=y: the policy is that of {SERVED}; leave it out"),
        ([SERVED, "--panel", "household", "--to", "x", "policy.compute_dtype=bfloat16"], "the policy is that of "),
        ([SERVED, "--panel", "household", "--to", "x", "roles.carrier.policy=y"], "the policy is that of "),
        (["SHOP", "--panel", "webshop"], "this run was trained on some of its tasks, by env.goal_order=verl-agent"),
    ],
)
def test_refusals(arguments, fragment, tmp_path, monkeypatch):
    for run, text in (("RUN", "seed: 1\n"), ("SHOP", "{env: {name: webshop, goal_order: verl-agent}, warm_start: none}")):
        (tmp_path / run / "policy").mkdir(parents=True)
        (tmp_path / run / "config.yaml").write_text(text)
    for role in ("carrier", "cook"):
        (tmp_path / "RUN_OF_TEAM" / "policy" / role).mkdir(parents=True)
        (tmp_path / "RUN_OF_TEAM" / "policy" / role / "config.json").touch()
    (tmp_path / "RUN_OF_TEAM" / "config.yaml").write_text("env: {name: household_team}\n")
    monkeypatch.setattr(evaluate, "prepare_devices", lambda config, several: None)
    folders = [str(tmp_path / a) if a.startswith(("RUN", "SHOP")) else a for a in arguments]
    monkeypatch.setattr("sys.argv", ["evaluate", *folders])
    with refused(fragment, ConfigError):
        evaluate.main()


def test_fields_of_a_policy_that_still_matter():
    for override in ("policy.compute_dtype=bfloat16", "roles.carrier.policy=x", "roles.carrier.reward=budget", "mesh=data=1"):
        assert not cli.of_policy(override, {"cook"})  # the carrier shares a policy, and may have another one here


def test_an_evaluation_of_an_older_release_is_written_again(tmp_path):
    file = tmp_path / "held_out-t1-n12.json"
    settings = evaluation_files.settings_of(configuration.load(None, ["env.max_turns=10", "evaluation.temperature=0.4"]))
    evaluation_files.write(file, {"policy": "A", "settings": settings | {"env.gone": 3}})  # a field that is no more
    for where, policy in ((file, "A"), (file, None), (tmp_path / "nothing.json", "B")):
        evaluation_files.refuse_another(where, settings, policy)


def test_an_evaluation_of_other_data_is_not_replaced(tmp_path):
    file, settings = tmp_path / "held_out-t1-n12.json", evaluation_files.settings_of(configuration.Config())
    evaluation_files.write(file, {"policy": "A", "data": "/gsm8k", "settings": settings})
    evaluation_files.refuse_another(file, settings, "A", "/gsm8k")
    with pytest.raises(ConfigError, match=r"holds an evaluation with env\.data=/gsm8k; choose another folder with --to"):
        evaluation_files.refuse_another(file, settings, "A", "/math")


def test_fields_that_an_evaluation_depends_on():
    default = evaluation_files.settings_of(configuration.Config())

    def changed(change):
        settings = evaluation_files.settings_of(configuration.load(None, [change]))
        return {name for name in default if settings[name] != default[name]}

    for change in ("env.tasks=two", "evaluation.temperature=0.4", "rollout.history_length=1", "rollout.stop=x",
                   "env.held_out=valid_unseen", "policy.compute_dtype=bfloat16", "rollout.constrain=admissible",
                   "rollout.thinking=false"):  # fmt: skip
        assert changed(change) == {change.partition("=")[0]}
    for change in ("env.data=x", "env.workers=2", "evaluation.every=3", "mesh=data=1", "learner.lr=1"):
        assert not changed(change)


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """`evaluated(*arguments)`: the files that the command writes where the policy and its play are stand-ins."""
    run = tmp_path / "run"
    (run / "policy").mkdir(parents=True)
    (tmp_path / "exported").mkdir()
    (run / "config.yaml").write_text("seed: 1\nevaluation: {episodes: 6}\n")
    (run / "evaluation.json").write_text("{}")
    monkeypatch.setattr(evaluate, "prepare_devices", lambda config, several: None)
    monkeypatch.setattr(evaluate, "build", lambda config, mesh, trains: FakeJob(config, Runner(num_held_out_tasks=None)))
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
    assert evaluated("run", "--samples", "4") == {"run/evaluations/held_out-t1-n6-samples4.json"}
    assert json.loads(Path("run/evaluations/held_out-t1-n6-samples4.json").read_text())["plays"] == [4] * 6
    assert Path("run/evaluation.json").read_text() == own
    with pytest.raises(ConfigError, match=r"n6\.json: holds an evaluation with env\.max_turns=3; choose another folder"):
        evaluated("run", "env.max_turns=4")
    with pytest.raises(ConfigError, match="policy=run; choose another folder"):
        evaluated("exported", "--config", "run/config.yaml", "--to", "there")


@pytest.mark.parametrize(
    "more, passes, kept",
    [
        (("--seeds", "1,2,3"), 3, ["about.json", "seed-1.npz", "seed-2.npz"]),
        (("--samples", "3"), 3, ["about.json", "sample-0.npz", "sample-1.npz"]),
        (("evaluation.episodes=8",), 2, ["about.json", "sampled.npz"]),
    ],
)
def test_a_repeat_goes_on_after_the_passes_that_ended(more, passes, kept, evaluated, monkeypatch, tmp_path):
    (written, *_) = sorted(evaluated("run", *more, "--to", "whole"))
    whole, played = Path(written).read_bytes(), []

    def play(*args, **options):
        played.append(options or args[2:])
        if len(played) == passes:
            raise RunError("the last pass fails")
        return held_out_play(*args, **options)

    held_out_play = held_out.play_held_out
    for module in (held_out, samples):
        monkeypatch.setattr(module, "play_held_out", play)
    with pytest.raises(RunError, match="the last pass fails"):
        evaluated("run", *more, "--to", "again")
    (folder,) = Path("again").iterdir()
    assert sorted(file.name for file in folder.iterdir()) == kept
    evaluated("run", *more, "--to", "again")  # plays the last one alone
    assert len(played) == passes + 1
    assert Path(written.replace("whole", "again")).read_bytes() == whole
    assert not list(Path("again").glob("*.passes"))
    for file in Path("again").iterdir():
        assert Path("whole", file.name).read_bytes() == file.read_bytes()


def test_passes_of_another_evaluation_are_removed(tmp_path):
    e, scores, transcripts = held_out.play_held_out(fake_job(), None, Decoding())
    first = passes.Passes(tmp_path / "x.passes", {"policy": "A"})
    first("one", lambda: (e, scores, transcripts))
    kept, again, told = passes.Passes(tmp_path / "x.passes", {"policy": "A"})("one", lambda: (e, None, ["other"]))
    assert told == transcripts and (again == scores).all() and set(kept.arrays()) == set(passes.NEEDED)
    assert held_out.summarize(kept, Runner.task_types, again) == held_out.summarize(e, Runner.task_types, scores)
    for _ in range(2):
        other = passes.Passes(tmp_path / "x.passes", {"policy": "B"})
        assert other("one", lambda: (e, None, ["other"]))[1:] == (None, ["other"])


def test_a_pass_in_which_most_failed_is_not_kept(tmp_path):
    """Else a command could never succeed after what failed was mended."""
    e, scores, transcripts = held_out.play_held_out(fake_job(), None, Decoding())
    broken = e.replace(mask=e.mask & False)
    kept = passes.Passes(tmp_path / "x.passes", {})
    assert kept("one", lambda: (broken, scores, transcripts))[0] is broken and not (tmp_path / "x.passes").exists()
    assert kept("one", lambda: (e, scores, transcripts))[0] is e and (tmp_path / "x.passes" / "one.npz").is_file()
    kept.end()


def test_a_panel_is_played_under_one_seed_once_devices_are_open(evaluated, monkeypatch):
    """Once jax has counted its devices, neither more of them nor other processes can be had."""
    called, build = [], evaluate.build
    monkeypatch.setattr(evaluate, "prepare_devices", lambda config, several: called.append("devices"))
    monkeypatch.setattr(panels, "panel_tasks", lambda name, config: called.append("tasks") or ["a task"] * 512)
    monkeypatch.setattr(evaluate, "build", lambda *given, **more: called.append("policy") or build(*given, **more))
    policy = types.SimpleNamespace(settings=configuration.load(None, ["policy=somewhere"]))
    monkeypatch.setattr(FakeJob, "policies", {"": policy})
    monkeypatch.setattr(evaluate, "find", lambda source, cache: source)
    monkeypatch.setattr(evaluate.huggingface_folder, "digest", lambda source: "1234")
    name = "run/evaluations/panel-household-t1-n512-s0.json"
    assert evaluated("run", "--panel", "household") == {name, f"{name}l"}
    assert called == ["devices", "tasks", "policy"]
    found = json.loads(Path(name).read_text())
    assert (found["policy_sha256"], found["seeds"], len(found["tasks"])) == ("1234", [0], 512)
    assert len(Path(f"{name}l").read_text().splitlines()) == 1024


@pytest.mark.slow
def test_a_run_and_its_exported_policy_score_alike(tmp_path):
    """Greedily and sampled, to the letter."""
    run, exported, cache = tmp_path / "run", tmp_path / "exported", f"cache_dir={tmp_path / 'cache'}"
    cloned = "warm_start=cloning", "cloning.episodes=64", "cloning.max_steps=30"  # so that answers differ
    fields = *cloned, "iterations=3", "learner.final_lr=0.25", cache, f"run_dir={run}"
    command("-m", "hgpo_jax.train", *TINY, *fields, cwd=tmp_path)
    assert [row["lr"] for row in rows_of(run)] == pytest.approx([2e-3, 1.25e-3, 5e-4])
    before = (run / "evaluation.json").read_text()

    shown = command("-m", "hgpo_jax.watch", run, "--task", "1", cwd=tmp_path).stdout.splitlines()
    told = (run / "transcripts.txt").read_text().split("\n\n")[1].splitlines()  # of the evaluation's second task
    assert [line for line in shown[:-2] if "probability" not in line] == [told[0].rpartition(" (")[0], *told[1:]]
    assert 0 < sum("probability" in line for line in shown) <= 4  # turns

    command("-m", "hgpo_jax.export", run, "--to", exported, cwd=tmp_path)

    for policy in ([run], [exported, "--config", run / "config.yaml"]):
        shown = command("-m", "hgpo_jax.evaluate", *policy, "--panel", "household", cwd=tmp_path).stdout.splitlines()
    assert (run / "evaluation.json").read_text() == before
    files = [folder / "evaluations" / "panel-household-t1-n512-s0.json" for folder in (run, exported)]
    assert shown[-1] == str(files[1])
    one, other = (json.loads(file.read_text()) for file in files)
    assert one["policy_sha256"] == other["policy_sha256"] and one["tasks"] == other["tasks"]
    assert one["policy"] != other["policy"]
    lines = [Path(f"{file}l").read_text().splitlines() for file in files]
    assert len(lines[0]) == 1024 and lines[0] == lines[1]
    env = Household()
    keys = task_keys("held_out", 0, jax.numpy.arange(5))
    for i in range(5):  # what is played are the panel's tasks, in its order
        goal = env.decode(np.asarray(env.goal(env.reset(keys[i])[0])))
        assert json.loads(lines[0][i])["transcript"].startswith(f"task: {goal} (")
    shown = command("-m", "hgpo_jax.evaluate", "--compare", *files, cwd=tmp_path).stdout.splitlines()
    (row,) = (line.split() for line, above in zip(shown[1:], shown, strict=False) if above.startswith("success, greedy"))
    assert row[:2] == ["all", "512"] and row[4] == "+0.0%" and row[-3:] == ["0", "0", "1"]
