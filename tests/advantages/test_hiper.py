"""HiPER's three advantages by hand, and what they become where there is no hierarchy."""

import numpy as np
from batches import GAMMA, batches, dense, further_arrays
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_oracle import Steps

from hgpo_jax.advantages import estimate, parameters

PLAIN = {"whiten": False, "invalid_penalty": 0.0, "gamma": GAMMA, "lam": 0.7}


def arrays(batch, **given):
    """What `hiper` needs besides the batch; given ones in place of random ones."""
    return further_arrays(batch, parameters("hiper")[0]) | given


@settings(max_examples=20, deadline=None)
@given(batch=batches(continuous=True), first=st.booleans())
def test_without_a_hierarchy_it_is_gae(batch, first):
    """A segment for every step makes the high level GAE, a single one the low level, and the others returns."""
    further = arrays(batch, switches=np.ones_like(batch["mask"]))
    record = estimate("hiper", **batch, **further, **PLAIN)
    alone = estimate("gae", **batch, values=further["high_values"], final_values=further["final_values"], **PLAIN)
    np.testing.assert_allclose(record.part_advantages[..., 1], alone.advantages, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(record.part_returns[..., 1], alone.returns, rtol=1e-5, atol=1e-5)

    switches = np.zeros_like(batch["mask"])
    switches[:, 0] = first  # which begins a segment whether or not it is said to
    further = arrays(batch, switches=switches, final_values=np.zeros(len(switches), np.float32))
    record = estimate("hiper", **batch, **further, **PLAIN)
    alone = estimate("gae", **batch, values=further["low_values"], final_values=further["final_values"], **PLAIN)
    np.testing.assert_allclose(record.advantages, alone.advantages, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(record.returns, alone.returns, rtol=1e-5, atol=1e-5)
    returns = dense(Steps(**batch).returns(GAMMA))
    np.testing.assert_allclose(record.part_returns[..., 0], returns, rtol=1e-5, atol=1e-5)
    at_first = np.arange(returns.shape[1]) == 0
    np.testing.assert_allclose(record.part_returns[..., 1], returns * at_first, rtol=1e-5, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(batch=batches(continuous=True))
def test_the_low_level_sees_nothing_behind_its_segment_but_v_high(batch):
    further = arrays(batch)
    further["switches"][:, 2] = True
    changed = {name: np.array(value) for name, value in (batch | further).items()}
    changed["rewards"][:, 2:] += 3
    changed["low_values"][:, 2:] -= 5
    changed["high_values"][:, 3:] += 7
    changed["term_values"][~batch["mask"]] = np.nan
    here = estimate("hiper", **batch, **further, **PLAIN).part_advantages[:, :2]
    there = estimate("hiper", **changed, **PLAIN).part_advantages[:, :2]
    np.testing.assert_array_equal(there[..., 0], here[..., 0])
    np.testing.assert_array_equal(there[..., 2], here[..., 2])
    if batch["mask"][:, 2].any():  # the planner does
        assert np.abs(there[..., 1] - here[..., 1]).max() > 0


def test_segments_of_two_and_one_steps_by_hand():
    """gamma = lambda = 1/2, one trajectory of three steps, the second segment its last step."""
    batch = {"rewards": np.float32([[0, 4, 8]]), "mask": np.ones((1, 3), bool), "states": np.zeros((1, 3), int),
             "groups": np.zeros(1, int), "switches": np.array([[False, False, True]])}  # fmt: skip
    values = {"high_values": [[2, 99, 6]], "low_values": [[1, 2, 4]], "term_values": [[0, 1, 5]]}
    values = {name: np.float32(value) for name, value in (values | {"final_values": [0]}).items()}
    record = estimate("hiper", **batch, **values, **PLAIN | {"lam": 0.5})
    # The last segment: 8 - 6. The first: rewards 0 + 4/2, then 6/4 of V_high, less 2; and 1/4 * 1/2 of the last one's 2.
    np.testing.assert_array_equal(record.part_advantages[0, :, 1], [2 + 1.5 - 2 + 0.25, 0, 2])
    # Temporal differences 0 + 2/2 - 1, 4 + 6/2 - 2 and 8 - 4; a quarter of the second is credited to the first.
    np.testing.assert_array_equal(record.part_advantages[0, :, 2], [0 + 1.25, 5, 4])
    # Rewards to the segment's end, then V_high: 2 + 6/4, 4 + 6/2, 8.
    np.testing.assert_array_equal(record.part_advantages[0, :, 0], [3.5, 7 - 1, 8 - 5])
