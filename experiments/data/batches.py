"""Random generators of a seed, one per purpose, and the order of samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

PURPOSES = ("initialisation", "order", "noise")


def generator(seed: int, purpose: str) -> torch.Generator:
    """Return the generator of a seed for one purpose; purposes do not affect each other.

    >>> generator(0, "order").initial_seed() == generator(0, "noise").initial_seed()
    False
    """
    sequence = np.random.SeedSequence([seed, PURPOSES.index(purpose)])
    return torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))


class Batches:
    """Row numbers of batches, without end.

    Every epoch is a new permutation; the last incomplete batch is dropped.
    """

    def __init__(
        self, count: int, size: int, source: torch.Generator, device: torch.device
    ) -> None:
        if not 1 <= size <= count:
            raise ValueError(f"batch is {size}; expected 1 to {count}, the number of samples")
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
        """Return the generator's state before this epoch, and the number of batches used since."""
        return {"generator": self.before.clone(), "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.set_state(state["generator"])
        self.start_epoch()
        self.position = state["position"]
