"""The window of m_t: within its bound at every step, whatever passes through it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adashift import AdaShift
from adashift._window import CORRECTION, ERROR, PEAKS, Bound, total_weight

RUNNING = pytest.mark.parametrize("way", [{}, {"fused": True}], ids=["single", "fused"])


def exact_sum(gradients, beta1, m):
    """Σ β1^i g_{t-i} of the last m gradients in float64; a weight of 0 drops its gradient."""
    newest = [g.double() for g in reversed(gradients[-m:])]
    return sum(beta1**i * g for i, g in enumerate(newest) if beta1**i > 0)


def run(gradients, betas, m, way, **options):
    """Yield the gradients so far and the state, after each step."""
    p = torch.nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = AdaShift([p], n=m, m=m, **way, **options)
    for t, (g, beta1) in enumerate(zip(gradients, betas, strict=True), start=1):
        optimizer.param_groups[0]["betas"] = (beta1, 0.999)
        p.grad = g.clone()
        optimizer.step()
        if t >= m:
            yield gradients[:t], beta1, optimizer.state[p]


def check_bound(seen, beta1, state, m):
    """The sum of the finite elements is as exact as _window.py says, and its bound is a bound."""
    window = torch.stack(seen[-m:]).double()
    finite = window.isfinite().all(0)
    peak = window[:, finite].abs().max().item() if finite.any() else 0.0
    error = (state["sum"].double() - exact_sum(seen, beta1, m))[finite].abs().max().item()
    unit, total = torch.finfo(state["sum"].dtype).eps / 2, total_weight(beta1, m)
    assert error <= 25 * unit * total**2 * peak
    if finite.all():
        assert error <= state["number"][ERROR].item()


def stream(length, seed=0, dtype=torch.float64, width=3):
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(length, width, generator=generator, dtype=dtype))


@RUNNING
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta1", [0.0, 0.1, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("m", [2, 3, 10, 40])
def test_sum_is_within_its_bound(m, beta1, dtype, way):
    gradients = stream(4 * m + 5, dtype=dtype)
    for state in run(gradients, [beta1] * len(gradients), m, way):
        check_bound(*state, m)


@RUNNING
@settings(deadline=None, max_examples=60)
@given(
    m=st.integers(2, 12),
    changes=st.lists(
        st.tuples(st.integers(1, 15), st.sampled_from([0.0, 0.3, 0.5, 0.85, 0.9, 0.95, 1.0])),
        min_size=1,
        max_size=8,
    ),
    scales=st.lists(st.sampled_from([0.0, 1e-20, 1e-8, 1.0, 1e8, 1e20]), min_size=1, max_size=9),
    seed=st.integers(0, 99),
)
def test_sum_is_within_its_bound_for_any_scales_and_betas(m, changes, scales, seed, way):
    betas = [beta1 for length, beta1 in changes for _ in range(length)]
    gradients = stream(len(betas), seed, torch.float32)
    gradients = [g * scales[i % len(scales)] for i, g in enumerate(gradients)]
    for state in run(gradients, betas, m, way):
        check_bound(*state, m)


@RUNNING
@pytest.mark.parametrize("outlier", [1e8, 1e30, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("m", [2, 3, 10])
def test_outlier_leaves_no_trace_beyond_the_bound(m, beta1, outlier, way):
    gradients = stream(6 * m, dtype=torch.float32)
    gradients[m + 1][1] = outlier
    for seen, _, state in run(gradients, [beta1] * len(gradients), m, way):
        check_bound(seen, beta1, state, m)
        if len(seen) > 2 * m + 1:  # the outlier has left
            assert state["sum"].isfinite().all()


@RUNNING
@pytest.mark.slow
def test_no_drift_in_20_000_steps_of_single_precision(way):
    gradients = stream(20_000, dtype=torch.float32)
    for seen, beta1, state in run(gradients, [1.0] * len(gradients), 10, way):
        if len(seen) % 97 == 0:
            exact = exact_sum(seen, beta1, 10)
            assert (state["sum"].double() - exact).abs().max() < 2e-5


@RUNNING
@pytest.mark.parametrize(
    ("beta1", "m", "most"), [(0.9, 10, 0), (0.9, 100, 0), (0.99, 10, 12), (1.0, 10, 60)]
)
def test_gradients_of_one_size_are_hardly_ever_summed_again(beta1, m, most, way):
    """Over 1,000 steps; a sum over all slots shows in the error, which it lowers."""
    p = torch.nn.Parameter(torch.zeros(50))
    optimizer = AdaShift([p], n=m, betas=(beta1, 0.999), **way)
    errors = []
    for g in stream(1000 + 2 * m, dtype=torch.float32, width=50):
        p.grad = g
        optimizer.step()
        errors.append(optimizer.state[p]["number"][ERROR].item())
    settled = torch.tensor(errors[2 * m :])
    again = (settled[1:] < 0.9 * settled[:-1]).sum()
    assert again <= most


def test_bound_refuses_what_it_cannot_know():
    number = torch.zeros(PEAKS + 3)
    number[CORRECTION + 2] = 0.9
    assert not Bound(number, 5, 0.9, 3).sums_again
    assert Bound(number, 5, 0.8, 3).sums_again, "β1 has changed"
    number[ERROR] = math.inf
    assert Bound(number, 5, 0.9, 3).sums_again
    number[ERROR] = 1e-3
    assert Bound(number, 5, 0.9, 3).sums_again, "an error beside gradients that are all 0"
    number[PEAKS : PEAKS + 3] = torch.tensor([1e6, 1e6, 1e6])
    assert not Bound(number, 5, 0.9, 3).sums_again
    number[PEAKS + 1] = math.nan
    assert Bound(number, 5, 0.9, 3).sums_again


def test_total_weight():
    assert total_weight(1.0, 7) == 7 and total_weight(0.0, 7) == 1
    assert total_weight(0.9, 10) == pytest.approx((1 - 0.9**10) / (1 - 0.9))


@pytest.mark.parametrize("way", [{}, {"foreach": True}, {"fused": True}, {"capturable": True}])
@pytest.mark.parametrize("phi", ["max", "mean"])
@pytest.mark.parametrize(
    ("options", "per_element"),
    [
        (dict(n=1), 0),
        (dict(n=10, m=1), 0),
        (dict(n=44, m=math.inf), 4),
        (dict(n=10), 44),
        (dict(n=10, state_dtype=torch.bfloat16), 24),
        (dict(n=40, m=3), 16),
    ],
)
def test_bytes_of_state(options, per_element, phi, way):
    p = torch.nn.Parameter(torch.zeros(500, 20))
    optimizer = AdaShift([p], phi=phi, **options, **way)
    for _ in range(3):
        p.grad = torch.randn(500, 20)
        optimizer.step()
    tensors = [x for x in optimizer.state[p].values() if torch.is_tensor(x)]
    large = [x for x in tensors if x.numel() >= p.numel()]
    assert sum(x.numel() * x.itemsize for x in large) == per_element * p.numel()
    assert len(tensors) - len(large) == 4 and sum(x.numel() for x in tensors) < 12 * p.numel()
