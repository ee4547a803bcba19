import copy
import doctest
import math
import pickle
import sys

import numpy as np
import pytest
import torch

from adashift import AdaShift, _window, optimizer, reference
from adashift.reference import AdaShiftReference

PHIS = ["max", "mean", "none"]


def stream(length, shape=(2, 3), seed=0, dtype=torch.float64):
    """Gradients whose scale changes at every step, so that a wrong lag is detected."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(length, *shape, generator=generator, dtype=dtype)
    scale = torch.rand(length, generator=generator, dtype=dtype) * 3
    return list(g * scale.exp().view(-1, *[1] * len(shape)))


def parameter(like, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(like.shape, generator=generator).to(like.dtype))


def feed(opt, p, g):
    p.grad = g.clone()
    opt.step()
    return p.detach().clone()


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("module", [optimizer, reference, _window])
def test_doctests(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


# --- the algorithm


def test_small_example_worked_by_hand():
    # n = m = 2, β1 = 1/2: weights 2/3, 1/3. β2 = 3/4. eps = 1 shows that eps is outside the root.
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = AdaShift([p], lr=1.0, betas=(0.5, 0.75), eps=1.0, n=2, phi="max")
    g = [torch.tensor(x, dtype=torch.float64) for x in ([3, -4], [1, 2], [6, 0], [0, 3])]
    theta = [feed(opt, p, x) for x in g]
    assert not theta[0].any() and not theta[1].any()
    # t = 3: m = (2/3)(6, 0) + (1/3)(1, 2) = (13/3, 2/3); v = 16/4 = 4; v/(1 - 3/4) = 16.
    theta_3 = [-13 / 3 / (4 + 1), -2 / 3 / (4 + 1)]
    close(theta[2], torch.tensor(theta_3, dtype=torch.float64))
    # t = 4: m = (2/3)(0, 3) + (1/3)(6, 0) = (2, 2); v = 4·3/4 + 4/4 = 4; v/(1 - 9/16) = 64/7.
    step = 2 / (8 / math.sqrt(7) + 1)
    close(theta[3], torch.tensor([x - step for x in theta_3], dtype=torch.float64))


@pytest.mark.parametrize("beta1", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_matches_the_reference(n, phi, beta1):
    gradients = stream(5 * n + 5)  # every t: also 1, n-1, n, n+1 and 5n
    for m in range(1, n + 1):
        p = parameter(gradients[0])
        options = dict(lr=0.1, betas=(beta1, 0.99), n=n, m=m, phi=phi)
        opt, oracle = AdaShift([p], **options), AdaShiftReference(p, **options)
        for g in gradients:
            close(feed(opt, p, g), oracle.step(g))


def test_defaults_match_the_reference():
    gradients = stream(25)
    p = parameter(gradients[0])
    opt, oracle = AdaShift([p]), AdaShiftReference(p)
    for g in gradients:
        close(feed(opt, p, g), oracle.step(g))


@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_first_update_is_at_step_n_plus_1(n):
    gradients = stream(n + 1)
    p = parameter(gradients[0])
    opt, start = AdaShift([p], n=n), p.detach().clone()
    for g in gradients[:n]:
        assert torch.equal(feed(opt, p, g), start)
    assert (feed(opt, p, gradients[n]) != start).all()


@pytest.mark.parametrize("n", [1, 3])
def test_v_does_not_depend_on_the_newest_n_gradients(n):
    def last_v(gradients):
        p = parameter(gradients[0])
        opt = AdaShift([p], n=n)
        for g in gradients:
            feed(opt, p, g)
        return opt.state[p]["v"]

    past, one, other = stream(8), stream(n, seed=2), stream(n, seed=3)
    assert last_v(past + one) == last_v(past + other)
    assert last_v(past + one) != last_v(past[:-1] + one[:1] + one)


def test_function_phi_per_row_equals_one_block_per_row():
    gradients = stream(12)
    p = parameter(gradients[0])
    rows = [torch.nn.Parameter(row.clone()) for row in p.detach()]
    opt = AdaShift([p], n=2, phi=lambda x: x.amax(1, keepdim=True))
    row_opts = [AdaShift([row], n=2, phi="max") for row in rows]
    for g in gradients:
        moved = feed(opt, p, g)
        by_row = [feed(o, row, x) for o, row, x in zip(row_opts, rows, g, strict=True)]
        close(moved, torch.stack(by_row))


# --- zero, infinite and missing gradients


@pytest.mark.parametrize("eps", [1e-8, 0.0])
@pytest.mark.parametrize("phi", PHIS)
def test_no_large_step_after_zero_gradients(phi, eps):
    n, lr = 3, 0.01
    p = parameter(torch.zeros(4, dtype=torch.float64))
    opt = AdaShift([p], lr=lr, n=n, phi=phi, eps=eps)
    theta = [p.detach().clone()]
    for t in range(1, 20):
        theta.append(feed(opt, p, torch.full((4,), float(t > 8), dtype=torch.float64)))
    steps = torch.stack(theta).diff(dim=0).abs()
    assert not steps[: 8 + n].any()  # v first includes a nonzero gradient, g_9, at t = 9 + n
    assert (steps[8 + n :] > 0).all()
    assert steps.max() < 10 * lr


def test_zero_v_blocks_elements_for_phi_none_and_whole_blocks_otherwise():
    gradients = [torch.tensor([0.0, 1.0])] * 4 + [torch.tensor([1.0, 1.0])]
    moved = {}
    for phi in PHIS:
        p = torch.nn.Parameter(torch.zeros(2))
        opt = AdaShift([p], n=2, phi=phi)
        for g in gradients:
            feed(opt, p, g)
        moved[phi] = (p != 0).tolist()
    assert moved == {"max": [True, True], "mean": [True, True], "none": [False, True]}


def test_intermittent_zero_gradients_match_the_reference():
    gradients = [g * (t % 5 > 2) for t, g in enumerate(stream(30))]
    for phi in PHIS:
        p = parameter(gradients[0])
        opt, oracle = AdaShift([p], n=2, phi=phi), AdaShiftReference(p, n=2, phi=phi)
        for g in gradients:
            close(feed(opt, p, g), oracle.step(g))


def test_nan_propagates_through_the_zero_check():
    p = torch.nn.Parameter(torch.zeros(1))
    opt = AdaShift([p], n=2, m=1)
    for g in (math.nan, 1.0, 1.0):
        feed(opt, p, torch.tensor([g]))
    assert p.isnan().all()


@pytest.mark.parametrize("options", [dict(betas=(0.0, 0.999)), dict(m=1)])
def test_gradients_with_zero_weight_do_not_affect_m(options):
    p = torch.nn.Parameter(torch.zeros(1))
    opt = AdaShift([p], lr=0.1, n=3, **options)
    for g in (1.0, 1.0, math.inf, 1.0):
        feed(opt, p, torch.tensor([g]))
    assert p.item() == pytest.approx(-0.1)  # m_4 = g_4 = 1, v from g_1 = 1


def test_each_parameter_has_its_own_step_count():
    n, gradients = 3, stream(40)
    early, late = parameter(gradients[0], seed=1), parameter(gradients[0], seed=2)
    opt = AdaShift([early, late], n=n)
    oracles = [AdaShiftReference(p, n=n) for p in (early, late)]
    for t, g in enumerate(gradients, start=1):
        late_has_gradient = t > 12 and t % 4 != 0
        early.grad, late.grad = g.clone(), 2 * g if late_has_gradient else None
        opt.step()
        close(early.detach(), oracles[0].step(g))
        if late_has_gradient:
            oracles[1].step(2 * g)
        close(late.detach(), oracles[1].theta)
    assert opt.state[late]["step"] < opt.state[early]["step"] == 40


def test_zero_dimensional_and_empty_parameters():
    scalar, empty = torch.nn.Parameter(torch.tensor(1.0)), torch.nn.Parameter(torch.zeros(0, 3))
    opt = AdaShift([scalar, empty], lr=0.1, n=1)
    for _ in range(2):
        scalar.grad, empty.grad = torch.tensor(2.0), torch.zeros(0, 3)
        opt.step()
    assert scalar.item() == pytest.approx(0.9)


# --- groups, schedulers and the training loop


def test_groups_differ_in_every_option():
    gradients = stream(30)
    options = [
        dict(lr=0.1, betas=(0.9, 0.99), eps=1e-3, n=2, m=1, phi="mean"),
        dict(lr=0.2, betas=(1.0, 0.9), eps=1e-8, n=5, m=3, phi="none"),
        dict(),
    ]
    params = [parameter(gradients[0], seed) for seed in range(3)]
    opt = AdaShift([{"params": [p], **o} for p, o in zip(params, options, strict=True)], n=3)
    oracles = [AdaShiftReference(p, **{"n": 3, **o}) for p, o in zip(params, options, strict=True)]
    for g in gradients:
        for p in params:
            p.grad = g.clone()
        opt.step()
        for p, oracle in zip(params, oracles, strict=True):
            close(p.detach(), oracle.step(g))


def test_window_is_exact_when_schedulers_change_lr_and_beta1():
    gradients = stream(30)
    p = parameter(gradients[0])
    opt = AdaShift([p], n=4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=40)
    oracle = AdaShiftReference(p, n=4)
    seen = set()
    for g in gradients:
        oracle.alpha, (oracle.beta1, _) = opt.param_groups[0]["lr"], opt.param_groups[0]["betas"]
        seen.add(oracle.beta1)
        close(feed(opt, p, g), oracle.step(g))
        schedule.step()
    assert len(seen) > 20


def test_tensor_lr_equals_float_lr():
    gradients = stream(8)
    a, b = parameter(gradients[0]), parameter(gradients[0])
    lr = torch.tensor(0.1, dtype=torch.float64)
    one, other = AdaShift([a], lr=lr, n=2), AdaShift([b], lr=0.1, n=2)
    for g in gradients:
        assert torch.equal(feed(one, a, g), feed(other, b, g))
    assert not torch.equal(a, parameter(gradients[0]))


def test_gradient_buffer_may_be_reused_and_is_not_modified():
    gradients = stream(10)
    p = parameter(gradients[0])
    opt, oracle = AdaShift([p], n=3), AdaShiftReference(p, n=3)
    p.grad = torch.zeros_like(p)
    for g in gradients:
        p.grad.copy_(g)
        opt.step()
        assert torch.equal(p.grad, g)
        close(p.detach(), oracle.step(g))


def test_closure_is_called_once_with_gradients_enabled():
    p = torch.nn.Parameter(torch.tensor([1.0]))
    opt = AdaShift([p], lr=0.1, n=1)
    losses = []

    def closure():
        opt.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        losses.append(loss.item())
        return loss

    assert [opt.step(closure).item() for _ in range(3)] == losses
    assert losses[0] == losses[1] == 1 > losses[2]


def test_minimizes_a_badly_scaled_quadratic():
    weak = torch.nn.Parameter(torch.full((2,), 5.0))
    strong = torch.nn.Parameter(torch.full((2,), 5.0))
    opt = AdaShift([weak, strong], lr=0.05, n=3)
    for _ in range(400):
        opt.zero_grad()
        (1e-3 * weak**2 + 1e3 * strong**2).sum().backward()
        opt.step()
    assert max(weak.abs().max(), strong.abs().max()) < 0.1


# --- checkpoints and copies


def ready(gradients, dtype, **options):
    p = parameter(gradients[0].to(dtype))
    return p, AdaShift([p], lr=0.1, **options)


def same_state(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert type(b[key]) is type(value) and type(value) in (int, float, torch.Tensor)
        if isinstance(value, torch.Tensor):
            assert value.dtype == b[key].dtype and torch.equal(value, b[key])
        else:
            assert value == b[key]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 3), (4, 2)])
def test_resumes_bit_identically_at_every_step(n, m, phi, dtype, tmp_path):
    gradients = stream(5 * n, dtype=dtype)
    p, opt = ready(gradients, dtype, n=n, m=m, phi=phi)
    files = []
    for t in range(3 * n + 1):
        files.append(tmp_path / f"{t}.pt")
        torch.save({"p": p, "opt": opt.state_dict()}, files[-1])
        feed(opt, p, gradients[t])
    for g in gradients[3 * n + 1 :]:
        feed(opt, p, g)
    for t, file in enumerate(files):
        saved = torch.load(file, weights_only=True)
        q, resumed = saved["p"], AdaShift([saved["p"]])
        resumed.load_state_dict(saved["opt"])
        for g in gradients[t:]:
            feed(resumed, q, g)
        assert torch.equal(p, q)
        same_state(opt.state[p], resumed.state[q])


def test_only_lr_and_betas_stay_tensors():
    """A scheduler may change these in place."""
    given = {name: torch.tensor(0.5) for name in ("lr", "eps", "weight_decay")}
    (group,) = AdaShift([torch.nn.Parameter(torch.zeros(1))], **given).param_groups
    assert group["lr"] is given["lr"]
    assert (type(group["eps"]), type(group["weight_decay"])) == (float, float)


def test_numpy_options_can_be_saved(tmp_path):
    options = dict(lr=np.float64(0.1), betas=np.array([0.9, 0.99]), n=np.int64(3), m=np.int64(2))
    opt = AdaShift([parameter(torch.zeros(2))], **options)
    torch.save(opt.state_dict(), tmp_path / "opt.pt")
    group = torch.load(tmp_path / "opt.pt", weights_only=True)["param_groups"][0]
    assert (group["lr"], group["betas"], group["n"], group["m"]) == (0.1, (0.9, 0.99), 3, 2)


def test_loading_a_state_dict_shares_no_memory():
    gradients = stream(20)
    (p, opt), (q, other) = (ready(gradients, torch.float64, n=3) for _ in range(2))
    oracle = AdaShiftReference(p, lr=0.1, n=3)
    for g in gradients[:8]:
        feed(opt, p, g)
        oracle.step(g)
    other.load_state_dict(opt.state_dict())
    for g in gradients[8:]:
        feed(other, q, -7 * g)
        close(feed(opt, p, g), oracle.step(g))


@pytest.mark.parametrize("t", [0, 2, 3, 7])
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_continue_equally_and_independently(clone, t):
    gradients = stream(20)
    p, opt = ready(gradients, torch.float64, n=3, m=2, phi="none")
    for g in gradients[:t]:
        feed(opt, p, g)
    q, twin = clone((p, opt))
    assert repr(twin) == repr(opt)
    assert q is twin.param_groups[0]["params"][0]
    ours = [feed(opt, p, g) for g in gradients[t:]]
    theirs = [feed(twin, q, g) for g in gradients[t:]]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0], ours[-1])


# --- invalid arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(lr=-1.0), r"lr is -1\.0; it must be in \[0, inf\), usually 0\.01"),
        (dict(lr=math.nan), r"lr is nan"),
        (dict(lr=math.inf), r"lr is inf"),
        (dict(lr="1e-3"), r"lr is '1e-3'; it must be in \[0, inf\)"),
        (dict(eps=-1e-8), r"eps is -1e-08; it must be in \[0, inf\), usually 1e-08"),
        (dict(betas=(1.1, 0.9)), r"betas\[0\] is 1\.1; it must be in \[0, 1\], usually 0\.9"),
        (dict(betas=(-0.1, 0.9)), r"betas\[0\] is -0\.1"),
        (dict(betas=(0.9, 1.0)), r"betas\[1\] is 1\.0; it must be in \[0, 1\), usually 0\.999"),
        (dict(betas=(0.9, -0.1)), r"betas\[1\] is -0\.1"),
        (dict(betas=0.9), r"betas is 0\.9; it must be two numbers"),
        (
            dict(betas=(0.9, 0.99, 0.999)),
            r"betas is \(0\.9, 0\.99, 0\.999\); it must be",
        ),
        (dict(n=0), r"n is 0; it must be an integer, 1 <= n: .*n=10"),
        (dict(n=2.5), r"n is 2\.5"),
        (dict(n=None), r"n is None"),
        (dict(n=3, m=4), r"m is 4; it must be an integer, 1 <= m <= 3: m=None means n=3"),
        (dict(m=0), r"m is 0"),
        (dict(m=1.0), r"m is 1\.0"),
        (dict(phi="median"), r"phi is 'median'; use one of max, mean, row, none"),
    ],
)
def test_invalid_options_raise_in_constructor_and_groups(options, message):
    p = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=message):
        AdaShift([p], **options)
    opt = AdaShift([p])
    with pytest.raises(ValueError, match=message):
        opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], **options})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize("name", ["keep_num", "reduce_func", "weigth_decay"])
def test_unknown_arguments_raise(name):
    with pytest.raises(TypeError, match=name):
        AdaShift([torch.nn.Parameter(torch.zeros(1))], **{name: 1})


def test_a_debugger_that_reads_locals_adds_no_option():
    def trace(frame, *_):
        frame.f_locals  # noqa: B018
        return trace

    p, before = torch.nn.Parameter(torch.zeros(1)), sys.gettrace()
    sys.settrace(trace)
    try:
        traced = AdaShift([p])
    finally:
        sys.settrace(before)
    assert traced.defaults.keys() == AdaShift([p]).defaults.keys()


def test_betas_become_a_tuple():
    p, q = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    opt = AdaShift([p], betas=[0, 0.5])
    opt.add_param_group({"params": [q], "betas": [1, 0]})
    assert opt.defaults["betas"] == (0.0, 0.5)
    assert [group["betas"] for group in opt.param_groups] == [(0.0, 0.5), (1.0, 0.0)]


def test_sparse_gradients_raise():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse_coo; AdaShift needs dense.*sparse=False"):
        AdaShift(embedding.parameters()).step()


# --- weight decay, maximize, precision


@pytest.mark.parametrize("phi", PHIS)
def test_decoupled_decay_applies_at_every_update(phi):
    n, lr, decay, gradients = 2, 0.1, 0.05, stream(9)
    p = parameter(gradients[0])
    opt = AdaShift([p], lr=lr, n=n, phi=phi, weight_decay=decay)
    oracle = AdaShiftReference(p, lr=lr, n=n, phi=phi)
    theta = p.detach().clone()
    for t, g in enumerate(gradients, start=1):
        before = oracle.theta.clone()
        step = oracle.step(g) - before
        theta = theta * (1 - lr * decay) + step if t > n else theta
        close(feed(opt, p, g), theta)


@pytest.mark.parametrize("phi", PHIS)
def test_coupled_decay_is_part_of_the_gradient(phi):
    gradients = stream(9)
    p = parameter(gradients[0])
    opt = AdaShift([p], lr=0.1, n=2, phi=phi, weight_decay=0.3, decoupled_weight_decay=False)
    oracle = AdaShiftReference(p, lr=0.1, n=2, phi=phi)
    for g in gradients:
        decayed = g + 0.3 * p.detach()
        close(feed(opt, p, g), oracle.step(decayed))


@pytest.mark.parametrize("decoupled", [True, False])
def test_maximize_ascends_and_does_not_modify_the_gradient(decoupled):
    gradients = stream(9)
    options = dict(n=2, weight_decay=0.1, decoupled_weight_decay=decoupled)
    up, down = parameter(gradients[0]), parameter(gradients[0])
    ascending, descending = AdaShift([up], maximize=True, **options), AdaShift([down], **options)
    for g in gradients:
        close(feed(ascending, up, g), feed(descending, down, -g))
        assert torch.equal(up.grad, g)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_half_precision_keeps_float32_state(dtype, size):
    """The squares of 1e-4 and 300 underflow and overflow in float16."""
    gradients = [(g * size).clamp(-400, 400).to(dtype) for g in stream(12, dtype=torch.float32)]
    p = parameter(gradients[0])
    q = torch.nn.Parameter(p.detach().float())
    opt, single = AdaShift([p], lr=0.1, n=3), AdaShift([q], lr=0.1, n=3)
    for g in gradients:
        feed(opt, p, g)
        feed(single, q, g.float())
        q.data.copy_(p.data)  # the parameter is rounded at each step, the state is not
    tensors = [x for x in opt.state[p].values() if torch.is_tensor(x)]
    assert {x.dtype for x in tensors} == {torch.float32, torch.int64} and p.dtype == dtype
    for ours, theirs in zip(opt.state[p].values(), single.state[q].values(), strict=True):
        assert ours == theirs if not torch.is_tensor(ours) else torch.equal(ours, theirs)


def test_half_precision_resumes_with_float32_state(tmp_path):
    gradients = stream(20, dtype=torch.bfloat16)
    p, opt = ready(gradients, torch.bfloat16, n=3)
    for g in gradients[:9]:
        feed(opt, p, g)
    torch.save({"p": p, "opt": opt.state_dict()}, tmp_path / "x.pt")
    saved = torch.load(tmp_path / "x.pt", weights_only=True)
    q, resumed = saved["p"], AdaShift([saved["p"]])
    resumed.load_state_dict(saved["opt"])
    same_state(opt.state[p], resumed.state[q])
    for g in gradients[9:]:
        assert torch.equal(feed(opt, p, g), feed(resumed, q, g))


@pytest.mark.parametrize("phi", PHIS)
def test_complex_parameter_equals_real_and_imaginary_parts(phi):
    gradients = stream(12, shape=(4, 2))
    real = parameter(gradients[0])
    whole = torch.nn.Parameter(torch.view_as_complex(real.detach().clone()))
    options = dict(n=3, phi=phi, weight_decay=0.1)
    one, other = AdaShift([real], **options), AdaShift([whole], **options)
    for g in gradients:
        moved = feed(other, whole, torch.view_as_complex(g))
        close(torch.view_as_real(moved), feed(one, real, g))


def test_older_checkpoints_get_default_options():
    p, opt = ready(stream(1), torch.float64)
    old = opt.state_dict()
    del old["param_groups"][0]["weight_decay"], old["param_groups"][0]["maximize"]
    opt.load_state_dict(old)
    feed(opt, p, torch.ones_like(p))
    assert opt.param_groups[0]["weight_decay"] == 0 and opt.param_groups[0]["maximize"] is False


def test_grad_scaler_skips_a_step_with_inf():
    p = torch.nn.Parameter(torch.ones(2))
    opt, scaler = AdaShift([p], lr=0.1, n=1), torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, math.inf, 1.0):
        opt.zero_grad()
        scaler.scale((factor * p).sum()).backward()
        scaler.step(opt)
        scaler.update()
    assert opt.state[p]["step"] == 2
    assert torch.allclose(p, torch.full((2,), 0.9))


def test_changing_n_during_training_raises():
    gradients = stream(5)
    p, opt = ready(gradients, torch.float64, n=3)
    feed(opt, p, gradients[0])
    opt.param_groups[0]["n"] = 2
    with pytest.raises(RuntimeError, match="n changed from 3 to 2"):
        feed(opt, p, gradients[1])
