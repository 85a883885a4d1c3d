"""GBPO and HAPO, by worked numbers and token by token in float64, and where GBPO's margins come from."""

import jax
import numpy as np
import pytest

from hgpo_jax.learner import losses
from hgpo_jax.learner.gbpo import gbpo_loss
from hgpo_jax.learner.hapo import hapo_loss, relative_entropy
from tests.learner.test_losses import ADVANTAGES, LENGTHS, MASK, NEW, OLD, N, R, surrogate

MARGINS = np.float32([1, -2, 0, 0.3, -0.4, 0])
ENTROPY = np.float32(np.random.default_rng(5).random((N, R)) * 2)
TOKENS = [(i, j) for i in range(N) for j in range(LENGTHS[i])]


@pytest.mark.parametrize(("softness", "expected"), [
    (1.0, [0.040375, 0.118339, 0.118339, 0.012777]), (1e-4, [0.130558, 0.235004, 0.235004, 0.026112]),
])  # fmt: skip
def test_gbpo_worked_numbers(softness, expected):
    """Scores (1, 0, 0, 1/2), with ratios of 1.1."""
    advantages = np.float32([1.305580, -0.783348, -0.783348, 0.261116])
    margins = np.float32([1.566696, -0.522232, -0.522232, 0.522232])
    old = np.zeros((4, 1), np.float32)
    for row in range(4):
        alone = np.arange(4)[:, None] == row
        loss, _ = gbpo_loss(old + np.log(1.1), old, advantages, alone, margins=margins, softness=softness)
        assert loss == pytest.approx(expected[row], abs=2e-6)


def test_gbpo_is_the_mean_distance_to_the_targets():
    def target(margin):
        return 1 - 0.2 + 0.5 / (1 + np.exp(-margin / 0.5))

    found, _ = gbpo_loss(NEW, OLD, ADVANTAGES, MASK, margins=MARGINS, clip_high=0.3, softness=0.5)
    ratio = np.exp(NEW.astype(float) - OLD)
    expected = np.mean([abs(ratio[i, j] - target(MARGINS[i])) * abs(ADVANTAGES[i]) for i, j in TOKENS])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_gbpo_moves_a_ratio_towards_its_target():
    """At the old policy as the plain surrogate does, where margin and advantage have one sign; a margin of 0 is there."""
    slope = jax.grad(lambda new: gbpo_loss(new, OLD, ADVANTAGES, MASK, margins=MARGINS * (ADVANTAGES != 0))[0])(OLD)
    plain = jax.grad(lambda new: losses.policy_loss(new, OLD, ADVANTAGES, MASK)[0])(OLD)
    sign = np.sign(MARGINS * ADVANTAGES)[:, None]
    np.testing.assert_allclose(slope, plain * sign, rtol=1e-5)


H = np.float32([[0.05, 0.1, 0.2, 0.8, 1.6]])
RATIOS = np.float32([[1, 1.2, 1.05, 1, 1.25]])


@pytest.mark.parametrize(("as_released", "expected"), [(False, [0, 1.2, 0.525, 1, 2.5]), (True, [1, 2.1, 1.05, 1, 2.5])])
def test_hapo_worked_numbers(as_released, expected):
    """A token's own advantage of 1 leaves its term alone in the sum."""
    np.testing.assert_allclose(relative_entropy(H, H > 0)[0], [-1, -0.75, -0.5, 0, 1], atol=1e-6)
    for token in range(5):
        advantages = np.float32([np.arange(5) == token])
        loss, _ = hapo_loss(np.log(RATIOS), 0 * H, advantages, H > 0, entropy=H, as_released=as_released)
        assert -5 * loss == pytest.approx(expected[token], abs=1e-5)


@pytest.mark.parametrize("clips", [{}, {"clip_slope": 0.5, "advantage_slope": 2.0, "clip_high": 0.3, "dual_clip": 3.0}])
def test_hapo_is_the_clipped_surrogate_of_its_clips_and_advantages(clips):
    alpha, beta = clips.get("clip_slope", 1.0), clips.get("advantage_slope", 1.0)
    logs = {token: np.log(float(ENTROPY[token])) for token in TOKENS}
    pivot = sorted(logs.values())[round(0.8 * (len(logs) - 1))]
    above, below = max(logs.values()) - pivot, pivot - min(logs.values())
    terms = []
    for i, j in TOKENS:
        h = (logs[i, j] - pivot) / (above if logs[i, j] > pivot else below)
        low, high = 0.2 * (1 - alpha * min(h, 0)), clips.get("clip_high", 0.2) * (1 + alpha * max(h, 0))
        ratio = np.exp(float(NEW[i, j]) - float(OLD[i, j]))
        inside = 1 - low / 2 < ratio < 1 + high / 2
        shaped = float(ADVANTAGES[i]) * (1 + beta * h if inside == (h <= 0) else 1)
        terms.append(surrogate(ratio, shaped, low, high, clips.get("dual_clip", 10)))
    entropy = np.where(MASK, ENTROPY, 9)
    np.testing.assert_allclose(hapo_loss(NEW, OLD, ADVANTAGES, MASK, entropy=entropy, **clips)[0], np.mean(terms), rtol=1e-5)


def test_hapo_without_slopes_is_the_clipped_surrogate():
    options = {"clip_slope": 0.0, "advantage_slope": 0.0, "dual_clip": 3.0}
    loss, _ = hapo_loss(NEW, OLD, ADVANTAGES, MASK, entropy=ENTROPY, **options)
    np.testing.assert_allclose(loss, losses.policy_loss(NEW, OLD, ADVANTAGES, MASK)[0], rtol=1e-6)


@pytest.mark.parametrize(("entropy", "mask"), [(0 * ENTROPY, MASK), (0 * ENTROPY + 1, MASK), (ENTROPY, MASK & False)])
def test_hapo_where_entropies_do_not_differ(entropy, mask):
    """No division by 0, nor for a micro-batch of padding; and no gradient through the entropy."""
    loss = lambda new, entropy: hapo_loss(new, OLD, ADVANTAGES, mask, entropy=entropy, dual_clip=3.0)[0]  # noqa: E731
    value, slopes = jax.value_and_grad(loss, argnums=(0, 1))(NEW, entropy)
    np.testing.assert_allclose(value, losses.policy_loss(NEW, OLD, ADVANTAGES, mask)[0], rtol=1e-6)
    assert np.isfinite(slopes[0]).all() and not slopes[1].any()
