"""Every estimator against its definition in float64, on crowded random batches."""

import numpy as np
import numpy_oracle
import pytest
from batches import GAMMA, PENALTY, batches, dense, further_arrays
from hypothesis import given, settings
from hypothesis import strategies as st

from hgpo_jax.advantages import ESTIMATORS, estimate, parameters

EXACT = [
    ("hgpo", {}),
    ("hgpo", {"normalize": "mean", "history_length": 4, "weight_offset": 1}),
    ("hgpo", {"normalize": "mean", "base_group": True, "alpha": 2.0}),
    ("hgpo", {"history_length": 0}),
    ("grpo", {}),
    ("grpo", {"statistics": "per_trajectory"}),
    ("grpo", {"statistics": "per_trajectory", "normalize": "mean"}),
    ("gigpo", {}),
    ("gigpo", {"statistics": "per_trajectory", "normalize": "mean", "step_weight": 0.5}),
    ("rloo", {}),
    ("reinforce_pp", {}),
    ("reinforce_pp_baseline", {}),
    ("dr_mas", {}),
    ("dr_mas", {"statistics": "per_trajectory", "normalize": "mean"}),
    ("himac", {"normalize": "mean"}),
    ("himac", {"normalize": "mean", "statistics": "per_trajectory"}),
    ("eb_gae", {}),
    ("eb_gae", {"history_length": 4, "lam": 0.0}),
    ("eb_td", {}),
    ("ecpo", {}),
    ("ecpo", {"normalize": "mean", "prior_count": 0.5, "gate_count": 1.5, "step_weight": 3.0}),
    ("graphgpo", {}),
    ("gagpo", {"normalize": "mean"}),
    ("pgpo", {}),
]
RARE = [
    ("hgpo", {"history_length": 1, "base_group": True, "alpha": 0.0}),
    ("hgpo", {"history_length": 7}),
    ("rloo", {"statistics": "per_trajectory"}),
    ("reinforce_pp_baseline", {"statistics": "per_trajectory"}),
    ("eb_gae", {"history_length": 0, "lam": 1.0}),
    ("eb_td", {"history_length": 0, "lam": 1.0}),
    ("eb_td", {"history_length": 4, "lam": 0.0}),
    ("graphgpo", {"normalize": "mean"}),
]
CONTINUOUS = [
    ("gae", {}),
    ("gae", {"whiten": False, "lam": 0.5}),
    ("gagpo", {"lam": 0.7}),
    ("himac", {}),
    ("himac", {"statistics": "per_trajectory"}),
    ("hiper", {}),
    ("pgpo", {"normalize": "mean"}),
]


def compare(name, options, batch):
    arrays, known = parameters(name)
    options = {**options, **{k: v for k, v in {"gamma": GAMMA, "invalid_penalty": PENALTY}.items() if k in known}}
    further = further_arrays(batch, arrays)
    record = estimate(name, **batch, **further, **options)
    expected = getattr(numpy_oracle, name)(numpy_oracle.Steps(**batch), **further, **options)
    np.testing.assert_allclose(record.advantages, dense(expected), rtol=2e-4, atol=2e-5)
    assert not np.asarray(record.returns)[~batch["mask"]].any()
    if record.levels:
        weighted = np.sum(np.asarray(record.level_weights) * np.asarray(record.level_advantages), -1)
        assert record.level_sizes.shape == (*weighted.shape, len(record.levels))
        if name not in ("eb_gae", "pgpo"):  # there the levels make up the value, or are only a part
            np.testing.assert_allclose(weighted, record.advantages, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "options"), EXACT + [pytest.param(*case, marks=pytest.mark.slow) for case in RARE])
@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_exact_returns(name, options, batch):
    compare(name, options, batch)


# Differences of means are rounded, and two that happen to be equal in theory may round apart and then be divided by a
# standard deviation of nearly nothing; continuous rewards have no such coincidences.
@pytest.mark.parametrize(("name", "options"), CONTINUOUS)
@settings(max_examples=20, deadline=None)
@given(batch=batches(continuous=True))
def test_continuous_rewards(name, options, batch):
    compare(name, options, batch)


def test_every_estimator_is_compared():
    assert {name for name, _ in EXACT + CONTINUOUS} == set(ESTIMATORS)


@settings(max_examples=20, deadline=None)
@given(batch=batches(), history_length=st.sampled_from([0, 3]))
def test_statistics_of_eb_gae(batch, history_length):
    record = estimate("eb_gae", **batch, history_length=history_length, gamma=GAMMA)
    value, tau2, s2 = numpy_oracle.eb_value(numpy_oracle.Steps(**batch), history_length, GAMMA)
    np.testing.assert_allclose(record.stats["tau2"], tau2, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(record.stats["s2"], s2, rtol=1e-4, atol=1e-5)
    if s2[-1] > 0:
        np.testing.assert_allclose(record.stats["rho"], sum(tau2[1:]) / s2[-1], rtol=1e-3, atol=1e-4)
    # The levels' shares make up the value: R - V.
    shrunk = np.sum(np.asarray(record.level_weights) * np.asarray(record.level_advantages), -1)
    returns = numpy_oracle.Steps(**batch).returns(GAMMA)
    np.testing.assert_allclose(shrunk, dense({s: returns[s] - value[s] for s in value}), rtol=1e-3, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_returns_take_the_penalty_only_where_it_fell(batch):
    record = estimate("hgpo", **batch, gamma=GAMMA, invalid_penalty=PENALTY)
    expected = numpy_oracle.Steps(**batch).returns(GAMMA, PENALTY)
    np.testing.assert_array_equal(record.returns, dense(expected))
