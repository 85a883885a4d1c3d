"""The main command in a tiny configuration: what it writes, that it continues exactly where it stopped."""

import contextlib
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from hgpo_jax import config as configuration
from hgpo_jax import train
from hgpo_jax.config import cli
from hgpo_jax.learner.batch import TrainingBatch
from hgpo_jax.learner.logprobs import token_logprobs
from hgpo_jax.policy import load_policy
from hgpo_jax.policy.tokenizer import ACT
from hgpo_jax.rollout.environments import household
from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.rollout.tasks import task_keys
from hgpo_jax.trainer import main
from tests.helpers import fork_server
from tests.helpers.plain_rollout import check_against_plain_play
from tests.helpers.tiny import mesh_of
from tests.helpers.training import TINY, command, rows_of

# Long enough a warm start for actions that do something, and longer episodes.
CLONED = (
    *TINY, "warm_start=cloning", "cloning.episodes=512", "cloning.max_steps=200", "cloning.stop_at=0.05", "env.max_turns=10",
    "policy.hidden_size=32", "policy.intermediate_size=64",
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def tiny_train(base):
    """`tiny_train(name, *arguments)` runs the command in a folder of that name and returns the folder."""

    def run(name, *arguments, start=("-m", "hgpo_jax.train"), code=0) -> Path:
        done = command(*start, f"run_dir={base / name}", f"cache_dir={base / 'cache'}", *arguments, cwd=base, code=code)
        (base / f"{name}.log").write_text(done.stdout)
        return base / name

    return run


SEEN = ("log.tensorboard=true",)


@pytest.fixture(scope="module")
def run(base):
    """A run in this process, on one of its devices."""
    folder, told = base / "run", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(told):
        patch.setattr(main, "job_meshes", lambda config: (mesh_of(), None))
        patch.setattr(sys, "argv", ["train", *TINY, *SEEN, f"run_dir={folder}", f"cache_dir={base / 'cache'}"])
        cli.run(train.main)
    folder.with_suffix(".log").write_text(told.getvalue())
    return folder


@pytest.fixture(scope="module")
def cloned(tiny_train):
    return tiny_train("cloned", *CLONED)


def weights(folder) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_the_run_folder_holds_what_is_promised(run):
    promised = {"config.yaml", "metrics.jsonl", "tensorboard", "curves.png", "checkpoints", "episodes", "start", "policy"}
    assert {path.name for path in run.iterdir()} == promised | {"evaluation.json", "transcripts.txt", "log.txt", ".lock"}
    assert configuration.load(str(run / "config.yaml")) == configuration.load(
        None, [*TINY, f"run_dir={run}", f"cache_dir={run.parent / 'cache'}", *SEEN]
    )
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["3", "4"]  # the two newest
    assert sorted(path.name for path in (run / "episodes").iterdir()) == ["iteration-00001.npz", "iteration-00003.npz"]
    assert list((run / "tensorboard").iterdir())
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "transcripts.txt").read_text().count("task: ") == 3
    assert "at most 4 turns each" in (run / "policy" / "README.md").read_text()


def test_the_log_holds_what_was_printed(run):
    printed = run.with_suffix(".log").read_text().splitlines()
    logged = [line.partition("  ")[2] for line in (run / "log.txt").read_text().splitlines()]
    assert logged == [line for line in printed if line] and logged[-1].endswith(f"everything is in {run}")


def test_metrics_have_one_row_per_iteration(run):
    rows = rows_of(run)
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3]
    shares = {"success", "invalid", "advantage_zero", "peers/level0", "peers/level1", "peers/level2"}
    others = {"return", "turns", "steps", "tokens", "advantage_abs", "entropy", "kl", "loss", "grad_norm", "lr"}
    for row in rows:
        assert shares | others | {"logp_difference", "seconds", "tokens_per_second"} <= set(row)
        assert all(0 <= row[name] <= 1 for name in shares)
        assert set(row["seconds"]) == {"rollout", "update"}
        assert row["logp_difference"] < 1e-4
        assert row["optimizer_steps"] == -(-row["steps"] // 8)
    assert rows[0]["seconds_to_first_iteration"] > sum(rows[0]["seconds"].values())
    assert not any("seconds_to_first_iteration" in row for row in rows[1:])
    assert rows[0]["kl"] < rows[3]["kl"]  # the policy moves away from its start


def logp_error(policies, e: Episodes) -> list[float]:
    """The largest difference of the episodes' log-probabilities to those of each of these policies."""
    happened = e.mask
    batch = TrainingBatch(
        prompts=e.prompts[happened], prompt_lengths=e.prompt_lengths[happened], responses=e.responses[happened],
        response_lengths=e.response_lengths[happened], old_logp=e.logp[happened], advantages=np.zeros(happened.sum()),
    )  # fmt: skip
    logprobs = jax.jit(lambda params: token_logprobs(nnx.merge(policies[0].graphdef, params), batch)[0])
    real = np.arange(e.responses.shape[2]) < batch.response_lengths[:, None]
    return [np.abs(np.where(real, logprobs(policy.params) - batch.old_logp, 0)).max() for policy in policies]


def check_dump(folder, iteration):
    """The dump of an iteration is play in the household of the configuration, on the tasks of that iteration."""
    config = configuration.load(str(folder / "config.yaml"))
    e = Episodes.load(folder / "episodes" / f"iteration-{iteration:05d}.npz")
    np.testing.assert_array_equal(e.groups, np.arange(8) // 4)
    env = household(config)
    tokenizer = load_policy(folder / "policy").tokenizer
    tasks = task_keys("train", config.seed, iteration * 2 + e.groups)
    end, act = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(ACT)
    check_against_plain_play(env, e, tasks, config.rollout.history_length, end, act)
    row = rows_of(folder)[iteration]
    assert row["success"] == pytest.approx(e.success.mean())
    assert row["turns"] == pytest.approx(e.mask.sum(1).mean())
    assert row["invalid"] == pytest.approx(e.invalid[e.mask].mean())
    return e


def test_saved_policies_load_and_the_dump_is_play_by_them(run):
    check_dump(run, 3)
    start, end = load_policy(run / "start"), load_policy(run / "policy")
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), start.params, end.params)
    assert min(jax.tree.leaves(moved)) > 0
    # The last episodes were played by the policy before the last update, which is nearer to the end than to the start.
    e = Episodes.load(run / "episodes" / "iteration-00003.npz")
    to_end, to_start = logp_error((end, start), e)
    assert to_end < to_start


def contents(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_says_so_and_is_left_alone(monkeypatch, capsys, tmp_path, run):
    """Its own 4 iterations are meant where none are given, not the 80 of the default."""
    before = contents(run)
    for given in (["--resume", run], ["--resume", "auto", f"run_dir={run}"], ["--resume", "auto", *TINY, f"run_dir={run}"]):
        monkeypatch.setattr(sys, "argv", ["train", f"cache_dir={tmp_path / 'cache'}", *map(str, given)])
        cli.run(train.main)  # exit code 0
        out, error = capsys.readouterr()
        assert out.startswith(f"{run}: all 4 iterations are done and evaluated; ") and out.count("\n") == 1
        assert error == ""
    assert contents(run) == before and not list(tmp_path.iterdir())


def assert_same_run(folder, wanted):
    """Equal to the bit in start, parameters, evaluation and metrics, apart from how long things took."""
    timeless = lambda rows: [{k: v for k, v in row.items() if "second" not in k} for row in rows]  # noqa: E731
    assert timeless(rows_of(folder)) == timeless(rows_of(wanted))
    assert weights(folder / "start") == weights(wanted / "start")
    assert weights(folder / "policy") == weights(wanted / "policy")
    assert (folder / "evaluation.json").read_text() == (wanted / "evaluation.json").read_text()


@pytest.mark.slow
def test_a_cloned_start_the_play_after_it_and_its_evaluation(cloned):
    e = check_dump(cloned, 3)
    assert 0 < e.invalid[e.mask].mean() < 0.9
    assert any(row["advantage_abs"] > 0 for row in rows_of(cloned))
    said = cloned.with_suffix(".log").read_text()
    assert re.search(r"^warm start 50/200  loss \d\.\d+  success \d+%$", said, re.MULTILINE)
    assert re.search(r"^iteration 4/4  success .*  left 0s$", said, re.MULTILINE)
    before = (cloned / "evaluation.json").read_text()
    result = json.loads(before)
    assert result["episodes"] == 12
    for mode in ("sampled", "greedy"):
        low, high = result["interval"][mode]
        assert 0 <= low <= result["success"][mode] <= high <= 1 and 0 < result["turns"][mode] <= 10
    for name in ("evaluation.json", "curves.png"):
        (cloned / name).unlink()
    assert "held-out sampled" in command("-m", "hgpo_jax.evaluate", cloned, cwd=cloned.parent).stdout
    assert (cloned / "evaluation.json").read_text() == before
    assert (cloned / "curves.png").is_file()  # it shows the evaluation


@pytest.mark.slow
def test_a_run_that_was_interrupted_in_its_evaluation_only_evaluates(tiny_train, cloned):
    folder = cloned.parent / "unevaluated"
    shutil.copytree(cloned, folder)
    for name in ("evaluation.json", "transcripts.txt"):
        (folder / name).unlink()
    before = (folder / "metrics.jsonl").read_text(), sorted(path.name for path in (folder / "checkpoints").iterdir())
    said = command("-m", "hgpo_jax.train", "--resume", folder, cwd=folder.parent).stdout
    assert f"resumed after iteration 4 in {folder}" in said and "\niteration " not in said
    assert_same_run(folder, cloned)
    assert before == ((folder / "metrics.jsonl").read_text(), sorted(path.name for path in (folder / "checkpoints").iterdir()))
    assert (folder / "transcripts.txt").read_text() == (cloned / "transcripts.txt").read_text()


FAILS_IN_THE_THIRD_ROLLOUT = """
from hgpo_jax.config import cli
from hgpo_jax import train
from hgpo_jax.trainer import loop as training
from hgpo_jax.utils.errors import RunError
sample = training.sample
def failing(job, params, iteration):
    if iteration == 2:
        raise RunError("the game server is down")
    return sample(job, params, iteration)
training.sample = failing
cli.run(train.main)
"""


@pytest.mark.slow
def test_a_run_that_fails_keeps_what_it_learned(tiny_train, cloned):
    folder = tiny_train("failed", *CLONED, "log.checkpoint_every=25", start=("-c", FAILS_IN_THE_THIRD_ROLLOUT), code=1)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["2"]
    said = (folder.parent / "failed.log").read_text()
    assert f"2 of 4 iterations are saved; continue with --resume {folder}" in said
    assert_same_run(tiny_train("failed", "--resume", folder), cloned)


@pytest.mark.slow
def test_adapters_beside_given_weights(tiny_train, cloned):
    """What is saved plays the same without them: float32 weights plus a small change, which bfloat16 would round away."""
    fields = (field for field in CLONED if not field.startswith("policy."))  # `policy=` has sizes of its own
    lora = (*fields, f"policy={cloned / 'policy'}", "warm_start=none", "lora.rank=2", "iterations=1", "learner.lr=1e-4")
    folder = tiny_train("lora", *lora, "policy.compute_dtype=bfloat16")
    assert weights(folder / "start") == weights(cloned / "policy") != weights(folder / "policy")
    assert {"adapter_model.safetensors", "README.md"} <= {path.name for path in (folder / "adapter").iterdir()}
    before, after = (load_file(folder / name / "model.safetensors") for name in ("start", "policy"))
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    for name in filter(lambda name: "lora_A" in name, adapter):
        kernel = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        change = adapter[name.replace("lora_A", "lora_B")] @ adapter[name] * (settings["lora_alpha"] / settings["r"])
        old, new = before[f"{kernel}.weight"], after[f"{kernel}.weight"]
        assert old.dtype == new.dtype == np.float32 and 0 < np.abs(change).max() < 2**-9 * np.abs(old).max()
        np.testing.assert_allclose(new - old, change, atol=1e-7)


@pytest.mark.slow
@pytest.mark.optimized
def test_the_default_run_teaches_the_agent(tmp_path):
    """As the README promises: from nothing to an agent that solves nine of ten held-out tasks.

    HGPO_MAIN_RUN is the folder of such a run that has ended, as .ci/run has one of the README's first command.
    """
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    run = Path(os.environ.get("HGPO_MAIN_RUN", tmp_path / "run"))
    if "HGPO_MAIN_RUN" not in os.environ:
        folders = [f"run_dir={run}", f"cache_dir={tmp_path / 'cache'}"]
        done = fork_server.run(["-m", "hgpo_jax.train", *folders, "seed=5"], tmp_path, environment, timeout=1500)
        assert done.returncode == 0, done.stderr
    result = json.loads((run / "evaluation.json").read_text())
    assert result["episodes"] == 512
    assert result["success"]["sampled"] >= 0.9
    rows = rows_of(run)
    assert rows[0]["success"] < 0.8  # the warm start alone does not do it
    # The sampler's log-probabilities are the trainer's, on every token of every iteration.
    assert max(row["logp_difference"] for row in rows) < 1e-4
