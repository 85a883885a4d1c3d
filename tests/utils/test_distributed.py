"""Two real processes run the main command as one program, and learn what one process with as many devices learns."""

import json

import pytest
from safetensors.numpy import load_file

from hgpo_jax.rollout.episodes import Episodes
from hgpo_jax.utils import distributed
from hgpo_jax.utils.errors import ConfigError, RunError
from tests.helpers.chat_tokenizers import byte_tokenizer
from tests.helpers.processes import metrics, together
from tests.helpers.training import command

FIELDS = (
    "iterations=4", "env.max_turns=10", "policy.hidden_size=32", "policy.intermediate_size=64",
    "policy.num_hidden_layers=1", "rollout.prompt_groups=2", "rollout.group_size=4", "learner.minibatch_size=8",
    "learner.final_lr=1", "log.dump_every=1", "log.checkpoint_every=1000", "evaluation.episodes=12", "cloning.episodes=512",
    "cloning.max_steps=200", "cloning.stop_at=0.05", "rollout.overlap=1",
)  # fmt: skip
STOPS = """
import jax, os, signal
from hgpo_jax.config import cli
from hgpo_jax import train
from hgpo_jax.trainer import loop as training
sample = training.sample
def stopping(job, params, iteration):
    if iteration == 1 and jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return sample(job, params, iteration)
training.sample = stopping
cli.run(train.main)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A run by two processes, of which one gets a SIGTERM, and that goes on; then, with a cache of its own, one by one."""
    base = tmp_path_factory.mktemp("distributed")
    fields = (*FIELDS, "run_dir=two", "cache_dir=cache", "--resume", "auto")
    stopped = [*together(base, *fields, program=("-c", STOPS), code=143), len(metrics(base / "two"))]
    checkpoints = [path.name for path in (base / "two" / "checkpoints").iterdir()]
    whole = together(base, *fields)
    command("-m", "hgpo_jax.train", *FIELDS, "run_dir=one", "cache_dir=other", cwd=base)
    return base, (*stopped, checkpoints), whole


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(folders):
    ours, theirs = (folders[0] / name for name in ("two", "one"))
    assert any(row["advantage_abs"] > 0 for row in metrics(ours))  # something was learned
    for row, expected in zip(metrics(ours), metrics(theirs), strict=True):
        assert row == pytest.approx(expected, abs=1e-5)
    assert (ours / "evaluation.json").read_text() == (theirs / "evaluation.json").read_text()
    for name in ("start", "policy"):
        weights, others = (load_file(run / name / "model.safetensors") for run in (ours, theirs))
        assert weights.keys() == others.keys()
        for tensor, value in weights.items():
            assert value == pytest.approx(others[tensor], abs=1e-5), tensor


@pytest.mark.slow
def test_a_sigterm_to_one_process_saves_and_ends_both_and_they_go_on(folders):
    _, (out, _, done, checkpoints), (resumed, _) = folders
    assert 0 < done < 4
    assert f"stopped by SIGTERM: {done} of 4 iterations are saved" in out[0]
    assert checkpoints == [str(done)]
    assert f"resumed after iteration {done}" in resumed[0]


APART = """
import os, sys
from pathlib import Path
from hgpo_jax.config import cli
from hgpo_jax.utils import distributed
def main():
    distributed.join()
    distributed.WAIT = 1
    distributed.check_shared(Path("common"), "cache_dir")
    print("seen")
    distributed.check_shared(Path("own", os.environ["JAX_PROCESS_ID"]), "run_dir")
cli.run(main)
"""


@pytest.mark.slow
def test_a_folder_that_not_all_processes_see_ends_all_of_them(tmp_path):
    said, errors = together(tmp_path, program=("-c", APART), code=2)
    assert said == ["seen\n"] * 2
    for i, error in enumerate(errors):
        told = f"run_dir=own/{i}: process 1 does not see what process 0 writes there; give a folder on a file system that all"
        assert told in error
    assert not any([*(tmp_path / folder).iterdir()] for folder in ("common", "own/0"))  # process 0 removes its file


@pytest.mark.slow
def test_everything_is_written_once_and_said_once(folders):
    base, (out, *_), (resumed, _) = folders
    listing = lambda run: sorted(p.relative_to(run) for p in run.rglob("*") if "checkpoints" not in p.parts)  # noqa: E731
    without = lambda paths: [p for p in paths if p.parts[0] != "tensorboard"]  # noqa: E731
    assert without(listing(base / "two")) == without(listing(base / "one"))
    assert len(list((base / "two" / "tensorboard").iterdir())) == 2  # one for each time
    assert len(list((base / "cache" / "warm_start").iterdir())) == 1
    assert "everything is in two" in resumed[0]
    assert out[0].count("learned worse without learner.rollout_correction=token") == 1
    assert out[1] == resumed[1] == ""


TEXTS = (
    "--config", "alfworld_tiny", "env.name=household_text", "env.split=train", "env.max_turns=3",
    "rollout.prompt_limit=512", "rollout.response_limit=4", "learner.minibatch_size=4", "learner.microbatch_size=2",
    "evaluation.episodes=4",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "both, two",
    [
        ((), ("env.workers=2", "rollout.ready_fraction=0.5")),
        (("rollout.keep=2", "rollout.overlap=1", "env.budgets=1,3", "rollout.decode_batch_size=1"), ("env.workers=2",)),
    ],
)
def test_two_processes_learn_from_the_texts_of_the_first(tmp_path, both, two):
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    fields = (*TEXTS, f"policy.tokenizer={tmp_path / 'tokenizer'}", *both)
    together(tmp_path, *fields, *two, "run_dir=two", "cache_dir=cache")
    command("-m", "hgpo_jax.train", *fields, "run_dir=one", "cache_dir=cache", cwd=tmp_path)
    assert len(metrics(tmp_path / "two")) == 2
    for row, expected in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        for name in ("decode_steps", "slot_use"):  # which depend on who is ready when, with rollout.ready_fraction
            assert (name in row) == (name in expected)  # with rollout.keep an iteration may have to play nothing
            row.pop(name, None)
            expected.pop(name, None)
        assert row == pytest.approx(expected, abs=1e-5)
    ours, wanted = (Episodes.load(tmp_path / name / "episodes" / "iteration-00001.npz") for name in ("two", "one"))
    assert (ours.responses == wanted.responses).all()
    assert (ours.prompts == wanted.prompts).all()
    names = ("goals", "scores")
    ours, wanted = (json.loads((tmp_path / name / "episodes" / "iteration-00001.json").read_text()) for name in ("two", "one"))
    assert [ours[name] for name in names] == [wanted[name] for name in names]


GOOD = dict(zip(distributed.VARIABLES, ("10.0.0.1:1234", "2", "1"), strict=True))
MISTAKES = [  # in the variables, and what is said of it
    ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, "JAX_COORDINATOR_ADDRESS=10.0.0.1: expected host:port"),
    ({"JAX_COORDINATOR_ADDRESS": ""}, "JAX_COORDINATOR_ADDRESS=: expected host:port"),
    ({"JAX_NUM_PROCESSES": ""}, "JAX_NUM_PROCESSES=: expected a whole number"),
    ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES=two: expected a whole number"),
    ({"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2: processes are numbered 0 to JAX_NUM_PROCESSES - 1 = 1$"),
    (dict.fromkeys(distributed.VARIABLES, ""), "--distributed: "),  # no word of other processes
]


@pytest.mark.parametrize(("changed", "message"), MISTAKES)
def test_variables_that_do_not_fit_are_named(changed, message):
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        distributed.join(GOOD | changed)
    assert "\n" not in str(caught.value)


def broadcast_in_two(monkeypatch, call) -> list:
    """What each of two processes gets or raises, one after the other: what the first one says is heard by the second."""
    said, found = [], []
    monkeypatch.setattr(distributed.jax, "process_count", lambda: 2)
    for index, talk in enumerate((lambda value: said.append(value) or value, lambda value: said.pop(0))):
        monkeypatch.setattr(distributed.jax, "process_index", lambda index=index: index)
        monkeypatch.setattr(distributed.multihost_utils, "broadcast_one_to_all", talk)
        try:
            found.append(distributed.broadcast_from_process_0(call))
        except Exception as error:
            found.append(error)
    assert not said
    return found


def test_every_process_gets_what_the_first_one_found(monkeypatch):
    assert distributed.broadcast_from_process_0(lambda: [1, "a"]) == [1, "a"]
    assert broadcast_in_two(monkeypatch, lambda: [1, "a"]) == [[1, "a"], [1, "a"]]


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("seed=x: give a number"), RunError("env.workers: gone"), ValueError("no such thing"),
        PermissionError(13, "Permission denied", "/some/run"),
    ],
)  # fmt: skip
def test_no_process_waits_for_one_that_failed(error, monkeypatch):
    def fail():
        raise error

    for raised in broadcast_in_two(monkeypatch, fail):
        assert type(raised) is type(error) and str(raised) == str(error)


def test_an_error_of_the_program_is_named_in_the_others(monkeypatch):
    first, second = broadcast_in_two(monkeypatch, lambda: {}["x"])
    assert isinstance(first, KeyError)
    assert isinstance(second, RunError) and str(second) == "process 0 has failed: KeyError: 'x'"
