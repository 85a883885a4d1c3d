"""HiMAC by hand, and what must hold of it: each level is blind to what the other one decided."""

import numpy as np
import pytest
from batches import B, T, batches, further_arrays
from hypothesis import given, settings

from hgpo_jax.advantages import estimate

PLANNER, EXECUTOR = 0, 1


def one_plan_each(batch, blueprints):
    """The batch with a planner that acts in the first step of every episode, in one state; blueprints: i[B], what it wrote."""
    states, actions = np.where(batch["mask"], batch["states"], 0), np.zeros((B, T), np.int32)
    states[:, 0], actions[:, 0] = 7, blueprints
    agents = np.broadcast_to(np.where(np.arange(T) == 0, PLANNER, EXECUTOR), (B, T)).astype(np.int32)
    rewards = np.where(batch["mask"], batch["rewards"], 0)
    return {**batch, "rewards": rewards, "states": states, "agents": agents, "actions": actions}


def test_by_hand():
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


@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_advantages_of_what_is_compared_sum_to_zero(batch):
    further = further_arrays(batch, ("agents", "actions"))
    A = np.asarray(estimate("himac", **batch, **further, normalize="mean", invalid_penalty=0.0).advantages)
    agents, actions, sums = further["agents"], further["actions"], {}
    for b, t in np.argwhere(batch["mask"]):
        if agents[b, t] == agents[b, 0]:
            situation = int(batch["groups"][b]), int(batch["states"][b, t])
            blueprint, key = (*situation, int(actions[b, t])), situation
        else:
            key = ("executions of", *blueprint)
        sums[key] = sums.get(key, 0.0) + A[b, t]
    np.testing.assert_allclose(list(sums.values()), 0, atol=1e-4)


@pytest.mark.parametrize("normalize", ["mean", "mean_std"])
@settings(max_examples=20, deadline=None)
@given(batch=batches(continuous=True))
def test_executors_are_not_blamed_for_their_blueprint(normalize, batch):
    """What another blueprint's executions were worth changes a planner's advantage, and no executor's."""
    blueprints = np.arange(B) % 3
    batch = one_plan_each(batch | {"groups": np.zeros(B, np.int32)}, blueprints)
    others = batch | {"rewards": batch["rewards"] * np.where(blueprints == 0, 3, 1)[:, None]}
    before, after = (np.asarray(estimate("himac", **b, normalize=normalize).advantages) for b in (batch, others))
    np.testing.assert_allclose(after[blueprints > 0, 1:], before[blueprints > 0, 1:], rtol=1e-4, atol=1e-5)
    for same in range(3):
        planned = after[(blueprints == same) & batch["mask"][:, 0] & ~batch["invalid"][:, 0], 0]
        assert np.ptp(planned) < 1e-5 if len(planned) else True


def full_episodes(seed, blueprints):
    """Two prompt groups of episodes of T steps: Dr. MAS leaves the only step of a role in its group its score."""
    rng = np.random.default_rng(seed)
    batch = {
        "rewards": rng.normal(size=(B, T)).astype(np.float32), "mask": np.ones((B, T), bool),
        "states": rng.integers(0, 3, (B, T)), "groups": np.arange(B) // 4,
    }  # fmt: skip
    return one_plan_each(batch, blueprints)


def dr_mas(batch, **options):
    alone = {name: value for name, value in batch.items() if name != "actions"}
    return np.asarray(estimate("dr_mas", **alone, **options).advantages)


@pytest.mark.parametrize("statistics", ["per_step", "per_trajectory"])
@pytest.mark.parametrize("seed", range(3))
def test_of_one_blueprint_executors_have_what_dr_mas_gives_them(seed, statistics):
    batch, options = full_episodes(seed, 3), {"normalize": "mean", "statistics": statistics}
    A = np.asarray(estimate("himac", **batch, gamma=1.0, **options).advantages)
    np.testing.assert_allclose(A[:, 1:], dr_mas(batch, **options)[:, 1:], rtol=1e-4, atol=1e-5)
    assert not A[:, 0].any() and A[:, 1:].any()


@pytest.mark.parametrize("normalize", ["mean", "mean_std"])
@pytest.mark.parametrize("seed", range(3))
def test_where_no_blueprint_is_written_twice_planners_have_what_dr_mas_gives_them(seed, normalize):
    batch = full_episodes(seed, np.arange(B))
    A = np.asarray(estimate("himac", **batch, gamma=1.0, normalize=normalize).advantages)
    np.testing.assert_allclose(A[:, 0], dr_mas(batch, normalize=normalize)[:, 0], rtol=1e-4, atol=1e-5)
    assert not A[:, 1:].any() and A[:, 0].any()
