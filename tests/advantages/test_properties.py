"""What must hold whatever the numbers: symmetries, nesting, exact zeros, sharding."""

from functools import partial

import jax
import numpy as np
import pytest
from batches import GAMMA, B, T, batches, further_arrays
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hgpo_jax.advantages import ESTIMATORS, estimate, informative, parameters


def run(name, batch, **options):
    batch = batch if "success" in batch else with_further(batch)
    wanted = ("rewards", "mask", "states", "groups", "invalid", *parameters(name)[0])
    return estimate(name, **{key: batch[key] for key in wanted}, **options)


def with_further(batch):
    needed = {array for name in ESTIMATORS for array in parameters(name)[0]}
    return {**batch, **further_arrays(batch, sorted(needed))}


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@settings(max_examples=10, deadline=None)
@given(batch=batches(continuous=True), data=st.data())
def test_permuting_trajectories_permutes_the_result(name, batch, data):
    batch = with_further(batch)
    order = np.array(data.draw(st.permutations(range(B))))
    permuted = {key: value[order] for key, value in batch.items()}
    expected = np.asarray(run(name, batch).advantages)[order]
    np.testing.assert_allclose(run(name, permuted).advantages, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("statistics", ["per_step", "per_trajectory"])
@pytest.mark.parametrize("normalize", ["mean", "mean_std"])
@settings(max_examples=10, deadline=None)
@given(batch=batches(continuous=True))
def test_dr_mas_of_one_role_is_grpo_to_the_bit(statistics, normalize, batch):
    options = {"statistics": statistics, "normalize": normalize}
    team, alone = with_further(batch) | {"agents": np.zeros((B, T), np.int32)}, run("grpo", batch, **options)
    np.testing.assert_array_equal(run("dr_mas", team, **options).advantages, alone.advantages)


# The others share the code of these.
PADDED = ("hgpo", "gigpo", "eb_gae", "gagpo", "graphgpo", "reinforce_pp")


@pytest.mark.parametrize("name", [n if n in PADDED else pytest.param(n, marks=pytest.mark.slow) for n in ESTIMATORS])
@settings(max_examples=10, deadline=None)
@given(batch=batches(continuous=True))
def test_padding_and_empty_trajectories_change_nothing(name, batch):
    batch = with_further(batch)
    padded = {}
    for key, value in batch.items():
        widths = ((2, 1), (0, 3))[: value.ndim]
        padded[key] = np.pad(value, widths, constant_values=False if value.dtype == bool else 1)
    result = np.asarray(run(name, padded).advantages)
    np.testing.assert_allclose(result[2:-1, :T], run(name, batch).advantages, rtol=1e-4, atol=1e-5)
    assert not result[:, T:].any() and not result[[0, 1, -1]].any()


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@settings(max_examples=10, deadline=None)
@given(batch=batches(continuous=True), seed=st.integers(0, 2**32 - 1))
def test_renaming_ids_changes_nothing(name, batch, seed):
    batch = with_further(batch)
    rng = np.random.default_rng(seed)

    def renamed(values):
        names = rng.choice(2**31 - 2, size=8, replace=False).astype(np.int32)
        return names[np.clip(values, 0, 7)]

    both = renamed(np.stack([batch["states"], batch["next_states"]]))
    other = {**batch, "states": both[0], "next_states": both[1], "groups": renamed(batch["groups"])}
    other["agents"], other["actions"] = renamed(batch["agents"]), renamed(batch["actions"])
    expected = run(name, batch).advantages
    np.testing.assert_allclose(run(name, other).advantages, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("largest", [2**15 - 3, 2**15 - 2, 2**15 - 1, 2**15, 2**31 - 2])
@pytest.mark.parametrize("history", [1, 2])  # an odd and an even number of columns
def test_short_and_long_ids_sort_alike(largest, history):
    rng = np.random.default_rng(0)
    mask = np.arange(12) < rng.integers(1, 13, 16)[:, None]
    batch = {"rewards": rng.normal(size=(16, 12)).astype(np.float32), "mask": mask, "groups": np.arange(16) // 8}
    states = rng.integers(0, 3, (16, 12))
    expected = estimate("hgpo", **batch, states=states, history_length=history)
    moved = estimate("hgpo", **batch, states=largest - states, history_length=history)
    np.testing.assert_array_equal(moved.level_sizes, expected.level_sizes)
    np.testing.assert_allclose(moved.advantages, expected.advantages, atol=1e-5)


@pytest.mark.parametrize("name", ["hgpo", "gigpo", "eb_gae", "eb_td", "gagpo", "reinforce_pp"])
def test_returns_hold_the_penalty_on_the_invalid_step_alone(name):
    rng = np.random.default_rng(3)
    mask = np.arange(6) < rng.integers(1, 7, 8)[:, None]
    rewards, invalid = np.float32(rng.integers(0, 5, (8, 6))), rng.random((8, 6)) < 0.4
    expected = np.zeros((8, 7))
    for t in range(5, -1, -1):
        expected[:, t] = (rewards[:, t] + 0.5 * expected[:, t + 1]) * mask[:, t]
    expected = expected[:, :6] - 0.25 * (invalid & mask)
    batch = {"rewards": rewards, "mask": mask, "states": rng.integers(0, 3, (8, 6)), "groups": np.arange(8) // 4}
    record = estimate(name, **batch, invalid=invalid, gamma=0.5, invalid_penalty=0.25)
    np.testing.assert_array_equal(record.returns, expected)


def test_the_value_target_is_not_whitened():
    rng = np.random.default_rng(4)
    batch = {"rewards": rng.normal(size=(4, 5)).astype(np.float32), "mask": np.ones((4, 5), bool),
             "states": np.zeros((4, 5), int), "groups": np.zeros(4, int)}  # fmt: skip
    values = rng.normal(size=(4, 5)).astype(np.float32)
    plain, whitened = (estimate("gae", **batch, values=values, whiten=whiten) for whiten in (False, True))
    np.testing.assert_allclose(whitened.returns, plain.advantages + values, atol=1e-5)
    np.testing.assert_array_equal(whitened.returns, plain.returns)


@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_groups_are_nested(batch):
    sizes = np.asarray(run("hgpo", batch, history_length=4).level_sizes)
    assert (np.diff(sizes, axis=-1) <= 0).all()
    assert (sizes[..., 0] > 0).tolist() == batch["mask"].tolist()
    for level in range(5):
        has_level = batch["mask"] & (np.arange(T) >= level)
        assert ((sizes[..., level] > 0) == has_level).all()
        # A group of n members is seen n times.
        numbers, seen = np.unique(sizes[..., level][has_level], return_counts=True)
        assert not (seen % numbers).any()


@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_without_history_it_is_the_step_part_of_gigpo(batch):
    step = np.asarray(run("gigpo", batch, gamma=GAMMA, normalize="mean").level_advantages)[..., 1]
    alone = run("hgpo", batch, gamma=GAMMA, normalize="mean", history_length=0)
    np.testing.assert_allclose(alone.advantages, step, rtol=1e-5, atol=1e-6)
    # Over the population's standard deviation instead of the sample's.
    sample = np.asarray(run("gigpo", batch, gamma=GAMMA).level_advantages)[..., 1]
    alone = run("hgpo", batch, gamma=GAMMA, history_length=0)
    size = np.maximum(np.asarray(alone.level_sizes)[..., 0], 2)
    np.testing.assert_allclose(alone.advantages, sample * np.sqrt(size / (size - 1)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", ["hgpo", "grpo", "gigpo", "eb_gae", "eb_td", "gagpo"])
def test_equal_returns_give_exact_zeros(name):
    """Every value 10 * 0.95^n at every group size from 2 to 64, one-step trajectories, one batch."""
    values, sizes = np.float32(10) * np.float32(0.95) ** np.arange(50, dtype=np.float32), range(2, 65)
    rewards = np.concatenate([np.full(size, value) for value in values for size in sizes])
    groups = np.repeat(np.arange(len(values) * len(sizes)), np.tile(list(sizes), len(values)))
    record = estimate(
        name,
        rewards=rewards[:, None].astype(np.float32),
        mask=np.ones((rewards.size, 1), bool),
        states=np.zeros((rewards.size, 1), np.int32),
        groups=groups,
    )
    assert not np.asarray(record.advantages).any()


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", ["hgpo", "gigpo"])
def test_equal_trajectories_differ_in_no_way_that_counts(name):
    """Eight copies of one successful trajectory, beside another group that does differ."""
    rng = np.random.default_rng(0)
    rewards = np.zeros((16, 8), np.float32)
    rewards[:8, -1] = 10
    rewards[8:, -1] = rng.integers(0, 2, 8) * 10
    states = np.concatenate([np.tile(rng.integers(0, 3, 8), (8, 1)), rng.integers(0, 3, (8, 8))])
    record = estimate(
        name,
        rewards=rewards,
        mask=np.ones((16, 8), bool),
        states=states,
        groups=np.repeat([3, 1], 8),
        **({"history_length": 7} if name == "hgpo" else {}),
    )
    # Repeat visits of a state inside a trajectory do differ; the full history (level 7) and the episode (-1) do not.
    column = record.levels.index(7 if name == "hgpo" else -1)
    assert not np.asarray(record.level_advantages)[:8, :, column].any()
    assert np.asarray(record.advantages)[8:].any()


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", ["gae", "gagpo", "eb_gae"])
@pytest.mark.parametrize("steady", [False, True])
def test_rounding_is_not_taken_for_an_advantage(name, steady):
    """Where values explain everything, nothing is left that a division by its own spread could blow up."""
    # Equal trajectories through distinct states; or one state, where a reward in each step keeps the return at 10.
    rewards = np.full((8, 50), 10 * (1 - 0.95) if steady else 0.0, np.float32)
    rewards[:, -1] = 10
    exact = 10 * 0.95 ** (np.zeros(50) if steady else np.arange(49, -1, -1))
    record = estimate(
        name,
        rewards=rewards,
        mask=np.ones((8, 50), bool),
        states=np.tile(np.arange(50) * (not steady), (8, 1)),
        groups=np.zeros(8, int),
        gamma=0.95,
        # The learned values are right up to float32's rounding.
        **({"values": np.tile(exact.astype(np.float32), (8, 1))} if name == "gae" else {}),
    )
    assert not np.asarray(record.advantages).any()


# Compiling for a mesh takes seconds each. The quick one reduces over the batch, that under jit (below) by group.
@pytest.mark.parametrize("name", [n if n == "reinforce_pp" else pytest.param(n, marks=pytest.mark.slow) for n in ESTIMATORS])
def test_every_number_of_devices_gives_the_same(name):
    alone, placed = on_meshes(name)
    for arrays in placed.values():
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, run(name, arrays)), alone)


@pytest.mark.parametrize("name", ["hgpo", pytest.param("eb_gae", marks=pytest.mark.slow)])
def test_every_number_of_devices_gives_the_same_under_jit(name):
    alone, placed = on_meshes(name)
    for mesh, arrays in placed.items():
        with jax.set_mesh(mesh):
            result = jax.jit(partial(run, name))(arrays)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, result), alone)


def on_meshes(name):
    """The result on one device, and the arrays split by trajectory over meshes of 1, 2 and 8 devices."""
    assert jax.device_count() >= 8
    rng = np.random.default_rng(1)
    shape = (32, 10)
    batch = {
        "rewards": rng.normal(size=shape).astype(np.float32),
        "mask": np.arange(10) < rng.integers(1, 11, 32)[:, None],
        "states": rng.integers(0, 6, shape).astype(np.int32),
        "groups": np.repeat(np.arange(4), 8).astype(np.int32),
        "invalid": rng.random(shape) < 0.1,
        "values": rng.normal(size=shape).astype(np.float32),
        "next_states": rng.integers(0, 6, shape).astype(np.int32),
        "agents": rng.integers(0, 2, shape).astype(np.int32),
        "success": rng.random(32) < 0.5,
        "actions": rng.integers(0, 3, shape).astype(np.int32),
        "switches": rng.random(shape) < 0.4,
    }
    batch |= {f"{level}_values": rng.normal(size=shape).astype(np.float32) for level in ("high", "low", "term")}
    alone = jax.tree.map(np.asarray, run(name, batch))
    placed = {}
    for devices in (1, 2, 8):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))
        split = NamedSharding(mesh, PartitionSpec("data"))
        placed[mesh] = {key: jax.device_put(value, split) for key, value in batch.items()}
    return alone, placed


@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_informative_groups_hold_two_different_scores(batch):
    kept = np.asarray(informative(batch["rewards"], batch["mask"], batch["groups"]))
    scores = np.where(batch["mask"], batch["rewards"], 0).sum(1)
    happened = batch["mask"].any(1)
    for b in range(B):
        peers = scores[(batch["groups"] == batch["groups"][b]) & happened]
        assert kept[b] == (happened[b] and peers.min() < peers.max())
