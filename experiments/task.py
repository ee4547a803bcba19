"""Task and Measurement: what a problem must provide to be trained, or measured, by our loops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

Metrics = dict[str, float]  # metric → value, at one step


@dataclass
class Step:
    """One update of one player; `loss` returns the scalar to minimize."""

    player: str
    loss: Callable[[], Tensor]
    clip: float | None = field(default=None, kw_only=True)  # maximum norm of all gradients together
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
class CustomStep:
    """A step that calls the optimizer in its own way; it may cover `size` steps at once."""

    player: str
    update: Callable[[torch.optim.Optimizer], None]
    size: int = 1

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        self.update(optimizer)


class Task(ABC):
    """A problem of training: its players, its steps and its metrics."""

    gives_closure: ClassVar[bool] = False  # whether steps pass a closure to the optimizer
    resumable: ClassVar[bool] = True  # whether state_dict() is enough to resume
    divisible: ClassVar[bool] = False  # whether several processes can share a batch
    epoch_steps: int | None = None  # steps of one pass over the data, if the task has epochs
    total_steps: int | None = None  # steps of the training, if its length is given in epochs
    slow_because: str = ""  # why steps of this optimizer take longer than others; known after one
    # Whether a step is a partial that does the same with its tensors every time, without the host.
    capturable: bool = False

    @abstractmethod
    def players(self) -> dict[str, list[torch.nn.Parameter]]:
        """Name → parameters; each player gets its own optimizer."""

    def parameter_groups(self, player: str) -> list[Any]:
        """The parameters as the optimizer gets them; groups may have options of their own."""
        return list(self.players()[player])

    def check_optimizers(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:  # noqa: B027
        """Raise a ValueError if the task does not support one of the optimizers."""

    @abstractmethod
    def steps(self) -> Iterator[Step | CustomStep]:
        """Yield steps without end; the loop stops when it has taken enough."""

    def after_step(self) -> None:  # noqa: B027 (most problems have no feasible set)
        """Project the parameters onto the feasible set."""

    @abstractmethod
    def evaluate(self) -> Metrics:
        """Return the metrics after every `log_every` steps."""

    def evaluate_at_end(self) -> Metrics:
        """Return the metrics after the last step, where an evaluation may take longer."""
        return self.evaluate()

    def files(self) -> dict[str, bytes]:
        """Return name → content of files to keep beside the metrics; called after the last step."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs besides parameters: data order, random generators."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but got {sorted(state)}")


class Measurement(ABC):
    """A problem that gives rows of metrics without training: lemmas, grids, simulations.

    It gets an optimizer of one scalar parameter (float64, on the CPU) and computes with its rule
    and settings. It takes seconds, so it is not resumable.

    >>> class Rates(Measurement):
    ...     def __init__(self, seed, device): ...
    ...     def rows(self, optimizer):
    ...         yield from ({"lr": optimizer.defaults["lr"] / n} for n in (1, 2, 3))
    """

    resumable: ClassVar[bool] = False
    divisible: ClassVar[bool] = False

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027
        """Raise a ValueError if the measurement does not support the optimizer."""

    @abstractmethod
    def rows(self, optimizer: torch.optim.Optimizer) -> Iterator[Metrics]:
        """Yield the rows, computing each when it is requested; they may be endless."""
