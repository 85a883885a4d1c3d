"""Losses against plain NumPy in float64, their gradients, and the exactness of micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax import losses

N, R = 6, 5
RNG = np.random.default_rng(0)
LENGTHS = np.array([5, 1, 3, 0, 4, 2])
MASK = np.arange(R) < LENGTHS[:, None]
OLD = (-2 * RNG.random((N, R))).astype(np.float32)
# Wide enough that every clip is met; the dual clip by the only token of row 1.
NEW = (OLD + RNG.normal(0, 0.8, (N, R))).astype(np.float32)
NEW[1, 0] = OLD[1, 0] + 1.5
ADVANTAGES = np.array([1.5, -2.0, 0.0, 3.0, -0.5, 1.0], np.float32)


def surrogate(ratio, advantage, low, high, dual):
    """PPO's clipped loss of one token, as its cases read."""
    loss = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return min(loss, -dual * advantage) if advantage < 0 and dual is not None else loss


def token_losses(low=0.2, high=0.2, dual=3.0):
    table = np.zeros((N, R))
    for i in range(N):
        for j in range(LENGTHS[i]):
            ratio = np.exp(float(NEW[i, j]) - float(OLD[i, j]))
            table[i, j] = surrogate(ratio, float(ADVANTAGES[i]), low, high, dual)
    return table


def aggregated(table, aggregate):
    rows = [table[i, : LENGTHS[i]] for i in range(N) if LENGTHS[i]]
    return {
        "token-mean": np.concatenate(rows).mean(),
        "seq-mean-token-sum": np.mean([row.sum() for row in rows]),
        "seq-mean-token-mean": np.mean([row.mean() for row in rows]),
        "seq-mean-token-sum-norm": np.mean([row.sum() / R for row in rows]),
    }[aggregate]


@pytest.mark.parametrize("aggregate", losses.AGGREGATES)
def test_policy_loss(aggregate):
    loss, stats = losses.policy_loss(NEW, OLD, ADVANTAGES, MASK, aggregate=aggregate)
    np.testing.assert_allclose(loss, aggregated(token_losses(), aggregate), rtol=1e-5)
    np.testing.assert_allclose(stats["loss"][0] / stats["loss"][1], loss, rtol=1e-6)


@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, 0.28, 3.0), (0.1, 0.2, None), (0.2, 0.2, 1.3)])
def test_clips(low, high, dual):
    options = {"clip_low": low, "clip_high": high, "dual_clip": dual}
    loss, stats = losses.policy_loss(NEW, OLD, ADVANTAGES, MASK, **options)
    np.testing.assert_allclose(loss, aggregated(token_losses(low, high, dual), "token-mean"), rtol=1e-5)
    ratio, advantage = np.exp(NEW - OLD)[MASK], np.broadcast_to(ADVANTAGES[:, None], (N, R))[MASK]
    counts = {
        "clip_fraction_low": ((advantage < 0) & (ratio < 1 - low)).sum(),
        "clip_fraction_high": ((advantage > 0) & (ratio > 1 + high)).sum(),
    }
    if dual is not None:
        counts["clip_fraction_dual"] = ((advantage < 0) & (ratio > dual)).sum()
    for name, count in counts.items():
        assert stats[name] == (count, MASK.sum())
        assert count > 0
    assert ("clip_fraction_dual" in stats) == (dual is not None)


def test_advantages_by_token_and_by_response_agree():
    by_token = np.broadcast_to(ADVANTAGES[:, None], (N, R))
    expected, _ = losses.policy_loss(NEW, OLD, ADVANTAGES, MASK)
    np.testing.assert_array_equal(losses.policy_loss(NEW, OLD, by_token, MASK)[0], expected)


def test_gradient_is_reinforce_where_nothing_is_clipped_and_zero_where_it_is():
    gradient = jax.grad(lambda new: losses.policy_loss(new, OLD, ADVANTAGES, MASK, dual_clip=None)[0])
    np.testing.assert_allclose(gradient(OLD), np.where(MASK, -ADVANTAGES[:, None], 0) / MASK.sum(), rtol=1e-6)
    moved = gradient(jnp.asarray(NEW))
    ratio = np.exp(NEW - OLD)
    clipped = ((ratio > 1.2) & (ADVANTAGES[:, None] > 0)) | ((ratio < 0.8) & (ADVANTAGES[:, None] < 0)) | ~MASK
    assert not np.asarray(moved)[clipped].any()
    expected = np.where(clipped, 0, -ADVANTAGES[:, None] * ratio / MASK.sum())
    np.testing.assert_allclose(moved, expected, rtol=1e-5)


LOSSES = {
    **{
        f"policy {a}": lambda s, a=a: losses.policy_loss(NEW[s], OLD[s], ADVANTAGES[s], MASK[s], aggregate=a)
        for a in losses.AGGREGATES
    },
    "gspo": lambda s: losses.gspo_loss(NEW[s], OLD[s], ADVANTAGES[s], MASK[s]),
    "kpo": lambda s: losses.kpo_loss(NEW[s], OLD[s], ADVANTAGES[s], MASK[s]),
    "kl": lambda s: losses.kl_loss(NEW[s], OLD[s], MASK[s]),
    "value": lambda s: losses.value_loss(NEW[s], OLD[s], OLD[s] + 1, MASK[s]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up(name):
    whole_loss, whole = LOSSES[name](slice(None))
    # Unequal parts, one of them without a single token.
    parts = [LOSSES[name](part)[1] for part in (slice(0, 1), slice(1, 3), slice(3, 4), slice(4, None))]
    summed = jax.tree.map(lambda *x: sum(x), *parts)
    for key, (numerator, denominator) in whole.items():
        np.testing.assert_allclose(summed[key], (numerator, denominator), rtol=1e-5)
    np.testing.assert_allclose(summed["loss"][0] / summed["loss"][1], whole_loss, rtol=1e-5)


@pytest.mark.parametrize("name", ["policy token-mean", "gspo", "kpo", "kl", "value"])
def test_what_padding_holds_does_not_matter(name):
    function = {
        "policy token-mean": lambda new, old: losses.policy_loss(new, old, ADVANTAGES, MASK),
        "gspo": lambda new, old: losses.gspo_loss(new, old, ADVANTAGES, MASK),
        "kpo": lambda new, old: losses.kpo_loss(new, old, ADVANTAGES, MASK),
        "kl": lambda new, old: losses.kl_loss(new, old, MASK),
        "value": lambda new, old: losses.value_loss(new, old, OLD, MASK),
    }[name]
    clean = jax.value_and_grad(function, has_aux=True)(jnp.asarray(NEW), OLD)
    for bad in (np.nan, -np.inf):
        new, old = np.where(MASK, NEW, bad), np.where(MASK, OLD, 0)
        jax.tree.map(np.testing.assert_array_equal, jax.value_and_grad(function, has_aux=True)(new, old), clean)


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_without_tokens_costs_nothing(name):
    loss, stats = LOSSES[name](slice(3, 4))
    assert loss == 0
    assert all(part == (0, 0) for part in stats.values())


def test_gspo_clips_whole_responses():
    low, high = 0.1, 0.3
    loss, stats = losses.gspo_loss(NEW, OLD, ADVANTAGES, MASK, clip_low=low, clip_high=high)
    rows = [i for i in range(N) if LENGTHS[i]]
    ratios = [np.exp(np.mean((NEW - OLD)[i, : LENGTHS[i]].astype(float))) for i in rows]
    expected = [surrogate(r, float(ADVANTAGES[i]), low, high, None) for i, r in zip(rows, ratios, strict=True)]
    np.testing.assert_allclose(loss, np.mean(expected), rtol=1e-5)
    assert stats["clip_fraction_low"][1] == len(rows)
    gradient = jax.grad(lambda new: losses.gspo_loss(new, OLD, ADVANTAGES, MASK)[0])(jnp.asarray(OLD))
    by_length = np.where(MASK, -ADVANTAGES[:, None] / np.maximum(LENGTHS, 1)[:, None], 0) / len(rows)
    np.testing.assert_allclose(gradient, by_length, rtol=1e-5)


def test_gspo_clips_as_its_paper_does():
    """3e-4 below and 4e-4 above 1, a quarter of a percent of what PPO allows."""
    log_ratios, advantages = np.float32([[3.8e-4], [4.2e-4], [-2.8e-4], [-3.2e-4]]), np.float32([1, 1, -1, -1])
    _, stats = losses.gspo_loss(log_ratios, np.zeros((4, 1), np.float32), advantages, np.ones((4, 1), bool))
    assert (stats["clip_fraction_high"], stats["clip_fraction_low"]) == ((1, 4), (1, 4))


@pytest.mark.parametrize("name", ["policy", "no dual clip", "gspo", "kpo", "kl"])
def test_ratios_beyond_float32_leave_loss_and_gradient_finite(name):
    """exp(200) overflows, and a gradient through it is 0 times infinity where the loss is clipped."""
    function = {
        "policy": lambda new: losses.policy_loss(new, OLD, ADVANTAGES, MASK),
        "no dual clip": lambda new: losses.policy_loss(new, OLD, ADVANTAGES, MASK, dual_clip=None),
        "gspo": lambda new: losses.gspo_loss(new, OLD, ADVANTAGES, MASK),
        "kpo": lambda new: losses.kpo_loss(new, OLD, ADVANTAGES, MASK),
        "kl": lambda new: losses.kl_loss(new, OLD, MASK),
    }[name]
    for away in (200.0, -200.0):
        (loss, stats), gradient = jax.value_and_grad(function, has_aux=True)(jnp.asarray(OLD + np.float32(away)))
        assert np.isfinite(jnp.stack([loss, *jax.tree.leaves(stats)])).all(), stats
        assert np.isfinite(gradient).all()


def test_kl_kinds():
    d = OLD.astype(float) - NEW
    expected = {"k1": -d, "k2": d**2 / 2, "k3": np.minimum(np.exp(d) - d - 1, 10), "abs": abs(d)}
    for kind in losses.KL_KINDS:
        np.testing.assert_allclose(losses.kl(NEW, OLD, kind), expected[kind], rtol=1e-4, atol=1e-6)
        loss, stats = losses.kl_loss(NEW, OLD, MASK, kind=kind, aggregate="seq-mean-token-mean")
        np.testing.assert_allclose(loss, aggregated(expected[kind], "seq-mean-token-mean"), rtol=1e-5)
        np.testing.assert_allclose(stats["kl"][0] / stats["kl"][1], expected[kind][MASK].mean(), rtol=1e-5)
    assert losses.kl(jnp.array([-60.0]), jnp.array([0.0]))[0] == 10


def test_low_variance_kl_keeps_its_digits_near_zero():
    # exp(d) - d - 1 is 0 or noise in float32 here; the exact value is d^2 / 2.
    np.testing.assert_allclose(losses.kl(np.float32([-1.0]), np.float32([-1.0 + 2**-14])), [2**-29], rtol=1e-2)


def test_approximate_kl():
    _, stats = losses.policy_loss(NEW, OLD, ADVANTAGES, MASK)
    z = (NEW - OLD).astype(float)[MASK]
    np.testing.assert_allclose(stats["approx_kl"][0] / stats["approx_kl"][1], np.mean(np.exp(z) - 1 - z), rtol=1e-5)
    np.testing.assert_allclose(stats["ratio"][0] / stats["ratio"][1], np.mean(np.exp(z)), rtol=1e-5)


def test_value_loss():
    values, old, returns = NEW, OLD, (OLD + RNG.normal(size=(N, R))).astype(np.float32)
    loss, stats = losses.value_loss(values, old, returns, MASK, clip=0.5)
    table, clipped = np.zeros((N, R)), 0
    for i in range(N):
        for j in range(LENGTHS[i]):
            near = min(max(values[i, j], old[i, j] - 0.5), old[i, j] + 0.5)
            plain, bounded = (values[i, j] - returns[i, j]) ** 2, (near - returns[i, j]) ** 2
            table[i, j] = max(plain, bounded) / 2
            clipped += bounded > plain
    np.testing.assert_allclose(loss, aggregated(table, "token-mean"), rtol=1e-5)
    assert stats["value_clip_fraction"] == (clipped, MASK.sum())
    assert clipped > 0
    # One value per step serves as well.
    by_step, _ = losses.value_loss(values[:, 0], old[:, 0], returns[:, 0], MASK[:, 0], clip=0.5)
    np.testing.assert_allclose(by_step, table[MASK[:, 0], 0].mean(), rtol=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rollout_correction(level):
    """Weights and statistics, one token or response at a time."""
    weights, stats = losses.rollout_correction(NEW, OLD, MASK, level=level, cap=1.5)
    difference = NEW.astype(np.float64) - OLD
    ratios = []
    for i in range(N):
        row = np.exp(difference[i, : LENGTHS[i]])
        ratios += [row.prod()] if level == "sequence" and LENGTHS[i] else [] if level == "sequence" else list(row)
        expected = np.minimum(row.prod() if level == "sequence" else row, 1.5)
        np.testing.assert_allclose(weights[i, : LENGTHS[i]], np.broadcast_to(expected, LENGTHS[i]), rtol=1e-5)
        np.testing.assert_array_equal(np.unique(weights[i, LENGTHS[i] :]), weights[i, -1] if LENGTHS[i] < R else [])
    bounded = np.minimum(ratios, 1.5)
    assert 0 < (bounded == 1.5).mean() < 1
    kl = np.mean([np.expm1(d) - d for d in difference[MASK]])
    expected = {
        "weight": bounded.mean(), "truncated": (bounded == 1.5).mean(),
        "effective": bounded.mean() ** 2 / (bounded**2).mean(), "kl": kl,
    }  # fmt: skip
    assert {name: float(value) for name, value in stats.items()} == pytest.approx(expected, rel=1e-5)


def test_rollout_correction_of_the_sampler_itself_is_none():
    for level in ("token", "sequence"):
        weights, stats = losses.rollout_correction(OLD, OLD, MASK, level=level)
        np.testing.assert_array_equal(weights, 1.0)
        assert {name: float(value) for name, value in stats.items()} == {"weight": 1, "truncated": 0, "effective": 1, "kl": 0}


def test_corrected_samples_of_another_policy_give_the_policys_own_gradient():
    """Every token of a vocabulary, as often as the sampler q draws it: the gradient is that of what p draws."""
    rng = np.random.default_rng(4)
    p, q = (jnp.asarray(rng.normal(size=7), jnp.float32) for _ in range(2))
    A, mask = jnp.asarray(rng.normal(size=7), jnp.float32), np.ones((7, 1), bool)

    def gradient(sampler, cap):
        old, sampled = jax.nn.log_softmax(p)[:, None], jax.nn.log_softmax(sampler)[:, None]
        weights, _ = losses.rollout_correction(old, sampled, mask, level="token", cap=cap)

        def loss(logits):
            new = jax.nn.log_softmax(logits)[:, None]
            each = [losses.policy_loss(*(a[i : i + 1] for a in (new, old, A[:, None] * weights, mask)))[0] for i in range(7)]
            return (jnp.stack(each) * jnp.exp(sampled[:, 0])).sum()

        return jax.grad(loss)(p)

    own = gradient(p, 1e6)
    assert np.abs(own).max() > 0.05
    np.testing.assert_allclose(gradient(q, 1e6), own, atol=1e-6)
    np.testing.assert_allclose(gradient(p, 1.0), own, atol=1e-6)
    assert np.abs(gradient(q, 1.0) - own).max() > 0.01  # a cap has its price


@pytest.mark.parametrize("name", ["token", "sequence"])
def test_rollout_correction_is_finite_where_probabilities_vanish(name):
    weights, stats = losses.rollout_correction(OLD, np.full_like(OLD, -1e4), MASK, level=name)
    assert np.isfinite(weights).all() and all(np.isfinite(value) for value in stats.values())
    weights, _ = losses.rollout_correction(np.full_like(OLD, -np.inf), OLD, np.zeros_like(MASK), level=name)
    np.testing.assert_array_equal(weights, 1.0)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="level='word': give token or sequence"):
        losses.rollout_correction(NEW, OLD, MASK, level="word")
    with pytest.raises(ValueError, match="aggregate='mean': give one of token-mean"):
        losses.policy_loss(NEW, OLD, ADVANTAGES, MASK, aggregate="mean")
    with pytest.raises(ValueError, match="kind='k4': give one of k1"):
        losses.kl(NEW, OLD, kind="k4")
