"""Numbers of the estimators that are worked out by hand from their papers.

The work stands in the comments, and both the estimator and its oracle have to give its numbers.
"""

import math

import numpy as np
import numpy_oracle
import pytest
from batches import GAMMA, PENALTY, B, T, dense
from numpy_steps import Steps
from oracle_from_papers import kalman_filtered, kpo_objective

from hgpo_jax.advantages import estimate, parameters
from hgpo_jax.advantages.hbpo import budget_score


def both(name, batch, **options):
    """The estimator's advantages and its oracle's."""
    arrays, known = parameters(name)
    options |= {k: v for k, v in {"gamma": GAMMA, "invalid_penalty": PENALTY}.items() if k in known}
    common = {field: batch[field] for field in ("rewards", "mask", "states", "groups", "invalid", "by_role") if field in batch}
    further = {name: batch[name] for name in arrays}
    found = estimate(name, **common, **further, **options).advantages
    return found, dense(getattr(numpy_oracle, name)(Steps(**common), **further, **options))


def episodes(paths, rewards, success=None, after=None, groups=None, invalid=(), actions=None):
    """A batch of the shape of all others from each episode's path of states and the reward at its end.

    after: what is seen after the last step, by default a state of its own. invalid: steps.
    """
    states, mask, count = np.zeros((B, T), np.int32), np.zeros((B, T), bool), len(paths)
    batch = {"states": states, "mask": mask, "next_states": states.copy(), "rewards": np.zeros((B, T), np.float32),
             "groups": np.zeros(B, np.int32), "invalid": np.zeros((B, T), bool), "success": np.zeros(B, bool),
             "actions": states.copy()}  # fmt: skip
    for b, path in enumerate(paths):
        states[b, : len(path)], mask[b, : len(path)] = path, True
        batch["next_states"][b, : len(path)] = [*path[1:], 90 + b if after is None else after[b]]
        batch["rewards"][b, len(path) - 1] = rewards[b]
    for step in invalid:
        batch["invalid"][step] = True
    for field, given_ones in (("success", success), ("groups", groups)):
        batch[field][:count] = 0 if given_ones is None else given_ones
    batch["actions"][:count, 0] = 0 if actions is None else actions
    return batch


def check(name, batch, expected, **options):
    expected = np.array(expected)
    for found in both(name, batch, **options):
        # Epsilon is 1e-6, and stays out of the work by hand.
        np.testing.assert_allclose(found[: len(expected), : expected.shape[1]], expected, rtol=2e-6, atol=2e-6)


# Three episodes of one prompt. A: 1 -> 2 -> won (10). B: 1 -> 3 -> lost. C: 1 -> 2 -> lost. Discount 1/2.
# Returns: A 5, 10; B 0, 0; C 0, 0. Groups: 1 = {5, 0, 0}, 2 = {10, 0}, 3 = {0}. Phi = V: 5/3, 5, 0.
PATHS, REWARDS, WON = [(1, 2), (1, 3), (1, 2)], [10, 0, 0], [True, False, False]
R2, R3 = math.sqrt(2), math.sqrt(3)


def test_pgpo_tells_lost_episodes_apart():
    # A^S: group 1 has std 5/sqrt 3, so 2/sqrt 3, -1/sqrt 3, -1/sqrt 3; group 2 has std 5 sqrt 2, so +-1/sqrt 2; group 3 is one
    # visit. delta: A 5 - 5/3 = 10/3, then 10 - 5 = 5; B 0 - 5/3, then 0 - 0; C 10/3, then 0 - 5. A^Phi: group 1 = {10/3, -5/3,
    # 10/3}, std 5/sqrt 3: 1/sqrt 3, -2/sqrt 3, 1/sqrt 3; group 2 = {5, -5}: +-1/sqrt 2. p_succ = 1/3, w = (2/3)^2 = 4/9.
    expected = [[22 / 9 / R3, 13 / 9 / R2], [-17 / 9 / R3, 0], [-5 / 9 / R3, -13 / 9 / R2]]
    check("pgpo", episodes(PATHS, REWARDS, WON), expected)
    # Everyone won: w = 0, whatever delta is.
    check("pgpo", episodes(PATHS, REWARDS, [True] * 3), [[2 / R3, 1 / R2], [-1 / R3, 0], [-1 / R3, -1 / R2]])
    # States that are met once: there is no episode part, which would tell outcomes apart.
    check("pgpo", episodes([(0, 1), (2, 3), (4, 5)], [10, 5, 0], [False] * 3), np.zeros((3, 2)))


def test_pgpos_potentials_that_are_equal_but_for_rounding_give_no_signal():
    """States 1 and 2 were worth the same numbers in another order, and float32's means of them differ."""
    worth = np.float32([2.919888973236084, 2.259354591369629, 4.876749038696289, 4.181202411651611])
    states = np.array([[0, 1], [0, 2], *[[1, 0]] * 4, *[[2, 0]] * 4])
    mask = np.arange(2) < np.array([2, 2, *[1] * 8])[:, None]
    rewards = np.zeros((10, 2), np.float32)
    rewards[2:, 0] = *worth, *worth[[2, 3, 0, 1]]
    batch = {"rewards": rewards, "mask": mask, "states": states, "groups": np.zeros(10, int), "success": np.zeros(10, bool)}
    assert not np.asarray(estimate("pgpo", **batch).advantages)[:2, 0].any()


# Dr. MAS: two roles, 0 and 1, and three episodes of one prompt with the scores 10, 0, 4. Role 0's rows have 10, 0, 4, 4: mean
# 4.5, sample variance 17; role 1's have 10, 0, 4: mean 14/3, sample variance 76/3, as the three episodes have.
# Discounted returns (1/2): 5, 10; 0, 0; 1, 2, 4. Role 0 in state 1: 5, 0, 1; role 1 in state 2: 10, 2; the others are alone.
TEAM = episodes([(1, 2), (1, 3), (1, 2, 2)], [10, 0, 4])
ACTS = np.zeros((B, T), np.int32)
ACTS[:3, 1] = 1
LOW, HIGH, FIRST, SECOND = math.sqrt(17), math.sqrt(76 / 3), math.sqrt(17 / 3), math.sqrt(28)
BY_ROLE = [[5.5, 16 / 3, 0], [-4.5, -14 / 3, 0], [-0.5, -2 / 3, -0.5]]


def test_dr_mas_and_its_baseline():
    own = np.divide(BY_ROLE, [LOW, HIGH, LOW])
    check("dr_mas", TEAM | {"agents": ACTS}, own)
    check("grpo", TEAM | {"by_role": ACTS}, own)
    # What it is compared with counts each episode once.
    once = [[16 / 3, 16 / 3, 0], [-14 / 3, -14 / 3, 0], [-2 / 3, -2 / 3, -2 / 3]]
    check("grpo", TEAM, np.divide(once, HIGH), statistics="per_trajectory")
    check("dr_mas", TEAM | {"agents": ACTS}, np.divide(once, HIGH), statistics="per_trajectory")


@pytest.mark.parametrize(("name", "options", "expected"), [
    ("rloo", {}, [[22 / 3, 8, 0], [-6, -7, 0], [-2 / 3, -1, -2 / 3]]),  # times 4/3 and 3/2
    ("gigpo", {"normalize": "mean"}, np.add(BY_ROLE, [[3, 4, 0], [-2, 0, 0], [-1, -4, 0]])),
    ("hgpo", {"normalize": "mean", "history_length": 1}, [[3, 4, 0], [-2, 0, 0], [-1, -4, 0]]),  # at both levels
    ("reinforce_pp_baseline", {}, np.divide(BY_ROLE, math.sqrt(305 / 18))),  # whitened over the 7 rows of both
    ("reinforce_pp", {}, [  # each role's returns whitened: means 2.5 and 4, variances 17/3 and 28
        [2.5 / FIRST, 6 / SECOND, 0], [-2.5 / FIRST, -4 / SECOND, 0], [-1.5 / FIRST, -2 / SECOND, 1.5 / FIRST]
    ]),
])  # fmt: skip
def test_dr_mas_keys_in_other_methods(name, options, expected):
    check(name, TEAM | {"by_role": ACTS}, expected, **options)


# A: 1 -> 2 -> won. B: 1 -> 3 -> 1 (lost). C: 1 -> 4 -> 5 (lost); nobody acted in 5.
# Distances: 2: 1, 1: 2, 3: 3 (by 1 and 2); 4, 5 unreachable: 3 + 1 = 4.
# Step returns 10 * 0.1^d(next): A 1, 10 (next is success); B 0.01, 0.1; C 0.001, 0.001. Only observation 1 has a group: {1,
# 0.01, 0.001}.
GRAPH = episodes([(1, 2), (1, 3), (1, 4)], REWARDS, WON, after=[6, 1, 5])


def test_graphgpo():
    # Step part: mean 1.011/3 = 0.337. Episode part: rows {10, 10, 0, 0, 0, 0}, mean 10/3.
    expected = [[0.663 + 20 / 3, 20 / 3], [-0.327 - 10 / 3, -10 / 3], [-0.336 - 10 / 3, -10 / 3]]
    check("graphgpo", GRAPH, expected, normalize="mean")
    # Step: 0.663^2 + 0.327^2 + 0.336^2 = 0.659394, over 2: 0.329697. Episode: (2 * 400 + 4 * 100) / 9 / 5 = 80/3.
    step, episode = math.sqrt(0.329697), math.sqrt(80 / 3)
    up, down = 20 / 3 / episode, -10 / 3 / episode
    check("graphgpo", GRAPH, [[0.663 / step + up, up], [-0.327 / step + down, down], [-0.336 / step + down, down]])
    # Prompt 0: two lost episodes of one step, the second invalid; step returns and scores differ by the penalty, of which both
    # parts have half. Prompt 1: a single row of score 10: step part 0, episode part 10 (mean 0).
    batch = episodes([(1,), (1,), (1,)], [0, 0, 10], [False, False, True], [1, 2, 3], groups=[0, 0, 1], invalid=[(1, 0)])
    check("graphgpo", batch, [[PENALTY], [-PENALTY], [10]], normalize="mean")


def test_g2po():
    # gamma = 1/2. Values: V(1) = (5 + 0 + 0) / 3 / 2 = 5/6, V(2) = 10/2 = 5, V(3) = V(4) = 0; after A 10, after B and C 0.
    # Node part, in 1: {5, 0, 0}, mean 5/3. Edges: A 25/6, 5; B -5/6, 0; C -5/6, 0; mean 5/4. Episode part as above.
    won, lost = [10 / 3 + 35 / 12 + 20 / 3, 15 / 4 + 20 / 3], [-5 / 3 - 25 / 12 - 10 / 3, -5 / 4 - 10 / 3]
    check("g2po", GRAPH, [won, lost, lost], normalize="mean")
    # Squares: node (100 + 25 + 25) / 9 / 2 = 25/3; edges (35^2 + 45^2 + 2 * 25^2 + 2 * 15^2) / 144 / 5 = 4950/720.
    node, edge, episode = math.sqrt(25 / 3), math.sqrt(4950 / 720), math.sqrt(80 / 3)
    won = [10 / 3 / node + 35 / 12 / edge + 20 / 3 / episode, 15 / 4 / edge + 20 / 3 / episode]
    lost = [-5 / 3 / node - 25 / 12 / edge - 10 / 3 / episode, -5 / 4 / edge - 10 / 3 / episode]
    check("g2po", GRAPH, [won, lost, lost])


def with_actions(batch, *acts):
    for b, act in enumerate(acts):
        batch["actions"][b, : len(act)] = act
    return batch


def test_crbc():
    # 1 -x-> 2 -y-> won; 1 -x-> 2 -z-> lost; 1 -w-> 3 -y-> lost. beta = 0.98. V(2) = 0.49, V(3) = 0; Q(1, x) = 0.4802,
    # Q(1, w) = 0, V(1) = 2/3 of it. Deviations in 1: d = 0.4802 / 3, d and -2d, their std R2 d; in 2 0.49 and -0.49.
    batch = episodes([(1, 2), (1, 2), (1, 3)], REWARDS, WON)
    batch = with_actions(batch, (4, 5), (4, 6), (7, 5))
    up, down = 20 / 3, -10 / 3
    expected = [[up + 5 / R2, up + 5], [down + 5 / R2, down - 5], [down - 5 * R2, down]]
    check("crbc", batch, expected, normalize="mean")
    # 1 -x-> 2 -y-> won; 1 -w-> 4 -y-> 2 -y-> won; 1 -x-> 2 -z-> lost, whose last observation is 2 and is not gone on from.
    # V(2) = 0.98 * 2/3; Q(1, x) = 0.98 V(2), Q(1, w) = 0.98^2 V(2): they differ by less than sigma_min, and are divided by 0.1.
    batch = episodes([(1, 2), (1, 4, 2), (1, 2)], [10, 10, 0], [True, True, False], after=[9, 9, 2])
    batch = with_actions(batch, (4, 5), (7, 5, 5), (4, 6))
    less = 10 * (1 - 0.98) * 0.98**2 * 2 / 3 / 3
    up, down = 10 - 50 / 7, -50 / 7
    won, lost = up + 5 / R2, down - 5 * R2
    expected = [[up + 5 * less, won, 0], [up - 10 * less, up, won], [down + 5 * less, lost, 0]]
    check("crbc", batch, expected, normalize="mean")
    # An invalid action is not the one that its id says; its penalty is in the episode's part alone.
    batch = with_actions(episodes([(1,), (1,)], [10, 0], [True, False], invalid=[(1, 0)]), (4,), (4,))
    half = (10 + PENALTY) / 2
    check("crbc", batch, [[half + 5], [-half - 5]], normalize="mean")


def test_milegpo():
    # Milestones 1 and 2. Success rates 1/3 and 1 against 1/3 of all; both on all successes; degrees 4 and 2 of at most 4.
    # Scores: 0 + 1 + 1/4 and 2/3 + 1 + 1/8. From 1, the branch to 2 has margin 1, the largest. Its progress is 1 + 2/3, as
    # is that of 2 -> success: both evidences of 2 are 1, its score 3 * 43/24. Nothing that won comes into 1: its score is 0.
    # Potential: 2: 1, 1: 1/5, 3: 1/25. Rises: 1 -> 2 4/5, 3 -> 1 4/25, else 0. No trap: nobody fails in 3, 4 or 5 twice.
    # Returns from 1: 10/5, 10/125, 0, with milestones 2 + 2.5 * 4/5, 0.08, 0; means 2.08/3 and 1.36.
    step = [2 - 2.08 / 3 + 0.2 * (2.64 - 2 + 2.08 / 3), 0.08 - 2.08 / 3 + 0.2 * (-1.36 + 2.08 / 3)]
    step.append(-2.08 / 3 + 0.2 * (-1.36 + 2.08 / 3))
    expected = [[step[0] + 20 / 3, 20 / 3], [step[1] - 10 / 3, -10 / 3], [step[2] - 10 / 3, -10 / 3]]
    check("milegpo", GRAPH, expected, normalize="mean")
    # With WebShop's rules 1 stays, with a score of 5/4 of 43/8, 10/43: its potential is 10/43, that of 3 a fifth of it.
    first = 2 + 2.5 * 33 / 43
    mean = (first + 0.08) / 3
    expected = [[first - mean + 20 / 3, 20 / 3], [0.08 - mean - 10 / 3, -10 / 3], [-mean - 10 / 3, -10 / 3]]
    check("milegpo", GRAPH, expected, normalize="mean", residual=1.0, coverage=0.5, shrink=0.5, branch_alone=True)


def test_milegpo_leaves_traps():
    # Both failures pass 3: a trap, whose potential rises by 4/5 from 1, a quarter of which counts. Returns: 4, -0.5, -0.5.
    batch = episodes([(1, 2), (1, 3), (1, 3)], REWARDS, WON, after=[6, 7, 8])
    lost = [-1.5 - 10 / 3, -10 / 3]
    check("milegpo", batch, [[3 + 20 / 3, 20 / 3], lost, lost], normalize="mean", residual=1.0)
    # One failure alone is no trap, unless it comes back: 1 -> 3 -> 3 -> 7. Its score is 1/3 + 1/4, the larger of the two of B;
    # 2.5 * 0.2 is lost from 1 to 3, nothing from 3 to 3.
    batch = episodes([(1, 2), (1, 3, 3), (1, 4)], REWARDS, WON, after=[6, 7, 8])
    found, oracle = both("milegpo", batch, normalize="mean", residual=1.0)
    np.testing.assert_allclose(found, oracle, atol=1e-5)
    assert found[1, 0] - found[2, 0] == pytest.approx(-0.5)


@pytest.mark.parametrize(("paths", "won", "after", "expected"), [
    # 0 -> 1 -> success, whose last observation is again 1 (say, "you put the mug down").
    ([(0, 1)], [True], [1], [[1, 0]]),
    # A failure that sees 1 is one step from success, and not there.
    ([(0, 1), (0, 2)], [True, False], [1, 1], [[1, 0], [2, 1]]),
    # The success's last observation 3 is no node: a failure that sees it cannot go on from there.
    ([(0, 1), (0, 2)], [True, False], [3, 3], [[1, 0], [3, 3]]),
])  # fmt: skip
def test_an_observation_is_never_the_goal(paths, won, after, expected):
    """Two goals in a task: what is seen at the end is also seen on the way, before the second goal."""
    batch = episodes(paths, [10, 0], won, after)
    del batch["actions"]
    record = estimate("graphgpo", **batch, normalize="mean", invalid_penalty=PENALTY)
    distances = np.log10(10 / np.asarray(record.returns)[: len(paths), :2])
    assert distances.round().astype(int).tolist() == expected


def test_gagpo():
    # gamma = lambda = 1/2. delta: A 5/2 - 5/3 = 5/6, 10 - 5 = 5; B -5/3, 0; C 5/6, -5.
    # GAE: A 5/6 + 5/4 = 25/12, 5; B -5/3, 0; C 5/6 - 5/4 = -5/12, -5. Mean 0.
    # A second prompt, also in observation 1, rewards 4 and 2: V = 3, GAE +-1.
    batch = episodes([*PATHS, (1,), (1,)], [*REWARDS, 4, 2], groups=[0, 0, 0, 1, 1])
    check("gagpo", batch, [[25 / 12, 5], [-5 / 3, 0], [-5 / 12, -5], [1, 0], [-1, 0]], lam=0.5, normalize="mean")
    # B's second action was invalid, the only visit of observation 3: only its own step is punished.
    raw = np.array([[25 / 12, 5], [-5 / 3, -PENALTY], [-5 / 12, -5]])
    check("gagpo", episodes(PATHS, REWARDS, invalid=[(1, 1)]), raw - raw.mean(), lam=0.5, normalize="mean")


def test_reinforce_pp():
    # Returns 3, 6 and 2 less 1/4 for the invalid step: mean 43/12, in twelfths -7, 29, -22; squares 1374, over 2: 687.
    batch = episodes([(0, 0), (0,)], [6, 2], invalid=[(1, 0)])
    check("reinforce_pp", batch, np.array([[-7, 29], [-22, 0]]) / math.sqrt(687))


def in_one_state(actions, rewards, normalize="mean", invalid=()):
    """ECPO's step part of one visit of one state by each episode."""
    batch = episodes([(0,)] * len(actions), rewards, actions=actions, invalid=invalid)
    del batch["success"], batch["next_states"]
    record = estimate("ecpo", **batch, normalize=normalize, gamma=GAMMA, invalid_penalty=PENALTY)
    return record.level_advantages[: len(actions), 0, 1]


def test_ecpo_shrinks_a_lucky_action_that_was_tried_once_most():
    # Mean 2. The action tried once: a third of its 8 above the mean. The one tried four times: four sixths of its -2.
    # Actions explain everything; tanh(5/4) is how far five visits are trusted.
    expected = np.tanh(5 / 4) * np.array([8 / 3, *[-4 / 3] * 4])
    np.testing.assert_allclose(in_one_state([7, 3, 3, 3, 3], [10, 0, 0, 0, 0]), expected, rtol=1e-5)
    # The sample variance of the returns is (8^2 + 4 * 2^2) / 4 = 20, whatever is shrunk.
    found = in_one_state([7, 3, 3, 3, 3], [10, 0, 0, 0, 0], normalize="mean_std")
    np.testing.assert_allclose(found, expected / np.sqrt(20), rtol=1e-5)


def test_ecpo_counts_a_state_as_far_as_actions_explain_its_returns():
    # Means 8 and 4 around 6, two tries of each: B = 4. Within: 2 away from the one, 4 away from the other: W = 10.
    found = in_one_state([0, 0, 1, 1], [10, 6, 8, 0])
    np.testing.assert_allclose(found, np.tanh(1) * 4 / 14 * np.array([1, 1, -1, -1]), rtol=1e-5)
    # The same returns, but either action has the same mean: noise, which GiGPO would take for credit.
    assert not np.asarray(in_one_state([0, 1, 1, 0], [10, 6, 6, 2])).any()
    # Invalid actions are one action. Means 4 and 6 around 5: B = 1, and W = 16 / 2 from the two invalid ones.
    found = in_one_state([0, 1, 2, 2], [8 + PENALTY, PENALTY, 6, 6], invalid=[(0, 0), (1, 0)])
    np.testing.assert_allclose(found, np.tanh(1) / 9 * np.array([-0.5, -0.5, 0.5, 0.5]), rtol=1e-5)


def test_himac():
    """Blueprint 4 is won by one of three executions, 5 by its only one; the last execution has two turns, the others three."""
    rewards = np.float32([[0, 0, 0, 16], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 8, 0]])
    mask = np.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]], bool)
    batch = {
        "rewards": rewards, "mask": mask, "states": np.array([[9, 0, 1, 2]] * 4), "groups": np.zeros(4, int),
        "agents": np.array([[0, 1, 1, 1]] * 4), "actions": np.array([[4, 1, 2, 3], [4, 3, 2, 1], [4, 1, 2, 3], [5, 1, 2, 3]]),
        "invalid": np.array([[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]], bool),
    }  # fmt: skip
    record = estimate("himac", **batch, gamma=0.5, normalize="mean", statistics="per_trajectory", invalid_penalty=0.25)
    # Returns of the executions: 2, 0, 0 and 2. Worths: 2/3 for blueprint 4, written three times, and 2; their mean is 1.
    macro, micro = [-1 / 3, -1 / 3, -1 / 3, 1 - 0.25], [4 / 3, -2 / 3, -2 / 3, 0]
    expected = np.where(mask, np.array(micro)[:, None], 0)
    expected[:, 0], expected[0, 2] = macro, 4 / 3 - 0.25
    np.testing.assert_allclose(record.advantages, expected, atol=1e-6)
    np.testing.assert_allclose(record.returns[:, 1], [2, 0, 0, 2])
    # By steps, the mean of blueprint 4's seven is 6/7.
    record = estimate("himac", **batch, gamma=0.5, normalize="mean")
    np.testing.assert_allclose(record.advantages[:, 1], [8 / 7, -6 / 7, -6 / 7, 0], atol=1e-6)
    np.testing.assert_allclose(record.advantages[1:3, 0], [-1 / 3, -1 / 3], atol=1e-6)


def test_hipers_segments_of_two_and_one_steps():
    """gamma = lambda = 1/2, one trajectory of three steps, the second segment its last step."""
    batch = {"rewards": np.float32([[0, 4, 8]]), "mask": np.ones((1, 3), bool), "states": np.zeros((1, 3), int),
             "groups": np.zeros(1, int), "switches": np.array([[False, False, True]])}  # fmt: skip
    values = {"high_values": [[2, 99, 6]], "low_values": [[1, 2, 4]], "term_values": [[0, 1, 5]]}
    values = {name: np.float32(value) for name, value in (values | {"final_values": [0]}).items()}
    record = estimate("hiper", **batch, **values, whiten=False, gamma=0.5, lam=0.5)
    # The last segment: 8 - 6. The first: rewards 0 + 4/2, then 6/4 of V_high, less 2; and 1/4 * 1/2 of the last one's 2.
    np.testing.assert_array_equal(record.part_advantages[0, :, 1], [2 + 1.5 - 2 + 0.25, 0, 2])
    # Temporal differences 0 + 2/2 - 1, 4 + 6/2 - 2 and 8 - 4; a quarter of the second is credited to the first.
    np.testing.assert_array_equal(record.part_advantages[0, :, 2], [0 + 1.25, 5, 4])
    # Rewards to the segment's end, then V_high: 2 + 6/4, 4 + 6/2, 8.
    np.testing.assert_array_equal(record.part_advantages[0, :, 0], [3.5, 7 - 1, 8 - 5])


def test_the_oracle_of_kpo():
    def close(actual, expected):
        np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6)

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


def four(scores):
    """Episodes of one step, in prompt groups of four."""
    shape = (len(scores), 1)
    return {"rewards": np.float32(scores)[:, None], "mask": np.ones(shape, bool), "states": np.zeros(shape, np.int32),
            "groups": (np.arange(len(scores)) // 4).astype(np.int32)}  # fmt: skip


def test_beacon():
    """Milestones in steps 2 and 4, and in step 1 alone; nobody wins, so that there is no episode part."""
    fulfilled = np.float32([[0, 1, 0, 2], [1, 1, 0, 1]])  # the first milestone is lost in step 3, and reached again later
    mask, states = np.ones((2, 4), bool), np.zeros((2, 4), int)
    batch = {"rewards": 0 * fulfilled, "mask": mask, "states": states, "groups": np.zeros(2, int)}
    record = estimate("beacon", **batch, signals=fulfilled[..., None], gamma=0.9)
    np.testing.assert_allclose(record.returns, [[9, 10, 9, 10], [10, 0, 0, 0]], rtol=1e-6)
    expected = [[-2 / 3, 1 / 3, 5.2, 6.2], [1 / 3, -3.8, -3.8, -3.8]]
    np.testing.assert_allclose(record.advantages, expected, rtol=1e-5)


@pytest.mark.slow
def test_dvao():
    """Rewards (1, 0, 1, 0) and (.2, .4, .6, .8), weights 1 and 1/2; the numbers are of the population std, sqrt(3/4) less."""
    signals = np.array([0.2, 0.4, 0.6, 0.8], np.float32)[:, None, None]
    expected = np.array([0.572079, -0.898982, 0.898982, -0.572079]) * math.sqrt(3 / 4)
    record = estimate("dvao", **four([1, 0, 1, 0]), signals=signals, signal_weights=(0.5,))
    np.testing.assert_allclose(record.advantages[:, 0], expected, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("scores", "lengths", "weight"), [
    ([2, 0, 0, 0], [900, 500, 700, 4000], 1),  # 900 above 600, the mean of the failures that were not cut
    ([2, 0, 0, 0], [400, 500, 700, 4000], 0.1),
    ([0, 0, 0, 1], [900, 500, 700, 900], 1),
    ([0, 1, 2, 3], [900, 500, 700, 900], 0.1),  # no success
])  # fmt: skip
def test_adora(scores, lengths, weight):
    """By the rule of the authors' code a score is a success from 2 on; the last two cases turn that round."""
    batch = four(scores)
    success = batch["rewards"][:, 0] >= 2 if scores[0] else np.full(4, weight == 1)
    record = estimate("adora", **batch, success=success, lengths=np.int32(lengths)[:, None], length_limit=3900)
    np.testing.assert_allclose(record.advantages, weight * estimate("grpo", **batch).advantages, rtol=1e-6)


@pytest.mark.slow
def test_g2rpo():
    expected = [1.534121, -0.766839, -0.766839, 0.157311, 0.687961, 0.687961, -0.766839, -0.766839]
    for first in ([1, 0, 0, 0.5], [9, -3, -3, 0]):  # any monotone map
        batch = four([*first, 1, 1, 0, 0])
        np.testing.assert_allclose(estimate("g2rpo", **batch, task=np.zeros(8, np.int32)).advantages[:, 0], expected, atol=2e-6)
    # Alone in its task type, a prompt group keeps the order of its first map.
    alone = estimate("g2rpo", **batch, task=np.arange(8, dtype=np.int32) // 4).advantages[:, 0]
    np.testing.assert_allclose(alone, [1.150349, -0.734494, -0.734494, 0.318639, *[0.734494] * 2, *[-0.734494] * 2], atol=2e-6)


@pytest.mark.slow
def test_gbpo():
    """The median is 1/4, the mean 3/8. A group of one has neither, and its std is 1."""
    record = estimate("gbpo", **four([1, 0, 0, 0.5, 3]))
    np.testing.assert_allclose(record.advantages[:4, 0], [1.305580, -0.783348, -0.783348, 0.261116], atol=2e-6)
    np.testing.assert_allclose(record.margins[:4, 0], [1.566696, -0.522232, -0.522232, 0.522232], atol=2e-6)
    np.testing.assert_allclose([record.advantages[4, 0], record.margins[4, 0]], 3, rtol=1e-5)


@pytest.mark.slow
def test_hapo():
    """A success of 30 tokens and a failure of 10; one of 1 beside 40 would be 6.3 stds away, and is as in GRPO."""
    for tokens, expected in (([30, 10], [0.577350, -1.732051]), ([1, 40], [math.sqrt(0.5), -math.sqrt(0.5)])):
        record = estimate("hapo", **four([1, 0]), lengths=np.int32(tokens)[:, None])
        np.testing.assert_allclose(record.advantages[:, 0], expected, atol=1e-5)


@pytest.mark.parametrize(("length", "budget", "expected"), [
    (400, 512, 3.923141), (800, 512, 3.742912), (400, 2560, 2.222281), (3000, 2560, 1.524755),
])  # fmt: skip
def test_the_score_of_a_budget_of_tokens(length, budget, expected):
    assert budget_score(length, budget, 4096) == pytest.approx(expected, abs=2e-6)


@pytest.mark.slow
def test_hbpo():
    """Three successes of 4, 8 and 6 turns with budgets of 5, 5 and 10, and a failure of 20 turns with a budget of 10."""
    mask = np.arange(20) < np.array([4, 8, 6, 20])[:, None]
    batch = {"rewards": 10.0 * mask, "mask": mask, "states": np.zeros(mask.shape, int), "groups": np.zeros(4, int)}
    budgets = np.repeat(np.float32([5, 5, 10, 10])[:, None, None], 20, axis=1)
    record = estimate("hbpo", **batch, signals=budgets, success=np.arange(4) < 3, statistics="per_trajectory")
    np.testing.assert_allclose(record.returns[:, 0], [3.695518, 3.086068, 2.828427, 0], atol=2e-6)
    first, second = [0.787264, 0.416195, 0.259328, -1.462786], [-0.304725, -0.304725, -1.414214, -1.414214]
    np.testing.assert_allclose(record.advantages[:, 0], np.add(first, second), atol=4e-6)
    assert not np.asarray(record.advantages)[~mask].any()


def test_gdpo():
    """Two rewards of four episodes; the reference adds their normalized values with the weights 1 and 1/2, and then whitens."""
    added = np.array([0.329180, -1.223607, 1.223607, -0.329180])
    signals = np.array([0.2, 0.4, 0.6, 0.8], np.float32)[:, None, None]
    batch = four([1, 0, 1, 0]) | {"signals": signals}
    found = np.asarray(estimate("gdpo", **batch, signal_weights=(0.5,)).advantages)[:, 0]
    np.testing.assert_allclose(found, added / added.std(ddof=1), atol=2e-5)
    swapped = batch | {"rewards": signals[..., 0], "signals": batch["rewards"][..., None]}
    found = np.asarray(estimate("gdpo", **swapped, signal_weights=(2.0,)).advantages)[:, 0]
    np.testing.assert_allclose(found, added / added.std(ddof=1), atol=2e-5)


def test_streams_of_gdpo_that_cancel_leave_nothing():
    """The floor of their different scales leaves less than the rounding of what is added, which whitening must not enlarge."""
    rewards = np.array([0, 2, 3, 7], np.float32)[:, None]
    batch = {"rewards": rewards, "mask": np.ones((4, 1), bool), "states": np.zeros((4, 1), np.int32),
             "groups": np.array([0, 0, 1, 1], np.int32), "signals": -100 * rewards[..., None]}  # fmt: skip
    advantages = np.asarray(estimate("gdpo", **batch).advantages)
    np.testing.assert_array_equal(advantages, 0)
