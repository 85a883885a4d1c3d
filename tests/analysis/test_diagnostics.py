"""Diagnostics on the worked example, counted by hand, and on random batches against plain loops."""

import numpy as np
import pytest

from hgpo_jax.advantages import estimate
from hgpo_jax.analysis import diagnostics, plots

# The worked example, with a fourth trajectory that repeats the first one's start: A B A C, A B A D, A A C B A, A B C.
STATES = np.array([[0, 1, 0, 2, 0], [0, 1, 0, 3, 0], [0, 0, 2, 1, 0], [0, 1, 2, 0, 0]])
MASK = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool)
REWARDS = np.array([[0, 0, 0, 48, 0], [11, 0, 0, 0, 0], [0, 0, 0, 0, 48], [0, 0, 8, 0, 0]], np.float32)
GROUPS = np.zeros(4, int)
BATCH = {"rewards": REWARDS, "mask": MASK, "states": STATES, "groups": GROUPS}


def test_sizes_are_drawn_whatever_they_are():
    figure = plots.plot_sizes({"level 0": {1: 4, 4096: 1}, "level 1": {}})
    shares = [bar.get_height() for bar in figure.axes[0].patches]
    assert sum(shares) == pytest.approx(1) and figure.axes[1].get_title() == "level 1: no steps"


def test_peers_and_group_sizes():
    record = estimate("hgpo", **BATCH)
    # Level 0: A 8, B 4, C 3, D 1. Level 1: AB 3, BA 3, AC 2, AD, AA, CB, BC. Level 2: ABA 2, seven alone.
    expected = [{1: 1, 3: 1, 4: 1, 8: 1}, {1: 4, 2: 1, 3: 2}, {1: 6, 2: 1}]
    assert diagnostics.group_sizes(record.level_sizes, MASK) == expected
    np.testing.assert_allclose(diagnostics.peer_share(record.level_sizes, MASK), [15 / 16, 8 / 16, 2 / 16])
    oracle = diagnostics.oracle_sizes(diagnostics.oracle_groups(STATES, MASK, GROUPS))
    np.testing.assert_allclose(diagnostics.peer_share(oracle, MASK), [9 / 16])


@pytest.mark.parametrize("seed", range(3))
def test_random_batches_against_loops(seed):
    rng = np.random.default_rng(seed)
    mask = np.arange(4) < rng.integers(0, 5, 12)[:, None]
    states, groups = rng.integers(0, 2, (12, 4)), rng.integers(0, 2, 12)
    returns, advantages = rng.normal(size=(2, 12, 4))
    histories = {}
    for b, t in np.argwhere(mask):
        histories.setdefault((groups[b], *states[b, : t + 1]), []).append((b, t))
    ids = diagnostics.oracle_groups(states, mask, groups)
    assert len(np.unique(ids[mask])) == len(histories)
    errors, shared = [], []
    for members in histories.values():
        assert len({ids[step] for step in members}) == 1
        if len(members) > 1:
            mean = np.mean([returns[s] for s in members])
            error = [advantages[s] - (returns[s] - mean) for s in members]
            errors += error
            shared += [np.mean(error)] * len(error)
    errors, shared = np.array(errors), np.array(shared)
    result = diagnostics.against_oracle(advantages, returns, ids)
    assert result["steps"] == len(errors)
    np.testing.assert_allclose(result["bias"], np.sqrt((shared**2).mean()))
    np.testing.assert_allclose(result["variance"], ((errors - shared) ** 2).mean())
    np.testing.assert_allclose(result["mse"], result["bias"] ** 2 + result["variance"])


def test_a_batch_without_company():
    mask = np.ones((1, 2), bool)
    ids = diagnostics.oracle_groups(np.array([[0, 0]]), mask, np.array([0]))
    result = diagnostics.against_oracle(np.zeros((1, 2)), np.zeros((1, 2)), ids)
    assert result["steps"] == 0
    assert np.isnan(result["mse"])
    nothing = np.zeros((1, 2), bool)
    assert (diagnostics.oracle_groups(np.array([[0, 0]]), nothing, np.array([0])) == -1).all()
    assert diagnostics.peer_share(np.zeros((1, 2, 3)), nothing).tolist() == [0, 0, 0]
