"""Numbers computed by hand, to 1e-4; the 1e-6 in the denominators moves an advantage of 28 by 6e-6. And the README's."""

import re
from pathlib import Path

import numpy as np
import pytest
from batches import ragged, worked_example

from hgpo_jax import advantages
from hgpo_jax.advantages import estimate
from hgpo_jax.learner.methods import METHODS

THIRD = 1 / 3


def test_hgpo():
    record = estimate("hgpo", **worked_example(normalize="mean"))
    expected = ragged((-8, 6, 34 * THIRD, 18), (-3, -8.4, -148 / 9, 0), (-11, -8, -18, 12, 28))
    np.testing.assert_allclose(record.advantages, expected, atol=1e-4)
    np.testing.assert_array_equal(record.returns, ragged((6, 12, 24, 48), (11, 0, 0, 0), (3, 6, 12, 24, 48)))
    sizes = np.asarray(record.level_sizes)
    assert sizes[0, :4].tolist() == [[7, 0, 0], [3, 2, 0], [7, 3, 2], [2, 2, 1]]
    assert sizes[2, :5].tolist() == [[7, 0, 0], [7, 1, 0], [2, 2, 1], [3, 1, 1], [7, 3, 1]]
    assert not sizes[~worked_example()["mask"]].any()
    levels = np.asarray(record.level_advantages)
    np.testing.assert_allclose(levels[0, 2], [10, 0, 12], atol=1e-5)
    # Level 1 of this step equals its group's mean, so it is dropped: weights 2 and 4 of levels 0 and 2 remain.
    np.testing.assert_allclose(record.level_weights[0, 2], [THIRD, 0, 2 * THIRD], atol=1e-5)


@pytest.mark.parametrize(("name", "options", "expected"), [
    ("hgpo", {"normalize": "mean", "weight_offset": 1},
     [(-8, 6, 11.5, 18), (-3, -8, -49 * THIRD, 0), (-11, -8, -18, 12, 82 * THIRD)]),
    ("hgpo", {}, [(-0.5118, 1, 0.8799, 1), (-0.1919, -1.0899, -1.0517, 0), (-0.7038, -0.5118, -1, 1.2247, 1.6050)]),
    ("hgpo", {"normalize": "mean", "base_group": True},
     [(-1.5385, 7.3462, 11.3407, 16.8974), (-10.5385, -11.2692, -17.3615, -25.6154)]),
    ("gigpo", {"normalize": "mean"}, [
        (3.3846, 11.3846, 21.3846, 29.3846), (-28.6154, -37.6154, -39.6154, -25.6154),
        (0.3846, 3.3846, -6.6154, 23.3846, 45.3846),
     ]),
])  # fmt: skip
def test_variants(name, options, expected):
    record = estimate(name, **worked_example(**options))
    for row, numbers in enumerate(expected):
        np.testing.assert_allclose(record.advantages[row, : len(numbers)], numbers, atol=1e-4)
    assert record.levels[0] == (-1 if name == "gigpo" or "base_group" in options else 0)


def test_episodes_count_once_however_long_they_are():
    """Three episodes of 1, 2 and 4 steps, one penalty: the definition of `per_trajectory`."""
    mask = np.arange(4) < np.array([1, 2, 4])[:, None]
    invalid = np.zeros((3, 4), bool)
    invalid[1, 1] = True
    rewards = np.float32([[6, 0, 0, 0], [3, 0, 0, 0], [0, 0, 0, 0]])
    record = estimate(
        "grpo", rewards=rewards, mask=mask, states=mask * 0, groups=np.zeros(3, int), invalid=invalid,
        statistics="per_trajectory", invalid_penalty=2.0,
    )  # fmt: skip
    mean = (6 + (3 + 1) / 2 + 0) / 3
    std = np.sqrt(((6 - mean) ** 2 + ((3 - mean) ** 2 + (1 - mean) ** 2) / 2 + mean**2) / 2)
    expected = [[6 - mean, 0, 0, 0], [3 - mean, 1 - mean, 0, 0], [-mean] * 4]
    np.testing.assert_allclose(record.advantages, np.array(expected) / std, rtol=1e-5)


README = Path(advantages.__file__).with_name("README.md").read_text()


def test_the_examples_give_their_numbers(monkeypatch):
    monkeypatch.setattr(advantages, "ESTIMATORS", dict(advantages.ESTIMATORS))
    names, checked = {"__name__": "readme"}, 0
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(block, names)
        for expression, numbers in re.findall(r"^((?:record|estimate)\S*.*?) +# (\[[^\]]*\])", block, re.MULTILINE):
            np.testing.assert_allclose(np.asarray(eval(expression, names)), eval(numbers), atol=0.005)
            checked += 1
    assert checked == 5


def test_every_method_is_listed():
    table = README[README.index("## The names of") : README.index("## What differs")]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(METHODS)
