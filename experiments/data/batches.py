"""Random generators of a seed, one for each purpose, and the order in which samples are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

PURPOSES = ("initialisation", "order", "noise")


def generator(seed: int, purpose: str) -> torch.Generator:
    """The draws of a seed for one purpose; to change how one is used leaves the others as they are.

    >>> generator(0, "order").initial_seed() == generator(0, "noise").initial_seed()
    False
    """
    sequence = np.random.SeedSequence([seed, PURPOSES.index(purpose)])
    return torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))


class Batches:
    """Row numbers of batches, without end.

    Every epoch is a new permutation; what is left of it when no batch can be filled is dropped.
    """

    def __init__(
        self, count: int, size: int, source: torch.Generator, device: torch.device
    ) -> None:
        if not 1 <= size <= count:
            raise ValueError(f"batch is {size}; it must be in 1..{count}, the number of samples")
        self.count, self.size, self.source, self.device = count, size, source, device
        self.start_epoch()

    @property
    def per_epoch(self) -> int:
        return self.count // self.size

    def start_epoch(self) -> None:
        self.before = self.source.get_state()
        order = torch.randperm(self.count, generator=self.source)[: self.per_epoch * self.size]
        self.epoch = order.view(self.per_epoch, self.size).to(self.device).unbind()
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            if self.position == self.per_epoch:
                self.start_epoch()
            self.position += 1
            yield self.epoch[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        """The generator before this epoch was drawn, and how many batches of it are spent."""
        return {"generator": self.before.clone(), "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.set_state(state["generator"])
        self.start_epoch()
        self.position = state["position"]
