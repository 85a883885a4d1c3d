"""Filters: which trajectories are kept, and that the others count nowhere."""

import jax
import numpy as np
import pytest
from batches import B, T, batches
from hypothesis import given, settings

from hgpo_jax.advantages import Batch, estimate
from hgpo_jax.advantages.filters import keep_valid

kept = jax.jit(lambda fields: keep_valid(Batch(**fields, peers=fields["groups"])))


def kept_of_four(scores, invalid):
    """Of four one-step trajectories of one prompt group."""
    shape, four = (B, T), np.arange(B) < 4
    batch = {
        "rewards": np.zeros(shape, np.float32), "mask": four[:, None] & (np.arange(T) < 1), "invalid": np.zeros(shape, bool),
        "states": np.zeros(shape, np.int32), "groups": np.zeros(B, np.int32),
    }  # fmt: skip
    batch["rewards"][:4, 0], batch["invalid"][:4, 0] = scores, invalid
    return kept(batch)[:4].tolist()


def test_half_of_a_prompt_group_is_enough():
    assert kept_of_four([1, 1, 0, 0], [0, 1, 0, 1]) == [True, False, True, False]
    for scores, invalid in (([1, 1, 0, 0], [0, 1, 1, 1]), ([1, 1, 0, 0], [0, 0, 1, 1]), ([1, 1, 1, 1], [0] * 4)):
        assert kept_of_four(scores, invalid) == [False] * 4


def by_hand(batch):
    """bool[B]: the trajectories of `keep=valid`, prompt group by prompt group."""
    happened, rewards = batch["mask"].any(1), np.where(batch["mask"], batch["rewards"], 0).sum(1)
    valid = happened & ~(batch["invalid"] & batch["mask"]).any(1)
    result = np.zeros(B, bool)
    for group in set(batch["groups"][happened]):
        members, left = (of & (batch["groups"] == group) for of in (happened, valid))
        if 2 * left.sum() >= members.sum() and len(set(rewards[left])) > 1:
            result |= left
    return result


@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_trajectories_without_an_invalid_action(batch):
    clean = {"invalid": batch["invalid"] & batch["mask"], "rewards": np.where(batch["mask"], batch["rewards"], 0)}
    np.testing.assert_array_equal(kept(batch | clean), by_hand(batch))


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_what_is_dropped_counts_nowhere(batch):
    """What is left is estimated as if the rest had not happened, though whitening spans prompt groups."""
    record = estimate("reinforce_pp", **batch, keep="valid")
    rest = batch["mask"] & by_hand(batch)[:, None]
    np.testing.assert_array_equal(record.keep, rest)
    alone = estimate("reinforce_pp", **batch | {"mask": rest}).advantages
    np.testing.assert_array_equal(record.advantages, alone)
