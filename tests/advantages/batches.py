"""Batches for `estimate`: random ones of a fixed shape, so that each estimator compiles once, and the worked example."""

import numpy as np
from hypothesis import strategies as st

B, T = 7, 5
GAMMA, PENALTY = 0.5, 0.25


@st.composite
def batches(draw, continuous=False):
    """Arguments of `estimate` for few states and groups, so that groups are crowded and repeat visits common.

    By default rewards are small integers: with gamma 1/2 and penalty 1/4 all returns are exact in float32, and a step
    equals its group's mean in float32 exactly where it does in float64.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = np.array(draw(st.lists(st.integers(0, T), min_size=B, max_size=B)))
    mask = np.arange(T) < lengths[:, None]
    dense = draw(st.sampled_from([0.2, 0.6, 1.0]))
    rewards = rng.normal(size=(B, T)) if continuous else rng.integers(-2, 5, (B, T))
    rewards = np.where(rng.random((B, T)) < dense, rewards, 0)
    if draw(st.booleans()):  # the common case: one reward, at the end
        rewards = rewards * (np.arange(T) == lengths[:, None] - 1)
    # Ids of any size group alike; they sort in another way where one of them has more than 15 bits.
    names = rng.choice(2**31 - 2, size=4, replace=False) if draw(st.booleans()) else np.arange(4)
    # What padding holds must not matter.
    return {
        "rewards": np.where(mask, rewards, np.nan).astype(np.float32),
        "mask": mask,
        "states": np.where(mask, names[rng.integers(0, draw(st.integers(1, 4)), (B, T))], -7).astype(np.int32),
        "groups": names[rng.integers(0, draw(st.integers(1, 3)), B)].astype(np.int32),
        "invalid": rng.random((B, T)) < draw(st.sampled_from([0.0, 0.3])),
    }


@st.composite
def ordinary(draw):
    """Episodes with returns in [0, 10], often all alike, with few invalid steps: where a spread is nothing or nearly so."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = rng.integers(1, T + 1, B) if draw(st.booleans()) else np.full(B, T)
    mask = np.arange(T) < lengths[:, None]
    scores = {
        "equal": np.full(B, rng.uniform(0, 10)),
        "nearly equal": 10 - rng.uniform(0, 1e-5, B),
        "won or lost": rng.choice([0.0, 10.0], B),
        "any": rng.uniform(0, 10, B),
    }[draw(st.sampled_from(["equal", "nearly equal", "won or lost", "any"]))]
    shares = rng.dirichlet(np.ones(T), B) * mask if draw(st.booleans()) else np.arange(T) == lengths[:, None] - 1
    rewards = scores[:, None] * shares / np.maximum(shares.sum(1, keepdims=True), 1)
    invalid = np.zeros((B, T), bool)
    for _ in range(draw(st.integers(0, 3))):
        invalid[rng.integers(B), rng.integers(T)] = True
    if draw(st.booleans()):  # the same number in each episode
        invalid[:] = invalid[0]
    return {
        "rewards": rewards.astype(np.float32),
        "mask": mask,
        "states": rng.integers(0, draw(st.integers(1, 4)), (B, T)).astype(np.int32),
        "groups": rng.integers(0, draw(st.integers(1, 3)), B).astype(np.int32),
        "invalid": invalid,
    }


def further_arrays(batch, names):
    """The arrays that some estimators need besides, derived from the batch."""
    rng = np.random.default_rng(int(batch["mask"].sum()) + int(np.unique(batch["groups"]).size))
    shape = batch["mask"].shape
    made = {
        "values": rng.normal(size=shape).astype(np.float32),
        "next_states": np.roll(batch["states"], -1, axis=1),
        "agents": rng.integers(0, 2, shape).astype(np.int32),
        "success": rng.random(shape[0]) < 0.5,
        "final_values": (rng.normal(size=shape[0]) * rng.integers(0, 2, shape[0])).astype(np.float32),
        "actions": rng.integers(0, 3, shape).astype(np.int32),
        "switches": rng.random(shape) < 0.4,
        "signals": rng.integers(-2, 3, (*shape, 2)).astype(np.float32),
        "lengths": rng.integers(1, 5, shape).astype(np.int32),
        "task": rng.integers(0, 2, shape[0]).astype(np.int32),
    }
    for level in ("high_values", "low_values", "term_values"):
        made[level] = rng.normal(size=shape).astype(np.float32)
    elsewhere = rng.choice([4, *batch["states"][batch["mask"]]], shape)  # after a last step, also a state where nobody acts
    made["next_states"] = np.where(made["next_states"] < 0, elsewhere, made["next_states"]).astype(np.int32)
    return {name: made[name] for name in names}


def dense(table, shape=(B, T)):
    """f64[B, T] from {(b, t): value}."""
    result = np.zeros(shape)
    for step, value in table.items():
        result[step] = value
    return result


def worked_example(**changes):
    """Keyword arguments for `estimate`, gamma = 1/2: three trajectories, padded to T = 6.

    From its first step the first trajectory reaches a return of 48 / 2^3 = 6. The seven visits of A have the returns 6, 24, 11,
    0, 3, 6 and 48, whose mean is 14, so that step's advantage at level 0 is -8.
    """
    paths, earned = ("ABAC", "ABAD", "AACBA"), ((0, 0, 0, 48), (11, 0, 0, 0), (0, 0, 0, 0, 48))
    states = ragged(*(["ABCD".index(letter) for letter in path] for path in paths)).astype(np.int32)
    mask = ragged(*([True] * len(path) for path in paths)).astype(bool)
    batch = {"rewards": ragged(*earned).astype(np.float32), "mask": mask, "states": states, "groups": np.zeros(3, np.int32)}
    return {**batch, "gamma": 0.5, **changes}


def ragged(*rows):
    """f64[3, 6] from the rows' numbers, zero padded."""
    return dense({(b, t): value for b, row in enumerate(rows) for t, value in enumerate(row)}, (3, 6))
