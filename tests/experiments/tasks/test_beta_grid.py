"""Grids of β1 × β2 compared with Adam as a plain loop, cell by cell."""

from functools import partial

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from adashift import AdaShift
from adashift.analysis import theory
from experiments.tasks.beta_grid import (
    CriticalC,
    FinalTheta,
    diagonal,
    gradient_streams,
    integers,
    movement,
    sequential_theory,
)
from experiments.tasks.counterexample import Sequential, Stochastic, numpy_generator
from tests.experiments.tasks.plain_adam import adam_updates, column, rows_of, stepped

CPU = torch.device("cpu")
Adam = torch.optim.Adam
GRID = np.arange(4) / 4


@pytest.mark.parametrize("skip", [0, 13])
@pytest.mark.parametrize(
    "make", [partial(Adam, lr=0.1), partial(AdaShift, lr=0.1, n=5), partial(Adam, amsgrad=True)]
)
def test_movement_is_the_mean_over_streams_in_each_cell(make, skip):
    g = gradient_streams(Stochastic(6, 1), 40, 2, numpy_generator(0))
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
def test_final_theta_matches_adam_in_each_cell(problem, streams):
    grid = FinalTheta(problem, updates=50, streams=streams, betas=4, seed=2, device=CPU)
    rows = rows_of(grid, partial(Adam, lr=0.1, eps=0), 16)
    rng = numpy_generator(2)
    g = [problem.gradients(0, 50, rng) for _ in range(streams)]
    found = by_cell(rows, "theta")
    assert len(found) == 16
    for (beta1, beta2), theta in found.items():
        ends = [0.1 * adam_updates(beta1, beta2, row).sum() for row in g]
        assert theta == pytest.approx(np.mean(ends), rel=1e-9, abs=1e-12)


def goes_wrong(problem, beta1, beta2, *, updates, burn_in, streams, seed):
    """Return whether θ rises over the full periods after the burn-in."""
    rng = numpy_generator(seed)
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
def test_critical_c_matches_adam_in_each_cell(problem, values, streams):
    run = dict(updates=150, burn_in=70, streams=streams, seed=4)
    range_of_c = dict(smallest=values[0], dense=values[0] + 1, largest=values[-1])
    grid = CriticalC(problem, None, **range_of_c, **run, betas=4, device=CPU)
    rows = rows_of(grid, partial(Adam, lr=0.1, eps=0), len(values) + 16)
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


def test_simulated_critical_c_matches_the_theory():
    grid = CriticalC(
        diagonal, sequential_theory, 2, 20, 20, updates=800, burn_in=400, streams=1, betas=5,
        seed=0, device=CPU,
    )  # fmt: skip
    cells = rows_of(grid, partial(Adam, lr=0.1), 19 + 25)[19:]
    assert column(cells, "found").all()
    assert_array_equal(column(cells, "critical_c"), column(cells, "exact"))
    beta1, beta2 = column(cells, "beta1"), column(cells, "beta2")
    closed = [row.get("closed_form", np.nan) for row in cells]
    assert_array_equal(closed, theory.diagonal_critical_c(beta1, beta2))
    assert sum("closed_form" not in row for row in cells) == 1  # β1 = β2 = 0 has none


def test_a_grid_has_one_row_per_cell():
    grid = FinalTheta(Sequential(6, 6), updates=10, streams=1, betas=2, seed=0, device=CPU)
    assert len(rows_of(grid, Adam, count=100)) == 4


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (dict(betas=1), "betas is 1; a grid needs at least 2"),
        (dict(smallest=1), "smallest is 1, dense 3, largest 6; expected 2 ≤ smallest ≤ dense"),
        (dict(burn_in=95), "updates − burn_in is 5; expected at least 6, the longest epoch"),
    ],
)
def test_invalid_settings_of_a_grid_raise(settings, complaint):
    valid = dict(smallest=2, dense=3, largest=6, updates=100, burn_in=50, streams=1, betas=2)
    CriticalC(diagonal, None, **valid, seed=0, device=CPU)
    with pytest.raises(ValueError, match=complaint):
        CriticalC(diagonal, None, **(valid | settings), seed=0, device=CPU)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (torch.optim.SGD, "this experiment varies betas; SGD has none: use optimizer=adam"),
        (torch.optim.AdamW, "needs an optimizer with a filter form, such as adam: AdamW"),
        (partial(Adam, weight_decay=0.1), "with a filter form, .* weight_decay=0.1"),
    ],
)
def test_a_grid_needs_betas_and_filters(make, complaint):
    grid = FinalTheta(Sequential(6, 6), updates=10, streams=1, betas=2, seed=0, device=CPU)
    grid.check_optimizer(Adam([torch.zeros(())]))
    with pytest.raises(ValueError, match=complaint):
        grid.check_optimizer(make([torch.zeros(())]))


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
def test_smallest_c_for_which_adam_moves_in_the_wrong_direction(beta1, beta2, C):
    assert theory.smallest_failing_c(beta1, beta2) == C
    burn_in = int(20 / (1 - max(beta1, beta2)))

    def drift(C):
        g = diagonal(C).gradients(0, burn_in + 20 * C, numpy_generator(0))
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
