"""HiPER's three advantages: their definition, what they become where there is no hierarchy, and their whitening."""

import numpy as np
import pytest
from batches import GAMMA, PENALTY, batches, dense, further_arrays
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_oracle import Steps, hiper_parts

from hgpo_jax.advantages import estimate, parameters

PARTS = ("switch", "subgoal", "action")
PLAIN = {"whiten": False, "invalid_penalty": 0.0}


def arrays(batch, **given):
    """What `hiper` needs besides the batch; given ones in place of random ones."""
    return further_arrays(batch, parameters("hiper")[0]) | given


def begins(batch, switches):
    """Whether a segment begins: at switches, and at every trajectory's first step."""
    return batch["mask"] & (switches | (np.arange(switches.shape[1]) == 0))


@settings(max_examples=60, deadline=None)
@given(
    batch=batches(continuous=True), gamma=st.sampled_from([0.5, 1]), lam=st.sampled_from([0.0, 0.6, 1.0]), whiten=st.booleans()
)  # fmt: skip
def test_all_parts_are_those_of_the_definition(batch, **options):
    further, options = arrays(batch), options | {"invalid_penalty": PENALTY}
    record = estimate("hiper", **batch, **further, **options)
    advantages, targets = hiper_parts(Steps(**batch), **further, **options)
    for column, part in enumerate(PARTS):
        np.testing.assert_allclose(record.part_advantages[..., column], dense(advantages[part]), rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(record.part_returns[..., column], dense(targets[part]), rtol=2e-4, atol=2e-5)
    np.testing.assert_array_equal(record.advantages, record.part_advantages[..., 2])
    np.testing.assert_array_equal(record.returns, record.part_returns[..., 2])
    segments = begins(batch, further["switches"]).sum()
    assert float(record.stats["switch_rate"]) == pytest.approx(segments / max(batch["mask"].sum(), 1))


@settings(max_examples=20, deadline=None)
@given(batch=batches(continuous=True))
def test_a_segment_for_every_step_makes_the_high_level_gae(batch):
    further = arrays(batch, switches=np.ones_like(batch["mask"]))
    record = estimate("hiper", **batch, **further, **PLAIN, gamma=GAMMA, lam=0.7)
    alone = estimate("gae", **batch, values=further["high_values"], **PLAIN, gamma=GAMMA, lam=0.7)
    np.testing.assert_allclose(record.part_advantages[..., 1], alone.advantages, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(record.part_returns[..., 1], alone.returns, rtol=1e-5, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(batch=batches(continuous=True), first=st.booleans())
def test_a_single_segment_makes_the_low_level_gae_and_the_others_returns(batch, first):
    """A trajectory's first step begins a segment whether or not it is said to."""
    switches = np.zeros_like(batch["mask"])
    switches[:, 0] = first
    further = arrays(batch, switches=switches)
    record = estimate("hiper", **batch, **further, **PLAIN, gamma=GAMMA, lam=0.7)
    alone = estimate("gae", **batch, values=further["low_values"], **PLAIN, gamma=GAMMA, lam=0.7)
    np.testing.assert_allclose(record.advantages, alone.advantages, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(record.returns, alone.returns, rtol=1e-5, atol=1e-5)
    returns = dense(Steps(**batch).returns(GAMMA))
    np.testing.assert_allclose(record.part_returns[..., 0], returns, rtol=1e-5, atol=1e-5)
    at_first = np.arange(returns.shape[1]) == 0
    np.testing.assert_allclose(record.part_returns[..., 1], returns * at_first, rtol=1e-5, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(batch=batches(continuous=True))
def test_without_discount_or_trace_loss_the_high_level_is_the_return_and_the_low_one_telescopes(batch):
    further = arrays(batch)
    record = estimate("hiper", **batch, **further, **PLAIN, gamma=1.0, lam=1.0)
    starts, returns = begins(batch, further["switches"]), dense(Steps(**batch).returns(1.0))
    np.testing.assert_allclose(record.part_returns[..., 1], np.where(starts, returns, 0), rtol=1e-5, atol=1e-5)
    # Within a segment all steps reach the same end: targets differ by the rewards between them, as those of V_term do.
    np.testing.assert_allclose(record.part_returns[..., 2], record.part_returns[..., 0], rtol=1e-5, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(batch=batches(continuous=True))
def test_the_low_level_sees_nothing_behind_its_segment_but_v_high(batch):
    further = arrays(batch)
    further["switches"][:, 2] = True
    changed = {name: np.array(value) for name, value in (batch | further).items()}
    changed["rewards"][:, 2:] += 3
    changed["low_values"][:, 2:] -= 5
    changed["high_values"][:, 3:] += 7
    here = estimate("hiper", **batch, **further, **PLAIN).part_advantages[:, :2]
    there = estimate("hiper", **changed, **PLAIN).part_advantages[:, :2]
    np.testing.assert_array_equal(there[..., 0], here[..., 0])
    np.testing.assert_array_equal(there[..., 2], here[..., 2])
    if batch["mask"][:, 2].any():  # the planner does
        assert np.abs(there[..., 1] - here[..., 1]).max() > 0


@settings(max_examples=20, deadline=None)
@given(batch=batches(continuous=True))
def test_each_level_is_whitened_over_the_steps_that_have_it(batch):
    further = arrays(batch)
    record = estimate("hiper", **batch, **further)
    starts = begins(batch, further["switches"])
    for column, has in enumerate((batch["mask"], starts, batch["mask"])):
        whitened = np.asarray(record.part_advantages[..., column])
        assert not whitened[~has].any()
        if has.sum() > 1:
            assert whitened[has].mean() == pytest.approx(0, abs=1e-5)
            assert whitened[has].std(ddof=1) == pytest.approx(1, abs=1e-3)


@settings(max_examples=20, deadline=None)
@given(batch=batches(continuous=True))
def test_what_did_not_happen_does_not_matter(batch):
    further, hidden = arrays(batch), ~batch["mask"]
    other = {name: np.array(value) for name, value in further.items()}
    other["switches"][hidden] ^= True
    for level in ("high_values", "low_values", "term_values"):
        other[level][hidden] = np.nan
    here, there = (estimate("hiper", **batch, **given) for given in (further, other))
    for field in ("part_advantages", "part_returns"):
        np.testing.assert_array_equal(getattr(there, field), getattr(here, field))
        assert not np.asarray(getattr(here, field))[hidden].any()


def test_segments_of_two_and_one_steps_by_hand():
    """gamma = lambda = 1/2, one trajectory of three steps, the second segment its last step."""
    batch = {"rewards": np.float32([[0, 4, 8]]), "mask": np.ones((1, 3), bool), "states": np.zeros((1, 3), int),
             "groups": np.zeros(1, int), "switches": np.array([[False, False, True]])}  # fmt: skip
    values = {"high_values": [[2, 99, 6]], "low_values": [[1, 2, 4]], "term_values": [[0, 1, 5]]}
    values = {name: np.float32(value) for name, value in values.items()}
    record = estimate("hiper", **batch, **values, **PLAIN, gamma=0.5, lam=0.5)
    # The last segment: 8 - 6. The first: rewards 0 + 4/2, then 6/4 of V_high, less 2; and 1/4 * 1/2 of the last one's 2.
    np.testing.assert_array_equal(record.part_advantages[0, :, 1], [2 + 1.5 - 2 + 0.25, 0, 2])
    # Temporal differences 0 + 2/2 - 1, 4 + 6/2 - 2 and 8 - 4; a quarter of the second is credited to the first.
    np.testing.assert_array_equal(record.part_advantages[0, :, 2], [0 + 1.25, 5, 4])
    # Rewards to the segment's end, then V_high: 2 + 6/4, 4 + 6/2, 8.
    np.testing.assert_array_equal(record.part_advantages[0, :, 0], [3.5, 7 - 1, 8 - 5])
