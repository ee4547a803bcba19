"""adashift.analysis.theory against brute force: recursions, enumeration and exact fractions."""

import doctest
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.signal import lfilter

from adashift.analysis import theory
from adashift.analysis.theory import (
    StochasticProblem,
    critical_c,
    critical_c_closed_form,
    diagonal_critical_c,
    epoch_update,
    limit_m,
    limit_v,
    net_update_factors,
    smallest_failing_c,
)

BETAS = st.floats(0.0, 0.95)
EPOCHS = st.integers(2, 12)
GRADIENTS = st.floats(1.5, 200.0)
FIGURE_8 = np.linspace(0, 0.98, 50)


def adam_on_epochs(beta1, beta2, C, d, steps):
    """Return m and v of Eq. 3 for C, -1, ..., -1 over at least `steps` steps, as (epoch, i)."""
    epochs = -(-steps // d) + 1
    gradients = [C] + [-1.0] * (d - 1)
    m = v = 0.0
    history = []
    for g in gradients * epochs:
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        history.append((m, v))
    return np.array(history).T.reshape(2, epochs, d)


def simulated_epoch_update(beta1, beta2, C, d):
    steps = int(30 / (1 - max(beta1, beta2)))
    m, v = adam_on_epochs(beta1, beta2, C, d, steps)
    return np.sum(m[-1] / np.sqrt(v[-1]))


def enumerate_gradients(problem, length):
    """Return every sequence of `length` gradients of Eq. 7 with its probability."""
    sequences = np.array(list(product([problem.C, -1.0], repeat=length))).reshape(-1, length)
    large = (sequences > 0).sum(axis=1)
    return sequences, problem.p**large * (1 - problem.p) ** (length - large)


def mean_and_variance(values, probability):
    mean = probability @ values
    return mean, probability @ (values - mean) ** 2


def test_doctests():
    failed, tried = doctest.testmod(theory)
    assert failed == 0
    assert tried >= 9


# --- sequential problem


@given(BETAS, BETAS, GRADIENTS, st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_limits_match_the_recursion(beta1, beta2, C, d):
    m, v = adam_on_epochs(beta1, beta2, C, d, steps=700)
    np.testing.assert_allclose(limit_m(beta1, C, d), m[-1], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(limit_v(beta2, C, d), v[-1], rtol=1e-9)


def test_limits_broadcast_with_the_step_last():
    beta, C = np.array([[0.1], [0.9]]), np.array([2.0, 5.0, 8.0])
    assert limit_m(beta, C, 4).shape == limit_v(beta, C, 4).shape == (2, 3, 4)
    np.testing.assert_array_equal(limit_v(beta, C, 4)[1, 2], limit_v(0.9, 8.0, 4))
    assert epoch_update(beta, 0.5, C, 4).shape == (2, 3)
    np.testing.assert_allclose(
        net_update_factors(beta, 0.5, C, 4)[1, 2], net_update_factors(0.9, 0.5, 8.0, 4)
    )


@given(BETAS, BETAS, GRADIENTS, EPOCHS)
@settings(max_examples=40, deadline=None)
def test_net_update_factors_sum_over_later_steps(beta1, beta2, C, d):
    _, v = adam_on_epochs(beta1, beta2, C, d, steps=1400)
    step_size = 1 / np.sqrt(v.ravel())
    start = 700 // d * d
    lag = np.arange(650)
    expected = [
        np.sum((1 - beta1) * beta1**lag * step_size[start + i : start + i + 650]) for i in range(d)
    ]
    np.testing.assert_allclose(net_update_factors(beta1, beta2, C, d), expected, rtol=1e-9)


@given(st.floats(0.0, 0.99), st.floats(0.05, 0.99), GRADIENTS, EPOCHS)
@settings(max_examples=100, deadline=None)
def test_net_update_factors_increase_then_decrease_and_start_lowest(beta1, beta2, C, d):
    k = net_update_factors(beta1, beta2, C, d)
    steps = np.diff(np.append(k, k[0]))
    rising = steps > 1e-12
    falling = steps < -1e-12
    assert not rising[np.argmax(falling) :].any()
    assert k[0] == k.min()


@given(BETAS, BETAS, GRADIENTS, EPOCHS)
@settings(max_examples=60, deadline=None)
def test_epoch_update_is_the_sum_of_gradients_times_factors(beta1, beta2, C, d):
    k = net_update_factors(beta1, beta2, C, d)
    total = C * k[0] - k[1:].sum()
    np.testing.assert_allclose(epoch_update(beta1, beta2, C, d), total, rtol=1e-9, atol=1e-9)


@given(BETAS, BETAS, GRADIENTS, st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_epoch_update_matches_simulation(beta1, beta2, C, d):
    np.testing.assert_allclose(
        epoch_update(beta1, beta2, C, d), simulated_epoch_update(beta1, beta2, C, d), atol=1e-8
    )


def test_large_v_drops_the_constant_one():
    exact = limit_m(0.5, 6, 4) / np.sqrt(limit_v(0.9, 6, 4) - 1)
    assert epoch_update(0.5, 0.9, 6, 4, large_v=True) == pytest.approx(exact.sum())
    assert epoch_update(0.5, 0.9, 6, 4) != pytest.approx(exact.sum(), rel=1e-3)


@pytest.mark.parametrize(
    ("beta1", "beta2", "d"), [(0, 0.9, 6), (0.5, 0.9, 3), (0.9, 0.5, 10), (0.3, 0.99, 7)]
)
def test_critical_c_is_the_root_of_the_simulated_update(beta1, beta2, d):
    root = brentq(lambda C: simulated_epoch_update(beta1, beta2, C, d), 0.5, 50, xtol=1e-10)
    assert critical_c(beta1, beta2, d) == pytest.approx(root, abs=1e-7)


def test_epoch_update_changes_sign_once_as_c_grows():
    rng = np.random.default_rng(0)
    for _ in range(200):
        beta1, beta2 = rng.uniform(0.01, 0.999, size=2)
        d = int(rng.integers(3, 60))
        root = critical_c(beta1, beta2, d)
        below = np.linspace(d - 1, root * (1 - 1e-9), 50)
        above = np.geomspace(root * (1 + 1e-9), 1e6 * root, 200)
        assert (epoch_update(beta1, beta2, below, d) <= 1e-9).all()
        assert (epoch_update(beta1, beta2, above, d) > 0).all()


def test_critical_c_broadcasts_and_handles_degenerate_cases():
    table = critical_c(np.array([[0.0], [0.5]]), np.array([0.5, 0.9, 0.99]), 6)
    assert table.shape == (2, 3)
    assert table[1, 1] == critical_c(0.5, 0.9, 6)
    assert critical_c(0.3, 0.7, 2) == pytest.approx(1.0)  # gradients 1 and -1 have equal v
    assert critical_c(0.0, 0.0, 5) == np.inf  # every step has length 1 for any C


@given(st.floats(0.0, 0.95), st.floats(0.2, 0.95), st.integers(2, 15))
@settings(max_examples=60, deadline=None)
def test_closed_form_is_the_root_for_large_v(beta1, beta2, d):
    root = critical_c(beta1, beta2, d, large_v=True)
    np.testing.assert_allclose(critical_c_closed_form(beta1, beta2, d), root, rtol=1e-8)


def exact_closed_form(beta1, s, d):
    """Lemma 6 in exact fractions: Σ s^-j over its mean with the weights of m."""
    beta1, s = Fraction(beta1), Fraction(s)
    weights = [beta1**j for j in range(d)]
    inverse = [s**-j for j in range(d)]
    weighted = sum(w * x for w, x in zip(weights, inverse, strict=True)) / sum(weights)
    return sum(inverse) / weighted - 1


@pytest.mark.parametrize("gap", [0.0, 2**-50, 2**-40, 2**-30, 2**-20, 2**-5])
@pytest.mark.parametrize("d", [2, 7, 40])
def test_closed_form_is_accurate_near_beta1_equal_to_sqrt_beta2(gap, d):
    exact = float(exact_closed_form(0.5 + gap, 0.5, d))
    np.testing.assert_allclose(critical_c_closed_form(0.5 + gap, 0.25, d), exact, rtol=1e-12)


def test_closed_form_edge_cases():
    assert critical_c_closed_form(0.3, 0.7, 1) == pytest.approx(0.0)
    assert critical_c_closed_form(0.0, 0.25, 4) == pytest.approx(1 + 2 + 4 + 8 - 1)
    assert critical_c_closed_form(0.0, 1 - 1e-12, 9) == pytest.approx(8.0)
    assert critical_c_closed_form(0.0, 0.0, 5) == np.inf
    swapped = critical_c_closed_form(0.6, 0.3**2, 7), critical_c_closed_form(0.3, 0.6**2, 7)
    assert swapped[0] == pytest.approx(swapped[1])  # symmetric in β1 and √β2


def test_closed_form_broadcasts_over_all_arguments():
    table = critical_c_closed_form(
        np.array([0.0, 0.5]), np.array([[0.25], [0.9]]), np.array([[[2]], [[5]], [[9]]])
    )
    assert table.shape == (3, 2, 2)
    assert table[2, 1, 1] == critical_c_closed_form(0.5, 0.9, 9)


@pytest.mark.parametrize(
    ("beta1", "beta2", "C"),
    [
        (0, 0.5, 4),
        (0, 0.9, 7),
        (0.5, 0.9, 8),
        (0.9, 0.9, 14),
        (0, 0.99, 21),
        (0.5, 0.99, 22),
        (0.9, 0.99, 30),
        (0, 0.999, 64),
        (0.9, 0.999, 74),
    ],
)
def test_smallest_failing_c_matches_simulated_adam(beta1, beta2, C):
    assert smallest_failing_c(beta1, beta2) == C
    assert simulated_epoch_update(beta1, beta2, C, C) < 0
    assert simulated_epoch_update(beta1, beta2, C - 1, C - 1) > 0


def test_smallest_failing_c_broadcasts():
    grid = smallest_failing_c(FIGURE_8[::7, None], FIGURE_8[None, ::7])
    assert grid.dtype == np.int64
    for (row, column), C in np.ndenumerate(grid):
        assert smallest_failing_c(FIGURE_8[7 * row], FIGURE_8[7 * column]) == C


def test_diagonal_critical_c_is_a_fixed_point_except_at_the_origin():
    C = diagonal_critical_c(FIGURE_8[:, None], FIGURE_8[None, :])
    again = critical_c_closed_form(FIGURE_8[:, None], FIGURE_8[None, :], np.nan_to_num(C, nan=1))
    assert np.flatnonzero(np.isnan(C)).tolist() == [0]
    np.testing.assert_allclose(again.flat[1:], C.flat[1:], rtol=1e-9)


def test_diagonal_critical_c_separates_the_integers_that_fail():
    for beta1, beta2 in product([0.0, 0.3, 0.9, 0.98], [0.04, 0.5, 0.9, 0.98]):
        d = np.arange(2, 200)
        first = d[critical_c_closed_form(beta1, beta2, d) > d][0]
        fails_after = critical_c_closed_form(beta1, beta2, np.arange(first, 200))
        assert (fails_after > np.arange(first, 200)).all()
        assert first == max(2, np.ceil(diagonal_critical_c(beta1, beta2)))


def test_both_critical_c_increase_with_both_betas_for_large_v():
    betas = np.linspace(0.0, 0.98, 30)
    large_beta2 = np.linspace(0.8, 0.999, 30)
    for C in (
        smallest_failing_c(betas[:, None], large_beta2),
        diagonal_critical_c(betas[:, None], large_beta2),
    ):
        assert (np.diff(C, axis=0) >= 0).all()
        assert (np.diff(C, axis=1) >= 0).all()


# --- stochastic problem


@pytest.mark.parametrize(("C", "delta"), [(6, 1), (10, 0.5), (101, 0.02), (2.5, 2)])
def test_moments_match_the_two_point_distribution(C, delta):
    problem = StochasticProblem(C, delta)
    p, q = problem.p, 1 - problem.p
    first, second, fourth = (p * C**n + q * (-1) ** n for n in (1, 2, 4))
    assert problem.mean == pytest.approx(first)
    assert problem.second_moment == pytest.approx(second)
    assert problem.fourth_moment == pytest.approx(fourth)
    assert problem.variance == pytest.approx(second - first**2)
    assert problem.variance_of_square == pytest.approx(fourth - second**2)


@pytest.mark.parametrize("g", [6.0, -1.0])
def test_mean_and_variance_of_x_by_enumeration(g):
    problem, beta2, past = StochasticProblem(C=6, delta=1), 0.4, 11
    for t in range(4):
        gradients, probability = enumerate_gradients(problem, past + t)
        v = np.full(len(gradients), problem.second_moment)
        for drawn in [*gradients.T[:past], np.full(len(v), g), *gradients.T[past:]]:
            v = beta2 * v + (1 - beta2) * drawn**2
        mean, variance = mean_and_variance(v, probability)
        assert problem.mean_of_X(g, beta2, t) == pytest.approx(mean)
        assert problem.variance_of_X(beta2, t) == pytest.approx(variance, rel=1e-6)


def test_variance_of_v_by_enumeration():
    problem, beta2 = StochasticProblem(C=6, delta=1), 0.4
    gradients, probability = enumerate_gradients(problem, 13)
    v = lfilter([1 - beta2], [1, -beta2], gradients**2)[:, -1]
    _, variance = mean_and_variance(v, probability)
    assert problem.variance_of_v(beta2) == pytest.approx(variance, rel=1e-6)


@pytest.mark.parametrize(
    ("beta1", "beta2"), [(0, 0.999), (0.9, 0.99), (0.99, 0.9), (0.9, 0), (0, 0), (0.999, 0.99)]
)
def test_net_update_factor_equals_the_full_sum(beta1, beta2):
    problem = StochasticProblem(C=101, delta=0.02)
    for g in (problem.C, -1):
        t = np.arange(int(45 / (1 - beta1)) + 1)
        mean, variance = problem.mean_of_X(g, beta2, t), problem.variance_of_X(beta2, t)
        term = mean**-0.5 + 3 / 8 * mean**-2.5 * variance
        total = np.sum((1 - beta1) * float(beta1) ** t * term)
        assert problem.net_update_factor(g, beta1, beta2) == pytest.approx(total, rel=1e-12)


def simulated_net_updates(problem, beta1, beta2, steps, seed):
    rng = np.random.default_rng(seed)
    g = np.where(rng.random(steps) < problem.p, problem.C, -1.0)
    v = lfilter([1 - beta2], [1, -beta2], g**2)
    k = lfilter([1 - beta1], [1, -beta1], 1 / np.sqrt(v[::-1]))[::-1]
    settled = slice(int(20 / (1 - beta2)), -int(20 / (1 - beta1)))
    return g[settled], k[settled]


def test_net_update_factor_and_drift_match_simulation_for_small_variance():
    problem = StochasticProblem(C=6, delta=1)
    g, k = simulated_net_updates(problem, 0.5, 0.995, steps=1_000_000, seed=0)
    assert problem.net_update_factor(6, 0.5, 0.995) == pytest.approx(k[g > 0].mean(), rel=2e-3)
    assert problem.net_update_factor(-1, 0.5, 0.995) == pytest.approx(k[g < 0].mean(), rel=2e-3)
    assert problem.drift(0.5, 0.995) == pytest.approx(-(g * k).mean(), abs=2e-3)


@pytest.mark.parametrize(
    ("beta1", "beta2", "sign"),
    [(0, 0.999, 1), (0.9, 0.999, 1), (0.9, 0.9999, -1), (0.9999, 0.999, -1)],
)
def test_drift_has_the_sign_of_each_adam_curve_in_figure_1(beta1, beta2, sign):
    assert np.sign(StochasticProblem(C=101, delta=0.02).drift(beta1, beta2)) == sign


# --- arguments


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: limit_m(1.0, 6, 6), r"beta1 is 1\.0; must lie in \[0, 1\): pass"),
        (lambda: limit_v([0.5, -0.1], 6, 6), r"beta2 is -0\.1; must lie in \[0, 1\): pass"),
        (lambda: epoch_update(float("nan"), 0.9, 6, 6), r"beta1 is nan; must lie in \[0, 1\)"),
        (lambda: limit_m(0.9, 6, 0), r"d is 0; .* must be an integer: pass d >= 1"),
        (lambda: limit_v(0.9, 6, 2.5), r"d is 2\.5; .* must be an integer: pass d >= 1"),
        (lambda: limit_v(0.9, 0, 2), r"C is 0\.0; must be positive"),
        (lambda: critical_c(0.9, 0.9, 1), r"d is 1; .* pass d >= 2"),
        (lambda: critical_c_closed_form(0.9, 0.9, [3, 0.5]), r"d is 0\.5; must be at least 1"),
        (lambda: epoch_update(0.9, 0.0, 6, 6, large_v=True), r"beta2 is 0\.0 .* large_v=False"),
        (lambda: diagonal_critical_c(0.9, 1.5), r"beta2 is 1\.5; must lie in \[0, 1\)"),
        (lambda: StochasticProblem(C=6, delta=6), r"delta is 6; must lie in \(0, C\) = \(0, 6\)"),
        (lambda: StochasticProblem(C=6, delta=0), r"delta is 0; must lie in \(0, C\)"),
        (lambda: StochasticProblem(6, 1).drift(1, 0.9), r"beta1 is 1\.0; must lie in \[0, 1\)"),
        (lambda: StochasticProblem(6, 1).mean_of_X(6, 0.9, -1), r"t is -1\.0; must be at least 0"),
    ],
)
def test_invalid_arguments_raise_with_range_and_fix(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_large_v_is_accurate_for_tiny_v():
    """β2^(d−1) is far below the rounding error of 1, so adding 1 would lose it."""
    betas = 0.861908, 0.166534, 51
    root = theory.critical_c(*betas, large_v=True)
    assert root == pytest.approx(theory.critical_c_closed_form(*betas), rel=1e-9)
