"""What follows from the seeds: intervals, p values, power, and corrections for many claims.

docs/statistics.md explains every rule; tests/experiments/products/test_inference.py simulates it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import inf, nan

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import bdtr, nctdtrinc, ndtri, stdtrit

Values = NDArray[np.float64]
Bounds = tuple[float, float]

ALPHA = 0.05  # of a verdict; intervals have the level 1 − ALPHA
POWER = 0.8  # with which a detectable effect is found
SMALLEST_P = 1e-10  # smaller ones are reported as this
MOST_SEEDS = 1000  # that a forecast names
ROUNDING = 4 * np.finfo(float).eps


# -- intervals ---------------------------------------------------------------------------------


def subtract(left: Values, right: Values) -> Values:
    """Left minus right for each seed; two diverged runs, inf − inf, are equally bad: 0."""
    with np.errstate(invalid="ignore"):
        difference = np.asarray(left - right)
    return np.where(np.isinf(left) & (left == right), 0.0, difference)


def has_diverged(*sides: Values | float) -> bool:
    return any(bool(np.isinf(side).any()) for side in sides)


def paired_interval(
    left: Values, right: Values, alpha: float, resolution: float, by_median: bool
) -> Bounds:
    """Of left minus right; nothing is known if both diverged in every seed."""
    if np.isinf(left).all() and np.isinf(right).all():
        return -inf, inf
    return interval(subtract(left, right), alpha, resolution, by_median)


def interval(
    difference: Values, alpha: float = ALPHA, resolution: float = 0.0, by_median: bool = False
) -> Bounds:
    """The interval of the mean; of the median if a run diverged; a point if there is one value."""
    if len(difference) == 1:
        return float(difference[0]), float(difference[0])
    if np.isnan(difference).any():
        return nan, nan
    if by_median or has_diverged(difference):
        return median_interval(difference, alpha)
    low, high = mean_interval(difference, alpha, resolution)
    return float(low), float(high)


def mean_interval(
    difference: Values, alpha: float = ALPHA, resolution: float = 0.0
) -> tuple[Values, Values]:
    """Student's t along the last axis; ± the resolution where all values are equal.

    Equal values are as sure as a sign test of so many seeds: at a smaller alpha, nothing is known.
    """
    n, middle = difference.shape[-1], difference.mean(-1)
    half = stdtrit(n - 1, 1 - alpha / 2) * standard_error(difference)
    equal = np.maximum(resolution, rounding(difference)) if alpha >= 2 * 0.5**n else inf
    half = np.where(is_constant(difference), equal, half)
    return middle - half, middle + half


def is_constant(numbers: Values) -> NDArray[np.bool_]:
    """Whether all values along the last axis are equal, but for rounding."""
    return np.asarray(standard_error(numbers) <= rounding(numbers))


def rounding(numbers: Values) -> Values:
    return np.asarray(ROUNDING * np.abs(numbers).max(-1))


def standard_error(difference: Values) -> Values:
    return np.asarray(difference.std(-1, ddof=1) / difference.shape[-1] ** 0.5)


def median_interval(difference: Values, alpha: float = ALPHA) -> Bounds:
    """From order statistics: needs no mean, so that infinite values have a rank and nothing more.

    Below six seeds even the smallest and the largest value are not enough for 95 %.
    """
    n, ordered = len(difference), np.sort(difference)
    cut = sum(2 * bdtr(k, n, 0.5) <= alpha for k in range(n))  # values beyond the interval
    return (float(ordered[cut - 1]), float(ordered[n - cut])) if cut else (-inf, inf)


def center(difference: Values, by_median: bool = False) -> float:
    """What the interval is about: the mean, or the median if a run diverged."""
    middle = np.median if by_median or has_diverged(difference) else np.mean
    return float(middle(difference))


def pairs_of(side: Values) -> list[Values]:
    """The differences of all pairs of settings, rows of the table; a single run as it is."""
    return [subtract(a, b) for a, b in combinations(side, 2)] or [side[0]]


def widest_pair(side: Values, by_median: bool = False) -> Values:
    """For each seed, the difference of the two settings that differ most; a single run as it is."""
    widest = max(pairs_of(side), key=lambda pair: abs(center(pair, by_median)))
    return widest if len(side) == 1 or center(widest, by_median) >= 0 else -widest


def range_interval(
    table: Values, alpha: float = ALPHA, resolution: float = 0.0, by_median: bool = False
) -> Bounds:
    """The largest difference between two settings, rows of the table, from intervals of all pairs.

    The upper end is the largest of the pairs' upper ends. It needs no correction: it is too low
    only if that of the truly largest pair is. The lower end is the largest of the lower ends, each
    of which can be too high, so it has Bonferroni's correction.
    """
    pairs = [*combinations(table, 2)]
    strict = alpha / (2 * len(pairs))
    ends = [paired_interval(*pair, alpha, resolution, by_median) for pair in pairs]
    sure = [paired_interval(*pair, strict, resolution, by_median) for pair in pairs]
    return max(0.0, *(max(low, -high) for low, high in sure)), max(
        max(-low, high) for low, high in ends
    )


def side_interval(side: Values, alpha: float, resolution: float, by_median: bool) -> Bounds:
    """Of a single run, a row, or of the range over several."""
    if len(side) == 1:
        return interval(side[0], alpha, resolution, by_median)
    return range_interval(side, alpha, resolution, by_median)


def difference_interval(
    left: Values, right: Values | float, alpha: float = ALPHA, resolution: float = 0.0
) -> Bounds:
    """Left minus right; each side is a table with a row for each run, or right is a constant."""
    by_median = has_diverged(left, right)
    if isinstance(right, float):
        low, high = side_interval(left, alpha, resolution, by_median)
        return low - right, high - right
    if len(left) == len(right) == 1:
        return paired_interval(left[0], right[0], alpha, resolution, by_median)
    half = alpha / 2  # each side may be wrong in half of the cases
    ours = side_interval(left, half, resolution, by_median)
    theirs = side_interval(right, half, resolution, by_median)
    return ours[0] - theirs[1], ours[1] - theirs[0]


# -- probability of being better ---------------------------------------------------------------


def superiority(ours: Values, theirs: Values) -> float:
    """The share of all pairs of runs in which ours is larger; equal ones count half."""
    a, b = ours[:, None], theirs[None, :]
    return float(np.mean((a > b) + 0.5 * (a == b)))


def superiority_interval(share: float, n: int, m: int, alpha: float = ALPHA) -> Bounds:
    """Newcombe's score interval (2006, method 5), which is not a point if the share is 0 or 1."""
    z, s = ndtri(1 - alpha / 2), (n + m) / 2 - 1

    def excess(truth: float) -> float:
        spread = 1 + s * (1 - truth) / (2 - truth) + s * truth / (1 + truth)
        return float((share - truth) ** 2 - z**2 * truth * (1 - truth) * spread / (n * m))

    tiny = 1e-9  # 0 and 1 are roots as well, but not ends of the interval
    low = brentq(excess, 0, min(share, 1 - tiny)) if share > 0 else 0.0
    high = brentq(excess, max(share, tiny), 1) if share < 1 else 1.0
    return float(low), float(high)


def mean_of_bounds(middles: Sequence[float], bounds: Sequence[Bounds]) -> tuple[float, Bounds]:
    """The mean of independent estimates and its interval from theirs (MOVER, Zou and Donner)."""
    x, (low, high) = np.asarray(middles), np.asarray(bounds).T
    middle = x.mean()
    below, above = (np.sqrt(np.sum(d**2)) / len(x) for d in (x - low, high - x))
    return float(middle), (float(middle - below), float(middle + above))


# -- tests -------------------------------------------------------------------------------------


def smallest_alpha(is_reached: Callable[[float], bool]) -> float:
    """The p value: the smallest alpha at which a verdict is reached; 1 if there is none."""
    if not is_reached(1.0 - 1e-9):
        return 1.0
    low, high = np.log10(SMALLEST_P), 0.0
    if is_reached(SMALLEST_P):
        return SMALLEST_P
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if is_reached(10**middle) else (middle, high)
    return float(10**high)


def all_hold(p_values: Sequence[float]) -> float:
    """Whether all parts hold: the largest p value (intersection–union test)."""
    return max(p_values)


def any_fails(p_values: Sequence[float]) -> float:
    """Whether at least one part fails: Bonferroni's correction of the smallest p value."""
    return min(1.0, len(p_values) * min(p_values))


def holm(p_values: Sequence[float], size: int = 0) -> list[float]:
    """Adjusted p values: at most ALPHA of all such lists contain a wrong verdict.

    `size` is the length of the whole list, if not all of its tests have been made.
    """
    order = np.argsort(p_values, kind="stable")
    left = max(size, len(order)) - np.arange(len(order))
    steps = left * np.asarray(p_values, float)[order]
    return in_order(np.minimum(1, np.maximum.accumulate(steps)), order)


def benjamini_hochberg(p_values: Sequence[float], size: int = 0) -> list[float]:
    """Adjusted p values: at most ALPHA of the verdicts are expected to be wrong."""
    order = np.argsort(p_values, kind="stable")
    count = max(size, len(order))
    steps = count / np.arange(1, len(order) + 1) * np.asarray(p_values, float)[order]
    return in_order(np.minimum.accumulate(steps[::-1])[::-1].clip(max=1), order)


def in_order(adjusted: Values, order: NDArray[np.intp]) -> list[float]:
    values = np.empty(len(order))
    values[order] = adjusted
    return [float(value) for value in values]


# -- power -------------------------------------------------------------------------------------


def power_of(tests: int) -> float:
    """The power of each test that gives POWER or more to all of them together."""
    return 1 - (1 - POWER) / tests


def standard_errors(n: int | Values, alpha: float, power: float) -> Values:
    """How many standard errors beyond the margin the truth must be to be seen with this power."""
    return np.asarray(nctdtrinc(n - 1, 1 - power, stdtrit(n - 1, 1 - alpha / 2)))


def detectable(sd: float, n: int, alpha: float = ALPHA, power: float = POWER) -> float:
    """The smallest distance from the margin that n seeds show with this power."""
    return float(standard_errors(n, alpha, power)) * sd / n**0.5


def seeds_needed(sd: float, distance: float, alpha: float = ALPHA, power: float = POWER) -> int:
    """The seeds that show this distance from the margin; at most MOST_SEEDS + 1."""
    counts = np.arange(2.0, MOST_SEEDS + 1)
    enough = standard_errors(counts, alpha, power) * sd / counts**0.5 <= distance
    return int(counts[enough.argmax()]) if enough.any() else MOST_SEEDS + 1
