"""The warm start: the key under which it is cached changes with what it depends on; its optimizer's steps."""

import importlib.metadata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import keystr, tree_leaves_with_path

from hgpo_jax.config import load
from hgpo_jax.learner.optimizer import make_optimizer
from hgpo_jax.policy import LoraConfig, ModelConfig, Policy
from hgpo_jax.policy.placement import shapes
from hgpo_jax.policy.tokenizer import word_tokenizer
from hgpo_jax.rollout.backend import role_names
from hgpo_jax.rollout.env_tokenizer import fresh_tokenizer
from hgpo_jax.rollout.requirements import ONE_ROLE
from hgpo_jax.setup.build import build
from hgpo_jax.trainer import behavior_cloning
from hgpo_jax.trainer.behavior_cloning import check_words
from tests.helpers.refusals import refused
from tests.helpers.tiny import mesh_of

OWN = """
class Mine:
    task_types, max_turns = ("only",), 3
    def __init__(self, tasks: str = ""):
        self.goal, self.task_type = "guess", 0
        open("made", "a").write("x")
    def close(self): open("closed", "a").write("x")
    def reset(self, task): return "begin", ["go"]
    def step(self, action): return "end", ["go"], 0.0, True, {"won": False, "admissible": True}
"""


def key(*fields):
    return behavior_cloning.cache_key(load(None, list(fields)))


def test_versions_of_what_computes_change_the_key(monkeypatch):
    really, keys = importlib.metadata.version, set()
    for package in ("none", "hgpo_jax", "jax", "jaxlib", "flax", "optax"):
        changed = lambda name, package=package: "0.0" if name == package else really(name)  # noqa: E731
        monkeypatch.setattr(behavior_cloning, "version", changed)
        keys.add(key())
    monkeypatch.setattr(behavior_cloning, "version", really)
    monkeypatch.setattr(behavior_cloning, "CACHE_VERSION", behavior_cloning.CACHE_VERSION + 1)
    keys.add(key())
    assert len(keys) == 7


def test_given_files_change_the_key(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    before = key(f"policy={tmp_path}")
    assert key(f"policy={tmp_path}", "lora.rank=2") != before
    file.write_bytes(b"two")
    assert key(f"policy={tmp_path}") != before
    file.write_bytes(b"one")
    assert key(f"policy={tmp_path}") == before
    file = file.rename(tmp_path / "another.safetensors")
    assert key(f"policy={tmp_path}") != before
    file.write_text("one")
    before = key("env.name=household_text", f"env.template={file}")
    file.write_text("two")
    assert key("env.name=household_text", f"env.template={file}") != before


def test_rewritten_data_change_the_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "tasks.json").write_text("[1]")
    own = f"env.name={tmp_path / 'mine.py'}:Mine", f"env.options.tasks={tmp_path / 'tasks.json'}"
    before = key(*own)
    (tmp_path / "tasks.json").write_text("[1, 2]")
    assert key(*own) != before
    assert role_names(load(None, own)) == ONE_ROLE
    assert fresh_tokenizer(load(None, own)).eos_token
    assert len(Path("made").read_text()) == len(Path("closed").read_text()) > 2  # by whoever only asks what it is
    (tmp_path / "items.json").write_text("[1]")
    before = key("env.name=webshop", f"data={tmp_path}")
    assert key("env.name=webshop", f"data={tmp_path}") == before
    (tmp_path / "items.json").write_text("[1, 2]")
    assert key("env.name=webshop", f"data={tmp_path}") != before


def test_a_policy_of_other_words_is_refused(tmp_path):
    """Ids would mean other words, and nothing would say so."""
    small = load(None, [])
    saved, now = (Policy(None, {}, word_tokenizer(("", word))) for word in ("red", "buy"))
    setup = SimpleNamespace(settings=small, initial=now)
    with refused("holds other words than env.* shows now"):
        check_words(tmp_path, saved, setup)
    check_words(tmp_path, now, setup)
    check_words(tmp_path, saved, SimpleNamespace(settings=load(None, ["policy=x", "warm_start=none"]), initial=now))


def test_fields_of_the_warm_start_change_the_key_and_others_do_not():
    for change in ("seed=1", "env.places=7", "cloning.lr=1e-3", "rollout.history_length=1", "policy.hidden_size=32"):
        assert key(change) != key(), change
    for change in ("method=gigpo", "learner.lr=1e-3", "iterations=3", "run_dir=x"):
        assert key(change) == key(), change
    assert key("seed=5", "cloning.seed=0") == key() != key("cloning.seed=5") == key("seed=5")


POLICY = ["policy.hidden_size=32", "policy.intermediate_size=32"]


@pytest.mark.slow
def test_runs_that_share_a_start_begin_with_the_same_policy_and_other_tasks(tmp_path):
    """What is cloned has nothing of the run's own seed; without a cache, so that both are made."""
    small = [*POLICY, "rollout.prompt_groups=2", "cloning.max_steps=3", "cloning.check_every=3", "cloning.episodes=64"]
    jobs = [build(load(None, [*small, *more]), mesh_of()) for more in (["seed=3"], ["seed=4", "cloning.seed=3"], ["seed=4"])]
    same, shared, other = (tree_leaves_with_path(behavior_cloning.clone(job)) for job in jobs)
    for (place, a), (_, b) in zip(same, shared, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=keystr(place))
    assert any((np.asarray(a) != b).any() for (_, a), (_, b) in zip(same, other, strict=True))
    first, second, third = (job.episode_inputs(0) for job in jobs)
    assert (first[0] != second[0]).any() and (second[0] == third[0]).all()

    def adapters(job):
        adapted = replace(job.policy.model, lora=LoraConfig(rank=2, alpha=4))
        return jax.tree.leaves(replace(job.policy, model=adapted).trainable(None))

    same, shared, other = map(adapters, jobs)
    assert all((a == b).all() for a, b in zip(same, shared, strict=True))
    assert any((a != b).any() for a, b in zip(same, other, strict=True))


@pytest.mark.slow
def test_what_is_cloned_from_texts_depends_on_the_shared_seed_alone():
    found = []
    for more in (["seed=3"], ["seed=4", "cloning.seed=3"], ["seed=4"]):
        job = build(load("text_small", [*POLICY, *more]), mesh_of())
        rows, _ = behavior_cloning.demonstrations(job, jnp.arange(4))
        found.append((np.asarray(rows.prompts), np.asarray(rows.responses)))
    same, shared, other = found
    for a, b in zip(same, shared, strict=True):
        np.testing.assert_array_equal(a, b)
    assert any(a.shape != b.shape or (a != b).any() for a, b in zip(same, other, strict=True))


@pytest.mark.slow
def test_muon_makes_the_steps_of_the_layers_kernels_orthogonal_and_all_else_takes_nadams():
    config = ModelConfig(
        vocab_size=12, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        tie_word_embeddings=False,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    random = lambda s: jnp.asarray(rng.normal(size=s.shape) * rng.exponential(size=s.shape), jnp.float32)  # noqa: E731
    params, gradient = (jax.tree.map(random, shapes(config)) for _ in range(2))

    def first_step(optimizer):
        return optimizer.update(gradient, optimizer.init(params), params)[0]

    clipped = optax.tree.scale(1 / optax.tree.norm(gradient), gradient)
    steps = first_step(make_optimizer(0.1, 1, 1.0, beta2=0.98, kind="muon"))
    adams = first_step(optax.chain(optax.clip_by_global_norm(1.0), optax.nadam(0.1, b2=0.98)))
    kernels = 0
    for (path, step), like_adam, g in zip(tree_leaves_with_path(steps), *map(jax.tree.leaves, (adams, clipped)), strict=True):
        if "kernel" not in keystr(path) or "lm_head" in keystr(path):
            np.testing.assert_allclose(step, like_adam, rtol=1e-3, atol=1e-6, err_msg=keystr(path))
            continue
        kernels += 1
        for layer, its_gradient in zip(np.atleast_3d(step.T).T, np.atleast_3d(g.T).T, strict=True):
            u, values, v = np.linalg.svd(np.asarray(its_gradient), full_matrices=False)
            along = np.diag(u.T @ layer @ v.T) / (-0.1 * 0.4 * max(layer.shape) ** 0.5)  # 1 for an exactly orthogonal step
            strong = values > 0.05 * values[0]  # weak directions take more than five Newton-Schulz steps
            assert strong.sum() >= 10 or min(layer.shape) < 10
            assert np.all((along[strong] > 0.6) & (along[strong] < 1.3)), (keystr(path), along)
    assert kernels == 2 * 7  # of the last layer and of those before it
