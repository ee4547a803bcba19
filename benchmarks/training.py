"""Speed of the training loop on MNIST and of the image input, compared with plain scripts.

    python -m benchmarks.training [--quick] [--results FOLDER]

The contenders of a task take turns, one chunk of steps each, so that whatever else the machine does
affects all of them alike. Run it on an idle machine: a busy core slows several threads down more
than one. MNIST uses the threads of a run; the images use all threads, like a run that is alone.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms

from benchmarks.common import Benchmark, bullet_list, environment, interleave
from experiments.config.build import build
from experiments.config.compose import compose
from experiments.config.schema import Config
from experiments.data.files import fetch
from experiments.data.images import Images
from experiments.data.mnist import MNIST_FILES
from experiments.products.markdown import markdown_table
from experiments.records.record import Record
from experiments.training.device import set_up_torch
from experiments.training.execute import length_of, make_optimizers
from experiments.training.loop import train

CPU = torch.device("cpu")
TASKS = ("mnist_lr", "mnist_mlp")
OPTIMIZERS = ("sgd", "adashift")  # SGD is the cheapest and hides the least of the loop
LOOP, EVALUATED, BARE, LOADER = "loop", "loop with evaluation", "bare", "DataLoader"
PIPELINE, NETWORK = "pipeline", "network"
RATE_GOALS = {BARE: 0.8, NETWORK: 20.0, LOADER: 5.0}  # of the first contender, relative to these
FIXED_BATCHES = 4  # on which the network is trained repeatedly
WORKERS = 2


@dataclass
class Loop:
    """train() with the task, its batches and a record, with or without evaluations."""

    config: Config
    record: Record
    steps: int
    evaluated: bool

    def __post_init__(self) -> None:
        self.task = build(self.config.task, "task", seed=0, device=CPU)
        self.optimizers = make_optimizers(self.config, self.task)
        if not self.evaluated:
            self.task.evaluate = dict  # no metrics except the losses

    def step(self) -> None:
        _, every = length_of(self.config, self.task)
        train(self.task, self.optimizers, self.record, steps=self.steps, log_every=every)


class BareScript:
    """A plain script: the same network and optimizer, no log, no evaluation."""

    def __init__(self, config: Config, steps: int) -> None:
        task = build(config.task, "task", seed=0, device=CPU)
        (self.optimizer,) = make_optimizers(config, task).values()
        self.net, self.steps = task.net, steps
        self.batches = self.endless_batches(task)

    def endless_batches(self, task: Any) -> Iterator[Sequence[Tensor]]:
        """Repeat the batches of an epoch; with a single one the gradient would soon be 0."""
        train = task.data.train
        batches = [(train.images[rows], train.labels[rows]) for rows in task.batches.epoch]
        return itertools.cycle(batches)

    def step(self) -> None:
        for _ in range(self.steps):
            images, labels = next(self.batches)
            self.optimizer.zero_grad()
            F.cross_entropy(self.net(images), labels).backward()
            self.optimizer.step()


class LoaderScript(BareScript):
    """The same with torchvision's data set and a shuffled DataLoader with its defaults."""

    def __init__(self, config: Config, steps: int, data: Dataset[Any]) -> None:
        self.data = data
        super().__init__(config, steps)

    def endless_batches(self, task: Any) -> Iterator[Sequence[Tensor]]:
        while True:
            loader = DataLoader(self.data, task.batches.size, shuffle=True, drop_last=True)
            for images, labels in loader:
                yield images.flatten(1), labels


def plain_data(quick: bool) -> Dataset[Any]:
    if quick:
        return datasets.FakeData(300, (1, 28, 28), transform=transforms.ToTensor())
    folder = fetch(MNIST_FILES)["train-images-idx3-ubyte"].parents[2]
    return datasets.MNIST(str(folder), transform=transforms.ToTensor())


class NetworkScript(BareScript):
    """The same with a network for images, on a few fixed batches."""

    def endless_batches(self, task: Any) -> Iterator[Sequence[Tensor]]:
        return itertools.cycle(list(itertools.islice(training_batches(task), FIXED_BATCHES)))


@dataclass
class InputOnly:
    """Makes batches that are not used."""

    batches: Iterable[Sequence[Tensor]]
    steps: int

    def step(self) -> None:
        for _ in itertools.islice(self.batches, self.steps):
            pass


def training_batches(task: Any) -> Iterator[Sequence[Tensor]]:
    """Yield the images and labels from which ImageClassifier computes its losses."""
    for rows, drawn in zip(task.batches, task.noise, strict=True):
        images = task.standardise(task.augment(rows, *drawn))
        yield (
            images.contiguous(memory_format=task.layout),
            task.data.train.labels.index_select(0, rows),
        )


class PilImages(Dataset[Any]):
    """What torchvision's CIFAR10 does, which can only read pickles."""

    def __init__(self, images: Images, transform: transforms.Compose) -> None:
        self.pixels = images.pixels.permute(0, 2, 3, 1).contiguous().numpy()
        self.labels, self.transform = images.labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[index])), self.labels[index]


def torchvision_loader(task: Any, workers: int) -> DataLoader[Any]:
    """Return a DataLoader with torchvision's transforms for batches like the task's."""
    train = task.data.train
    steps = [
        transforms.RandomCrop(train.pixels.shape[-1], padding=task.augment.padding),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
    ]
    return DataLoader(
        PilImages(train, transforms.Compose(steps)),
        task.batches.size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def configure(overrides: Sequence[str], quick: bool) -> Config:
    """Return the config of a run, and set up torch as execute() does."""
    config = compose([*overrides, f"scale={'smoke' if quick else 'paper'}", "tracking=off"])
    set_up_torch(config, CPU)
    return config


def time_loop(task: str, optimizer: str, data: Dataset[Any], quick: bool) -> pd.DataFrame:
    steps, few, rounds = (20, 1, 2) if quick else (400, 40, 9)
    config = configure([f"experiment={task}", f"optimizer={optimizer}"], quick)
    with tempfile.TemporaryDirectory() as folder, Record(Path(folder), config) as record:
        workloads = {
            LOOP: Loop(config, record, steps, evaluated=False),
            EVALUATED: Loop(config, record, steps, evaluated=True),
            BARE: BareScript(config, steps),
            LOADER: LoaderScript(config, few, data),
        }
        return compare_rates(config, workloads, rounds, "steps")


def time_input(quick: bool) -> pd.DataFrame:
    """Time chunks of an epoch, so that no worker prefetches while another contender is timed."""
    few, rounds, workers = (1, 2, 0) if quick else (3, 7, WORKERS)  # the tests must not fork
    # threads=null: all of them; the experiment sets one so that two runs fit
    config = configure(["experiment=resnet_cifar10", "optimizer=adashift", "threads=null"], quick)
    task = build(config.task, "task", seed=0, device=CPU)
    epoch = task.batches.per_epoch
    workloads = {
        PIPELINE: InputOnly(training_batches(task), epoch),
        NETWORK: NetworkScript(config, few),
        LOADER: InputOnly(torchvision_loader(task, workers), epoch),
    }
    return compare_rates(config, workloads, rounds, "images", task.batches.size)


def compare_rates(
    config: Config, workloads: Mapping[str, Any], rounds: int, unit: str, per_step: int = 1
) -> pd.DataFrame:
    """Return one row per contender."""
    interleave(workloads, 1)  # warm up: memory, optimizer state, workers, the first epoch
    times = interleave(workloads, rounds)
    chunks = pd.Series({name: e.steps for name, e in workloads.items()})
    rates = per_step * chunks / times
    about = {"task": config.experiment, "optimizer": config.optimizer_name}
    rows = [
        about
        | {"contender": name, "unit": unit, "per_second": rates[name].median()}
        | {f"q{q}": rates[name].quantile(q / 100) for q in (25, 75)}
        | {f"to_{r}": (rates[name] / rates[r]).median() for r in RATE_GOALS if r in workloads}
        for name in workloads
    ]
    threads = torch.get_num_threads()
    return pd.DataFrame(rows).assign(threads=threads, chunk=chunks.to_numpy(), rounds=rounds)


def training_summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table as it is printed."""
    t = table
    columns = {
        "task": t["task"],
        "optimizer": t["optimizer"],
        "contender": t["contender"],
        "per second": [f"{x:,.0f} {u}" for x, u in zip(t["per_second"], t["unit"], strict=True)],
        "quartiles": [f"{a:,.0f}–{b:,.0f}" for a, b in zip(t["q25"], t["q75"], strict=True)],
    }
    ratios = {
        f"÷ {name}": t[f"to_{name}"].map("{:.2f}".format, na_action="ignore")
        for name in RATE_GOALS
        if f"to_{name}" in t
    }
    return pd.DataFrame(columns | ratios).fillna("")


ROUNDS_EXPLANATION = """\
Medians over the rounds. In a round each contender takes one chunk of batches, in an order that is
rotated and reversed. Ratios are medians of the ratios within a round."""

LOOP_EXPLANATION = f"""\
- {LOOP}: `train()` as run.py calls it: batches of the training set, losses written to a file
  at the experiment's interval, without W&B and without evaluations.
- {EVALUATED}: the same with the evaluations of the experiment: 15,000 images every 20
  (mnist_lr) or 100 steps (mnist_mlp).
- {BARE}: the same network and optimizer on prepared batches; no log, no evaluation.
- {LOADER}: the same network and optimizer with torchvision's MNIST and a DataLoader with its
  defaults; no log, no evaluation.

Goals: {LOOP} at least {RATE_GOALS[BARE]:g} of {BARE} and {RATE_GOALS[LOADER]:g} × {LOADER}."""

INPUT_EXPLANATION = f"""\
- {PIPELINE}: the batches of the experiment, sampled, flipped, cropped and scaled as in a run.
- {NETWORK}: forward, backward and optimizer step of its ResNet-18 on prepared batches.
- {LOADER}: the same images with torchvision's transforms, one PIL image at a time, by a DataLoader
  with {WORKERS} persistent workers.

Goals: {PIPELINE} at least {RATE_GOALS[NETWORK]:g} × {NETWORK} and {RATE_GOALS[LOADER]:g} × \
{LOADER}."""


def task_section(title: str, part: pd.DataFrame, explanation: str) -> list[str]:
    least = part.loc[part["chunk"].idxmin()]
    threads = dict(zip(part["task"], part["threads"], strict=True))
    facts = {
        "threads": ", ".join(f"{task} {count}" for task, count in threads.items()),
        "chunk": f"{part['chunk'].max()} batches ({least['contender']} {least['chunk']})",
        "rounds": part["rounds"].max(),
    }
    summary = training_summary(part.dropna(axis=1, how="all"))
    return [f"## {title}", bullet_list(facts), markdown_table(summary), explanation]


def training_sections(table: pd.DataFrame) -> list[str]:
    facts = {key: value for key, value in environment().items() if key != "threads"}
    loop, images = (table[table["unit"] == unit] for unit in ("steps", "images"))
    return [
        bullet_list(facts),
        ROUNDS_EXPLANATION,
        *task_section("Training loop", loop, LOOP_EXPLANATION),
        *task_section("Image input", images, INPUT_EXPLANATION),
    ]


def time_training(quick: bool) -> pd.DataFrame:
    data = plain_data(quick)
    pairs = [(task, optimizer) for task in TASKS for optimizer in OPTIMIZERS]
    parts = [*(time_loop(*pair, data, quick) for pair in pairs), time_input(quick)]
    return pd.concat(parts, ignore_index=True)


TRAINING_BENCHMARK = Benchmark(
    "bench-training", "Speed of training", time_training, training_summary, training_sections
)

if __name__ == "__main__":
    TRAINING_BENCHMARK.main()
