"""State ids: exact ones from token rows, and merged ones from similar texts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hgpo_jax.advantages import similar_states, state_ids


@pytest.mark.parametrize("width", [1, 11])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), letters=st.integers(1, 3))
def test_ids_are_the_ranks_of_the_distinct_rows(width, seed, letters):
    rng = np.random.default_rng(seed)
    rows = rng.integers(-letters, letters, (4, 6, width)).astype(np.int32)
    mask = rng.random((4, 6)) < 0.7
    ids = np.asarray(jax.jit(state_ids)(rows, mask))
    # numpy.unique sorts rows lexicographically too.
    _, ranks = np.unique(rows[mask], axis=0, return_inverse=True)
    np.testing.assert_array_equal(ids[mask], ranks.ravel())
    assert (ids[~mask] == (ranks.max() + 1 if mask.any() else 0)).all()


def similar(observations, groups, **options):
    """The ids as ragged lists."""
    lengths = [len(row) for row in observations]
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    states = similar_states(observations, mask, np.array(groups), **options)
    assert not states[~mask].any()
    return [row[:length].tolist() for row, length in zip(states, lengths, strict=True)]


def test_similar_texts_join_the_first_cluster_that_fits():
    base = "You are in the kitchen. You see a cabinet 1, a drawer 2 and a fridge 1."
    near = base.replace("cabinet 1", "cabinet 2")
    far = "You are in the garden. Nothing happens."
    observations = [[base, near, far], [far, base], [near]]
    assert similar(observations, [0, 0, 1]) == [[0, 0, 1], [1, 0], [2]]
    assert similar(observations, [0, 0, 1], threshold=1.0) == [[0, 1, 2], [2, 0], [3]]


A, SAME = np.arange(6, dtype=np.int16), {"at": [1, (2.0, None)], "see": np.eye(2)}
KEYS = [  # each once, all different; a pair is equal
    "1", 1, 1.0, True, None, b"1", (SAME, dict(reversed(SAME.items()))), {"at": [1, (2.0, 0)], "see": np.eye(2)}, {1: 2},
    {"1": 2},
    (A, A.copy()), A.reshape(2, 3), A.astype(np.int32), A.view(np.uint16), (np.float32(1), np.array(1, np.float32)),
    (A[::2], A[::2].copy()), [], {}, "", (jnp.arange(3), np.arange(3, dtype=np.int32)), (float("nan"), float("nan")),
    ((1, 2), [1, 2]), [[1], 2],
]  # fmt: skip


def test_dicts_and_arrays_are_states_too():
    texts = [each for key in KEYS for each in (key if isinstance(key, tuple) else (key, key))]
    assert similar([texts], [0], threshold=1) == [np.repeat(np.arange(len(KEYS)), 2).tolist()]


@pytest.mark.parametrize(("texts", "threshold", "message"), [
    ([["a", {1}]], 1, "^set is no key of a state; give texts, numbers, arrays, dicts or lists of them$"),
    ([[{"see": np.array([None])}]], 1, "ndarray is no key of a state"),
    ([["a", {}]], 0.9, r"observations\[0\]\[1\] is a dict: give texts, or threshold=1"),
])  # fmt: skip
def test_what_is_no_state_is_named(texts, threshold, message):
    with pytest.raises(TypeError, match=message):
        similar(texts, [0], threshold=threshold)


def test_a_chain_is_cut_where_it_leaves_the_representative():
    # Neighbours share 18 or 19 of 20 characters (ratio 0.9 or more). The third shares 16 with the first (0.8), so it
    # founds a cluster; the fourth is compared with these two representatives only.
    texts = ["a" * 20, "a" * 18 + "bb", "a" * 16 + "b" * 4, "a" * 15 + "b" * 5]
    assert similar([texts], [0], threshold=0.9) == [[0, 0, 1, 1]]


def test_long_texts_are_compared_by_all_their_characters():
    text = "the quick brown fox jumps over the lazy dog " * 10
    assert similar([[text, text.replace("lazy dog", "lazy cat", 1)]], [0]) == [[0, 0]]


@pytest.mark.parametrize(("texts", "steps", "groups", "options", "message"), [
    ([["a"]], 1, [0], {"threshold": 1.5}, r"threshold=1.5"),
    ([["a"]], 1, [0, 1], {}, "observations has 1 rows and groups 2: give 1 each"),
    ([["a"]], 2, [0], {}, r"observations\[0\] has 1 texts: give 2"),
])  # fmt: skip
def test_bad_arguments(texts, steps, groups, options, message):
    with pytest.raises(ValueError, match=message):
        similar_states(texts, np.ones((1, steps), bool), groups, **options)
