"""Whose folder it is: what may change where a run is resumed, the lock, and what a run leaves that died at once."""

import contextlib
import errno
import functools
import json
import os
import shutil
import types
from pathlib import Path

import filelock
import jax.numpy as jnp
import pytest
import yaml

from hgpo_jax import config as configuration
from hgpo_jax.analysis import read_config
from hgpo_jax.config import cli
from hgpo_jax.config.policies import SHARED
from hgpo_jax.policy import ModelConfig, Policy
from hgpo_jax.policy.tokenizer import word_tokenizer
from hgpo_jax.setup.job import Job, PolicySetup
from hgpo_jax.trainer import loop, main, run_folder
from hgpo_jax.trainer.behavior_cloning import warm_start
from hgpo_jax.trainer.resume import (
    FREE_TO_CHANGE,
    change_length,
    check_unchanged,
    drop_later,
    has_ended,
    resume_point,
)
from hgpo_jax.trainer.run_folder import LOCK, find_run, take_folder
from hgpo_jax.utils.errors import ConfigError, RunError
from hgpo_jax.utils.heartbeat import COMPILING
from tests.helpers.refusals import refused

HF = Path(__file__).parents[1] / "policy" / "data" / "qwen2_tiny"


def begun(folder, *overrides):
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(configuration.dump(configuration.load(None, overrides)))
    return folder


def sought(resume, *overrides, allowed=(), config=None):
    return find_run(configuration.read_fields(config, overrides), str(resume), allowed)


OWN = ("method=gigpo", "seed=1", "evaluation.every=2", "log.keep_best=1", "policy=weights", "warm_start=none", "iterations=40")


def test_a_run_goes_on_as_its_own_configuration_says(tmp_path):
    folder = begun(tmp_path / "run", *OWN)
    own = configuration.load(None, OWN)
    for found in (sought(folder), sought("auto", f"run_dir={folder}"), sought(folder, *OWN, config="household")):
        assert found.folder == folder and found.resuming and not found.ended
        assert found.config.model_copy(update={"run_dir": ""}) == own
    # Given fields come on top, also where they make sense only beside the run's own, and a section keeps its other fields.
    changed = sought(folder, "log.keep_best=2", "mesh=data=1").config
    assert (changed.log.keep_best, changed.evaluation.every, changed.mesh) == (2, 2, "data=1")
    assert sought(folder, "policy=others", allowed=("policy.source",)).config.policy.source == "others"


def test_what_is_given_is_compared_with_what_the_run_began_with(tmp_path):
    folder = begun(tmp_path / "run", *OWN)
    for resume, more in ((folder, ()), ("auto", (f"run_dir={folder}",))):
        with pytest.raises(ConfigError, match=r"^seed=0 \(the run began with seed=1\): give"):
            sought(resume, *more, "seed=0")
        assert sought(resume, *more, "seed=0", allowed=("seed",)).config.seed == 0
    with pytest.raises(ConfigError, match=r"name=sokoban_tiny \(the run began with name=household\), .*env\.name=sokoban \("):
        sought(folder, config="sokoban_tiny")
    with pytest.raises(ConfigError, match=r"run_dir=.*/other: a resumed run stays in .*/run; leave run_dir out"):
        sought(folder, f"run_dir={tmp_path / 'other'}")


def test_auto_without_a_folder_finds_the_newest_unfinished_run_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    stem = "runs/household-gigpo-s1"
    older, newer = (begun(Path(f"{stem}-2026010{day}-000000"), *OWN, "learner.lr=0.5") for day in (1, 2))
    found = sought("auto", "method=gigpo", "seed=1", "log.dump_every=7")
    assert found.folder == newer
    assert (found.config.learner.lr, found.config.log.dump_every, found.config.log.keep_best) == (0.5, 7, 1)
    ended(newer, 40)
    assert sought("auto", "method=gigpo", "seed=1").folder == older
    for other in ("seed=2", "method=hgpo"):
        found = sought("auto", *OWN, other)
        assert not found.resuming and not found.folder.exists()
        assert found.config == configuration.load(None, [*OWN, other])


def ended(folder, iterations, checkpoint=True):
    """What a run of so many iterations leaves, as far as it is looked at."""
    rows(folder, iterations)
    for name in ("policy", "adapter", "evaluations"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(f"{name} of {iterations}")
    for name in ("evaluation.json", "transcripts.txt"):
        (folder / name).write_text(f"{name} of {iterations}")
    if checkpoint:
        (folder / "checkpoints" / str(iterations)).mkdir(parents=True)
    return folder


def test_a_run_has_ended_when_its_last_iteration_is_evaluated(tmp_path):
    folder = ended(begun(tmp_path / "run", *OWN), 40)
    assert sought(folder).ended and sought("auto", *OWN, f"run_dir={folder}").ended
    assert not sought(folder, "iterations=80").ended
    with pytest.raises(ConfigError, match=r"^iterations=39: the run in .*/run has done 40; give 40 or more"):
        sought(folder, "iterations=39")
    rows(folder, 39)  # an evaluation of something else
    assert not sought(folder).ended
    for name in ("evaluation.json", "transcripts.txt"):
        again = ended(begun(tmp_path / name, *OWN), 40)
        (again / name).unlink()
        assert not sought(again).ended


def test_what_a_run_left_that_was_killed_in_its_evaluation_is_kept_too(tmp_path):
    """Else the policy of iteration 40 would pass for that of a longer run until its end."""
    folder = ended(begun(tmp_path / "run", *OWN), 40)
    for name in ("evaluation.json", "transcripts.txt"):
        (folder / name).unlink()
    (_, kept) = change_length(sought(folder, "iterations=80").config, folder, 40)
    assert kept == "what the run ended with after 40 iterations is kept: policy-40, adapter-40, evaluations-40"
    assert not (folder / "policy").exists()


def test_a_longer_run_says_its_learning_rates_and_keeps_what_it_had_ended_with(tmp_path):
    folder = ended(begun(tmp_path / "run", *OWN, "learner.lr=0.4", "learner.final_lr=0.025"), 40)
    longer = sought(folder, "iterations=80").config
    rates, kept = change_length(longer, folder, 40)
    assert rates == (
        "80 iterations instead of 40: learning rate 0.01 in iteration 40, 0.203 in iteration 41, 0.01 in iteration 80; "
        "the optimizer's warm-up is not repeated"
    )
    assert kept == (
        "what the run ended with after 40 iterations is kept: "
        "policy-40, adapter-40, evaluations-40, evaluation-40.json, transcripts-40.txt"
    )
    assert (folder / "evaluation-40.json").read_text() == "evaluation.json of 40"
    assert (folder / "policy-40" / "config.json").read_text() == "policy of 40"
    assert not any((folder / name).exists() for name in ("policy", "adapter", "evaluations", "evaluation.json"))
    # The process died before it wrote the new configuration, and the old run was brought to its end again.
    ended(folder, 40, checkpoint=False)
    assert change_length(longer, folder, 40) == [rates, kept]
    (folder / "config.yaml").write_text(configuration.dump(longer))
    assert change_length(longer, folder, 40) == [] and not has_ended(folder, 80)


def test_a_shorter_run_than_was_planned(tmp_path):
    folder = begun(tmp_path / "run", *OWN, "iterations=80")
    rows(folder, 57)
    (folder / "checkpoints" / "50").mkdir(parents=True)
    assert change_length(sought(folder, "iterations=50").config, folder, 50) == []  # no iteration is to come
    [rates] = change_length(sought(folder, "iterations=51").config, folder, 50)
    assert "in iteration 50, 0.0002 in iteration 51; the" in rates
    with pytest.raises(ConfigError, match=r"iterations=49: the run in .* has done 50"):
        sought(folder, "iterations=49")


@pytest.mark.parametrize(("content", "message"), [
    ("", "is damaged: expected the fields of a run"), ("- 1", "is damaged: expected the fields of a run"),
    ("a: [", "is damaged: "), ("\x00\x01", "is damaged: "), ("a: 2024-99-99", "is damaged: "),
    ("log: 3", "is damaged: log=3 is not a section"), ("learner: {lr: many}", "learner.lr='many': must be"),
    ("learner: {speed: 1}", "learner.speed=1: no such field"),
])  # fmt: skip
def test_what_is_wrong_in_a_run_s_own_configuration_is_named(tmp_path, content, message):
    folder = begun(tmp_path / "run")
    (folder / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match=f"^{folder}/config.yaml: {message}.*; repair it by hand") as caught:
        sought(folder)
    assert "\n" not in str(caught.value)


def test_all_fields_that_differ_are_named_and_allowed_by_name(tmp_path):
    folder = begun(tmp_path / "run", "seed=3", "learner.lr=0.5")
    check_unchanged(configuration.load(None, ["seed=3", "learner.lr=0.5"]), folder)
    other = configuration.load(None, ["env.places=7", "learner.lr=0.25"])
    with pytest.raises(ConfigError) as caught:
        check_unchanged(other, folder)
    assert str(caught.value) == (
        "seed=0 (the run began with seed=3), env.places=7 (the run began with env.places=6), learner.lr=0.25 (the run began "
        f"with learner.lr=0.5): give what the run in {folder} began with, another run_dir, or --allow-change seed "
        "--allow-change env.places --allow-change learner.lr"
    )
    with pytest.raises(ConfigError, match=r"^env\.places=7 \(the run began with env\.places=6\): give"):
        check_unchanged(other, folder, ("learner.lr", "seed"))
    check_unchanged(other, folder, ("learner.lr", "seed", "env.places"))
    other = configuration.load(None, ["seed=3", "learner.lr=0.5", "rollout.overlap=1"])
    with pytest.raises(ConfigError, match=r"^rollout\.overlap=1 \(the run began with [^:]*: give .* or another run_dir$"):
        check_unchanged(other, folder, ("rollout.overlap",))
    with pytest.raises(ConfigError, match=r"learner\.lrr: no such field"):
        check_unchanged(other, folder, ("learner.lrr",))


def test_where_unfinished_episodes_are_played_again_may_change_but_not_what(tmp_path):
    text = ("env.name=household_text", "rollout.keep=2")
    folder = begun(tmp_path / "run", *text)
    changed = ("env.time_limit=7", "rollout.ready_fraction=0.5", "env.workers=2", "env.strict=true")
    other = configuration.load(None, [*text, *changed])
    allowed = ("env.time_limit", "rollout.ready_fraction", "env.strict")
    with pytest.raises(ConfigError, match=r"^env\.strict=True \(the run began with env\.strict=False\): give .* run_dir$"):
        check_unchanged(other, folder, allowed)


def test_what_a_role_has_of_its_own_is_compared_field_by_field(tmp_path):
    team = lambda *fields: configuration.load(None, ["env.name=household_team", *fields])  # noqa: E731
    folder, began = tmp_path / "run", team("roles.searcher.policy=own", "roles.searcher.lr=1e-3")
    folder.mkdir()
    (folder / "config.yaml").write_text(configuration.dump(began))
    check_unchanged(began, folder)
    now = team("roles.searcher.policy=own", "roles.searcher.lr=0.01", "roles.carrier.lora_rank=2")
    message = r"^roles\.searcher\.lr=0\.01 \(the run began with roles\.searcher\.lr=0\.001\), roles\.carrier\.lora_rank=2 \(the"
    with pytest.raises(ConfigError, match=message):
        check_unchanged(now, folder)
    check_unchanged(now, folder, ("roles.searcher.lr", "roles.carrier.lora_rank"))
    check_unchanged(began, folder, ("roles.searcher.lr",))  # as a command that is given again, once it is what the run has
    with pytest.raises(ConfigError, match=r"roles\.searcher\.speed: no such field"):
        check_unchanged(began, folder, ("roles.searcher.speed",))


# Written down again: a field that slips into the product's list would let a resumed run learn something else, unsaid.
CHANGE_NOTHING = {"run_dir", "cache_dir", "mesh", "iterations", "env.workers", "env.preload", "rollout.store", "rollout.mesh"}
CHANGE_NOTHING |= {"learner.remat", "learner.offload", "reward.workers", "rollout.prompt_widths"}


def test_every_field_is_compared_but_for_those_that_change_nothing_that_is_learned(tmp_path):
    """Each field is changed in the stored configuration; nothing slips through."""
    folder, config, free = begun(tmp_path / "run"), configuration.load(), set()
    for name in configuration.fields():
        *sections, leaf = name.split(".")
        tree = {leaf: "something else"}
        for section in reversed(sections):
            tree = {section: tree}
        (folder / "config.yaml").write_text(json.dumps(tree))  # all others have their defaults
        if name.startswith(FREE_TO_CHANGE):
            free.add(name)
            check_unchanged(config, folder)
        else:
            with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
                check_unchanged(config, folder)
    rest = {name for name in free if not name.startswith(("log.", "evaluation."))} - CHANGE_NOTHING
    # How many rows are computed at a time, under whatever name.
    assert {name.partition(".")[0] for name in rest} == {"rollout", "learner"} and len(rest) == 2, rest
    folder = begun(tmp_path / "hapo", "method=hapo")
    check_unchanged(configuration.load(None, ["method=hapo", "env.workers=2"]), folder)
    for field in ("mesh=data=2", "learner.microbatch_size=8"):  # its loss compares the rows of a micro-batch
        with pytest.raises(ConfigError, match=field):
            check_unchanged(configuration.load(None, ["method=hapo", field]), folder)


def test_a_field_that_is_newer_than_the_run_had_its_default(tmp_path):
    folder = begun(tmp_path / "run")
    (folder / "config.yaml").write_text("learner: {lr: 0.5}")
    check_unchanged(configuration.load(None, ["learner.lr=0.5"]), folder)
    with pytest.raises(ConfigError, match=r"^critic\.lr=0\.5 \(the run began with critic\.lr=0\.005\)"):
        check_unchanged(configuration.load(None, ["learner.lr=0.5", "critic.lr=0.5"]), folder)


def of_an_older_release(folder, **changed):
    """The folder of a run whose configuration has all removed fields, at their values or changed ones."""
    begun(folder, "env.name=household_team", "learner.lr=0.5", "roles.searcher.policy=own")
    recorded = configuration.read_yaml((folder / "config.yaml").read_text())
    recorded["learner"]["rollout_correction"] = None  # as it was called where nothing was corrected
    for name, value in configuration.REMOVED.items():
        *sections, field = name.replace("NAME", "searcher").split(".")
        functools.reduce(dict.__getitem__, sections, recorded)[field] = changed.get(name, value)
    (folder / "config.yaml").write_text(yaml.safe_dump(recorded))
    return folder


def test_removed_fields_of_an_older_run_are_left_out_where_they_hold_what_holds_now(tmp_path):
    folder = of_an_older_release(tmp_path / "run")
    own = configuration.load(None, ["env.name=household_team", "learner.lr=0.5", "roles.searcher.policy=own"])
    assert sought(folder).config == read_config(folder) == own
    check_unchanged(own, folder)


@pytest.mark.parametrize(
    ("name", "value"), [("learner.beta1", 0.8), ("policy.sample_dtype", "int8"), ("roles.NAME.template", "x")]
)
def test_an_older_run_with_another_value_of_a_removed_field_is_refused(tmp_path, name, value):
    folder = of_an_older_release(tmp_path / "run", **{name: value})
    field = name.replace("NAME", "searcher")
    message = rf"^{folder}/config.yaml: {field}={value!r}: is [^\n]+; hgpo_jax 0\.2\.0 reads and continues this run$"
    for read in (sought, read_config):
        with pytest.raises(ConfigError, match=message):
            read(folder)


def test_a_run_that_died_before_it_wrote_its_configuration_begins_again(tmp_path):
    folder = tmp_path / "run"
    new = (configuration.load(None, [f"run_dir={folder}"]), folder, False, False)
    assert sought("never", f"run_dir={folder}") == new
    folder.mkdir()
    (folder / ".lock").touch()
    (folder / "config.yaml.partial").write_text("name: hou")
    (folder / "provenance.json").write_text("{}")
    assert sought("never", f"run_dir={folder}") == new
    assert sought("auto", f"run_dir={folder}") == new
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty and not a run"):
        sought("auto", f"run_dir={folder}")


def rows(folder, count):
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"iteration": i}) + "\n" for i in range(count)))


def test_a_run_without_a_good_checkpoint_never_begins_again_silently(tmp_path):
    folder = begun(tmp_path / "run", "log.checkpoint_every=5")
    assert resume_point(folder) == (0, [])
    rows(folder, 10)  # the first checkpoint may just have been written
    assert resume_point(folder) == (0, [])
    rows(folder, 11)
    with pytest.raises(ConfigError, match="no intact checkpoint is left of 11 iterations"):
        resume_point(folder)
    rows(folder, 7)
    (folder / "policy").mkdir()  # which is written after the last checkpoint
    with pytest.raises(ConfigError, match="no intact checkpoint is left of 7 iterations"):
        resume_point(folder)
    (folder / "policy").rmdir()
    (folder / "checkpoints" / "5").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no intact checkpoint is left.*digests\.json cannot be read"):
        resume_point(folder)


def test_rows_without_a_checkpoint_are_gone_before_checkpoints_are_due_earlier(tmp_path):
    folder = begun(tmp_path / "run", "log.checkpoint_every=25")
    rows(folder, 20)  # killed before its first checkpoint
    (folder / "episodes").mkdir()
    often = configuration.load(None, [f"run_dir={folder}", "log.checkpoint_every=5"])
    lock, *_ = take_folder(often, folder, True, {})
    lock.release()  # killed again, before its first iteration
    assert resume_point(folder) == (0, [])


def test_rows_that_were_lost_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr("hgpo_jax.trainer.resume.newest_intact", lambda _: (4, ["checkpoint 5 is damaged"]))
    folder = begun(tmp_path / "run")
    rows(folder, 4)
    assert resume_point(folder) == (4, ["checkpoint 5 is damaged; going back to iteration 4"])
    rows(folder, 2)
    done, wrong = resume_point(folder)
    assert done == 4 and "metrics.jsonl: lacks 2 rows of finished iterations, the first is 2" in wrong[1]


def test_a_run_that_began_meanwhile_is_not_begun_again(tmp_path, monkeypatch):
    """Both found an empty folder; the other one was killed before this one had built its job and got the lock."""
    folder = tmp_path / "run"

    def slow_build(config, *meshes):
        begun(folder)
        (folder / "episodes").mkdir()
        (folder / "episodes" / "iteration-00009.npz").touch()
        return types.SimpleNamespace(close=lambda: None, given_params=None)

    monkeypatch.setattr("hgpo_jax.trainer.main.build", slow_build)
    state = types.SimpleNamespace(to_checkpoint=dict)
    monkeypatch.setattr("hgpo_jax.trainer.main.make_train_step", lambda job: (None, lambda params: state))
    monkeypatch.setattr("hgpo_jax.trainer.main.describe", lambda state: state)
    with pytest.raises(ConfigError, match="another process has begun a run here"):
        main.run(configuration.load(), (None, None), folder, False, None, None)
    assert (folder / "episodes" / "iteration-00009.npz").exists()


def test_a_full_disk_names_the_run_and_says_what_is_saved(tmp_path, monkeypatch):
    def full(config, mesh, folder, resuming, stop, on_iteration):
        stop.saved = 3
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(main, "run", full)
    message = r"run: No space left on device; 3 of 80 iterations are saved; continue with --resume .*run$"
    with pytest.raises(RunError, match=message):
        main.train({"run_dir": str(tmp_path / "run")})


@pytest.mark.parametrize(("free", "held", "fields", "said"), [
    (339, 0, (), "3 checkpoints of 1e-07 GB more and 4e-08 GB of policies, and its disk has 3.39e-07 GB left"),
    (340, 0, (), ""),
    (120, 2, (), ""), (119, 2, (), "1 checkpoint of 1e-07 GB more and 2e-08 GB"), (40, 0, ("iterations=0",), ""),
    (140, 0, ("iterations=9",), ""), (39, 0, ("iterations=0",), "0 checkpoints"),
    (439, 0, ("log.keep_best=1", "evaluation.every=5"), "4 checkpoints"),
])  # fmt: skip
def test_a_disk_that_is_too_small_is_named_before_training(free, held, fields, said, tmp_path, monkeypatch):
    for number in range(held):
        (tmp_path / "checkpoints" / str(25 * number)).mkdir(parents=True)
        (tmp_path / "start" / "config.json").parent.mkdir(exist_ok=True)
        (tmp_path / "start" / "config.json").touch()
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=free))
    state = {"params": jnp.zeros((5, 2)), "opt_state": jnp.zeros(30, "int16")}
    with refused(f"run_dir={tmp_path}: needs room for {said}", ConfigError) if said else contextlib.nullcontext():
        run_folder.refuse_full_disk(configuration.load(None, [*fields]), tmp_path, state, jnp.zeros(5), 0)


def test_a_longer_run_that_has_no_room_leaves_the_ended_one_as_it_is(tmp_path, monkeypatch):
    folder = begun(tmp_path / "run", "iterations=2")
    rows(folder, 2)
    (folder / "evaluation.json").write_text("{}")
    monkeypatch.setattr("hgpo_jax.trainer.run_folder.resume_point", lambda _: (2, []))
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=0))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with refused(f"run_dir={folder}: needs room for", ConfigError):
        take_folder(configuration.load(None, ["iterations=9"]), folder, True, {"params": jnp.zeros(9)})
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.name != LOCK} == before


@pytest.fixture
def small(tmp_path):
    """A job of which nothing is there but a small policy."""
    config = configuration.load(None, [f"cache_dir={tmp_path}"])
    policy = Policy(ModelConfig(8, 8, 8, 2, 2, 1), {"w": jnp.zeros(3)}, word_tokenizer(("", "buy")))
    return Job(config, None, {SHARED: PolicySetup(SHARED, config, None, policy, policy.config)}, None, None)


def test_a_start_that_is_damaged_or_of_another_size_is_named(tmp_path, small, monkeypatch):
    monkeypatch.setattr("hgpo_jax.trainer.behavior_cloning.cache_key", lambda _: "key")
    cached, saved = (lambda: warm_start(small)), (lambda: loop.starting_params(small, tmp_path))
    for place, begin in (("warm_start/key", cached), ("start", saved)):
        folder = shutil.copytree(HF, tmp_path / place)
        os.truncate(folder / "model.safetensors", 50)
        with pytest.raises(ConfigError, match=rf"model\.safetensors is damaged.*; remove .*/{place}, and"):
            begin()
    other = types.SimpleNamespace(params={"w": jnp.zeros(4)}, tokenizer=word_tokenizer(("", "red")))
    monkeypatch.setattr("hgpo_jax.trainer.loop.load_policy", lambda *_: other)
    with pytest.raises(ConfigError, match=r"start: policy\.\* or env\.\* ask for another size"):
        loop.starting_params(small, tmp_path)
    other.params["w"] = small.policy.initial.params["w"]
    with pytest.raises(ConfigError, match=r"start: holds other words than env\.\* shows now.*; start in another run_dir"):
        loop.starting_params(small, tmp_path)
    other.tokenizer = small.policy.initial.tokenizer
    assert loop.starting_params(small, tmp_path)[SHARED] is other.params


def test_a_folder_that_is_taken_or_cannot_be_written_is_named(tmp_path, monkeypatch, capsys):
    with filelock.FileLock(tmp_path / LOCK), pytest.raises(ConfigError, match="another process is writing this run"):
        take_folder(configuration.load(), tmp_path, False, {})
    assert not (tmp_path / "config.yaml").exists()

    def read_only(path, **_):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(SystemExit, match=r"^1$"):
        cli.run(lambda: take_folder(configuration.load(), tmp_path / "run", False, {}))
    assert capsys.readouterr().err == f"error: {tmp_path / 'run'}: Read-only file system\n"


@pytest.mark.parametrize("programs", [["the update", "decoding"], []])
def test_what_the_last_process_compiled_when_it_ended_is_said(programs, tmp_path):
    begun(tmp_path)
    (tmp_path / COMPILING).write_text("".join(f"{program}\n" for program in programs))
    held, _, faults, _ = take_folder(configuration.load(), tmp_path, True, {})
    held.release()
    said = ["the last process of this run ended while it compiled the update, decoding"] if programs else []
    assert [fault.partition(";")[0] for fault in faults] == said


def test_dumps_after_the_checkpoint_are_dropped(tmp_path):
    (tmp_path / "episodes").mkdir()
    for name in ("iteration-00003.npz", "iteration-00003.json", "iteration-00004.npz", "nonfinite-00004.npz",
                 "nonfinite-00004.json", "nonfinite-00001.npz", "iteration-00002.partial", "notes.txt"):  # fmt: skip
        (tmp_path / "episodes" / name).touch()
    drop_later(tmp_path, 4)
    left = {path.name for path in (tmp_path / "episodes").iterdir()}
    assert left == {"iteration-00003.npz", "iteration-00003.json", "nonfinite-00001.npz", "notes.txt"}
