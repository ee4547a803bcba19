"""The speed of runs, measured on their first steps: `python -m experiments.training.pace`.

Reads a list of runs from stdin, each as the list of its overrides, and writes a list of answers,
both as JSON; the answer for a run that cannot be measured is null.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

import torch

from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.task import Task
from experiments.training.device import set_up_torch
from experiments.training.execute import prepare

MEASURED = 0.5  # seconds


def pace(overrides: list[str]) -> dict[str, Any] | None:
    """Return steps per second, the seconds of the whole run, and the reason if it is slow."""
    config, device = compose(overrides), torch.device("cpu")
    set_up_torch(config, device)
    try:
        task, loop = prepare(config, device)
    except ConfigError:  # the training reports it
        return None
    if not isinstance(task, Task):
        return None
    rate = steps_per_second(task, loop)
    return {"rate": rate, "seconds": loop.keywords["steps"] / rate, "reason": task.slow_because}


def steps_per_second(task: Task, loop: partial[Any]) -> float:
    """Measure steps after the first one, which may warm up."""
    optimizers, done, begun = loop.args[1], 0, 0.0
    for step in task.steps():
        step.take(optimizers[step.player])
        task.after_step()
        if not begun:
            begun = time.perf_counter()
            continue
        done += step.size
        if (seconds := time.perf_counter() - begun) > MEASURED:
            return done / seconds
    raise RuntimeError(f"{type(task).__name__}.steps() ended after {done} steps")


if __name__ == "__main__":
    print(json.dumps([pace(overrides) for overrides in json.load(sys.stdin)]))
