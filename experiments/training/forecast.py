"""What is said of runs before they are trained: how long they take, and what they write.

Does not import torch, which only the processes that train need.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from experiments.config.gpus import cores, runs_at_once, uses_gpu
from experiments.config.paths import ROOT, shown_path
from experiments.progress import count_of
from experiments.records import archive
from experiments.records.estimate import Estimate, estimate, is_timed, rough_duration, timings
from experiments.records.run import Run

LONG = 600.0  # seconds, of all runs
SLOW = 60.0  # seconds, of one run
PACE_TIMEOUT = 60.0  # seconds


def forecast_lines(runs: Sequence[Run], at_once: int | None) -> list[str]:
    """Return lines on the time of these runs, on slow ones, and on ways to make it shorter."""
    if not runs:
        return []
    timings.cache_clear()  # this process may have trained runs since the last forecast
    paces = measure_paces(untimed(runs))
    found = estimate(runs, at_once, {folder: pace.seconds for folder, pace in paces.items()})
    lines = [f"{time_of(found)}; {output_of(runs)}"]
    lines += [pace.line for pace in paces.values() if pace.seconds > SLOW]
    return lines + ([f"to make it shorter: {shorter(runs, found)}"] if found.seconds > LONG else [])


def time_of(found: Estimate) -> str:
    """Return the time in words, with what it is estimated from."""
    if not found.seconds:
        return "time unknown, no finished run is similar (make plan counts operations)"
    source = f", estimated from {found.source}" if found.source else ""
    return f"{found.words()}, {found.at_once} at a time{source}{busy()}"


def busy() -> str:
    """Return a warning if other processes use the cores, which no estimate takes into account."""
    load = os.getloadavg()[0]
    return f" (longer while the machine is busy: load {load:.1f})" if load > cores() else ""


def output_of(runs: Sequence[Run]) -> str:
    folder = shown_path(runs[0].config.results / "runs")
    return f"each run writes metrics.csv and run.json to {folder}"


def shorter(runs: Sequence[Run], found: Estimate) -> str:
    """Return the settings that reduce the time of these runs."""
    c = runs[0].config
    ways = ["scale=smoke (with make: SCALE=smoke), a test in seconds"] * (c.scale != "smoke")
    ways += ["scale=laptop"] * (c.scale == "paper" and c.cpu_scale == "laptop")
    published = sum(is_published(run) for run in runs)
    if published and c.records == "own":
        ways.append(f"records=all, which uses {count_of(published, 'published run')}")
    if len({run.config.seed for run in runs}) > 1:
        ways.append("fewer seeds")
    parallel = 1 if uses_gpu(c.device) else runs_at_once(run.config for run in runs)
    if found.at_once < min(len(runs), parallel):
        ways.append("engine=joblib, which uses all cores")
    return "; ".join([*ways, "python run.py -m engine=slurm on a cluster"])


def is_published(run: Run) -> bool:
    return run.entry in published_entries(run.config.published, run.config.experiment)


@cache
def published_entries(published: Path, experiment: str) -> set[str]:
    return {info["run"] for info in archive.load_infos(published, experiment)}


# -- optimizers that were never timed on a problem without data --------------------------------


@dataclass(frozen=True)
class Pace:
    """The measured speed of a setting."""

    run: Run
    rate: float  # steps per second
    seconds: float  # of the whole run
    reason: str  # why it is slow, if the task knows

    @property
    def line(self) -> str:
        c, why = self.run.config, f": {self.reason}" if self.reason else ""
        return (
            f"{c.experiment} with {c.optimizer_name} takes {rough_duration(self.seconds)} per run, "
            f"{self.rate:,.0f} steps per second (measured){why}"
        )


def untimed(runs: Sequence[Run]) -> list[Run]:
    """Return a run of each setting whose time depends on an optimizer that was never timed.

    A network takes most of the time of a step, but a problem without data may compute the steps of
    some optimizers all at once.
    """
    first = {run.folder.parent: run for run in reversed(runs)}
    return [
        run
        for run in first.values()
        if run.config.scale != "smoke"
        and "data" not in run.config.task
        and not is_timed(run.config)
    ]


def measure_paces(runs: Sequence[Run]) -> dict[Path, Pace]:
    """Measure the first steps of these runs in a process of its own; by folder of the setting."""
    if not runs:
        return {}
    requests = json.dumps([[*run.words(), f"threads={run.config.threads or 1}"] for run in runs])
    paths = os.pathsep.join([str(ROOT), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "experiments.training.pace"],
            env={**os.environ, "PYTHONPATH": paths},
            input=requests,
            capture_output=True,
            text=True,
            timeout=PACE_TIMEOUT,
            check=True,
        )
        answers = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):  # the training reports the error
        return {}
    pairs = zip(runs, answers, strict=True)
    return {run.folder.parent: Pace(run, **answer) for run, answer in pairs if answer}
