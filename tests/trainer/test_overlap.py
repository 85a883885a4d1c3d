"""Rollouts that overlap with learning (`rollout.overlap=1`): a run against the same iterations by hand, and its resumption."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kills import timeless
from safetensors.numpy import load_file

import hgpo_jax
from hgpo_jax.config import load
from hgpo_jax.config.policies import SHARED
from hgpo_jax.learner.optimizer import lr_scale
from hgpo_jax.policy import LoraConfig, initialize
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.rollout.result import RolloutResult
from hgpo_jax.setup import build, devices, memory
from hgpo_jax.setup.job import Job, PolicySetup
from hgpo_jax.setup.validate import check_together
from hgpo_jax.trainer import loop
from hgpo_jax.trainer.alarms import Alarms
from hgpo_jax.trainer.interruption import Interruption
from hgpo_jax.trainer.loop import learning_role
from hgpo_jax.trainer.step import TrainState, make_train_step, sample
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.glossary import unexplained
from tests.helpers.refusals import refused
from tests.helpers.tiny import MODEL, mesh_of
from tests.helpers.training import TINY

FAST = (*TINY, "learner.lr=1e-2", "learner.warmup_steps=0", "rollout.overlap=1")  # policies that soon differ
TEXT = ("env.name=household_text", "rollout.prompt_limit=128", "rollout.response_limit=16", "learner.rollout_correction=token",
        "learner.minibatch_size=1024")  # fmt: skip
TEAM = ("env.name=household_team", "roles.searcher.policy=own", "learner.rollout_correction=token")
APART = "rollout.mesh=data=1"  # the last device; the update has the first
SETTINGS = {
    "compiled, a critic": ("method=ppo", "rollout.constrain=admissible", "learner.kl_weight=0"),
    "text, corrected": (*TEXT, APART),
    "bfloat16": ("policy.compute_dtype=bfloat16", "learner.rollout_correction=sequence", APART),
    "a team": (*TEAM, APART),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cache(folder, monkeypatch):
    before = jax.sharding.get_mesh()
    monkeypatch.setattr(devices, "job_mesh", lambda config, devices=None: mesh_of())
    yield folder
    jax.set_mesh(before)


def config_of(cache, *fields):
    return load(None, [*FAST, *fields, f"cache_dir={cache}"])


def by_hand(config, folder):
    """Metrics of each iteration, all on one mesh; the policies are saved in the folder."""
    here = build.build(config, mesh_of())
    params = here.given_params
    train_step, init = make_train_step(here)
    reference, state, behind, results = here.reference_copy(params), init(params), params, []
    for iteration in range(config.iterations):
        (episodes, _), *_ = sample(here, here.rollout_params(behind, reference), iteration)
        behind = jax.tree.map(jnp.copy, state.params)
        scale = jnp.float32(lr_scale(config.learner, iteration, config.iterations))
        given = state.replace(sampler=None), reference, episodes, here.key(iteration, 1), scale
        state, metrics = train_step(*given, learning_role(here, iteration))
        results.append({name: float(value) for name, value in metrics.items()})
    here.by_policy(lambda policy, params: policy.save(params, folder / policy.name), state.params)
    here.close()
    return results


def begin(config, folder):
    """Runs the first two iterations."""

    def leave(row):
        if row["iteration"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hgpo_jax.fit(config, folder, on_iteration=leave)
    assert 2 <= len(timeless(folder)) < config.iterations


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_is_the_loop_by_hand_and_goes_on_elsewhere_to_the_bit(cache, tmp_path, setting):
    config = config_of(cache, *SETTINGS[setting])
    run = hgpo_jax.fit(config, tmp_path / "whole")
    by_iteration = by_hand(config, tmp_path / "by hand")
    rows = timeless(run.folder)
    assert [row["staleness"] for row in rows] == [0, 1, 1, 1]
    for row, metrics in zip(rows, by_iteration, strict=True):
        assert not unexplained(row)
        finite = {name: value if np.isfinite(value) else None for name, value in metrics.items()}
        assert finite == {name: row[name] for name in metrics}
        if "text" in setting:  # the ratio of the only optimizer step is to the policy before it
            assert row["optimizer_steps"] == 1 and row["ratio"] == pytest.approx(1, abs=1e-5)
    # What sampled was another policy than what learns, from the second iteration on.
    differs = [row["logp_difference"] > 1e-3 for row in rows]
    assert differs[1:] == [True] * 3 and (not differs[0] or config.policy.compute_dtype == "bfloat16")
    files = [file.relative_to(run.folder / "policy") for file in (run.folder / "policy").rglob("*.safetensors")]
    assert len(files) == (2 if "team" in setting else 1)
    for file in files:
        theirs, ours = (load_file(folder / file) for folder in (run.folder / "policy", tmp_path / "by hand"))
        jax.tree.map(np.testing.assert_array_equal, theirs, ours)

    begin(config, tmp_path / "halves")
    moved = [field for field in SETTINGS[setting] if field != APART]  # the rollouts change their devices with the resumption
    moved += [] if APART in SETTINGS[setting] else [APART]
    halves = hgpo_jax.fit(config_of(cache, *moved), tmp_path / "halves", resume=True)
    assert timeless(halves.folder) == rows
    for file in files:
        assert (halves.folder / "policy" / file).read_bytes() == (run.folder / "policy" / file).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "reread"), [(0, True), (1, True), (1, False)])
def test_unfinished_episodes_go_on_to_the_bit(cache, tmp_path, overlap, reread):
    """But where the caches of interrupted answers are kept: they are in no checkpoint."""
    others = ("rollout.decode_batch_size=6", "log.checkpoint_every=1", f"rollout.overlap={overlap}", *[APART] * overlap)
    config = config_of(cache, *TEXT, "rollout.keep=2", f"rollout.reread={reread}", *others)
    rows = timeless(hgpo_jax.fit(config, tmp_path / "whole").folder)
    assert rows[0]["staleness"] == 0 and not any(map(unexplained, rows))
    assert any(row["staleness"] % 1 for row in rows)  # episodes that went on under other weights

    begin(config, tmp_path / "halves")
    resumed = timeless(hgpo_jax.fit(config, tmp_path / "halves", resume=True).folder)
    assert resumed == rows if reread else (resumed[:2], len(resumed)) == (rows[:2], len(rows))


@pytest.mark.parametrize(("overlap", "sampling"), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2])])
def test_the_weights_from_before_an_update_sample_what_comes_after_it(overlap, sampling, monkeypatch):
    """Weights that count their updates, each of which destroys the ones before it."""
    config = load(None, [f"rollout.overlap={overlap}", "iterations=4", "log.checkpoint_every=1"])
    policy = PolicySetup(SHARED, config, mesh_of(), SimpleNamespace(config=MODEL), MODEL)
    here = Job(config, mesh_of(), {SHARED: policy}, None, SimpleNamespace(roles=("one",)))
    sampled, saved = [], {}

    def train_step(state, reference, episodes, key, scale, role):
        assert state.sampler is None
        after = state.replace(params=jax.tree.map(lambda a: a + 1, state.params))
        jax.tree.map(lambda a: a.delete(), state.params)
        return after, {}

    def sample(job, params, iteration):
        sampled.append(int(params[SHARED]["weight"]))
        return RolloutResult(SimpleNamespace(mask=()), None), [], {}

    def save(done, state, success):
        saved[done] = {name: int(state[name]["weight"]) for name in state.keys() - {"opt_state"}}

    monkeypatch.setattr(loop, "sample", sample)
    monkeypatch.setattr(loop, "Recorder", Mock())
    run = object.__new__(loop.Training)
    run.job, run.config, run.folder, run.done, run.reference, run.on_iteration = here, config, Path(), 0, {SHARED: {}}, None
    run.train_step, run.rollout_reference = train_step, run.reference
    run.checkpoints = Mock(save=save, latest=lambda: max(saved, default=None))
    weights = [{SHARED: {"weight": jnp.float32(0)}} for _ in range(2)]
    run.state = TrainState(weights[0], {}, sampler=weights[1] if overlap else None)
    with Interruption() as run.stop:
        run.run()
    assert sampled == sampling
    behind = {done: {"sampler": done - 1} if overlap else {} for done in range(1, 5)}
    assert saved == {done: {"params": done} | others for done, others in behind.items()}


def test_a_checkpoint_holds_the_weights_that_sample_where_they_are_others():
    trees = [{SHARED: {"weight": np.full(2, number)}} for number in range(3)]
    for state in (TrainState(*trees[:2], sampler=trees[2]), TrainState(*trees[:2])):
        saved = state.to_checkpoint()
        assert ("sampler" in saved) == bool(state.sampler)
        assert TrainState(*trees[:2]).from_checkpoint(saved) == state


def test_what_does_not_overlap_is_refused():
    with refused("while episodes are sampled, and nothing saved; leave one", ConfigError):
        check_together(load(None, ["rollout.overlap=1", "learner.offload=true"]))
    with refused("rollout.mesh=data=1: needs rollout.overlap=1", ConfigError):
        check_together(load(None, [APART]))
    for spec, message in (("auto", "rollout.mesh='auto': give all sizes"), ("rows=1", "rollout.mesh='rows=1': expected ")):
        with refused(message, ConfigError):
            check_together(load(None, ["rollout.overlap=1", f"rollout.mesh={spec}"]))
    with refused("rollout.overlap=2: must be less than or equal to 1", ConfigError):
        load(None, ["rollout.overlap=2"])
    with refused("rollout.overlap=1: method=gspo clips ratios that one update already exceeds; give", ConfigError):
        check_together(load(None, ["rollout.overlap=1", "method=gspo"]))
    check_together(load(None, ["rollout.overlap=1", "method=gspo", "learner.rollout_correction=sequence"]))
    check_together(load(None, ["rollout.overlap=1", "method=gagpo"]))  # the same loss with wide clips
    check_together(load(None, ["rollout.overlap=1", "method=gspo", "learner.clip_low=0.2", "learner.clip_high=0.2"]))
    check_together(load(None, ["rollout.overlap=1"]))


def test_rollouts_have_the_last_devices_for_themselves():
    of = lambda *fields: devices.job_meshes(load(None, ["rollout.overlap=1", *fields]))  # noqa: E731
    assert of() == (devices.job_mesh(load()), None)
    learn, play = of("mesh=data=2,tensor=2", "rollout.mesh=data=2,fsdp=2")
    assert [list(mesh.devices.flat) for mesh in (learn, play)] == [jax.devices()[:4], jax.devices()[4:]]
    assert of("rollout.mesh=fsdp=4")[0].size == 4  # mesh=auto has the others
    for fields, message in (
        (["rollout.mesh=data=8"], "rollout.mesh=data=8: leaves the update none of 8 devices; give smaller sizes"),
        (["rollout.mesh=auto"], "rollout.mesh='auto': give all sizes"),
        (["rollout.mesh=data=3"], "rollout.mesh=data=3: data x fsdp = 3 does not divide the 256 episodes"),
        (["mesh=data=8", APART], "all (rollout.mesh=data=1 takes 1)"),
    ):
        with refused(message, ConfigError):
            of(*fields)


@pytest.mark.parametrize("lora", [None, LoraConfig(2, 4.0)])
def test_weights_and_episodes_are_moved_between_the_meshes(lora):
    model, learn, play = dataclasses.replace(MODEL, lora=lora), mesh_of(), make_mesh("fsdp=2", jax.devices()[-2:])
    params = initialize(MODEL, 0, learn)
    policy = PolicySetup(SHARED, load(None, ["rollout.overlap=1"]), learn, SimpleNamespace(config=MODEL), model, play)
    trained = policy.trainable(params)
    copy = policy.sampling_copy(trained)
    for there, here in ((copy, trained), (policy.rollout_params(copy, params), policy.rollout_params(trained, params))):
        jax.tree.map(np.testing.assert_array_equal, there, here)
        assert {device for a in jax.tree.leaves(there) for device in a.sharding.device_set} == set(play.devices.flat)
    here = Job(policy.settings, learn, {SHARED: policy}, None, None, rollout_mesh=play)
    with here.on_rollout_mesh():
        made = jax.jit(lambda: jnp.arange(4))()
        assert made.sharding.device_set == set(play.devices.flat)
    assert here.to_update(made).sharding.device_set == set(learn.devices.flat)


@pytest.mark.parametrize("lora", [(), ("lora.rank=2",)])
def test_the_memory_plan_of_devices_that_only_learn_or_only_sample(lora):
    config = load(None, ["rollout.overlap=1", "policy.compute_dtype=bfloat16", *lora])
    alone = load(None, ["policy.compute_dtype=bfloat16", *lora])
    learn, play = memory.bytes_apart(config, mesh_of(), make_mesh("data=2", jax.devices()[-2:]))
    whole = memory.bytes_of_run(alone, mesh_of())
    whole["always"]["episodes"] *= 2  # the next ones arrive while an update runs
    assert learn == whole | {"sampling": {}}
    assert play["update"] == {} and play["always"]["weights that sample"] == whole["always"]["parameters"] // 2
    assert set(play["always"]) == {"weights that sample", "episodes", *(["reference policy"] if lora else [])}
    assert play["sampling"]["key-value cache"] > 0 == play["sampling"]["compute copy"]
    validated = load(None, ["rollout.overlap=1", "policy.compute_dtype=bfloat16", "evaluation.every=1", *lora])
    more = memory.bytes_apart(validated, mesh_of(), mesh_of())[1]["always"]
    assert more["weights that are validated"] == more["weights that sample"]


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_the_memory_plan_counts_the_weights_that_sample_and_the_rollout_beside_the_update(dtype, size):
    apart, overlapped = (
        memory.bytes_of_run(load(None, [f"rollout.overlap={overlap}", f"policy.compute_dtype={dtype}"]), mesh_of())
        for overlap in (0, 1)
    )
    assert overlapped["always"]["weights that sample"] == apart["always"]["parameters"] * size // 4
    sampling, copy = sum(apart["sampling"].values()), overlapped["always"]["weights that sample"]
    always = sum(apart["always"].values()) + copy + apart["always"]["episodes"]  # two batches of them
    assert memory.peak(overlapped) == always + sum(apart["update"].values()) + sampling
    memory.add_checkpoint(overlapped)
    memory.add_checkpoint(apart)
    written = "checkpoint being written"
    assert overlapped["update"][written] == apart["update"][written] + copy


def test_only_two_equal_policies_are_held_to_equal_probabilities():
    """A warning is for a sampler that computes otherwise, and between two policies says nothing."""
    row = {"iteration": 0, "steps": 1.0, "logp_difference": 0.4}
    for staleness, warned in ((0, True), (1, False)):
        said = Alarms(load(None, ["rollout.overlap=1"])).check(row | {"staleness": staleness})
        assert any("logp_difference" in line for line in said) == warned


def test_products_of_accelerators_are_rounded_whatever_their_dtype(monkeypatch):
    row = {"iteration": 0, "steps": 1.0, "logp_difference": 0.1, "staleness": 0}
    warns = lambda: any("logp_difference" in line for line in Alarms(load(None, [])).check(row))  # noqa: E731
    assert warns()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not warns()
    with jax.default_matmul_precision("highest"):
        assert warns()
