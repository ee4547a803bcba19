"""Speed of the training loop on MNIST and of the image input, against what one writes by hand.

    python -m benchmarks.training [--quick] [--results FOLDER]

The contenders of a task take turns, a chunk of steps each, so that whatever else the machine does
falls on all of them; several threads still suffer more from a busy core than one does, so let it
be idle. MNIST has the threads that a run has; the images have all, as a run that is alone may have.
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

from benchmarks.common import command, interleave, listed, machine, write
from experiments.config.build import build
from experiments.config.compose import compose
from experiments.config.schema import Config
from experiments.data.files import fetch
from experiments.data.images import Images
from experiments.data.mnist import FILES
from experiments.products.markdown import markdown_table
from experiments.records.record import Record
from experiments.training.device import set_up_torch
from experiments.training.execute import length_of, make_optimizers
from experiments.training.loop import train

CPU = torch.device("cpu")
TASKS = ("mnist_lr", "mnist_mlp")
OPTIMIZERS = ("sgd", "adashift")  # the cheapest one, which hides least of the loop, and ours
LOOP, EVALUATED, BARE, LOADER = "loop", "loop with evaluation", "bare", "DataLoader"
PIPELINE, NETWORK = "pipeline", "network"
GOALS = {BARE: 0.8, NETWORK: 20.0, LOADER: 5.0}  # of the first contender, as multiples of these
READY = 4  # batches that the network is trained on, again and again
WORKERS = 2


@dataclass
class Ours:
    """train() with the task, its batches and a record; with the task's evaluations or without."""

    config: Config
    record: Record
    steps: int
    evaluated: bool

    def __post_init__(self) -> None:
        self.task = build(self.config.task, "task", seed=0, device=CPU)
        self.optimizers = make_optimizers(self.config, self.task)
        if not self.evaluated:
            self.task.evaluate = dict  # no metrics but the losses

    def step(self) -> None:
        _, every = length_of(self.config, self.task)
        train(self.task, self.optimizers, self.record, steps=self.steps, log_every=every)


class Script:
    """What one writes by hand: the same network and optimizer, no log, no evaluation."""

    def __init__(self, config: Config, steps: int) -> None:
        task = build(config.task, "task", seed=0, device=CPU)
        (self.optimizer,) = make_optimizers(config, task).values()
        self.net, self.steps = task.net, steps
        self.batches = self.endless(task)

    def endless(self, task: Any) -> Iterator[Sequence[Tensor]]:
        """The batches of an epoch, cut beforehand: with one alone the gradient would soon be 0."""
        train = task.data.train
        cut = [(train.images[rows], train.labels[rows]) for rows in task.batches.epoch]
        return itertools.cycle(cut)

    def step(self) -> None:
        for _ in range(self.steps):
            images, labels = next(self.batches)
            self.optimizer.zero_grad()
            F.cross_entropy(self.net(images), labels).backward()
            self.optimizer.step()


class LoaderScript(Script):
    """The same with torchvision's data set and a DataLoader with its defaults, shuffled."""

    def __init__(self, config: Config, steps: int, data: Dataset[Any]) -> None:
        self.data = data
        super().__init__(config, steps)

    def endless(self, task: Any) -> Iterator[Sequence[Tensor]]:
        while True:
            loader = DataLoader(self.data, task.batches.size, shuffle=True, drop_last=True)
            for images, labels in loader:
                yield images.flatten(1), labels


def plain_data(quick: bool) -> Dataset[Any]:
    if quick:
        return datasets.FakeData(300, (1, 28, 28), transform=transforms.ToTensor())
    folder = fetch(FILES)["train-images-idx3-ubyte"].parents[2]
    return datasets.MNIST(str(folder), transform=transforms.ToTensor())


class Network(Script):
    """What the input is for: the same with a network for images, on batches made beforehand."""

    def endless(self, task: Any) -> Iterator[Sequence[Tensor]]:
        return itertools.cycle(list(itertools.islice(drawn(task), READY)))


@dataclass
class Supply:
    """Batches for nobody."""

    batches: Iterable[Sequence[Tensor]]
    steps: int

    def step(self) -> None:
        for _ in itertools.islice(self.batches, self.steps):
            pass


def drawn(task: Any) -> Iterator[Sequence[Tensor]]:
    """The images and labels on which ImageClassifier computes its losses."""
    for rows in task.batches:
        images = task.standardise(task.augment(rows)).contiguous(memory_format=task.layout)
        yield images, task.data.train.labels.index_select(0, rows)


class Pictures(Dataset[Any]):
    """What torchvision's CIFAR10 does, which reads nothing but pickles."""

    def __init__(self, images: Images, transform: transforms.Compose) -> None:
        self.pixels = images.pixels.permute(0, 2, 3, 1).contiguous().numpy()
        self.labels, self.transform = images.labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[index])), self.labels[index]


def loader_of(task: Any, workers: int) -> DataLoader[Any]:
    """What one writes with torchvision for batches like those of resnet_cifar10."""
    train = task.data.train
    steps = [
        transforms.RandomCrop(train.pixels.shape[-1], padding=task.augment.padding),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
    ]
    return DataLoader(
        Pictures(train, transforms.Compose(steps)),
        task.batches.size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def prepare(words: Sequence[str], quick: bool) -> Config:
    """The config of a run; from here on torch is as execute() would have it."""
    config = compose([*words, f"scale={'smoke' if quick else 'paper'}", "tracking=off"])
    set_up_torch(config, CPU)
    return config


def time_loop(task: str, optimizer: str, data: Dataset[Any], quick: bool) -> pd.DataFrame:
    steps, few, rounds = (20, 1, 2) if quick else (400, 40, 9)
    config = prepare([f"experiment={task}", f"optimizer={optimizer}"], quick)
    with tempfile.TemporaryDirectory() as folder, Record(Path(folder), config) as record:
        entrants = {
            LOOP: Ours(config, record, steps, evaluated=False),
            EVALUATED: Ours(config, record, steps, evaluated=True),
            BARE: Script(config, steps),
            LOADER: LoaderScript(config, few, data),
        }
        return measure(config, entrants, rounds, "steps")


def time_input(quick: bool) -> pd.DataFrame:
    """A chunk of batches is an epoch: no worker fetches ahead while another contender is timed."""
    few, rounds = (1, 2) if quick else (3, 7)
    # all threads: the experiment asks for one so that two runs fit, here it is alone
    config = prepare(["experiment=resnet_cifar10", "optimizer=adashift", "threads=null"], quick)
    task = build(config.task, "task", seed=0, device=CPU)
    epoch = task.batches.per_epoch
    entrants = {
        PIPELINE: Supply(drawn(task), epoch),
        NETWORK: Network(config, few),
        LOADER: Supply(loader_of(task, 0 if quick else WORKERS), epoch),  # tests must not fork
    }
    return measure(config, entrants, rounds, "images", task.batches.size)


def measure(
    config: Config, entrants: Mapping[str, Any], rounds: int, unit: str, per_step: int = 1
) -> pd.DataFrame:
    """A row per contender."""
    interleave(entrants, 1)  # warm up: memory, the optimizers' state, workers, the first epoch
    times = interleave(entrants, rounds)
    chunks = pd.Series({name: e.steps for name, e in entrants.items()})
    rates = per_step * chunks / times
    about = {"task": config.experiment, "optimizer": config.optimizer_name}
    rows = [
        about
        | {"contender": name, "unit": unit, "per_second": rates[name].median()}
        | {f"q{q}": rates[name].quantile(q / 100) for q in (25, 75)}
        | {f"to_{r}": (rates[name] / rates[r]).median() for r in GOALS if r in entrants}
        for name in entrants
    ]
    threads = torch.get_num_threads()
    return pd.DataFrame(rows).assign(threads=threads, chunk=chunks.to_numpy(), rounds=rounds)


def readable(table: pd.DataFrame) -> pd.DataFrame:
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
        for name in GOALS
        if f"to_{name}" in t
    }
    return pd.DataFrame(columns | ratios).fillna("")


EXPLANATION = """\
Medians over the rounds; in a round each contender takes a chunk of batches, in an order that is
rotated and turned round. Ratios are medians of the ratios within a round."""

LOOP_EXPLANATION = f"""\
- {LOOP}: `train()` as run.py calls it: batches drawn from the whole set, losses kept and written to
  a file as often as the experiment says, without W&B. No evaluation is in the time.
- {EVALUATED}: the same with the evaluations of the experiment: 15,000 images every 20
  (mnist_lr) or 100 steps (mnist_mlp).
- {BARE}: the same network and optimizer on batches that were cut beforehand; no log, no evaluation.
- {LOADER}: the same network and optimizer fed by torchvision's MNIST and a DataLoader with its
  defaults; no log, no evaluation.

Goals: {LOOP} at least {GOALS[BARE]:g} of {BARE} and {GOALS[LOADER]:g} × {LOADER}."""

INPUT_EXPLANATION = f"""\
- {PIPELINE}: the batches of the experiment, drawn, flipped, cropped and scaled as in a run.
- {NETWORK}: forward, backward and optimizer step of its ResNet-18 on batches made beforehand.
- {LOADER}: the same images as torchvision has them, one PIL image at a time, with its transforms,
  by a DataLoader with {WORKERS} workers that stay.

Goals: {PIPELINE} at least {GOALS[NETWORK]:g} × {NETWORK} and {GOALS[LOADER]:g} × {LOADER}."""


def section(title: str, part: pd.DataFrame, explanation: str) -> list[str]:
    least = part.loc[part["chunk"].idxmin()]
    threads = dict(zip(part["task"], part["threads"], strict=True))
    facts = {
        "threads": ", ".join(f"{task} {count}" for task, count in threads.items()),
        "chunk": f"{part['chunk'].max()} batches ({least['contender']} {least['chunk']})",
        "rounds": part["rounds"].max(),
    }
    return [f"## {title}", listed(facts), markdown_table(readable(part)), explanation]


def document(loop: pd.DataFrame, images: pd.DataFrame, quick: bool) -> str:
    about = {key: value for key, value in machine().items() if key != "threads"}
    parts = ["# Speed of training"]
    parts += ["**Small chunks, for the tests: these numbers mean nothing.**"] if quick else []
    parts += [listed(about), EXPLANATION]
    parts += section("Training loop", loop, LOOP_EXPLANATION)
    parts += section("Image input", images, INPUT_EXPLANATION)
    return "\n\n".join(parts) + "\n"


def bench(results: Path, quick: bool) -> pd.DataFrame:
    data = plain_data(quick)
    pairs = [(task, optimizer) for task in TASKS for optimizer in OPTIMIZERS]
    loop = pd.concat([time_loop(*pair, data, quick) for pair in pairs], ignore_index=True)
    images = time_input(quick)
    table = pd.concat([loop, images], ignore_index=True)
    write(table, document(loop, images, quick), results / "benchmarks" / "bench-training")
    return table


def main(words: Sequence[str] | None = None) -> None:
    command(bench, readable, "Time the training loop and the image input.", "bench-training", words)


if __name__ == "__main__":
    main()
