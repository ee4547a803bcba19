import copy
import doctest
import io
import math

import pytest
import torch
from torch import nn

from adashift import AdamNC, AdaShift, SpatialOnly, probe
from adashift._readers import reader_of
from adashift._spatial import get_phi
from adashift.analysis.theory import StochasticProblem
from adashift.probe import MEAN_SQUARE_STEPS, WARM_UP_STEPS, DecorrelationProbe

FIGURE_1 = StochasticProblem(C=101, delta=0.02)


def test_doctests():
    result = doctest.testmod(probe)
    assert result.attempted > 0 and result.failed == 0


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def fed(make, gradients, reset_at=None, **options):
    """Return a probe on an optimizer of one block after the given gradients."""
    theta = nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = make([theta])
    watching = DecorrelationProbe(optimizer, names=["x"], **options)
    for t, g in enumerate(gradients):
        if t == reset_at:
            watching.reset()
        theta.grad = g.clone()
        optimizer.step()
    return watching


def number(watching, quantity, block="x"):
    return watching.results()[f"{block}/{quantity}"]


def normal(steps, *shape, seed=0):
    return torch.randn(steps, *shape, generator=seeded(seed), dtype=torch.float64)


# --- against a double sum over stored gradients


def adam_history(gradients, alpha, beta1, beta2, eps):
    """Step sizes D_i and weights c[i, t] of Adam, from its definition."""
    v, D, steps = torch.zeros_like(gradients[0]), [], len(gradients)
    c = torch.zeros(steps, steps, dtype=torch.float64)
    for i, g in enumerate(gradients):
        v = beta2 * v + (1 - beta2) * g**2
        D.append(alpha / ((v / (1 - beta2 ** (i + 1))).sqrt() + eps))
        for t in range(i + 1):
            c[i, t] = (1 - beta1) * beta1 ** (i - t) / (1 - beta1 ** (i + 1))
    return torch.stack(D), c


def adashift_history(gradients, alpha, beta1, beta2, eps, n, m, phi="none"):
    v, D, steps = torch.zeros_like(gradients[0]), [], len(gradients)
    c = torch.zeros(steps, steps, dtype=torch.float64)
    for i in range(steps):
        if i < n:  # no update
            D.append(torch.zeros_like(v))
            continue
        v = beta2 * v + (1 - beta2) * get_phi(phi)(gradients[i - n] ** 2)
        D.append(alpha / ((v / (1 - beta2 ** (i - n + 1))).sqrt() + eps))
        weights = [beta1**j for j in range(min(m, i + 1))]
        for j, weight in enumerate(weights):
            c[i, i - j] = weight / sum(weights)
    return torch.stack(D), c


def large_gradients(gradients):
    """Return 1 where g² exceeds the element's mean square before it."""
    scale, large = torch.zeros_like(gradients[0]), []
    for t, g in enumerate(gradients):
        large.append((g**2 > scale).double())
        scale = scale + (g**2 - scale) * max(1 / (t + 1), 1 / MEAN_SQUARE_STEPS)
    return torch.stack(large)


def stored_k(gradients, D, c, every=1):
    """Return k_ratio and k_effect by definition: k of every gradient, then means."""
    large, judged = large_gradients(gradients), torch.arange(len(gradients)) >= WARM_UP_STEPS
    read = torch.arange(len(gradients)) % every == 0
    weights = c[read][:, judged]
    k, total = weights.T @ D[read], weights.sum(0)[:, None].expand(-1, D.shape[1])
    typical = k.sum(0) / total.sum(0)

    def ratio(k, weight, is_large):
        mean = [(k * pick / typical).sum() / (weight * pick).sum() for pick in is_large]
        return mean[0] / mean[1]

    of_judged = large[judged]
    k_ratio = ratio(k, total, (of_judged, 1 - of_judged))
    follows = judged.clone()
    follows[1:] &= read[:-1] & (D[:-1] > 0).all(1)
    before, is_large = D[follows.roll(-1)], large[follows]
    met = ratio(before, torch.ones_like(before), (is_large, 1 - is_large))
    return k_ratio.item(), (k_ratio / met).item()


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_one_pass_equals_the_double_sum_for_adam(beta1, every):
    gradients = normal(WARM_UP_STEPS + 80, 5)
    watching = fed(lambda p: torch.optim.Adam(p, 0.01, (beta1, 0.9)), gradients, every=every)
    expected = stored_k(gradients, *adam_history(gradients, 0.01, beta1, 0.9, 1e-8), every)
    found = number(watching, "k_ratio"), number(watching, "k_effect")
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:m=inf")
@pytest.mark.parametrize(
    ("n", "m"),
    [(1, 1), (3, 2), (10, 10), (WARM_UP_STEPS + 7, 5), (10, math.inf), (44, math.inf)],
)
@pytest.mark.parametrize("beta1", [0.0, 0.9, 1.0])
def test_one_pass_equals_the_double_sum_for_adashift(beta1, n, m):
    gradients = normal(WARM_UP_STEPS + 80, 5)
    watching = fed(
        lambda p: AdaShift(p, 0.01, (beta1, 0.9), n=n, m=m, phi="none"), gradients, every=1
    )
    expected = stored_k(gradients, *adashift_history(gradients, 0.01, beta1, 0.9, 1e-8, n, m))
    found = number(watching, "k_ratio"), number(watching, "k_effect")
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("m", [3, math.inf])
def test_one_pass_equals_the_double_sum_for_rows(m):
    gradients = normal(WARM_UP_STEPS + 80, 3, 4)
    watching = fed(lambda p: AdaShift(p, 0.01, (0.5, 0.9), n=8, m=m, phi="row"), gradients)
    D, c = adashift_history(gradients, 0.01, 0.5, 0.9, 1e-8, 8, m, "row")
    expected = stored_k(gradients.flatten(1), D.flatten(1), c)
    found = number(watching, "k_ratio"), number(watching, "k_effect")
    assert found == pytest.approx(expected, rel=1e-6)


def moved_by(optimizer, theta, g):
    before = theta.detach().clone()
    theta.grad = g
    optimizer.step()
    return before - theta.detach()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, 0.01),
        lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0),
        lambda p: torch.optim.NAdam(p, 0.01),
        lambda p: torch.optim.RAdam(p, 0.01),
        lambda p: torch.optim.Adamax(p, 0.01),
        lambda p: torch.optim.RMSprop(p, 0.01),
        lambda p: torch.optim.RMSprop(p, 0.01, centered=True),
        lambda p: torch.optim.Adagrad(p, 0.01, lr_decay=0.1),
        lambda p: torch.optim.Adadelta(p, 0.01),
        lambda p: AdaShift(p, n=4, m=3),
        lambda p: AdaShift(p, n=4, phi="none"),
        lambda p: AdaShift(p, n=4, m=math.inf, betas=(0.3, 0.999), phi="row"),
        lambda p: SpatialOnly(p),
        lambda p: AdamNC(p),
    ],
    ids=lambda make: "",
)
def test_step_formula_reproduces_the_step_of_the_optimizer(make):
    """The formula that the reader returns, applied to all gradients so far, gives the real step."""
    theta = nn.Parameter(torch.ones(6, dtype=torch.float64))
    optimizer = make([theta])
    reader, gradients, memory, checked = reader_of(optimizer), [], torch.zeros(6).double(), 0
    for g in normal(30, 6):
        gradients.insert(0, g)
        movement = moved_by(optimizer, theta, g)
        state, group = optimizer.state[theta], optimizer.param_groups[0]
        step = reader.step(state, group)
        memory = step.decay * memory + step.entry * g
        if step.window:
            memory = sum(step.decay**j * g for j, g in enumerate(gradients[: step.window]))
        divisor = reader.v(state, group, lambda x: x)
        if reader.divisor is not None:
            divisor = reader.divisor(state, group, lambda x: x, g**2)
        if step.size > 0:
            checked += 1
            direction = step.gain * memory + step.now * g
            expected = step.size / (divisor.sqrt() + step.eps) * direction
            torch.testing.assert_close(movement, expected, rtol=1e-8, atol=1e-12)
    assert checked >= 25


# --- known biases


def counterexample(steps, elements, seed=0):
    draws = torch.rand(steps, elements, generator=seeded(seed))
    return torch.where(draws < FIGURE_1.p, FIGURE_1.C, -1.0)


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_counterexample_biases_adam_but_not_adashift(beta1):
    gradients, betas = counterexample(8000, 250), (beta1, 0.999)
    adam = fed(lambda p: torch.optim.Adam(p, betas=betas), gradients, reset_at=4000)
    k = [FIGURE_1.net_update_factor(g, *betas) for g in (FIGURE_1.C, -1)]
    assert k[0] / k[1] == pytest.approx(0.951, abs=1e-3)
    assert number(adam, "k_effect") == pytest.approx(k[0] / k[1], abs=0.002)
    assert number(adam, "k_ratio") == pytest.approx(k[0] / k[1], abs=0.01)
    shifted = fed(lambda p: AdaShift(p, betas=betas, phi="none"), gradients, reset_at=4000)
    assert number(shifted, "k_effect") == pytest.approx(1, abs=0.002)
    assert number(shifted, "k_ratio") == pytest.approx(1, abs=0.01)


def test_one_scalar_parameter_is_enough():
    gradients = counterexample(6000, 1)
    adam = fed(lambda p: torch.optim.Adam(p, betas=(0.0, 0.99)), gradients)
    assert number(adam, "k_effect") < 0.7
    shifted = fed(lambda p: AdaShift(p, betas=(0.0, 0.99), n=1), gradients)
    assert number(shifted, "k_effect") == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("beta2", [0.9, 0.99])
def test_independent_gradients_correlate_with_v_for_adam_only(beta2):
    gradients, betas = normal(3000, 200).float(), (0.9, beta2)
    adam = fed(lambda p: torch.optim.Adam(p, betas=betas), gradients, reset_at=500)
    assert number(adam, "correlation") == pytest.approx(math.sqrt(1 - beta2**2), abs=0.01)
    for phi in ("none", "max"):
        shifted = fed(lambda p, phi=phi: AdaShift(p, betas=betas, phi=phi), gradients, 500)
        assert abs(number(shifted, "correlation")) < 0.01
        assert number(shifted, "k_effect") == pytest.approx(1, abs=0.002)


def test_decreasing_gradients_bias_k_ratio_but_not_k_effect():
    shrinking = normal(4000, 100) * 10 ** (-torch.arange(4000) / 4000)[:, None]
    shifted = fed(lambda p: AdaShift(p, phi="none"), shrinking)
    assert number(shifted, "k_ratio") < 0.9
    assert number(shifted, "k_effect") == pytest.approx(1, abs=0.002)


# --- attached to a training


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3))


def train(net, optimizer, steps=WARM_UP_STEPS + 20, closure=False, seed=1):
    random = seeded(seed)
    for _ in range(steps):
        x, y = torch.randn(8, 20, generator=random), torch.randint(3, (8,), generator=random)

        def loss(x=x, y=y):
            optimizer.zero_grad()
            value = nn.functional.cross_entropy(net(x), y)
            value.backward()
            return value

        if closure:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()


MAKERS = {
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.01),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9),
    "adashift": lambda p: AdaShift(p, n=3),
    "endless": lambda p: AdaShift(p, n=3, m=math.inf, betas=(0.2, 0.999), phi="row"),
}


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_training_with_the_probe_is_bit_identical(make, closure):
    nets = []
    for attach in (False, True):
        net = network()
        optimizer = make(net.parameters())
        before = torch.get_rng_state()
        if attach:
            DecorrelationProbe(optimizer, elements=50)
        assert torch.equal(before, torch.get_rng_state())
        train(net, optimizer, closure=closure)
        nets.append(net)
    for a, b in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(a, b) and torch.equal(a.grad, b.grad)


def test_closure_gives_the_same_results_as_a_loop():
    found = []
    for closure in (False, True):
        net = network()
        optimizer = torch.optim.Adam(net.parameters())
        watching = DecorrelationProbe(optimizer)
        train(net, optimizer, closure=closure)
        found.append(watching.results())
    assert found[0] == found[1]
    assert not any(math.isnan(x) for x in found[0].values())


def test_blocks_are_named():
    net = network()
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]

    def named(optimizer, **options):
        return [key.split("/")[0] for key in DecorrelationProbe(optimizer, **options).results()]

    expected = [name for name in names for _ in range(3)]
    assert named(torch.optim.Adam(net.named_parameters())) == expected
    plain = torch.optim.Adam(net.parameters())
    assert named(plain, names=net.named_parameters()) == expected
    assert named(plain, names=names) == expected
    assert named(plain) == [str(i) for i in range(4) for _ in range(3)]


def test_remove_stops_the_probe_and_keeps_the_results():
    net = network()
    optimizer = torch.optim.Adam(net.parameters())
    with DecorrelationProbe(optimizer) as watching:
        train(net, optimizer)
    before = watching.results()
    train(net, optimizer, 3)
    assert watching.results() == before
    watching.remove()  # a second call is allowed


def test_reset_probe_equals_a_new_probe():
    net = network()
    optimizer = torch.optim.Adam(net.parameters())
    watching = DecorrelationProbe(optimizer)
    train(net, optimizer)
    watching.reset()
    assert all(math.isnan(x) for x in watching.results().values())
    other = DecorrelationProbe(optimizer)
    train(net, optimizer)
    assert watching.results() == other.results()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("saved_after", [3, WARM_UP_STEPS + 5])
def test_probe_resumes_bit_identically(make, saved_after):
    net = network()
    optimizer = make(net.parameters())
    watching = DecorrelationProbe(optimizer, elements=50)
    train(net, optimizer, saved_after)
    file = io.BytesIO()
    torch.save([net.state_dict(), optimizer.state_dict(), watching.state_dict()], file)
    train(net, optimizer, 150, seed=2)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = network(seed=3)
    again.load_state_dict(saved[0])
    optimizer = make(again.parameters())
    optimizer.load_state_dict(saved[1])
    resumed = DecorrelationProbe(optimizer, elements=50, seed=9)  # elements come from the state
    resumed.load_state_dict(saved[2])
    train(again, optimizer, 150, seed=2)
    assert resumed.results() == watching.results()


def test_blocks_are_independent():
    """Gradients at different times and groups with different settings do not mix."""
    streams = [normal(400, 4, seed=1), normal(400, 3, seed=2), normal(400, 5, seed=3)]
    has = [lambda t: True, lambda t: t % 3 > 0, lambda t: t >= 50]
    options = [{"lr": 0.1, "m": math.inf, "n": 44}, {"betas": (0.5, 0.9)}, {"n": 2, "phi": "none"}]
    thetas = [nn.Parameter(torch.zeros_like(g[0])) for g in streams]
    together = AdaShift([{"params": [p], **o} for p, o in zip(thetas, options, strict=True)], n=4)
    watching = DecorrelationProbe(together)
    for t in range(400):
        for p, g, there in zip(thetas, streams, has, strict=True):
            p.grad = g[t].clone() if there(t) else None
        together.step()
    for i in range(3):
        own = torch.stack([g for t, g in enumerate(streams[i]) if has[i](t)])
        alone = fed(lambda p, i=i: AdaShift(p, **{"n": 4, **options[i]}), own)
        for quantity in ("correlation", "k_ratio", "k_effect"):
            assert number(watching, quantity, str(i)) == pytest.approx(number(alone, quantity))


def test_group_that_is_added_later_is_observed():
    first, later = nn.Parameter(torch.zeros(3).double()), nn.Parameter(torch.zeros(2).double())
    optimizer = AdaShift([first], n=2)
    watching = DecorrelationProbe(optimizer, names=["first", "later"])
    streams = normal(300, 3, seed=1), normal(300, 2, seed=2)
    for t in range(300):
        if t == 150:
            optimizer.add_param_group({"params": [later], "n": 5})
        first.grad, later.grad = streams[0][t].clone(), streams[1][t].clone()
        optimizer.step()
    for name, own, n in (("first", streams[0], 2), ("later", streams[1][150:], 5)):
        alone = fed(lambda p, n=n: AdaShift(p, n=n), own)
        for quantity in ("correlation", "k_ratio", "k_effect"):
            assert number(watching, quantity, name) == pytest.approx(number(alone, quantity))


def test_scheduled_beta1_is_respected():
    gradients = normal(WARM_UP_STEPS + 60, 3)

    def beta1(t):
        return 0.9 if t < WARM_UP_STEPS + 20 else 0.5

    theta = nn.Parameter(torch.zeros(3).double())
    optimizer = AdaShift([theta], n=4, phi="none")
    watching = DecorrelationProbe(optimizer)
    for t, g in enumerate(gradients):
        optimizer.param_groups[0]["betas"] = (beta1(t), 0.999)
        theta.grad = g.clone()
        optimizer.step()
    before, after = (adashift_history(gradients, 0.01, b, 0.999, 1e-8, 4, 4) for b in (0.9, 0.5))
    late = torch.arange(len(gradients)) >= WARM_UP_STEPS + 20
    c = torch.where(late[:, None], after[1], before[1])
    expected = stored_k(gradients, before[0], c)
    found = number(watching, "k_ratio", "0"), number(watching, "k_effect", "0")
    assert found == pytest.approx(expected, rel=1e-6)


def test_coupled_weight_decay_is_part_of_the_gradient():
    """With g = 0 the only gradient is that of the weight decay."""
    theta = nn.Parameter(torch.tensor([2.0, 3.0]))
    for make in (torch.optim.Adam, torch.optim.AdamW):
        optimizer = make([theta], lr=0.0, weight_decay=0.1, maximize=True)
        watching = DecorrelationProbe(optimizer)
        theta.grad = torch.tensor([0.5, 0.0])
        optimizer.step()
        expected = [-0.3, 0.3] if make is torch.optim.Adam else [0.5, 0.0]
        assert watching.state_dict()["vectors"]["g"].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("make", [torch.optim.Adam, AdaShift])
def test_half_precision_and_complex_parameters(make, dtype):
    gradients = torch.randn(2000, 40, generator=seeded(), dtype=dtype)
    watching = fed(lambda p: make(p, betas=(0.0, 0.9)), gradients, reset_at=100)
    expected = math.sqrt(1 - 0.9**2) if make is torch.optim.Adam else 0
    assert number(watching, "correlation") == pytest.approx(expected, abs=0.02)


def test_noncontiguous_gradient_gives_the_same_elements():
    gradients = [g.t() for g in normal(300, 30, 20)]
    found = []
    for stream in (gradients, [g.contiguous() for g in gradients]):
        theta = nn.Parameter(torch.zeros(20, 30).double())
        optimizer = torch.optim.Adam([theta])
        watching = DecorrelationProbe(optimizer, elements=64)
        for g in stream:
            theta.grad = g
            optimizer.step()
        found.append(watching.results())
    assert found[0] == found[1]


def test_elements_without_gradients_are_ignored():
    gradients = normal(400, 6)
    some = gradients.clone()
    some[:, 3:] = 0
    assert fed(torch.optim.Adam, some).results() == pytest.approx(
        fed(torch.optim.Adam, gradients[:, :3]).results()
    )


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Rprop, torch.optim.LBFGS])
def test_optimizer_without_a_second_moment_raises(make):
    optimizer = make([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(TypeError, match=r"has no second moment.*AdaShift.*Adam"):
        DecorrelationProbe(optimizer)


class CustomOptimizer(torch.optim.Optimizer):
    """A user's optimizer with one second moment."""

    def __init__(self, params, key):
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8})
        self.key = key

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update({"step": 0, self.key: torch.zeros_like(p)})
            state["step"] += 1
            state[self.key].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)


def test_unknown_optimizer_with_adam_state_is_supported():
    gradients = normal(300, 4)
    theirs = fed(lambda p: CustomOptimizer(p, "exp_avg_sq"), gradients)
    adam = fed(lambda p: torch.optim.Adam(p, 0.1, (0.9, 0.99)), gradients)
    assert theirs.results() == pytest.approx(adam.results())
    with pytest.raises(TypeError, match="CustomOptimizer has no second moment"):
        fed(lambda p: CustomOptimizer(p, "something"), gradients)


def test_sparse_gradients_raise():
    theta = nn.Parameter(torch.zeros(4, 2))
    optimizer = torch.optim.Adagrad([theta])
    DecorrelationProbe(optimizer)
    theta.grad = torch.eye(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()


@pytest.mark.parametrize("option", ["every", "elements"])
def test_invalid_options_raise(option):
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match=f"{option} is 0"):
        DecorrelationProbe(optimizer, **{option: 0})


def test_checkpoint_of_another_net_raises():
    small, large = (torch.optim.Adam([nn.Parameter(torch.zeros(n))]) for n in (2, 3))
    with pytest.raises(ValueError, match="in the checkpoint and"):
        DecorrelationProbe(small).load_state_dict(DecorrelationProbe(large).state_dict())


def test_gradients_scaled_for_a_fused_optimizer_are_unscaled():
    found = []
    for scale in (None, 1024.0):
        theta = nn.Parameter(torch.zeros(5))
        optimizer = torch.optim.Adam([theta], fused=True)
        watching = DecorrelationProbe(optimizer)
        for g in normal(200, 5).float():
            theta.grad = g * (scale or 1)
            if scale:
                optimizer.grad_scale = torch.tensor(scale)
                optimizer.found_inf = torch.tensor(0.0)
            optimizer.step()
        if scale:
            before = copy.deepcopy(watching.state_dict())
            optimizer.found_inf = torch.tensor(1.0)
            optimizer.step()
            assert watching.state_dict()["counts"] == before["counts"]
        found.append(watching.results())
    assert found[0] == pytest.approx(found[1], rel=1e-5)
