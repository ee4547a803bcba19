"""The measurements of the lemmas: they find a wrong formula, optimizer or shape."""

from functools import partial

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from adashift import AdaShift
from adashift.analysis import theory
from experiments.tasks import lemmas
from experiments.tasks.beta_grid import gradient_streams
from experiments.tasks.counterexample import Sequential, Stochastic, numpy_generator
from experiments.tasks.lemmas import (
    Case,
    InPhase,
    Lemma2,
    Lemma3,
    Lemma6,
    NetUpdateFactor,
    printed_critical_c,
)
from tests.experiments.tasks.plain_adam import adam_step_sizes, column, rows_of

CPU = torch.device("cpu")
SGD, Adam = torch.optim.SGD, torch.optim.Adam


def lemma_rows(lemma, make=Adam, count=12):
    return rows_of(lemma(seed=0, device=CPU), make, count)


def test_cases_are_drawn_from_the_stated_ranges():
    rows = lemma_rows(Lemma6, count=100)
    for name, low, high in [
        ("d", 2, 60),
        ("C", 2, 200),
        ("beta1", 0, 0.9969),
        ("beta2", 0, 0.9969),
    ]:
        drawn = column(rows, name)
        assert low <= drawn.min() < low + 0.1 * (high - low)
        assert high - 0.1 * (high - low) < drawn.max() <= high


@pytest.mark.parametrize(
    ("lemma", "metric", "formulas"),
    [
        (Lemma2, "m_error", ["limit_m"]),
        (Lemma2, "v_error", ["limit_v"]),
        (Lemma3, "error", ["net_update_factors", "limit_v"]),
        (Lemma6, "corrected_error", ["critical_c", "critical_c_closed_form"]),
    ],
)
def test_a_wrong_formula_is_detected(lemma, metric, formulas, monkeypatch):
    assert column(lemma_rows(lemma), metric).max() < 1e-9
    for formula in formulas:
        right = getattr(theory, formula)
        with monkeypatch.context() as patch:
            patch.setattr(theory, formula, partial(slightly_off, right))
            assert column(lemma_rows(lemma), metric).min() > 1e-6


def slightly_off(formula, *arguments, **options):
    """Return the values of the formula, the last one 0.1 % too large."""
    values = formula(*arguments, **options)
    factor = np.ones(np.shape(values))
    factor.flat[-1] = 1.001
    return values * factor


@pytest.mark.filterwarnings("ignore:divide by zero")  # AdaShift starts with v = 0
@pytest.mark.parametrize(
    ("lemma", "make", "metric"),
    [(Lemma2, partial(AdaShift, n=1), "v_error"), (Lemma3, partial(AdaShift, n=1), "error")],
)
def test_a_wrong_optimizer_is_detected(lemma, make, metric):
    assert np.median(column(lemma_rows(lemma, make), metric)) > 1e-2


@pytest.mark.parametrize(
    ("k", "violated", "difference_rises"),
    [
        ([1, 3, 4, 3.5], 0, 0),
        ([1, 2, 3, 4], 0, 0),
        ([1, 1.5, 3, 4], 0, 1),  # faster and faster
        ([1, 3, 2, 4], 1, 1),  # falls and rises again
        ([2, 3, 4, 1], 1, 0),  # k(C) is not the smallest
        ([4, 3, 2, 1], 1, 0),
    ],
)
def test_lemma_3_detects_a_wrong_shape(k, violated, difference_rises, monkeypatch):
    monkeypatch.setattr(lemmas, "simulated_factors", lambda case, chain: np.array(k, float))
    row = Lemma3(seed=0, device=CPU).check(Case(0.5, 0.9, 6.0, 4), None)
    assert (row["violated"], row["difference_rises"]) == (violated, difference_rises)


def test_lemma_3_holds_for_adam():
    rows = lemma_rows(Lemma3, count=40)
    assert not column(rows, "violated").any()


def test_lemma_6_as_printed_is_wrong():
    printed = column(lemma_rows(Lemma6, count=40), "printed_error")
    assert np.median(printed) > 0.5
    assert printed.min() > 1e-3


@pytest.mark.parametrize(("beta1", "beta2", "d"), [(0.0, 0.81, 3), (0.5, 0.81, 2)])
def test_printed_critical_c_computed_by_hand(beta1, beta2, d):
    # s = 0.9. β1 = 0, d = 3: 0.729 · 0.1 / (0.9 · 0.271) − 1; β1 = 1/2, d = 2: see the fraction.
    expected = {
        3: 0.729 * 0.1 / (0.9 * 0.271) - 1,
        2: 0.75 * (0.81 - 0.25) * 0.1 / (0.5 * 0.4 * 0.19) - 1,
    }[d]
    assert printed_critical_c(beta1, beta2, d) == pytest.approx(expected)
    assert float(theory.critical_c(beta1, beta2, d)) > expected + 0.5


@pytest.mark.parametrize("C", [10, 20, 40])
def test_adam_moves_in_the_wrong_direction_if_the_covariance_is_below_minus_1(C):
    rows = rows_of(InPhase(Sequential(C, C), 40, 0, CPU), partial(Adam, betas=(0.98, 0.5)), 100)
    assert [row["beta2"] for row in rows] == pytest.approx([i / 40 for i in range(40)])
    for row in rows:
        assert (row["covariance"] < -1) == (row["S"] < 0)
        m, v = theory.limit_m(0.98, C, C), theory.limit_v(row["beta2"], C, C)
        direct = np.cov(m, v**-0.5, bias=True)[0, 1] / (m.mean() * (v**-0.5).mean())
        assert row["covariance"] == pytest.approx(direct)
    assert (C < 17) == all(row["S"] > 0 for row in rows)  # the lowest critical C is 17


# Net update factors


def net_update(make, length=100_000, couples=20, burn_in=300):
    measurement = NetUpdateFactor(Stochastic(11, 0.5), burn_in, length, couples, seed=0, device=CPU)
    return rows_of(measurement, partial(make, lr=0.3), 1)[0]


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_adam_gives_large_gradients_small_factors(beta1):
    row = net_update(partial(Adam, betas=(beta1, 0.95)))
    assert row["k_bias"] == row["k_large"] / row["k_small"] - 1
    assert row["k_bias"] < -0.1
    assert row["rank_correlation"] < -0.1
    assert row["coupled_share"] == 1 and row["coupled_gap"] > 0.01


@pytest.mark.parametrize(("beta1", "n", "m"), [(0.0, 1, None), (0.9, 10, None), (1.0, 10, 4)])
def test_adashift_gives_all_gradients_the_same_factors(beta1, n, m):
    row = net_update(partial(AdaShift, betas=(beta1, 0.95), n=n, m=m))
    assert abs(row["k_bias"]) < 0.01
    assert abs(row["rank_correlation"]) < 0.01
    assert row["coupled_share"] == 0 and row["coupled_gap"] == 0
    assert row["k_spread"] > 0.1  # they vary, but not with the gradient


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_gives_every_gradient_the_factor_1(momentum):
    row = net_update(partial(SGD, momentum=momentum, dampening=momentum))
    ones, zeros = {"k_large", "k_small"}, row.keys() - {"k_large", "k_small"}
    assert_allclose([row[name] for name in ones], 1, rtol=1e-12)
    assert_allclose([row[name] for name in zeros], 0, atol=1e-12)


def plain_factors(beta1, beta2, g, start, stop):
    """Return Adam's k(g_start) … k(g_{stop−1}) by Eq. 8, a sum over all later steps."""
    step_sizes = adam_step_sizes(beta2, g)
    weights = (1 - beta1) * beta1 ** np.arange(len(g))
    return np.array([step_sizes[t:] @ weights[: len(g) - t] for t in range(start, stop)])


def test_net_update_factors_match_the_double_sum():
    beta1, beta2, burn_in, length, couples = 0.5, 0.9, 30, 40, 6
    row = net_update(partial(Adam, betas=(beta1, beta2), eps=0), length, couples, burn_in)
    problem, rng, tail = Stochastic(11, 0.5), numpy_generator(0), lemmas.forgotten(beta1)

    g = problem.gradients(0, burn_in + length + tail, rng)
    k = plain_factors(beta1, beta2, g, burn_in, burn_in + length)
    is_large = g[burn_in:-tail] > 0
    assert row["k_large"] == pytest.approx(k[is_large].mean(), rel=1e-9)
    assert row["k_small"] == pytest.approx(k[~is_large].mean(), rel=1e-9)
    assert row["k_spread"] == pytest.approx(k.max() / k.min() - 1, rel=1e-9)

    gaps = []
    for g in gradient_streams(problem, burn_in + 1 + tail, couples, rng):
        pair = [np.where(np.arange(len(g)) == burn_in, x, g) for x in (problem.C, -1.0)]
        k_large, k_small = (plain_factors(beta1, beta2, x, burn_in, burn_in + 1) for x in pair)
        gaps.append(k_small - k_large)
    assert min(gaps) > 0
    assert row["coupled_gap"] == pytest.approx(max(gaps).item(), rel=1e-9)


@pytest.mark.parametrize("lemma", [Lemma2, Lemma3, Lemma6])
@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (SGD, "the lemmas hold for Adam only: use optimizer=adam"),
        (partial(Adam, amsgrad=True), "Adam only"),
        (partial(Adam, weight_decay=0.1), "with a filter form, .* weight_decay=0.1"),
    ],
)
def test_a_lemma_needs_adam(lemma, make, complaint):
    measurement = lemma(seed=0, device=CPU)
    measurement.check_optimizer(Adam([torch.zeros(())]))
    with pytest.raises(ValueError, match=complaint):
        measurement.check_optimizer(make([torch.zeros(())]))


def test_net_update_factors_need_filters():
    measurement = NetUpdateFactor(Stochastic(11, 0.5), 10, 10, 1, seed=0, device=CPU)
    with pytest.raises(ValueError, match="filter form, such as adam: RMSprop"):
        measurement.check_optimizer(torch.optim.RMSprop([torch.zeros(())]))
    with pytest.raises(TypeError, match="NAdam"):
        measurement.check_optimizer(torch.optim.NAdam([torch.zeros(())]))
