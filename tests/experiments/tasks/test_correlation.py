"""The measurements behind Tables 1 to 4, and the probe on the perceptron."""

import io
from itertools import islice

import numpy as np
import pytest
import torch

from adashift import AdaShift
from adashift.probe import DecorrelationProbe
from experiments.config.build import build
from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.records.run import Run
from experiments.tasks.correlation import FrozenStep, GradientCorrelation, unit_norm
from experiments.training.execute import execute

CPU = torch.device("cpu")
SMOKE = ["experiment=mnist_correlation", "optimizer=adashift", "scale=smoke", "tracking=off"]
TINY = ["task.hidden=[4,3]", "task.training=45", "task.lags=3", "task.pairs=7"]


def task_of(*overrides, seed=0):
    return build(compose([*SMOKE, *overrides]).task, "task", seed=seed, device=CPU)


def optimizer_of(task, n=40):
    return AdaShift(task.net.parameters(), lr=0.01, betas=(0.9, 0.999), n=n)


def weights(task):
    return [p.detach().clone() for p in task.net.parameters()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def take_steps(task, optimizer, count):
    """Take steps as the loop does; return the gradients of the measured weight."""
    gradients = []
    for step in islice(task.steps(), count):
        step.take(optimizer)
        gradients.append(task.weight.grad.clone())
        task.after_step()
    return gradients


@pytest.mark.parametrize("frozen", [True, False])
def test_smoke_run_has_every_metric(tmp_path, frozen):
    run = Run(compose([*SMOKE, f"task.frozen={frozen}", f"results={tmp_path}"]))
    assert execute(run) == "finished"
    metrics = run.metrics()
    last = metrics.iloc[-1]
    for n in range(1, 11):
        for kind in ("temporal", "spatial", "non/beta2=0.9", "max/beta2=0.999"):
            assert -1 <= last[f"{kind}/n={n}"] <= 1 and 0 <= last[f"{kind}/n={n}/std"] <= 1
    assert last["non/beta2=0.9/n=0"] > 0.1
    sizes = [abs(last[f"temporal/n={n}"]) for n in range(1, 11)]
    assert last["temporal/largest"] == max(sizes)
    measured = metrics.set_index("step")["temporal/n=1"]
    assert measured.loc[:60].isna().all() and measured.loc[61:].notna().all()


def test_settings_are_those_of_the_paper_and_the_released_code():
    config = compose(["experiment=mnist_correlation", "optimizer=adashift", "scale=paper"])
    task, optimizer = config.task, config.optimizer
    assert (task["training"], config.steps) == (20 * 859, 30 * 859) and task["frozen"]
    assert (task["hidden"], task["batch"], task["weight_std"]) == ([256, 256], 64, 1)
    assert (task["lags"], task["pairs"], task["beta2s"]) == (10, 256, [0.9, 0.999])
    assert (optimizer["lr"], optimizer["n"], optimizer["phi"]) == (0.01, 40, "max")
    assert (optimizer["betas"], optimizer["eps"]) == ([0.9, 0.999], 1e-8)
    assert task["data"]["_target_"] == "experiments.data.mnist.load_mnist"
    assert config.cpu_scale == "paper"


def test_the_weight_between_the_hidden_layers_is_measured():
    task = task_of("task.hidden=[6,5]")
    assert task.weight is task.net.weights[1] and task.weight.shape == (6, 5)
    assert task_of().weight.shape == (256, 256)


@pytest.mark.parametrize("training", [0, 1])
def test_a_frozen_step_computes_the_gradient_of_a_step(training):
    task, plain = (task_of("task.hidden=[6,5]", f"task.training={training}") for _ in range(2))
    (step,) = islice(task.steps(), 1)
    assert isinstance(step, FrozenStep) == (training == 0)
    loss = step.take(optimizer_of(task))
    expected = plain.loss(plain.batches.epoch[0])
    expected.backward()
    assert loss == expected
    torch.testing.assert_close(task.weight.grad, plain.net.weights[1].grad)


@pytest.mark.parametrize("hidden", ["[]", "[8]", "[8,8,8]"])
def test_another_number_of_hidden_layers_raises(hidden):
    with pytest.raises(ConfigError, match=r"expected 2, .*task\.hidden=\[256,256\]"):
        task_of(f"task.hidden={hidden}")


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_parameters_stay_fixed_and_others_are_trained(frozen):
    task = task_of(*TINY, f"task.frozen={frozen}")
    optimizer, start = optimizer_of(task), weights(task)
    take_steps(task, optimizer, 45)
    trained, state = weights(task), int(optimizer.state_dict()["state"][0]["step"])
    assert not any(torch.equal(a, b) for a, b in zip(start, trained, strict=True))
    gradients = take_steps(task, optimizer, 20)
    assert same(trained, weights(task)) == frozen
    assert (optimizer.state_dict()["state"][0]["step"] == state) == frozen
    assert not torch.equal(gradients[0], gradients[1])  # batches change in both cases
    assert task.study.count == 20


def test_frozen_and_not_frozen_start_from_the_same_point():
    first = []
    for frozen in (True, False):
        task = task_of(*TINY, f"task.frozen={frozen}")
        first.append(take_steps(task, optimizer_of(task), 46)[-1])
    torch.testing.assert_close(*first)


def direct(gradients, before, n, beta2=None, phi=None, pairs=None):
    """Return the correlations from all gradients at once."""
    g = torch.stack(gradients).double().flatten(1).numpy()
    x, y = g[before + n :], g[before : len(g) - n]
    if pairs:
        columns = zip(x[:, pairs[0]].T, y[:, pairs[1]].T, strict=True)
    elif beta2 is None:
        columns = zip(x.T, y.T, strict=True)
    else:
        s, v = g * g, np.zeros_like(g)
        s_in_v = np.broadcast_to(s.max(1, keepdims=True), s.shape) if phi == "max" else s
        for t in range(len(g)):
            v[t] = beta2 * v[t - 1] + (1 - beta2) * s_in_v[t]
        columns = zip((x * x).T, v[before : len(g) - n].T, strict=True)
    return [np.corrcoef(a, b)[0, 1] for a, b in columns]


def pairs_of(task):
    tensors = task.study.state_dict()["tensors"]
    return tensors["i"], tensors["j"]


@pytest.mark.parametrize("frozen", [True, False])
def test_correlations_equal_numpy_on_stored_gradients(frozen):
    task = task_of(*TINY, f"task.frozen={frozen}", "task.beta2s=[0.9,0.999]")
    gradients = take_steps(task, optimizer_of(task), 45 + 50)
    found = task.evaluate()
    wanted = {}
    for n in (1, 2, 3):
        wanted[f"temporal/n={n}"] = direct(gradients, 45, n)
        wanted[f"spatial/n={n}"] = direct(gradients, 45, n, pairs=pairs_of(task))
    for n in (0, 1, 2, 3):
        for beta2 in (0.9, 0.999):
            for phi in ("non", "max"):
                name = f"{phi}/beta2={beta2}/n={n}"
                wanted[name] = direct(gradients, 45, n, beta2, phi)
    for name, values in wanted.items():
        assert found[name] == pytest.approx(np.mean(values), abs=1e-6), name
        assert found[f"{name}/std"] == pytest.approx(np.std(values), abs=1e-6), name


def test_the_seed_determines_the_pairs():
    first, again, other = (pairs_of(task_of(*TINY, seed=s)) for s in (0, 0, 1))
    assert same(first, again) and not same(first, other)


@pytest.mark.parametrize("done", [20, 45, 60])
@pytest.mark.parametrize("frozen", [True, False])
def test_resuming_is_bit_identical(frozen, done):
    words = [*TINY, f"task.frozen={frozen}"]
    task = task_of(*words)
    optimizer = optimizer_of(task, n=4)
    take_steps(task, optimizer, done)
    file = io.BytesIO()
    torch.save([weights(task), optimizer.state_dict(), task.state_dict()], file)
    take_steps(task, optimizer, 80 - done)

    file.seek(0)
    start, inner, state = torch.load(file, weights_only=True)
    other = task_of(*words)
    for p, value in zip(other.net.parameters(), start, strict=True):
        p.data.copy_(value)
    again = optimizer_of(other, n=4)
    again.load_state_dict(inner)
    other.load_state_dict(state)
    take_steps(other, again, 80 - done)
    assert task.evaluate() == other.evaluate()


def test_correlations_are_recorded_once_there_are_enough_gradients():
    task = task_of(*TINY)
    optimizer = optimizer_of(task)
    take_steps(task, optimizer, 45 + 4)
    assert "temporal/n=3" not in task.evaluate()
    take_steps(task, optimizer, 1)
    assert all(np.isfinite(x) for x in task.evaluate().values()) and len(task.evaluate()) > 50


def test_invalid_settings_are_reported_by_name():
    with pytest.raises(ConfigError, match=r"task\.training=-1"):
        task_of("task.training=-1")
    with pytest.raises(ConfigError, match=r"task\.frozen=perhaps"):
        task_of("task.frozen=perhaps")
    assert isinstance(task_of(), GradientCorrelation)


# -- net update factors on the perceptron --------------------------------------------------------


def probed(optimizer, *words, tmp_path):
    base = ["experiment=mnist_net_update", f"optimizer={optimizer}", "scale=smoke", "tracking=off"]
    run = Run(compose([*base, *words, f"results={tmp_path}"]))
    assert execute(run) == "finished"
    return run.metrics()


@pytest.mark.parametrize("beta1", [0, 0.9])
def test_large_gradients_move_less_with_adam_and_not_with_adashift(beta1, tmp_path):
    adam = probed("adam", f"optimizer.betas=[{beta1},0.999]", tmp_path=tmp_path).iloc[-1]
    words = [f"optimizer.betas=[{beta1},0.999]", f"optimizer.n={1 if beta1 == 0 else 10}"]
    adashift = probed("adashift", *words, tmp_path=tmp_path).iloc[-1]
    assert adam["k_effect"] < 0.998 < 0.9995 < adashift["k_effect"] < 1.01
    blocks = ["W1", "b1", "W2", "b2", "W3", "b3"]
    assert adam["k_effect"] == pytest.approx(np.mean([adam[f"{b}/k_effect"] for b in blocks]))
    assert all(adam[f"{b}/k_effect"] < 1 for b in blocks)


def test_the_probe_starts_after_watch_after_steps_and_changes_nothing():
    config = compose(["experiment=mnist_net_update", "optimizer=adam", "scale=smoke"])
    task, plain = (build(config.task, "task", seed=0, device=CPU) for _ in range(2))
    ends = []
    for each in (task, plain):
        each.watch_after = 20 if each is task else 1000
        optimizer = torch.optim.Adam(each.net.parameters(), lr=0.001)
        for step in islice(each.steps(), 25):
            step.take(optimizer)
        ends.append(weights(each))
    assert same(*ends) and plain.probe is None
    assert isinstance(task.probe, DecorrelationProbe)
    assert "W2/k_effect" in task.probe.results()
    assert [counts["seen"] for counts in task.probe.state_dict()["counts"]] == [5] * 6


def test_unit_gradients_are_measured_but_not_used_for_training(monkeypatch):
    plain, unit = task_of(*TINY), task_of(*TINY, "+task.unit=true")
    seen = []
    monkeypatch.setattr(unit.study, "warm_up", seen.append)
    usual = take_steps(plain, optimizer_of(plain), 3)
    assert same(usual, take_steps(unit, optimizer_of(unit), 3)) and same(
        weights(plain), weights(unit)
    )
    for g, shown in zip(usual, seen, strict=True):
        torch.testing.assert_close(shown * g.norm(), g)
    assert "unit" not in compose(SMOKE).task  # so the identities of Tables 1 to 4 do not change


def test_unit_norm_of_zero_is_zero():
    assert torch.equal(unit_norm(torch.zeros(2, 3)), torch.zeros(2, 3))
    assert unit_norm(torch.full((4,), 1e-30)).norm() == pytest.approx(1)
