"""The ill-conditioned two-layer linear problem, Levenberg–Marquardt, and decreasing rates."""

import io
import math
from functools import cache, partial
from itertools import islice, pairwise

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from adashift import AdaShift
from experiments.config.build import build
from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.products.figures import RunGroup, curves
from experiments.products.schema import CurvesPanel
from experiments.products.summaries import tail_log10
from experiments.records.run import Run
from experiments.schedules import exponential, linear
from experiments.task import Step
from experiments.tasks.quadratic import LevenbergMarquardt, damped_solution, singular_values
from experiments.training.execute import execute, make_optimizers

CPU = torch.device("cpu")
EXPERIMENTS = [
    "ill_conditioned",
    "ill_conditioned_linear",
    "ill_conditioned_exponential",
    "ill_conditioned_short",
]
INPUTS = [[], ["task.sampled=1000"], ["task.sampled=50", "task.batch=3"]]
NAMES = ["expected", "sampled", "batches"]


@cache
def config_of(*overrides, experiment="ill_conditioned", optimizer="adam"):
    words = [f"experiment={experiment}", f"optimizer={optimizer}", "scale=smoke", "tracking=off"]
    return compose([*words, *overrides])


def task_of(*overrides, seed=0):
    return build(config_of(*overrides).task, "task", seed=seed, device=CPU)


def weights(task):
    return torch.cat([p.detach().flatten() for p in task.players()["net"]])


def learn(task, optimizer, count):
    for step in islice(task.steps(), count):
        step.take(optimizer)


def objective_of(step):
    """Return the objective of one step of the task."""
    return step.update.args[0]


def plain_loss(objective):
    """Return the loss by its definition, for autograd."""
    root = torch.linalg.eigh(objective.moment)
    points = root.eigenvectors * root.eigenvalues.clamp(min=0).sqrt()
    return ((objective.w1 @ objective.w2 - objective.target) @ points).square().sum()


# -- the problem -------------------------------------------------------------------------------


def test_sizes_are_those_of_the_talk_in_double_precision():
    w1, w2 = task_of().players()["net"]
    assert (w1.shape, w2.shape) == ((10, 6), (6, 6))
    assert {w1.dtype, w2.dtype, task_of().target.dtype} == {torch.float64}
    spread = torch.cat([weights(task_of(seed=s)) for s in range(50)])
    assert abs(spread.mean()) < 0.05 and spread.std() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spacing", ["linear", "geometric"])
def test_the_condition_of_A_is_the_given_one(spacing, seed):
    found = torch.linalg.svdvals(task_of(f"task.spacing={spacing}", seed=seed).target)
    assert found[0].item() == pytest.approx(1) and found[0] / found[-1] == pytest.approx(1e5)
    torch.testing.assert_close(found, singular_values(6, 1e5, spacing), rtol=1e-9, atol=1e-14)
    steps = found.diff() if spacing == "linear" else found.log().diff()
    torch.testing.assert_close(steps, steps.mean().expand(5), rtol=1e-7, atol=0)


def test_condition_1e20_exceeds_double_precision():
    assert singular_values(6, 1e20, "geometric")[-1].item() == pytest.approx(1e-20)
    target = task_of("task.condition=1e20", "task.spacing=geometric").target
    assert (torch.linalg.svdvals(target)[-2:] < 1e-15).all()


def test_the_talks_own_matrix_is_not_ill_conditioned():
    rng, rows = np.random.default_rng(0), np.linspace(1, 1e-5, 10)[:, None]
    found = [np.linalg.cond(rows * rng.random((10, 6))) for _ in range(200)]
    assert 10 < np.median(found) < 40


def test_the_expected_loss_is_the_squared_distance_to_A():
    task = task_of()
    w1, w2, a = (x.detach().numpy() for x in (task.w1, task.w2, task.target))
    found = sum((w1[i] @ w2[:, j] - a[i, j]) ** 2 for i in range(10) for j in range(6))
    assert task.evaluate()["expected_loss"] == pytest.approx(found, rel=1e-12)
    x = np.random.default_rng(0).standard_normal((6, 200_000))
    sampled = ((w1 @ (w2 @ x) - a @ x) ** 2).sum(0).mean()
    assert sampled == pytest.approx(found, rel=0.02)


def test_the_sampled_loss_is_the_mean_over_samples():
    task = task_of("task.sampled=1000")
    errors = (task.samples @ task.w2.T @ task.w1.T - task.samples @ task.target.T).detach()
    found = task.evaluate()
    assert found["loss"] == pytest.approx(errors.square().sum(1).mean().item(), rel=1e-12)
    assert found["expected_loss"] == task_of().evaluate()["loss"] != found["loss"]
    assert found["loss"] == pytest.approx(found["expected_loss"], rel=0.3)


@pytest.mark.parametrize("words", INPUTS, ids=NAMES)
def test_gradients_match_autograd_and_finite_differences(words):
    task = task_of(*words)
    objective = objective_of(next(task.steps()))
    loss = objective()
    found = [p.grad.clone() for p in (task.w1, task.w2)]
    plain = plain_loss(objective)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-9)
    assert objective.loss() == pytest.approx(loss.item(), rel=1e-12)
    for p, g, other in zip(
        (task.w1, task.w2), found, torch.autograd.grad(plain, (task.w1, task.w2)), strict=True
    ):
        torch.testing.assert_close(g, other, rtol=1e-7, atol=1e-9)
        for i, j in [(0, 0), (3, 5)]:
            assert g[i, j].item() == pytest.approx(slope(objective, p, (i, j)), rel=1e-6)


def slope(objective, p, where, h=1e-5):
    ends = []
    for sign in (1, -1):
        p.data[where] += sign * h
        ends.append(objective.loss())
        p.data[where] -= sign * h
    return (ends[0] - ends[1]) / (2 * h)


@pytest.mark.parametrize(
    "make",
    [partial(torch.optim.SGD, lr=0.01), partial(torch.optim.Adam, lr=0.01, fused=True),
     partial(AdaShift, lr=0.01, n=3, fused=True)],
    ids=["SGD", "Adam", "AdaShift"],
)  # fmt: skip
def test_steps_with_the_closure_match_autograd(make):
    ours, other = task_of(), task_of()
    learn(ours, make(ours.players()["net"]), 30)
    optimizer = make(other.players()["net"])
    for _ in range(30):
        Step("net", partial(plain_loss, other.expected)).take(optimizer)
    torch.testing.assert_close(weights(ours), weights(other), rtol=1e-9, atol=1e-11)
    assert not torch.equal(weights(ours), weights(task_of()))


def test_the_seed_determines_matrix_start_and_samples():
    first, again, other = (task_of("task.sampled=9", seed=s) for s in (0, 0, 1))
    for get in (weights, lambda t: t.target, lambda t: t.samples):
        assert torch.equal(get(first), get(again)) and not torch.equal(get(first), get(other))
    assert torch.equal(first.target, task_of().target)
    assert torch.equal(weights(first), weights(task_of("task.condition=1e20")))


def test_batches_need_samples():
    with pytest.raises(ConfigError, match="no samples"):
        task_of("task.batch=10")
    with pytest.raises(ConfigError, match=r"task.condition=0.5"):
        task_of("task.condition=0.5")


@pytest.mark.parametrize("done", [5, 16, 20])  # 16 batches of 3 are an epoch of 50
def test_resuming_is_bit_identical(done):
    words = INPUTS[2]
    task = task_of(*words)
    optimizer = AdaShift(task.players()["net"], lr=0.01, n=2)
    learn(task, optimizer, done)
    file = io.BytesIO()
    torch.save([weights(task), optimizer.state_dict(), task.state_dict()], file)
    learn(task, optimizer, 9)

    file.seek(0)
    start, inner, order = torch.load(file, weights_only=True)
    other = task_of(*words)
    torch.nn.utils.vector_to_parameters(start, other.players()["net"])
    again = AdaShift(other.players()["net"], lr=0.01, n=2)
    again.load_state_dict(inner)
    other.load_state_dict(order)
    learn(other, again, 9)
    assert torch.equal(weights(task), weights(other))
    assert task.evaluate() == other.evaluate()


def test_without_batches_there_is_no_state():
    assert task_of().state_dict() == {}
    task_of().load_state_dict({})
    with pytest.raises(ValueError, match="has no state"):
        task_of().load_state_dict({"batches": 1})


# -- Levenberg–Marquardt -----------------------------------------------------------------------


@pytest.mark.parametrize("words", INPUTS[:2], ids=NAMES[:2])
def test_residuals_and_their_jacobian(words):
    task = task_of(*words)
    objective = task.whole
    assert objective.residuals().square().sum().item() == pytest.approx(objective.loss())

    def residuals(w1, w2):
        return ((w1 @ w2 - task.target) @ torch.linalg.cholesky(objective.moment)).flatten()

    torch.testing.assert_close(objective.residuals(), residuals(task.w1, task.w2).detach())
    parts = torch.autograd.functional.jacobian(residuals, (task.w1.detach(), task.w2.detach()))
    expected = torch.hstack([part.flatten(1) for part in parts])
    torch.testing.assert_close(objective.jacobian(), expected)


def test_the_damped_step_solves_the_normal_equations():
    objective = task_of().whole
    j, r = objective.jacobian(), objective.residuals()
    expected = -torch.linalg.solve(j.T @ j + 0.3 * torch.eye(96).to(j), j.T @ r)
    torch.testing.assert_close(damped_solution(j, r, 0.3), expected)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("words", [["task.condition=1e5"], ["task.condition=1e20"], INPUTS[1]])
def test_levenberg_marquardt_converges_in_few_steps(words, seed):
    task = task_of(*words, seed=seed)
    learn(task, LevenbergMarquardt(task.players()["net"]), 30)
    assert task.evaluate()["expected_loss"] < 1e-20


def test_a_step_lowers_the_loss_or_is_undone():
    task = task_of("task.spacing=geometric", seed=1)
    optimizer = LevenbergMarquardt(task.players()["net"], damping=1e-9)
    (group,) = optimizer.param_groups
    seen = [(task.whole.loss(), group["damping"], weights(task))]
    for step in islice(task.steps(), 60):
        step.take(optimizer)
        seen.append((task.whole.loss(), group["damping"], weights(task)))
    accepted = 0
    for (loss, damping, theta), (new_loss, new_damping, new_theta) in pairwise(seen):
        if new_damping < damping:
            accepted += 1
            assert new_loss < loss * (1 + 1e-9) and new_damping == pytest.approx(damping / 10)
        else:
            assert torch.equal(theta, new_theta) and new_damping == pytest.approx(damping * 10)
    assert 5 < accepted < 60


def test_levenberg_marquardt_saves_its_damping_and_checks_settings():
    task = task_of()
    optimizer = LevenbergMarquardt(task.players()["net"])
    learn(task, optimizer, 3)
    again = LevenbergMarquardt(task.players()["net"])
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["damping"] == optimizer.param_groups[0]["damping"] != 1e-3
    with pytest.raises(ValueError, match="damping is 0"):
        LevenbergMarquardt(task.players()["net"], damping=0)
    config = config_of(*INPUTS[2], optimizer="levenberg_marquardt")
    with pytest.raises(ConfigError, match=r"task\.batch=null"):
        make_optimizers(config, task_of(*INPUTS[2]))


# -- schedules, runs, figures ------------------------------------------------------------------


def test_linear_and_exponential_schedules():
    assert [linear(x) for x in (0, 0.5, 1)] == [1, 0.5, 0]
    assert [exponential(x, end=1e-4) for x in (0, 0.5, 1)] == pytest.approx([1, 1e-2, 1e-4])
    line, curve = (
        build(config_of(experiment=e).schedule, "schedule")
        for e in ("ill_conditioned_linear", "ill_conditioned_exponential")
    )
    assert [line(0.25), curve(0.5)] == pytest.approx([0.75, 0.001**0.5])
    assert 0 < line(49_999 / 50_000) < 1e-4


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_smoke_run_learns_and_the_same_seed_gives_the_same_record(experiment, tmp_path):
    records = []
    for name in "ab":
        run = Run(config_of(f"results={tmp_path / name}", experiment=experiment))
        assert execute(run) == "finished"
        records.append((run.folder / "metrics.csv").read_bytes())
        metrics = run.metrics()
    assert records[0] == records[1]
    assert (metrics["loss"] == metrics["expected_loss"]).all()
    assert metrics["loss"].iloc[-1] < metrics["loss"].iloc[0]


def test_tail_log10_is_the_mean_exponent_at_the_end():
    metrics = pd.DataFrame({"step": range(20), "loss": [1.0] * 18 + [1e-4, 1e-8]})
    assert tail_log10(metrics, "loss") == pytest.approx(-6)


def test_curves_can_show_mean_exponents(tmp_path):
    words = [f"results={tmp_path}", "steps=20"]
    runs = [Run(config_of(*words, optimizer="sgd")).with_seed(seed) for seed in range(3)]
    assert {execute(run) for run in runs} == {"finished"}
    _, ax = plt.subplots()
    ax.set(xscale="log", yscale="log")
    panel = CurvesPanel(title="(a)", metric="expected_loss", runs=["sgd"], orders=True)
    table = curves(ax, [RunGroup("sgd", "SGD", runs)], panel)
    logs = [math.log10(run.metrics()["expected_loss"].iloc[-1]) for run in runs]
    row = table.iloc[-1]
    assert (row["step"], row["n"]) == (20, 3)
    assert row["log10_mean"] == pytest.approx(sum(logs) / 3)
    assert row["log10_sd"] == pytest.approx(pd.Series(logs).std())
    assert ax.lines[0].get_ydata()[-1] == pytest.approx(10 ** row["log10_mean"])
    plt.close("all")
