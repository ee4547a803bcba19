"""The training benchmark on small chunks: it measures what it says; speed is not tested."""

from functools import partial
from itertools import islice

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from benchmarks import training
from benchmarks.training import (
    BARE,
    CPU,
    EVALUATED,
    LOADER,
    LOOP,
    NETWORK,
    PIPELINE,
    BareScript,
    InputOnly,
    LoaderScript,
    Loop,
    NetworkScript,
    torchvision_loader,
    training_batches,
)
from experiments.config.build import build
from experiments.config.compose import compose
from experiments.training import device

PAIRS = [(task, opt) for task in training.TASKS for opt in training.OPTIMIZERS]
IMAGES = ("experiment=resnet_cifar10", "optimizer=adashift", "scale=smoke")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The files of the benchmark; a run has 1 thread on MNIST and 3 with threads=null."""
    folder, before = tmp_path_factory.mktemp("results"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "ALL_THREADS", 3)
        training.TRAINING_BENCHMARK.main(["--quick", "--results", str(folder)])
    torch.set_num_threads(before)
    return folder / "benchmarks"


@pytest.fixture(scope="module")
def table(results):
    return pd.read_csv(results / "bench-training.csv")


def image_task(*words):
    return build(compose([*IMAGES, *words]).task, "task", seed=0, device=CPU)


def test_every_contender_is_timed(table):
    wanted = [(*pair, name) for pair in PAIRS for name in (LOOP, EVALUATED, BARE, LOADER)]
    wanted += [("resnet_cifar10", "adashift", name) for name in (PIPELINE, NETWORK, LOADER)]
    assert list(zip(table["task"], table["optimizer"], table["contender"], strict=True)) == wanted
    assert (table["per_second"] > 0).all()
    for name in (BARE, NETWORK, LOADER):
        assert (table.loc[table["contender"] == name, f"to_{name}"] == 1).all()


def test_mnist_uses_the_threads_of_a_run_and_images_use_all(table):
    assert (table["threads"] == table["unit"].map({"steps": 1, "images": 3})).all()


def test_the_page_names_threads_and_goals(results):
    page = (results / "bench-training.md").read_text(encoding="utf-8")
    assert "these numbers mean nothing" in page and "nan" not in page
    assert "threads: mnist_lr 1, mnist_mlp 1" in page and "threads: resnet_cifar10 3" in page
    assert "loop at least 0.8 of bare and 5 × DataLoader" in page
    assert "pipeline at least 20 × network and 5 × DataLoader" in page


def test_a_rate_is_work_divided_by_time(monkeypatch):
    times = pd.DataFrame({PIPELINE: [1.0, 2.0, 4.0], NETWORK: [10.0, 20.0, 10.0]})
    monkeypatch.setattr(training, "interleave", lambda workloads, rounds: times)
    workloads = {PIPELINE: InputOnly([], 30), NETWORK: InputOnly([], 5)}
    rates = training.compare_rates(compose(IMAGES), workloads, 3, "images", per_step=20)
    assert rates["per_second"].tolist() == [300, 10]  # 30 × 20 ÷ 2 and 5 × 20 ÷ 10
    assert rates[f"to_{NETWORK}"].tolist() == [60, 1]


@pytest.mark.parametrize("task", training.TASKS)
def test_the_scripts_train_the_same_network_on_batches_of_the_same_shape(task):
    config = compose([f"experiment={task}", "optimizer=sgd", "scale=smoke"])
    bare = BareScript(config, steps=2)
    loader = LoaderScript(config, 2, training.plain_data(quick=True))
    for script in (bare, loader):
        images, labels = next(script.batches)
        assert images.shape == (config.task["batch"], 784) and labels.dtype == torch.int64
        before = [p.detach().clone() for p in script.net.parameters()]
        script.step()
        assert any((p != q).any() for p, q in zip(script.net.parameters(), before, strict=True))


def test_the_loop_is_timed_with_and_without_evaluations(tmp_path):
    class Log:
        def __init__(self):
            self.rows = []

        def log(self, step, metrics):
            self.rows.append((step, set(metrics)))

        def keep(self, files):
            assert files == {}

    config = compose(["experiment=mnist_lr", "optimizer=sgd", "scale=smoke"])
    for evaluated in (False, True):
        log = Log()
        Loop(config, log, 40, evaluated).step()
        assert [step for step, _ in log.rows] == [*range(2, 41, 2)]
        assert all("classifier/loss" in names for _, names in log.rows)
        assert all(("test_accuracy" in names) == evaluated for _, names in log.rows)


def test_the_pipeline_makes_the_batches_of_the_task():
    seen, fixed = [], torch.randn(20, 10)
    task = image_task()
    task.forward = lambda images: seen.append(images) or fixed
    losses = [step.loss() for step in islice(task.steps(), 7)]  # an epoch has 5
    batches = training_batches(image_task())
    for images, loss, (ours, labels) in zip(seen, losses, batches, strict=False):
        assert torch.equal(ours, images) and F.cross_entropy(fixed, labels) == loss


@pytest.mark.parametrize(
    "make",
    [training_batches, partial(torchvision_loader, workers=0)],
    ids=["pipeline", "loader"],
)
def test_both_inputs_flip_and_crop_the_same_images(make):
    task = image_task("data.limit=1", "trainer.batch=1")
    framed = F.pad(task.data.train.pixels[0] / 255, (4, 4, 4, 4))
    windows = framed.unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4).flatten(0, 1)
    windows = torch.stack([windows, windows.flip(-1)])
    torch.manual_seed(0)
    batches, found = make(task), set()
    for _ in range(12):
        image, label = next(iter(batches))
        assert image.dtype == torch.float32 and label.tolist() == task.data.train.labels.tolist()
        distances = (windows - image).abs().amax((2, 3, 4)).flatten()
        assert distances.min() < 1e-6
        found.add(distances.argmin().item())
    assert len(found) > 6 and min(found) < 81 <= max(found)


def test_a_chunk_of_the_loader_is_an_epoch():
    batches = torchvision_loader(image_task(), workers=0)
    assert batches.num_workers == 0 and batches.batch_size == 20 and len(batches) == 5
    InputOnly(batches, 5).step()
    assert [images.shape for images, _ in batches] == 5 * [(20, 3, 32, 32)]


def test_the_network_is_the_one_of_the_experiment_and_learns():
    network = NetworkScript(compose(IMAGES), steps=30)
    images, labels = next(network.batches)
    assert images.shape == (20, 3, 32, 32)
    before = F.cross_entropy(network.net(images), labels)
    network.step()
    assert F.cross_entropy(network.net(images), labels) < before
