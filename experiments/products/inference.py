"""What follows from the seeds: intervals, p values, power, and corrections for many claims.

docs/statistics.md explains every rule; tests/experiments/products/test_inference.py simulates it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import inf, nan

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, nctdtrinc, stdtrit

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


def interval(difference: Values, alpha: float = ALPHA, resolution: float = 0.0) -> Bounds:
    """The interval of the mean; of the median if a run diverged; a point if there is one value."""
    if len(difference) == 1:
        return float(difference[0]), float(difference[0])
    if np.isnan(difference).any():
        return nan, nan
    if np.isinf(difference).any():
        return median_interval(difference, alpha)
    low, high = mean_interval(difference, alpha, resolution)
    return float(low), float(high)


def mean_interval(
    difference: Values, alpha: float = ALPHA, resolution: float = 0.0
) -> tuple[Values, Values]:
    """Student's t along the last axis; ± the resolution where all values are equal."""
    middle, error = difference.mean(-1), standard_error(difference)
    rounding = ROUNDING * np.abs(difference).max(-1)
    half = stdtrit(difference.shape[-1] - 1, 1 - alpha / 2) * error
    half = np.where(error > rounding, half, np.maximum(resolution, rounding))
    return middle - half, middle + half


def standard_error(difference: Values) -> Values:
    return np.asarray(difference.std(-1, ddof=1) / difference.shape[-1] ** 0.5)


def median_interval(difference: Values, alpha: float = ALPHA) -> Bounds:
    """From order statistics: needs no mean, so that infinite values have a rank and nothing more.

    Below six seeds even the smallest and the largest value are not enough for 95 %.
    """
    n, ordered = len(difference), np.sort(difference)
    cut = sum(2 * bdtr(k, n, 0.5) <= alpha for k in range(n))  # values beyond the interval
    return (float(ordered[cut - 1]), float(ordered[n - cut])) if cut else (-inf, inf)


def center(difference: Values) -> float:
    """What the interval is about: the mean, or the median if a run diverged."""
    middle = np.mean if np.isfinite(difference).all() else np.median
    return float(middle(difference))


def widest_pair(side: Values) -> Values:
    """For each seed, the difference of the two settings that differ most; a single run as it is."""
    pairs = [subtract(a, b) for a, b in combinations(side, 2)]
    widest = max(pairs, key=lambda pair: abs(center(pair)), default=side[0])
    return widest if len(side) == 1 or center(widest) >= 0 else -widest


def range_interval(table: Values, alpha: float = ALPHA, resolution: float = 0.0) -> Bounds:
    """The largest difference between two settings, rows of the table, from intervals of all pairs.

    The upper end is the largest of the pairs' upper ends. It needs no correction: it is too low
    only if that of the truly largest pair is. The lower end is the largest of the lower ends, each
    of which can be too high, so it has Bonferroni's correction.
    """
    pairs = [subtract(a, b) for a, b in combinations(table, 2)]
    ends = [interval(pair, alpha, resolution) for pair in pairs]
    sure = [interval(pair, alpha / (2 * len(pairs)), resolution) for pair in pairs]
    return max(0.0, *(max(low, -high) for low, high in sure)), max(
        max(-low, high) for low, high in ends
    )


def side_interval(side: Values, alpha: float, resolution: float) -> Bounds:
    """Of a single run, a row, or of the range over several."""
    if len(side) == 1:
        return interval(side[0], alpha, resolution)
    return range_interval(side, alpha, resolution)


def difference_interval(
    left: Values, right: Values | float, alpha: float = ALPHA, resolution: float = 0.0
) -> Bounds:
    """Left minus right; each side is a table with a row for each run, or right is a constant."""
    if isinstance(right, float):
        low, high = side_interval(left, alpha, resolution)
        return low - right, high - right
    if len(left) == len(right) == 1:
        return interval(subtract(left[0], right[0]), alpha, resolution)
    ours = side_interval(left, alpha / 2, resolution)  # each may be wrong in half of the cases
    theirs = side_interval(right, alpha / 2, resolution)
    return ours[0] - theirs[1], ours[1] - theirs[0]


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


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values: at most ALPHA of all such lists contain a wrong verdict."""
    order = np.argsort(p_values, kind="stable")
    steps = np.arange(len(order), 0, -1) * np.asarray(p_values, float)[order]
    return in_order(np.minimum(1, np.maximum.accumulate(steps)), order)


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values: at most ALPHA of the verdicts are expected to be wrong."""
    order = np.argsort(p_values, kind="stable")
    count = len(order)
    steps = count / np.arange(1, count + 1) * np.asarray(p_values, float)[order]
    return in_order(np.minimum.accumulate(steps[::-1])[::-1].clip(max=1), order)


def in_order(adjusted: Values, order: NDArray[np.intp]) -> list[float]:
    values = np.empty(len(order))
    values[order] = adjusted
    return [float(value) for value in values]


# -- power -------------------------------------------------------------------------------------


def noncentrality(n: int, alpha: float = ALPHA) -> float:
    """How many standard errors beyond the margin the truth must be to be seen with POWER."""
    return float(nctdtrinc(n - 1, 1 - POWER, stdtrit(n - 1, 1 - alpha / 2)))


def detectable(sd: float, n: int, alpha: float = ALPHA) -> float:
    """The smallest distance from the margin that n seeds show with POWER."""
    return noncentrality(n, alpha) * sd / n**0.5


def seeds_needed(sd: float, distance: float, alpha: float = ALPHA) -> int:
    """The seeds that show this distance from the margin with POWER; at most MOST_SEEDS + 1."""
    counts = np.arange(2, MOST_SEEDS + 1)
    critical = stdtrit(counts - 1, 1 - alpha / 2)
    enough = nctdtrinc(counts - 1, 1 - POWER, critical) * sd / counts**0.5 <= distance
    return int(counts[enough.argmax()]) if enough.any() else MOST_SEEDS + 1
