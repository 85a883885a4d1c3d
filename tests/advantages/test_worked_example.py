"""Numbers computed by hand, to 1e-4."""

import numpy as np
import pytest
from worked_example import ragged, worked_example

from hgpo_jax.advantages import estimate

THIRD = 1 / 3
HGPO = {
    "offset 2": (
        {"normalize": "mean"},
        ragged((-8, 6, 34 * THIRD, 18), (-3, -8.4, -148 / 9, 0), (-11, -8, -18, 12, 28)),
    ),
    "offset 1": (
        {"normalize": "mean", "weight_offset": 1},
        ragged((-8, 6, 11.5, 18), (-3, -8, -49 * THIRD, 0), (-11, -8, -18, 12, 82 * THIRD)),
    ),
    "mean_std": (
        {},
        ragged((-0.5118, 1, 0.8799, 1), (-0.1919, -1.0899, -1.0517, 0), (-0.7038, -0.5118, -1, 1.2247, 1.6050)),
    ),
    "alpha 0": (
        {"normalize": "mean", "alpha": 0},
        ragged((-8, 6, 11, 18), (-3, -9, -50 * THIRD, 0), (-11, -8, -18, 12, 29)),
    ),
    "alpha 2": (
        {"normalize": "mean", "alpha": 2},
        ragged((-8, 6, 11.6, 18), (-3, -7.846153846, -16, 0), (-11, -8, -18, 12, 27.076923077)),
    ),
    "K = 0": (
        {"normalize": "mean", "history_length": 0},
        ragged((-8, 0, 10, 18), (-3, -12, -14, 0), (-11, -8, -18, 12, 34)),
    ),
}


@pytest.mark.parametrize("case", HGPO)
def test_hgpo(case):
    options, expected = HGPO[case]
    record = estimate("hgpo", **worked_example(**options))
    # The 1e-6 in the denominators moves an advantage of 28 by 6e-6.
    np.testing.assert_allclose(record.advantages, expected, atol=1e-4)


def test_base_group():
    record = estimate("hgpo", **worked_example(normalize="mean", base_group=True))
    expected = [[-1.5385, 7.3462, 11.3407, 16.8974], [-10.5385, -11.2692, -17.3615, -25.6154]]
    np.testing.assert_allclose(record.advantages[:2, :4], expected, atol=1e-4)
    assert record.levels == (-1, 0, 1, 2)


def test_gigpo():
    record = estimate("gigpo", **worked_example(normalize="mean"))
    expected = ragged(
        (3.3846, 11.3846, 21.3846, 29.3846),
        (-28.6154, -37.6154, -39.6154, -25.6154),
        (0.3846, 3.3846, -6.6154, 23.3846, 45.3846),
    )
    np.testing.assert_allclose(record.advantages, expected, atol=1e-4)


def test_levels_of_hgpo():
    record = estimate("hgpo", **worked_example(normalize="mean"))
    sizes = np.asarray(record.level_sizes)
    assert sizes[0, :4].tolist() == [[7, 0, 0], [3, 2, 0], [7, 3, 2], [2, 2, 1]]
    assert sizes[2, :5].tolist() == [[7, 0, 0], [7, 1, 0], [2, 2, 1], [3, 1, 1], [7, 3, 1]]
    assert not sizes[~worked_example()["mask"]].any()
    levels = np.asarray(record.level_advantages)
    np.testing.assert_allclose(levels[0, 2], [10, 0, 12], atol=1e-5)
    # Level 1 of this step equals its group's mean, so it is dropped: weights 2 and 4 of levels 0 and 2 remain.
    np.testing.assert_allclose(record.level_weights[0, 2], [THIRD, 0, 2 * THIRD], atol=1e-5)
    np.testing.assert_allclose(np.sum(record.level_weights * levels, -1), record.advantages, atol=1e-5)


def test_returns():
    record = estimate("hgpo", **worked_example())
    expected = ragged((6, 12, 24, 48), (11, 0, 0, 0), (3, 6, 12, 24, 48))
    np.testing.assert_array_equal(record.returns, expected)
