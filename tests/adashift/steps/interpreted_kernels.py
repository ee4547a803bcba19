"""The GPU's kernels in Triton's interpreter, on a CPU. test_gpu.py runs this file in a new process.

Triton decides when a kernel is imported whether it is interpreted, so TRITON_INTERPRET=1 must be
set before that. Tiles are small here, so that small tensors have several.
"""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from adashift import AdaShift
from adashift._steps import gpu
from adashift._window import CORRECTION, ERROR, PEAKS, forget_error
from adashift.reference import AdaShiftReference

PHIS = ["max", "mean", "row", "none"]
pytestmark = pytest.mark.filterwarnings(
    "ignore:m=inf", "ignore:.*encountered in", "ignore:Conversion"
)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(gpu, "DEVICES", ("cpu",))
    monkeypatch.setattr(gpu, "TILE", 64)
    monkeypatch.setattr(gpu, "LANES", 16)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounding_cast)


CAST = InterpreterBuilder.cast_impl


def rounding_cast(self, source, target):
    """Round to the nearest bfloat16, as a GPU does; the interpreter cuts bits off."""
    if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
        return CAST(self, source, target)
    rounded = torch.from_numpy(np.atleast_1d(source.data)).bfloat16().view(torch.int16).numpy()
    return TensorHandle(rounded.view(np.uint16).reshape(source.data.shape), tl.bfloat16)


def make(params, **options):
    """An optimizer whose parameters must all go through the kernels."""
    optimizer, step = AdaShift(params, **options), AdaShift._update_eagerly

    def checked(self, group):
        step(self, group)
        plan = self._plans[id(group)]
        assert not plan.rest and all(type(table) is gpu.GpuTable for table in plan.tables)

    optimizer._update_eagerly = checked.__get__(optimizer)
    return optimizer


def parameters(dtype, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def like(p, generator, scale=1.0):
    """A random gradient in the memory layout of p."""
    values = scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return torch.empty_like(p, requires_grad=False).copy_(values)


def layouts(dtype):
    """No dimension, one element, several tiles, rows longer than a tile, channels last."""
    flat = parameters(dtype, (), (1,), (150,), (9, 17), (3, 2, 2, 4), (3, 100))
    last = parameters(dtype, (4, 3, 3, 5))[0].detach().to(memory_format=torch.channels_last)
    return [*flat, last.requires_grad_()]


WINDOWS = [(1, 1), (2, 1), (3, 2), (3, 3), (4, math.inf)]


@pytest.mark.parametrize(("n", "m"), WINDOWS)
@pytest.mark.parametrize("phi", PHIS)
def test_follows_the_reference(phi, n, m):
    """Late and missing gradients, so that the tensors of a launch have different clocks."""
    options = dict(lr=0.1, n=n, m=m, phi=phi)
    params, generator = layouts(torch.float64), torch.Generator().manual_seed(n)
    optimizer = make(params, **options)
    oracles = [AdaShiftReference(p, **options) for p in params]
    for t in range(1, 2 * n + 5):
        for i, (p, oracle) in enumerate(zip(params, oracles, strict=True)):
            present = (t > 2 if i == 1 else t % 3 > 0 if i == 3 else True) or t == 2 * n + 4
            p.grad = like(p, generator, math.exp(t % 4)) if present else None
            if present:
                oracle.step(p.grad)
        optimizer.step()
        for p, oracle in zip(params, oracles, strict=True):
            torch.testing.assert_close(p.detach(), oracle.theta, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beta1", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("phi", "m"), [("max", 3), ("none", math.inf)])
def test_beta1(beta1, phi, m):
    """From the first step on, and from the eighth on."""
    (p,), generator = parameters(torch.float64, (70,)), torch.Generator().manual_seed(0)
    (q,) = parameters(torch.float64, (70,))
    fixed = make([p], n=3, m=m, phi=phi, betas=(beta1, 0.99))
    changed = make([q], n=3, m=m, phi=phi, betas=(0.9, 0.99))
    oracles = [AdaShiftReference(x, n=3, m=m, phi=phi, betas=(beta1, 0.99)) for x in (p, q)]
    oracles[1].beta1 = 0.9
    for t in range(14):
        if t == 7:
            changed.param_groups[0]["betas"] = (beta1, 0.99)
            oracles[1].beta1 = beta1
        p.grad = q.grad = like(p, generator)
        fixed.step()
        changed.step()
        for x, oracle in zip((p, q), oracles, strict=True):
            expected = oracle.step(x.grad)
            torch.testing.assert_close(x.detach(), expected, rtol=1e-12, atol=1e-12)


OPTIONS = [
    dict(weight_decay=0.1),
    dict(weight_decay=0.1, decoupled_weight_decay=False),
    dict(maximize=True, weight_decay=0.1, decoupled_weight_decay=False, m=1),
    dict(maximize=True, state_dtype=torch.bfloat16),
    dict(lr=torch.tensor(0.02)),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("phi", ["mean", "none"])
def test_options_and_dtypes_as_one_by_one(phi, dtype, options):
    pairs = list(
        zip(parameters(dtype, (90,), (5, 8)), parameters(dtype, (90,), (5, 8)), strict=True)
    )
    ours, theirs = zip(*pairs, strict=True)
    options = dict(lr=0.02, n=3, phi=phi) | options
    kernels, single = make(ours, **options), AdaShift(theirs, **options, fused=False)
    generator = torch.Generator().manual_seed(1)
    for _ in range(9):
        for p, q in pairs:
            p.grad = like(p, generator)
            q.grad = p.grad.clone()
        kernels.step()
        single.step()
    ulp = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
    for p, q in pairs:
        torch.testing.assert_close(p, q, rtol=ulp, atol=ulp)
    for p, q in pairs:
        assert kernels.state[p]["number"][CORRECTION] == pytest.approx(
            single.state[q]["number"][CORRECTION].item(), rel=1e-5
        )


@pytest.mark.parametrize("outlier", [1e30, math.inf, math.nan])
@pytest.mark.parametrize("beta1", [0.9, 1.0])
def test_outlier_leaves_no_trace_in_the_window(outlier, beta1):
    """In float32, where the running sum alone would keep it; v sees it much later."""
    n, m, generator = 12, 3, torch.Generator().manual_seed(0)
    (p,) = parameters(torch.float32, (70,))
    optimizer, seen = make([p], n=n, m=m, betas=(beta1, 0.999)), []
    for t in range(n + 1):
        p.grad = like(p, generator)
        p.grad[68] = outlier if t == 5 else p.grad[68]
        seen.append(p.grad.double())
        optimizer.step()
        if t > 7:
            exact = sum(beta1**i * seen[t - i] for i in range(m))
            error = (optimizer.state[p]["sum"] - exact).abs().max()
            assert error <= optimizer.state[p]["number"][ERROR] < 5e-5


def test_inf_leaves_the_window_beside_an_inf_of_another_element():
    (p,), options = parameters(torch.float64, (2,)), dict(n=6, m=3, phi="none", lr=0.1)
    optimizer, oracle = make([p], **options), AdaShiftReference(p, **options)
    for t in range(13):
        p.grad = torch.ones(2, dtype=torch.float64)
        p.grad[0 if t == 2 else 1] = math.inf if t in (2, 4) else 1.0
        expected = oracle.step(p.grad)
        optimizer.step()
    torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)


def test_beta1_of_0_takes_the_newest_gradient_beside_inf():
    (p,) = parameters(torch.float32, (70,))
    optimizer = make([p], n=9, m=3, betas=(0.0, 0.999))
    for t in range(5):
        p.grad = torch.full((70,), math.inf if t == 2 else 1.0)
        optimizer.step()
        assert torch.equal(optimizer.state[p]["sum"], p.grad)


@pytest.mark.parametrize("phi", PHIS)
def test_nan_reaches_its_block_and_a_block_without_scale_does_not_move(phi):
    (p,) = parameters(torch.float32, (4, 40))
    optimizer, start = make([p], n=2, m=1, phi=phi, weight_decay=0.1), p.detach().clone()
    for t in range(3):
        p.grad = torch.ones(4, 40)
        p.grad[2, 33] = math.nan if t == 0 else 1.0
        p.grad[1] *= 0
        optimizer.step()
    whole = torch.zeros(4, 40, dtype=torch.bool)
    expected = {"max": ..., "mean": ..., "row": 2, "none": (2, 33)}
    whole[expected[phi]] = True
    assert torch.equal(p.isnan(), whole)
    if phi in ("row", "none"):
        assert torch.equal(p[1], start[1]) and (p[0] != start[0]).all()


@pytest.mark.parametrize("m", [1, 2, math.inf])
@pytest.mark.parametrize("when", [0, 3])
@pytest.mark.parametrize("phi", PHIS)
def test_inf_gradients_end_as_in_the_reference(phi, when, m):
    """Where v is 0 nothing moves; v = inf moves nothing, unless m_t is inf, which gives NaN."""
    (p,) = parameters(torch.float64, (4, 2))
    optimizer, oracle = make([p], n=2, m=m, phi=phi), AdaShiftReference(p, n=2, m=m, phi=phi)
    for t in range(8):
        p.grad = torch.full((4, 2), 1.0 if t >= when else 0.0, dtype=torch.float64)
        p.grad[1, 1] = math.inf if t == when else p.grad[1, 1]
        expected = oracle.step(p.grad)
        optimizer.step()
        torch.testing.assert_close(p.detach(), expected, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_mean_of_squares_does_not_overflow():
    (p,) = parameters(torch.float32, (200,))
    optimizer, p.grad = make([p], n=1, phi="mean"), torch.full((200,), 1e19)
    optimizer.step()
    assert optimizer.state[p]["phi"].item() == pytest.approx(1e38, rel=1e-6)


def test_stochastic_rounding_is_right_on_average_and_as_on_a_cpu(monkeypatch):
    start = torch.ones(4000, dtype=torch.bfloat16)
    means, results = [], []
    for devices, fused in ((("cpu",), None), (("cuda",), True)):
        monkeypatch.setattr(gpu, "DEVICES", devices)
        monkeypatch.setattr(gpu, "TILE", 1024)
        p = start.clone().requires_grad_()
        optimizer = AdaShift([p], n=1, lr=1e-4, stochastic_rounding=True, fused=fused)
        for _ in range(5):
            p.grad = torch.ones_like(p)
            optimizer.step()
        means.append(p.double().mean().item())
        results.append(p.detach())
    assert means[0] == pytest.approx(1 - 4e-4, abs=1e-4) and results[0].unique().numel() > 1
    assert torch.equal(*results), "the same hash, the same noise"


def test_large_tiles_and_the_second_launch_of_many_rows(monkeypatch):
    monkeypatch.setattr(gpu, "TILE", 1024)
    params, generator = (
        parameters(torch.float32, (1000,), (5000,)),
        torch.Generator().manual_seed(0),
    )
    rows, options = parameters(torch.float32, (40, 2)), dict(n=2, lr=0.1)
    optimizer = make([{"params": params}, {"params": rows, "phi": "row"}], **options)
    oracles = [AdaShiftReference(p, **options) for p in params]
    oracles += [AdaShiftReference(rows[0], **options, phi="row")]
    for _ in range(4):
        for p, oracle in zip([*params, *rows], oracles, strict=True):
            p.grad = like(p, generator)
            oracle.step(p.grad)
        optimizer.step()
    for p, oracle in zip([*params, *rows], oracles, strict=True):
        torch.testing.assert_close(p.detach().double(), oracle.theta, rtol=1e-6, atol=1e-6)


def test_state_of_other_ways_and_of_checkpoints(monkeypatch):
    """One state for all: kernels, one by one, foreach, and a checkpoint loaded in between."""
    (p,), generator = parameters(torch.float64, (6, 9)), torch.Generator().manual_seed(0)
    oracle, optimizer = AdaShiftReference(p, n=4), AdaShift([p], n=4)
    ways = itertools.cycle([{}, {"fused": False}, {}, {"foreach": True}, {"fused": True}])
    for t in range(21):
        if t % 3 == 0:
            saved = optimizer.state_dict()
            optimizer = AdaShift([p], n=4)
            optimizer.load_state_dict(saved)
            optimizer.param_groups[0].update({"fused": None, "foreach": None} | next(ways))
        if t % 3 == 1:  # without a checkpoint between
            optimizer.param_groups[0].update({"fused": None, "foreach": None} | next(ways))
        p.grad = like(p, generator, math.exp(t % 4))
        expected = oracle.step(p.grad)
        optimizer.step()
        torch.testing.assert_close(p.detach(), expected, rtol=1e-11, atol=1e-12)


def test_unknown_error_means_a_sum_over_all_slots_until_all_peaks_are_known():
    """As a step by torch.compile leaves it, with the clock on the device."""
    (p,), generator = parameters(torch.float64, (80,)), torch.Generator().manual_seed(0)
    optimizer, oracle, errors = make([p], n=3), AdaShiftReference(p, n=3), []
    for t in range(11):
        p.grad = like(p, generator, math.exp(t % 4))
        state = optimizer.state[p]
        if t == 5:
            forget_error(state)
            state["number"][PEAKS:] = math.nan  # whatever is there
        if 5 <= t < 8:
            state["sum"].fill_(7.0)
        expected = oracle.step(p.grad)
        optimizer.step()
        errors.append(state["number"][ERROR].item())
        torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)
    assert errors[5:7] == [-2, -3] and 0 < errors[7] < errors[8] < 1e-12
    assert state["number"][PEAKS:].isfinite().all()


def test_a_step_is_noted_by_autograd_and_repeats_bit_by_bit():
    results = []
    for _ in range(2):
        (p,), generator = parameters(torch.float32, (3, 50)), torch.Generator().manual_seed(0)
        optimizer = make([p], n=2, phi="mean")
        for _ in range(5):
            p.grad, version = like(p, generator), p._version
            optimizer.step()
            assert p._version > version
        results.append(p.detach())
    assert torch.equal(*results)


def test_warning_where_triton_fails(monkeypatch):
    from adashift._steps import kernel

    monkeypatch.setattr(kernel, "write_number", None)
    with pytest.warns(UserWarning, match="Triton, which fails on cpu: TypeError"):
        assert not gpu.available.__wrapped__(torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gpu.available(torch.device("cpu"))
