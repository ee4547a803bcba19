"""The paper's theory of Adam on its two counterexamples, with the corrected formulas.

Sequential problem (Eq. 6): an epoch has the d gradients C, -1, ..., -1.
Stochastic problem (Eq. 7): a gradient is C with probability p = (1 + delta) / (C + 1), else -1.
In both, θ should decrease; Adam may increase it, because v_t grows with the gradient it divides.

beta1, beta2 and C may be arrays that broadcast. If a result has one value for each step i = 1..d of
an epoch, i is the last axis. docs/errata.md explains where a formula differs from the printed one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

LARGEST_C = 1e100  # C² and its multiples still fit in a float


def limit_m(beta1: ArrayLike, C: ArrayLike, d: int) -> Array:
    """Limits of m_{nd+i} for i = 1..d as n grows, in the sequential problem (proof of Lemma 2).

    >>> limit_m(0.5, C=3, d=2).round(4).tolist()
    [1.6667, 0.3333]
    """
    i = _steps(d)
    beta1, C = _decay("beta1", beta1)[..., None], _gradient(C)[..., None]
    return (1 - beta1) / (1 - beta1**d) * (C + 1) * beta1 ** (i - 1) - 1


def limit_v(beta2: ArrayLike, C: ArrayLike, d: int) -> Array:
    """Limits of v_{nd+i} for i = 1..d as n grows, in the sequential problem (Lemma 2, Eq. 9).

    >>> limit_v(0.5, C=3, d=2).round(4).tolist()
    [6.3333, 3.6667]
    """
    return _limit_v_above_1(beta2, C, d) + 1


def _limit_v_above_1(beta2: ArrayLike, C: ArrayLike, d: int) -> Array:
    i = _steps(d)
    beta2, C = _decay("beta2", beta2)[..., None], _gradient(C)[..., None]
    return (1 - beta2) / (1 - beta2**d) * (C**2 - 1) * beta2 ** (i - 1)


def net_update_factors(beta1: ArrayLike, beta2: ArrayLike, C: ArrayLike, d: int) -> Array:
    """Limits of k(g_{nd+i}) for i = 1..d with alpha = 1 (Eq. 8, Lemma 3); the first is k(C).

    >>> net_update_factors(0.5, 0.9, C=6, d=6).round(4).tolist()
    [0.3586, 0.3737, 0.3875, 0.3984, 0.403, 0.3943]
    """
    V = 1 / np.sqrt(limit_v(beta2, C, d))
    beta1 = _decay("beta1", beta1)[..., None]
    weight = (1 - beta1) / (1 - beta1**d) * beta1 ** np.arange(d)
    k = np.empty(np.broadcast_shapes(V.shape, weight.shape))
    after = np.sum(weight * V, axis=-1)  # k of the next epoch's first gradient
    for i in reversed(range(d)):
        after = k[..., i] = (1 - beta1[..., 0]) * V[..., i] + beta1[..., 0] * after
    return k


def epoch_update(
    beta1: ArrayLike, beta2: ArrayLike, C: ArrayLike, d: int, *, large_v: bool = False
) -> Array:
    """S, the sum of m/√v over an epoch in the limit (Eq. 18); S > 0 decreases θ, as it should.

    large_v uses Lemma 6's approximation v ≫ 1, which drops the "+ 1" of Lemma 2.

    >>> round(float(epoch_update(0.0, 0.5, C=6, d=6)), 4)   # wrong direction
    -1.4091
    """
    if large_v:
        _needs_large_v(beta2, C)
        v = _limit_v_above_1(beta2, C, d)
    else:
        v = limit_v(beta2, C, d)
    return np.sum(limit_m(beta1, C, d) / np.sqrt(v), axis=-1)


def critical_c(beta1: ArrayLike, beta2: ArrayLike, d: int, *, large_v: bool = False) -> Array:
    """The C at which S = 0 for an epoch of d steps, found by bisection; inf if no C is enough.

    S < 0 below it and S > 0 above it.

    >>> round(float(critical_c(0.0, 0.9, d=6)), 4)
    5.7276
    """
    if d < 2:
        raise ValueError(f"d is {d}; with one gradient per epoch S is never 0: pass d >= 2")
    beta1, beta2 = np.broadcast_arrays(_decay("beta1", beta1), _decay("beta2", beta2))
    # V increases over an epoch and m decreases, so S <= 0 while the sum of gradients C + 1 - d is.
    gradients_sum_to_zero = np.full(beta1.shape, d - 1.0)
    return _crossing(
        lambda C: epoch_update(beta1, beta2, C, d, large_v=large_v), gradients_sum_to_zero
    )


def critical_c_closed_form(beta1: ArrayLike, beta2: ArrayLike, d: ArrayLike) -> Array:
    """The critical C of Lemma 6 (v ≫ 1), corrected; d may be any real number >= 1.

    With s = √beta2 and H(x, y) = (x^d - y^d) / (x - y):  C + 1 = H(1, s) H(1, beta1) / H(s, beta1).

    >>> round(float(critical_c_closed_form(0.0, 0.9, d=6)), 4)
    5.8723
    """
    beta1, beta2 = _decay("beta1", beta1), _decay("beta2", beta2)
    d = np.asarray(d, dtype=float)
    if not np.all(d >= 1):
        raise ValueError(f"d is {_first_invalid(d, d >= 1)}; must be at least 1: pass a larger d")
    s = np.sqrt(beta2)
    with np.errstate(divide="ignore", over="ignore"):  # inf: no C is large enough
        return _quotient(1.0, s, d) * _quotient(1.0, beta1, d) / _quotient(s, beta1, d) - 1


def smallest_failing_c(beta1: ArrayLike, beta2: ArrayLike) -> NDArray[np.int64]:
    """The smallest integer C at which Adam fails (S < 0) along d = C, from the exact limits.

    >>> int(smallest_failing_c(0.9, 0.999))
    74
    """
    beta1, beta2 = np.broadcast_arrays(_decay("beta1", beta1), _decay("beta2", beta2))
    found = np.zeros(beta1.shape, dtype=np.int64)
    for C in count(2):  # terminates: as C = d grows, S decreases like -d for all beta1, beta2 < 1
        undecided = found == 0
        if not undecided.any():
            break
        fails = epoch_update(beta1[undecided], beta2[undecided], C, C) < 0
        found[undecided] = np.where(fails, C, 0)
    return found[()]


def diagonal_critical_c(beta1: ArrayLike, beta2: ArrayLike) -> Array:
    """The real C = d > 1 that the corrected Lemma 6 maps to itself: above it Adam fails.

    >>> round(float(diagonal_critical_c(0.9, 0.999)), 3)
    73.087
    """
    beta1, beta2 = np.broadcast_arrays(_decay("beta1", beta1), _decay("beta2", beta2))
    C = _crossing(lambda d: critical_c_closed_form(beta1, beta2, d) - d, np.ones(beta1.shape))
    # At beta1 = beta2 = 0 the closed form jumps from 0 at d = 1 to infinity: it never equals d.
    return np.where((beta1 == 0) & (beta2 == 0), np.nan, C)[()]


@dataclass(frozen=True)
class StochasticProblem:
    """Eq. 7: the gradient is C with probability p = (1 + delta) / (C + 1), and -1 otherwise.

    >>> problem = StochasticProblem(C=101, delta=0.02)
    >>> round(problem.drift(0.9, 0.999), 4), round(problem.drift(0.9, 0.9999), 4)
    (0.0029, -0.0015)
    """

    C: float
    delta: float

    def __post_init__(self) -> None:
        if not 0 < self.delta < self.C:
            raise ValueError(
                f"delta is {self.delta}; must lie in (0, C) = (0, {self.C}), or p is not a "
                "probability: pass a smaller delta or a larger C"
            )

    @property
    def p(self) -> float:
        return (1 + self.delta) / (self.C + 1)

    @property
    def mean(self) -> float:
        """E[g] (Eq. 28)."""
        return self.delta

    @property
    def second_moment(self) -> float:
        """E[g²] (Eq. 29, corrected)."""
        return self.C + self.delta * (self.C - 1)

    @property
    def variance(self) -> float:
        """D[g] (Eq. 30, corrected)."""
        return (self.C - self.delta) * (1 + self.delta)

    @property
    def fourth_moment(self) -> float:
        """E[g⁴] (Eq. 31)."""
        C, delta = self.C, self.delta
        return C * (C**2 - C + 1) + delta * (C - 1) * (C**2 + 1)

    @property
    def variance_of_square(self) -> float:
        """D[g²] (Eq. 32, corrected)."""
        return (self.C - 1) ** 2 * self.variance

    def variance_of_v(self, beta2: ArrayLike) -> Array:
        """D[v_t] in the limit of many steps (Eq. 34, corrected: the weights are squared)."""
        beta2 = _decay("beta2", beta2)
        return (1 - beta2) / (1 + beta2) * self.variance_of_square

    def mean_of_X(self, g: ArrayLike, beta2: ArrayLike, t: ArrayLike) -> Array:
        """E[X_t] (Eq. 37), where X_t is v_{i+t} given that g_i = g."""
        beta2, t = _decay("beta2", beta2), _lag(t)
        own = (1 - beta2) * beta2**t * np.square(g)
        return (1 + beta2 ** (t + 1) - beta2**t) * self.second_moment + own

    def variance_of_X(self, beta2: ArrayLike, t: ArrayLike) -> Array:
        """D[X_t] (Eq. 39, corrected); it does not depend on g_i."""
        beta2, t = _decay("beta2", beta2), _lag(t)
        return (1 + beta2 ** (2 * t + 2) - beta2 ** (2 * t)) * self.variance_of_v(beta2)

    def net_update_factor(self, g: float, beta1: float, beta2: float) -> float:
        """E[k(g_i)] given g_i = g, to second order and with alpha = 1 (Lemma 4, Eq. 41, corrected).

        Accurate if the variance of v_t is small: for C = 101 the error is below 1 % at
        beta2 = 0.999, but about 14 % at beta2 = 0.99.
        """
        _decay("beta1", beta1)
        _decay("beta2", beta2)
        t = np.arange(_forgotten_after(min(beta1, beta2)) + 1)
        weight = (1 - beta1) * float(beta1) ** t
        weight[-1] = float(beta1) ** t[-1]  # and all later terms: X_t no longer changes with t
        mean, variance = self.mean_of_X(g, beta2, t), self.variance_of_X(beta2, t)
        return float(np.sum(weight * (mean**-0.5 + 3 / 8 * mean**-2.5 * variance)))

    def drift(self, beta1: float, beta2: float) -> float:
        """Expected change of θ per step, divided by alpha; positive is the wrong direction."""
        k_C = self.net_update_factor(self.C, beta1, beta2)
        k_minus_1 = self.net_update_factor(-1, beta1, beta2)
        return -(self.p * self.C * k_C - (1 - self.p) * k_minus_1)


def _quotient(x: ArrayLike, y: ArrayLike, d: Array) -> Array:
    """(x^d - y^d) / (x - y), or its limit d x^(d-1) at x = y, without cancellation near x = y."""
    large, small = np.maximum(x, y), np.minimum(x, y)
    with np.errstate(divide="ignore", invalid="ignore"):
        gap = np.where(large > 0, (large - small) / large, 0.0)
        scaled = -np.expm1(d * np.log1p(-gap)) / gap
    return large ** (d - 1) * np.where(gap > 0, scaled, d)


def _crossing(f: Callable[[Array], Array], low: Array) -> Array:
    """The zero of f, which is not positive at low and changes sign once; inf if there is none."""
    high = 2 * low
    while np.any(short := (f(high) < 0) & (high < LARGEST_C)):
        low, high = np.where(short, high, low), np.where(short, 2 * high, high)
    for _ in range(np.finfo(float).nmant + 8):
        middle = (low + high) / 2
        short = f(middle) < 0
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    return np.where(high < LARGEST_C, high, np.inf)[()]


def _forgotten_after(beta: float) -> int:
    """Number of steps after which beta^t is negligible."""
    return 1 if beta == 0 else math.ceil(-60 * math.log(2) / math.log(beta))


def _steps(d: int) -> Array:
    if d < 1 or d != int(d):
        raise ValueError(f"d is {d}; the number of steps must be an integer: pass d >= 1")
    return np.arange(1, int(d) + 1, dtype=float)


def _decay(name: str, beta: ArrayLike) -> Array:
    beta = np.asarray(beta, dtype=float)
    allowed = (beta >= 0) & (beta < 1)
    if not np.all(allowed):
        raise ValueError(
            f"{name} is {_first_invalid(beta, allowed)}; must lie in [0, 1): "
            "pass a decay rate such as 0.9"
        )
    return beta


def _gradient(C: ArrayLike) -> Array:
    C = np.asarray(C, dtype=float)
    if not np.all(C > 0):
        raise ValueError(f"C is {_first_invalid(C, C > 0)}; must be positive: pass C > 0")
    return C


def _lag(t: ArrayLike) -> Array:
    t = np.asarray(t, dtype=float)
    if not np.all(t >= 0):
        raise ValueError(f"t is {_first_invalid(t, t >= 0)}; must be at least 0: pass a lag t >= 0")
    return t


def _needs_large_v(beta2: ArrayLike, C: ArrayLike) -> None:
    beta2, C = np.asarray(beta2, dtype=float), np.asarray(C, dtype=float)
    if not (np.all(beta2 > 0) and np.all(C > 1)):
        raise ValueError(
            f"beta2 is {beta2.min()} and C is {C.min()}; v ≫ 1 needs beta2 > 0 and C > 1: "
            "pass large_v=False"
        )


def _first_invalid(values: Array, allowed: NDArray[np.bool_]) -> float:
    return float(values[~allowed].flat[0])
