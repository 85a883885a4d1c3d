"""`python -m hgpo_jax.credit`: files that are refused, methods that are scored, tables, and levels of runs."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from synthetic import snapshot

from hgpo_jax import config as configuration
from hgpo_jax.advantages import ESTIMATORS
from hgpo_jax.analysis.dumps import read_config
from hgpo_jax.config import dump
from hgpo_jax.credit import __main__ as credit
from hgpo_jax.credit import contenders, make, table
from hgpo_jax.credit.contenders import Contender
from hgpo_jax.credit.snapshot import Snapshot, load, load_all
from hgpo_jax.envs import user_code
from hgpo_jax.setup.job import Job
from hgpo_jax.utils.errors import ConfigError, RunError
from tests.envs.test_user_code import COMPILED
from tests.helpers.refusals import refused


def test_a_snapshot_is_read_as_it_was_written(tmp_path):
    one, _ = snapshot(seed=7)
    one = Snapshot(one.arrays | {"gradients": np.ones((*one["mask"].shape, 3), np.float16)}, one.about)
    one.save(tmp_path / "one.npz")
    other = load(tmp_path / "one.npz")
    assert other.about == one.about and other.arrays.keys() == one.arrays.keys()
    for name, array in one.arrays.items():
        np.testing.assert_array_equal(other[name], array)


DAMAGE = {
    "it is pickled": (lambda a: a | {"rewards": np.array([None])}, "Object arrays cannot be loaded"),
    "an array is missing": (lambda a: a | {"task": None}, "task is missing"),
    "an array is unknown": (lambda a: a | {"tusk": a["task"]}, "tusk is unknown"),
    "a shape": (lambda a: a | {"states": a["states"][:, :-1]}, "states is int32[128, 4] beside a mask of [128, 5]"),
    "a kind": (lambda a: a | {"groups": a["groups"] * 0.5}, "groups is float64[128]"),
    "signals": (lambda a: a | {"signals": a["rewards"][..., None]}, "signals are 1, with 0 names"),
    "not finite": (lambda a: a | {"true_values": a["true_values"] * np.nan}, "true_values holds a number that is not finite"),
    "below 0": (lambda a: a | {"batch": a["batch"] - 1}, "batch holds -1"),
    "a hole": (lambda a: a | {"mask": a["mask"][:, ::-1]}, "mask is not a prefix"),
    "another format": (lambda a: a | {"about": np.array('{"format": 2}')}, "of format 2, and this version reads 1"),
    "about": (lambda a: a | {"about": np.array('{"format": 1}')}, "Field required"),
    "no JSON": (lambda a: a | {"about": np.array("x")}, "is no snapshot"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_snapshots_are_refused(name, tmp_path):
    change, said = DAMAGE[name]
    snapshot()[0].save(tmp_path / "one.npz")
    with np.load(tmp_path / "one.npz") as stored:
        changed = change(dict(stored))
    np.savez(tmp_path / "one.npz", **{name: array for name, array in changed.items() if array is not None})
    with refused(said, ConfigError):
        load_all(tmp_path)


def test_half_a_file_and_an_empty_folder_are_refused(tmp_path):
    with refused("holds no snapshots", ConfigError):
        credit.main(["score", str(tmp_path)])
    snapshot()[0].save(tmp_path / "one.npz")
    whole = (tmp_path / "one.npz").read_bytes()
    for damaged in (whole[:999], whole[:200] + bytes(100) + whole[300:], b""):
        (tmp_path / "one.npz").write_bytes(damaged)
        with refused("one.npz: is no snapshot, or a damaged one", ConfigError):
            credit.main(["score", str(tmp_path)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hgpo gamma=0.5", "gamma=0.5: is the snapshots' own"),
        ("hgpo keep=valid", "keep=valid: all steps are scored"),
        ("hgpo by_role=true", "by_role=true: steps are compared over all roles"),
        ("hgpoo", "hgpoo"),
        ("hgpo history=0", "advantage.history=0: no such field"),
        ("hgpo history_length=-1", "advantage.history_length=-1"),
        ("./nowhere.py:mine", "nowhere.py"),
    ],
)
def test_methods_that_cannot_be(text, said):
    with refused(said, ConfigError):
        contenders.read(text)


OWN = """
import jax.numpy as jnp
from hgpo_jax.advantages import Estimate

def centred(batch, *, gamma=0.5, invalid_penalty=0.1):
    return Estimate(gamma * (batch.rewards - batch.rewards.mean()) - invalid_penalty, batch.rewards)
"""


def test_an_estimator_sees_one_batch_with_the_discount_of_the_snapshot(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    name = f"{tmp_path}/own.py:centred"
    monkeypatch.setitem(ESTIMATORS, name, None)  # so that it is forgotten afterwards
    one, _ = snapshot(batches=3)
    advantages = contenders.read(name).advantages(one)
    for batch in range(3):
        rewards, mask = (one[array][one["batch"] == batch] for array in ("rewards", "mask"))
        np.testing.assert_allclose(advantages[one["batch"] == batch], 0.9 * (rewards - rewards.mean()) * mask, atol=1e-5)


def test_every_estimator_is_scored_once_or_lacks_something():
    one, _ = snapshot()
    names = [contender.name for contender in contenders.all_methods()]
    assert {"grpo", "hgpo", "ppo"} <= set(names) and not {"dapo", "gspo"} & set(names)
    lacks = {name: Contender(name).missing([one]) for name in names}
    assert lacks["ppo"] == "needs final_values, values, which a snapshot does not hold"
    assert "signals" in lacks["gdpo"] and lacks["hgpo"] == lacks["graphgpo"] == ""


def test_beacon_is_scored_on_milestones_alone(tmp_path):
    one, other = (with_signals(snapshot()[0], names) for names in (["milestones", "cost"], ["cost", "milestones"]))
    assert Contender("gdpo").missing([one, other]) == Contender("beacon").missing([one]) == ""
    assert Contender("beacon").missing([one, other]) == "needs milestones as the first signal, which a snapshot does not hold"
    one.save(tmp_path / "one.npz")
    assert load(tmp_path / "one.npz").about.signals == ["milestones", "cost"]


def with_signals(one, names):
    signals = np.zeros((*one["mask"].shape, len(names)), np.float32)
    return Snapshot(one.arrays | {"signals": signals}, one.about.model_copy(update={"signals": names}))


class NearTruth(Contender):
    """The true advantages, with some noise."""

    def advantages(self, one):
        noise = float(self.options[0])
        if np.isnan(noise):
            raise ConfigError(f"{self.name}: returns NaN")
        return one["true_advantages"] + noise * np.random.default_rng(5).normal(size=one["mask"].shape)


def test_the_table_compares_in_pairs(tmp_path):
    snapshots = {f"s{seed}": snapshot(seed, level=level)[0] for seed, level in enumerate((0.2, 0.2, 0.8))}
    near, far, away, broken = (NearTruth("hgpo", (noise,)) for noise in ("0.1", "1", "-0.11", "nan"))
    standing = table.compute(snapshots, [near, away, far, broken], near)
    assert standing.left_out == {"hgpo nan": "returns NaN"}
    of_far = [standing.scores["hgpo 1"][name]["cosine"] - standing.scores["hgpo 0.1"][name]["cosine"] for name in snapshots]
    assert standing.difference("hgpo 1", "cosine", list(snapshots))["mean"] == pytest.approx(np.mean(of_far))
    text = table.write(standing, tmp_path)
    assert (tmp_path / "scores.md").read_text() == text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert rows[0][-2:] == ["cosine at 50%", "cosine at 50%"]
    assert [row[0] for row in rows[2:]] == ["hgpo 0.1", "hgpo -0.11", "hgpo 1"]
    assert rows[2][2] == "" and rows[4][2].startswith(f"**{np.mean(of_far):+.3f}** (")
    assert "* hgpo nan: returns NaN" in text and "3 snapshots, seeds 0, 1, 2; 100% of the steps" in text
    stored = json.loads((tmp_path / "scores.json").read_text())
    assert stored["scores"] == table.json_numbers(standing.scores) and stored["snapshots"]["s2"]["level"] == 0.8
    with refused("--against hgpo nan: returns NaN", ConfigError):
        table.compute(snapshots, [near], broken)


class ZeroOnFirst(Contender):
    """The true advantages, but 0 on the snapshot with seed 0."""

    def advantages(self, one):
        return one["true_advantages"] * (one.about.seed > 0)


def test_a_cosine_that_is_none_is_a_dash_in_the_last_row():
    snapshots = {f"s{seed}": snapshot(seed, level=0.2 + 0.3 * seed)[0] for seed in range(2)}
    best, zero, worst = NearTruth("hgpo", ("0.1",)), ZeroOnFirst("grpo"), NearTruth("hgpo", ("1",))
    text = table.markdown(table.compute(snapshots, [worst, zero, best], worst))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == ["hgpo 0.1", "hgpo 1", "grpo"]
    assert rows[-1][1:3] == ["-", "-"] and rows[-1][-2] == "-" and float(rows[-1][-1]) > 0.99 and "nan" not in text
    with refused("--against grpo: has no cosine on s0: its advantages are all 0 there", ConfigError):
        table.compute(snapshots, [best], zero)


def test_one_snapshot_has_no_interval_and_json_no_nan(tmp_path):
    standing = table.compute({"one": snapshot()[0]}, [NearTruth("hgpo", ("1",))], NearTruth("hgpo", ("0",)))
    standing.scores["hgpo 1"]["one"] |= {"bias2": np.nan, "cosine": 0.5}
    standing.scores["hgpo 0"]["one"]["cosine"] = 0.75
    assert "| hgpo 1 | 0.50 | -0.250 | - | - | - |" in table.write(standing, tmp_path)
    assert json.loads((tmp_path / "scores.json").read_text())["scores"]["hgpo 1"]["one"]["bias2"] is None


@pytest.fixture
def run(tmp_path):
    """Iterations of 10, 20, 30, ... %, with checkpoints after 3 and 6 of them."""
    rows = [{"iteration": i, "success": 0.1 + 0.1 * i} for i in range(7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for iteration in (3, 6, 7):
        (tmp_path / "checkpoints" / str(iteration)).mkdir(parents=True)
    return tmp_path


def test_the_checkpoint_nearest_to_a_level_is_taken(run):
    assert make.success_by_iteration(run) == {0: pytest.approx(0.1), 3: pytest.approx(0.4), 6: pytest.approx(0.7)}
    assert [make.nearest(run, level) for level in (0.15, 0.35, 0.65)] == [0, 3, 6]
    with refused("no checkpoint has a success near 85%, the nearest 70%", ConfigError):
        make.nearest(run, 0.85)
    rows = [{"iteration": i, "success": 0.1 * i} for i in (3, 4, 5)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert make.success_by_iteration(run) == {3: pytest.approx(0.3)}
    (run / "metrics.jsonl").write_text("")
    with refused("has not finished an iteration", ConfigError):
        make.nearest(run, 0.2)


SIZES = {"groups": 4, "batches": 4, "continuations": 100, "directions": 0}


def run_with(folder, *fields):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(configuration.load("household", fields)))
    return folder


@pytest.fixture
def taken(tmp_path):
    """A run, and a snapshot of it."""
    run = run_with(tmp_path / "a")
    about = {"run": make.digest(read_config(run)), "setting": "household"}
    snapshot(**about)[0].save(tmp_path / "household-s0-50.npz")
    return run, tmp_path / "household-s0-50.npz"


def test_help_is_printed():
    assert all("usage:" in credit.parser(command).format_help() for command in ("snapshot", "score"))


def test_a_snapshot_is_kept_if_it_is_the_one_asked_for(taken, capsys):
    run, file = taken
    make.make(run, file, "household", 0.5, **SIZES)
    assert "is there" in capsys.readouterr().out
    with refused("--directions 8: its gradients have 0; give that, or another DIR", ConfigError):
        make.make(run, file, "household", 0.5, **SIZES | {"directions": 8})
    longer = run_with(run.parent / "longer", "iterations=99", "log.tensorboard=false", "run_dir=x", "name=b", "env.workers=3")
    make.make(longer, file, "household", 0.5, **SIZES)
    for name, field in {"batches": "batches", "groups": "prompt_groups", "continuations": "continuations"}.items():
        with refused(f"holds a snapshot with {field}={SIZES[name]}; give --setting or another DIR", ConfigError):
            make.make(run, file, "household", 0.5, **SIZES | {name: 8})
    with refused("holds a snapshot with setting=household;", ConfigError):
        make.make(run, file, "house/hold", 0.5, **SIZES)


@pytest.mark.parametrize("field", ["method=grpo", "env.tasks=two", "advantage.gamma=0.9", "policy=elsewhere", "seed=1"])
def test_another_runs_snapshot_is_not_taken_for_this_ones(field, taken):
    run, file = taken
    other = run_with(run.parent / "other", field)
    with refused("household-s0-50.npz: holds another run's snapshot; give --setting or another DIR", ConfigError):
        make.make(other, file, "household", 0.5, **SIZES)


def test_another_version_of_the_users_code_is_another_run(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    run = run_with(tmp_path / "run", f"learner.loss={tmp_path}/own.py:centred")
    before = make.digest(read_config(run))
    assert make.digest(read_config(run)) == before
    (tmp_path / "own.py").write_text(OWN.replace("0.1", "0.2"))
    monkeypatch.setattr(user_code, "_READ", {})  # as in another process
    assert make.digest(read_config(run)) != before


def test_runs_whose_snapshots_would_have_one_name_are_refused(tmp_path):
    runs = [f"--run={run_with(tmp_path / name, field)}" for name, field in {"a": "method=hgpo", "b": "method=grpo"}.items()]
    with refused("--run: 2 of them would make household-s0-*.npz", ConfigError):
        credit.main(["snapshot", str(tmp_path / "made"), *runs])


def test_levels_that_a_run_was_never_near_are_left_out_and_told_at_the_end(tmp_path, monkeypatch, capsys):
    """Other levels and seeds are made all the same."""
    asked = []

    def train(fields, resume):
        return run_with(tmp_path / f"run-{fields['seed']}", f"seed={fields['seed']}")

    def made(run, file, setting, level, **sizes):
        asked.append(file.name)
        if "s0" in file.name and level > 0.5:
            raise make.NeverNear(f"{run}: no checkpoint has a success near {level:.0%}")
        file.touch()

    monkeypatch.setattr(credit.training, "train", train)
    monkeypatch.setattr(make, "make", made)
    monkeypatch.setattr(credit.card, "write", lambda folder: (folder / "DATA_CARD.md").touch())
    (tmp_path / "made").mkdir()
    with refused("made: lacks household-s0-80.npz, whose levels no checkpoint was near", RunError):
        credit.main(["snapshot", str(tmp_path / "made"), "--levels", "50,80", "--seeds", "0,1"])
    assert asked == [f"household-s{seed}-{level}.npz" for seed in (0, 1) for level in (50, 80)]
    assert (tmp_path / "made" / "DATA_CARD.md").is_file() and "80.npz is left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("begun", "fields", "stop_at"),
    [(False, [], 0.225), (True, [], 0.15), (True, ["cloning.stop_at=0.1"], 0.1), (False, ["cloning.stop_at=0.1"], 0.1)],
)
def test_a_run_that_has_begun_keeps_the_end_of_its_warm_start(begun, fields, stop_at, tmp_path, monkeypatch):
    run = tmp_path / "runs" / "household-s3"

    def train(fields, resume):
        assert fields["cloning"]["stop_at"] == pytest.approx(stop_at) and fields["run_dir"] == str(run)
        return run if begun else run_with(run)

    monkeypatch.setattr(credit.training, "train", train)
    monkeypatch.setattr(make, "make", lambda *_, **__: None)
    monkeypatch.setattr(credit.card, "write", lambda _: None)
    if begun:
        run_with(run, "cloning.stop_at=0.15", "seed=3")
    credit.main(["snapshot", str(tmp_path), "--levels", "30", "--seeds", "3", *fields])


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("reward=math:sqrt", "learned from reward.source"),
        ("rollout.group_size=1", "one policy for all roles, and rollout.group_size of 2 or more"),
        ("env.name=household_text", "needs an environment compiled with the policy"),
    ],
)
def test_runs_without_snapshots_are_refused_before_they_are_restored(field, said, tmp_path):
    with refused(said, ConfigError):
        make.make(run_with(tmp_path / "a", field), tmp_path / "a.npz", "a", 0.5, **SIZES)


def test_roles_with_policies_of_their_own_are_refused(tmp_path):
    run = run_with(tmp_path / "a", "env.name=household_team", "roles.carrier.policy=own")
    with refused("one policy for all roles", ConfigError):
        make.make(run, tmp_path / "a.npz", "a", 0.5, **SIZES)


def test_snapshots_keep_no_places():
    fields = ["method=/home/me/own.py:mine", "env.name=../x.py:E", 'env.options={data: /home/me/games/, n: [./a, "b"]}',
              "cache_dir=/home/me/cache", "policy=/home/me/policy", "run_dir=/home/me/run"]  # fmt: skip
    options = {"data": "games", "n": ["a", "b"]}
    expected = {"method": "own.py:mine", "env": {"name": "x.py:E", "options": options}, "policy": {}}
    assert make.learned_with(configuration.load(None, fields)) == expected


@pytest.mark.parametrize("method", ["himac", "hgpo", "dapo"])
def test_the_members_of_a_group_begin_with_keys_of_their_own(method):
    config = configuration.load(None, [f"method={method}", "env.name=household_plan", "rollout.prompt_groups=2"])
    runner = SimpleNamespace(roles=("planner", "executor"), select_tasks=lambda stream, seed, indices: indices)
    job = Job(config, None, {}, None, runner)
    used = []
    for iteration in (0, 1):
        numbers = make.batch_numbers(config, iteration, 2, 3)
        assert len(numbers) == 3
        for number in numbers:
            keys = jax.random.key_data(job.episode_inputs(number)[1])
            assert len(np.unique(keys.reshape(job.batch, -1, 2)[:, 0], axis=0)) == job.batch
        used += numbers
    assert len(set(used)) == 6


@pytest.mark.parametrize(("method", "most"), [("hgpo", 1073), ("dapo", 268)])
def test_task_numbers_stay_in_32_bits(method, most):
    config = configuration.load(None, [f"method={method}", f"rollout.prompt_groups={most}", "rollout.group_size=2"])
    *_, last = make.batch_numbers(config, 0, most, 4)
    runner = SimpleNamespace(roles=("player",), select_tasks=lambda stream, seed, indices: indices)
    tasks = Job(config, None, {}, None, runner).episode_inputs(last)[0]
    assert tasks.min() > 0 and tasks.max() - tasks.min() == most - 1
    with refused(f"--groups {most + 1}: the numbers of the tasks would leave 32 bits; give {most} or fewer", ConfigError):
        make.batch_numbers(config, 0, most + 1, 4)


SMALL = (
    "env.name=./rooms.py:Corridor", "warm_start=none", "iterations=1", "rollout.prompt_groups=2", "rollout.group_size=4",
    "policy.hidden_size=16", "policy.intermediate_size=16", "policy.num_hidden_layers=1", "evaluation.episodes=8",
    "learner.minibatch_size=32", "log.tensorboard=false",
)  # fmt: skip


@pytest.mark.slow
def test_from_training_to_scores(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make, "FARTHEST", 1)
    easy = COMPILED.replace("action[0] == 2]", "action[0] % 2 == 0]")  # which an untrained policy wins now and then
    (tmp_path / "rooms.py").write_text(easy)
    sizes = ("--levels", "0", "--groups", "2", "--batches", "2", "--continuations", "16", "--directions", "8")
    ask = ["snapshot", "made", "--setting", "a place/at home", *sizes, *SMALL, f"cache_dir={tmp_path}/cache"]
    credit.main(ask)
    file = tmp_path / "made" / "a-place-at-home-s0-0.npz"
    one, written = load(file), file.stat().st_mtime_ns
    assert one["gradients"].shape == (16, 4, 8) and len(one.about.gradient_seeds) == 2
    assert one["mask"].shape == (16, 4) and len(one.batches()) == 2 and sorted(set(one["groups"])) == [0, 1, 2, 3]
    assert one.about.setting == "a place/at home" and one.about.environment == "rooms.py:Corridor"
    assert "cache_dir" not in one.about.fields and one.about.fields["iterations"] == 1
    mask = one["mask"]
    for situation in np.unique(one["situations"][mask]):
        where = mask & (one["situations"] == situation)
        rows, turns = np.nonzero(where)
        assert len(set(one["groups"][rows] % 2)) == len(set(turns)) == 1
        for batch in set(one["batch"][rows]):
            assert len(set(one["states"][where & (one["batch"] == batch)[:, None]])) == 1
    credit.main(ask)
    assert "a-place-at-home-s0-0.npz: is there" in capsys.readouterr().out and file.stat().st_mtime_ns == written
    credit.main(["score", "made", "--method", "grpo", "--method", "hgpo history_length=0"])
    said = capsys.readouterr().out
    assert "| hgpo history_length=0 |" in said and "| grpo |" in said and (tmp_path / "made" / "DATA_CARD.md").is_file()
