"""95 % intervals: for a share, for the mean of one number per seed, for a difference paired by task."""

from __future__ import annotations

import math

import numpy as np
from scipy import special

LEVEL = 0.975  # the upper quantile of a two-sided 95 %


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Computes the 95 % interval of a success probability (Wilson, 1927), which contains the share itself."""
    z = 1.959964
    p, spread = successes / n, z * z / n
    middle = (p + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(p * (1 - p) / n + spread / (4 * n))
    return max(0.0, min(middle - half, p)), min(1.0, max(middle + half, p))  # rounding could exclude a share of 0 or 1


def over_seeds(values: list[float], sizes: list[int] | None = None) -> dict:
    """Computes mean, sample standard deviation and 95 % interval of one number per seed; one seed has no spread.

    values: one per seed.
    sizes: for shares, the number of episodes or steps behind each; also for means of numbers in [0, 1]. Without sizes, the
    interval is Student's t; with sizes, it is `korn_graubard`, which stays in [0, 1].
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return {"mean": mean, "std": None, "interval": None}
    std = float(np.std(values, ddof=1))
    if sizes is not None:
        return {"mean": mean, "std": std, "interval": list(korn_graubard(values, sizes))}
    half = float(special.stdtrit(len(values) - 1, LEVEL)) * std / math.sqrt(len(values))
    return {"mean": mean, "std": std, "interval": [mean - half, mean + half]}


def korn_graubard(shares: list[float], sizes: list[int]) -> tuple[float, float]:
    """Computes the 95 % interval of the mean of shares that differ by more than chance, as those of several seeds may.

    It is Clopper and Pearson's binomial interval for an effective number of independent episodes: the number for which the mean
    would vary as much as the shares do among each other, fewer for the few degrees of freedom of that spread, and never more
    than there were (Korn and Graubard, Survey Methodology 24, 1998; the bound as in the NCHS's data presentation standards,
    Vital and Health Statistics 2(175), 2017). A number in [0, 1] varies at most as much as a share with the same mean, so the
    interval is wide enough for such numbers.

    shares, sizes: at least two of each, and the number of episodes or steps behind each share.
    """
    mean, seeds = float(np.mean(shares)), len(shares)
    most = seeds**2 / sum(1 / size for size in sizes)
    if variance := float(np.var(shares, ddof=1)) / seeds:
        few = special.stdtrit(most - 1, LEVEL) / special.stdtrit(seeds - 1, LEVEL)
        n = min(most, mean * (1 - mean) / variance * float(few) ** 2)
    else:
        n = most
    wins, losses = mean * n, (1 - mean) * n
    low = float(special.betaincinv(wins, losses + 1, 1 - LEVEL)) if wins else 0.0
    high = float(special.betaincinv(wins + 1, losses, LEVEL)) if losses else 1.0
    return low, high


def paired_difference(differences: np.ndarray) -> tuple[float, list[float]]:
    """Computes mean and 95 % interval of f64[n] differences in [-1, 1], one per task that two policies played.

    This is Agresti and Min's interval for matched proportions (Statistics in Medicine 24, 2005): Wald's, after half a task is
    added to each of the four outcomes. It has a width even if all differences are 0. Differences between 0 and 1, as of scores
    or of means of several plays, enter it by their squares, as outcomes do.
    """
    n = len(differences) + 2
    mean = float(np.sum(differences)) / n
    variance = (float(np.square(differences).sum()) + 1) / n - mean**2
    half = 1.959964 * math.sqrt(variance / n)
    return float(np.mean(differences)), [max(-1.0, mean - half), min(1.0, mean + half)]


def mcnemar(only_a: int, only_b: int) -> float:
    """Returns the p value of McNemar's exact test: a task that only one policy solved is equally likely to be either's."""
    n, fewer = only_a + only_b, min(only_a, only_b)
    return min(1.0, 2 * float(special.bdtr(fewer, n, 0.5))) if n else 1.0
