"""train(): the only training loop."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

from experiments.progress import progress
from experiments.record import Record
from experiments.task import Task


def train(
    task: Task,
    optimizers: Mapping[str, torch.optim.Optimizer],
    record: Record,
    *,
    steps: int,
    log_every: int,
    schedule: Callable[[float], float] | None = None,
    title: str = "",
) -> str:
    """Train until `steps` are done; return "finished", or "diverged" if a metric is no number.

    Metrics go to the record every `log_every` steps and at the end, with the mean of the losses
    that each player has had since the last time. `schedule` gives the factor of the learning rates
    from the part of the steps that is done.
    """
    done, losses = 0, defaultdict[str, list[torch.Tensor]](list)
    with progress(total=steps, desc=title, unit="step", unit_scale=True) as bar:
        for step in task.steps():
            if schedule is not None:
                set_rates(optimizers, schedule(done / steps))
            loss = step.take(optimizers[step.player])
            if loss is not None:
                losses[f"{step.player}/loss"].append(loss)
            task.after_step()
            done += step.size
            bar.update(step.size)
            if done // log_every == (done - step.size) // log_every and done < steps:
                continue
            evaluate = task.evaluate if done < steps else task.evaluate_at_end
            metrics = evaluate() | {name: mean(parts) for name, parts in losses.items()}
            losses.clear()
            record.log(done, metrics)
            if not all(map(math.isfinite, metrics.values())):
                return "diverged"
            if done >= steps:
                record.keep(task.files())
                return "finished"
    if task.ends:
        return "finished"
    raise RuntimeError(f"{type(task).__name__}.steps() ended after {done} of {steps} steps")


def set_rates(optimizers: Mapping[str, torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def mean(losses: list[torch.Tensor]) -> float:
    """The only wait for the device: steps leave their losses there."""
    return float(torch.stack(losses).cpu().mean(dtype=torch.float64))
