"""Rewards that are equal but for rounding, and numbers that float32 cannot hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.advantages import ESTIMATORS, estimate, grouping, informative, parameters

TURNS = 15
LEARNED = {"gae", "hiper"}  # they compare with learned values, not with each other
# Turns are compared too, and may differ.
BY_TURN = {"eb_gae", "eb_td", "ecpo", "gagpo", "gigpo", "graphgpo", "hgpo", "himac", "pgpo", "reinforce_pp"}


def permuted(seed: int) -> dict[str, np.ndarray]:
    """Four episodes with the same multiples of 0.1 as rewards, in another order each; all in one prompt group."""
    rng = np.random.default_rng(seed)
    rewards = rng.integers(-12, 12, TURNS).astype(np.float32) * np.float32(0.1)
    rewards[0] += 10
    shape = (4, TURNS)
    return {
        "rewards": np.stack([rng.permutation(rewards) for _ in range(4)]), "mask": np.ones(shape, bool),
        "states": np.zeros(shape, np.int32), "groups": np.zeros(4, np.int32),
    }  # fmt: skip


def arrays(name: str) -> dict[str, np.ndarray]:
    """Whatever else an estimator needs."""
    shape, turn = (4, TURNS), np.tile(np.arange(TURNS, dtype=np.int32), (4, 1))
    known = {
        "actions": turn, "agents": np.zeros(shape, np.int32), "next_states": turn + 1, "success": np.ones(4, bool),
        "switches": np.zeros(shape, bool), "final_values": np.zeros(4, np.float32),
    }  # fmt: skip
    return {array: known.get(array, np.zeros(shape, np.float32)) for array in parameters(name)[0]}


@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - LEARNED - BY_TURN))
def test_equal_scores_teach_nothing(name):
    for seed in range(20):
        batch = permuted(seed)
        np.testing.assert_array_equal(estimate(name, **batch, **arrays(name)).advantages, 0)
        assert not informative(batch["rewards"], batch["mask"], batch["groups"]).any()


def test_equal_returns_teach_nothing():
    """The first step's return is the whole score where nothing is discounted; a level of equal returns takes no weight."""
    for seed in range(20):
        batch = permuted(seed) | {"states": np.tile(np.arange(TURNS, dtype=np.int32), (4, 1))}
        for name, options in [("gigpo", {}), ("pgpo", {"success": np.ones(4, bool)}), ("hgpo", {"base_group": True})]:
            record = estimate(name, **batch, **options, gamma=1.0, normalize="mean_std")
            np.testing.assert_array_equal(record.advantages[:, 0], 0, err_msg=name)
        np.testing.assert_array_equal(record.level_advantages[..., 0], 0)
        np.testing.assert_array_equal(record.level_weights[..., 0], 0)


def test_small_differences_that_are_real_stay():
    batch = permuted(0)
    batch["rewards"][0, 0] += 0.001
    assert np.abs(estimate("grpo", **batch, normalize="mean_std").advantages).min() > 0.5
    assert informative(batch["rewards"], batch["mask"], batch["groups"]).all()


@pytest.mark.parametrize(("reward", "error"), [
    (1e39, r"rewards\[0, 0\] is 1e\+39: scale it to 1e\+15 or less"), (-1e19, r"rewards\[0, 0\] is -1e\+19: scale it"),
    (np.nan, r"rewards\[0, 0\] is nan: give finite numbers"),
])  # fmt: skip
def test_numbers_that_float32_cannot_hold_are_refused(reward, error):
    batch = permuted(0)
    batch["rewards"] = batch["rewards"].astype(np.float64)
    batch["rewards"][0, 0] = reward
    with pytest.raises(ValueError, match=error):
        estimate("grpo", **batch)


@pytest.mark.parametrize("reward", [1e15, 1e-8])
def test_numbers_at_the_ends_of_the_range_are_compared(reward):
    batch = permuted(0)
    batch["rewards"] = np.where(np.arange(4)[:, None] < 2, reward, 0) * np.ones((4, TURNS))
    advantages = np.asarray(estimate("grpo", **batch, normalize="mean").advantages)
    np.testing.assert_allclose(advantages[:, 0], np.array([1, 1, -1, -1]) * reward * TURNS / 2, rtol=1e-6)


def test_ids_that_a_tracer_hides_are_no_missing_history():
    """-1 is an id like any other inside `jax.jit`: it once stood for the observation before the first."""
    batch = permuted(0) | {"states": np.tile(np.arange(TURNS, dtype=np.int32) % 5, (4, 1)), "history_length": 2}
    shifted = batch | {"states": batch["states"] - 1}
    compiled = jax.jit(lambda batch: estimate("hgpo", **batch, history_length=2).advantages)
    lists = [{name: value for name, value in given.items() if name != "history_length"} for given in (batch, shifted)]
    np.testing.assert_array_equal(*map(compiled, lists))


@pytest.mark.parametrize("rows", [50_000, 500_000])
def test_sums_of_large_groups_are_as_exact_as_those_of_small_ones(rows):
    rng = np.random.default_rng(0)
    values, segment = rng.random(rows).astype(np.float32), np.sort(rng.integers(0, 3, rows)).astype(np.int32)
    sums = grouping.group_sum(jnp.asarray(values), jnp.asarray(segment))
    np.testing.assert_allclose(sums, np.bincount(segment, values)[segment], rtol=2e-6)


@pytest.mark.parametrize("name", ["eb_gae", "gae", "grpo", "hgpo", "reinforce_pp"])
def test_what_is_not_a_number_is_not_taken_for_rounding(name):
    """Inside `jax.jit` values are not checked: the learner sees the NaN, skips the batch and says so."""
    batch = permuted(0)
    batch["rewards"][1, 3] = np.nan
    assert np.isnan(jax.jit(lambda batch: estimate(name, **batch, **arrays(name)).advantages)(batch)).any()
