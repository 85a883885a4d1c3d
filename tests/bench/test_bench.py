"""The benchmarks on very small shapes: rows that `--json` writes, one work on both sides, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.bench import __main__ as command
from hgpo_jax.bench import limits, policies, profile, training
from hgpo_jax.config import load
from hgpo_jax.policy import initialize, network
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.sampling.generate import Decoding, make_decode_blocks, make_sampler
from hgpo_jax.setup.job import build
from hgpo_jax.trainer.step import make_train_step, sample
from tests.helpers.plain_rollout import action_of

TINY = [
    "--policy", "household", "--layers", "2", "--width", "16", "--inner", "24", "--heads", "2", "--kv-heads", "1",
    "--mesh", "data=1", "--repeats", "1",
]  # fmt: skip
SMALL_JOB = [
    "rollout.prompt_groups=8", "rollout.group_size=2", "env.max_turns=3", "learner.microbatch_size=8",
    "learner.minibatch_size=64",
]  # fmt: skip


PEER = ("--against", "transformers")


def against_torch(test):
    """A slow test that compares with transformers."""
    return pytest.mark.slow(pytest.mark.needs("torch", "peft")(test))


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """Rates that need no gigabyte."""
    monkeypatch.setattr(limits, "read_rate", lambda mesh: 20e9)
    monkeypatch.setattr(limits, "matmul_rate", lambda mesh, dtype="float32": 100e9)
    monkeypatch.setattr(training, "matmul_rate", lambda mesh, dtype: 100e9)


def by_name(found: list[dict]) -> dict[str, dict]:
    """The rows, whose fields are those of every benchmark."""
    *rows, machine = found
    assert machine["name"] == "machine" and "cores" in machine["value"]
    for row in rows:
        assert set(row) == {"name", "value", "unit", "limit_share", "ratio"}, row
        assert row["unit"] in ("s", "tokens/s", "GiB", "GB/s", "GFLOP/s", "%"), row
        if row["name"].startswith("decode"):  # a difference of two measurements, which are all noise at these sizes
            assert np.isfinite([row["value"], row["limit_share"], row["ratio"] or 0]).all(), row
            continue
        assert np.isfinite(row["value"]) and row["value"] >= 0, row
        assert row["limit_share"] is None or 0 < row["limit_share"] < 1.2, row
        assert row["ratio"] is None or row["ratio"] >= 0, row
    return {row["name"]: row for row in rows}


def starting(rows, text):
    return next(row for name, row in rows.items() if name.startswith(text))


@against_torch
def test_sample(bench, tmp_path):
    profiled = ("--profile", str(tmp_path / "traces"))
    rows = by_name(bench("sample", *TINY, "--batch", "4", "--prompt", "9", "--new", "24", *profiled, *PEER))
    both = starting(rows, "both, batch 4")
    assert both["limit_share"] and both["ratio"]
    assert starting(rows, "decode, household, float32, prompt 9, 24 new, batch 4")["unit"] == "tokens/s"
    shares = {name.removeprefix("batch 4: time in "): row["value"] for name, row in rows.items() if row["unit"] == "%"}
    assert sum(shares.values()) == pytest.approx(100) and shares["products (dot_general)"] > 0
    assert list((tmp_path / "traces").rglob("*.xplane.pb"))


def test_own_times_leave_out_what_lies_within():
    events = [("inner", 2, 3), ("outer", 0, 10), ("innermost", 3, 1), ("next", 10, 5), ("inner", 6, 4)]
    own = sorted(profile.own_times(events))
    assert own == [("inner", 2), ("inner", 4), ("innermost", 1), ("next", 5), ("outer", 3)]
    assert sum(time for _, time in own) == 15  # nothing counts twice


@against_torch
def test_update(bench):
    """Of adapters; a whole network's is that of `test_the_peer_learns_the_same_from_the_same_episodes`."""
    sizes = ("--rows", "6", "--tokens", "12", "--response", "5", "--remat", "full", "--lora", "2")
    rows = by_name(bench("update", *TINY, *sizes, *PEER))  # which must have the same loss and gradient
    update, again = starting(rows, "update, household, 2 layers, 6 x 12"), starting(rows, "the same")
    assert update["value"] == again["value"] and update["limit_share"] < again["limit_share"] and update["ratio"]
    array = starting(rows, "one [response")["value"] * 2**30
    assert array == pytest.approx(6 * 5 * 4 * policies.workload(parse(TINY)).model.vocab_size)


@against_torch
def test_train(bench, tmp_path):
    rows = by_name(bench("train", "--repeats", "1", f"cache_dir={tmp_path}", *SMALL_JOB, *PEER))
    assert starting(rows, "rollout, 8 x 2 episodes of 3 turns")["limit_share"] and rows["iteration"]["ratio"]


def parse(arguments):
    parser = command.cli.parser("bench", "")
    policies.add_arguments(parser)
    return parser.parse_args(arguments)


@against_torch
def test_the_peer_generates_the_same_tokens():
    from hgpo_jax.bench import peer

    model = dataclasses.replace(policies.workload(parse(TINY)).model, initializer_range=0.5)
    mesh = policies.meshes("data=1", 3)["data=1"]
    prompts = np.random.default_rng(0).integers(0, model.vocab_size, (3, 7)).astype(np.int32)
    with jax.set_mesh(mesh):
        params = initialize(model, 0, mesh)
        ours = make_sampler(network(model), mesh, 6, (-1,))(
            params, make_decode_blocks(network(model))(params), prompts, np.full(3, 7), jax.random.split(jax.random.key(0), 3),
            np.arange(3), 0, Decoding(temperature=0.0),
        )  # fmt: skip
    theirs = peer.sampler(peer.make_model(model, params, "float32"), prompts, 6, 0.0)()
    np.testing.assert_array_equal(ours.tokens, theirs)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    config = load(None, [*SMALL_JOB, f"cache_dir={tmp_path_factory.mktemp('cache')}"])
    return build(config, make_mesh("data=1", jax.devices()[:1]))


@against_torch
def test_the_peer_learns_the_same_from_the_same_episodes(job):
    """One optimizer step on another policy's episodes, so that clipping and KL count too."""
    from hgpo_jax.bench import peer

    learn, init = make_train_step(job)
    other = initialize(job.policy.config, 5, job.mesh)
    (episodes, _), *_ = sample(job, other, 0)
    # A fresh policy gets no reward; with made-up ones there are advantages of both signs.
    rewards = np.random.default_rng(0).standard_normal(episodes.rewards.shape).astype(np.float32)
    episodes = episodes.replace(rewards=jnp.asarray(rewards))
    record = jax.device_get(vars(episodes))
    model, frozen = (peer.make_model(job.policy.config, params, "float32") for params in (job.policy.params, other))
    theirs = peer.learn(model, frozen, peer.make_optimizer(model, job.config.learner), job, record, 16, 0)
    _, stats = learn(init(job.policy.params), other, episodes, job.key(0, 1), 1.0)
    for name, value in theirs.items():
        np.testing.assert_allclose(value, stats[name], rtol=2e-3, err_msg=name)
    assert theirs["kl"] > 1e-3 and stats["clip_fraction_high"] > 0


@against_torch
def test_what_the_peer_plays_is_what_the_environment_does(job):
    from hgpo_jax.bench import peer

    env, tokenizer = job.runner.env, job.policy.tokenizer
    played = peer.play(peer.make_model(job.policy.config, job.policy.params, "float32"), job, 1)
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    for b, task in enumerate(job.episode_inputs(1)[0]):
        state, seen = reset(task)
        for t in range(env.max_turns):
            # The prompt ends with the observation and the mark that asks for an action.
            np.testing.assert_array_equal(played["prompts"][b, t, -1 - env.observation_length : -1], seen)
            response = played["responses"][b, t, : played["response_lengths"][b, t]].tolist()
            action, ended = action_of(response, tokenizer.eos_token_id, env.action_length)
            state, seen, reward, _, invalid = jax.device_get(step(state, np.array(action, np.int32)))
            assert played["rewards"][b, t] == reward and played["invalid"][b, t] == (invalid or not ended)
            assert (played["logp"][b, t, : len(response)] < 0).all()


@pytest.mark.parametrize(("arguments", "said"), [
    (["sample", "--policy", "Qwen9"], "--policy Qwen9: expected one of household, Qwen2.5-0.5B"),
    (["sample", "--policy", "household", "--heads", "3"], "hidden_size=64: must be an even multiple"),
    (["sample", "--batch", "3", "--mesh", "data=2"], "data=2 does not divide the 3 rows"),
    (["update", "--tokens", "8", "--response", "8"], "--response 8: leaves no prompt"),
    (["update", "--rows", "0"], "--rows: 0: must be a whole number"),
    (["rollout", "--mean", "1"], "--mean 1: must be 2 or more"),
    (["rollout", "--shortest-prompt", "2000"], "--shortest-prompt 2000: is above --longest-prompt 1200"),
    (["sample", "--profile", "FILE/traces"], "--profile"),
    (["train", "--profile", ".", "--config", "text_small"], "--profile .: traces a compiled environment's iteration"),
    (["envs", "--tokenizer", "./nowhere"], "--tokenizer ./nowhere: needs games to tell; give --alfworld FOLDER"),
    (["envs", "--tokenizer", "./nowhere", "--alfworld", "."], "--tokenizer ./nowhere: cannot be read"),
    (["plan", "--mesh", "data=1", "--chip", "h100-80g", "--compile", "v5e:2x4"], "--chip h100-80g: --compile v5e:2x4"),
    (["train", *PEER, "method=gspo"], "method=gspo: --against transformers has one clipped loss"),
    (["train", *PEER, "env.name=household_text"], "plays the embedded household only"),
    (["train", *PEER, "learner.rollout_correction=token"], "its sampler is its trainer; leave out"),
])  # fmt: skip
def test_refusals(tmp_path, monkeypatch, refused, arguments, said):
    monkeypatch.setattr(policies, "load_peer", lambda name: name and object())
    (tmp_path / "file").write_text("")
    assert said in refused(*(word.replace("FILE", str(tmp_path / "file")) for word in arguments))


def test_without_torch_there_is_no_peer(monkeypatch, refused):
    monkeypatch.setattr(policies.importlib.util, "find_spec", lambda name: None)
    for name in ("sample", "update", "train"):
        assert "needs torch; pip install 'hgpo_jax[parity]'" in refused(name, *PEER)


def test_counts_of_operations_and_bytes():
    model = policies.workload(parse(TINY)).model
    mesh = policies.meshes("data=1", 1)["data=1"]
    params = initialize(model, 0, mesh)
    assert limits.read_bytes(model, 0, 0, 4) == sum(a.nbytes for a in jax.tree.leaves(params))
    assert limits.read_bytes(model, 3, 5, 2) - limits.read_bytes(model, 0, 0, 2) == 3 * 5 * 2 * (2 * 1 * 8) * 2
    # One token that sees itself alone is the same work either way.
    assert limits.decode_flops(model, 1) == limits.forward_flops(model, 1, 1)


def test_memory_rise_is_what_a_call_touches(monkeypatch):
    rise = limits.memory_rise(lambda: np.ones(2**24))
    assert rise is None or 0.95 < rise / 2**27 < 1.3
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert limits.memory_rise(lambda: np.ones(2**24)) is None


@pytest.mark.needs("torch")
def test_on_an_accelerator_the_hosts_torch_is_no_peer(monkeypatch, refused):
    import torch

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("sample", "update", "train"):
        assert "jax has a GPU that torch does not find" in refused(name, *PEER)
