"""train(): the only training loop."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from experiments.config.errors import ConfigError, last_line
from experiments.progress import Progress
from experiments.records.status import Status
from experiments.task import CustomStep, Metrics, Step, Task
from experiments.training.checkpoint import Checkpoint
from experiments.training.signals import answered_after_a_step, stop_request

Losses = defaultdict[str, list[Tensor]]
TakeStep = Callable[[Step | CustomStep, torch.optim.Optimizer], Tensor | None]


class Log(Protocol):
    """What the loop needs of a record."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def keep(self, files: Mapping[str, bytes]) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Training:
    """A training between two steps, with the state of everything that takes part in it."""

    task: Task
    optimizers: Mapping[str, torch.optim.Optimizer]
    record: Log
    progress: Progress = field(default_factory=lambda: Progress(shown=False))
    take_step: TakeStep = lambda step, optimizer: step.take(optimizer)
    done: int = 0  # steps taken
    losses: Losses = field(default_factory=lambda: defaultdict(list))  # since the last record

    def state_dict(self) -> dict[str, Any]:
        return {
            "done": self.done,
            "losses": {name: torch.stack(parts) for name, parts in self.losses.items()},
            "players": {name: list(map(Tensor.detach, p)) for name, p in self.players()},
            "optimizers": {name: o.state_dict() for name, o in self.optimizers.items()},
            "task": self.task.state_dict(),
            "random": random_states(self.device),
            "record": self.record.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
        for name, parts in state["losses"].items():  # a follower gets those of the leader's GPU
            self.losses[name] = list(parts.to(self.device))
        for name, parameters in self.players():
            for parameter, value in zip(parameters, state["players"][name], strict=True):
                parameter.copy_(value)
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.task.load_state_dict(state["task"])
        set_random_states(state["random"], self.device)
        self.record.load_state_dict(state["record"])

    def players(self) -> list[tuple[str, list[torch.nn.Parameter]]]:
        return list(self.task.players().items())

    @property
    def device(self) -> torch.device:
        return self.players()[0][1][0].device

    def take(self, step: Step | CustomStep) -> None:
        loss = self.take_step(step, self.optimizers[step.player])
        if loss is not None:
            self.losses[f"{step.player}/loss"].append(loss)
        self.task.after_step()
        self.done += step.size
        self.progress.advance(step.size)

    def newest_losses(self) -> Metrics:
        """Return the loss of each player's last step; waits for the device."""
        return {name: float(parts[-1]) for name, parts in self.losses.items()}

    def log(self, metrics: Metrics) -> bool:
        """Record metrics and mean losses; return whether they and all parameters are finite."""
        metrics |= {name: mean_loss(parts) for name, parts in self.losses.items()}
        self.losses.clear()
        self.record.log(self.done, metrics)
        self.progress.log(metrics)
        return all(map(math.isfinite, metrics.values())) and self.finite()

    @torch.no_grad()
    def finite(self) -> bool:
        """Whether all parameters are finite. Large ones are fine: a sum of them could overflow."""
        parts = [p for _, parameters in self.players() for p in parameters if p.numel()]
        ends = [end.double().cpu() for p in parts for end in p.aminmax()]
        return bool(torch.stack(ends).isfinite().all())


def train(
    task: Task,
    optimizers: Mapping[str, torch.optim.Optimizer],
    record: Log,
    *,
    steps: int,
    log_every: int,
    schedule: Callable[[float], float] | None = None,
    take_step: TakeStep = lambda step, optimizer: step.take(optimizer),
    progress: Progress | None = None,
    load: Callable[[], dict[str, Any] | None] = lambda: None,
    checkpoint: Checkpoint | None = None,
) -> Status:
    """Train until `steps` are done; return FINISHED, DIVERGED or INTERRUPTED.

    Metrics are recorded every `log_every` steps and at the end, together with each player's mean
    loss since the last record; if one of them, or a parameter, is NaN or inf, the run has diverged.
    `schedule` maps the fraction of steps done to a factor of the learning rates. It resumes
    from the state that `load` returns, unless that is None.
    """
    shown = progress or Progress(shown=False)
    training = Training(task, optimizers, record, shown, take_step)
    restore(training, load())
    training.progress.begin(steps, training.done, training.newest_losses)
    try:
        with training.progress, answered_after_a_step():
            return take_steps(training, steps, log_every, schedule, checkpoint)
    except OSError:
        raise
    except Exception:
        if training.finite():
            raise
        training.log({})  # steps and evaluations may raise if a parameter is NaN or inf
        return Status.DIVERGED


def restore(training: Training, state: dict[str, Any] | None) -> None:
    if state is None:
        return
    try:
        training.load_state_dict(state)
    except Exception as error:  # the training may be half restored, so it cannot start over here
        raise ConfigError(
            "the checkpoint was written by incompatible code "
            f"({type(error).__name__}: {last_line(error)}): use force=true to start the run again"
        ) from error


def take_steps(
    training: Training,
    steps: int,
    log_every: int,
    schedule: Callable[[float], float] | None,
    checkpoint: Checkpoint | None,
) -> Status:
    task, record = training.task, training.record
    for step in task.steps():
        if schedule is not None:
            set_rates(training.optimizers, schedule(training.done / steps))
        training.take(step)
        over = training.done >= steps
        if over or training.done // log_every > (training.done - step.size) // log_every:
            if not training.log(task.evaluate_at_end() if over else task.evaluate()):
                return Status.DIVERGED
            if over:
                record.keep(task.files())
                return Status.FINISHED
        if checkpoint and (stop_request.received or checkpoint.due):
            checkpoint.save(training.state_dict())
        if stop_request.received:
            return Status.INTERRUPTED
    raise RuntimeError(
        f"{type(task).__name__}.steps() ended after {training.done} of {steps} steps"
    )


def set_rates(optimizers: Mapping[str, torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def mean_loss(losses: list[Tensor]) -> float:
    """Return the mean; only here the loop waits for the device, on which steps leave losses."""
    return float(torch.stack(losses).cpu().mean(dtype=torch.float64))


def random_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's global generators (for dropout): the CPU, then the run's GPU."""
    gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *gpu]


def set_random_states(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
