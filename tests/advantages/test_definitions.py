"""PGPO, GraphGPO and ECPO on episodes small enough to work out by hand from their definitions."""

import numpy as np
import pytest
from batches import GAMMA, B, T, batches, further_arrays
from hypothesis import given, settings

from hgpo_jax.advantages import estimate


def episodes(paths, rewards, **further):
    """Arguments of `estimate` for paths of states and the reward at each one's end, all of one task."""
    mask = np.arange(max(map(len, paths))) < np.array([[len(path)] for path in paths])
    states, earned = np.zeros(mask.shape, np.int32), np.zeros(mask.shape, np.float32)
    for b, (path, reward) in enumerate(zip(paths, rewards, strict=True)):
        states[b, : len(path)], earned[b, len(path) - 1] = path, reward
    return {"rewards": earned, "mask": mask, "states": states, "groups": np.zeros(len(paths), int), **further}


# From state 0 two failures and a success lead to 1 or 2; only the success's return tells 1 from 2.
PATHS, REWARDS = [(0, 1), (0, 1), (0, 2)], [8, 0, 0]


def test_pgpo_is_its_step_part_and_the_weighted_potential_part():
    record = estimate("pgpo", **episodes(PATHS, REWARDS, success=np.array([True, False, False])), gamma=0.5)
    # Returns 4, 0, 0 in state 0 and 8, 0 in state 1: z-scores with the sample's standard deviation.
    step = np.array([[2, np.sqrt(0.5) * np.sqrt(3)], [-1, -np.sqrt(0.5) * np.sqrt(3)], [-1, 0]]) / np.sqrt(3)
    # Potentials 4/3, 4 and 0: differences 8/3, 8/3 and -4/3 out of state 0; 8 - 4 and 0 - 4 at the end of state 1.
    potential = np.array([[1, np.sqrt(0.5) * np.sqrt(3)], [1, -np.sqrt(0.5) * np.sqrt(3)], [-2, 0]]) / np.sqrt(3)
    np.testing.assert_allclose(record.advantages, step + (2 / 3) ** 2 * potential, atol=1e-5)
    np.testing.assert_allclose(record.level_advantages[..., 0], step, atol=1e-5)
    # The failure that went where the success went is now better than the one that did not.
    assert record.advantages[1, 0] > record.advantages[2, 0]


def test_the_potential_is_not_discounted():
    """Equal potentials before and after give no signal at any discount of the return."""
    # State 1 has the potential (10 + 0) / 2 = 5 and state 2 the potential 5, too; discounted, one would be worth 2.5.
    paths, rewards = [(1, 3), (1, 2), (2,)], [20, 0, 10]
    batch = episodes(paths, rewards, success=np.zeros(3, bool))
    record = estimate("pgpo", **batch, gamma=0.5)
    assert record.returns[:, 0].tolist() == [10, 0, 10]
    # Out of state 1: 20 - 5 to state 3 and 5 - 5 to state 2; out of state 2: at the ends 0 - 5 and 10 - 5.
    z = np.array([[1, 0], [-1, -1], [1, 0]]) * np.sqrt(0.5)
    step = np.array([[1, 0], [-1, -1], [1, 0]]) * np.sqrt(0.5)
    np.testing.assert_allclose(record.advantages, step + z, atol=1e-5)


@pytest.mark.parametrize("success", [(True, True, True), (False, False, False)])
def test_no_episode_part(success):
    """States met once and outcomes that differ: an episode part would tell the episodes apart, PGPO does not."""
    batch = episodes([(0, 1), (2, 3), (4, 5)], [10, 5, 0], success=np.array(success))
    assert not np.asarray(estimate("pgpo", **batch).advantages).any()


def test_potentials_that_are_equal_but_for_rounding_give_no_signal():
    """States 1 and 2 were worth the same numbers in another order, and float32's means of them differ."""
    worth = np.float32([2.919888973236084, 2.259354591369629, 4.876749038696289, 4.181202411651611])
    paths = [(0, 1), (0, 2), *[(1,)] * 4, *[(2,)] * 4]
    batch = episodes(paths, [0, 0, *worth, *worth[[2, 3, 0, 1]]], success=np.zeros(10, bool))
    assert not np.asarray(estimate("pgpo", **batch).advantages)[:2, 0].any()


def distances(paths, rewards, success, after):
    """The step returns of GraphGPO as distances."""
    next_states = np.array([[*path[1:], last] + [0] * (2 - len(path)) for path, last in zip(paths, after, strict=True)])
    batch = episodes(paths, rewards, success=np.array(success), next_states=next_states)
    record = estimate("graphgpo", **batch, normalize="mean", step_weight=1.0)
    with np.errstate(divide="ignore"):
        return np.where(batch["mask"], np.log10(10 / np.asarray(record.returns)), -1).round().astype(int).tolist()


def test_an_observation_is_never_the_goal():
    """Two goals in a task: what is seen at the end is also seen on the way, before the second goal."""
    # 0 -> 1 -> success, whose last observation is again 1 (say, "you put the mug down").
    assert distances([(0, 1)], [10], [True], after=[1]) == [[1, 0]]
    # A failure that sees 1 is one step from success, and not there.
    assert distances([(0, 1), (0, 2)], [10, 0], [True, False], after=[1, 1]) == [[1, 0], [2, 1]]
    # The success's last observation 3 is no node: a failure that sees it cannot go on from there.
    assert distances([(0, 1), (0, 2)], [10, 0], [True, False], after=[3, 3]) == [[1, 0], [3, 3]]


def in_one_state(actions, rewards, normalize="mean", **further):
    """ECPO's step part of one visit of one state by each episode."""
    batch = episodes([(0,)] * len(actions), rewards, actions=np.array(actions)[:, None])
    return estimate("ecpo", **batch, normalize=normalize, **further).level_advantages[:, 0, 1]


def test_a_lucky_action_that_was_tried_once_is_shrunk_most():
    # Mean 2. The action tried once: a third of its 8 above the mean. The one tried four times: four sixths of its -2.
    # Actions explain everything; tanh(5/4) is how far five visits are trusted.
    found = in_one_state([7, 3, 3, 3, 3], [10, 0, 0, 0, 0])
    np.testing.assert_allclose(found, np.tanh(5 / 4) * np.array([8 / 3, *[-4 / 3] * 4]), rtol=1e-5)


def test_shrinkage_outlives_the_division_by_the_spread_of_returns():
    # As above; the sample variance of the returns is (8^2 + 4 * 2^2) / 4 = 20, whatever is shrunk.
    found = in_one_state([7, 3, 3, 3, 3], [10, 0, 0, 0, 0], normalize="mean_std")
    np.testing.assert_allclose(found, np.tanh(5 / 4) / np.sqrt(20) * np.array([8 / 3, *[-4 / 3] * 4]), rtol=1e-5)


def test_a_state_counts_as_far_as_actions_explain_its_returns():
    # Means 8 and 4 around 6: B = 4. Within: 2 away from the one, 4 away from the other: W = 10.
    found = in_one_state([0, 0, 1, 1], [10, 6, 8, 0], prior_count=0.0)
    np.testing.assert_allclose(found, np.tanh(1) * 4 / 14 * np.array([2, 2, -2, -2]), rtol=1e-5)
    # The same returns, but either action has the same mean: noise, which GiGPO would take for credit.
    assert not np.asarray(in_one_state([0, 1, 1, 0], [10, 6, 6, 2])).any()


def test_invalid_actions_are_one_action():
    actions, invalid = np.array([[0], [1], [2], [2]]), np.array([[True], [True], [False], [False]])
    batch = episodes([(0,)] * 4, [8, 0, 6, 6], actions=actions, invalid=invalid)
    record = estimate("ecpo", **batch, normalize="mean", invalid_penalty=0.0, prior_count=0.0)
    # Means 4 and 6 around 5: B = 1, and W = 16 / 2 from the two invalid ones.
    np.testing.assert_allclose(record.level_advantages[:, 0, 1], np.tanh(1) / 9 * np.array([-1, -1, 1, 1]), rtol=1e-5)


@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_visits_of_a_state_with_the_same_action_share_their_credit(batch):
    actions = further_arrays(batch, ["actions"])["actions"]
    record = estimate("ecpo", **batch, actions=actions, gamma=GAMMA)
    shared = {}
    for b, t in np.argwhere(batch["mask"]):
        action = -1 if batch["invalid"][b, t] else int(actions[b, t])
        key = int(batch["groups"][b]), int(batch["states"][b, t]), action
        shared.setdefault(key, set()).add(float(record.level_advantages[b, t, 1]))
    assert all(len(credits) == 1 for credits in shared.values())


@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_of_distinct_actions_and_without_calibration_it_is_gigpo(batch):
    valid = batch | {"invalid": np.zeros((B, T), bool)}
    distinct = np.arange(B * T).reshape(B, T)
    found = estimate("ecpo", **valid, actions=distinct, gamma=GAMMA, normalize="mean", prior_count=0.0, gate_count=0.1)
    expected = estimate("gigpo", **valid, gamma=GAMMA, normalize="mean")
    np.testing.assert_allclose(found.advantages, expected.advantages, rtol=1e-4, atol=1e-4)
