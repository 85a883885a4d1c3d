"""No estimator blows up what is nearly nothing: returns from 0 to 10 and penalties of 0.1 stay below 100."""

import itertools

import numpy as np
import pytest
from batches import B, T, further_arrays
from hypothesis import given, settings
from hypothesis import strategies as st

from hgpo_jax.advantages import ESTIMATORS, checks, estimate, parameters

DISCRETE = {
    "normalize": ("mean", "mean_std"),
    "statistics": ("per_step", "per_trajectory"),
    "base_group": (False, True),
    "whiten": (False, True),
}
NUMBERS = {
    "history_length", "gamma", "lam", "alpha", "weight_offset", "step_weight", "invalid_penalty", "prior_count", "gate_count",
}  # fmt: skip
CASES = []
for name in sorted(ESTIMATORS):
    known = [option for option in parameters(name)[1] if option in DISCRETE]
    CASES += [(name, dict(zip(known, v, strict=True))) for v in itertools.product(*(DISCRETE[o] for o in known))]


@st.composite
def ordinary(draw):
    """Episodes with returns in [0, 10], often all alike, with few invalid steps: where a spread is nothing or nearly so."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = rng.integers(1, T + 1, B) if draw(st.booleans()) else np.full(B, T)
    mask = np.arange(T) < lengths[:, None]
    scores = {
        "equal": np.full(B, rng.uniform(0, 10)),
        "nearly equal": 10 - rng.uniform(0, 1e-5, B),
        "won or lost": rng.choice([0.0, 10.0], B),
        "any": rng.uniform(0, 10, B),
    }[draw(st.sampled_from(["equal", "nearly equal", "won or lost", "any"]))]
    shares = rng.dirichlet(np.ones(T), B) * mask if draw(st.booleans()) else np.arange(T) == lengths[:, None] - 1
    rewards = scores[:, None] * shares / np.maximum(shares.sum(1, keepdims=True), 1)
    invalid = np.zeros((B, T), bool)
    for _ in range(draw(st.integers(0, 3))):
        invalid[rng.integers(B), rng.integers(T)] = True
    if draw(st.booleans()):  # the same number in each episode
        invalid[:] = invalid[0]
    return {
        "rewards": rewards.astype(np.float32),
        "mask": mask,
        "states": rng.integers(0, draw(st.integers(1, 4)), (B, T)).astype(np.int32),
        "groups": rng.integers(0, draw(st.integers(1, 3)), B).astype(np.int32),
        "invalid": invalid,
    }


def largest(name, options, batch, **further):
    record = estimate(name, **batch, **further, **options)
    assert np.isfinite(record.advantages).all()
    return np.abs(record.advantages).max()


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@settings(max_examples=30, deadline=None)
@given(batch=ordinary())
def test_advantages_stay_below_100(name, options, batch):
    further = further_arrays(batch, parameters(name)[0])
    if "values" in further:
        further["values"] = np.clip(further["values"] * 3 + 5, 0, 10).astype(np.float32)
    assert largest(name, options, batch, **further) < 100


def test_every_option_is_bounded_or_a_number():
    assert set(checks.OPTIONS) == set(DISCRETE) | NUMBERS


def one_penalty(groups, invalid=((2, 3),), steps=50):
    """Episodes that score the same, and a few invalid steps."""
    episodes = groups * 8
    batch = {
        "rewards": np.zeros((episodes, steps), np.float32),
        "mask": np.ones((episodes, steps), bool),
        "states": np.zeros((episodes, steps), np.int32),
        "groups": np.repeat(np.arange(groups), 8),
        "invalid": np.zeros((episodes, steps), bool),
    }
    batch["rewards"][:, -1] = 10
    for step in invalid:
        batch["invalid"][step] = True
    return batch


@pytest.mark.parametrize("name", ["grpo", "gigpo", "graphgpo", "ecpo", "dr_mas"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_penalty_where_all_episodes_score_the_same(name, everywhere):
    """The group of the released recipe; `everywhere`: one invalid step in each episode."""
    batch = one_penalty(1, [(b, 3) for b in range(8)] if everywhere else [(2, 3)])
    arrays = {
        "next_states": np.zeros((8, 50), np.int32), "success": np.ones(8, bool), "agents": np.zeros((8, 50), np.int32),
        "actions": np.zeros((8, 50), np.int32),
    }  # fmt: skip
    further = {array: arrays[array] for array in parameters(name)[0]}
    for statistics in DISCRETE["statistics"]:
        record = estimate(name, **batch, **further, normalize="mean_std", statistics=statistics)
        episode = np.asarray(record.level_advantages[..., 0] if record.levels else record.advantages)
        # At most the square root of what is counted: 400 steps, or 8 episodes of 50.
        assert -20 < episode[2, 3] < -5
        assert np.abs(episode[~batch["invalid"]]).max() < 0.2


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_whitening_is_bounded_in_large_batches(name):
    """One invalid step among 25,600 would be 160 standard deviations away."""
    record = estimate(name, **one_penalty(64), **({"gamma": 1.0} if name == "reinforce_pp" else {}))
    assert record.advantages[2, 3] == -100


def test_episodes_count_once_however_long_they_are():
    """Three episodes of 1, 2 and 4 steps, one penalty: the definition of `per_trajectory` by hand."""
    mask = np.arange(4) < np.array([1, 2, 4])[:, None]
    invalid = np.zeros((3, 4), bool)
    invalid[1, 1] = True
    rewards = np.float32([[6, 0, 0, 0], [3, 0, 0, 0], [0, 0, 0, 0]])
    record = estimate(
        "grpo", rewards=rewards, mask=mask, states=mask * 0, groups=np.zeros(3, int), invalid=invalid,
        statistics="per_trajectory", invalid_penalty=2.0,
    )  # fmt: skip
    mean = (6 + (3 + 1) / 2 + 0) / 3
    std = np.sqrt(((6 - mean) ** 2 + ((3 - mean) ** 2 + (1 - mean) ** 2) / 2 + mean**2) / 2)
    expected = [[6 - mean, 0, 0, 0], [3 - mean, 1 - mean, 0, 0], [-mean] * 4]
    np.testing.assert_allclose(record.advantages, np.array(expected) / std, rtol=1e-5)


@pytest.mark.parametrize("options", [{"weight_offset": 1000}, {"weight_offset": 1, "base_group": True}], ids=str)
def test_the_largest_weights_of_levels_fit_into_float32(options):
    rng = np.random.default_rng(0)
    batch = {
        "rewards": rng.uniform(0, 10, (B, T)).astype(np.float32), "mask": np.ones((B, T), bool),
        "states": np.zeros((B, T), np.int32), "groups": np.zeros(B, np.int32), "invalid": np.zeros((B, T), bool),
    }  # fmt: skip
    record = estimate("hgpo", **batch, history_length=T - 1, alpha=10, **options)
    assert np.isfinite(record.level_weights).all()
    assert np.abs(record.advantages).max() > 0.1


@pytest.mark.parametrize("option", ["alpha", "weight_offset"])
def test_larger_ones_are_refused(option):
    with pytest.raises(ValueError, match=f"{option}=1001: give a number from"):
        checks.check_option(option, 1001)
