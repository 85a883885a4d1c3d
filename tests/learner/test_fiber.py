"""FiberPO against its paper's equations, one token at a time, and the numbers that these give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.learner import losses
from hgpo_jax.learner.fiber import fiber_loss, rollback
from tests.learner.test_losses import ADVANTAGES, LENGTHS, MASK, NEW, OLD, N

WORKED = [
    ((0.10, -0.04, 0.02), (1.083287, 0.960789, 1.020201)),
    ((0.30, -0.02, 0.14), (1.083287, 0.980199, 1.033895)),
    ((0.42, 0.06, -0.06), (1.040811, 0.960789, 0.904837)),
]


def g(x, budget, tokens):
    if abs(x) <= budget:
        return x
    return np.sign(x) * (tokens + 1) * budget - tokens * x if abs(x) < (1 + 1 / tokens) * budget else 0.0


def gated(z, up=0.12, down=0.05, clip=0.04):
    """The gated ratio of every token of one response."""
    tokens = len(z)
    rise, fall = (sum(max(side * x, 0) for x in z) / tokens for side in (1, -1))
    base = g(rise, up, tokens) - g(fall, down, tokens)
    bound = lambda x: min(max(x, -clip), clip)  # noqa: E731
    return [np.exp(base + (bound(x - rise) - bound(-fall) if x >= 0 else bound(x + fall) - bound(rise))) for x in z]


def ratios(z, **options):
    """What the loss itself multiplies each advantage of one response by."""
    z = np.float32([z])
    one = jnp.eye(z.shape[1])  # the advantage of one token at a time
    loss = jax.vmap(lambda advantages: fiber_loss(z, 0 * z, advantages[None], z == z, **options)[0])
    return -loss(one) * z.shape[1]


@pytest.mark.slow
@pytest.mark.parametrize(("z", "expected"), WORKED)
def test_worked_numbers(z, expected):
    np.testing.assert_allclose(gated(z), expected, atol=1e-6)
    np.testing.assert_allclose(ratios(z), expected, rtol=1e-5)


@pytest.mark.parametrize(("x", "expected"), [(0.10, 0.10), (0.12, 0.12), (0.14, 0.06), (0.16, 0), (-0.14, -0.06), (0.5, 0)])
def test_the_rollback_falls_to_zero_beyond_its_budget(x, expected):
    np.testing.assert_allclose(rollback(jnp.float32(x), 0.12, 3), expected, atol=1e-6)
    np.testing.assert_allclose(g(x, 0.12, 3), expected, atol=1e-12)


@pytest.mark.parametrize("shrink", [1.0, pytest.param(0.05, marks=pytest.mark.slow)])
def test_loss_is_the_papers(shrink):
    new = np.float32(OLD + shrink * (NEW - OLD))
    loss, stats = fiber_loss(new, OLD, ADVANTAGES, MASK)
    rows = [i for i in range(N) if LENGTHS[i]]
    z = [(new[i, : LENGTHS[i]].astype(float) - OLD[i, : LENGTHS[i]]).tolist() for i in rows]
    expected = np.mean([-ADVANTAGES[i] * np.mean(gated(row)) for i, row in zip(rows, z, strict=True)])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    beyond = [np.mean(np.maximum(row, 0)) > 0.12 or np.mean(np.maximum(np.negative(row), 0)) > 0.05 for row in z]
    assert stats["fiber_rollback"] == (sum(beyond), len(rows))


@pytest.mark.slow
def test_the_gradient_is_the_plain_ratios_where_nothing_is_clipped():
    """Exactly at the old policy, and near it."""
    for away in (0.0, 0.02):
        new = jnp.asarray(OLD + away * np.tanh(NEW - OLD), jnp.float32)
        gradient = jax.grad(lambda new: fiber_loss(new, OLD, ADVANTAGES, MASK)[0])(new)
        plain = jax.grad(lambda new: losses.policy_loss(new, OLD, ADVANTAGES, MASK, aggregate="seq-mean-token-mean")[0])(new)
        np.testing.assert_allclose(gradient, plain, rtol=1e-4, atol=1e-7)
