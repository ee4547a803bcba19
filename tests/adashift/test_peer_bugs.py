"""Mistakes that are easy to make in an implementation of AdaShift, with one test for each."""

import copy
import math
import pickle
import warnings

import pytest
import torch

from adashift import AdaShift
from adashift.reference import AdaShiftReference

PHIS = ["max", "mean", "none"]


def zeros(*shape, dtype=torch.float64):
    return torch.nn.Parameter(torch.zeros(*shape, dtype=dtype))


def feed(opt, p, g):
    p.grad = torch.as_tensor(g, dtype=p.dtype).expand_as(p).clone()
    opt.step()
    return p.detach().clone()


def positions_after(gradients, shape=(1,), **options):
    """Return the parameter before and after each step, starting at 0."""
    p = zeros(*shape)
    opt = AdaShift([p], **options)
    return torch.stack([p.detach().clone(), *(feed(opt, p, g) for g in gradients)])


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copy_keeps_every_option(clone):
    options = dict(lr=0.3, betas=(0.5, 0.7), eps=1e-3, n=3, m=2, phi="mean")
    options |= dict(weight_decay=0.1, decoupled_weight_decay=False, maximize=True)
    _, twin = clone((p := zeros(2), AdaShift([p], **options)))
    assert {key: twin.defaults[key] for key in options} == options
    assert {key: twin.param_groups[0][key] for key in options} == options
    q = twin.param_groups[0]["params"][0]
    for _ in range(4):
        feed(twin, q, 1.0)
    assert (q > 0).all()  # still ascends


def test_first_step_of_a_late_parameter_uses_its_own_step_count():
    """Bias correction with the optimizer's step count would make v far too small."""
    early, late = zeros(1), zeros(1)
    opt = AdaShift([early, late], lr=0.01, n=2)
    for t in range(53):
        early.grad = torch.ones_like(early)
        late.grad = torch.ones_like(late) if t >= 50 else None
        opt.step()
    assert late.item() == pytest.approx(-0.01)


def test_small_gradient_after_zero_gradients_gives_no_large_step():
    path = positions_after([[0.0, 1.0]] * 6 + [[1e-3, 1.0]] * 6, (2,), lr=0.01, n=2, phi="none")
    assert path.diff(dim=0).abs().max() < 0.3 and path[-1, 0] != 0


def test_phi_of_a_group_is_not_ignored():
    """With gradients (3, 4): √v̂ is 4 for max, √12.5 for mean, element-wise for none."""
    params = [zeros(2) for _ in PHIS]
    groups = [{"params": [p], "phi": phi} for p, phi in zip(params, PHIS, strict=True)]
    opt = AdaShift(groups, lr=1.0, n=1, phi=lambda x: x.min())
    for _ in range(2):
        for p in params:
            p.grad = torch.tensor([3.0, 4.0], dtype=p.dtype)
        opt.step()
    g = torch.tensor([3.0, 4.0], dtype=torch.float64)
    expected = [g / 4, g / math.sqrt(12.5), g / g]
    for p, step in zip(params, expected, strict=True):
        torch.testing.assert_close(-p.detach(), step, rtol=1e-7, atol=0)


def test_window_uses_the_options_of_its_group():
    """β1 and n of the constructor do not apply to a group that overrides them."""
    p, gradients = zeros(1), [1.0, -3.0, 2.0, 5.0, -1.0, 4.0, 2.0]
    opt = AdaShift([{"params": [p], "n": 3, "betas": (0.5, 0.9)}], n=2, betas=(0.9, 0.999))
    oracle = AdaShiftReference(p, n=3, betas=(0.5, 0.9))
    for g in gradients:
        expected = oracle.step(torch.tensor([g], dtype=torch.float64))
        torch.testing.assert_close(feed(opt, p, g), expected, rtol=1e-12, atol=0)
    assert p.item() != 0


@pytest.mark.parametrize("maximize", [True, False])
def test_repeated_steps_with_one_gradient_have_the_same_direction(maximize):
    p = zeros(1)
    opt = AdaShift([p], lr=0.1, n=1, maximize=maximize)
    p.grad = torch.ones_like(p)
    positions = []
    for _ in range(4):
        opt.step()
        positions.append(p.item() * (1 if maximize else -1))
    assert p.grad.item() == 1
    assert positions == pytest.approx([0.0, 0.1, 0.2, 0.3])


@pytest.mark.parametrize("phi", PHIS)
def test_changing_n_during_training_raises_and_changes_nothing(phi):
    p = zeros(2)
    opt = AdaShift([p], n=2, phi=phi)
    for _ in range(5):
        feed(opt, p, 1.0)
    before, steps = p.detach().clone(), opt.state[p]["step"]
    opt.param_groups[0]["n"] = 4
    with pytest.raises(RuntimeError, match="n changed from 2 to 4"):
        feed(opt, p, 1.0)
    assert torch.equal(p, before) and opt.state[p]["step"] == steps
    opt.param_groups[0]["n"] = 2
    assert not torch.equal(feed(opt, p, 1.0), before)


def test_changing_m_during_training_raises():
    for old, new in ((3, 2), (2, 3), (1, 3), (None, 1)):
        p = zeros(2)
        opt = AdaShift([p], n=3, m=old)
        feed(opt, p, 1.0)
        opt.param_groups[0]["m"] = new
        with pytest.raises(RuntimeError, match="m changed from"):
            feed(opt, p, 1.0)


def test_cyclic_beta1_keeps_the_window_an_average():
    """The average of a constant gradient is that gradient for every β1."""
    p = zeros(1)
    opt = AdaShift([p], lr=0.1, n=4, eps=0)
    schedule = torch.optim.lr_scheduler.CyclicLR(opt, 0.1, 0.1, step_size_up=3)
    path, seen = [0.0], set()
    for _ in range(30):
        path.append(feed(opt, p, 2.0).item())
        schedule.step()
        seen.add(opt.param_groups[0]["betas"][0])
    assert len(seen) > 3
    steps = -torch.tensor(path, dtype=torch.float64).diff()[4:]
    torch.testing.assert_close(steps, torch.full_like(steps, 0.1), rtol=1e-10, atol=0)


@pytest.mark.parametrize("m", [1, 2, 3])
def test_inf_affects_only_its_own_element(m):
    n, gradients = 3, [[1.0, 1.0]] * 5 + [[math.inf, 1.0]] + [[1.0, 1.0]] * 12
    path = positions_after(gradients, (2,), lr=0.1, n=n, m=m, phi="none")
    torch.testing.assert_close(path[-1, 1].item(), -0.1 * (len(gradients) - n))


@pytest.mark.parametrize("phi", PHIS)
def test_inf_leaves_the_window(phi):
    """g_4 has left the window at the first update, t = 7, and enters v at t = 10."""
    finite = [[1.0, 2.0]] * 9
    with_inf = [*finite[:3], [math.inf, 2.0], *finite[4:]]
    paths = [positions_after(g, (2,), n=6, m=3, phi=phi) for g in (finite, with_inf)]
    torch.testing.assert_close(*paths, rtol=1e-6, atol=0)
    assert paths[0][-1].all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-4, 300.0])
@pytest.mark.parametrize("phi", PHIS)
def test_squares_do_not_underflow_or_overflow_in_half_precision(phi, size, dtype):
    p = zeros(3, dtype=dtype)
    opt = AdaShift([p], lr=0.125, n=2, phi=phi)
    for _ in range(4):
        feed(opt, p, size)
    torch.testing.assert_close(p.detach().float(), torch.full((3,), -0.25), rtol=0.01, atol=0)


def test_empty_parameter_does_not_affect_others():
    for phi in PHIS:
        empty, full = zeros(0), zeros(1)
        opt = AdaShift([empty, full], n=1, phi=phi)
        for _ in range(2):
            empty.grad = torch.zeros_like(empty)
            feed(opt, full, 1.0)
        assert full.item() < 0


@pytest.mark.parametrize(
    ("phi", "returned"),
    [
        (lambda x: x.max(1), "max"),
        (lambda x: x.max(1, keepdim=True), "max"),
        (lambda x: x.amax(1), r"\(2,\)"),
        (lambda x: x.max().item(), "float"),
    ],
)
def test_invalid_result_of_phi_raises(phi, returned):
    p = zeros(2, 3)
    with pytest.raises(ValueError, match=rf"phi returned .*{returned}.*gradient of shape \(2, 3\)"):
        feed(AdaShift([p], n=1, phi=phi), p, 1.0)


@pytest.mark.parametrize(("n", "m"), [(10, 10), (10, 2), (40, 1)])
@pytest.mark.parametrize("phi", ["max", "mean"])
def test_state_size_is_m_plus_1_gradients_and_scalars(phi, n, m):
    size = 1000
    p = zeros(size)
    opt = AdaShift([p], n=n, m=m, phi=phi)
    for t in range(2 * n + 2):
        feed(opt, p, float(t % 3))
    elements = sum(x.numel() for x in opt.state[p].values() if torch.is_tensor(x))
    assert elements <= (m + 1 if m > 1 else 0) * size + n + m + 5
    assert elements > n  # includes the φ(g²)


@pytest.mark.parametrize("phi", PHIS)
def test_defaults_give_no_nan_at_step_n_and_after(phi):
    path = positions_after([1.0] * 13, phi=phi)  # n = 10
    assert not path[:11].any()
    torch.testing.assert_close(path[11:, 0], -0.01 * torch.arange(1.0, 4.0, dtype=path.dtype))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_zero_gradients_from_the_start_never_give_nan(n):
    for phi in PHIS:
        path = positions_after([0.0] * (3 * n), n=n, phi=phi, eps=0.0)
        assert torch.equal(path, torch.zeros_like(path))


def test_v_uses_the_gradient_from_exactly_n_steps_ago():
    """β2 = 0 leaves v_t = g_{t-n}²; m = 1 leaves m_t = g_t."""
    gradients = [2.0, 3.0, 5.0, 7.0, 11.0, 13.0]
    for n in (1, 2, 3):
        path = positions_after(gradients, lr=1.0, betas=(0.9, 0.0), eps=0, n=n, m=1)
        ratios = [new / old for new, old in zip(gradients[n:], gradients, strict=False)]
        assert (-path.diff(dim=0)[n:, 0]).tolist() == pytest.approx(ratios)


def test_first_moment_has_no_tail_beyond_the_window():
    """Gradients before the window affect v only, so changing their sign changes nothing."""
    steps = []
    for sign in (1.0, -1.0):
        gradients = [sign * 100.0] * 7 + [1.0, 2.0, 4.0, 8.0]
        steps.append(positions_after(gradients, n=4, m=3).diff(dim=0)[-1].item())
    assert steps[0] == steps[1] < 0


@pytest.mark.parametrize("beta1", [0.9, 0.99, 1.0])
def test_first_moment_is_complete_at_the_first_update(beta1):
    """The first n gradients belong to m, so a constant gradient gives full steps."""
    path = positions_after([1.0] * 40, lr=0.01, betas=(beta1, 0.999), n=10)
    expected = -0.01 * torch.arange(31, dtype=path.dtype)
    torch.testing.assert_close(path[10:, 0], expected, rtol=1e-7, atol=0)


def test_resumed_optimizer_updates_and_keeps_its_state_size():
    p = zeros(3)
    opt = AdaShift([p], lr=0.1, n=3)
    for _ in range(5):
        feed(opt, p, 1.0)
    resumed = AdaShift([p], lr=0.1, n=3)
    resumed.load_state_dict(opt.state_dict())
    keys = set(resumed.state[p])
    for _ in range(10):
        before = p.detach().clone()
        assert (feed(resumed, p, 1.0) < before).all()
    assert set(resumed.state[p]) == keys


def test_step_builds_no_graph_and_does_not_warn():
    p = zeros(2)
    opt = AdaShift([p], n=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            feed(opt, p, 1.0)
    tensors = [p.grad, *(x for x in opt.state[p].values() if torch.is_tensor(x))]
    assert p.is_leaf and p.requires_grad and not any(x.requires_grad for x in tensors)


def test_stored_gradients_are_not_squared_in_place():
    """n = m = 2, β1 = 1: the second step averages g_3 and g_4 themselves."""
    path = positions_after([-3.0, -3.0, -3.0, -3.0, -3.0], lr=0.1, betas=(1.0, 0.9), n=2)
    assert path.diff(dim=0)[2:, 0].tolist() == pytest.approx([0.1] * 3)
