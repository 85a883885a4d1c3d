"""Intervals of shares and differences: their formulas, inside their range, and as often right as they say."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from scipy import stats

from hgpo_jax.evaluation.statistics import korn_graubard, mcnemar, over_seeds, paired_difference, wilson

N = 64


@pytest.mark.parametrize("shares", [(0.99, 1.0, 0.994), (0, 0, 0.01), (1, 1, 1), (0, 0), (0, 1), (0.97, 0.95, 1.0, 0.99, 0.98)])
def test_a_share_is_between_0_and_1(shares):
    found = over_seeds(shares, [512] * len(shares))
    low, high = found["interval"]
    assert 0 <= low <= found["mean"] <= high <= 1
    assert low < high


def test_equal_seeds_give_the_binomial_interval_of_all_episodes():
    """Where seeds differ less than chance would make them, the bound of what was played holds."""
    wanted = stats.binomtest(96, 192).proportion_ci(0.95, "exact")
    assert korn_graubard([0.5, 0.5, 0.5], [N, N, N]) == pytest.approx((wanted.low, wanted.high))
    assert korn_graubard([1.0, 1.0], [N, N]) == pytest.approx((0.025 ** (1 / 128), 1))
    # A mean of a share of 10 and of one of 90 varies as the share of 36 would: p q (1/10 + 1/90) / 4 = p q / 36.
    assert korn_graubard([1.0, 1.0], [10, 90]) == pytest.approx((0.025 ** (1 / 36), 1))


def test_seeds_that_differ_more_widen_it():
    widths = [np.diff(korn_graubard([0.9 - d, 0.9, 0.9 + d], [512] * 3))[0] for d in (0.0, 0.02, 0.05, 0.09)]
    assert widths == sorted(widths)
    # Around a half it is Student's t interval of the seeds.
    low, high = korn_graubard([0.46, 0.5, 0.54], [10**6] * 3)
    assert high - low == pytest.approx(2 * 4.302653 * 0.04 / 3**0.5, rel=0.1)


@pytest.mark.parametrize(("seeds", "true", "spread"), [
    (2, 0.5, 0.02), (2, 0.995, 0.0), (3, 0.9, 0.02), (3, 0.97, 0.0), (5, 0.5, 0.0), (5, 0.995, 0.02),
])  # fmt: skip
def test_it_holds_the_true_share_in_95_of_100_cases(seeds, true, spread):
    """Binomial, and with seeds that differ (beta-binomial); Student's t falls to 40 in the same cases."""
    rng, trials = np.random.default_rng(0), 400
    if spread == 0:
        chances = np.full((trials, seeds), true)
    else:
        spread = min(spread, 0.4 * (1 - true))
        both = true * (1 - true) / spread**2 - 1
        chances = rng.beta(true * both, (1 - true) * both, (trials, seeds))
    shares = rng.binomial(N, chances) / N
    held = [low <= true <= high for low, high in (korn_graubard(row, [N] * seeds) for row in shares)]
    assert np.mean(held) > 0.95 - 1.96 * (0.95 * 0.05 / trials) ** 0.5


def test_numbers_that_are_no_shares_keep_students_t():
    found = over_seeds([10.0, 12.0, 14.0])
    assert found["interval"] == pytest.approx([12 - 4.302653 * 2 / 3**0.5, 12 + 4.302653 * 2 / 3**0.5], rel=1e-6)
    assert over_seeds([0.5], [10]) == {"mean": 0.5, "std": None, "interval": None}


def test_wilson():
    wanted = stats.binomtest(13, 64).proportion_ci(0.95, "wilson")
    assert wilson(13, 64) == pytest.approx((wanted.low, wanted.high), rel=1e-6)
    # Else an error bar drawn from the share to the interval's end has a negative length.
    assert all(wilson(n, n)[1] == 1.0 and wilson(0, n)[0] == 0.0 for n in (1, 7, 64, 512, 1000))


def test_mcnemar_is_the_exact_binomial_test():
    for a, b in product(range(8), repeat=2):
        n, total = a + b, Fraction(0)
        for k in range(n + 1):  # at least as far from the middle as what was seen
            total += Fraction(math.comb(n, k), 2**n) if abs(2 * k - n) >= abs(a - b) else 0
        assert mcnemar(a, b) == pytest.approx(float(total))


def test_the_interval_of_matched_shares():
    """Agresti and Min (2005), from the four counts; half a task is added to each."""
    both, only_a, only_b, neither = 20, 3, 9, 18
    differences = np.array([0] * (both + neither) + [-1] * only_a + [1] * only_b)
    n, b, c = 50 + 2, only_a + 0.5, only_b + 0.5
    half = 1.959964 * math.sqrt((b + c) - (c - b) ** 2 / n) / n
    difference, interval = paired_difference(differences)
    assert difference == (only_b - only_a) / 50
    assert interval == pytest.approx([(c - b) / n - half, (c - b) / n + half])
    assert paired_difference(np.ones(1))[1][1] <= 1
    low, high = paired_difference(np.zeros(100))[1]
    assert low == -high and 0 < high < 0.05


@pytest.mark.parametrize(("only_a", "only_b"), [(0.02, 0.02), (0.15, 0.3)])
def test_it_holds_the_true_difference_in_95_of_100_cases(only_a, only_b):
    rng = np.random.default_rng(0)
    held = []
    for _ in range(4000):
        draw = rng.random(140)
        low, high = paired_difference((draw < only_b).astype(float) - (draw > 1 - only_a))[1]
        held.append(low <= only_b - only_a <= high)
    assert 0.935 <= np.mean(held) <= 0.99
