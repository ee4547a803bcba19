import copy
import doctest
import math

import pytest
import torch

from adashift import AdamNC, SpatialOnly, baselines

RULES = [AdamNC, SpatialOnly]


def stream(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(length, 2, 3, generator=generator, dtype=torch.float64)
    return list(g * torch.linspace(0, 3, length, dtype=torch.float64).exp().view(-1, 1, 1))


def parameter():
    return torch.nn.Parameter(torch.arange(6, dtype=torch.float64).view(2, 3))


def feed(opt, p, g):
    p.grad = g.clone()
    opt.step()
    return p.detach().clone()


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_doctests():
    result = doctest.testmod(baselines)
    assert result.attempted > 0 and result.failed == 0


def average(gradients, beta1):
    """Adam's bias-corrected m_t, from all gradients at once."""
    w = [beta1**i for i in reversed(range(len(gradients)))]
    return sum(w_i * g for w_i, g in zip(w, gradients, strict=True)) / sum(w)


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_adamnc_divides_by_the_root_mean_square_of_all_gradients(beta1):
    gradients, lr, eps = stream(40), 0.1, 1e-2
    p = parameter()
    opt, theta = AdamNC([p], lr=lr, beta1=beta1, eps=eps), p.detach().clone()
    for t, g in enumerate(gradients, start=1):
        v = torch.stack(gradients[:t]).square().mean(0)
        theta = theta - lr * average(gradients[:t], beta1) / (v.sqrt() + eps)
        close(feed(opt, p, g), theta)


@pytest.mark.parametrize("betas", [(0.0, 0.999), (0.9, 0.99)])
def test_spatial_only_with_phi_none_is_adam(betas):
    gradients, p, q = stream(40), parameter(), parameter()
    ours = SpatialOnly([p], lr=0.1, betas=betas, eps=1e-2, phi="none")
    adam = torch.optim.Adam([q], lr=0.1, betas=betas, eps=1e-2)
    for g in gradients:
        close(feed(ours, p, g), feed(adam, q, g))
    assert not torch.equal(p, parameter())


@pytest.mark.parametrize(("phi", "reduce"), [("max", torch.max), ("mean", torch.mean)])
def test_spatial_only_uses_phi_of_the_current_gradient(phi, reduce):
    gradients, lr, eps, (beta1, beta2) = stream(40), 0.1, 1e-2, (0.9, 0.99)
    p = parameter()
    opt, theta = SpatialOnly([p], lr, (beta1, beta2), eps, phi=phi), p.detach().clone()
    for t, g in enumerate(gradients, start=1):
        v = average([reduce(x**2) for x in gradients[:t]], beta2)
        theta = theta - lr * average(gradients[:t], beta1) / (v.sqrt() + eps)
        close(feed(opt, p, g), theta)


def test_spatial_only_stores_one_scalar_per_block():
    p = parameter()
    opt = SpatialOnly([p])
    feed(opt, p, torch.ones_like(p))
    assert opt.defaults["phi"] == "max" and opt.state[p]["v"].shape == ()


@pytest.mark.parametrize("rule", RULES)
def test_first_step_is_lr_times_sign_for_equal_sizes(rule):
    p = torch.nn.Parameter(torch.zeros(2))
    moved = feed(rule([p], lr=0.1), p, torch.tensor([3.0, -3.0]))
    assert moved.tolist() == pytest.approx([-0.1, 0.1])


@pytest.mark.parametrize("rule", RULES)
def test_zero_gradients_change_nothing(rule):
    p = parameter()
    opt = rule([p])
    for _ in range(5):
        assert torch.equal(feed(opt, p, torch.zeros_like(p)), parameter())


@pytest.mark.parametrize("rule", RULES)
def test_late_parameter_has_its_own_step_count(rule):
    gradients, p, late, alone = stream(20), parameter(), parameter(), parameter()
    both, one = rule([p, late]), rule([alone])
    for t, g in enumerate(gradients):
        p.grad = g.clone()
        late.grad = g.clone() if t >= 10 else None
        both.step()
        if t >= 10:
            assert torch.equal(late.detach(), feed(one, alone, g))
    assert not torch.equal(late, parameter())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("t", [0, 1, 5])
def test_checkpoints_and_copies_continue_bit_identically(rule, t, tmp_path):
    gradients, p = stream(10), parameter()
    opt = rule([p], lr=0.1)
    for g in gradients[:t]:
        feed(opt, p, g)
    torch.save({"p": p, "opt": opt.state_dict()}, tmp_path / "run.pt")
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    q, resumed = saved["p"], rule([saved["p"]])
    resumed.load_state_dict(saved["opt"])
    r, twin = copy.deepcopy((p, opt))
    for g in gradients[t:]:
        ours = feed(opt, p, g)
        assert torch.equal(ours, feed(resumed, q, g))
        assert torch.equal(ours, feed(twin, r, g))
    assert not torch.equal(p, parameter())


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (AdamNC, dict(lr=-1.0), r"lr is -1\.0; it must be in \[0, inf\), usually 0\.001"),
        (AdamNC, dict(beta1=1.0), r"beta1 is 1\.0; it must be in \[0, 1\), usually 0\.9"),
        (AdamNC, dict(beta1=(0.9, 0.999)), r"beta1 is \(0\.9, 0\.999\)"),
        (AdamNC, dict(eps=-1.0), r"eps is -1\.0"),
        (SpatialOnly, dict(lr=math.nan), r"lr is nan"),
        (SpatialOnly, dict(betas=(1.0, 0.9)), r"betas\[0\] is 1\.0; it must be in \[0, 1\), usual"),
        (SpatialOnly, dict(betas=(0.9, 1.0)), r"betas\[1\] is 1\.0"),
        (SpatialOnly, dict(eps="0"), r"eps is '0'"),
        (SpatialOnly, dict(phi="sum"), r"phi is 'sum'"),
    ],
)
def test_invalid_options_raise(rule, options, message):
    with pytest.raises(ValueError, match=message):
        rule([parameter()], **options)


@pytest.mark.parametrize(("rule", "name"), [(AdamNC, "betas"), (AdamNC, "phi"), (SpatialOnly, "n")])
def test_unknown_arguments_raise(rule, name):
    with pytest.raises(TypeError, match=name):
        rule([parameter()], **{name: 1})


@pytest.mark.parametrize("rule", RULES)
def test_sparse_gradients_raise(rule):
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=f"{rule.__name__} needs dense gradients"):
        rule(embedding.parameters()).step()
