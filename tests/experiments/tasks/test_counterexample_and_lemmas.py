"""The tasks against brute force, and the loop on a task written by hand."""

from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from adashift import AdaShift
from adashift.analysis import theory
from adashift.analysis.trajectory import chain_of
from experiments.task import Step, Stretch, Task
from experiments.tasks import counterexample, lemmas
from experiments.tasks.beta_grid import (
    CriticalC,
    FinalTheta,
    diagonal,
    draw,
    integers,
    movement,
    sequential_theory,
)
from experiments.tasks.counterexample import Sequential, Stochastic, Trajectory, generator
from experiments.tasks.lemmas import (
    Case,
    InPhase,
    Lemma2,
    Lemma3,
    Lemma6,
    NetUpdateFactor,
    printed_critical_c,
)
from experiments.training.loop import train

CPU = torch.device("cpu")
BOX = (-1.0, 1.0)
SGD, Adam, RMSprop = torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop


def rows_of(task, make, count):
    """What `count` steps of a task record."""
    optimizer = make([task.theta])
    rows = []
    for step in islice(task.steps(), count):
        step.take(optimizer)
        task.after_step()
        rows.append(task.evaluate())
    return rows


def column(rows, name):
    return np.array([row[name] for row in rows])


def stepped(make, g, bounds=(-np.inf, np.inf), forget=0):
    """θ from 0 after each gradient; after the first `forget` of them it is put back to 0."""
    theta = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer, path = make([theta]), []
    for t, slope in enumerate(g.tolist(), start=1):
        theta.grad = torch.tensor(slope, dtype=torch.float64)
        optimizer.step()
        theta.data.clamp_(*bounds)
        if t == forget:
            theta.data.zero_()
        path.append(theta.item())
    return np.array(path)


def average(beta, x):
    """Adam's moving average with its bias correction, as a plain loop."""
    y, averages = 0.0, []
    for t, value in enumerate(x.tolist(), start=1):
        y = beta * y + (1 - beta) * value
        averages.append(y / (1 - beta**t))
    return np.array(averages)


def adam_step_sizes(beta2, g):
    return 1 / np.sqrt(average(beta2, g**2))


def adam_updates(beta1, beta2, g):
    """What Adam with lr = 1 and eps = 0 adds to θ."""
    return -average(beta1, g) * adam_step_sizes(beta2, g)


def test_the_plain_loop_is_adam():
    g = np.random.default_rng(0).normal(size=50)
    path = stepped(partial(Adam, lr=1.0, betas=(0.8, 0.9), eps=0), g)
    assert_allclose(np.cumsum(adam_updates(0.8, 0.9, g)), path, rtol=1e-10, atol=1e-12)


# Problems


def test_sequential_is_c_once_an_epoch():
    problem = Sequential(C=6, d=3)
    assert_array_equal(problem.gradients(0, 7, generator(0)), [6, -1, -1, 6, -1, -1, 6])
    assert_array_equal(problem.gradients(4, 3, generator(0)), [-1, -1, 6])
    assert problem.period == 3
    assert_array_equal(Sequential(C=2, d=1).gradients(5, 2, generator(0)), [2, 2])


@pytest.mark.parametrize(("C", "delta"), [(101, 0.02), (6, 1), (2, 1.5)])
def test_stochastic_has_the_stated_probability_and_mean(C, delta):
    problem, count = Stochastic(C, delta), 400_000
    g = problem.gradients(0, count, generator(1))
    assert set(np.unique(g)) == {-1.0, C}
    p = (1 + delta) / (C + 1)
    deviation = np.sqrt(p * (1 - p) / count)
    assert abs((g > 0).mean() - p) < 4 * deviation
    assert abs(g.mean() - delta) < 4 * deviation * (C + 1)
    assert p * C - (1 - p) == pytest.approx(delta)
    assert problem.p == p and problem.period == 1


def test_draws_belong_to_the_seed_and_not_to_the_pieces():
    problem = Stochastic(6, 1)
    rng = generator(3)
    pieces = [problem.gradients(start, count, rng) for start, count in [(0, 7), (7, 50)]]
    assert_array_equal(np.concatenate(pieces), problem.gradients(0, 57, generator(3)))
    assert (problem.gradients(0, 57, generator(4)) != np.concatenate(pieces)).any()
    streams = draw(problem, 20, 3, generator(0))
    assert streams.shape == (3, 20) and (streams[0] != streams[1]).any()


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (partial(Stochastic, C=2, delta=2), r"delta is 2; .* between 0 and C = 2"),
        (partial(Stochastic, C=2, delta=3), "delta is 3"),
        (partial(Stochastic, C=2, delta=0), "delta is 0"),
        (partial(Stochastic, C=2, delta=-1), "delta is -1"),
        (partial(Sequential, C=2, d=0), "d is 0"),
        (partial(FinalTheta, Sequential(6, 6), 10, 1, betas=1, seed=0, device=CPU), "betas is 1"),
    ],
)
def test_bad_settings_are_refused(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()


@pytest.mark.parametrize("bounds", [(0.5, 1), (-1, -0.5), (1, -1)])
def test_bounds_must_enclose_the_start(bounds):
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
def test_stepping_gives_what_the_filters_give(make, warm_up, bounds, monkeypatch):
    def run():
        return rows_of(trajectory(warm_up=warm_up, bounds=bounds), make, 9)

    filtered = run()
    monkeypatch.setattr(counterexample, "linear", lambda optimizer: None)
    stepped = run()
    only_filters = {"v", "step_size", "excess"} if bounds else {"v", "step_size"}
    assert filtered[0].keys() - stepped[0].keys() == only_filters
    for name in stepped[0]:
        assert_allclose(column(filtered, name), column(stepped, name), rtol=1e-9, atol=1e-12)
    assert np.ptp(column(stepped, "theta")) > 0.1


@pytest.mark.parametrize("make", [partial(Adam, lr=0.3), partial(RMSprop, lr=0.3)])
@pytest.mark.parametrize("warm_up", [0, 23])
def test_theta_is_the_mean_and_the_end_of_a_block(make, warm_up):
    problem = Stochastic(6, 1)
    g = problem.gradients(0, warm_up + 55, generator(5))
    path = stepped(make, g, forget=warm_up)[warm_up:].reshape(5, 11)
    rows = rows_of(trajectory(problem, 11, warm_up, seed=5), make, 5)
    assert_allclose(column(rows, "theta"), path.mean(axis=1), rtol=1e-6)
    assert_allclose(column(rows, "theta_last"), path[:, -1], rtol=1e-6)


def test_v_and_step_size_are_means_of_what_was_used():
    make, problem = partial(Adam, lr=0.3, betas=(0.0, 0.9)), Sequential(6, 4)
    moments = chain_of(make([torch.zeros(())])).advance(problem.gradients(0, 30, generator(0)))
    rows = rows_of(trajectory(problem, block=10), make, 3)
    assert_allclose(column(rows, "v"), moments.v.reshape(3, 10).mean(axis=1))
    assert_allclose(column(rows, "step_size"), moments.step_size.reshape(3, 10).mean(axis=1))


@pytest.mark.parametrize("make", [partial(Adam, lr=0.3), partial(RMSprop, lr=0.3)])
@pytest.mark.parametrize("warm_up", [0, 23])
@pytest.mark.parametrize("bounds", [BOX, (-0.25, 3.0)])
def test_regret_is_the_loss_over_the_best_fixed_point(make, warm_up, bounds):
    problem = Stochastic(6, 1)
    g = problem.gradients(0, warm_up + 55, generator(5))
    path = stepped(make, g, bounds, forget=warm_up)
    before = np.append(0, path)[warm_up:-1]  # θ_t, which g_t has not moved yet
    g = g[warm_up:]
    expected = []
    for t in range(11, 56, 11):
        choices = np.linspace(*bounds, 101)
        best = min(np.sum(g[:t] * x) for x in choices)
        expected.append((np.sum(g[:t] * before[:t]) - best) / t)
    rows = rows_of(trajectory(problem, 11, warm_up, bounds, seed=5), make, 5)
    assert_allclose(column(rows, "regret"), expected, rtol=1e-5)


def test_excess_is_regret_over_the_bound_of_theorem_1():
    make, problem = partial(Adam, lr=0.3, betas=(0.0, 0.9)), Sequential(6, 4)
    moments = chain_of(make([torch.zeros(())])).advance(problem.gradients(0, 30, generator(0)))
    bound = moments.step_size.reshape(3, 10).max(axis=1) * 6**2
    rows = rows_of(trajectory(problem, block=10, bounds=BOX), make, 3)
    assert_allclose(column(rows, "excess"), column(rows, "regret") - bound)


@pytest.mark.parametrize(
    "make",
    [RMSprop, torch.optim.Adagrad, torch.optim.Adamax, partial(Adam, weight_decay=0.1)],
)
def test_any_torch_optimizer_can_be_used(make):
    rows = rows_of(trajectory(), partial(make, lr=0.1), 5)
    assert np.ptp(column(rows, "theta")) > 0
    assert "v" not in rows[0]


def test_the_player_holds_the_last_theta():
    task = trajectory(bounds=BOX)
    rows = rows_of(task, partial(Adam, lr=0.3), 4)
    assert task.players() == {"theta": [task.theta]}
    assert task.theta.item() == rows[-1]["theta_last"]


# Grid of β1 × β2

GRID = np.arange(4) / 4


@pytest.mark.parametrize("skip", [0, 13])
@pytest.mark.parametrize(
    "make", [partial(Adam, lr=0.1), partial(AdaShift, lr=0.1, n=5), partial(Adam, amsgrad=True)]
)
def test_movement_is_the_mean_movement_of_each_cell(make, skip):
    g = draw(Stochastic(6, 1), 40, 2, generator(0))
    theta = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    moved = movement(make([theta]), GRID, g, skip)
    for i, beta2 in enumerate(GRID):
        for j, beta1 in enumerate(GRID):
            paths = [np.append(0, stepped(partial(make, betas=(beta1, beta2)), row)) for row in g]
            expected = np.mean([path[-1] - path[skip] for path in paths])
            assert moved[i, j] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def by_cell(rows, name):
    return {(row["beta1"], row["beta2"]): row[name] for row in rows}


@pytest.mark.parametrize(
    ("problem", "streams"), [(Sequential(6, 6), 1), (Stochastic(6, 1), 3)], ids=["Eq. 6", "Eq. 7"]
)
def test_final_theta_is_that_of_each_cell(problem, streams):
    task = FinalTheta(problem, updates=50, streams=streams, betas=4, seed=2, device=CPU)
    rows = rows_of(task, partial(Adam, lr=0.1, eps=0), 16)
    rng = generator(2)
    g = [problem.gradients(0, 50, rng) for _ in range(streams)]
    found = by_cell(rows, "theta")
    assert len(found) == 16
    for (beta1, beta2), theta in found.items():
        ends = [0.1 * adam_updates(beta1, beta2, row).sum() for row in g]
        assert theta == pytest.approx(np.mean(ends), rel=1e-9, abs=1e-12)


def goes_wrong(problem, beta1, beta2, *, updates, burn_in, streams, seed):
    """Whether θ rises over the whole periods after the burn-in."""
    rng = generator(seed)
    whole = (updates - burn_in) // problem.period * problem.period
    g = [problem.gradients(0, updates, rng) for _ in range(streams)]
    return sum(adam_updates(beta1, beta2, row)[-whole:].sum() for row in g) > 0


@pytest.mark.parametrize(
    ("problem", "values", "streams"),
    [
        (diagonal, [2, 3, 4, 5], 1),
        (partial(Sequential, d=4), [4, 5, 6], 1),
        (partial(Stochastic, delta=1), [3, 4, 5, 6, 7], 2),
    ],
    ids=["C = d", "d = 4", "Eq. 7"],
)
def test_critical_c_is_that_of_each_cell(problem, values, streams):
    run = dict(updates=150, burn_in=70, streams=streams, seed=4)
    range_of_c = dict(smallest=values[0], dense=values[0] + 1, largest=values[-1])
    task = CriticalC(problem, None, **range_of_c, **run, betas=4, device=CPU)
    rows = rows_of(task, partial(Adam, lr=0.1, eps=0), len(values) + 16)
    by_c, cells = rows[: len(values)], rows[len(values) :]

    wrong = np.array(
        [[goes_wrong(problem(C), r["beta1"], r["beta2"], **run) for r in cells] for C in values]
    )
    assert_array_equal(column(by_c, "C"), values)
    assert_array_equal(column(by_c, "wrong_share"), wrong.mean(axis=1))
    found = wrong.any(axis=0)
    assert 0 < found.sum() < 16
    assert_array_equal(column(cells, "found"), found)
    first = np.array(values)[wrong.argmax(axis=0)]
    assert_array_equal(column(cells, "critical_c"), np.where(found, first, 2 * values[-1]))


def test_critical_c_of_the_simulation_is_that_of_the_theory():
    task = CriticalC(
        diagonal, sequential_theory, 2, 20, 20, updates=800, burn_in=400, streams=1, betas=5,
        seed=0, device=CPU,
    )  # fmt: skip
    cells = rows_of(task, partial(Adam, lr=0.1), 19 + 25)[19:]
    assert column(cells, "found").all()
    assert_array_equal(column(cells, "critical_c"), column(cells, "exact"))
    beta1, beta2 = column(cells, "beta1"), column(cells, "beta2")
    closed = [row.get("closed_form", np.nan) for row in cells]
    assert_array_equal(closed, theory.diagonal_critical_c(beta1, beta2))
    assert sum("closed_form" not in row for row in cells) == 1  # β1 = β2 = 0 has none


def test_a_grid_task_ends_with_its_last_row():
    task = FinalTheta(Sequential(6, 6), updates=10, streams=1, betas=2, seed=0, device=CPU)
    assert len(rows_of(task, Adam, 4)) == len(list(task.steps())) == 4


MEASURED = [
    (0, 0.5, 4),
    (0, 0.9, 7),
    (0.9, 0.9, 14),
    (0, 0.99, 21),
    (0.9, 0.99, 30),
    (0, 0.999, 64),
    (0.9, 0.999, 74),
]


@pytest.mark.parametrize(("beta1", "beta2", "C"), MEASURED)
def test_smallest_c_that_misleads_adam(beta1, beta2, C):
    assert theory.smallest_failing_c(beta1, beta2) == C
    burn_in = int(20 / (1 - max(beta1, beta2)))

    def drift(C):
        g = diagonal(C).gradients(0, burn_in + 20 * C, generator(0))
        return adam_updates(beta1, beta2, g)[burn_in:].sum()  # 20 epochs

    assert drift(C - 1) < 0 < drift(C)


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ((2, 6, 6), [2, 3, 4, 5, 6]),
        ((6, 6, 6), [6]),
        ((2, 3, 5), [2, 3, 4, 5]),  # 4 % of little is at least 1
        ((99, 100, 111), [99, 100, 104, 108, 111]),
    ],
)
def test_integers(arguments, values):
    assert_array_equal(integers(*arguments), values)


def test_integers_of_figure_8d():
    values = integers(2, 40, 400)
    assert len(values) == 98  # as many rows as conf/experiment/critical_c_stochastic.yaml counts
    assert values[-1] == 400 and (np.diff(values) >= 1).all()
    assert (np.diff(values[39:]) <= 0.04 * values[39:-1] + 0.5).all()


# Lemmas


def lemma_rows(lemma, make=Adam, count=12):
    return rows_of(lemma(seed=0, device=CPU), make, count)


def test_cases_are_drawn_from_the_stated_ranges():
    rows = lemma_rows(Lemma6, count=100)
    for name, low, high in [
        ("d", 2, 60),
        ("C", 2, 200),
        ("beta1", 0, 0.9969),
        ("beta2", 0, 0.9969),
    ]:
        drawn = column(rows, name)
        assert low <= drawn.min() < low + 0.1 * (high - low)
        assert high - 0.1 * (high - low) < drawn.max() <= high


@pytest.mark.parametrize(
    ("lemma", "metric", "formulas"),
    [
        (Lemma2, "m_error", ["limit_m"]),
        (Lemma2, "v_error", ["limit_v"]),
        (Lemma3, "error", ["net_update_factors", "limit_v"]),
        (Lemma6, "corrected_error", ["critical_c", "critical_c_closed_form"]),
    ],
)
def test_a_wrong_formula_shows(lemma, metric, formulas, monkeypatch):
    assert column(lemma_rows(lemma), metric).max() < 1e-9
    for formula in formulas:
        right = getattr(theory, formula)
        with monkeypatch.context() as patch:
            patch.setattr(theory, formula, partial(slightly_off, right))
            assert column(lemma_rows(lemma), metric).min() > 1e-6


def slightly_off(formula, *arguments, **options):
    """The formula with its last value 0.1 % too large."""
    values = formula(*arguments, **options)
    factor = np.ones(np.shape(values))
    factor.flat[-1] = 1.001
    return values * factor


@pytest.mark.filterwarnings("ignore:divide by zero")  # AdaShift starts with v = 0
@pytest.mark.parametrize(
    ("lemma", "make", "metric"),
    [(Lemma2, partial(AdaShift, n=1), "v_error"), (Lemma3, partial(AdaShift, n=1), "error")],
)
def test_a_wrong_optimizer_shows(lemma, make, metric):
    assert np.median(column(lemma_rows(lemma, make), metric)) > 1e-2


@pytest.mark.parametrize(
    ("k", "violated", "difference_rises"),
    [
        ([1, 3, 4, 3.5], 0, 0),
        ([1, 2, 3, 4], 0, 0),
        ([1, 1.5, 3, 4], 0, 1),  # faster and faster
        ([1, 3, 2, 4], 1, 1),  # falls and rises again
        ([2, 3, 4, 1], 1, 0),  # k(C) is not the smallest
        ([4, 3, 2, 1], 1, 0),
    ],
)
def test_lemma_3_sees_a_wrong_shape(k, violated, difference_rises, monkeypatch):
    monkeypatch.setattr(lemmas, "simulated_factors", lambda case, chain: np.array(k, float))
    row = Lemma3(seed=0, device=CPU).check(Case(0.5, 0.9, 6.0, 4), None)
    assert (row["violated"], row["difference_rises"]) == (violated, difference_rises)


def test_lemma_3_holds_for_adam():
    rows = lemma_rows(Lemma3, count=40)
    assert not column(rows, "violated").any()


def test_lemma_6_is_far_off_as_printed():
    printed = column(lemma_rows(Lemma6, count=40), "printed_error")
    assert np.median(printed) > 0.5
    assert printed.min() > 1e-3


@pytest.mark.parametrize(("beta1", "beta2", "d"), [(0.0, 0.81, 3), (0.5, 0.81, 2)])
def test_printed_critical_c_worked_by_hand(beta1, beta2, d):
    # s = 0.9. β1 = 0, d = 3: 0.729 · 0.1 / (0.9 · 0.271) − 1; β1 = 1/2, d = 2: see the fraction.
    expected = {
        3: 0.729 * 0.1 / (0.9 * 0.271) - 1,
        2: 0.75 * (0.81 - 0.25) * 0.1 / (0.5 * 0.4 * 0.19) - 1,
    }[d]
    assert printed_critical_c(beta1, beta2, d) == pytest.approx(expected)
    assert float(theory.critical_c(beta1, beta2, d)) > expected + 0.5


# Net update factors


def net_update(make, length=100_000, couples=20, burn_in=300):
    task = NetUpdateFactor(Stochastic(11, 0.5), burn_in, length, couples, seed=0, device=CPU)
    return rows_of(task, partial(make, lr=0.3), 1)[0]


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_adam_gives_large_gradients_small_factors(beta1):
    row = net_update(partial(Adam, betas=(beta1, 0.95)))
    assert row["k_bias"] == row["k_large"] / row["k_small"] - 1
    assert row["k_bias"] < -0.1
    assert row["rank_correlation"] < -0.1
    assert row["coupled_share"] == 1 and row["coupled_gap"] > 0.01


@pytest.mark.parametrize(("beta1", "n", "m"), [(0.0, 1, None), (0.9, 10, None), (1.0, 10, 4)])
def test_adashift_gives_all_gradients_the_same_factors(beta1, n, m):
    row = net_update(partial(AdaShift, betas=(beta1, 0.95), n=n, m=m))
    assert abs(row["k_bias"]) < 0.01
    assert abs(row["rank_correlation"]) < 0.01
    assert row["coupled_share"] == 0 and row["coupled_gap"] == 0
    assert row["k_spread"] > 0.1  # they vary, but not with the gradient


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_momentum_gives_every_gradient_the_factor_1(momentum):
    row = net_update(partial(SGD, momentum=momentum, dampening=momentum))
    ones, zeros = {"k_large", "k_small"}, row.keys() - {"k_large", "k_small"}
    assert_allclose([row[name] for name in ones], 1, rtol=1e-12)
    assert_allclose([row[name] for name in zeros], 0, atol=1e-12)


def plain_factors(beta1, beta2, g, start, stop):
    """k(g_start) … k(g_{stop−1}) of Adam by Eq. 8, a sum over everything that follows."""
    step_sizes = adam_step_sizes(beta2, g)
    weights = (1 - beta1) * beta1 ** np.arange(len(g))
    return np.array([step_sizes[t:] @ weights[: len(g) - t] for t in range(start, stop)])


def test_net_update_against_the_double_sum():
    beta1, beta2, burn_in, length, couples = 0.5, 0.9, 30, 40, 6
    row = net_update(partial(Adam, betas=(beta1, beta2), eps=0), length, couples, burn_in)
    problem, rng, tail = Stochastic(11, 0.5), generator(0), lemmas.forgotten(beta1)

    g = problem.gradients(0, burn_in + length + tail, rng)
    k = plain_factors(beta1, beta2, g, burn_in, burn_in + length)
    is_large = g[burn_in:-tail] > 0
    assert row["k_large"] == pytest.approx(k[is_large].mean(), rel=1e-9)
    assert row["k_small"] == pytest.approx(k[~is_large].mean(), rel=1e-9)
    assert row["k_spread"] == pytest.approx(k.max() / k.min() - 1, rel=1e-9)

    gaps = []
    for g in draw(problem, burn_in + 1 + tail, couples, rng):
        pair = [np.where(np.arange(len(g)) == burn_in, x, g) for x in (problem.C, -1.0)]
        k_large, k_small = (plain_factors(beta1, beta2, x, burn_in, burn_in + 1) for x in pair)
        gaps.append(k_small - k_large)
    assert min(gaps) > 0
    assert row["coupled_gap"] == pytest.approx(max(gaps).item(), rel=1e-9)


# The loop


@pytest.mark.parametrize("C", [10, 20, 40])
def test_adam_goes_wrong_where_m_and_the_step_size_fall_together(C):
    task = InPhase(Sequential(C, C), betas=40, seed=0, device=torch.device("cpu"))
    optimizer = torch.optim.Adam(task.players()["theta"], betas=(0.98, 0.5))
    rows = [task.next_row(optimizer) for _ in range(40)]
    assert [row["beta2"] for row in rows] == pytest.approx([i / 40 for i in range(40)])
    for row in rows:
        assert (row["covariance"] < -1) == (row["S"] < 0)
        m, v = theory.limit_m(0.98, C, C), theory.limit_v(row["beta2"], C, C)
        direct = np.cov(m, v**-0.5, bias=True)[0, 1] / (m.mean() * (v**-0.5).mean())
        assert row["covariance"] == pytest.approx(direct)
    assert (C < 17) == all(row["S"] > 0 for row in rows)  # the lowest critical C is 17


class Log:
    """A record that keeps what it is told."""

    def __init__(self):
        self.rows = []

    def log(self, step, metrics):
        self.rows.append((step, metrics))

    def keep(self, files):
        assert files == {}


class TwoPlayers(Task):
    """a is drawn to 1 and b to −2, in turns; `bad` breaks a thing at one step."""

    def __init__(self, length=None, bad=None, at=0):
        self.a, self.b = (torch.nn.Parameter(torch.zeros(())) for _ in range(2))
        self.length, self.bad, self.at = length, bad, at
        self.done = 0

    def players(self):
        return {"a": [self.a], "b": [self.b]}

    def loss_of(self, theta, goal):
        wrong = self.bad == "loss" and self.done + 1 == self.at
        return (theta - goal) ** 2 * (torch.nan if wrong else 1.0)

    def steps(self):
        while self.length is None or self.done < self.length:
            if self.done % 2 == 0:
                yield Step("a", lambda: self.loss_of(self.a, 1.0))
            else:
                yield Step("b", lambda: self.loss_of(self.b, -2.0))

    def after_step(self):
        self.done += 1

    def evaluate(self):
        wrong = self.bad == "metric" and self.done >= self.at
        return {"done": torch.inf if wrong else self.done}


def trained(task, steps, log_every):
    """How the training ended, and what was logged; SGD with lr 1/4 halves every distance."""
    log = Log()
    optimizers = {name: SGD(p, lr=0.25) for name, p in task.players().items()}
    return train(task, optimizers, log, steps=steps, log_every=log_every), log.rows


def test_each_player_has_its_steps_and_the_mean_loss_since_the_last_record():
    task = TwoPlayers()
    status, rows = trained(task, steps=7, log_every=3)  # a b a | b a b | a
    assert status == "finished"
    assert rows == [
        (3, {"done": 3, "a/loss": (1 + 1 / 4) / 2, "b/loss": 4}),
        (6, {"done": 6, "a/loss": 1 / 16, "b/loss": (1 + 1 / 4) / 2}),
        (7, {"done": 7, "a/loss": 1 / 64}),
    ]
    assert task.a.item() == 1 - 1 / 2**4 and task.b.item() == -2 + 2 / 2**3


@pytest.mark.parametrize(
    ("steps", "log_every", "logged"),
    [(6, 3, [3, 6]), (7, 3, [3, 6, 7]), (2, 5, [2]), (3, 1, [1, 2, 3]), (1, 1, [1])],
)
def test_the_last_step_is_always_logged_and_only_once(steps, log_every, logged):
    _, rows = trained(TwoPlayers(), steps, log_every)
    assert [step for step, _ in rows] == logged


def test_a_player_that_has_not_moved_has_no_loss():
    _, rows = trained(TwoPlayers(), steps=2, log_every=1)
    assert [set(metrics) for _, metrics in rows] == [
        {"done", "a/loss"},
        {"done", "b/loss"},
    ]


def test_a_loss_that_is_no_number_is_seen_when_later_ones_are():
    task = TwoPlayers(bad="loss", at=4)
    assert trained(task, steps=20, log_every=10)[0] == "diverged"
    assert task.done == 10


@pytest.mark.parametrize("bad", ["metric", "loss"])
def test_a_value_that_is_no_number_ends_the_run_and_is_kept(bad):
    task = TwoPlayers(bad=bad, at=4)
    status, rows = trained(task, steps=20, log_every=2)
    assert status == "diverged"
    assert [step for step, _ in rows] == [2, 4]
    assert np.isfinite(list(rows[0][1].values())).all()
    assert not np.isfinite(rows[1][1]["done" if bad == "metric" else "b/loss"])
    assert task.done == 4


def test_a_run_that_diverges_at_its_last_step_is_not_finished():
    assert trained(TwoPlayers(bad="metric", at=4), steps=4, log_every=4)[0] == "diverged"


def test_steps_that_end_early_are_an_error():
    with pytest.raises(RuntimeError, match=r"TwoPlayers.steps\(\) ended after 5 of 6 steps"):
        trained(TwoPlayers(length=5), steps=6, log_every=2)


def test_a_stretch_counts_for_all_its_steps():
    task, log = trajectory(block=4), Log()
    optimizers = {name: Adam(p) for name, p in task.players().items()}
    assert train(task, optimizers, log, steps=8, log_every=4) == "finished"
    assert [step for step, _ in log.rows] == [4, 8]
    assert log.rows == list(zip([4, 8], rows_of(trajectory(block=4), Adam, 2), strict=True))
    assert task.t == 8


def test_a_stretch_has_no_loss():
    seen = []
    assert Stretch("theta", seen.append, 3).take("optimizer") is None
    assert seen == ["optimizer"]


def test_a_task_without_state_refuses_one():
    task = TwoPlayers()
    task.load_state_dict(task.state_dict())
    with pytest.raises(ValueError, match=r"TwoPlayers keeps no state, but got \['order'\]"):
        task.load_state_dict({"order": 1})


def test_regret_where_every_theta_is_as_good_as_the_next():
    """C = d − 1: the gradients of an epoch cancel, so there is no worst θ to compare with."""
    rows = rows_of(trajectory(Sequential(5, 6), block=12, bounds=BOX), Adam, 2)
    assert "relative_regret" not in rows[0] and np.isfinite(rows[0]["regret"])
