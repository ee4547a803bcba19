"""Logistic regression and the perceptron: the paper's settings, evaluation and resuming."""

import io
from functools import partial
from itertools import islice

import pytest
import torch
import torch.nn.functional as F

from adashift import AdaShift
from experiments.config.build import build
from experiments.config.compose import compose
from experiments.data import files, mnist
from experiments.records.run import Run
from experiments.tasks.mnist import LinearClassifier
from experiments.training.execute import execute

CPU = torch.device("cpu")
EXPERIMENTS = ["mnist_lr", "mnist_mlp"]


def task_of(experiment, seed=0, *overrides):
    """Return the task of an experiment at its own size, on generated images."""
    config = compose([f"experiment={experiment}", "optimizer=adam", "scale=smoke", *overrides])
    return build(config.task, "task", seed=seed, device=CPU)


def weights(task):
    return [p.detach().clone() for p in task.net.parameters()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def learn(task, optimizer, count):
    for step in islice(task.steps(), count):
        step.take(optimizer)


@pytest.mark.parametrize(
    ("experiment", "shapes", "count"),
    [
        ("mnist_lr", [(784, 10), (10,)], 7_850),
        ("mnist_mlp", [(784, 256), (256,), (256, 256), (256,), (256, 10), (10,)], 269_322),
    ],
)
def test_parameter_shapes_are_those_of_the_paper(experiment, shapes, count):
    (params,) = task_of(experiment).players().values()
    assert [tuple(p.shape) for p in params] == shapes
    assert sum(p.numel() for p in params) == count


def test_logistic_regression_starts_near_zero():
    weight, bias = weights(task_of("mnist_lr"))
    assert weight.std() == pytest.approx(0.01, rel=0.05) and abs(weight.mean()) < 5e-4
    assert (bias == 0).all()


def test_all_parameters_of_the_perceptron_start_standard_normal():
    for p in weights(task_of("mnist_mlp")):
        assert p.std() == pytest.approx(1, abs=4 / p.numel() ** 0.5)
        assert abs(p.mean()) < 4 / p.numel() ** 0.5


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_seed_determines_start_and_order_for_every_optimizer(experiment):
    first, again, other = (task_of(experiment, seed) for seed in (0, 0, 1))
    learn(again, torch.optim.SGD(again.net.parameters(), lr=0.1), 3)
    assert same(weights(first), weights(task_of(experiment)))
    rows = [list(islice(task.batches, 12)) for task in (first, task_of(experiment), other)]
    assert same(rows[0], rows[1]) and not same(rows[0], rows[2])
    assert same(rows[0][3:], list(islice(again.batches, 9)))
    assert not same(weights(first), weights(other))


def test_start_and_order_are_independent():
    plain, wide = task_of("mnist_lr"), task_of("mnist_lr", 0, "task.hidden=[5]")
    assert torch.equal(next(iter(plain.batches)), next(iter(wide.batches)))
    small = task_of("mnist_lr", 0, "task.batch=32")
    assert same(weights(plain), weights(small))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_loss_is_the_mean_cross_entropy_of_the_batch(experiment):
    task = task_of(experiment)
    rows = task.batches.epoch[0]
    x, y = task.data.train.images[rows].double(), task.data.train.labels[rows]
    for i, (w, b) in enumerate(zip(task.net.weights, task.net.biases, strict=True)):
        assert x.shape[1] == (784, 256, 256)[i]
        x = x @ w.double() + b.double()
    expected = (x.logsumexp(1) - x[torch.arange(len(y)), y]).mean()
    loss = next(task.steps()).loss()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_evaluation_with_one_layer_matches_the_network(experiment):
    task = task_of(experiment)
    learn(task, torch.optim.Adam(task.net.parameters(), lr=1e-3), 5)
    found = task.evaluate()
    for name, samples in (("test", task.data.test), ("validation", task.data.validation)):
        output = task.net(samples.images)
        right = (output.argmax(1) == samples.labels).float().mean()
        loss = F.cross_entropy(output, samples.labels)
        assert found[f"{name}_loss"] == pytest.approx(loss.item(), rel=1e-3)
        assert found[f"{name}_accuracy"] == pytest.approx(right.item(), abs=0.011)
    assert len(found) == 4


def test_one_layer_equals_three_linear_layers():
    net = task_of("mnist_mlp").net
    net.weights, net.biases = ([p.double() for p in part] for part in (net.weights, net.biases))
    x = torch.rand(20, 784, dtype=torch.float64)
    weight, bias = net.as_one()
    assert weight.shape == (784, 10)
    torch.testing.assert_close(torch.addmm(bias, x, weight), net(x), rtol=1e-9, atol=1e-7)


@pytest.mark.parametrize("done", [3, 7, 10])  # 7 batches of 128 are an epoch of 1,000
@pytest.mark.parametrize(
    "make", [torch.optim.Adam, partial(AdaShift, n=2)], ids=["Adam", "AdaShift"]
)
def test_resuming_is_bit_identical(make, done):
    task = task_of("mnist_lr")
    optimizer = make(task.net.parameters(), lr=0.01)
    learn(task, optimizer, done)
    file = io.BytesIO()
    torch.save([weights(task), optimizer.state_dict(), task.state_dict()], file)
    learn(task, optimizer, 9)

    file.seek(0)
    start, inner, order = torch.load(file, weights_only=True)
    other = task_of("mnist_lr", seed=5)
    for p, value in zip(other.net.parameters(), start, strict=True):
        p.data.copy_(value)
    again = make(other.net.parameters(), lr=0.01)
    again.load_state_dict(inner)
    other.load_state_dict(order)
    learn(other, again, 9)
    assert same(weights(task), weights(other))
    other.load_state_dict(order)
    learn(other, again, 9)
    assert not same(weights(task), weights(other))


def settings(experiment, optimizer):
    config = compose([f"experiment={experiment}", f"optimizer={optimizer}", "scale=paper"])
    return config, config.optimizer


@pytest.mark.parametrize(
    ("experiment", "lr", "eps", "batch", "steps", "log_every"),
    [
        ("mnist_lr", (0.1, 0.001, 0.001, 0.001, 0.01), 1e-10, 128, 20 * 429, 20),
        ("mnist_mlp", (0.001, 0.001, 0.001, 0.0005, 0.01), 1e-8, 64, 57_300, 100),
    ],
)
def test_settings_are_those_of_tables_5_and_6(experiment, lr, eps, batch, steps, log_every):
    names = ("sgd", "adam", "amsgrad", "non_adashift", "adashift")
    for name, rate in zip(names, lr, strict=True):
        config, optimizer = settings(experiment, name)
        assert optimizer["lr"] == rate
        assert (config.steps, config.log_every, config.task["batch"]) == (steps, log_every, batch)
        assert config.task["data"]["_target_"] == "experiments.data.mnist.load_mnist"
        assert config.cpu_scale == "paper"
        if name != "sgd":
            assert (optimizer["betas"], optimizer["eps"]) == ([0, 0.999], eps)
        if "adashift" in name:
            assert (optimizer["n"], optimizer["phi"]) == (
                1,
                "max" if name == "adashift" else "none",
            )


@pytest.mark.parametrize("amsgrad", [False, True])
def test_fused_adam_matches_plain_adam(amsgrad):
    ends = []
    for fused in (False, True):
        task = task_of("mnist_lr")
        options = {"lr": 0.001, "betas": (0.0, 0.999), "eps": 1e-10, "amsgrad": amsgrad}
        learn(task, torch.optim.Adam(task.net.parameters(), fused=fused, **options), 20)
        ends.append(weights(task))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_smoke_run_learns_and_needs_no_data_files(experiment, tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("smoke scale must not need files")

    monkeypatch.setattr(files, "fetch", refuse)
    monkeypatch.setattr(mnist, "fetch", refuse)
    words = [f"experiment={experiment}", "optimizer=adam", "scale=smoke", "tracking=off"]
    run = Run(compose([*words, f"results={tmp_path}"]))
    assert execute(run) == "finished"
    metrics = run.metrics()
    assert metrics["test_accuracy"].iloc[-1] > 0.9
    assert metrics["classifier/loss"].iloc[-1] < metrics["classifier/loss"].iloc[0]


def test_other_widths_are_possible():
    task = LinearClassifier(
        mnist.generate_digits, hidden=[3], weight_std=0.1, bias_std=0, batch=10, seed=0, device=CPU
    )
    assert [tuple(p.shape) for p in task.net.parameters()] == [(784, 3), (3,), (3, 10), (10,)]
    assert task.batches.per_epoch == 100
