"""Which KL each estimator's gradient is that of, in exact expectation over a policy of five tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.learner import losses

LOGITS, REFERENCE = (jnp.array(np.random.default_rng(seed).normal(size=5)) for seed in (0, 1))


def divergence(first, second):
    return jnp.sum(jnp.exp(first) * (first - second))


def log_policy(logits):
    return jax.nn.log_softmax(logits), jax.nn.log_softmax(REFERENCE)


@pytest.mark.parametrize(("kind", "of"), [
    ("k1", lambda new, ref: divergence(new, ref)), ("k2", lambda new, ref: divergence(new, ref)),
    ("k3", lambda new, ref: divergence(ref, new)), ("abs", lambda new, ref: jnp.abs(jnp.exp(new) - jnp.exp(ref)).sum()),
])  # fmt: skip
def test_the_expected_gradient_is_that_of_the_divergence(kind, of):
    drawn = jnp.exp(jax.nn.log_softmax(LOGITS))  # tokens are drawn from the policy, and their shares have no gradient
    expected = jax.grad(lambda logits: jnp.sum(drawn * losses.kl(*log_policy(logits), kind)))(LOGITS)
    np.testing.assert_allclose(expected, jax.grad(lambda logits: of(*log_policy(logits)))(LOGITS), atol=1e-6)
    assert np.abs(expected).max() > 0.01


def test_k1_keeps_its_own_value():
    new, ref = log_policy(LOGITS)
    np.testing.assert_allclose(losses.kl(new, ref, "k1"), new - ref, atol=1e-6)


@pytest.mark.parametrize(("d", "pulls"), [(2.60, True), (2.62, False), (-10.98, True), (-11.0, False)])
def test_k3_lets_go_where_it_is_cut(d, pulls):
    assert (jax.grad(lambda new: losses.kl(new, new * 0 + d, "k3"))(0.0) != 0) == pulls
