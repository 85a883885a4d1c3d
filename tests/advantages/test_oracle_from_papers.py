"""The oracles of oracle_from_papers.py on cases worked by hand in the comments."""

import math

import numpy as np
import pytest
from oracle_from_papers import (
    dapo_dynamic_sampling,
    gagpo,
    graph_distances,
    graphgpo,
    gspo_objective,
    kalman_filtered,
    kpo_objective,
    length_normalized_ratios,
    pgpo,
    reinforce_plus_plus,
)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6)  # epsilon is 1e-6 and stays out of the work by hand


# Three episodes of one prompt. A: 1 -> 2 -> won (10). B: 1 -> 3 -> lost. C: 1 -> 2 -> lost. Discount 1/2.
# Returns: A 5, 10; B 0, 0; C 0, 0. Groups: 1 = {5, 0, 0}, 2 = {10, 0}, 3 = {0}. Phi = V: 5/3, 5, 0.
THREE = {
    "rewards": np.array([[0.0, 10.0], [0.0, 0.0], [0.0, 0.0]]),
    "mask": np.ones((3, 2), bool),
    "states": np.array([[1, 2], [1, 3], [1, 2]]),
    "groups": np.zeros(3, int),
}
NONE_INVALID = np.zeros((3, 2), bool)


def invalid_at(i, t):
    out = NONE_INVALID.copy()
    out[i, t] = True
    return out


def test_pgpo_tells_lost_episodes_apart():
    # A^S: group 1 has std 5/sqrt 3, so 2/sqrt 3, -1/sqrt 3, -1/sqrt 3; group 2 has std 5 sqrt 2, so +-1/sqrt 2; group 3 is one
    # visit. delta: A 5 - 5/3 = 10/3, then 10 - 5 = 5; B 0 - 5/3, then 0 - 0; C 10/3, then 0 - 5. A^Phi: group 1 = {10/3, -5/3,
    # 10/3}, std 5/sqrt 3: 1/sqrt 3, -2/sqrt 3, 1/sqrt 3; group 2 = {5, -5}: +-1/sqrt 2. p_succ = 1/3, w = (2/3)^2 = 4/9.
    r3, r2 = math.sqrt(3), math.sqrt(2)
    expected = [[22 / 9 / r3, 13 / 9 / r2], [-17 / 9 / r3, 0], [-5 / 9 / r3, -13 / 9 / r2]]
    close(pgpo(**THREE, invalid=NONE_INVALID, gamma=0.5), expected)


def test_pgpo_discounts_the_last_reward_by_gamma_phi():
    # gamma_phi 1/2, means only: delta in group 2 = {5 - 5, 0 - 5}, about its mean +-5/2; A^S is +-5.
    # Group 1: delta = {5/2 - 5/3, -5/3, 5/2 - 5/3}, about its mean {5/6, -5/3, 5/6}; A^S = {10/3, -5/3, -5/3}.
    w = 4 / 9
    expected = [[10 / 3 + w * 5 / 6, 5 + w * 5 / 2], [-5 / 3 - w * 5 / 3, 0], [-5 / 3 + w * 5 / 6, -5 - w * 5 / 2]]
    close(pgpo(**THREE, invalid=NONE_INVALID, gamma=0.5, gamma_phi=0.5, normalize="mean"), expected)


def test_pgpo_penalty_stays_at_its_step_and_reaches_the_potential():
    # C's second action was invalid: return -0.1, Phi(2) = 9.9/2 = 4.95, C's first return stays 0. Means only.
    # Group 2: A^S = {5.05, -5.05}; delta = {10 - 4.95, 0 - 4.95} about 0.05: +-5.
    # Group 1: delta = {4.95, 0, 4.95} - 5/3 about its mean: {1.65, -3.3, 1.65}.
    w = 4 / 9
    expected = [[10 / 3 + w * 1.65, 5.05 + w * 5], [-5 / 3 - w * 3.3, 0], [-5 / 3 + w * 1.65, -5.05 - w * 5]]
    close(pgpo(**THREE, invalid=invalid_at(2, 1), gamma=0.5, normalize="mean"), expected)
    # Without it in the potential Phi(2) = 5 and group 1 is as in the first test: {5/3, -10/3, 5/3}.
    actual = pgpo(**THREE, invalid=invalid_at(2, 1), gamma=0.5, normalize="mean", penalty_in_potential=False)
    close(actual[:, 0], [10 / 3 + w * 5 / 3, -5 / 3 - w * 10 / 3, -5 / 3 + w * 5 / 3])


def test_pgpo_without_failures_is_the_step_part():
    # Everyone won: w = 0, whatever delta is. `success` overrides the reward of the last step.
    r3, r2 = math.sqrt(3), math.sqrt(2)
    expected = [[2 / r3, 1 / r2], [-1 / r3, 0], [-1 / r3, -1 / r2]]
    close(pgpo(**THREE, invalid=NONE_INVALID, gamma=0.5, success=np.ones(3, bool)), expected)


# A: 1 -> 2 -> won. B: 1 -> 3 -> 1 (lost). C: 1 -> 4 -> 5 (lost); nobody acted in 5.
# Distances: 2: 1, 1: 2, 3: 3 (by 1 and 2); 4, 5 unreachable: 3 + 1 = 4.
# Step returns 10 * 0.1^d(next): A 1, 10 (next is success); B 0.01, 0.1; C 0.001, 0.001. Only observation 1 has a group: {1,
# 0.01, 0.001}.
GRAPH = {
    "rewards": np.array([[0.0, 10.0], [0.0, 0.0], [0.0, 0.0]]),
    "mask": np.ones((3, 2), bool),
    "states": np.array([[1, 2], [1, 3], [1, 4]]),
    "groups": np.zeros(3, int),
    "next_states": np.array([[2, 6], [3, 1], [4, 5]]),
}


def test_graph_distances():
    edges = [(1, 2), (2, "success"), (1, 3), (3, 1), (1, 4), (4, 5)]
    assert graph_distances(edges) == {"success": 0, 2: 1, 1: 2, 3: 3, 4: 4, 5: 4}
    assert graph_distances([(1, 2), (2, 1)]) == {"success": 0, 1: 1, 2: 1}  # nobody won


def test_graphgpo_means():
    # Step part: mean 1.011/3 = 0.337. Episode part: rows {10, 10, 0, 0, 0, 0}, mean 10/3.
    expected = [[0.663 + 20 / 3, 20 / 3], [-0.327 - 10 / 3, -10 / 3], [-0.336 - 10 / 3, -10 / 3]]
    close(graphgpo(**GRAPH, invalid=NONE_INVALID, normalize="mean"), expected)
    # The paper's exponent d + 1: the step part is a tenth.
    expected = [[0.0663, 0], [-0.0327, 0], [-0.0336, 0]]
    close(graphgpo(**GRAPH, invalid=NONE_INVALID, normalize="mean", edge_cost=1, episode_weight=0.0), expected)


def test_graphgpo_z_scores():
    # Step: 0.663^2 + 0.327^2 + 0.336^2 = 0.659394, over 2: 0.329697. Episode: (2 * 400 + 4 * 100) / 9 / 5 = 80/3.
    step, episode = math.sqrt(0.329697), math.sqrt(80 / 3)
    up, down = 20 / 3 / episode, -10 / 3 / episode
    expected = [[0.663 / step + up, up], [-0.327 / step + down, down], [-0.336 / step + down, down]]
    close(graphgpo(**GRAPH, invalid=NONE_INVALID), expected)


def test_graphgpo_an_observation_is_never_the_goal():
    # A: 2 -> won, where the environment shows observation 9 again. B: 2 -> 9, lost. Step returns 10 and, 9 being unreachable
    # (largest distance is 1), 10 * 0.1^2 = 0.1: mean 5.05.
    actual = graphgpo(
        np.array([[10.0], [0.0]]), np.ones((2, 1), bool), np.array([[2], [2]]), np.zeros(2, int), np.zeros((2, 1), bool),
        next_states=np.array([[9], [9]]), normalize="mean", episode_weight=0.0,
    )
    close(actual, [[4.95], [-4.95]])


def test_graphgpo_penalty_and_a_group_of_one_row():
    # Prompt 0: two lost episodes of one step, the second invalid. Nobody won: step returns 1 and 1 - 0.1; scores 0 and -0.1.
    # Both parts +-0.05. Prompt 1: a single row of score 10: step part 0, episode part 10 (mean 0).
    actual = graphgpo(
        np.array([[0.0], [0.0], [10.0]]), np.ones((3, 1), bool), np.array([[1], [1], [1]]), np.array([0, 0, 1]),
        np.array([[False], [True], [False]]), next_states=np.array([[1], [2], [3]]), normalize="mean",
    )
    close(actual, [[0.1], [-0.1], [10.0]])


def test_gagpo():
    # gamma = lambda = 1/2. delta: A 5/2 - 5/3 = 5/6, 10 - 5 = 5; B -5/3, 0; C 5/6, -5.
    # GAE: A 5/6 + 5/4 = 25/12, 5; B -5/3, 0; C 5/6 - 5/4 = -5/12, -5. Mean 0; in twelfths the squares add up to
    # 625 + 3600 + 400 + 25 + 3600 = 8250, over 5: 1650.
    # A second prompt, also in observation 1, rewards 4 and 2: V = 3, GAE +-1, std sqrt 2.
    rewards = np.concatenate([THREE["rewards"], [[4.0, 7.0], [2.0, 7.0]]])
    mask = np.array([[True, True]] * 3 + [[True, False]] * 2)
    states = np.concatenate([THREE["states"], [[1, 1], [1, 1]]])
    actual = gagpo(rewards, mask, states, np.array([0, 0, 0, 1, 1]), np.zeros((5, 2), bool), gamma=0.5, lam=0.5)
    expected = np.array([[25, 60], [-20, 0], [-5, -60]]) / math.sqrt(1650)
    close(actual[:3], expected)
    close(actual[3:], [[1 / math.sqrt(2), 0], [-1 / math.sqrt(2), 0]])


@pytest.mark.parametrize(
    ("in_value", "at", "first", "second"),
    [
        (False, "advantage", -5 / 3, -0.1),  # only its own step
        (False, "delta", -5 / 3 - 0.025, -0.1),  # carried back by gamma * lambda = 1/4
        (True, "advantage", -5 / 3 - 0.05 + 0.025, 0.0),  # V(3) = -0.1: first delta 0.05 less, second 0.1 more
        (True, "delta", -5 / 3 - 0.05, 0.0),  # second delta 0
    ],
)
def test_gagpo_readings_of_the_penalty(in_value, at, first, second):
    # B's second action was invalid, the only visit of observation 3; the other four are as in test_gagpo.
    raw = np.array([[25 / 12, 5], [first, second], [-5 / 12, -5]])
    actual = gagpo(
        **THREE, invalid=invalid_at(1, 1), gamma=0.5, lam=0.5, normalize="mean", penalty_in_value=in_value, penalty_at=at
    )
    close(actual, raw - raw.mean())


def test_reinforce_plus_plus():
    # Scores 6 (two steps) and 2 (one step); k1 KL 0.5, 1 and 1, beta 1: 6 - 1.5, 6 - 1, 2 - 1; mean 3.5, var (1 + 2.25 + 6.25)
    # / 2.
    rewards, mask = np.array([[0.0, 6.0], [2.0, 9.0]]), np.array([[True, True], [True, False]])
    rest = (np.zeros((2, 2), int), np.zeros(2, int), np.zeros((2, 2), bool))
    kl = np.array([[0.5, 1.0], [1.0, 9.0]])
    actual = reinforce_plus_plus(rewards, mask, *rest, kl=kl, kl_coef=1.0)
    close(actual, np.array([[1, 1.5], [-2.5, 0]]) / math.sqrt(4.75))
    # Baseline: 6 - 4 twice, 2 - 4 once, KL left out; mean 2/3, var 96/9/2 = 16/3: 4/3 and -8/3 over 4/sqrt 3.
    actual = reinforce_plus_plus(rewards, mask, *rest, kl=kl, kl_coef=1.0, baseline=True)
    close(actual, np.array([[1, 1], [-2, 0]]) / math.sqrt(3))
    # Two tokens in the short episode: {2, 2, -2, -2}, mean 0, var 16/3.
    actual = reinforce_plus_plus(rewards, mask, *rest, baseline=True, tokens=np.array([[1, 1], [2, 0]]))
    close(actual, np.array([[2, 2], [-2, 0]]) / math.sqrt(16 / 3))


def test_gspo():
    # Log ratios {0.5, 1.5} -> e^1 (the third token is masked); {ln 1/2} -> 1/2, whatever the lengths.
    new, old = np.array([[-1.0, -1.0, 5.0], [math.log(0.5), 0, 0]]), np.array([[-1.5, -2.5, 0.0], [0.0, 0, 0]])
    mask = np.array([[True, True, False], [True, False, False]])
    close(length_normalized_ratios(new, old, mask), [math.e, 0.5])
    # A = 1: min(e, 1.3) = 1.3. A = -1: min(-0.5, -0.8) = -0.8. Mean over the two sequences 0.25.
    assert gspo_objective(new, old, mask, [1.0, -1.0], 0.2, 0.3) == pytest.approx(0.25)
    # Signs turned: min(-e, -1.3) = -e is not clipped, min(0.5, 0.8) = 0.5 neither.
    assert gspo_objective(new, old, mask, [-1.0, 1.0], 0.2, 0.3) == pytest.approx((0.5 - math.e) / 2)


def test_kpo():
    # Q = V = 1. From P = 0: gain 1/2, then P = 1/2 and gain 1.5/2.5 = 0.6, then P = 0.6 and gain 1.6/2.6 = 8/13.
    # Log ratios 2, -1, 0: rho 1, 1 - 0.6 * 2 = -0.2, -0.2 * 5/13 = -1/13. From P_0 = 1 the first gain would be 2/3.
    close(kalman_filtered([2.0, -1.0, 0.0], 1.0, 1.0), [1, -0.2, -1 / 13])
    close(kalman_filtered([2.0], 1.0, 1.0, initial_variance=1.0), [4 / 3])
    # Ratios e and e^-0.2, the third token is masked; the second response starts anew: ln 4, halved, gives 2.
    new, old = np.array([[-1.0, -2.0, 9.0], [0.0, 9, 9]]), np.array([[-3.0, -1.0, 0.0], [-math.log(4), 0, 0]])
    mask = np.array([[True, True, False], [True, False, False]])
    options = {"process_noise": 1.0, "clip_low": 0.1, "clip_high": 0.3}
    low = math.exp(-0.2)
    # A = 1: min(e, 1.3) is clipped, e^-0.2 = 0.82 < 0.9 is not. A = -1: -2 < -1.3 is not.
    objective, derivative = kpo_objective(new, old, mask, [1.0, -1.0], **options)
    assert objective == pytest.approx((1.3 + low) / 4 - 2 / 2)
    close(derivative, [[0, low / 4, 0], [-1, 0, 0]])
    # Signs turned: -e is not clipped, -0.9 is; 1.3 is.
    objective, derivative = kpo_objective(new, old, mask, [-1.0, 1.0], **options)
    assert objective == pytest.approx((-math.e - 0.9) / 4 + 1.3 / 2)
    close(derivative, [[-math.e / 4, 0, 0], [0, 0, 0]])


def test_dapo_dynamic_sampling():
    # First try: one mixed group of two. Second: two mixed groups of three, so three in all where two are wanted.
    tries = [[[1, 1], [1, 0]], [[0, 0], [0, 1], [1, 0]]]
    assert dapo_dynamic_sampling(tries, 2, 10, "verl") == [(0, 1), (1, 1)]  # surplus cut
    assert dapo_dynamic_sampling(tries, 2, 10, "verl-agent") == [(0, 1), (1, 1), (1, 2)]  # surplus kept
    assert dapo_dynamic_sampling(tries, 2, 0, "verl") == [(0, 1), (1, 1)]  # no limit
    with pytest.raises(RuntimeError, match="1 of 2 groups after 1 tries"):
        dapo_dynamic_sampling(tries, 2, 1, "verl")
    assert dapo_dynamic_sampling(tries, 2, 1, "verl-agent") == [(0, 0), (0, 1)]  # the last try is not filtered
    assert dapo_dynamic_sampling([[[1]]], 1, 10, "verl") == [(0, 0)]  # a group of one is kept
    assert dapo_dynamic_sampling([[[1]]], 1, 10, "verl-agent") == []
