"""The status of the runs of a figure: finished, failed and missing ones, and the time left."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.config.gpus import has_gpu
from experiments.records import provenance, record
from experiments.records.run import Run
from experiments.records.status import Status

MAX_LISTED = 3  # missing runs; their commands are alike
UNITS = (("d", 86400), ("h", 3600), ("min", 60))


def status_lines(title: str, runs: Sequence[Run], full: bool = False) -> list[str]:
    """Return a line on all runs, then the failed ones, each with the command that reruns it.

    `full` also lists missing runs.
    """
    states = [(run, run.status) for run in runs]
    left = time_left([run for run, state in states if not state.is_final])
    lines = [f"{title}: {counted(state for _, state in states)} of {len(runs)} runs{left}"]
    for run, state in states:
        if state.is_failure:
            lines += failure(state, run.info.get("error"), run.command())
    if full:
        left_out = (Status.MISSING, Status.INTERRUPTED)
        lines += run_lines([run for run, state in states if state in left_out])
    other = sum(run.done and run.info["commit"] != provenance.commit() for run in runs)
    if other:
        lines.append(f"    {other} were trained at another commit than the current one")
    return lines


def counted(states: Iterable[Status]) -> str:
    """Return counts such as 4 finished, 1 failed."""
    counts = Counter(states)
    return ", ".join(f"{counts[name]} {name}" for name in Status if counts[name])


def failure(status: Status, error: str | None, command: str) -> list[str]:
    cause = error or record.KILLED
    return [f"    {status}: {' '.join(cause.split())}", f"        {command}"]


def run_lines(runs: Sequence[Run]) -> list[str]:
    more = [f"    … and {len(runs) - MAX_LISTED} more"] if len(runs) > MAX_LISTED else []
    return [f"    {run.status}: {run.command()}" for run in runs[:MAX_LISTED]] + more


def strays(results: Path, known: Iterable[Path]) -> list[str]:
    """Return the same lines for runs that no figure uses, from their run.json."""
    folders = {path.parent for path in results.glob(f"runs/*/*/*/{record.INFO}")} - set(known)
    if not folders:
        return []
    states = {folder: record.status_of(folder) for folder in sorted(folders)}
    lines = [f"other runs: {counted(states.values())}"]
    for folder, state in states.items():
        if state.is_failure:
            info = record.read_info(folder)
            lines += failure(state, info.get("error"), str(info.get("command")))
    return lines


# -- time --------------------------------------------------------------------------------------


def time_left(runs: Sequence[Run]) -> str:
    """Return the estimated time for these runs, in parallel as far as the cores allow."""
    if not runs:
        return ""
    known = [(run, seconds) for run in runs if (seconds := expected(run)) is not None]
    about = rough_duration(sum(seconds * share(run) for run, seconds in known))
    unknown = len(runs) - len(known)
    parts = [f"about {about} left"] * bool(known) + [f"{unknown} of unknown length"] * bool(unknown)
    return "; " + " and ".join(parts)


def expected(run: Run) -> float | None:
    """Return the mean seconds of similar runs, of this machine and optimizer if there are any."""
    c = run.config
    size = run_size(c.model_dump(mode="json"))
    found = finished(c.results / "runs" / c.experiment)
    alike = [i for i in found if run_size(i["config"]) == size]
    alike = [i for i in alike if i["machine"] == provenance.machine()] or alike
    alike = [i for i in alike if i["config"]["optimizer_name"] == c.optimizer_name] or alike
    return fmean(i["seconds"] for i in alike) if alike else None


def run_size(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the settings that determine how long a run of an experiment takes."""
    return config["scale"], config["steps"]


@cache
def finished(folder: Path) -> list[dict[str, Any]]:
    infos = (record.read_info(path.parent) for path in folder.glob(f"*/*/{record.INFO}"))
    return [info for info in infos if Status.in_info(info) == Status.FINISHED]


def share(run: Run) -> float:
    """Return the fraction of this machine that a run uses."""
    cores = os.cpu_count() or 1
    return 1.0 if has_gpu() else min(1.0, (run.config.threads or cores) / cores)


def rough_duration(seconds: float) -> str:
    """
    >>> rough_duration(5000)
    '1.4 h'
    """
    unit, length = next(((u, n) for u, n in UNITS if seconds >= n), ("s", 1))
    return f"{seconds / length:.2g} {unit}"
