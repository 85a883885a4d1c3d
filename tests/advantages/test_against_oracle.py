"""Every estimator against its definition in float64, on crowded random batches, and bounded on ordinary ones."""

import inspect

import numpy as np
import numpy_oracle
import pytest
from batches import GAMMA, PENALTY, T, batches, dense, further_arrays, ordinary
from hypothesis import given, settings
from numpy_steps import Steps

from hgpo_jax.advantages import ESTIMATORS, estimate, parameters

# Every option has a case with another value than its default; those are compared by themselves.
EXACT = [
    ("hgpo", {}),
    ("hgpo", {"normalize": "mean", "history_length": 6, "weight_offset": 1}),
    ("hgpo", {"normalize": "mean", "base_group": True, "alpha": 2.0}),
    ("grpo", {}),
    ("grpo", {"statistics": "per_trajectory"}),
    ("gigpo", {}),
    ("gigpo", {"statistics": "per_trajectory", "normalize": "mean", "step_weight": 0.5}),
    ("rloo", {"statistics": "per_trajectory"}),
    ("reinforce_pp", {}),
    ("reinforce_pp_baseline", {"statistics": "per_trajectory"}),
    ("dr_mas", {"statistics": "per_trajectory", "normalize": "mean"}),
    # Weights with which no streams of pairs cancel: what is left then is rounding, which whitening would enlarge.
    ("gdpo", {"statistics": "per_trajectory", "signal_weights": (1.3, -0.4)}),
    ("gdpo", {"signal_weights": (0.5, -2.0)}),
    ("himac", {"normalize": "mean"}),
    ("eb_gae", {"history_length": 3, "lam": 0.0}),
    ("eb_td", {}),
    ("crbc", {"statistics": "per_trajectory"}),
    ("crbc", {"normalize": "mean", "step_weight": 0.5}),
    ("ecpo", {"statistics": "per_trajectory"}),
    ("ecpo", {"normalize": "mean", "prior_count": 0.5, "gate_count": 1.5, "step_weight": 3.0}),
    ("graphgpo", {"statistics": "per_trajectory", "step_weight": 0.5}),
    ("g2po", {"statistics": "per_trajectory", "step_weight": 0.5}),
    ("milegpo", {"residual": 1.0, "coverage": 0.5, "shrink": 0.5, "branch_alone": True}),
    ("pgpo", {}),
]
# Compared like these, but in the slow tests: each takes a second to compile.
LATER = [
    ("adora", {}),
    ("adora", {"length_limit": 8}),
    ("beacon", {"normalize": "mean_std", "step_weight": 0.5}),
    ("dvao", {"signal_weights": (1.3, -0.4)}),
    ("g2po", {"normalize": "mean"}),
    ("g2rpo", {}),
    ("milegpo", {"statistics": "per_trajectory"}),
    ("gbpo", {"statistics": "per_trajectory"}),
    ("hapo", {"statistics": "per_trajectory"}),
    ("hbpo", {}),
]
# Differences of means are rounded, and two that happen to be equal in theory may round apart and then be divided by a
# standard deviation of nearly nothing; continuous rewards have no such coincidences.
CONTINUOUS = [
    ("gae", {"lam": 0.5}),
    ("gae", {"whiten": False, "lam": 0.5}),
    ("gagpo", {"lam": 0.7}),
    ("himac", {"statistics": "per_trajectory"}),
    ("pgpo", {"normalize": "mean"}),
    ("hiper", {"lam": 0.6}),
    ("hiper", {"whiten": False, "lam": 1.0}),
]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in LATER]
# Comparisons of episodes, of states, of contexts and of actions, for teams whose roles are told apart.
BY_ROLE = [
    ("crbc", {}),
    ("ecpo", {}),
    ("eb_td", {}),
    ("gagpo", {"lam": 0.7}),
    ("gdpo", {}),
    ("g2po", {}),
    ("gigpo", {}),
    ("graphgpo", {}),
    ("grpo", {}),
    ("hgpo", {"normalize": "mean", "base_group": True}),
    ("pgpo", {}),
    ("reinforce_pp", {}),
    ("reinforce_pp_baseline", {}),
    ("rloo", {"statistics": "per_trajectory"}),
]
RETURNS = {"hgpo", "gigpo", "ecpo", "eb_gae", "eb_td", "gagpo", "pgpo", "reinforce_pp"}  # what these compare


def run(name, options, batch):
    """The record, the oracle's result, and the further arrays that both were given."""
    arrays, known = parameters(name)
    options = {**options, **{k: v for k, v in {"gamma": GAMMA, "invalid_penalty": PENALTY}.items() if k in known}}
    further = further_arrays(batch, arrays)
    record = estimate(name, **batch, **further, **options)
    return record, getattr(numpy_oracle, name)(Steps(**batch), **further, **options), further


def close(found, expected, rtol=2e-4, atol=2e-5):
    np.testing.assert_allclose(found, dense(expected), rtol=rtol, atol=atol)


def compare(name, options, batch):
    record, expected, further = run(name, options, batch)
    if name == "hiper":
        for part, (advantages, targets) in enumerate(expected):
            close(record.part_advantages[..., part], advantages)
            close(record.part_returns[..., part], targets)
        expected = expected[2][0]
        begins = batch["mask"] & (further["switches"] | (np.arange(T) == 0))
        assert float(record.stats["switch_rate"]) == pytest.approx(begins.sum() / max(batch["mask"].sum(), 1))
    close(record.advantages, expected)
    assert not np.asarray(record.returns)[~batch["mask"]].any()
    if name in RETURNS and not np.mod(batch["rewards"][batch["mask"]], 1).any():
        # The penalty is only where it fell: it is no part of the returns before.
        np.testing.assert_array_equal(record.returns, dense(Steps(**batch).returns(GAMMA, PENALTY)))
    if record.levels:
        weighted = np.sum(np.asarray(record.level_weights) * np.asarray(record.level_advantages), -1)
        assert record.level_sizes.shape == (*weighted.shape, len(record.levels))
        if name not in ("eb_gae", "pgpo"):  # there the levels make up the value, or are only a part
            np.testing.assert_allclose(weighted, record.advantages, rtol=1e-5, atol=1e-5)
    if name == "eb_gae":
        compare_shrinkage(record, batch)
    if name == "gbpo":
        close(record.margins, numpy_oracle.gbpo_margins(Steps(**batch), **options, invalid_penalty=PENALTY))


def compare_shrinkage(record, batch):
    data, history_length = Steps(**batch), record.levels[-1]
    returns = data.returns(GAMMA)
    value, tau2, s2 = numpy_oracle.eb_shrink(data, returns, history_length)
    np.testing.assert_allclose(record.stats["tau2"], tau2, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(record.stats["s2"], s2, rtol=1e-4, atol=1e-5)
    if s2[-1] > 0:
        np.testing.assert_allclose(record.stats["rho"], sum(tau2[1:]) / s2[-1], rtol=1e-3, atol=1e-4)
    # The levels' shares make up the value: R - V.
    shrunk = np.sum(np.asarray(record.level_weights) * np.asarray(record.level_advantages), -1)
    close(shrunk, {s: returns[s] - value[s] for s in value}, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "options"), EXACT + SLOW)
@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_exact_returns(name, options, batch):
    compare(name, options, batch)


@pytest.mark.parametrize(("name", "options"), CONTINUOUS)
@settings(max_examples=20, deadline=None)
@given(batch=batches(continuous=True))
def test_continuous_rewards(name, options, batch):
    compare(name, options, batch)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), BY_ROLE)
@settings(max_examples=10, deadline=None)
@given(batch=batches(continuous=True))
def test_roles_are_told_apart(name, options, batch):
    compare(name, options, batch | {"by_role": further_arrays(batch, ["agents"])["agents"]})


def test_every_estimator_is_compared_and_every_option_has_the_oracles_default():
    assert {name for name, _ in EXACT + CONTINUOUS + LATER} == set(ESTIMATORS)
    for name in ESTIMATORS:
        arrays, options = parameters(name)
        twin = list(inspect.signature(getattr(numpy_oracle, name)).parameters.values())[1:]
        defaults = {p.name: p.default for p in twin if p.default not in (p.empty, None)}
        assert defaults == {option: value for option, value in options.items() if value is not None}
        assert set(arrays) == {p.name for p in twin if p.default is p.empty}


@pytest.mark.parametrize(("name", "options"), EXACT + CONTINUOUS + SLOW)
@settings(max_examples=20, deadline=None)
@given(batch=ordinary())
def test_advantages_stay_below_100(name, options, batch):
    """No estimator blows up what is nearly nothing: returns from 0 to 10, and penalties of a quarter."""
    arrays, known = parameters(name)
    further = further_arrays(batch, arrays)
    if "values" in further:
        further["values"] = np.clip(further["values"] * 3 + 5, 0, 10).astype(np.float32)
    options = {**options, **{k: v for k, v in {"gamma": GAMMA, "invalid_penalty": PENALTY}.items() if k in known}}
    found = np.abs(estimate(name, **batch, **further, **options).advantages)
    assert np.isfinite(found).all() and found.max() < 100


@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_groups_are_nested(batch):
    options = {"normalize": "mean", "history_length": 6, "weight_offset": 1, "gamma": GAMMA, "invalid_penalty": PENALTY}
    sizes = np.asarray(estimate("hgpo", **batch, **options).level_sizes)
    assert (np.diff(sizes, axis=-1) <= 0).all()
    for level in range(7):
        has_level = batch["mask"] & (np.arange(T) >= level)
        assert ((sizes[..., level] > 0) == has_level).all()
        # A group of n members is seen n times.
        numbers, seen = np.unique(sizes[..., level][has_level], return_counts=True)
        assert not (seen % numbers).any()


@settings(max_examples=5, deadline=None)
@given(batch=batches(continuous=True))
def test_the_value_target_is_not_whitened(batch):
    learned = further_arrays(batch, ["values", "final_values"])
    values, options = learned["values"], {**learned, "lam": 0.5, "gamma": GAMMA, "invalid_penalty": PENALTY}
    plain, whitened = (estimate("gae", **batch, **options, whiten=whiten) for whiten in (False, True))
    np.testing.assert_allclose(whitened.returns, np.where(batch["mask"], plain.advantages + values, 0), atol=1e-5)
    np.testing.assert_array_equal(whitened.returns, plain.returns)
