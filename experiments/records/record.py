"""Record: the files that a run writes, metrics.csv and run.json.

metrics.csv is the source of truth; trackers get a copy of it.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pandas as pd

from experiments.config.schema import Config
from experiments.records import provenance
from experiments.records.files import (
    is_locked,
    remove_drafts,
    reporting_write_errors,
    write_bytes,
    write_text,
)
from experiments.records.status import Status
from experiments.records.tracking import track_run

METRICS, INFO = "metrics.csv", "run.json"
PROGRESS = ".progress"  # how far an unfinished run is; a killed process leaves it too

KILLED = "the process was killed (out of memory?)"

METRICS_COLUMNS = ("step", "metric", "value")


class Record:
    """The append-only log of one run: a context manager that always records how the run ended.

    >>> with Record(folder, config) as record:
    ...     record.log(100, {"theta": -0.5})
    ...     record.status = Status.FINISHED
    """

    def __init__(
        self, folder: Path, config: Config, command: str = "", tags: Sequence[str] = ()
    ) -> None:
        self.folder, self.config, self.command, self.tags = folder, config, command, list(tags)
        self.status, self.step = Status.INTERRUPTED, 0
        self.files: dict[str, bytes] = {}
        self.about: dict[str, Any] = {}  # more keys of run.json

    def __enter__(self) -> Self:
        self.started, self.begun = time.time(), time.monotonic()
        self.mirror = track_run(self.config, self.folder, self.tags)
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_drafts(self.folder)
        if not is_final(self.folder):
            self.write_info(Status.RUNNING)
        # Write to a draft: a finished record stays valid until another one is finished.
        self.draft = self.folder / f".{METRICS}"
        self.file = self.draft.open("w+", newline="")
        self.rows = csv.writer(self.file, lineterminator="\n")
        self.rows.writerow(METRICS_COLUMNS)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return what was written so far, so that a checkpoint and its metrics always agree."""
        with reporting_write_errors(self.draft):
            self.file.seek(0)
        return {"metrics": self.file.read(), "step": self.step, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begun, self.step = time.monotonic() - state["seconds"], state["step"]
        self.file.seek(0)
        self.file.truncate()
        self.file.write(state["metrics"])
        written = csv.DictReader(state["metrics"].splitlines())
        for step, rows in groupby(written, key=itemgetter("step")):  # a new copy needs all
            self.mirror.log(int(step), {row["metric"]: float(row["value"]) for row in rows})

    @property
    def seconds(self) -> float:
        """Training time over all restarts; monotonic, so changes of the clock do not matter."""
        return time.monotonic() - self.begun

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one value per metric; `step` is their x axis."""
        self.step = step
        # repr() is exact, so that equal runs write equal files.
        self.rows.writerows((step, name, repr(float(value))) for name, value in metrics.items())
        self.mirror.log(step, metrics)

    def keep(self, files: Mapping[str, bytes]) -> None:
        """Add files that are written next to metrics.csv when the record is closed."""
        self.files |= files

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            self.status = Status.FAILED
        try:
            self.close(error)
        finally:
            self.mirror.finish(failed=self.status != Status.FINISHED)

    def close(self, error: BaseException | None) -> None:
        """Replace the old record by the new one, unless only the old one is final."""
        with reporting_write_errors(self.draft), self.file:
            self.file.flush()
            os.fsync(self.file.fileno())  # before run.json says that the file is complete
        if not self.status.is_final and is_final(self.folder):
            self.draft.unlink()
            return
        self.draft.replace(self.folder / METRICS)
        for name, content in self.files.items():
            write_bytes(self.folder / name, content)
            self.mirror.keep(self.folder / name)
        self.write_info(self.status, error=repr(error) if error else None)

    def note_failure(self, error: str) -> None:
        """Record a failure before the first step, so that `make status` shows it."""
        self.started, self.begun = time.time(), time.monotonic()
        self.write_info(Status.FAILED, error=error)

    def write_info(self, status: Status, error: str | None = None) -> None:
        complete = status != Status.RUNNING and (self.folder / METRICS).exists()
        info = {
            "status": status,
            "step": self.step,
            "error": error,
            "sha256": hash_metrics(self.folder) if complete else None,
            "seconds": round(self.seconds, 3),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self.started)),
            "command": self.command,
            "machine": provenance.machine(),
            "commit": provenance.commit(),
            "versions": provenance.versions(),
            **self.about,
            "config": self.config.model_dump(mode="json", exclude={"results", "published"}),
        }
        write_text(self.folder / INFO, json.dumps(info, indent=2, ensure_ascii=False) + "\n")


def status_of(folder: Path) -> Status:
    """Return the status of a run; one that is running although no process trains it was killed."""
    status = Status.in_info(read_info(folder))
    if status == Status.RUNNING and not is_locked(folder):
        status = Status.in_info(read_info(folder))  # its process may have ended in between
        return Status.KILLED if status == Status.RUNNING else status
    return status


def is_final(folder: Path) -> bool:
    return Status.in_info(read_info(folder)).is_final and (folder / METRICS).exists()


def read_info(folder: Path) -> dict[str, Any]:
    """Return run.json, or an empty dict if it is missing or invalid."""
    try:
        info = json.loads((folder / INFO).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def read_metrics(folder: Path) -> pd.DataFrame:
    """Return metrics.csv with one row per step and one column per metric."""
    expected = read_info(folder).get("sha256")
    if expected is not None and expected != hash_metrics(folder):
        raise OSError(
            f"checksum mismatch in {folder / METRICS}: delete the file and rerun the same command "
            "to train the run again"
        )
    return read_table(folder / METRICS, (folder / METRICS).stat().st_mtime_ns)


@lru_cache(maxsize=512)  # a figure and each of its claims read the same files
def read_table(path: Path, mtime: int) -> pd.DataFrame:
    long = pd.read_csv(path)
    wide = long.pivot(index="step", columns="metric", values="value")
    return wide.reset_index().rename_axis(columns=None)


def hash_metrics(folder: Path) -> str:
    return hashlib.sha256((folder / METRICS).read_bytes()).hexdigest()
