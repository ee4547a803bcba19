"""measure(): the loop of a measurement, which records rows and trains nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice

import torch

from experiments.progress import Progress
from experiments.records.record import Record
from experiments.records.status import Status
from experiments.task import Measurement
from experiments.training.signals import answered_after_a_step, stop_request


def measure(
    measurement: Measurement,
    optimizer: torch.optim.Optimizer,
    record: Record,
    *,
    steps: int | None,
    log_every: int,
    progress: Progress | None = None,
) -> Status:
    """Compute at most `steps` rows; return FINISHED, DIVERGED or INTERRUPTED.

    Every `log_every`-th row is recorded, and the last one; the step of a row is its number,
    starting at 1. A recorded row with NaN or inf ends the run as diverged.
    """
    rows = islice(measurement.rows(optimizer), steps)
    progress = (progress or Progress(shown=False)).begin(total=None)  # `steps` is only a limit
    with progress, answered_after_a_step():
        step, row = 0, dict[str, float]()
        for step, row in enumerate(rows, start=1):
            progress.advance()
            if step % log_every == 0 or step == steps:
                progress.log(row)
                if not log_finite(record, step, row):
                    return Status.DIVERGED
            if stop_request.received and step != steps:
                return Status.INTERRUPTED
    # The rows may end before `steps`, after a row that was not recorded.
    if step % log_every and step != steps and not log_finite(record, step, row):
        return Status.DIVERGED
    return Status.FINISHED


def log_finite(record: Record, step: int, row: Mapping[str, float]) -> bool:
    """Record a row; return whether all of its values are finite."""
    record.log(step, row)
    return all(map(math.isfinite, row.values()))
