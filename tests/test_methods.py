"""Every `method=` trains end to end: from the same warm start, a short run solves more held-out tasks than it did."""

import json
import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from hgpo_jax import advantages, losses
from hgpo_jax.config import LearnerConfig
from hgpo_jax.learner import make_policy_loss, token_logprobs
from hgpo_jax.mesh import make_mesh
from hgpo_jax.methods import METHODS
from hgpo_jax.policy import ModelConfig, initialize, network
from hgpo_jax.training_batch import TrainingBatch
from tests.helpers import fork_server
from tests.helpers.glossary import unexplained

TASKS = 256
SHORT = ["rollout.prompt_groups=16", "cloning.stop_at=0.2", f"evaluation.episodes={TASKS}", "log.tensorboard=false"]


def train(folder, cache, *overrides):
    # Compiled with some of LLVM's optimization: a fifth less processor time for all of so short a run.
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=1"}
    command = ["-m", "hgpo_jax.train", f"run_dir={folder}", f"cache_dir={cache}", *SHORT, *overrides]
    done = fork_server.run(command, folder.parent, environment, timeout=900)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return json.loads((folder / "evaluation.json").read_text())["success"]["sampled"], rows


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def at_the_start(cache, tmp_path_factory):
    success, _ = train(tmp_path_factory.mktemp("start") / "run", cache, "iterations=0")
    assert success < 0.7
    return success


@pytest.mark.slow
@pytest.mark.parametrize(("method", "low", "high"), [("gspo", 3e-4, 4e-4), ("gagpo", 0.2, 0.2)])
def test_methods_with_one_ratio_for_each_response(method, low, high):
    model = ModelConfig(
        vocab_size=8, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    params = initialize(model, 0, make_mesh("data=1", jax.devices()[:1]))
    rng = np.random.default_rng(0)
    rows = TrainingBatch(
        prompts=rng.integers(0, 8, (6, 4)), prompt_lengths=np.full(6, 4), responses=rng.integers(0, 8, (6, 3)),
        response_lengths=np.array([1, 2, 3, 3, 2, 1]), old_logp=np.zeros((6, 3)),
        advantages=rng.normal(size=6).astype(np.float32),
    )  # fmt: skip
    logp, _ = token_logprobs(nnx.merge(network(model), params), rows)
    rows = rows.replace(old_logp=logp + 0.4 * rng.normal(size=logp.shape).astype(np.float32))
    plain = LearnerConfig(kl_weight=0, entropy_weight=0)
    _, stats, _ = make_policy_loss(model, plain, METHODS[method], 1.0)(params, None, rows)
    expected, _ = losses.gspo_loss(
        logp, rows.old_logp, rows.advantages, rows.response_mask(), clip_low=low, clip_high=high
    )
    np.testing.assert_allclose(losses.divide(stats["loss"]), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("method", METHODS)
def test_success_rises_above_the_warm_start(method, at_the_start, cache, tmp_path):
    iterations = 8 if method == "gspo" else 4  # its clip range, the paper's, is narrow
    success, rows = train(tmp_path / "run", cache, f"method={method}", f"iterations={iterations}")
    assert success > at_the_start + 0.1  # two and a half standard errors of the difference on this many tasks
    assert len(rows) == iterations
    assert max(row["logp_difference"] for row in rows) < 1e-4
    assert not [name for row in rows for name in unexplained(row)]


@pytest.mark.slow
@pytest.mark.optimized
def test_the_readmes_estimator_learns(at_the_start, cache, tmp_path):
    readme = Path(advantages.__file__).with_name("README.md").read_text()
    program = tmp_path / "mine.py"
    program.write_text("\n".join(re.findall(r"```python\n(.*?)```", readme, re.DOTALL)))
    success, rows = train(tmp_path / "run", cache, f"method={program}:leave_one_out", "iterations=10")
    assert len(rows) == 10
    assert success > at_the_start + 0.1
