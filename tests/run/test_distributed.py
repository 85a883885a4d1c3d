"""Two real processes run the main command as one program, and learn what one process with as many devices learns."""

import signal
import time

import pytest
from safetensors.numpy import load_file

from hgpo_jax.errors import ConfigError, RunError
from hgpo_jax.run import distributed
from tests.helpers.processes import alone, metrics, together

FIELDS = (
    "iterations=2", "env.max_turns=10", "env.things=2", "policy.hidden_size=32", "policy.intermediate_size=64",
    "policy.num_hidden_layers=1", "rollout.prompt_groups=2", "rollout.group_size=4", "learner.minibatch_size=8",
    "learner.final_lr=1", "log.checkpoint_every=1", "log.dump_every=1", "evaluation.episodes=12", "cloning.episodes=512",
    "cloning.max_steps=200", "cloning.stop_at=0.05",
)  # fmt: skip
@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A run by two processes, then, with a cache of its own, by one."""
    base = tmp_path_factory.mktemp("distributed")
    out, _ = together(base, *FIELDS, "run_dir=two", "cache_dir=cache")
    alone(base, *FIELDS, "run_dir=one", "cache_dir=other")
    return base, out


def assert_same_run(folder, wanted):
    assert len(metrics(folder)) == len(metrics(wanted))
    for row, expected in zip(metrics(folder), metrics(wanted), strict=True):
        assert row == pytest.approx(expected, abs=1e-5)
    assert (folder / "evaluation.json").read_text() == (wanted / "evaluation.json").read_text()
    for name in ("start", "policy"):
        weights, others = (load_file(run / name / "model.safetensors") for run in (folder, wanted))
        assert weights.keys() == others.keys()
        for tensor, value in weights.items():
            assert value == pytest.approx(others[tensor], abs=1e-5), tensor


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(folders):
    base, _ = folders
    assert any(row["advantage_abs"] > 0 for row in metrics(base / "two"))  # something was learned
    assert_same_run(base / "two", base / "one")


@pytest.mark.slow
def test_everything_is_written_once_and_said_once(folders):
    base, (first, second) = folders
    listing = lambda run: sorted(p.relative_to(run) for p in run.rglob("*") if "checkpoints" not in p.parts)  # noqa: E731
    without = lambda paths: [p for p in paths if p.parts[0] != "tensorboard"]  # noqa: E731
    assert without(listing(base / "two")) == without(listing(base / "one"))
    assert len(list((base / "two" / "tensorboard").iterdir())) == 1
    assert sorted(p.name for p in (base / "two" / "checkpoints").iterdir()) == ["1", "2"]
    assert len(list((base / "cache" / "warm_start").iterdir())) == 1
    assert "everything is in two" in first
    assert second == ""


@pytest.mark.slow
def test_two_processes_go_on_where_they_stopped(folders):
    base, _ = folders
    for iterations in ("iterations=1", "iterations=2"):
        out, _ = together(base, *FIELDS, "run_dir=halves", "cache_dir=cache", "--resume", "auto", iterations)
    assert "resumed after iteration 1" in out[0]
    assert_same_run(base / "halves", base / "two")


@pytest.mark.slow
def test_a_sigterm_to_one_process_saves_and_ends_both(folders):
    base, _ = folders
    fields = (*FIELDS, "run_dir=stopped", "cache_dir=cache", "log.checkpoint_every=1000")
    rows = base / "stopped" / "metrics.jsonl"

    def stop(running):
        while not (rows.exists() and rows.read_text()):
            assert all(process.poll() is None for process in running)
            time.sleep(0.05)
        running[1].send_signal(signal.SIGTERM)

    out, _ = together(base, *fields, "iterations=100000", code=143, meanwhile=stop)
    done = len(metrics(base / "stopped"))
    assert f"stopped by SIGTERM: {done} of 100000 iterations are saved" in out[0]
    assert [path.name for path in (base / "stopped" / "checkpoints").iterdir()] == [str(done)]


@pytest.mark.slow
def test_a_mistake_ends_both_processes(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    for arguments, fragment in ((["run_dir=mine"], "run_dir=mine"), (["run_dir=new", "--mesh", "data=3"], "data=3")):
        out, errors = together(tmp_path, *FIELDS, *arguments, code=2)
        assert out == ["", ""]
        for error in errors:
            assert fragment in error
            assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


GOOD = dict(zip(distributed.VARIABLES, ("10.0.0.1:1234", "2", "1"), strict=True))
MISTAKES = {
    "no port": ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, "JAX_COORDINATOR_ADDRESS=10.0.0.1"),
    "no address": ({"JAX_COORDINATOR_ADDRESS": ""}, "JAX_COORDINATOR_ADDRESS="),
    "no count": ({"JAX_NUM_PROCESSES": ""}, "JAX_NUM_PROCESSES="),
    "odd count": ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES=two"),
    "beyond the count": ({"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2"),
}


@pytest.mark.parametrize(("changed", "fragment"), MISTAKES.values(), ids=MISTAKES)
def test_variables_that_do_not_fit_are_named(changed, fragment):
    with pytest.raises(ConfigError) as caught:
        distributed.join(GOOD | changed)
    assert str(caught.value).startswith(fragment)
    assert "\n" not in str(caught.value)


def test_no_word_of_other_processes_is_a_mistake():
    with pytest.raises(ConfigError, match="--distributed"):
        distributed.join({})


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


def test_both_processes_get_what_the_first_one_found(monkeypatch):
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


def test_one_process_looks_for_itself():
    assert distributed.broadcast_from_process_0(lambda: [1, "a"]) == [1, "a"]
