"""What must hold whatever the numbers: exact zeros, bounds, devices, rewards that are equal but for rounding."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import B, T, batches, further_arrays
from hypothesis import given, settings
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hgpo_jax.advantages import ESTIMATORS, estimate, grouping, informative, parameters


@pytest.mark.parametrize("history", [1, 2])  # an odd and an even number of columns
def test_short_and_long_ids_sort_alike(history):
    rng = np.random.default_rng(0)
    mask = np.arange(12) < rng.integers(1, 13, 16)[:, None]
    batch = {"rewards": rng.normal(size=(16, 12)).astype(np.float32), "mask": mask}
    states, groups = rng.integers(0, 3, (16, 12)), np.arange(16) // 8
    expected = estimate("hgpo", **batch, states=states, groups=groups, history_length=history)
    for largest in (2**15 - 3, 2**15 - 2, 2**15 - 1, 2**15, 2**31 - 2):
        moved = estimate("hgpo", **batch, states=largest - states, groups=largest - groups, history_length=history)
        np.testing.assert_array_equal(moved.level_sizes, expected.level_sizes)
        np.testing.assert_allclose(moved.advantages, expected.advantages, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_informative_groups_hold_two_different_scores(batch):
    kept = np.asarray(jax.jit(informative)(batch["rewards"], batch["mask"], batch["groups"]))
    scores = np.where(batch["mask"], batch["rewards"], 0).sum(1)
    happened = batch["mask"].any(1)
    for b in range(B):
        peers = scores[(batch["groups"] == batch["groups"][b]) & happened]
        assert kept[b] == (happened[b] and peers.min() < peers.max())


def optimized(*names):
    """The first by itself; the others as users' programs are compiled, too, because rounding is what matters here."""
    return [names[0], *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.optimized]) for name in names[1:])]


@pytest.mark.parametrize("name", optimized("gigpo", "hgpo", "eb_td"))
def test_equal_returns_give_exact_zeros(name):
    """Every value 10 * 0.95^n at every group size from 2 to 64, one-step trajectories, one batch."""
    values, sizes = np.float32(10) * np.float32(0.95) ** np.arange(50, dtype=np.float32), range(2, 65)
    rewards = np.concatenate([np.full(size, value) for value in values for size in sizes])
    groups = np.repeat(np.arange(len(values) * len(sizes)), np.tile(list(sizes), len(values)))
    mask = np.ones((rewards.size, 1), bool)
    record = estimate(name, rewards=rewards[:, None].astype(np.float32), mask=mask, states=0 * mask.astype(int), groups=groups)
    assert not np.asarray(record.advantages).any()


@pytest.mark.parametrize("name", optimized("gae", "gagpo", "eb_gae"))
def test_rounding_is_not_taken_for_an_advantage(name):
    """Where values explain everything, nothing is left that a division by its own spread could blow up."""
    for steady in (False, True):
        # Equal trajectories through distinct states; or one state, where a reward in each step keeps the return at 10.
        rewards = np.full((8, 50), 10 * (1 - 0.95) if steady else 0.0, np.float32)
        rewards[:, -1] = 10
        exact = 10 * 0.95 ** (np.zeros(50) if steady else np.arange(49, -1, -1))
        # The learned values are right up to float32's rounding.
        values = {"values": np.tile(exact.astype(np.float32), (8, 1)), "final_values": np.zeros(8, np.float32)}
        learned = values if name == "gae" else {}
        states = np.tile(np.arange(50) * (not steady), (8, 1))
        mask, groups = np.ones((8, 50), bool), np.zeros(8, int)
        record = estimate(name, rewards=rewards, mask=mask, states=states, groups=groups, gamma=0.95, **learned)
        assert not np.asarray(record.advantages).any()


def one_penalty(groups, invalid=((2, 3),), steps=50):
    """Episodes that score the same, and a few invalid steps."""
    shape = (groups * 8, steps)
    batch = {"rewards": np.zeros(shape, np.float32), "mask": np.ones(shape, bool), "states": np.zeros(shape, np.int32),
             "groups": np.repeat(np.arange(groups), 8), "invalid": np.zeros(shape, bool)}  # fmt: skip
    batch["rewards"][:, -1] = 10
    for step in invalid:
        batch["invalid"][step] = True
    return batch


@pytest.mark.parametrize("statistics", ["per_step", "per_trajectory"])
def test_a_penalty_where_all_episodes_score_the_same(statistics):
    """The group of the released recipe, with one invalid step, or one in each episode."""
    for invalid in ([(2, 3)], [(b, 3) for b in range(8)]):
        batch = one_penalty(1, invalid)
        episode = np.asarray(estimate("grpo", **batch, statistics=statistics).advantages)
        # At most the square root of what is counted: 400 steps, or 8 episodes of 50.
        assert -20 < episode[2, 3] < -5
        assert np.abs(episode[~batch["invalid"]]).max() < 0.2


def test_whitening_is_bounded_in_large_batches():
    """One invalid step among 25,600 would be 160 standard deviations away."""
    assert estimate("reinforce_pp", **one_penalty(64), gamma=1.0).advantages[2, 3] == -100


def test_the_largest_weights_of_levels_fit_into_float32():
    rewards = np.random.default_rng(0).uniform(0, 10, (B, T)).astype(np.float32)
    batch = {"rewards": rewards, "mask": np.ones((B, T), bool), "states": np.zeros((B, T), int), "groups": np.zeros(B, int)}
    record = estimate("hgpo", **batch, history_length=T - 1, alpha=10, weight_offset=1000)
    assert np.isfinite(record.level_weights).all()
    assert np.abs(record.advantages).max() > 0.1


# Compiling for a mesh takes seconds each. The first reduces over the batch, the slow one by group.
@pytest.mark.parametrize(("name", "jitted"), [
    ("reinforce_pp", False), ("reinforce_pp", True), pytest.param("eb_td", True, marks=pytest.mark.slow),
])  # fmt: skip
def test_every_number_of_devices_gives_the_same(name, jitted):
    """The result on one device, and of the arrays split by trajectory over meshes of 1, 2 and 8 devices."""
    assert jax.device_count() >= 8
    rng = np.random.default_rng(1)
    shape = (32, 10)
    batch = {
        "rewards": rng.normal(size=shape).astype(np.float32), "mask": np.arange(10) < rng.integers(1, 11, 32)[:, None],
        "states": rng.integers(0, 6, shape).astype(np.int32), "groups": np.repeat(np.arange(4), 8).astype(np.int32),
        "invalid": rng.random(shape) < 0.1,
    }  # fmt: skip
    batch |= further_arrays(batch, parameters(name)[0])
    alone = estimate(name, **batch)
    for devices in (1, 2, 8):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))
        split = NamedSharding(mesh, PartitionSpec("data"))
        arrays = {key: jax.device_put(value, split) for key, value in batch.items()}
        if jitted:
            with jax.set_mesh(mesh):
                found = jax.jit(partial(estimate, name))(**arrays)
        else:
            found = estimate(name, **arrays)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, alone))


TURNS = 15
LEARNED = {"gae", "hiper", "hbpo"}  # they compare with learned values or a budget's best, not with each other
# Turns are compared too, and may differ.
LATER = ("adora", "dvao", "g2rpo", "gbpo", "hapo")  # compared in the slow tests
BY_TURN = {
    "beacon", "crbc", "eb_gae", "eb_td", "ecpo", "g2po", "gagpo", "gigpo", "graphgpo", "hgpo", "himac", "milegpo", "pgpo",
    "reinforce_pp",
}  # fmt: skip


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
        "signals": np.zeros((*shape, 1), np.float32), "lengths": turn, "task": np.zeros(4, np.int32),
    }  # fmt: skip
    return {array: known.get(array, np.zeros(shape, np.float32)) for array in parameters(name)[0]}


@pytest.mark.parametrize("name", [
    *sorted(ESTIMATORS.keys() - LEARNED - BY_TURN - set(LATER)),
    *(pytest.param(name, marks=pytest.mark.slow) for name in LATER),
])  # fmt: skip
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
