"""The window of m_t is exact at every step, after outliers and while β1 changes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adashift import AdaShift
from adashift._window import add_gradient, plan_window, total_weight


def direct(gradients, t, beta1, m):
    """Σ β1^i g_{t-i} / Σ β1^i, term by term; terms with weight 0 are skipped."""
    terms = [beta1**i * gradients[t - 1 - i] for i in range(m) if beta1**i > 0]
    return sum(terms) / sum(beta1**i for i in range(m))


def push(state, g, t, beta1, m):
    return add_gradient(plan_window(state, g, t, beta1, m), g, beta1, m)


def windows(gradients, betas, m):
    """Yield t and m_t from the buffers for t >= m."""
    state = {}
    for t, (g, beta1) in enumerate(zip(gradients, betas, strict=True), start=1):
        terms = push(state, g, t, beta1, m)
        if t >= m:
            yield t, sum(weight * buffer for buffer, weight in terms)


def stream(length, seed=0, dtype=torch.float64):
    return list(torch.randn(length, 3, generator=torch.Generator().manual_seed(seed), dtype=dtype))


@pytest.mark.parametrize("beta1", [0.0, 0.1, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("m", [1, 2, 3, 10, 40])
def test_window_is_the_weighted_mean_of_the_newest_m(m, beta1):
    gradients = stream(3 * m + 5)
    for t, mean in windows(gradients, [beta1] * len(gradients), m):
        torch.testing.assert_close(mean, direct(gradients, t, beta1, m), rtol=1e-13, atol=1e-14)


@settings(deadline=None, max_examples=150)
@given(
    m=st.integers(2, 12),
    changes=st.lists(
        st.tuples(st.integers(1, 15), st.sampled_from([0.0, 0.3, 0.5, 0.85, 0.9, 0.95, 1.0])),
        min_size=1,
        max_size=8,
    ),
    seed=st.integers(0, 99),
)
def test_window_is_exact_when_beta1_changes(m, changes, seed):
    betas = [beta1 for length, beta1 in changes for _ in range(length)]
    gradients = stream(len(betas), seed)
    for t, mean in windows(gradients, betas, m):
        expected = direct(gradients, t, betas[t - 1], m)
        torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("outlier", [1e8, 1e30, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("m", [2, 3, 10])
def test_outlier_has_no_effect_after_it_left(m, beta1, outlier):
    """From the first step after it left, the result is bit-identical to a run without it."""
    for place in range(2 * m):
        clean = stream(6 * m, dtype=torch.float32)
        dirty = [g.clone() for g in clean]
        dirty[place][1] = outlier
        betas = [beta1] * len(clean)
        pairs = zip(windows(clean, betas, m), windows(dirty, betas, m), strict=True)
        for (t, a), (_, b) in pairs:
            if t > place + m:
                assert torch.equal(a, b), (place, t)


def test_no_drift_in_single_precision():
    """After 20,000 steps with β1 = 1, the error is that of a single sum."""
    gradients = stream(20_000, dtype=torch.float32)
    *_, (_, mean) = windows(gradients, [1.0] * len(gradients), 10)
    exact = torch.stack(gradients[-10:]).double().mean(0)
    assert (mean.double() - exact).abs().max() < 1e-7


@pytest.mark.parametrize("beta1", [0.9, 1.0])
def test_number_of_terms_does_not_grow_with_m(beta1):
    """m_t has at most two terms for any window length."""
    state, gradients = {}, stream(200)
    for t, g in enumerate(gradients, start=1):
        terms = push(state, g, t, beta1, 40)
        assert len(terms) <= 2


def test_total_weight():
    assert total_weight(1.0, 7) == 7 and total_weight(0.0, 7) == 1
    assert total_weight(0.9, 10) == pytest.approx((1 - 0.9**10) / (1 - 0.9))


@pytest.mark.parametrize("phi", ["max", "mean"])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (10, 1), (10, 10), (40, 40), (40, 3)])
def test_state_is_m_plus_1_gradients_and_n_plus_1_scalars(n, m, phi):
    p = torch.nn.Parameter(torch.zeros(50, 20))
    optimizer = AdaShift([p], n=n, m=m, phi=phi)
    for _ in range(3 * n):
        p.grad = torch.randn(50, 20)
        optimizer.step()
    shapes = [tuple(x.shape) for x in optimizer.state[p].values() if torch.is_tensor(x)]
    assert set(shapes) <= {(50, 20), ()}
    assert shapes.count((50, 20)) == (0 if m == 1 else m + 1)
    assert shapes.count(()) == n + 1
