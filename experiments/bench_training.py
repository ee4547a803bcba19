"""Steps per second of the training loop on MNIST, against a bare loop and a DataLoader script.

    python -m experiments.bench_training [--quick] [--results FOLDER]

The contenders of a task take turns, a chunk of steps each, so that whatever else the machine does
falls on all of them.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms

from experiments.config import Config, build, compose
from experiments.data.files import fetch
from experiments.data.mnist import FILES
from experiments.execute import make_optimizers
from experiments.loop import train
from experiments.record import Record
from experiments.timing import command, interleave, listed, machine, markdown, write

CPU = torch.device("cpu")
TASKS = ("mnist_lr", "mnist_mlp")
OPTIMIZERS = ("sgd", "adashift")  # the cheapest one, which hides least of the loop, and ours
LOOP, EVALUATED, BARE, LOADER = "loop", "loop with evaluation", "bare", "DataLoader"
GOALS = {BARE: 0.8, LOADER: 5.0}


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
        every = self.config.log_every
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


def run_pair(task: str, optimizer: str, data: Dataset[Any], quick: bool) -> pd.DataFrame:
    """A row per contender."""
    steps, few, rounds = (20, 2, 3) if quick else (400, 40, 9)
    scale = "smoke" if quick else "paper"
    words = [f"experiment={task}", f"optimizer={optimizer}", f"scale={scale}", "tracking=off"]
    config = compose(words)
    with tempfile.TemporaryDirectory() as folder, Record(Path(folder), config) as record:
        entrants: dict[str, Ours | Script] = {
            LOOP: Ours(config, record, steps, evaluated=False),
            EVALUATED: Ours(config, record, steps, evaluated=True),
            BARE: Script(config, steps),
            LOADER: LoaderScript(config, few, data),
        }
        interleave(entrants, 1)  # warm up: memory, the optimizers' state, the first epoch
        times = interleave(entrants, rounds)
    rates = pd.Series({name: e.steps for name, e in entrants.items()}) / times
    about = {"task": task, "optimizer": optimizer}
    rows = [
        about
        | {"contender": name, "steps_per_second": rates[name].median()}
        | {f"q{q}": rates[name].quantile(q / 100) for q in (25, 75)}
        | {f"to_{goal}": (rates[name] / rates[goal]).median() for goal in GOALS}
        for name in entrants
    ]
    return pd.DataFrame(rows).assign(chunk=[e.steps for e in entrants.values()], rounds=rounds)


def readable(table: pd.DataFrame) -> pd.DataFrame:
    t = table
    columns = {
        "task": t["task"],
        "optimizer": t["optimizer"],
        "contender": t["contender"],
        "steps/s": [f"{x:,.0f}" for x in t["steps_per_second"]],
        "quartiles": [f"{a:,.0f}–{b:,.0f}" for a, b in zip(t["q25"], t["q75"], strict=True)],
        "÷ bare": [f"{x:.2f}" for x in t[f"to_{BARE}"]],
        "÷ DataLoader": [f"{x:.1f}" for x in t[f"to_{LOADER}"]],
    }
    return pd.DataFrame(columns)


EXPLANATION = f"""\
Steps per second, medians over the rounds; in a round each contender takes a chunk of steps, in an
order that is rotated and turned round. Ratios are medians of the ratios within a round.

- {LOOP}: `train()` as run.py calls it: batches drawn from the whole set, losses kept and written to
  a file as often as the experiment says, without W&B. No evaluation is in the time.
- {EVALUATED}: the same with the evaluations of the experiment: 15,000 images every 20
  (mnist_lr) or 100 steps (mnist_mlp).
- {BARE}: the same network and optimizer on batches that were cut beforehand; no log, no evaluation.
- {LOADER}: the same network and optimizer fed by torchvision's MNIST and a DataLoader with its
  defaults; no log, no evaluation.

Goals: {LOOP} at least {GOALS[BARE]:g} of {BARE} and {GOALS[LOADER]:g} × {LOADER}."""


def document(table: pd.DataFrame, quick: bool) -> str:
    chunks = f"{table['chunk'].max()} steps ({LOADER} {table['chunk'].min()})"
    facts = machine() | {"chunk": chunks, "rounds": table["rounds"].max()}
    parts = ["# Steps per second of the training loop"]
    parts += ["**Small chunks, for the tests: these numbers mean nothing.**"] if quick else []
    return "\n\n".join([*parts, listed(facts), markdown(readable(table)), EXPLANATION]) + "\n"


def bench(results: Path, quick: bool) -> pd.DataFrame:
    data = plain_data(quick)
    pairs = [(task, optimizer) for task in TASKS for optimizer in OPTIMIZERS]
    table = pd.concat([run_pair(*pair, data, quick) for pair in pairs], ignore_index=True)
    write(table, document(table, quick), results / "tables" / "bench-training")
    return table


def main(words: Sequence[str] | None = None) -> None:
    command(bench, readable, "Time the training loop on MNIST.", "bench-training", words)


if __name__ == "__main__":
    main()
