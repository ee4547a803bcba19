"""RunProgress: a run notes how far it is in its folder. Watch: shows all runs that do.

Files work for every engine: a run may be trained by this process, a worker or a cluster.
Does not import torch, which only the processes that train need.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from heapq import heapify, heapreplace
from math import isnan, nan
from pathlib import Path
from typing import Any, Self

from experiments.config.schema import Config, leaves
from experiments.progress import (
    INTERVAL,
    Progress,
    Snapshot,
    Terminal,
    Values,
    aligned,
    count_of,
    duration,
    left,
    named,
    output,
    print_line,
    spaced,
)
from experiments.records.files import is_locked
from experiments.records.metrics import last_value, shown_names
from experiments.records.record import INFO, PROGRESS
from experiments.records.run import Run
from experiments.records.status import Status


class RunProgress(Progress):
    """The progress of a run: its losses and its main metric."""

    def __init__(self, run: Run, unit: str = "step", shown: bool = False) -> None:
        super().__init__(unit, shown)
        self.config, self.path = run.config, run.folder / PROGRESS

    def log(self, values: Values) -> None:
        super().log(chosen_values(self.config, values))

    def report(self, snapshot: Snapshot) -> None:
        super().report(snapshot)
        with suppress(OSError):  # the record reports a full disk
            self.path.write_text(json.dumps(asdict(snapshot)))

    def remove(self) -> None:
        """Remove the file of a run that is complete; of others, it says how much is left."""
        with suppress(OSError):
            self.path.unlink()


def chosen_values(config: Config, row: Values) -> dict[str, float]:
    """Return the losses that were minimized, then the main metric."""
    losses = [name for name in row if name.endswith("/loss")]
    return {name: row[name] for name in [*losses, *shown_names(config, row)[:1]]}


def read_snapshot(folder: Path) -> Snapshot | None:
    """Return how far a run is, or None if no process trains it."""
    try:
        state = json.loads((folder / PROGRESS).read_text())
    except (OSError, ValueError):  # it has ended, or is writing the file
        return None
    return Snapshot(**state) if is_locked(folder) else None


class Watch:
    """Shows the runs in progress, one line each, until all have ended."""

    def __init__(self, runs: Sequence[Run], title: str) -> None:
        self.title, self.labels, self.total = title, labels(runs), len(runs)
        self.waiting = {run.folder: run for run in runs}  # and running
        self.before = {folder: changed_at(folder) for folder in self.waiting}
        self.seen = dict[Path, Snapshot]()  # the newest snapshot of each run
        self.ended, self.trained, self.failed, self.workers = 0, 0.0, 0, 1
        self.created = self.begun = time.monotonic()
        self.output, self.lock = output(), threading.Lock()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.stopped.set()
        self.thread.join()
        self.output.close()
        if kind is None and self.total:
            seconds = time.monotonic() - self.created
            ended = count_of(self.total, "run")
            print_line(f"{self.title}: {ended} ended after {duration(seconds)}")

    def watch(self) -> None:
        while not self.stopped.is_set():
            with suppress(OSError):  # a folder that cannot be read now
                self.look()
            self.stopped.wait(INTERVAL)

    def look(self) -> None:
        """Read the folders of the runs that have not ended, and show the result."""
        with self.lock:
            running = {f: state for f in self.waiting if (state := read_snapshot(f)) is not None}
            for folder, run in list(self.waiting.items()):
                # A launcher may return its runs only when all of them have ended.
                if changed_at(folder) != self.before[folder] and run.done:
                    self.end(run, run.status)
            self.note(running)
            if isinstance(self.output, Terminal):
                self.output.draw(self.lines(running))

    def note(self, running: Mapping[Path, Snapshot]) -> None:
        new = [folder for folder in running if folder not in self.seen]
        if new and not self.seen and not self.ended:  # starting the workers took time too
            self.begun = time.monotonic() - max(running[folder].seconds for folder in new)
        for folder in new:
            self.say(f"{self.labels[folder]} started")
        self.seen |= running
        self.workers = max(self.workers, len(running))

    def note_end(self, run: Run, status: Status) -> None:
        """Count a run that the engine has returned."""
        with self.lock:
            self.end(run, status)

    def end(self, run: Run, status: Status) -> None:
        if self.waiting.pop(run.folder, None) is None:
            return
        self.ended += 1
        self.failed += status.is_failure
        state = self.seen.get(run.folder)
        resumed = state.fraction - state.new_fraction if state else 0.0
        if status == Status.FINISHED:
            self.trained += 1.0 - resumed
        elif state:
            self.trained += state.new_fraction
        count = f"{self.labels[run.folder]} {status} ({self.ended}/{self.total})"
        self.say(spaced(count, *result_of(run) if run.done else ()))

    def say(self, line: str) -> None:
        """Print a line in a log file; a terminal shows the state instead."""
        if not isinstance(self.output, Terminal):
            print_line(f"{self.title}: {line}")

    def lines(self, running: Mapping[Path, Snapshot]) -> list[str]:
        """Return a line for all runs, then one for each run in progress."""
        fraction = (self.ended + sum(s.fraction for s in running.values())) / (self.total or 1)
        waiting = len(self.waiting) - len(running)
        seconds = time.monotonic() - self.begun
        remaining = seconds_left(
            seconds, self.trained, list(running.values()), waiting, self.workers
        )
        counts = f"{self.ended}/{self.total} runs" + f", {self.failed} failed" * bool(self.failed)
        whole = spaced(f"{self.title}: {counts}", f"{fraction:.0%}", left(remaining))
        parts = map(self.run_parts, running, running.values())
        return [whole, *(f"  {line}" for line in aligned(parts, str.ljust))]

    def run_parts(self, folder: Path, state: Snapshot) -> list[str]:
        main = named(dict(list(state.values.items())[-1:]))
        return [self.labels[folder], f"{state.fraction:4.0%}", main, state.speed]


def seconds_left(
    elapsed: float, trained: float, running: Sequence[Snapshot], waiting: int, workers: int
) -> float:
    """Return the time until all runs have ended; NaN if unknown.

    `trained` is the number of runs that ended since the start; a part of a run counts as a
    fraction. Each worker that is done with its run takes the next one of those that wait.
    """
    done = trained + sum(state.new_fraction for state in running)
    if not done:
        return nan
    each = elapsed * workers / done  # seconds of a worker for one run
    own = [each * (1.0 - s.fraction) if isnan(s.seconds_left) else s.seconds_left for s in running]
    busy = own + [0.0] * (workers - len(own))
    heapify(busy)
    for _ in range(waiting):
        heapreplace(busy, busy[0] + each)
    return max(busy)


def labels(runs: Sequence[Run]) -> dict[Path, str]:
    """Name each run by what it does not share with the others."""
    kinds = dict[tuple[str, str], list[dict[str, Any]]]()
    flat = {run.folder: leaves(run.config.identity()) for run in runs}
    for run in runs:
        kinds.setdefault(kind_of(run), []).append(flat[run.folder])
    varied = {kind: varied_keys(settings) for kind, settings in kinds.items()}
    several = len({experiment for experiment, _ in kinds}) > 1

    def label(run: Run) -> str:
        experiment, optimizer = kind_of(run)
        settings = flat[run.folder]
        values = [f"{k.rpartition('.')[2]}={settings.get(k)}" for k in varied[kind_of(run)]]
        return " ".join([experiment] * several + [optimizer, *values, f"seed={run.config.seed}"])

    return {run.folder: label(run) for run in runs}


def kind_of(run: Run) -> tuple[str, str]:
    return run.config.experiment, run.config.optimizer_name


def varied_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for values in settings for key in values)
    return [key for key in keys if len({repr(values.get(key)) for values in settings}) > 1]


def result_of(run: Run) -> list[str]:
    """Return the last value of the main metric and the time."""
    table = run.metrics()
    names = shown_names(run.config, (name for name in table if name != "step"))[:1]
    return [named({name: last_value(table, name) for name in names}), duration(run.info["seconds"])]


def changed_at(folder: Path) -> int | None:
    """Return when run.json was written: when the run begins, and when it ends."""
    try:
        return (folder / INFO).stat().st_mtime_ns
    except OSError:
        return None
