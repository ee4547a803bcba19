"""The counterexamples: gradients, and the path of θ computed by filters and step by step."""

from functools import partial, wraps
from itertools import islice

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from adashift import AdaShift
from adashift.analysis.trajectory import chain_of
from experiments.task import Step
from experiments.tasks import counterexample
from experiments.tasks.beta_grid import gradient_streams
from experiments.tasks.counterexample import Sequential, Stochastic, Trajectory, numpy_generator
from tests.experiments.tasks.plain_adam import adam_updates, column, stepped

CPU = torch.device("cpu")
BOX = (-1.0, 1.0)
SGD, Adam, RMSprop = torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop


def blocks_of(task, make, count):
    """Return the metrics of the first `count` blocks of a trajectory."""
    optimizer = make([task.theta])
    rows = []
    for step in islice(task.steps(), count):
        step.take(optimizer)
        task.after_step()
        rows.append(task.evaluate())
    return rows


def test_the_plain_loop_matches_torch_adam():
    g = np.random.default_rng(0).normal(size=50)
    path = stepped(partial(Adam, lr=1.0, betas=(0.8, 0.9), eps=0), g)
    assert_allclose(np.cumsum(adam_updates(0.8, 0.9, g)), path, rtol=1e-10, atol=1e-12)


# Problems


def test_sequential_has_one_c_per_epoch():
    problem = Sequential(C=6, d=3)
    assert_array_equal(problem.gradients(0, 7, numpy_generator(0)), [6, -1, -1, 6, -1, -1, 6])
    assert_array_equal(problem.gradients(4, 3, numpy_generator(0)), [-1, -1, 6])
    assert problem.period == 3
    assert_array_equal(Sequential(C=2, d=1).gradients(5, 2, numpy_generator(0)), [2, 2])


@pytest.mark.parametrize(("C", "delta"), [(101, 0.02), (6, 1), (2, 1.5)])
def test_stochastic_has_the_stated_probability_and_mean(C, delta):
    problem, count = Stochastic(C, delta), 400_000
    g = problem.gradients(0, count, numpy_generator(1))
    assert set(np.unique(g)) == {-1.0, C}
    p = (1 + delta) / (C + 1)
    deviation = np.sqrt(p * (1 - p) / count)
    assert abs((g > 0).mean() - p) < 4 * deviation
    assert abs(g.mean() - delta) < 4 * deviation * (C + 1)
    assert p * C - (1 - p) == pytest.approx(delta)
    assert problem.p == p and problem.period == 1


def test_draws_depend_on_the_seed_and_not_on_the_block_size():
    problem = Stochastic(6, 1)
    rng = numpy_generator(3)
    pieces = [problem.gradients(start, count, rng) for start, count in [(0, 7), (7, 50)]]
    assert_array_equal(np.concatenate(pieces), problem.gradients(0, 57, numpy_generator(3)))
    assert (problem.gradients(0, 57, numpy_generator(4)) != np.concatenate(pieces)).any()
    streams = gradient_streams(problem, 20, 3, numpy_generator(0))
    assert streams.shape == (3, 20) and (streams[0] != streams[1]).any()


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (partial(Stochastic, C=2, delta=2), r"delta is 2; .* between 0 and C = 2"),
        (partial(Stochastic, C=2, delta=3), "delta is 3"),
        (partial(Stochastic, C=2, delta=0), "delta is 0"),
        (partial(Stochastic, C=2, delta=-1), "delta is -1"),
        (partial(Sequential, C=2, d=0), "d is 0"),
        (partial(Sequential, C=0, d=2), "C is 0"),
    ],
)
def test_invalid_settings_raise(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()


@pytest.mark.parametrize("bounds", [(0.5, 1), (-1, -0.5), (1, -1)])
def test_bounds_must_contain_the_start(bounds):
    with pytest.raises(ValueError, match=r"bounds are .* 0"):
        trajectory(bounds=bounds)


# Trajectory


def trajectory(problem=Stochastic(6, 1), block=11, warm_up=0, bounds=None, seed=0):  # noqa: B008
    return Trajectory(problem, block, warm_up, bounds, seed, CPU)


@pytest.mark.parametrize("bounds", [None, BOX], ids=["free", "box"])
@pytest.mark.parametrize("warm_up", [0, 23])
@pytest.mark.parametrize(
    "make",
    [
        partial(SGD, lr=0.1, momentum=0.9),
        partial(Adam, lr=0.3, betas=(0.9, 0.99)),
        partial(Adam, lr=0.3, amsgrad=True),
        partial(AdaShift, lr=0.3, n=10),
        partial(AdaShift, lr=0.3, n=30),  # longer than block and warm-up
    ],
)
def test_steps_and_filters_give_the_same_path(make, warm_up, bounds, monkeypatch):
    def run():
        return blocks_of(trajectory(warm_up=warm_up, bounds=bounds), make, 9)

    filtered = run()
    monkeypatch.setattr(counterexample, "chain_or_none", lambda optimizer: None)
    stepped = run()
    only_filters = {"v", "step_size", "excess"} if bounds else {"v", "step_size"}
    assert filtered[0].keys() - stepped[0].keys() == only_filters
    for name in stepped[0]:
        assert_allclose(column(filtered, name), column(stepped, name), rtol=1e-9, atol=1e-12)
    assert np.ptp(column(stepped, "theta")) > 0.1


@pytest.mark.parametrize("make", [partial(Adam, lr=0.3), partial(RMSprop, lr=0.3)])
@pytest.mark.parametrize("warm_up", [0, 23])
def test_theta_is_the_mean_and_the_last_value_of_a_block(make, warm_up):
    problem = Stochastic(6, 1)
    g = problem.gradients(0, warm_up + 55, numpy_generator(5))
    path = stepped(make, g, forget=warm_up)[warm_up:].reshape(5, 11)
    rows = blocks_of(trajectory(problem, 11, warm_up, seed=5), make, 5)
    assert_allclose(column(rows, "theta"), path.mean(axis=1), rtol=1e-6)
    assert_allclose(column(rows, "theta_last"), path[:, -1], rtol=1e-6)


def test_v_and_step_size_are_means_over_a_block():
    make, problem = partial(Adam, lr=0.3, betas=(0.0, 0.9)), Sequential(6, 4)
    g = problem.gradients(0, 30, numpy_generator(0))
    moments = chain_of(make([torch.zeros(())])).advance(g)
    rows = blocks_of(trajectory(problem, block=10), make, 3)
    assert_allclose(column(rows, "v"), moments.v.reshape(3, 10).mean(axis=1))
    assert_allclose(column(rows, "step_size"), moments.step_size.reshape(3, 10).mean(axis=1))


@pytest.mark.parametrize("make", [partial(Adam, lr=0.3), partial(RMSprop, lr=0.3)])
@pytest.mark.parametrize("warm_up", [0, 23])
@pytest.mark.parametrize("bounds", [BOX, (-0.25, 3.0)])
def test_regret_is_the_loss_above_that_of_the_best_fixed_theta(make, warm_up, bounds):
    problem = Stochastic(6, 1)
    g = problem.gradients(0, warm_up + 55, numpy_generator(5))
    path = stepped(make, g, bounds, forget=warm_up)
    before = np.append(0, path)[warm_up:-1]  # θ_t, before g_t moves it
    g = g[warm_up:]
    expected = []
    for t in range(11, 56, 11):
        choices = np.linspace(*bounds, 101)
        best = min(np.sum(g[:t] * x) for x in choices)
        expected.append((np.sum(g[:t] * before[:t]) - best) / t)
    rows = blocks_of(trajectory(problem, 11, warm_up, bounds, seed=5), make, 5)
    assert_allclose(column(rows, "regret"), expected, rtol=1e-5)


def test_excess_is_regret_minus_the_bound_of_theorem_1():
    make, problem = partial(Adam, lr=0.3, betas=(0.0, 0.9)), Sequential(6, 4)
    g = problem.gradients(0, 30, numpy_generator(0))
    moments = chain_of(make([torch.zeros(())])).advance(g)
    bound = moments.step_size.reshape(3, 10).max(axis=1) * 6**2
    rows = blocks_of(trajectory(problem, block=10, bounds=BOX), make, 3)
    assert_allclose(column(rows, "excess"), column(rows, "regret") - bound)


@pytest.mark.parametrize(
    "make",
    [RMSprop, torch.optim.Adagrad, torch.optim.Adamax, partial(Adam, weight_decay=0.1)],
)
def test_any_torch_optimizer_works(make):
    rows = blocks_of(trajectory(), partial(make, lr=0.1), 5)
    assert np.ptp(column(rows, "theta")) > 0
    assert "v" not in rows[0]


def test_the_parameter_is_the_last_theta():
    task = trajectory(bounds=BOX)
    rows = blocks_of(task, partial(Adam, lr=0.3), 4)
    assert task.players() == {"theta": [task.theta]}
    assert task.theta.item() == rows[-1]["theta_last"]


def test_no_relative_regret_if_all_theta_are_equally_good():
    """C = d − 1: the gradients of an epoch cancel, so no θ is worst."""
    rows = blocks_of(trajectory(Sequential(5, 6), block=12, bounds=BOX), Adam, 2)
    assert "relative_regret" not in rows[0] and np.isfinite(rows[0]["regret"])


def test_the_last_block_ends_with_the_run():
    task = Trajectory(Stochastic(6, 1), 11, 0, None, seed=0, device=CPU, length=25)
    assert [step.size for step in islice(task.steps(), 3)] == [11, 11, 3]


@pytest.mark.parametrize("bounds", [None, BOX], ids=["free", "box"])
@pytest.mark.parametrize(
    "make",
    [
        partial(SGD, lr=0.1, momentum=0.9, dampening=0.5),
        partial(Adam, lr=0.3, amsgrad=True),
        partial(torch.optim.NAdam, lr=0.3),
        partial(AdaShift, lr=0.3, n=30),
        partial(RMSprop, lr=0.3),  # stepped
    ],
)
@pytest.mark.parametrize("warm_up", [0, 23])
def test_a_resumed_run_has_the_same_metrics(make, warm_up, bounds):
    whole = blocks_of(trajectory(warm_up=warm_up, bounds=bounds), make, 9)
    stopped = trajectory(warm_up=warm_up, bounds=bounds)
    optimizer = make([stopped.theta])
    for step in islice(stopped.steps(), 4):
        step.take(optimizer)
    resumed = trajectory(warm_up=warm_up, bounds=bounds)
    resumed.load_state_dict(stopped.state_dict())
    resumed.theta.data.copy_(stopped.theta)

    def make_resumed(params):
        again = make(params)
        again.load_state_dict(optimizer.state_dict())
        return again

    assert blocks_of(resumed, make_resumed, 5) == whole[4:]


def test_gradients_set_directly_are_those_of_backward():
    g = np.random.default_rng(0).normal(size=200)
    task, plain = trajectory(), trajectory()
    path = task.take_steps(RMSprop([task.theta], lr=0.3), g)
    optimizer = RMSprop([plain.theta], lr=0.3)
    for theta, slope in zip(path, g, strict=True):
        Step("theta", lambda slope=slope: plain.theta * slope).take(optimizer)
        assert plain.theta.item() == theta


def test_hooks_and_decorators_of_a_step_are_kept():
    calls = []

    class Counted(SGD):
        @wraps(SGD.step)  # copies the mark of torch's own wrapper
        def step(self, closure=None):
            calls.append("decorated")
            return super().step(closure)

    for make in (SGD, Counted):
        task = trajectory()
        optimizer = make([task.theta], lr=0.1)
        optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
        task.take_steps(optimizer, np.ones(2))
    assert calls.count("decorated") == 2 and calls.count("hook") == 4
    task = trajectory()
    task.take_steps(Counted([task.theta], lr=0.1), np.ones(3))
    assert calls.count("decorated") == 5
