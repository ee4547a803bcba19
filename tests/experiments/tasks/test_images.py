"""Classification of images: epochs, schedule, resuming, and settings for speed."""

import io
from functools import partial
from itertools import islice, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from adashift import AdaShift
from experiments.config.build import build
from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.data import folder
from experiments.data.files import DataError
from experiments.records.run import Run
from experiments.schedules import drops
from experiments.training.execute import execute, length_of
from experiments.training.loop import set_rates, train

CPU = torch.device("cpu")
EXPERIMENTS = [
    "resnet_cifar10",
    "densenet_cifar10",
    "densenet_bc_cifar10",
    "densenet_tiny_imagenet",
]


def config_of(experiment, *overrides):
    words = [f"experiment={experiment}", "optimizer=adam", "scale=smoke", "tracking=off"]
    return compose([*words, *overrides])


def task_of(experiment, *overrides, seed=0):
    return build(config_of(experiment, *overrides).task, "task", seed=seed, device=CPU)


def weights(task):
    return torch.cat([p.detach().flatten() for p in task.net.parameters()])


def learn(task, optimizer, count):
    torch.manual_seed(0)  # dropout
    return torch.stack([step.take(optimizer) for step in islice(task.steps(), count)])


def trained(task, count=6):
    optimizer = torch.optim.SGD(task.net.parameters(), lr=0.05)
    return learn(task, optimizer, count), weights(task)


@pytest.mark.parametrize(
    ("experiment", "count", "classes"),
    list(
        zip(EXPERIMENTS, [2_799_114, 6_365_962, 769_162, 553_280], [10, 10, 10, 200], strict=True)
    ),
)
def test_paper_scale_has_the_published_network(experiment, count, classes):
    source = [
        "data._target_=experiments.data.images.generate_images", "data.limit=128",
        "data.test_limit=1", f"++data.classes={classes}",
    ]  # fmt: skip
    task = task_of(experiment, "scale=paper", *source)
    assert len(weights(task)) == count
    assert not task.trainer.channels_last


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_epochs_determine_the_number_of_steps(experiment):
    config = config_of(experiment)
    task = build(config.task, "task", seed=0, device=CPU)
    trainer = config.task["trainer"]
    assert task.epoch_steps == config.task["data"]["limit"] // trainer["batch"]
    assert length_of(config, task)[0] == task.epoch_steps * trainer["epochs"]
    assert length_of(config_of(experiment, "steps=3", "log_every=2"), task) == (3, 2)
    assert length_of(config_of(experiment, "log_every=null"), task)[1] == task.epoch_steps


def test_a_task_without_epochs_needs_steps():
    config = compose(["experiment=mnist_lr", "optimizer=adam", "scale=smoke", "steps=null"])
    task = build(config.task, "task", seed=0, device=CPU)
    with pytest.raises(ConfigError, match="steps=null"):
        length_of(config, task)


def test_the_rate_drops_where_the_released_code_drops():
    node = compose(["experiment=resnet_cifar10", "optimizer=adam", "scale=paper"]).schedule
    schedule = build(node, "schedule")
    rates = [schedule(epoch * 390 / 19_500) for epoch in range(50)]
    expected = [1.0] * 25 + [0.1] * 12 + [0.01] * 13
    assert rates == pytest.approx(expected)


def test_rates_are_relative_to_the_initial_rate():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    for factor in (1.0, 0.1, 0.01):
        set_rates({"all": optimizer}, factor)
        assert optimizer.param_groups[0]["lr"] == 0.5 * factor


def test_drops_include_their_point():
    assert [drops(x, at=[0.5], factor=0.1) for x in (0.499, 0.5)] == [1.0, 0.1]


def test_the_loop_sets_the_rate_before_the_step():
    """With a factor close to 0 nothing moves after the drop at half the steps."""
    task, kept = task_of("resnet_cifar10"), []
    optimizers = {"classifier": torch.optim.SGD(task.net.parameters(), lr=0.05)}
    record = SimpleNamespace(log=lambda step, metrics: kept.append(weights(task)), keep=len)
    schedule = partial(drops, at=[0.5], factor=1e-30)
    train(task, optimizers, record, steps=10, log_every=1, schedule=schedule)
    still = [torch.equal(a, b) for a, b in pairwise(kept)]
    assert still == [False] * 4 + [True] * 5


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_it_learns_and_the_same_seed_gives_the_same_record(experiment, tmp_path):
    words = ["optimizer=adashift", "optimizer.n=2", "trainer.epochs=4"]
    records = []
    for name in "ab":
        run = Run(config_of(experiment, *words, f"results={tmp_path / name}"))
        assert execute(run) == "finished"
        records.append((run.folder / "metrics.csv").read_bytes())
        metrics = run.metrics()
    assert records[0] == records[1]
    assert metrics["classifier/loss"].iloc[-1] < 0.9 * metrics["classifier/loss"].iloc[0]


def test_a_command_has_data_and_trainer_as_top_level_keys():
    run = Run(config_of("resnet_cifar10", "data.limit=60", "trainer.epochs=1"))
    assert " data.limit=60 " in run.command() and " trainer.epochs=1 " in run.command()
    assert "task" not in run.command()


def test_the_seed_determines_start_order_and_noise():
    first, again, other = (task_of("resnet_cifar10", seed=s) for s in (0, 0, 1))
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))
    assert torch.equal(trained(first)[1], trained(again)[1])
    before = torch.get_rng_state()
    task_of("resnet_cifar10")
    assert torch.equal(before, torch.get_rng_state())


def test_resuming_is_bit_identical():
    whole, cut, rest = (task_of("resnet_cifar10") for _ in range(3))
    options = {"lr": 0.01, "n": 3}
    optimizer = AdaShift(whole.net.parameters(), **options)
    learn(whole, optimizer, 18)
    first = AdaShift(cut.net.parameters(), **options)
    learn(cut, first, 8)
    file = io.BytesIO()
    parameters = [p.detach() for p in cut.net.parameters()]
    torch.save([parameters, first.state_dict(), cut.state_dict()], file)
    file.seek(0)
    values, state, kept = torch.load(file, weights_only=True)
    second = AdaShift(rest.net.parameters(), **options)
    with torch.no_grad():
        for p, value in zip(rest.net.parameters(), values, strict=True):
            p.copy_(value)
    second.load_state_dict(state)
    rest.load_state_dict(kept)
    learn(rest, second, 10)
    assert torch.equal(weights(whole), weights(rest))
    assert whole.evaluate() == rest.evaluate()


def test_evaluation_changes_nothing():
    task = task_of("densenet_cifar10")
    before = {name: b.clone() for name, b in task.net.named_buffers()}
    first, second = task.evaluate(), task.evaluate()
    assert first == second  # no dropout, no flips
    assert task.net.training
    assert all(torch.equal(b, before[name]) for name, b in task.net.named_buffers())


def test_evaluation_counts_every_test_image(monkeypatch):
    from experiments.tasks import images

    task = task_of("resnet_cifar10")
    whole = task.evaluate()
    monkeypatch.setattr(images, "TEST_BATCH", 30)  # 100 images: the last batch is smaller
    parts = task.evaluate()
    assert parts["test_accuracy"] == pytest.approx(whole["test_accuracy"], abs=1e-6)
    assert parts["test_loss"] == pytest.approx(whole["test_loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("option", "tolerance"),
    [
        ("channels_last", 3e-4),
        ("autocast", 0.05),
        pytest.param("compile", 3e-4, marks=pytest.mark.slow),
    ],
)
def test_settings_for_speed_compute_the_same(option, tolerance):
    """After six steps, losses and parameters agree up to rounding in that precision."""
    width = "model.width=8"  # torch 2.15 on a CPU without AVX-512 corrupts memory below 8 channels
    plain = task_of("resnet_cifar10", width)
    fast = task_of("resnet_cifar10", width, f"trainer.{option}=true")
    (loss, theta), (other_loss, other_theta) = trained(plain), trained(fast)
    assert not getattr(plain.trainer, option) and getattr(fast.trainer, option)
    torch.testing.assert_close(other_loss, loss, rtol=tolerance, atol=tolerance)
    moved = (theta - weights(task_of("resnet_cifar10", width))).norm()
    assert (other_theta - theta).norm() < 5 * tolerance * moved
    a, b = plain.evaluate(), fast.evaluate()
    assert b["test_loss"] == pytest.approx(a["test_loss"], rel=5 * tolerance)


def test_own_images(tmp_path, monkeypatch):
    """Run the example of the documentation."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("ADASHIFT_DATA", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(30):
            pixels = rng.integers(256, size=(40, 36, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{number}.png")
    words = ["data._target_=experiments.data.folder.load_folder", f"+data.path={tmp_path / 'pets'}"]
    run = Run(config_of("resnet_cifar10", *words, f"results={tmp_path}"))
    assert execute(run) == "finished"
    assert run.metrics()["step"].max() == 2 * (54 // 20)
    (tmp_path / "pets/dogs/7.png").write_bytes(b"no image")
    folder.load_folder.cache_clear()
    with pytest.raises(DataError, match=r"pets/dogs/7.png is not a usable image"):
        execute(Run(run.config.model_copy(update={"force": True})))
