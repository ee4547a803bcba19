"""Random generators of a seed, one per purpose, and what they draw for the steps of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

PURPOSES = ("initialisation", "order", "noise")
Drawn = tuple[Tensor, ...]  # for one step
T = TypeVar("T")


def generator(seed: int, purpose: str) -> torch.Generator:
    """Return the generator of a seed for one purpose; purposes do not affect each other.

    >>> generator(0, "order").initial_seed() == generator(0, "noise").initial_seed()
    False
    """
    sequence = np.random.SeedSequence([seed, PURPOSES.index(purpose)])
    return torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))


class Epochs(Generic[T]):
    """What each step needs of a random generator, without end.

    `draw` returns it for all steps of an epoch: drawn on the CPU, so that a seed gives the same on
    every device, and moved at once, so that no step waits for a copy to the device.
    """

    def __init__(
        self, source: torch.Generator, draw: Callable[[torch.Generator], Sequence[T]]
    ) -> None:
        self.source, self.draw = source, draw
        self.start_epoch()

    @property
    def per_epoch(self) -> int:
        return len(self.epoch)

    def start_epoch(self) -> None:
        self.before = self.source.get_state()
        self.epoch, self.position = self.draw(self.source), 0

    def __iter__(self) -> Iterator[T]:
        while True:
            if self.position == len(self.epoch):
                self.start_epoch()
            self.position += 1
            yield self.epoch[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state before this epoch, and the number of steps since."""
        return {"generator": self.before.clone(), "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.set_state(state["generator"])
        self.start_epoch()
        self.position = state["position"]


class Batches(Epochs[Tensor]):
    """Row numbers of batches, without end.

    Every epoch is a new permutation; the last incomplete batch is dropped.
    """

    def __init__(
        self, count: int, size: int, source: torch.Generator, device: torch.device
    ) -> None:
        if not 1 <= size <= count:
            raise ValueError(f"batch is {size}; expected 1 to {count}, the number of samples")
        self.count, self.size, self.device = count, size, device
        super().__init__(source, self.permuted)

    def permuted(self, source: torch.Generator) -> Sequence[Tensor]:
        used = self.count // self.size * self.size
        order = torch.randperm(self.count, generator=source)[:used]
        return order.view(-1, self.size).to(self.device).unbind()


def moved(steps: Sequence[Drawn], device: torch.device) -> Sequence[Drawn]:
    """Return the tensors of many steps, all of one type, on the device."""
    return steps if device.type == "cpu" else in_one_copy(steps, device)


def in_one_copy(steps: Sequence[Drawn], device: torch.device) -> list[Drawn]:
    parts = [part for step in steps for part in step]
    if not parts:
        return list(steps)
    flat = torch.cat([part.flatten() for part in parts]).to(device)
    pieces = flat.split([part.numel() for part in parts])
    views = (piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True))
    return [tuple(islice(views, len(step))) for step in steps]
