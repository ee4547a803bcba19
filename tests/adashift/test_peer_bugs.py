"""Mistakes that are easy to make in an implementation of AdaShift; each is shown not to be here."""

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


def walk(gradients, shape=(1,), **options):
    """All positions from 0 on under these gradients."""
    p = zeros(*shape)
    opt = AdaShift([p], **options)
    return torch.stack([p.detach().clone(), *(feed(opt, p, g) for g in gradients)])


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_keeps_every_option(clone):
    options = dict(lr=0.3, betas=(0.5, 0.7), eps=1e-3, n=3, m=2, phi="mean")
    options |= dict(weight_decay=0.1, decoupled_weight_decay=False, maximize=True)
    _, twin = clone((p := zeros(2), AdaShift([p], **options)))
    assert {key: twin.defaults[key] for key in options} == options
    assert {key: twin.param_groups[0][key] for key in options} == options
    q = twin.param_groups[0]["params"][0]
    for _ in range(4):
        feed(twin, q, 1.0)
    assert (q > 0).all()  # still climbs


def test_first_step_of_a_late_parameter_is_not_too_large():
    """Corrected for the optimizer's steps instead of its own, v would be too small by far."""
    early, late = zeros(1), zeros(1)
    opt = AdaShift([early, late], lr=0.01, n=2)
    for t in range(53):
        early.grad = torch.ones_like(early)
        late.grad = torch.ones_like(late) if t >= 50 else None
        opt.step()
    assert late.item() == pytest.approx(-0.01)


def test_no_leap_of_an_element_that_was_dead_and_gets_a_small_gradient():
    path = walk([[0.0, 1.0]] * 6 + [[1e-3, 1.0]] * 6, (2,), lr=0.01, n=2, phi="none")
    assert path.diff(dim=0).abs().max() < 0.3 and path[-1, 0] != 0


def test_phi_of_a_group_is_not_ignored():
    """With gradients (3, 4): √v̂ is 4 for max, √12.5 for mean, each its own for none."""
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


def test_window_weights_of_a_group_are_its_own():
    """β1 and n of the constructor must not be used for a group that has others."""
    p, gradients = zeros(1), [1.0, -3.0, 2.0, 5.0, -1.0, 4.0, 2.0]
    opt = AdaShift([{"params": [p], "n": 3, "betas": (0.5, 0.9)}], n=2, betas=(0.9, 0.999))
    oracle = AdaShiftReference(p, n=3, betas=(0.5, 0.9))
    for g in gradients:
        expected = oracle.step(torch.tensor([g], dtype=torch.float64))
        torch.testing.assert_close(feed(opt, p, g), expected, rtol=1e-12, atol=0)
    assert p.item() != 0


@pytest.mark.parametrize("maximize", [True, False])
def test_two_steps_with_one_gradient_go_the_same_way(maximize):
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
def test_n_changed_in_mid_run_is_said_and_changes_nothing(phi):
    p = zeros(2)
    opt = AdaShift([p], n=2, phi=phi)
    for _ in range(5):
        feed(opt, p, 1.0)
    before, steps = p.detach().clone(), opt.state[p]["step"]
    opt.param_groups[0]["n"] = 4
    with pytest.raises(RuntimeError, match="n was changed from 2 to 4"):
        feed(opt, p, 1.0)
    assert torch.equal(p, before) and opt.state[p]["step"] == steps
    opt.param_groups[0]["n"] = 2
    assert not torch.equal(feed(opt, p, 1.0), before)


def test_m_changed_in_mid_run_is_said():
    for old, new in ((3, 2), (2, 3), (1, 3), (None, 1)):
        p = zeros(2)
        opt = AdaShift([p], n=3, m=old)
        feed(opt, p, 1.0)
        opt.param_groups[0]["m"] = new
        with pytest.raises(RuntimeError, match="m was changed"):
            feed(opt, p, 1.0)


def test_cyclic_beta1_keeps_the_window_an_average():
    """A constant gradient has itself as average, whatever β1 is at each step."""
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
def test_one_inf_harms_only_the_element_that_had_it(m):
    n, gradients = 3, [[1.0, 1.0]] * 5 + [[math.inf, 1.0]] + [[1.0, 1.0]] * 12
    path = walk(gradients, (2,), lr=0.1, n=n, m=m, phi="none")
    torch.testing.assert_close(path[-1, 1].item(), -0.1 * (len(gradients) - n))


@pytest.mark.parametrize("phi", PHIS)
def test_one_inf_leaves_the_window_again(phi):
    """Only the sums of gradients are looked at: v keeps an inf, as it does in the equation."""
    p = zeros(2)
    opt = AdaShift([p], n=4, m=3, phi=phi)
    for t in range(20):
        feed(opt, p, [math.inf if t == 5 else 1.0, 1.0])
    assert opt.state[p]["sum"].isfinite().all() and opt.state[p]["slots"].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-4, 300.0])
@pytest.mark.parametrize("phi", PHIS)
def test_squares_neither_vanish_nor_overflow_in_half_precision(phi, size, dtype):
    p = zeros(3, dtype=dtype)
    opt = AdaShift([p], lr=0.125, n=2, phi=phi)
    for _ in range(4):
        feed(opt, p, size)
    torch.testing.assert_close(p.detach().float(), torch.full((3,), -0.25), rtol=0.01, atol=0)


def test_an_empty_parameter_does_not_stop_the_others():
    for phi in PHIS:
        empty, full = zeros(0), zeros(1)
        opt = AdaShift([empty, full], n=1, phi=phi)
        for _ in range(2):
            empty.grad = torch.zeros_like(empty)
            feed(opt, full, 1.0)
        assert full.item() < 0


@pytest.mark.parametrize(
    ("phi", "gave"),
    [
        (lambda x: x.max(1), "max"),
        (lambda x: x.max(1, keepdim=True), "max"),
        (lambda x: x.amax(1), r"\(2,\)"),
        (lambda x: x.max().item(), "float"),
    ],
)
def test_a_phi_of_wrong_result_is_named_as_the_cause(phi, gave):
    p = zeros(2, 3)
    with pytest.raises(ValueError, match=rf"phi gave .*{gave}.*gradient of shape \(2, 3\)"):
        feed(AdaShift([p], n=1, phi=phi), p, 1.0)


@pytest.mark.parametrize(("n", "m"), [(10, 10), (10, 2), (40, 1)])
@pytest.mark.parametrize("phi", ["max", "mean"])
def test_state_holds_m_plus_1_gradients_and_numbers(phi, n, m):
    size = 1000
    p = zeros(size)
    opt = AdaShift([p], n=n, m=m, phi=phi)
    for t in range(2 * n + 2):
        feed(opt, p, float(t % 3))
    elements = sum(x.numel() for x in opt.state[p].values() if torch.is_tensor(x))
    assert elements <= (m + 1 if m > 1 else 0) * size + n + m + 5
    assert elements > n  # the φ(g²) are there


@pytest.mark.parametrize("phi", PHIS)
def test_defaults_neither_give_nan_nor_divide_by_zero_at_steps_n_and_after(phi):
    path = walk([1.0] * 13, phi=phi)  # n = 10
    assert not path[:11].any()
    torch.testing.assert_close(path[11:, 0], -0.01 * torch.arange(1.0, 4.0, dtype=path.dtype))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_zero_gradients_from_the_start_never_give_nan(n):
    for phi in PHIS:
        path = walk([0.0] * (3 * n), n=n, phi=phi, eps=0.0)
        assert torch.equal(path, torch.zeros_like(path))


def test_v_is_of_the_gradient_n_steps_ago_and_not_of_a_newer_one():
    """β2 = 0 leaves v_t = g_{t-n}²; m = 1 leaves m_t = g_t."""
    gradients = [2.0, 3.0, 5.0, 7.0, 11.0, 13.0]
    for n in (1, 2, 3):
        path = walk(gradients, lr=1.0, betas=(0.9, 0.0), eps=0, n=n, m=1)
        ratios = [new / old for new, old in zip(gradients[n:], gradients, strict=False)]
        assert (-path.diff(dim=0)[n:, 0]).tolist() == pytest.approx(ratios)


def test_first_moment_has_no_tail_beyond_the_window():
    """Two pasts that differ only before the window (and not in v) give one and the same step."""
    steps = []
    for sign in (1.0, -1.0):
        gradients = [sign * 100.0] * 7 + [1.0, 2.0, 4.0, 8.0]
        steps.append(walk(gradients, n=4, m=3).diff(dim=0)[-1].item())
    assert steps[0] == steps[1] < 0


@pytest.mark.parametrize("beta1", [0.9, 0.99, 1.0])
def test_first_moment_is_whole_at_the_first_update(beta1):
    """The gradients of the waiting time belong to m: a constant gradient gives whole steps."""
    path = walk([1.0] * 40, lr=0.01, betas=(beta1, 0.999), n=10)
    expected = -0.01 * torch.arange(31, dtype=path.dtype)
    torch.testing.assert_close(path[10:, 0], expected, rtol=1e-7, atol=0)


def test_resume_neither_stops_updates_nor_lets_the_state_grow():
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


def test_step_builds_no_graph_and_gives_no_warning():
    p = zeros(2)
    opt = AdaShift([p], n=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            feed(opt, p, 1.0)
    tensors = [p.grad, *(x for x in opt.state[p].values() if torch.is_tensor(x))]
    assert p.is_leaf and p.requires_grad and not any(x.requires_grad for x in tensors)


def test_remembered_gradients_are_not_squared_in_place():
    """n = m = 2, β1 = 1: the second step averages g_3 and g_4 themselves."""
    path = walk([-3.0, -3.0, -3.0, -3.0, -3.0], lr=0.1, betas=(1.0, 0.9), n=2)
    assert path.diff(dim=0)[2:, 0].tolist() == pytest.approx([0.1] * 3)
