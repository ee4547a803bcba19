"""A measurement instead of a training: every step is a row of the record."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping

import torch

from adashift.analysis.trajectory import NotLinear
from experiments.task import Stretch, Task
from experiments.tasks.counterexample import generator

Row = dict[str, float]


class RowTask(Task):
    """Asks the optimizer for its rule and computes with it; no parameter is moved."""

    resumable = False  # it is over in seconds

    def __init__(self, seed: int) -> None:
        self.rng = generator(seed)
        self.theta = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.row: Row = {}
        self.count: int | None = None  # of rows, where they come to an end

    @abstractmethod
    def try_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if the rule of this optimizer cannot be measured."""

    @abstractmethod
    def next_row(self, optimizer: torch.optim.Optimizer) -> Row:
        """Metric → value."""

    def players(self) -> dict[str, list[torch.nn.Parameter]]:
        return {"theta": [self.theta]}

    def check_optimizers(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        try:
            self.try_optimizer(optimizers["theta"])
        except NotLinear as error:
            raise ValueError(f"this experiment needs a chain of filters: {error}") from error

    def steps(self) -> Iterator[Stretch]:
        step = Stretch("theta", self.take_row)
        return itertools.repeat(step) if self.count is None else itertools.repeat(step, self.count)

    def take_row(self, optimizer: torch.optim.Optimizer) -> None:
        self.row = self.next_row(optimizer)

    def evaluate(self) -> Row:
        return dict(self.row)
