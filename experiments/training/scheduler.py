"""Trains many runs: one policy for all engines, for figures and for `run.py -m`.

A run that fails does not stop the others; a full disk does. A run that another process is training
comes last. An engine gives up several runs when one of its processes is killed: runs that had begun
are then trained alone, so that the run that kills its process is found.

Does not import torch, which only the processes that train need.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from experiments.config.errors import ConfigError, last_line
from experiments.config.schema import Config
from experiments.progress import count_of, first_lines
from experiments.records.files import locked
from experiments.records.record import Record
from experiments.records.run import Run
from experiments.records.status import Status
from experiments.records.tracking import prepare
from experiments.training.forecast import forecast_lines
from experiments.training.watch import Watch


@dataclass(frozen=True)
class RunOutcome:
    """How an attempt to train a run ended; RUNNING if another process is training it."""

    status: Status
    error: str | None = None  # in one line
    lacks_data: bool = False

    def __str__(self) -> str:
        return f"failed: {self.error}" if self.status.is_failure else self.status


class UnfinishedRunError(ConfigError):
    """A job of a sweep whose run has no result; `outcome` says why."""

    def __init__(self, outcome: RunOutcome) -> None:
        super().__init__(outcome)  # the only argument, so that it can be pickled
        self.outcome = outcome


class Engine(Protocol):
    """Trains runs: in this process, in a pool of processes or on a cluster."""

    def __call__(self, runs: Sequence[Run], /) -> Iterator[tuple[Run, RunOutcome]]:
        """Yield every run once, when it has ended; KILLED if the engine gave it up."""


class FailedRunsError(ConfigError):
    """Some runs failed; `failures` has their outcomes by folder."""

    def __init__(self, message: str, failures: Mapping[Path, RunOutcome]) -> None:
        super().__init__(message)
        self.failures = failures


def train_all(runs: Sequence[Run], engine: Engine, title: str, at_once: int | None = None) -> None:
    """Train the runs that are not finished; report the failures at the end.

    `at_once` is how many runs the engine trains in parallel; None: as many as the cores allow.
    """
    missing = [run for run in runs if run.needs_training]
    ready = f", {len(runs) - len(missing)} already finished" if len(missing) < len(runs) else ""
    scale = scale_notice(runs[0].config)
    print(f"{title}: {count_of(len(missing), 'run')} to train at {scale}{ready}", flush=True)
    for line in forecast_lines(missing, at_once):
        print(f"{title}: {line}", flush=True)
    prepare(run.config for run in missing)
    failures = dict[Path, RunOutcome]()
    with Watch(missing, title) as watch:
        for run, outcome in outcomes_of(missing, engine):
            watch.note_end(run, outcome.status)
            if outcome.status.is_failure:
                failures[run.folder] = outcome
    if failures:
        print_failures([(run, failures[run.folder]) for run in missing if run.folder in failures])
        message = f"{title}: {len(failures)} of {len(missing)} runs failed, see above"
        raise FailedRunsError(message, failures)


def outcomes_of(runs: Sequence[Run], engine: Engine) -> Iterator[tuple[Run, RunOutcome]]:
    """Yield every run once; those that another process is training come last."""
    before, busy = infos_of(runs), []
    for run, outcome in attempts(runs, engine):
        if outcome.status == Status.RUNNING:
            busy.append(run)
        else:
            yield run, outcome
    for run in busy:
        yield run, wait_and_train(run, engine, before[run.folder])


def attempts(runs: Sequence[Run], engine: Engine) -> Iterator[tuple[Run, RunOutcome]]:
    """Yield every run once; runs that the engine gave up are trained again."""
    before, given_up = infos_of(runs), []
    for run, outcome in engine(runs) if runs else ():
        if outcome.status == Status.KILLED and len(runs) > 1:
            given_up.append(run)
        else:
            yield run, outcome
    suspects = [run for run in given_up if run.info != before[run.folder]]
    if suspects or len(given_up) < len(runs):
        waiting = [run for run in given_up if run.info == before[run.folder]]
        yield from attempts(waiting, engine)
    else:  # no run has begun
        suspects = given_up
    for run in suspects:
        yield run, train_alone(run, engine, before[run.folder])


def train_alone(run: Run, engine: Engine, before: Mapping[str, object]) -> RunOutcome:
    """Train the run, unless it was finished since its run.json was read."""
    if run.done and run.info != before:
        return RunOutcome(run.status)
    ((_, outcome),) = engine([run])
    return outcome


def wait_and_train(run: Run, engine: Engine, before: Mapping[str, object]) -> RunOutcome:
    """Train the run if the process that is training it does not finish it."""
    while True:
        with locked(run.folder, announce=print):
            pass
        outcome = train_alone(run, engine, before)
        if outcome.status != Status.RUNNING:
            return outcome


def infos_of(runs: Sequence[Run]) -> dict[Path, dict[str, object]]:
    """Return run.json by folder: it changes when a run begins, and when it ends."""
    return {run.folder: run.info for run in runs}


def print_failures(failures: Sequence[tuple[Run, RunOutcome]]) -> None:
    """Print every cause once, with commands that try again, and record it for `make status`."""
    causes = dict[RunOutcome, list[Run]]()
    for run, outcome in failures:
        record_failure(run, outcome)
        causes.setdefault(outcome, []).append(run)
    for outcome, runs in causes.items():
        if outcome.lacks_data:  # the error says how to get the data
            print(f"{outcome} (runs affected: {len(runs)})", file=sys.stderr)
        else:
            print("\n".join([str(outcome), *first_lines(runs, Run.command)]), file=sys.stderr)


def record_failure(run: Run, outcome: RunOutcome) -> None:
    """Write the failure of a run that could not begin; otherwise its record has it."""
    with locked(run.folder) as mine:
        if mine and run.status == Status.MISSING:
            Record(run.folder, run.config, run.command()).note_failure(str(outcome.error))


def describe(error: BaseException) -> str:
    """Return one line; errors of the user need no class name."""
    name = "" if isinstance(error, ConfigError | OSError) else f"{type(error).__name__}: "
    return f"{name}{last_line(error)}"


def scale_notice(config: Config) -> str:
    """Return the scale, and how to get the paper's scale if it is another."""
    fix = "" if config.scale == "paper" else " (use scale=paper for the paper's size)"
    return f"{config.shown_scale} scale{fix}"
