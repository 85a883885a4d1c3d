"""HiMAC by hand, and what must hold of it: each level is blind to what the other one decided."""

import numpy as np
from batches import B, T, batches
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
@given(batch=batches(continuous=True))
def test_executors_are_not_blamed_for_their_blueprint(batch):
    """What another blueprint's executions were worth changes a planner's advantage, and no executor's."""
    blueprints = np.arange(B) % 3
    batch = one_plan_each(batch | {"groups": np.zeros(B, np.int32)}, blueprints)
    others = batch | {"rewards": batch["rewards"] * np.where(blueprints == 0, 3, 1)[:, None]}
    before, after = (np.asarray(estimate("himac", **b, normalize="mean", gamma=1.0).advantages) for b in (batch, others))
    np.testing.assert_allclose(after[blueprints > 0, 1:], before[blueprints > 0, 1:], rtol=1e-4, atol=1e-5)
    for same in range(3):
        planned = after[(blueprints == same) & batch["mask"][:, 0] & ~batch["invalid"][:, 0], 0]
        assert np.ptp(planned) < 1e-5 if len(planned) else True


def test_with_one_blueprint_or_all_different_ones_it_is_dr_mas():
    """Executors of a sole blueprint, and planners who never write the same, have what Dr. MAS gives them; the others 0."""
    rng = np.random.default_rng(0)
    batch = {
        "rewards": rng.normal(size=(B, T)).astype(np.float32), "mask": np.ones((B, T), bool),
        # Two prompt groups of several: Dr. MAS leaves the only step of a role in its group its score.
        "states": rng.integers(0, 3, (B, T)), "groups": np.arange(B) // 4, "invalid": np.zeros((B, T), bool),
    }  # fmt: skip
    for blueprints, compared in ((np.full(B, 3), slice(1, None)), (np.arange(B), slice(0, 1))):
        planned = one_plan_each(batch, blueprints)
        found = np.array(estimate("himac", **planned, normalize="mean", gamma=1.0).advantages)
        del planned["actions"]
        expected = np.asarray(estimate("dr_mas", **planned, normalize="mean").advantages)
        np.testing.assert_allclose(found[:, compared], expected[:, compared], rtol=1e-4, atol=1e-5)
        assert found[:, compared].any()
        found[:, compared] = 0
        assert not found.any()
