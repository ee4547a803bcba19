"""Every implementation (default, foreach, fused, capturable) matches the reference."""

import copy
import itertools
import math
import os
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adashift import AdaShift
from adashift._steps import cpu
from adashift.reference import AdaShiftReference

IMPLEMENTATIONS = [{}, {"foreach": True}, {"fused": True}, {"capturable": True}]
NAMES = ["default", "foreach", "fused", "capturable"]
PHIS = ["max", "mean", "row", "none"]

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=NAMES)


@pytest.fixture(autouse=True)
def compiler():
    """Without a compiler, fused=True is the default and would not test the kernel."""
    if cpu.kernel_for(torch.float32) is None:
        pytest.skip("no C compiler: the kernel cannot be built")


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def gradients(generator, shape):
    """Yield gradients of changing scale, so that a wrong lag is detected."""
    while True:
        size = torch.rand((), generator=generator, dtype=torch.float64).mul(3).exp()
        yield size * torch.randn(shape, generator=generator, dtype=torch.float64)


@every_implementation
@pytest.mark.filterwarnings("ignore:m=inf")
@pytest.mark.parametrize("beta1", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_matches_the_reference_with_groups_and_missing_gradients(n, phi, beta1, implementation):
    """Three parameters in two groups; one starts late, one has no gradient every third step."""
    generator = torch.Generator().manual_seed(n)
    for m in sorted({1, min(2, n), n, math.inf}):
        options = dict(lr=0.1, betas=(beta1, 0.99), n=n, m=m, phi=phi)
        shapes = [(7, 11), (), (5, 1, 3)]
        params = [torch.nn.Parameter(torch.randn(s).double()) for s in shapes]
        other = options | dict(lr=0.03, betas=(0.5, 0.9), n=n + 1, eps=1e-3)
        groups = [{"params": params[:2]}, {"params": params[2:], **other}]
        opt = AdaShift(groups, **options, **implementation)
        oracles = [
            AdaShiftReference(p, **o)
            for p, o in zip(params, (options, options, other), strict=True)
        ]
        streams = [gradients(generator, shape) for shape in shapes]
        for t in range(1, 5 * n + 6):
            has = [True, t > 4, t % 3 != 0]
            for p, oracle, stream, present in zip(params, oracles, streams, has, strict=True):
                p.grad = next(stream) if present else None
                if present:
                    oracle.step(p.grad)
            opt.step()
            for p, oracle in zip(params, oracles, strict=True):
                close(p.detach(), oracle.theta)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_options_match_the_reference(data):
    n = data.draw(st.integers(1, 6), label="n")
    options = dict(
        lr=data.draw(st.floats(1e-4, 1.0)),
        betas=(data.draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])), data.draw(st.floats(0, 0.999))),
        eps=data.draw(st.sampled_from([1e-8, 1e-3, 1.0])),
        n=n,
        m=data.draw(st.one_of(st.none(), st.integers(1, n))),
        phi=data.draw(st.sampled_from(PHIS)),
    )
    implementation = data.draw(st.sampled_from(IMPLEMENTATIONS), label="implementation")
    shape = data.draw(st.sampled_from([(), (1,), (3,), (17,), (4, 5), (2, 3, 4)]))
    scales = data.draw(st.lists(st.sampled_from([0.0, 1e-6, 1.0, 1e4]), min_size=1, max_size=25))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    p = torch.nn.Parameter(torch.randn(shape, generator=generator).double())
    opt, oracle = AdaShift([p], **options, **implementation), AdaShiftReference(p, **options)
    for scale in scales:
        p.grad = scale * torch.randn(shape, generator=generator).double()
        expected = oracle.step(p.grad)
        opt.step()
        size = oracle.theta.abs().max().item() + 1
        torch.testing.assert_close(p.detach(), expected, rtol=1e-9, atol=1e-9 * size)


def pair(implementation, shape=(70_000,), dtype=torch.float32, **options):
    """Two equal parameters, larger than a work item and not a multiple of a cache line."""
    a = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype))
    b = torch.nn.Parameter(a.detach().clone())
    return a, AdaShift([a], **options), b, AdaShift([b], **options, **implementation)


def feed(pairs, g):
    for p, opt in pairs:
        p.grad = g.clone(memory_format=torch.preserve_format)
        opt.step()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:], ids=NAMES[1:])
@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize(
    "options",
    [
        dict(weight_decay=0.1),
        dict(weight_decay=0.1, decoupled_weight_decay=False),
        dict(maximize=True),
        dict(maximize=True, weight_decay=0.1, decoupled_weight_decay=False, m=1),
    ],
    ids=["decoupled", "coupled", "maximize", "all"],
)
def test_options_and_large_tensors_match_the_default(options, phi, implementation):
    a, default, b, other = pair(implementation, (70_003,), n=4, lr=0.01, phi=phi, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(14):
        g = torch.randn(a.shape, generator=generator)
        feed([(a, default), (b, other)], g)
        assert torch.equal(b.grad, g)
    # Where v is tiny, the rounding of a gradient moves an element far.
    close_to = dict(rtol=2e-3, atol=1e-4) if phi in ("none", "row") else dict(rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a, b, **close_to)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:], ids=NAMES[1:])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_other_dtypes_match_the_default(dtype, implementation):
    a, default, b, other = pair(implementation, (33, 5), dtype, n=3, lr=0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        feed([(a, default), (b, other)], torch.randn(a.shape, generator=generator).to(dtype))
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(a, b, rtol=4 * ulp, atol=4 * ulp)


@every_implementation
def test_beta1_may_change(implementation):
    options = dict(n=6, lr=0.1)
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(9).double())
    opt, oracle = AdaShift([p], **options, **implementation), AdaShiftReference(p, **options)
    betas = [0.9] * 9 + [0.5, 0.95, 0.0, 0.0, 0.7] + [1.0] * 20 + [0.9] * 20
    for beta1, g in zip(betas, gradients(generator, (9,)), strict=False):
        opt.param_groups[0]["betas"] = (beta1, 0.999)
        oracle.beta1, p.grad = beta1, g
        expected = oracle.step(g)
        opt.step()
        torch.testing.assert_close(p.detach(), expected, rtol=1e-11, atol=1e-11)


@every_implementation
@pytest.mark.parametrize("outlier", [1e30, math.inf])
def test_outlier_has_no_effect_after_it_left_the_window(outlier, implementation):
    n, m = 12, 4  # the outlier leaves the window long before it enters v
    moved = []
    for strange in (False, True):
        p = torch.nn.Parameter(torch.zeros(20))
        opt = AdaShift([p], n=n, m=m, **implementation)
        generator = torch.Generator().manual_seed(0)
        for t in range(1, n + m + 2):
            p.grad = torch.randn(20, generator=generator)
            if strange and t == 6:
                p.grad[3] = outlier
            opt.step()
            if t == n + 1:
                before = p.detach().clone()
        moved.append(p.detach() - before)
    assert moved[0].abs().min() > 0
    torch.testing.assert_close(*moved, rtol=1e-5, atol=1e-7)


@every_implementation
def test_inf_leaves_the_window_beside_an_inf_of_another_element(implementation):
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = AdaShift([p], n=6, m=3, phi="none", lr=0.1, **implementation)
    oracle = AdaShiftReference(p, n=6, m=3, phi="none", lr=0.1)
    for t in range(13):
        p.grad = torch.tensor([math.inf if t == 2 else 1.0, math.inf if t == 4 else 1.0])
        expected = oracle.step(p.grad)
        optimizer.step()
    torch.testing.assert_close(p.detach(), expected.float())


@every_implementation
def test_nan_propagates(implementation):
    for phi in ("max", "mean"):
        p = torch.nn.Parameter(torch.zeros(5000))
        opt = AdaShift([p], n=2, m=1, phi=phi, **implementation)
        for t in range(3):
            p.grad = torch.ones(5000)
            p.grad[4321] = math.nan if t == 0 else 1.0
            opt.step()
        assert p.isnan().all()


@every_implementation
def test_infinite_parameter_does_not_reach_the_gradient_without_coupled_decay(implementation):
    p = torch.nn.Parameter(torch.tensor([math.inf, 1.0]))
    opt = AdaShift([p], n=1, lr=0.1, maximize=True, **implementation)
    for _ in range(3):
        p.grad = torch.ones(2)
        opt.step()
    torch.testing.assert_close(p.detach(), torch.tensor([math.inf, 1.2]))


@every_implementation
def test_block_with_zero_v_is_not_updated(implementation):
    for phi in PHIS:
        p = torch.nn.Parameter(torch.zeros(3))
        opt = AdaShift([p], n=2, phi=phi, weight_decay=0.1, **implementation)
        p.data += 1
        for t in range(8):
            p.grad = torch.full((3,), float(t > 5))
            opt.step()
        assert torch.equal(p.detach(), torch.ones(3))


# --- shared state and options


@pytest.mark.filterwarnings("ignore:m=inf")
@pytest.mark.parametrize(("phi", "m"), [*((phi, 5) for phi in PHIS), ("max", math.inf)])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_checkpoint_resumes_with_another_implementation(order, phi, m):
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(13).double())
    oracle = AdaShiftReference(p, n=5, m=m, phi=phi)
    opt, saved = None, None
    for t, g in zip(range(42), gradients(generator, (13,)), strict=False):
        if t % 7 == 0:
            implementation = IMPLEMENTATIONS[order[t // 7 % 4]]
            opt = AdaShift([p], n=5, m=m, phi=phi, **implementation)
            if saved:
                opt.load_state_dict(saved)
                opt.param_groups[0].update(
                    {"foreach": None, "fused": None, "capturable": False} | implementation
                )
        p.grad = g
        expected = oracle.step(g)
        opt.step()
        saved = copy.deepcopy(opt.state_dict())
        torch.testing.assert_close(p.detach(), expected, rtol=1e-11, atol=1e-12)


@every_implementation
@pytest.mark.parametrize(("was", "now"), [("max", "mean"), ("mean", "none"), ("none", torch.sum)])
def test_changing_phi_during_training_raises(was, now, implementation):
    p = torch.nn.Parameter(torch.zeros(2))
    opt = AdaShift([p], n=2, phi=was, **implementation)
    p.grad = torch.ones(2)
    opt.step()
    opt.param_groups[0]["phi"] = now
    with pytest.raises(RuntimeError, match=f"phi changed from {was} to"):
        opt.step()


@pytest.mark.parametrize(
    "options", [dict(foreach=True, fused=True), dict(fused=True, capturable=True)]
)
def test_implementations_are_mutually_exclusive(options):
    with pytest.raises(ValueError, match="set at most one"):
        AdaShift([torch.nn.Parameter(torch.zeros(1))], **options)


# --- the CPU kernel


def kernel_steps(monkeypatch):
    """A list that grows by one for every parameter that the kernel steps."""
    taken = []
    step = cpu.CpuTable.step
    monkeypatch.setattr(
        cpu.CpuTable, "step", lambda self, group: (taken.extend(self.params), step(self, group))
    )
    return taken


def test_kernel_runs_only_for_supported_tensors(monkeypatch):
    """Tensors with gaps, half precision and a function φ use the default, with equal results."""
    taken = kernel_steps(monkeypatch)
    base = torch.randn(6, 4, 4, 2)
    kinds = {
        "contiguous": (base.clone(), "max", True),
        "channels last": (base.clone(memory_format=torch.channels_last), "mean", True),
        "transposed": (torch.randn(5, 3).t(), "none", True),
        "gaps": (torch.randn(8, 6)[:, ::2], "max", False),
        "function": (base.clone(), lambda x: x.amax(), False),
        "half": (base.half(), "max", False),
        "bfloat16": (base.bfloat16(), "max", True),
        "rows": (base.clone(memory_format=torch.channels_last), "row", True),
        "rows apart": (torch.randn(5, 3).t(), "row", False),
    }
    for name, (start, phi, expected) in kinds.items():
        a, b = (torch.nn.Parameter(start.detach()) for _ in range(2))
        b.data = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).copy_(a.data)
        one, other = AdaShift([a], n=2, phi=phi), AdaShift([b], n=2, phi=phi, fused=True)
        taken.clear()
        for _ in range(7):
            a.grad = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).normal_()
            b.grad = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).copy_(a.grad)
            one.step()
            other.step()
        assert (len(taken) > 0) == expected, name
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def test_gradients_of_another_layout_use_the_default(monkeypatch):
    taken = kernel_steps(monkeypatch)
    a, default, b, other = pair({"fused": True}, (4, 3, 5, 2), n=3)
    for t in range(12):
        g = torch.randn(4, 3, 5, 2)
        feed([(a, default), (b, other)], g.to(memory_format=torch.channels_last) if t % 2 else g)
    assert len(taken) == 6
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def stepped(phi, threads):
    """Return a parameter after nine steps of the kernel with this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        p = torch.nn.Parameter(torch.zeros(300_001))
        opt = AdaShift([p], n=3, phi=phi, fused=True)
        for t in range(9):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(t))
            opt.step()
        return p.detach()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("phi", PHIS)
def test_result_is_bit_identical_for_any_number_of_threads(phi, monkeypatch):
    alone = stepped(phi, 1)
    assert torch.equal(stepped(phi, 2), alone) and torch.equal(stepped(phi, 5), alone)
    monkeypatch.setattr(cpu, "torch_threads", lambda: 0)  # torch without a known OpenMP
    assert torch.equal(stepped(phi, 2), alone)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_process_steps_without_threads():
    """Runs in a new process, because forking a pytest worker with threads is unsafe."""
    script = """
import os, torch
from adashift import AdaShift
torch.set_num_threads(2)
p = torch.nn.Parameter(torch.ones(300_001))
p.grad = torch.ones_like(p)
optimizer = AdaShift([p], n=1, fused=True)
optimizer.step()
child = os.fork()
optimizer.step()
if not child:
    os._exit(0 if p[0] < 1 else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_long_window():
    a, default, b, other = pair({"fused": True}, (50,), n=300, betas=(1.0, 0.9))
    for t in range(620):
        g = torch.randn(50, generator=torch.Generator().manual_seed(t))
        feed([(a, default), (b, other)], g)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def in_fresh_process(code, **environment):
    """Return the standard output of a new Python process."""
    env = {**os.environ, **environment, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


STEPS = """
import warnings, torch
from adashift import AdaShift
p = torch.nn.Parameter(torch.zeros(3))
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    opt = AdaShift([p], n=2, fused=True)
    for _ in range(4):
        p.grad = torch.ones(3)
        opt.step()
print(p.tolist()[0] < 0, len(seen), *(w.message for w in seen))
"""


def test_missing_compiler_warns_once_and_uses_the_default(tmp_path):
    output = in_fresh_process(STEPS, CC="no-such-compiler", ADASHIFT_CACHE=str(tmp_path))
    assert output.startswith("True 1 fused=True needs a C compiler, but no-such-compiler was not")


@pytest.mark.slow
def test_failing_compiler_is_reported_with_its_first_line(tmp_path):
    script = tmp_path / "broken"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no space" >&2; exit 1\n')
    script.chmod(0o755)
    output = in_fresh_process(STEPS, CC=str(script), ADASHIFT_CACHE=str(tmp_path / "cache"))
    assert output.startswith("True 1 ") and "failed: no space; using the default" in output
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.slow
def test_library_is_compiled_once_and_cached(tmp_path):
    assert in_fresh_process(STEPS, ADASHIFT_CACHE=str(tmp_path)).startswith("True 0")
    (library,) = tmp_path.iterdir()
    before = library.stat().st_mtime_ns
    assert in_fresh_process(STEPS, ADASHIFT_CACHE=str(tmp_path)).startswith("True 0")
    assert [f.stat().st_mtime_ns for f in tmp_path.iterdir()] == [before]


@pytest.mark.slow
def test_unwritable_cache_is_not_an_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert in_fresh_process(STEPS, ADASHIFT_CACHE=str(blocked)).startswith("True 0")


# --- torch.compile


COMPILED = """
import torch
from torch._dynamo.testing import CompileCounter
from adashift import AdaShift
from adashift.reference import AdaShiftReference
for implementation in ({}, {"foreach": True}, {"fused": True}, {"capturable": True}):
    torch._dynamo.reset()
    p = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    oracle, opt = AdaShiftReference(p, n=3), AdaShift([p], n=3, **implementation)
    counter = CompileCounter()
    step = torch.compile(opt.step, backend=counter, fullgraph="capturable" in implementation)
    counts = []
    for _ in range(14):
        p.grad = torch.randn(5, dtype=torch.float64)
        expected = oracle.step(p.grad)
        step()
        assert torch.allclose(p, expected, rtol=1e-12, atol=1e-12)
        counts.append(counter.frame_count)
    assert counts[2] == counts[-1] <= 2, (implementation, counts)
print("ok")
"""


@pytest.mark.slow
def test_compiled_steps_are_not_recompiled():
    assert in_fresh_process(COMPILED).endswith("ok\n")


def test_no_warning_if_a_compiler_is_available():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdaShift([torch.nn.Parameter(torch.zeros(1))], fused=True)


# --- tensors whose memory differs from their value or layout


def default_and_fused(make_parameters, step, count=12, **options):
    """Return pairs of parameters after some steps of the default and of the kernel."""
    ends = []
    for implementation in ({}, {"fused": True}):
        torch.manual_seed(0)
        params = make_parameters()
        opt = AdaShift(params, lr=0.05, n=3, **options, **implementation)
        for t in range(count):
            step(t, params, opt)
        ends.append([p.detach() for p in params])
    return zip(*ends, strict=True)


def test_lazy_conjugate_gradients_stay_alive_until_the_kernel_ran():
    def make():
        return [torch.nn.Parameter(torch.randn(3000, dtype=torch.complex64)) for _ in range(4)]

    def step(t, params, opt):
        for k, p in enumerate(params):
            p.grad = (torch.randn_like(p) * 10**k).conj()
        opt.step()

    for a, b in default_and_fused(make, step):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_lazy_negation_is_respected():
    def step(t, params, opt):
        whole = torch.complex(torch.zeros(()), torch.ones(()) * (t + 1)).conj().imag
        assert whole.is_neg()
        params[0].grad = whole
        opt.step()

    for a, b in default_and_fused(lambda: [torch.nn.Parameter(torch.ones(()))], step):
        torch.testing.assert_close(a, b)


def test_state_of_another_dtype_uses_the_default():
    """A model that is converted to float64 during training, or a float32 checkpoint."""

    def step(t, params, opt):
        if t == 6:
            params[0].data = params[0].data.double()
        params[0].grad = torch.randn(params[0].shape).to(params[0].dtype)
        opt.step()

    for a, b in default_and_fused(lambda: [torch.nn.Parameter(torch.randn(5000))], step):
        assert b.dtype == torch.float64
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("phi", PHIS)
def test_one_gradient_of_another_layout_has_no_later_effect(phi):
    def step(t, params, opt):
        g = torch.randn(4, 3, 5, 2)
        params[0].grad = g.to(memory_format=torch.channels_last) if t == 5 else g
        opt.step()

    for a, b in default_and_fused(
        lambda: [torch.nn.Parameter(torch.randn(4, 3, 5, 2))], step, phi=phi
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_tensor_subclass_uses_the_default(monkeypatch):
    from torch.testing._internal.two_tensor import TwoTensor

    taken = kernel_steps(monkeypatch)
    p = torch.nn.Parameter(TwoTensor(torch.ones(10), torch.ones(10)))
    opt = AdaShift([p], lr=0.05, n=1, fused=True)
    for _ in range(4):
        p.grad = TwoTensor(torch.ones(10), torch.ones(10))
        opt.step()
    assert not taken and (p.detach().a < 1).all()
