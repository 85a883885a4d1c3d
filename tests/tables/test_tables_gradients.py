"""Gradients of estimators: their cosines against known expectations, the unbiased one against loops, the gradient itself."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax import analysis
from hgpo_jax.config import load
from hgpo_jax.learner.update import make_logprobs
from hgpo_jax.policy.mesh import make_mesh
from hgpo_jax.setup.job import build
from hgpo_jax.tables import gradients
from hgpo_jax.tables.gradients import cosines, make_gradient, rloo_by_turn
from hgpo_jax.trainer.step import training_batch
from hgpo_jax.utils.errors import ConfigError
from tests.helpers.inspected import EXAMPLE
from tests.helpers.training import TINY


def sampled(rng, batches, spread=2.0):
    """Gradients f64[3, M, 40] whose expectations have cosines 1, 1 and .6 to the first's; the second shares noise with both."""
    mean = np.zeros((3, 1, 40))
    mean[0, :, 0] = 3.0
    mean[1, :, 0] = 1.5
    mean[2, :, :2] = 0.6, 0.8
    noise = rng.normal(size=(2, batches, 40))
    return mean + spread * np.stack([noise[0], 0.5 * (noise[0] + noise[1]), 0.05 * noise[1]])


def test_noise_lowers_a_batchs_cosine_and_bias_the_expected_one():
    gradients = sampled(np.random.default_rng(0), 80, spread=1.0)
    half, biased, true = cosines(gradients[[1, 2, 0]], 2)
    assert true["expected"] == pytest.approx(1) and true["expected_error"] == pytest.approx(0, abs=1e-6)
    assert half["expected"] == pytest.approx(1, abs=3 * half["expected_error"])
    assert biased["expected"] == pytest.approx(0.6, abs=3 * biased["expected_error"])
    assert max(half["expected_error"], biased["expected_error"]) < 0.05
    # |E g| / sqrt(E |g|^2), times the expectation's cosine.
    for found, wanted in ((true, 3 / np.sqrt(9 + 40)), (half, 1.5 / np.sqrt(2.25 + 20)), (biased, 0.6 / np.sqrt(1.1))):
        assert found["batch"] == pytest.approx(wanted, abs=3 * found["batch_error"])
    parts = [gradients[:, :9, :20], np.zeros((3, 9, 65_536)), gradients[:, :9, 20:]]  # are added up one after another
    long = np.concatenate(parts, axis=2)
    for found, wanted in zip(cosines(long, 0), cosines(gradients[:, :9], 0), strict=True):
        assert found == pytest.approx(wanted)
    assert cosines(np.zeros((2, 9, 3)), 0)[1] == pytest.approx(dict.fromkeys(true, np.nan), nan_ok=True)


def test_what_batches_share_does_not_count():
    """The mean over repetitions; products of a batch with itself, left in, would make it negative."""
    rng, mean, found = np.random.default_rng(2), np.zeros((2, 1, 40)), []
    mean[0, :, 0] = mean[1, :, 1] = 3.0
    for _ in range(300):
        noise = rng.normal(size=(2, 12, 40))
        noise[1] -= noise[0]
        found.append(cosines(mean + noise, 0)[1]["expected"])
    assert np.mean(found) == pytest.approx(0, abs=0.06)


def test_errors_are_those_of_repetitions():
    rng = np.random.default_rng(1)
    found = [cosines(sampled(rng, 48, spread=0.7), 0) for _ in range(200)]
    for estimator in (1, 2):
        for what in ("batch", "expected"):
            values = np.array([one[estimator][what] for one in found])
            errors = np.array([one[estimator][f"{what}_error"] for one in found])
            # The jackknife counts noise of pairs twice, and so errs on the safe side.
            assert 0.85 < np.sqrt(np.mean(errors**2)) / values.std(ddof=1) < 1.5, (estimator, what)


def test_rloo_by_turn_is_that_of_plain_loops():
    e = jax.tree.map(lambda array: array[:24], analysis.load(EXAMPLE, iteration=9).episodes)  # three tasks
    found, checked = np.asarray(rloo_by_turn(e, 0.9)), 0

    def after(b, t):
        return sum(0.9 ** (u - t) * float(e.rewards[b, u]) for u in range(t, int(e.mask[b].sum())))

    for b, t in zip(*np.nonzero(e.mask), strict=True):
        others = [c for c in np.flatnonzero(e.groups == e.groups[b]) if c != b]
        wanted = after(b, t) - np.mean([after(c, t) for c in others])
        assert found[b, t] == pytest.approx(wanted, abs=1e-5)
        checked += abs(wanted) > 0.1
    assert checked > 10 and not found[~e.mask].any()


def test_rloo_by_turn_is_unbiased():
    """Two steps of two actions, the second action of the first step ends the episode; groups of two, all cases enumerated."""
    gamma, chance = 0.9, np.array([[0.3, 0.7], [0.6, 0.4]])  # of the actions of each step
    cases = {  # actions -> (their probability, rewards, how many steps)
        (0, 0): (0.18, (0.5, 2.0), 2), (0, 1): (0.12, (0.5, -1.0), 2), (1, 0): (0.7, (1.0, 0.0), 1),
    }  # fmt: skip
    later = {a: cases[0, a][1][1] for a in range(2)}
    true_values = {
        (0, 0): 0.5 + gamma * (0.6 * later[0] + 0.4 * later[1]), (0, 1): 1.0, (1, 0): later[0], (1, 1): later[1],
    }  # fmt: skip

    def score(t, action):  # the gradient of log softmax by its logits
        return np.eye(2)[action] - chance[t]

    reached = (1.0, 0.3)
    wanted = np.array([
        sum(reached[t] * chance[t, a] * true_values[t, a] * score(t, a) for a in range(2)) for t in range(2)
    ])  # fmt: skip
    found = np.zeros((2, 2))
    for one, other in itertools.product(cases, repeat=2):
        both = cases[one], cases[other]
        mask = np.arange(2) < np.array([[steps] for _, _, steps in both])
        e = types.SimpleNamespace(
            rewards=np.array([rewards for _, rewards, _ in both], np.float32), mask=mask, groups=np.zeros(2, int)
        )
        advantages = np.asarray(rloo_by_turn(e, gamma))
        for t in range(both[0][2]):
            found[t] += both[0][0] * both[1][0] * advantages[0, t] * score(t, one[t])
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert np.abs(wanted).min() > 0.01


def test_roles_with_weights_of_their_own_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(gradients, "restored", lambda *_: (types.SimpleNamespace(sets={"a": None}), None, None))
    with pytest.raises(ConfigError, match="its roles have weights of their own"):
        gradients.measure("near/hgpo/s0", tmp_path, 0, batches=8)


def test_the_gradient_is_that_of_mean_log_probabilities_weighted_by_advantages():
    mesh = make_mesh("data=1", jax.devices()[:1])
    with jax.set_mesh(mesh):
        # What the penalties of the loss would add is left out.
        job = build(load(None, [*TINY, "env.max_turns=2", "learner.kl_weight=0.5", "learner.entropy_weight=0.5"]), mesh)
        params = job.given_params
        tasks, *inputs = job.episode_inputs(0)
        e = jax.device_get(job.runner.rollout(job.compute_copy(params), tasks, *inputs).episodes)
        e = e.replace(mask=e.mask & (np.arange(2) < 1 + np.arange(len(e.mask))[:, None] % 2))  # some end early
        advantages = np.where(e.mask, np.random.default_rng(0).normal(size=e.mask.shape), 0).astype(np.float32)
        found = make_gradient(job)(params, job.reference_copy(params), e, jnp.asarray(advantages))
        batch, logprobs = training_batch(e), make_logprobs(job.adapted, job.config.rollout.temperature)

        def loss(params):
            tokens = batch.response_mask() & e.mask.reshape(-1)[:, None]
            weighted = logprobs(params, None, batch)[0] * advantages.reshape(-1)[:, None]
            return -jnp.where(tokens, weighted, 0).sum() / tokens.sum()

        wanted = jnp.concatenate([g.ravel() for g in jax.tree.leaves(jax.jit(jax.grad(loss))(params))])
    np.testing.assert_allclose(found, wanted, atol=1e-5 * float(jnp.abs(wanted).max()))
    assert float(jnp.abs(wanted).max()) > 1e-4
