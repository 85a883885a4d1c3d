"""The Python API: what the commands do, as functions that print nothing and do not exit."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import hgpo_jax
from hgpo_jax.export import export_checkpoint
from hgpo_jax.setup import devices
from tests.helpers.byte_policy import byte_policy
from tests.helpers.tiny import mesh_of
from tests.helpers.training import TINY

pd = pytest.importorskip("pandas")
FIELDS = dict(field.split("=") for field in TINY)


@pytest.fixture(scope="module", autouse=True)
def one_device():
    """Runs of test_train.py's programs, which are then compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "job_mesh", lambda config: mesh_of())
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run, and the rows that its callback was given."""
    folder, rows = tmp_path_factory.mktemp("api"), []
    config = hgpo_jax.load_config("household", **FIELDS | {"cache_dir": str(folder / "cache"), "iterations": 2})
    before = jax.sharding.get_mesh()
    run = hgpo_jax.fit(config, folder / "run", on_iteration=rows.append)
    assert jax.sharding.get_mesh() == before
    return run, rows


@pytest.mark.slow  # trains and evaluates once more
def test_the_front_pages_program_runs(trained, tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "README.md").read_text()
    program = re.findall(r"```python\n(import hgpo_jax\n.*?)```", text, re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hgpo_jax, "load_config", lambda *_, **__: trained[0].config.model_copy(update={"run_dir": ""}))
    exec(program, {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["0", "1"] and (tmp_path / "runs" / "first" / "policy").is_dir()
    assert any(line.startswith("task: ") for line in lines)


def test_a_configuration_takes_sections_and_dotted_names():
    config = hgpo_jax.load_config("household", seed=3, learner={"lr": 0.5}, policy="smollm2", **{"learner.warmup_steps": 2})
    assert (config.seed, config.learner.lr, config.learner.warmup_steps, config.policy.source) == (3, 0.5, 2, "smollm2")
    assert hgpo_jax.load_config(seed=3) == hgpo_jax.load_config("household", seed=3)
    for wrong, message in (
        ({"learner": {"lrr": 1}}, "learner.lrr=1: no such field; did you mean learner.lr?"),
        ({"learner.lr": -1}, "learner.lr=-1: must be"),
        ({"sed": 1}, "sed=1: no such field; did you mean seed?"),
    ):
        with pytest.raises(hgpo_jax.ConfigError, match=message.replace("?", r"\?")):
            hgpo_jax.load_config(**wrong)


def test_a_run_returns_what_the_command_writes(trained, capfd):
    run, rows = trained
    assert [row["iteration"] for row in rows] == [0, 1]
    assert rows == [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    metrics = run.metrics()
    assert list(metrics.index) == [0, 1] and metrics["success"][1] == rows[1]["success"]
    assert metrics["seconds.rollout"][0] == rows[0]["seconds"]["rollout"]
    assert run.config.iterations == 2 and run.config.method == "hgpo"
    assert hgpo_jax.load_run(run.folder) == run
    dump = run.episodes()
    assert dump.iteration == 1 and dump.transcript(0).startswith("task: ")
    np.testing.assert_array_equal(dump.estimate().advantages, dump.estimate("hgpo").advantages)
    assert capfd.readouterr() == ("", "")


def test_an_evaluation_repeats_the_runs_own(trained):
    run, _ = trained
    again = hgpo_jax.evaluate_policy(run)
    assert again["success"] == run.evaluation["success"] and again["turns"] == run.evaluation["turns"]
    fewer = hgpo_jax.evaluate_policy(run.folder / "policy", run.config, **{"evaluation.episodes": 4})
    assert fewer["episodes"] == 4
    with pytest.raises(hgpo_jax.ConfigError, match="give a configuration"):
        hgpo_jax.evaluate_policy(run.folder / "policy")


def test_the_policy_of_a_checkpoint_is_exported(trained, tmp_path):
    run, _ = trained
    export_checkpoint(run.folder, 2, tmp_path / "last")
    last, own = (hgpo_jax.load_policy(folder) for folder in (tmp_path / "last", run.folder / "policy"))
    jax.tree.map(np.testing.assert_array_equal, last.params, own.params)
    assert last.tokenizer.get_vocab() == own.tokenizer.get_vocab() and [file.name for file in tmp_path.iterdir()] == ["last"]
    with pytest.raises(hgpo_jax.ConfigError, match=r"keeps no checkpoint of iteration 7, but of .*2"):
        export_checkpoint(run.folder, 7, tmp_path / "other")
    with pytest.raises(hgpo_jax.ConfigError, match="no checkpoint has a validation success"):
        export_checkpoint(run.folder, None, tmp_path / "other")


@pytest.mark.slow  # trains once more
def test_a_second_training_in_the_process_and_a_longer_one(trained):
    run, _ = trained
    assert hgpo_jax.fit(run.config, resume=True) == run  # has ended: as it is
    with pytest.raises(hgpo_jax.ConfigError, match="already holds a run"):
        hgpo_jax.fit(run.config)
    # A field that is not given keeps the run's value, as of one that was begun when a default was another one.
    file = run.folder / "config.yaml"
    file.write_text(file.read_text().replace("invalid_penalty: 0.5", "invalid_penalty: 0.25"))
    more, longer = [], hgpo_jax.load_config("household", **FIELDS | {"cache_dir": run.config.cache_dir, "iterations": 3})
    assert hgpo_jax.fit(longer, run.folder, resume=True, on_iteration=more.append) == run
    assert [row["iteration"] for row in more] == [2] and len(run.metrics()) == 3
    assert run.config.advantage.invalid_penalty == 0.25
    assert run.policy().params.keys() == hgpo_jax.load_policy(run.folder / "policy").params.keys()


@pytest.mark.slow  # trains once more
def test_what_a_callback_raises_ends_the_training_after_saving(tmp_path):
    config = hgpo_jax.load_config("household", **FIELDS | {"cache_dir": tmp_path / "cache", "log.checkpoint_every": 100})
    rows = []

    def stop(row):
        rows.append(row["iteration"])
        row.clear()  # a callback's row is its own
        if len(rows) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as held:  # as a notebook does, this holds the traceback with everything in it
        hgpo_jax.fit(config, tmp_path / "run", on_iteration=stop)
    assert len(hgpo_jax.load_run(tmp_path / "run").metrics()) == 2
    run = hgpo_jax.fit(config, tmp_path / "run", resume=True, on_iteration=lambda row: rows.append(row["iteration"]))
    assert rows == [0, 1, 2, 3] and run.folder.is_absolute() and held


def test_mistakes_are_one_line(trained, tmp_path):
    run, _ = trained
    section = {"lr": 1e-3}
    hgpo_jax.load_config(learner=section, **{"learner.warmup_steps": 2})
    assert section == {"lr": 1e-3}
    for call, message in (
        (lambda: hgpo_jax.fit("household"), "config='household': must be a Config"),
        (lambda: hgpo_jax.load_config(seed=1, **{"seed.x": 2}), "seed=1: is a section"),
        (lambda: hgpo_jax.load_config(learner=3, **{"learner.lr": 2}), "learner=3: is a section"),
        (lambda: hgpo_jax.evaluate_policy(run.policy()), "policy: is a Policy; give a run, or the folder that it was saved in"),
        (lambda: hgpo_jax.evaluate_policy(run, policy="elsewhere"), "policy.source: the policy is that of"),
        (lambda: hgpo_jax.generate(byte_policy(), "Who?", temperature=-1), "temperature=-1: must be from 0 to 10"),
        (lambda: hgpo_jax.generate(byte_policy(), "Who?", max_tokens=0), "max_tokens=0: must be from 1 to"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    (tmp_path / "config.yaml").write_text((run.folder / "config.yaml").read_text())
    young = hgpo_jax.load_run(tmp_path)
    assert young.metrics().empty and young.evaluation is None
    (tmp_path / "evaluation.json").write_text('{"a":')
    with pytest.raises(hgpo_jax.ConfigError, match=r"evaluation\.json: not an evaluation: "):
        young.evaluation  # noqa: B018
    (tmp_path / "evaluation.json").unlink()
    with pytest.raises(hgpo_jax.ConfigError, match="the run has not ended"):
        young.policy()


def test_an_answer_is_text():
    policy = byte_policy()
    said = hgpo_jax.generate(policy, "Who?", max_tokens=8, temperature=0)
    assert said and said == hgpo_jax.generate(policy, "Who?", max_tokens=8, temperature=0, seed=1)
    assert said != hgpo_jax.generate(policy, "Who?", max_tokens=8, temperature=1, seed=1)


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import hgpo_jax, sys; assert 'fit' in dir(hgpo_jax); print(sorted({'jax', 'flax', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
