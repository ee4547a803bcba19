"""A Slurm cluster without accounting: submitit asks squeue for the states of its jobs.

submitit asks sacct, which fails on such a cluster; it then warns every few seconds, and waits
forever for a job that was killed. squeue lists a job for some minutes after its end (MinJobAge).
"""

from __future__ import annotations

import subprocess
from typing import Any

# what submitit reads: the columns of `sacct --parsable2`
STATES = "echo 'JobID|State|NodeList'; squeue --noheader --states=all --array --format='%i|%T|%N'"
SECONDS_BETWEEN_CALLS = 60  # fewer than Slurm's default MinJobAge, 300


def ask_squeue_without_accounting() -> None:
    """Make submitit ask squeue if sacct does not work here."""
    from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

    if has_accounting():
        return

    def command(watcher: Any) -> list[str] | None:
        return ["sh", "-c", STATES] if watcher._registered - watcher._finished else None

    changed: Any = SlurmInfoWatcher
    changed._make_command = command
    SlurmJob.watcher._delay_s = SECONDS_BETWEEN_CALLS


def has_accounting() -> bool:
    try:
        asked = subprocess.run(["sacct", "--noheader"], capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0
