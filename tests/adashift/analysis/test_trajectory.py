"""The filter form gives the same parameters as the optimizers, step by step."""

import doctest
from functools import partial
from itertools import product
from math import inf

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from adashift import AdamNC, AdaShift, SpatialOnly
from adashift.analysis import trajectory
from adashift.analysis.theory import StochasticProblem
from adashift.analysis.trajectory import NotLinear, chain_of, parameter_path

pytestmark = pytest.mark.filterwarnings("ignore:m=inf")  # with a small n

SGD, Adam, NAdam = torch.optim.SGD, torch.optim.Adam, torch.optim.NAdam
BOX = (-1.0, 1.0)
BETAS = [(0.0, 0.999), (0.9, 0.999), (0.9999, 0.999), (0.9, 0.5)]
WINDOWS = [(1, None), (1, 1), (2, None), (2, 1), (10, None), (10, 1), (10, 3)]
COUNTEREXAMPLE = StochasticProblem(C=101, delta=0.02)
STEPS = 203

# lr is large enough for steps beyond the bounds [-1, 1].
OPTIMIZERS = {
    "SGD": partial(SGD, lr=0.7),
    "Momentum": partial(SGD, lr=0.3, momentum=0.9),
    "dampened Momentum": partial(SGD, lr=1.5, momentum=0.9, dampening=0.4),
    "averaging Momentum": partial(SGD, lr=1.5, momentum=0.9, dampening=0.9),
    "dampening without momentum": partial(SGD, lr=0.7, dampening=0.4),
    "Adam, eps 1": partial(Adam, lr=2.0, eps=1.0),
    "Adam, no memory": partial(Adam, lr=2.0, betas=(0.0, 0.0)),
    "NAdam, quick decay": partial(NAdam, lr=1.0, momentum_decay=0.3),
    "AdaShift, eps 1": partial(AdaShift, lr=2.0, eps=1.0),
    "AdaShift, no memory": partial(AdaShift, lr=2.0, betas=(0.0, 0.0), n=2),
    "AdaShift, mean": partial(AdaShift, lr=1.0, phi="mean"),
}
for b in BETAS:
    OPTIMIZERS[f"Adam {b}"] = partial(Adam, lr=1.0, betas=b)
    OPTIMIZERS[f"AMSGrad {b}"] = partial(Adam, lr=1.0, betas=b, amsgrad=True)
    OPTIMIZERS[f"NAdam {b}"] = partial(NAdam, lr=1.0, betas=b)
    OPTIMIZERS[f"AdamNC {b[0]}"] = partial(AdamNC, lr=1.0, beta1=b[0])
    OPTIMIZERS[f"SpatialOnly {b}"] = partial(SpatialOnly, lr=1.0, betas=b)
    OPTIMIZERS[f"AdaShift {b}"] = partial(AdaShift, lr=1.0, betas=b)
for phi, (n, m), beta1 in product(("max", "none"), WINDOWS, (0.0, 0.9, 1.0)):
    make = partial(AdaShift, lr=1.0, betas=(beta1, 0.999), n=n, m=m, phi=phi)
    OPTIMIZERS[f"AdaShift {phi} n={n} m={m} β1={beta1}"] = make
for n, beta1, phi in product((1, 10), (0.0, 0.9, 0.9999), ("max", "row")):
    make = partial(AdaShift, lr=1.0, betas=(beta1, 0.999), n=n, m=inf, phi=phi)
    OPTIMIZERS[f"AdaShift {phi} n={n} m=inf β1={beta1}"] = make
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    """NAdam stores its product of β1 in the default dtype: float32 would hide errors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def streams(steps=STEPS, seed=0):
    """Gradients of Eq. 7, Eq. 6, and noise whose mean changes sign."""
    rng = np.random.default_rng(seed)
    t = np.arange(steps)
    stochastic = np.where(rng.random(steps) < 0.05, 20.0, -1.0)
    sequential = np.where(t % 6 == 0, 6.0, -1.0)
    noise = rng.normal(np.where(t < steps / 4, 1.0, -1.0))
    return np.stack([stochastic, sequential, noise])


def scalars(count=1):
    return [torch.nn.Parameter(torch.zeros(())) for _ in range(count)]


def stepped(make, g, bounds=None):
    """Return θ after each step of the real optimizer, one parameter for each row of g."""
    parameters = scalars(len(g))
    optimizer = make(parameters)
    path = []
    for column in torch.from_numpy(g.T.copy()):
        for p, slope in zip(parameters, column, strict=True):
            p.grad = slope.clone()
        optimizer.step()
        for p in parameters if bounds else ():
            p.data.clamp_(*bounds)
        path.append([p.item() for p in parameters])
    return np.array(path).T


def filtered(make, g, bounds=None):
    updates = chain_of(make(scalars())).advance(g).update
    return parameter_path(np.zeros(g.shape[:-1]), updates, bounds)


def close(a, b):
    assert_allclose(a, b, rtol=1e-10, atol=1e-11)


def test_doctests():
    result = doctest.testmod(trajectory)
    assert result.attempted > 0 and result.failed == 0


# --- against the optimizers


@every_optimizer
def test_filters_match_the_optimizer(make):
    g = streams()
    close(filtered(make, g), stepped(make, g))


@every_optimizer
def test_filters_match_the_optimizer_with_bounds(make):
    g = streams(61)
    path = filtered(make, g, BOX)
    close(path, stepped(make, g, BOX))
    turning = path[2]
    assert turning.min() == -1 and turning.max() == 1
    assert (np.abs(turning) < 1).any()


@pytest.mark.parametrize("n", [1, 2, 10])
def test_adashift_first_update_is_at_step_n_plus_1(n):
    updates = chain_of(AdaShift(scalars(), lr=0.1, n=n)).advance(streams()).update
    assert not updates[:, :n].any()
    assert updates[:, n].all()


def test_adashift_does_not_update_while_v_is_0():
    g = np.array([[0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 1.0, 3.0, -1.0]])
    make = partial(AdaShift, lr=0.1, n=2)
    assert_array_equal(np.flatnonzero(chain_of(make(scalars())).advance(g).update), [5, 6, 7, 8])
    close(filtered(make, g), stepped(make, g))


@pytest.mark.parametrize("make", [Adam, NAdam, AdamNC, SpatialOnly, partial(Adam, amsgrad=True)])
def test_gradients_may_start_with_zeros(make):
    g = np.array([[0.0, 0.0, 1.0, 0.0, -2.0, 3.0]])
    close(filtered(make, g), stepped(make, g))


@pytest.mark.parametrize(
    ("make", "delay"), [(Adam, 0), (partial(Adam, amsgrad=True), 0), (partial(AdaShift, n=10), 10)]
)
@pytest.mark.parametrize("cut", [1, 53, 54, 55])
def test_bias_correction_is_exact_until_negligible(make, delay, cut):
    """β2 = 0.5 is negligible after 54 steps; until then the average of ones needs correction."""
    chain = chain_of(make(scalars(), betas=(0.5, 0.5)))
    pieces = np.split(np.ones(70 + delay), [cut + delay])
    v = np.concatenate([chain.advance(piece).v for piece in pieces])
    assert_array_equal(v, np.repeat([0.0, 1.0], [delay, 70]))


def test_settings_come_from_the_param_group():
    """betas may be a list, and a scheduler may have changed lr."""
    optimizer = Adam(scalars(), lr=1.0, betas=[0.0, 0.9])
    optimizer.param_groups[0]["lr"] = 0.25
    assert_allclose(chain_of(optimizer).advance(np.ones(3)).update, 0.25)


# --- chunks and batches


@every_optimizer
def test_chunks_equal_the_whole_stream(make):
    g = streams()
    chain, theta, path = chain_of(make(scalars())), np.zeros(len(g)), []
    for piece in np.split(g, [1, 2, 5, 6, 13, 14, 45, 200], axis=-1):
        path.append(parameter_path(theta, chain.advance(piece).update, BOX))
        theta = path[-1][:, -1]
    close(np.concatenate(path, axis=-1), filtered(make, g, BOX))


@every_optimizer
def test_batched_streams_equal_single_streams(make):
    g = np.stack([streams(60, seed) for seed in range(2)])  # seeds × problems × time
    alone = [[filtered(make, row, BOX) for row in block] for block in g]
    close(filtered(make, g, BOX), np.array(alone))


def test_advance_does_not_modify_the_gradients():
    g = streams()
    for make in OPTIMIZERS.values():
        chain_of(make(scalars())).advance(g)
    assert_array_equal(g, streams())


# --- parameter_path


def looped_path(start, updates, bounds):
    theta, path = start, []
    for update in updates:
        theta = min(max(theta - update, bounds[0]), bounds[1])
        path.append(theta)
    return path


@pytest.mark.parametrize("bounds", [(-1, 1), (0.0, 0.5), (-np.inf, 1.0), (-np.inf, np.inf)])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 31, 33, 1000])
def test_parameter_path_clips_after_every_step(length, bounds):
    rng = np.random.default_rng(length)
    for size in (0.01, 0.3, 3.0):
        start = rng.uniform(0, 0.5, size=4)
        updates = size * rng.normal(size=(4, length))
        expected = [looped_path(x, row, bounds) for x, row in zip(start, updates, strict=True)]
        assert_allclose(parameter_path(start, updates, bounds), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("bounds", "path"), [(None, [0.5, 2.5, 2.25]), (BOX, [0.5, 1, 0.75])])
def test_parameter_path_accepts_a_scalar_start_and_does_not_modify_updates(bounds, path):
    updates = np.array([0.5, -2.0, 0.25])
    assert_array_equal(parameter_path(np.array(1.0), updates, bounds), path)
    assert_array_equal(updates, [0.5, -2.0, 0.25])


# --- net update factors


@pytest.mark.parametrize(
    ("make", "weights"),
    [
        (SGD, [1.0]),
        (partial(SGD, momentum=0.8), 0.8 ** np.arange(40)),
        (partial(SGD, momentum=0.8, dampening=0.8), 0.2 * 0.8 ** np.arange(40)),
        (partial(Adam, betas=(0.0, 0.9)), [1.0]),
        (partial(Adam, betas=(0.8, 0.9)), 0.2 * 0.8 ** np.arange(40)),
        (partial(AdaShift, betas=(0.5, 0.9), n=3), [4 / 7, 2 / 7, 1 / 7]),
        (partial(AdaShift, betas=(1.0, 0.9), n=5, m=2), [1 / 2, 1 / 2]),
        (partial(AdaShift, betas=(0.8, 0.9), n=5, m=inf), 0.2 * 0.8 ** np.arange(40)),
    ],
)
def test_net_update_factor_sums_the_effect_of_a_gradient(make, weights):
    g = streams(40)
    chain = chain_of(make(scalars(), lr=0.1))
    step_size = chain.advance(g).step_size
    expected = np.zeros_like(g)
    for t in range(40):
        for i, weight in enumerate(weights[: 40 - t]):  # Eq. 8: g_t has this weight in m_{t+i}
            expected[:, t] += step_size[:, t + i] * weight
    assert_allclose(chain.net_update_factors(step_size), expected, rtol=1e-11)


@pytest.mark.parametrize("make", [partial(SGD, momentum=0.9), partial(AdaShift, n=7, m=4)])
def test_net_update_factors_add_up_to_the_total_movement(make):
    g = streams()
    chain = chain_of(make(scalars(), lr=0.1))
    factors = chain.net_update_factors(chain.advance(g).step_size)
    assert_allclose(-np.sum(factors * g, axis=-1), stepped(partial(make, lr=0.1), g)[:, -1])


def drift(make, couples=4000, before=800, after=300):
    """Return the mean change of θ per step ÷ lr, and its standard error.

    It is −E[g k(g)]. Both values of g meet the same other gradients, so that their difference,
    which decides the sign, has little noise.
    """
    C, p = COUNTEREXAMPLE.C, COUNTEREXAMPLE.p
    rng = np.random.default_rng(0)
    g = np.where(rng.random((couples, before + 1 + after)) < p, C, -1.0)
    total = np.zeros(couples)
    for value, probability in ((C, p), (-1.0, 1 - p)):
        g[:, before] = value
        chain = chain_of(make(scalars(), lr=1.0, betas=(0.9, 0.99)))
        factors = chain.net_update_factors(chain.advance(g).step_size)
        total -= probability * value * factors[:, before]
    return total.mean(), total.std() / np.sqrt(couples)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Adam, 0.0597),
        (partial(AdaShift, n=10), -0.0027),
        (partial(AdaShift, n=10, m=inf), 0.0190),  # β1^10 = 0.35: v_t has seen much of m_t
        (partial(AdaShift, n=20, m=inf), 0.0049),
        (partial(AdaShift, n=44, m=inf), -0.0021),
        (partial(AdaShift, n=50, m=inf), -0.0024),
    ],
)
def test_endless_window_moves_in_the_right_direction_if_n_is_large(make, expected):
    """θ must decrease, because the mean gradient is positive."""
    found, error = drift(make)
    assert found == pytest.approx(expected, abs=4 * error + 5e-5)
    assert abs(found) > 4 * error


# --- no filter form


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (partial(SGD, weight_decay=0.1), "SGD with weight_decay=0.1"),
        (partial(SGD, maximize=True), "SGD with maximize=True"),
        (partial(SGD, momentum=0.9, nesterov=True), "SGD with nesterov=True"),
        (partial(Adam, weight_decay=0.1), "Adam with weight_decay=0.1"),
        (partial(Adam, maximize=True), "Adam with maximize=True"),
        (torch.optim.AdamW, "AdamW has no filter form"),
        (partial(NAdam, weight_decay=0.1), "NAdam with weight_decay=0.1"),
        (partial(NAdam, maximize=True), "NAdam with maximize=True"),
        (partial(AdaShift, m=inf, betas=(1.0, 0.9)), r"AdaShift with m=inf and betas\[0\]=1"),
        (torch.optim.RMSprop, "RMSprop has no filter form"),
        (torch.optim.Adagrad, "Adagrad has no filter form"),
    ],
)
def test_unknown_optimizers_and_settings_that_depend_on_theta_raise(make, reason):
    with pytest.raises(NotLinear, match=reason):
        chain_of(make(scalars()))


@pytest.mark.parametrize("make", [SGD, Adam, NAdam, AdamNC, SpatialOnly, AdaShift])
def test_several_param_groups_raise(make):
    groups = [{"params": scalars()}, {"params": scalars(), "lr": 0.1}]
    with pytest.raises(NotLinear, match=f"{make.__name__} has 2 groups"):
        chain_of(make(groups))
