"""Each error of docs/errata.md: the printed formula fails by brute force, the corrected one holds.

Functions named printed_... transcribe the paper as it stands.
"""

from itertools import product

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.signal import lfilter

from adashift.analysis.theory import (
    StochasticProblem,
    critical_c,
    critical_c_closed_form,
    epoch_update,
    limit_m,
    limit_v,
    net_update_factors,
    smallest_failing_c,
)

FIGURE_1 = StochasticProblem(C=101, delta=0.02)
SMALL = StochasticProblem(C=6, delta=1)


# Brute force


def epochs_of(C, d, epochs):
    return ([float(C)] + [-1.0] * (d - 1)) * epochs


def adam_moments(gradients, beta1, beta2):
    """m_t and v_t by the recursion of Eq. 3."""
    m = v = 0.0
    history = []
    for g in gradients:
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        history.append((m, v))
    return np.array(history).T


def settled_epoch(beta1, beta2, C, d):
    """m and v of Adam over one epoch, after the initial value is negligible."""
    epochs = int(30 / (1 - max(beta1, beta2)) / d) + 2
    return adam_moments(epochs_of(C, d, epochs), beta1, beta2)[:, -d:]


def simulated_movement(beta1, beta2, C, d, drop=0):
    m, v = settled_epoch(beta1, beta2, C, d)
    return np.sum(m / np.sqrt(v - drop))


def simulated_root(beta1, beta2, d, drop=0):
    return brentq(
        lambda C: simulated_movement(beta1, beta2, C, d, drop), d - 0.999, 20 * d, xtol=1e-7
    )


def enumerate_gradients(problem, length):
    """Every sequence of `length` gradients of Eq. 7 with its probability."""
    sequences = np.array(list(product([problem.C, -1.0], repeat=length))).reshape(-1, length)
    large = (sequences > 0).sum(axis=1)
    return sequences, problem.p**large * (1 - problem.p) ** (length - large)


def expectation(problem, f):
    return problem.p * f(problem.C) + (1 - problem.p) * f(-1.0)


def mean_and_variance(values, probability):
    mean = probability @ values
    return mean, probability @ (values - mean) ** 2


def draw_gradients(problem, steps, seed):
    return np.where(np.random.default_rng(seed).random(steps) < problem.p, problem.C, -1.0)


def moving_average(x, beta, axis=-1):
    return lfilter([1 - beta], [1, -beta], x, axis=axis)


def simulated_factors(problem, beta1, beta2, steps=4_000_000, seed=0):
    """Monte Carlo of E[k(C)] and E[k(-1)] (Eq. 8) and of D[v]."""
    g = draw_gradients(problem, steps, seed)
    v = moving_average(g**2, beta2)
    k = moving_average(1 / np.sqrt(v[::-1]), beta1)[::-1]
    settled = slice(int(20 / (1 - beta2)), -int(20 / (1 - beta1)))
    g, k, v = g[settled], k[settled], v[settled]
    return k[g > 0].mean(), k[g < 0].mean(), v.var()


def pearson(x, y):
    """Correlation over time (first axis), averaged over elements, as in the paper's Appendix C."""
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    return np.mean(np.sum(x * y, axis=0) / np.sqrt(np.sum(x**2, axis=0) * np.sum(y**2, axis=0)))


# E1


def printed_critical_c(beta1, beta2, d):
    s = np.sqrt(beta2)
    top = (1 - beta1**d) * (s**d - beta1**d) * (1 - s)
    return top / ((1 - beta1) * (s - beta1) * (1 - s**d)) - 1


@pytest.mark.parametrize(
    ("beta1", "beta2", "d", "large_v_root", "exact_root", "printed"),
    [
        (0, 0.9, 6, 5.8723, 5.7276, -0.854),
        (0, 0.99, 10, 9.2298, 9.2052, -0.902),
        (0.5, 0.9, 6, 5.5392, 5.4412, -0.407),
        (0.9, 0.99, 6, 5.0092, 5.0074, 2.654),
        (0.9, 0.999, 101, 102.1029, 102.0826, -0.030),
        (0.9, 0.5, 10, 12.0909, 10.8919, 2.241),
    ],
)
def test_E01_critical_condition_is_upside_down(beta1, beta2, d, large_v_root, exact_root, printed):
    assert simulated_root(beta1, beta2, d, drop=1) == pytest.approx(large_v_root, abs=6e-5)
    assert simulated_root(beta1, beta2, d) == pytest.approx(exact_root, abs=6e-5)
    assert critical_c_closed_form(beta1, beta2, d) == pytest.approx(large_v_root, abs=6e-5)
    assert critical_c(beta1, beta2, d) == pytest.approx(exact_root, abs=6e-5)
    assert printed_critical_c(beta1, beta2, d) == pytest.approx(printed, abs=6e-4)


def test_E01_without_momentum_and_with_constant_v_the_gradients_must_sum_to_zero():
    for d in (2, 6, 30):
        assert critical_c_closed_form(0, 1 - 1e-11, d) + 1 == pytest.approx(d)
        assert printed_critical_c(0, 1 - 1e-9, d) + 1 == pytest.approx(1 / d, rel=1e-5)


def test_E01_two_mistakes_inside_the_proof():
    beta1, beta2, C, d = 0.5, 0.9, 7.0, 6
    s, i = np.sqrt(beta2), np.arange(1, d + 1)
    S = simulated_movement(beta1, beta2, C, d, drop=1)

    root_v = np.sqrt((1 - beta2) / (1 - beta2**d) * (C**2 - 1) * beta2 ** (i - 1))
    printed, corrected = (
        np.sum(((1 - beta1) / (1 - beta**d) * (C + 1) * beta1 ** (i - 1) - 1) / root_v)
        for beta in (beta2, beta1)
    )
    assert corrected == pytest.approx(S)
    assert printed != pytest.approx(S, rel=0.1)

    front = np.sqrt((1 - beta2**d) / ((1 - beta2) * beta2 ** (d - 1) * (C - 1)))
    small = (s**d - 1) / (np.sqrt(C + 1) * (s - 1))
    printed, corrected = (
        front * ((1 - beta1) * top * np.sqrt(C + 1) / ((1 - beta1**d) * (s - beta1)) - small)
        for top in (beta2**d - beta1**d, s**d - beta1**d)
    )
    assert corrected == pytest.approx(S)
    assert printed != pytest.approx(S, rel=0.1)


def test_E01_a_larger_c_helps_at_fixed_d_and_hurts_along_c_equals_d():
    root = critical_c(0.9, 0.9, 14)
    assert (
        simulated_movement(0.9, 0.9, root - 0.1, 14)
        < 0
        < simulated_movement(0.9, 0.9, root + 0.1, 14)
    )
    assert simulated_movement(0.9, 0.9, 13, 13) > 0 > simulated_movement(0.9, 0.9, 14, 14)
    excess = np.array([critical_c(0.9, 0.9, d) - d for d in range(2, 60)])
    assert (np.diff(excess) > 0).all()  # the root grows faster than d
    assert ((excess > 0) == (np.arange(2, 60) >= 14)).all()


# E2, E3, E4: moments of the gradient


def printed_second_moment(C, delta):
    return C + delta * (C + 1)


def printed_variance(C, delta):
    return C + delta * (C + 1) - delta**2


def printed_variance_of_square(C, delta):
    return C**3 - 2 * C**2 + C + delta * (C**3 - 3 * C**2 - C - 1) - delta**2 * (C + 1) ** 2


@pytest.mark.parametrize(
    ("C", "delta", "true", "printed"), [(6, 1, 11, 13), (101, 0.02, 103.00, 103.04)]
)
def test_E02_second_moment(C, delta, true, printed):
    problem = StochasticProblem(C, delta)
    assert expectation(problem, lambda g: g**2) == pytest.approx(true)
    assert problem.second_moment == pytest.approx(true)
    assert printed_second_moment(C, delta) == pytest.approx(printed)


def test_E02_the_mean_of_v_inherits_it():
    v = moving_average(draw_gradients(SMALL, 500_000, seed=0) ** 2, 0.99)[2000:]
    assert v.mean() == pytest.approx(SMALL.second_moment, rel=0.01)
    assert v.mean() != pytest.approx(printed_second_moment(6, 1), rel=0.1)


@pytest.mark.parametrize(("C", "delta", "true", "printed"), [(6, 1, 10, 12)])
def test_E03_variance(C, delta, true, printed):
    problem = StochasticProblem(C, delta)
    assert expectation(problem, lambda g: (g - delta) ** 2) == pytest.approx(true)
    assert problem.variance == pytest.approx(true)
    assert printed_variance(C, delta) == pytest.approx(printed)


@pytest.mark.parametrize(
    ("C", "delta", "true", "printed"),
    [(6, 1, 250, 202), (10, 0.5, 1154.25, 1124.25), (101, 0.02, 1_029_996, 1_029_987.8)],
)
def test_E04_variance_of_the_square(C, delta, true, printed):
    problem = StochasticProblem(C, delta)
    second, fourth = (expectation(problem, lambda g, n=n: g**n) for n in (2, 4))
    assert problem.fourth_moment == pytest.approx(fourth)
    assert fourth - second**2 == pytest.approx(true)
    assert problem.variance_of_square == pytest.approx(true)
    assert printed_variance_of_square(C, delta) == pytest.approx(printed, abs=0.05)
    by_the_wrong_second_moment = fourth - printed_second_moment(C, delta) ** 2
    assert printed_variance_of_square(C, delta) == pytest.approx(by_the_wrong_second_moment)


# E5: variance of v


def printed_variance_of_X(problem, beta2, t):
    recent = (1 - beta2) ** 2 * (1 - beta2 ** (2 * t)) / (1 - beta2**2)
    return (beta2 ** (2 * (t + 1)) + recent) * problem.variance_of_square


def second_order_factor(problem, g, beta1, beta2, variance_of_X):
    t = np.arange(int(40 / (1 - beta1)))
    mean, variance = problem.mean_of_X(g, beta2, t), variance_of_X(beta2, t)
    return np.sum((1 - beta1) * beta1**t * (mean**-0.5 + 3 / 8 * mean**-2.5 * variance))


def test_E05_variance_of_v_by_enumeration():
    beta2, t = 0.8, 10
    gradients, probability = enumerate_gradients(SMALL, t)
    _, variance = mean_and_variance(moving_average(gradients**2, beta2)[:, -1], probability)
    D = SMALL.variance_of_square
    printed = (1 - beta2**t) * D
    squared_weights = (1 - beta2) / (1 + beta2) * (1 - beta2 ** (2 * t)) * D
    assert variance == pytest.approx(squared_weights)
    assert variance == pytest.approx(27.46, abs=5e-3)
    assert printed == pytest.approx(223.16, abs=5e-3)


@pytest.mark.parametrize(("beta2", "formula"), [(0.9, 54_210), (0.99, 5_176), (0.999, 515)])
def test_E05_variance_of_v_by_monte_carlo(beta2, formula):
    _, _, variance = simulated_factors(FIGURE_1, 0, beta2)
    assert FIGURE_1.variance_of_v(beta2) == pytest.approx(formula, abs=0.5)
    assert variance == pytest.approx(formula, rel=0.02)
    assert FIGURE_1.variance_of_square == pytest.approx(1_029_996)  # what is printed for all three


@pytest.mark.parametrize("t", [0, 1, 2])
def test_E05_first_line_of_the_variance_of_X_is_right_and_the_second_wrong(t):
    beta2, past = 0.5, 10
    gradients, probability = enumerate_gradients(SMALL, past + t)
    own = np.full((len(gradients), 1), -1.0)
    sequence = np.hstack([gradients[:, :past], own, gradients[:, past:]])
    _, variance = mean_and_variance(moving_average(sequence**2, beta2)[:, -1], probability)
    recent = (1 - beta2) ** 2 * (1 - beta2 ** (2 * t)) / (1 - beta2**2)
    first_line = (
        beta2 ** (2 * (t + 1)) * SMALL.variance_of_v(beta2) + recent * SMALL.variance_of_square
    )
    assert first_line == pytest.approx(variance, rel=1e-4)
    assert SMALL.variance_of_X(beta2, t) == pytest.approx(variance, rel=1e-4)
    assert printed_variance_of_X(SMALL, beta2, t) != pytest.approx(variance, rel=0.01)


def test_E05_net_update_factors_of_figure_1():
    k_C, k_minus_1, _ = simulated_factors(FIGURE_1, 0.9, 0.999)
    assert (k_C, k_minus_1) == pytest.approx((0.0956, 0.1006), abs=3e-4)
    ours = [FIGURE_1.net_update_factor(g, 0.9, 0.999) for g in (101, -1)]
    assert ours == pytest.approx([0.0955, 0.1004], abs=5e-5)
    printed = [
        second_order_factor(
            FIGURE_1, g, 0.9, 0.999, lambda b, t: printed_variance_of_X(FIGURE_1, b, t)
        )
        for g in (101, -1)
    ]
    assert printed == pytest.approx([2.88, 3.62], abs=5e-3)


def test_E05_the_order_of_the_factors_needs_no_expansion():
    rng = np.random.default_rng(0)
    for beta1, beta2 in rng.uniform(0, 0.99, size=(50, 2)):
        g = draw_gradients(FIGURE_1, 600, seed=int(rng.integers(1e9)))
        k = {}
        for value in (101.0, -1.0):
            g[100] = value
            v = moving_average(g**2, beta2)[100:]
            k[value] = np.sum((1 - beta1) * beta1 ** np.arange(500) / np.sqrt(v))
        assert k[101.0] < k[-1.0]


# E6, E7: the expansion


def test_E06_second_derivative_of_the_inverse_root():
    def f(x):
        return x**-0.5

    for x in (0.5, 2.0, 103.0):
        h = 1e-3 * x
        numeric = (f(x + h) - 2 * f(x) + f(x - h)) / h**2
        assert numeric == pytest.approx(3 / 4 * x**-2.5, rel=1e-5)
        assert numeric == pytest.approx(2 * (3 / 8 * x**-2.5), rel=1e-5)  # printed: half of it


def remainder(x, p, c, *, divisor, third_moment, power, tail):
    """R_3 of Lemma 7 for f(x) = x³ - 2x, whose third derivative is 6 wherever it is taken."""
    mu = p @ x
    f, slope, curvature = x**3 - 2 * x, 3 * mu**2 - 2, 6 * mu
    outside = np.abs(x - mu) > c
    kept = ~outside if third_moment == "inside" else np.full(x.shape, True)
    taylor = mu**3 - 2 * mu + slope * (x - mu) ** power
    lost = {"f + Taylor": f + taylor, "f - Taylor": f - taylor}[tail[0]]
    lost = lost - (curvature / 2 * (x - mu) ** 2 if tail[1] == "second order" else 0)
    return 6 / divisor * np.sum((p * (x - mu) ** 3)[kept]) + np.sum((p * lost)[outside])


def test_E07_remainder_of_the_expansion():
    x, p, c = np.array([0.0, 1.0, 2.0, 9.0]), np.array([0.3, 0.4, 0.25, 0.05]), 3.0
    mu = p @ x
    true = p @ (x**3 - 2 * x) - (mu**3 - 2 * mu) - 6 * mu / 2 * (p @ (x - mu) ** 2)
    options = {
        "divisor": [3, 6],
        "third_moment": ["everywhere", "inside"],
        "power": [2, 1],
        "tail": list(product(["f + Taylor", "f - Taylor"], ["first order", "second order"])),
    }
    readings = [dict(zip(options, choice, strict=True)) for choice in product(*options.values())]
    right = [r for r in readings if remainder(x, p, c, **r) == pytest.approx(true)]
    assert right == [
        {
            "divisor": 6,
            "third_moment": "inside",
            "power": 1,
            "tail": ("f - Taylor", "second order"),
        }
    ]
    # Even without a tail (c above every x) the printed third-order term is twice the truth.
    assert remainder(x, p, 99.0, **readings[0]) == pytest.approx(2 * true)


def test_E07_large_enough_means_probability_at_least():
    gradients = draw_gradients(SMALL, 100_000, seed=0)
    inside = np.array([np.mean(np.abs(gradients - 1.0) <= c) for c in (0.5, 2.5, 5.5)])
    at_most, at_least = inside <= 1 - 0.01, inside >= 1 - 0.01
    assert at_most.tolist() == [True, True, False]  # printed: holds for small c, fails for large
    assert at_least.tolist() == [False, False, True]


def test_E07_the_remainder_is_not_small_at_beta2_099():
    k_C, k_minus_1, _ = simulated_factors(FIGURE_1, 0.9, 0.99)
    ours = [FIGURE_1.net_update_factor(g, 0.9, 0.99) for g in (101, -1)]
    assert (k_C, k_minus_1) == pytest.approx((0.075, 0.136), abs=1e-3)
    assert ours == pytest.approx([0.0751, 0.1171], abs=5e-5)


# E8


def test_E08_no_fixed_k_can_stand_in_for_t():
    beta2, past, g = 0.5, 10, 6.0
    moments = []
    for t in range(4):
        gradients, probability = enumerate_gradients(SMALL, past + t)
        own = np.full((len(gradients), 1), g)
        sequence = np.hstack([gradients[:, :past], own, gradients[:, past:]])
        start = SMALL.second_moment * beta2 ** (past + 1 + t)  # v begins at its mean
        X = moving_average(sequence**2, beta2)[:, -1] + start
        moments.append(mean_and_variance(X, probability))
    means, variances = np.transpose(moments)

    t, own = np.arange(4), (1 - beta2) * beta2 ** np.arange(4) * g**2
    np.testing.assert_allclose(SMALL.mean_of_X(g, beta2, t), means)
    np.testing.assert_allclose(SMALL.variance_of_X(beta2, t), variances, rtol=1e-4)
    for k in range(8):
        printed = own + (1 + beta2 ** (t + 1) - beta2**k) * SMALL.second_moment
        assert np.abs(printed / means - 1).max() > 0.05
        assert np.abs(SMALL.variance_of_X(beta2, k) / variances - 1).max() > 0.05


# E9


def printed_v(beta2, C, d, n, i):
    old = (1 - beta2 ** ((n + 1) * d)) / (1 - beta2**d) * (1 - beta2) * beta2 ** (i - 1)
    return old * (C + 1) - (1 - beta2 ** (n * d + i))


def test_E09_last_line_for_v():
    beta2, C, d, n, i = 0.9, 6, 6, 3, 2
    m, v = adam_moments(epochs_of(C, d, n + 1), beta2, beta2)[:, n * d + i - 1]
    old = (1 - beta2 ** ((n + 1) * d)) / (1 - beta2**d) * (1 - beta2) * beta2 ** (i - 1)
    assert v == pytest.approx(7.06491, abs=5e-6)
    assert old * (C**2 - 1) + (1 - beta2 ** (n * d + i)) == pytest.approx(v)
    assert printed_v(beta2, C, d, n, i) == pytest.approx(0.35887, abs=5e-6)
    assert printed_v(beta2, C, d, n, i) == pytest.approx(m)  # it is the line for m


def test_E09_the_stated_limits_are_right():
    for beta, C, d in [(0.9, 6, 6), (0.5, 20, 3), (0.99, 3, 11)]:
        m, v = settled_epoch(beta, beta, C, d)
        np.testing.assert_allclose(limit_m(beta, C, d), m, atol=1e-9)
        np.testing.assert_allclose(limit_v(beta, C, d), v, rtol=1e-9)


# E10


def factors_by_definition(beta1, beta2, C, d):
    """k of each step of an epoch: Eq. 8 summed over the steps of simulated Adam."""
    V = 1 / np.sqrt(settled_epoch(0, beta2, C, d)[1])
    lag = np.arange(int(40 / (1 - beta1)) + 1)
    return np.array([np.sum((1 - beta1) * beta1**lag * V[(i + lag) % d]) for i in range(d)])


def forward_difference_line(beta1, V, i, sign, last):
    """First line of the forward difference: sign before V_i, inner sums up to `last`."""
    d, j, square = len(V), np.arange(last + 1), (1 - beta1) ** 2
    inner = square * np.sum(beta1**j * V[(j + i) % d]) + sign * square * np.sum(beta1**j) * V[i - 1]
    return inner / (1 - beta1**d)


def test_E10_a_sign_and_range_of_the_forward_difference():
    beta1, beta2, C, d, i = 0.5, 0.9, 6, 6, 1
    k = factors_by_definition(beta1, beta2, C, d)
    V = 1 / np.sqrt(limit_v(beta2, C, d))
    true = k[i] - k[i - 1]
    assert true == pytest.approx(0.01504, abs=5e-6)
    assert forward_difference_line(beta1, V, i, sign=-1, last=d - 1) == pytest.approx(true)
    plus = forward_difference_line(beta1, V, i, sign=+1, last=d - 1)
    assert plus == pytest.approx(0.35865, abs=5e-6)
    endless = forward_difference_line(beta1, V, i, sign=-1, last=200)
    assert endless == pytest.approx(true / (1 - beta1**d))


def test_E10_b_the_first_factor_is_the_minimum_not_the_maximum():
    k = factors_by_definition(0.5, 0.9, 6, 6)
    assert np.argmin(k) == 0
    assert np.argmax(k) == 4  # k(g_{nd+j}) with j = 5


def test_E10_c_the_forward_difference_need_not_fall():
    k = factors_by_definition(0, 0.5, 50, 6)
    differences = np.diff(np.append(k, k[0]))
    np.testing.assert_allclose(
        differences, [0.0116, 0.0164, 0.0231, 0.0324, 0.0452, -0.1288], atol=5e-5
    )


def random_sequential_problems(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        beta1, beta2 = rng.uniform(0.01, 0.99, size=2)
        yield beta1, beta2, rng.uniform(1.5, 200), int(rng.integers(3, 30))


def test_E10_d_the_lemma_holds_where_its_proof_does_not():
    falls = lemma = 0
    for beta1, beta2, C, d in random_sequential_problems(2000):
        k = net_update_factors(beta1, beta2, C, d)
        differences = np.diff(np.append(k, k[0]))
        signs = np.sign(np.where(np.abs(differences) < 1e-13, 0, differences))
        falls += (np.diff(differences) < 1e-13).all()
        lemma += (np.diff(signs) <= 0).all() and k[0] <= k.min() + 1e-13
        V = 1 / np.sqrt(limit_v(beta2, C, d))
        np.testing.assert_allclose(differences, (1 - beta1) * (np.roll(k, -1) - V), atol=1e-12)
    assert lemma == 2000
    assert falls == 334


def test_E10_d_strict_inequalities_fail_at_ties():
    beta2, C, d = 0.9, 6, 6

    def gap(beta1):
        k = net_update_factors(beta1, beta2, C, d)
        return k[5] - k[4]

    tie = brentq(gap, 0.01, 0.99, xtol=1e-15)
    assert tie == pytest.approx(0.22355, abs=5e-6)
    k = factors_by_definition(tie, beta2, C, d)
    assert k[4] == pytest.approx(k[5], abs=1e-12)  # two largest: no j with k_j above both sides
    assert k.argsort()[-2:].tolist() in ([4, 5], [5, 4])
    assert np.ptp(factors_by_definition(0, 0, C, d)[1:]) == 0  # without memory all are equal


# E11, E12: the algorithms


def printed_window(n, beta1):
    total = sum(beta1**n for i in range(n))
    return [beta1 ** (n - 1 - i) / total for i in range(n)]


def window(n, beta1):
    total = sum(beta1**i for i in range(n))
    return [beta1 ** (n - 1 - i) / total for i in range(n)]


def test_E11_weights_of_the_window():
    n, beta1 = 10, 0.9
    assert sum(beta1**n for _ in range(n)) == pytest.approx(3.487, abs=5e-4)
    assert sum(beta1**i for i in range(n)) == pytest.approx(6.513, abs=5e-4)
    constant_gradient = np.full(n, -2.0)
    assert window(n, beta1) @ constant_gradient == pytest.approx(-2.0)
    assert printed_window(n, beta1) @ constant_gradient == pytest.approx(-2.0 * 1.868, abs=1e-3)


def test_E11_without_momentum_the_printed_weights_divide_by_zero():
    assert window(3, 0.0) == [0.0, 0.0, 1.0]
    with pytest.raises(ZeroDivisionError):
        printed_window(3, 0.0)


def algorithm_2(gradient, theta_0, T, n, beta1, beta2, alpha, *, at_theta, carried):
    """Algorithm 2 line by line, one block, φ = identity; a value never set raises KeyError.

    at_theta: which θ the gradient of step t is taken at, t or t - 1.
    carried: what passes unchanged through the first n steps, which only fill the queue.
    """
    theta, v, p = {0: theta_0}, {0: 0.0}, {0: 1.0}
    W, Q = np.array(window(n, beta1)), []
    for t in range(1, T + 1):
        g = gradient(t, theta[t if at_theta == "t" else t - 1])
        if t <= n:
            Q.append(g)
            for name, values in (("theta", theta), ("p", p), ("v", v)):
                if name in carried:
                    values[t] = values[t - 1]
            continue
        g_old = Q.pop(0)
        Q.append(g)
        m = W @ np.array(Q)
        p[t] = p[t - 1] * beta2
        v[t] = beta2 * v[t - 1] + (1 - beta2) * g_old**2
        theta[t] = theta[t - 1] - alpha / np.sqrt(v[t] / (1 - p[t])) * m
    return theta, v, p


def noisy_quadratic(t, theta):
    return theta + np.sin(7.0 * t)


@pytest.mark.parametrize(
    ("at_theta", "carried", "missing"),
    [
        ("t", [], 1),  # g_1 needs θ_1, which is computed from g_1
        ("t-1", [], 1),  # g_2 needs θ_1 while the queue fills
        ("t-1", ["theta"], 4),  # step n + 1 needs p_n
        ("t-1", ["theta", "p"], 4),  # step n + 1 needs v_n
    ],
)
def test_E12_the_printed_indices_read_what_was_never_set(at_theta, carried, missing):
    with pytest.raises(KeyError, match=rf"^{missing}$"):
        algorithm_2(noisy_quadratic, 1.0, 30, 4, 0.9, 0.99, 0.1, at_theta=at_theta, carried=carried)


def test_E12_the_repaired_reading_is_the_text_of_section_4():
    n, beta1, beta2, alpha, T = 4, 0.9, 0.99, 0.1, 30
    theta, v, p = algorithm_2(
        noisy_quadratic, 1.0, T, n, beta1, beta2, alpha, at_theta="t-1", carried=["theta", "p", "v"]
    )
    g = {t: noisy_quadratic(t, theta[t - 1]) for t in range(1, T + 1)}
    assert all(theta[t] == 1.0 for t in range(n + 1))
    for t in range(n + 1, T + 1):
        window_weight = {t - i: beta1**i for i in range(n)}
        decay = {s: beta2 ** (t - n - s) for s in range(1, t - n + 1)}
        m = sum(w * g[s] for s, w in window_weight.items()) / sum(window_weight.values())
        mean_square = sum(w * g[s] ** 2 for s, w in decay.items()) / sum(decay.values())
        assert v[t] / (1 - p[t]) == pytest.approx(mean_square)
        assert theta[t] - theta[t - 1] == pytest.approx(-alpha * m / np.sqrt(mean_square))


# E13, E14: correlations, on independent normal gradients over the paper's 8,590 steps


def squares_and_shifted_v(beta2, n, steps=8590, elements=128):
    """g_t, g_{t-n} and v_t computed from g_{t-n}² and older; n = 0 is Adam."""
    start = int(10 / (1 - beta2))
    g = np.random.default_rng(0).standard_normal((start + steps + n, elements))
    v = moving_average(g[: start + steps] ** 2, beta2, axis=0)
    return g[start + n :], g[start : start + steps], v[start:]


@pytest.mark.parametrize("n", [1, 10])
def test_E13_the_captions_name_a_gradient_that_v_contains(n):
    current, shifted, v = squares_and_shifted_v(0.999, n)
    as_captioned, as_computed = pearson(shifted**2, v), pearson(current**2, v)
    assert as_captioned == pytest.approx(0.046, abs=1e-3)  # √(1 - 0.999²) = 0.0447 for T → ∞
    assert as_computed == pytest.approx(-0.0076, abs=1e-3)  # Table 3 prints -0.011


@pytest.mark.parametrize(("beta2", "value"), [(0.9, 0.43589), (0.999, 0.04471)])
def test_E14_adam_s_correlation_tells_its_beta2(beta2, value):
    g, _, v = squares_and_shifted_v(beta2, n=0)
    assert np.sqrt(1 - beta2**2) == pytest.approx(value, abs=5e-6)
    assert pearson(g**2, v) == pytest.approx(value, abs=0.004)


def test_E14_the_paper_s_value_is_that_of_beta2_09():
    printed = 0.435885276
    assert np.sqrt(1 - printed**2) == pytest.approx(0.9, abs=1e-5)


def test_E14_the_raw_gradient_has_no_such_correlation():
    g, _, v = squares_and_shifted_v(0.9, n=0)
    assert abs(pearson(g, v)) < 0.004


# E15: Theorem 1


def sign_agreement(beta1, C, d):
    """Return whether every m of a settled epoch has the sign of the mean gradient, which is > 0."""
    return (settled_epoch(beta1, 0, C, d)[0] > 0).all()


@pytest.mark.parametrize(("C", "threshold", "width"), [(6, 0.942, 1e-3), (101, 0.9998, 1e-4)])
def test_E15_beta1_from_which_m_keeps_the_right_sign(C, threshold, width):
    d = C
    assert not sign_agreement(threshold - width, C, d)
    assert sign_agreement(threshold + width, C, d)

    def margin(beta1):
        return beta1 ** (d - 1) * (1 - beta1) * (C + 1) / (1 - beta1**d) - 1

    assert brentq(margin, 0.5, 1 - 1e-7) == pytest.approx(threshold, abs=width / 2)


def test_E15_the_two_limits_do_not_commute():
    gradients = epochs_of(6, 6, 200)

    def corrected_m(beta1, t):
        weight = beta1 ** np.arange(t - 1, -1, -1.0)
        return weight @ gradients[:t] / weight.sum()

    mean = np.mean(gradients)
    assert mean == pytest.approx(1 / 6)
    assert corrected_m(1 - 1e-9, 1200) == pytest.approx(mean, abs=1e-4)  # t fixed, β1 → 1
    assert corrected_m(0.9, 1200) == pytest.approx(limit_m(0.9, 6, 6)[-1])  # β1 fixed, t → ∞
    assert corrected_m(0.9, 1200) == pytest.approx(-0.118, abs=5e-4)


def test_E15_a_vanishing_mean_gradient_leaves_no_room_for_epsilon():
    C, d = 5, 6
    assert sum(epochs_of(C, d, 1)) == 0  # so ε = |g*/2| = 0
    for beta1 in (0.9, 0.99, 0.999):
        m = settled_epoch(beta1, 0, C, d)[0]
        assert m.max() > 1e-4
        assert m.min() < -1e-4


@pytest.mark.parametrize("dimension", [1, 2, 5])
def test_E15_the_regret_bound_needs_the_dimension(dimension):
    G, epsilon = 2.0, 0.1
    theta = np.full(dimension, 0.99 * epsilon / G)  # |θ - θ*| < ε/G in every coordinate, θ* = 0
    regret = np.full(dimension, G) @ theta  # f(θ) = G Σ θ[i] has gradients of size G
    assert (regret < epsilon) == (dimension == 1)
    assert regret < dimension * epsilon


def test_E15_the_linear_example_has_no_minimiser():
    m, v = adam_moments(epochs_of(6, 6, 2000), 0.99, 0.9)
    theta = -0.001 * np.cumsum(m / np.sqrt(v))
    settled, half, end = theta[2999], theta[7499], theta[11999]
    assert end - half == pytest.approx(half - settled, rel=1e-6)  # decreases forever
    assert end < half < settled < 0


def test_E15_the_bound_can_be_kept_by_going_the_wrong_way():
    C, d, alpha, theta, regret = 20, 20, 0.001, 0.0, 0.0
    gradients = epochs_of(C, d, 20_000)
    for g in gradients:
        regret += g * theta - g * -1  # θ* = -1
        theta = min(1.0, max(-1.0, theta - alpha * g / abs(g)))  # β1 = β2 = 0: m = g, v = g²
    average, epsilon2 = regret / len(gradients), alpha / 1 * C**2  # √v is at least 1
    assert average == pytest.approx(0.1, abs=5e-4)  # 2/d: the largest possible
    assert average < epsilon2 == pytest.approx(0.4)


def test_E15_figure_1b_turns_by_beta2_alone():
    for beta1, beta2, wrong_way in [(0.9, 0.999, True), (0.9, 0.9999, False)]:
        assert (FIGURE_1.drift(beta1, beta2) > 0) == wrong_way
        k_C, k_minus_1, _ = simulated_factors(FIGURE_1, beta1, beta2)
        drift = (1 - FIGURE_1.p) * k_minus_1 - FIGURE_1.p * FIGURE_1.C * k_C
        assert (drift > 0) == wrong_way


# E16


def shifted_factors(g, t, n, beta1, beta2, weights):
    """Σ weight_j / √v_{t+j} with v_i from g_{i-n}² and older, for many sequences at once."""
    v = moving_average(g**2, beta2)
    j = np.arange(len(weights))
    return np.sum(weights / np.sqrt(v[:, t + j - n]), axis=1)


def test_E16_only_the_truncated_window_keeps_v_apart_from_m():
    t, n, beta1, beta2 = 300, 5, 0.9, 0.99
    endless = (1 - beta1) * beta1 ** np.arange(250)
    truncated = np.array(window(n, beta1)[::-1])
    g = draw_gradients(FIGURE_1, (2000, 600), seed=0)
    k = {}
    for value in (101.0, -1.0):
        g[:, t] = value
        for name, weights in (("endless", endless), ("window", truncated)):
            k[name, value] = shifted_factors(g, t, n, beta1, beta2, weights)
    assert (k["endless", 101.0] < k["endless", -1.0]).all()
    assert k["endless", 101.0].mean() == pytest.approx(0.116, abs=1e-3)
    assert k["endless", -1.0].mean() == pytest.approx(0.172, abs=1e-3)
    np.testing.assert_array_equal(k["window", 101.0], k["window", -1.0])


def test_E16_with_beta1_zero_one_term_is_left():
    beta1 = 0.0
    weights = (1 - beta1) * beta1 ** np.arange(10)
    assert weights.tolist() == [1.0] + [0.0] * 9
    g = draw_gradients(FIGURE_1, (500, 400), seed=1)
    k = {}
    for value in (101.0, -1.0):
        g[:, 300] = value
        k[value] = shifted_factors(g, 300, 1, beta1, 0.99, weights)
    np.testing.assert_array_equal(k[101.0], k[-1.0])


# E17


def test_E17_the_critical_value_belongs_to_the_problem_not_to_a_step():
    for C, fails in [(13, False), (14, True)]:
        movements = adam_moments(epochs_of(C, C, 60), 0.9, 0.9)
        per_epoch = (movements[0] / np.sqrt(movements[1])).reshape(60, C).sum(axis=1)
        assert ((per_epoch[30:] < 0) == fails).all()  # one C for every epoch: no C_t
        assert per_epoch[-1] == pytest.approx(epoch_update(0.9, 0.9, C, C))


# Found while testing


def momentum(gradients, alphas, beta1):
    m = theta = 0.0
    for g, alpha in zip(gradients, alphas, strict=True):
        m = beta1 * m + (1 - beta1) * g
        theta -= alpha * m
    return theta


def test_E18_momentum_s_factor_is_alpha_only_if_alpha_is_constant():
    t, steps = 10, 500
    gradients = np.random.default_rng(0).standard_normal(steps)
    pushed = gradients + (np.arange(1, steps + 1) == t)

    def net_update_factor(alphas):
        return momentum(gradients, alphas, 0.9) - momentum(pushed, alphas, 0.9)

    falling = 1 / np.sqrt(np.arange(1, steps + 1))
    assert net_update_factor(np.full(steps, 0.3)) == pytest.approx(0.3)
    assert falling[t - 1] == pytest.approx(0.3162, abs=5e-5)
    assert net_update_factor(falling) == pytest.approx(0.2458, abs=5e-5)


def test_E19_a_larger_beta2_can_need_a_smaller_c():
    assert [int(smallest_failing_c(0.98, b)) for b in (0.0, 0.5, 0.98)] == [80, 18, 40]
    assert simulated_movement(0.98, 0.0, 50, 50) > 0 > simulated_movement(0.98, 0.5, 50, 50)
    beta1, beta2 = np.linspace(0, 0.98, 50)[:, None], np.linspace(0, 0.98, 50)
    C = smallest_failing_c(beta1, beta2)
    assert (np.diff(C, axis=0) >= 0).all()  # in β1 the paper's statement holds
    assert (np.diff(C, axis=1) < 0).sum() == 72
    assert (np.diff(C[:, 34:], axis=1) >= 0).all()  # and in β2 from 0.68 on
