"""Task and Step: what a problem must provide to be trained by the one loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_


@dataclass
class Step:
    """One update of one player; `loss` returns the scalar to be minimised."""

    player: str
    loss: Callable[[], Tensor]
    clip: float | None = field(default=None, kw_only=True)  # of the norm of all gradients together
    size: ClassVar[int] = 1  # steps on the x axis

    def take(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """Update the player and return the loss before the update, if there is one."""
        optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        if self.clip is not None:
            groups = optimizer.param_groups
            clip_grad_norm_([p for group in groups for p in group["params"]], self.clip)
        optimizer.step()
        return loss.detach()


@dataclass
class Stretch:
    """Many steps at once, for a problem that can say what they do without taking each of them."""

    player: str
    act: Callable[[torch.optim.Optimizer], None]
    size: int = 1

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        self.act(optimizer)


class Task(ABC):
    """A problem: who plays, how a step goes, how it is judged."""

    ends: ClassVar[bool] = False  # whether steps() stops by itself, before `steps` are done
    gives_closure: ClassVar[bool] = False  # whether a step hands the optimizer what it minimises
    resumable: ClassVar[bool] = True  # whether state_dict() has all that it takes to go on
    divisible: ClassVar[bool] = False  # whether several processes can share a batch
    epoch_steps: int | None = None  # of one pass over the data, if there are passes
    total_steps: int | None = None  # of a training whose length is given in epochs

    @abstractmethod
    def players(self) -> dict[str, list[torch.nn.Parameter]]:
        """Name → parameters; each player gets an optimizer of its own."""

    def check_optimizers(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:  # noqa: B027
        """Raise a ValueError for an optimizer that this problem cannot be tried with."""

    @abstractmethod
    def steps(self) -> Iterator[Step | Stretch]:
        """Steps without end, unless the problem ends; the loop stops when they are enough."""

    def after_step(self) -> None:  # noqa: B027 (most problems have no feasible set)
        """Bring the parameters back into the feasible set."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Metric → value, at the end of a stretch of `log_every` steps."""

    def evaluate_at_end(self) -> dict[str, float]:
        """The same after the last step, when more time may be taken."""
        return self.evaluate()

    def files(self) -> dict[str, bytes]:
        """Name → content of what is kept beside the metrics, asked for after the last step."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What must be kept beside the parameters to go on: data order, random generators."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but got {sorted(state)}")
