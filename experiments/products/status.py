"""The status of the runs of a figure: finished, failed and missing ones, and the time left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.progress import count_of, first_lines
from experiments.records import provenance, record
from experiments.records.estimate import estimate
from experiments.records.run import Run
from experiments.records.status import Status


def status_lines(title: str, runs: Sequence[Run], full: bool = False) -> list[str]:
    """Return a line on all runs, then the failed ones, each with the command that reruns it.

    `full` also lists missing runs.
    """
    states = [(run, run.status) for run in runs]
    left = estimate([run for run, state in states if not state.is_final]).words(" left")
    counts = f"{counted(state for _, state in states)} of {len(runs)} runs"
    lines = [f"{title}: {counts}" + (f"; {left}" if left else "")]
    for run, state in states:
        if state.is_failure:
            lines += failure(state, run.info.get("error"), run.command())
    if full:
        left_out = (Status.MISSING, Status.INTERRUPTED)
        listed = [run for run, state in states if state in left_out]
        lines += first_lines(listed, lambda run: f"{run.status}: {run.command()}")
    other = sum(run.done and run.info["commit"] != provenance.commit() for run in runs)
    if other:
        lines.append(f"    trained at another commit than this one: {count_of(other, 'run')}")
    return lines


def counted(states: Iterable[Status]) -> str:
    """Return counts such as 4 finished, 1 failed."""
    counts = Counter(states)
    return ", ".join(f"{counts[name]} {name}" for name in Status if counts[name])


def failure(status: Status, error: str | None, command: str) -> list[str]:
    cause = error or record.KILLED
    return [f"    {status}: {' '.join(cause.split())}", f"        {command}"]


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
