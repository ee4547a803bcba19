"""How long runs will take, from the times of finished runs: your own, else the published ones."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from experiments.config.gpus import has_gpu, jobs_at_once
from experiments.config.schema import Config
from experiments.records import archive, index, provenance, record
from experiments.records.run import Run
from experiments.records.speed import probe
from experiments.records.status import Status

START = 4.0  # seconds until the processes of a pool have imported torch
UNITS = (("d", 86400), ("h", 3600), ("min", 60))


@dataclass(frozen=True)
class Timing:
    """The time of a finished run."""

    seconds: float
    scale: str
    steps: int | None  # None: decided by epochs, or unknown
    optimizer: str
    setting: str
    machine: Mapping[str, Any]  # may lack keys
    own: bool

    @property
    def is_local(self) -> bool:
        here = {"processor": provenance.processor(), "cores": os.cpu_count()}
        return self.own and all(self.machine.get(key) == here[key] for key in here)

    def seconds_here(self, run: Run) -> float:
        """Convert to this machine, if the speed of the other one is known, and to other steps."""
        there = self.machine.get("probe")
        speed = 1.0 if self.is_local or not there else probe() / there
        steps = run.config.steps
        return self.seconds * speed * (steps / self.steps if steps and self.steps else 1.0)


@dataclass(frozen=True)
class Estimate:
    """The time of several runs; `unknown` is the number of runs whose time is not included."""

    seconds: float
    at_once: int
    unknown: int = 0
    source: str = ""  # in words

    def words(self, after: str = "") -> str:
        """
        >>> Estimate(90, at_once=2, unknown=1).words(" left")
        'about 1.5 min left and 1 of unknown length'
        """
        known = [f"about {rough_duration(self.seconds)}{after}"] if self.seconds else []
        return " and ".join(known + [f"{self.unknown} of unknown length"] * bool(self.unknown))


def estimate(
    runs: Sequence[Run], at_once: int | None = None, known: Mapping[Path, float] | None = None
) -> Estimate:
    """Estimate the time of runs of which `at_once` are trained in parallel.

    `known` has the seconds of runs that were estimated in another way, by folder.
    """
    at_once = min(at_once or parallel_runs(runs), len(runs)) or 1
    seconds, own = dict(known or {}), set[bool]()
    alike = {run.folder.parent: similar(run) for run in {r.folder.parent: r for r in runs}.values()}
    for run in runs:
        if run.folder not in seconds and (found := alike[run.folder.parent]):
            seconds[run.folder] = median(timing.seconds_here(run) for timing in found)
            own |= {timing.own for timing in found}
    parts = [seconds[run.folder] * fraction_left(run) for run in runs if run.folder in seconds]
    whole = max(sum(parts) / at_once, *parts) + START * (at_once > 1) if parts else 0.0
    return Estimate(whole, at_once, len(runs) - len(parts), words_for(own))


def words_for(own: set[bool]) -> str:
    """Return what the times are of: own runs, published ones, or both."""
    kinds = ["your runs"] * (True in own) + ["published runs"] * (False in own)
    return " and ".join(kinds)


def parallel_runs(runs: Iterable[Run]) -> int:
    """Return how many of these runs a figure trains at once on this machine."""
    if has_gpu() or all(run.config.scale == "smoke" for run in runs):
        return 1
    threads = [run.config.threads for run in runs]
    return 1 if None in threads else jobs_at_once(max(t for t in threads if t))


def fraction_left(run: Run) -> float:
    """Return the part of an interrupted run that is not done."""
    info, steps = run.info, run.config.steps
    resumes = Status.in_info(info) in (Status.INTERRUPTED, Status.KILLED, Status.RUNNING)
    return max(0.0, 1.0 - info["step"] / steps) if resumes and steps else 1.0


def similar(run: Run) -> list[Timing]:
    """Return the times of the most similar runs: same scale, then machine, setting, optimizer."""
    c = run.config
    alike = [t for t in timings(c.results, c.published, c.experiment) if t.scale == c.scale]
    alike = [t for t in alike if t.is_local] or alike
    alike = [t for t in alike if t.setting == run.setting] or alike
    return [t for t in alike if t.optimizer == c.optimizer_name] or alike


def is_timed(config: Config) -> bool:
    """Whether a run of this experiment and optimizer was ever finished."""
    known = timings(config.results, config.published, config.experiment)
    return any(t.optimizer == config.optimizer_name for t in known)


@cache
def timings(results: Path, published: Path, experiment: str) -> list[Timing]:
    """Return the times of all finished runs of an experiment."""
    folder = results / "runs" / experiment
    own = (own_timing(path.parent) for path in folder.glob(f"*/*/{record.INFO}"))
    recorded = (
        timing_of(info, info["run"].split("/")[0], own=False)
        for info in archive.load_infos(published, experiment)
    )
    listed = listed_timings(published / "runs.csv").get(experiment, [])
    return [timing for timing in (*own, *recorded, *listed) if timing is not None]


def own_timing(folder: Path) -> Timing | None:
    info = record.read_info(folder)
    return timing_of(info, folder.parent.name, own=True) if info else None


def timing_of(info: Mapping[str, Any], setting: str, own: bool) -> Timing | None:
    if Status.in_info(info) != Status.FINISHED:
        return None
    config = info["config"]
    name = config["optimizer_name"]
    scale, steps, machine = config["scale"], config["steps"], info["machine"]
    return Timing(info["seconds"], scale, steps, name, setting, machine, own)


@cache
def listed_timings(path: Path) -> dict[str, list[Timing]]:
    """Return the times of runs that were published before records were kept, by experiment."""
    found = dict[str, list[Timing]]()
    for row in index.read_index(path).values():
        if row["records"] == index.WITHOUT and row["status"] == Status.FINISHED and row["seconds"]:
            _, setting, _ = row["run"].split("/")
            timed = Timing(
                float(row["seconds"]), row["scale"], None, row["optimizer"], setting, {}, own=False
            )
            found.setdefault(row["experiment"], []).append(timed)
    return found


def rough_duration(seconds: float) -> str:
    """
    >>> rough_duration(5000)
    '1.4 h'
    """
    unit, length = next(((u, n) for u, n in UNITS if seconds >= n), ("s", 1))
    return f"{seconds / length:.2g} {unit}"
