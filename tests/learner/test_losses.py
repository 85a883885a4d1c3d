"""Losses against plain NumPy in float64, their gradients, and the exactness of micro-batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.learner import losses
from hgpo_jax.learner.fiber import fiber_loss

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
    by_token = np.broadcast_to(ADVANTAGES[:, None], (N, R))
    np.testing.assert_array_equal(losses.policy_loss(NEW, OLD, by_token, MASK, aggregate=aggregate)[0], loss)


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
    z = (NEW - OLD).astype(float)[MASK]
    np.testing.assert_allclose(stats["approx_kl"][0] / stats["approx_kl"][1], np.mean(np.exp(z) - 1 - z), rtol=1e-5)
    np.testing.assert_allclose(stats["ratio"][0] / stats["ratio"][1], np.mean(np.exp(z)), rtol=1e-5)


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
        f"policy {a}": lambda new, old, mask, a=a: losses.policy_loss(new, old, ADVANTAGES, mask, aggregate=a)
        for a in losses.AGGREGATES
    },
    "no dual clip": lambda new, old, mask: losses.policy_loss(new, old, ADVANTAGES, mask, dual_clip=None),
    "gspo": lambda new, old, mask: losses.gspo_loss(new, old, ADVANTAGES, mask),
    "kpo": lambda new, old, mask: losses.kpo_loss(new, old, ADVANTAGES, mask),
    "fiber": lambda new, old, mask: fiber_loss(new, old, ADVANTAGES, mask),
    "kl": lambda new, old, mask: losses.kl_loss(new, old, mask),
    "value": lambda new, old, mask: losses.value_loss(new, old, OLD + 1, mask),
}


@pytest.mark.parametrize("name", LOSSES)
def test_sums_over_parts_padding_and_ratios_beyond_float32(name):
    compute = jax.jit(jax.value_and_grad(LOSSES[name], has_aux=True))
    (whole_loss, whole), gradient = compute(NEW, OLD, MASK)
    # Micro-batches of unequal size add up, one of them without a single token, which costs nothing.
    rows = np.arange(N)[:, None]
    parts = [compute(NEW, OLD, MASK & (first <= rows) & (rows < stop))[0] for first, stop in ((0, 1), (1, 3), (3, 4), (4, N))]
    summed = jax.tree.map(lambda *x: sum(x), *(stats for _, stats in parts))
    for key, (numerator, denominator) in whole.items():
        np.testing.assert_allclose(summed[key], (numerator, denominator), rtol=1e-5)
    np.testing.assert_allclose(summed["loss"][0] / summed["loss"][1], whole_loss, rtol=1e-5)
    assert parts[2][0] == 0 and all(part == (0, 0) for part in parts[2][1].values())
    # What padding holds does not matter.
    for bad in (np.nan, -np.inf):
        padded = compute(np.where(MASK, NEW, np.float32(bad)), np.where(MASK, OLD, 0), MASK)
        jax.tree.map(np.testing.assert_array_equal, padded, ((whole_loss, whole), gradient))
    # exp(200) overflows, and a gradient through it is 0 times infinity where the loss is clipped.
    for away in (200.0, -200.0):
        (loss, stats), gradient = compute(OLD + np.float32(away), OLD, MASK)
        assert np.isfinite(jnp.stack([loss, *jax.tree.leaves(stats)])).all(), stats
        assert np.isfinite(gradient).all()


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


@pytest.mark.parametrize("loss", [losses.gspo_loss, functools.partial(losses.kpo_loss, process_noise=1e12)])
def test_gspo_and_kpo_clip_as_their_papers_do(loss):
    """3e-4 below and 4e-4 above 1, a quarter of a percent of what PPO allows; here KPO's filter changes nothing."""
    log_ratios, advantages = np.float32([[3.8e-4], [4.2e-4], [-2.8e-4], [-3.2e-4]]), np.float32([1, 1, -1, -1])
    _, stats = loss(log_ratios, np.zeros((4, 1), np.float32), advantages, np.ones((4, 1), bool))
    assert (stats["clip_fraction_high"], stats["clip_fraction_low"]) == ((1, 4), (1, 4))


def test_kl_kinds():
    d = OLD.astype(float) - NEW
    expected = {"k1": -d, "k2": d**2 / 2, "k3": np.minimum(np.exp(d) - d - 1, 10), "abs": abs(d)}
    for kind in losses.KL_KINDS:
        np.testing.assert_allclose(losses.kl(NEW, OLD, kind), expected[kind], rtol=1e-4, atol=1e-6)
        loss, stats = losses.kl_loss(NEW, OLD, MASK, kind=kind, aggregate="seq-mean-token-mean")
        np.testing.assert_allclose(loss, aggregated(expected[kind], "seq-mean-token-mean"), rtol=1e-5)
        np.testing.assert_allclose(stats["kl"][0] / stats["kl"][1], expected[kind][MASK].mean(), rtol=1e-5)
    assert losses.kl(jnp.array([-60.0]), jnp.array([0.0]))[0] == 10
    # exp(d) - d - 1 is 0 or noise in float32 here; the exact value is d^2 / 2.
    np.testing.assert_allclose(losses.kl(np.float32([-1.0]), np.float32([-1.0 + 2**-14])), [2**-29], rtol=1e-2)


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
    # The sampler itself needs none.
    weights, stats = losses.rollout_correction(OLD, OLD, MASK, level=level)
    np.testing.assert_array_equal(weights, 1.0)
    assert {name: float(value) for name, value in stats.items()} == {"weight": 1, "truncated": 0, "effective": 1, "kl": 0}
    # Finite where probabilities vanish.
    weights, stats = losses.rollout_correction(OLD, np.full_like(OLD, -1e4), MASK, level=level)
    assert np.isfinite(weights).all() and all(np.isfinite(value) for value in stats.values())
    weights, _ = losses.rollout_correction(np.full_like(OLD, -np.inf), OLD, np.zeros_like(MASK), level=level)
    np.testing.assert_array_equal(weights, 1.0)


def test_the_mask_of_hispo():
    """The worked numbers of eq. 8 and 9, with the loss that they enter, and every token of a batch by itself."""
    sampler, before, now = np.float32([[[-1, -2, -0.5]], [[-1.05, -1.5, -0.5]], [[-1, -1.4, -0.7]]])
    mask = np.ones((1, 3), bool)
    for response_limit, kept, objective in ((0.2, [1, 0, 1], 0.227341), (0.1, [0, 0, 0], 0)):
        weights, stats = losses.mismatch_mask(before, sampler, mask, response_limit=response_limit, token_limit=0.3)
        np.testing.assert_array_equal(weights, [kept])
        assert stats["weight"] == pytest.approx(np.mean(kept))
        longest = [np.pad(x, ((0, 0), (0, 5))) for x in (now, sampler, weights, mask)]
        loss, _ = losses.policy_loss(*longest, clip_high=0.28, aggregate="seq-mean-token-sum-norm")
        np.testing.assert_allclose(-loss, objective, rtol=1e-5, atol=1e-9)
    weights, stats = losses.mismatch_mask(NEW, OLD, MASK, response_limit=0.3, token_limit=0.5)
    kept = np.zeros(MASK.shape)
    for i in range(N):
        ratios = np.exp((NEW - OLD)[i, : LENGTHS[i]].astype(float))
        for j in range(LENGTHS[i]):
            kept[i, j] = abs(ratios.prod() ** (1 / LENGTHS[i]) - 1) < 0.3 and abs(ratios[j] - 1) < 0.5
    np.testing.assert_array_equal(np.asarray(weights)[MASK], kept[MASK])
    assert 0 < kept.sum() < (abs(np.exp((NEW - OLD)[MASK]) - 1) < 0.5).sum()
    # The bound for negative advantages, "triplet clip", is that of `dual_clip`.
    ratios = np.log(np.float32([[0.5, 0.951229, 5]]))
    loss, _ = losses.policy_loss(ratios, 0 * ratios, np.float32([-1]), mask, aggregate="seq-mean-token-sum")
    np.testing.assert_allclose(loss, 0.8 + 0.951229 + 3, rtol=1e-6)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="level='word': give token or sequence"):
        losses.rollout_correction(NEW, OLD, MASK, level="word")
    with pytest.raises(ValueError, match="aggregate='mean': give one of token-mean"):
        losses.policy_loss(NEW, OLD, ADVANTAGES, MASK, aggregate="mean")
    with pytest.raises(ValueError, match="kind='k4': give one of k1"):
        losses.kl(NEW, OLD, kind="k4")


LOGITS, REFERENCE = (jnp.array(np.random.default_rng(seed).normal(size=5)) for seed in (0, 1))


def divergence(first, second):
    return jnp.sum(jnp.exp(first) * (first - second))


@pytest.mark.parametrize(("kind", "of"), [
    ("k1", lambda new, ref: divergence(new, ref)), ("k2", lambda new, ref: divergence(new, ref)),
    ("k3", lambda new, ref: divergence(ref, new)), ("abs", lambda new, ref: jnp.abs(jnp.exp(new) - jnp.exp(ref)).sum()),
])  # fmt: skip
def test_the_expected_gradient_is_that_of_the_divergence(kind, of):
    """Exactly, over a policy of five tokens."""
    both = lambda logits: (jax.nn.log_softmax(logits), jax.nn.log_softmax(REFERENCE))  # noqa: E731
    drawn = jnp.exp(jax.nn.log_softmax(LOGITS))  # tokens are drawn from the policy, and their shares have no gradient
    expected = jax.grad(lambda logits: jnp.sum(drawn * losses.kl(*both(logits), kind)))(LOGITS)
    np.testing.assert_allclose(expected, jax.grad(lambda logits: of(*both(logits)))(LOGITS), atol=1e-6)
    assert np.abs(expected).max() > 0.01


@pytest.mark.parametrize(("d", "pulls"), [(2.60, True), (2.62, False), (-10.98, True), (-11.0, False)])
def test_k3_lets_go_where_it_is_cut(d, pulls):
    assert (jax.grad(lambda new: losses.kl(new, new * 0 + d, "k3"))(0.0) != 0) == pulls
