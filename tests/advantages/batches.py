"""Random batches of a fixed shape, so that jit compiles once per estimator and not once per example."""

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
    # What padding holds must not matter.
    return {
        "rewards": np.where(mask, rewards, np.nan).astype(np.float32),
        "mask": mask,
        "states": np.where(mask, rng.integers(0, draw(st.integers(1, 4)), (B, T)), -7).astype(np.int32),
        "groups": rng.integers(0, draw(st.integers(1, 3)), B).astype(np.int32),
        "invalid": rng.random((B, T)) < draw(st.sampled_from([0.0, 0.3])),
    }


def further_arrays(batch, names):
    """The arrays that some estimators need besides, derived from the batch."""
    rng = np.random.default_rng(int(batch["mask"].sum()) + 100 * int(batch["groups"].sum()))
    made = {
        "values": rng.normal(size=(B, T)).astype(np.float32),
        "next_states": np.roll(batch["states"], -1, axis=1),
        "agents": rng.integers(0, 2, (B, T)).astype(np.int32),
        "success": rng.random(B) < 0.5,
        "actions": rng.integers(0, 3, (B, T)).astype(np.int32),
        "switches": rng.random((B, T)) < 0.4,
    }
    for level in ("high_values", "low_values", "term_values"):
        made[level] = rng.normal(size=(B, T)).astype(np.float32)
    made["next_states"] = np.where(made["next_states"] < 0, rng.integers(0, 5, (B, T)), made["next_states"])
    made["next_states"] = made["next_states"].astype(np.int32)
    return {name: made[name] for name in names}


def dense(table, shape=(B, T)):
    """f64[B, T] from {(b, t): value}."""
    result = np.zeros(shape)
    for step, value in table.items():
        result[step] = value
    return result
