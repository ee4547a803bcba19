"""Published records: every metric of every published run, one file per experiment.

`records/<experiment>.csv.xz` is a compressed table with a row for each run and step:
`pandas.read_csv(path, comment="#")` reads it. Its first lines start with #: the format, the sha256
of all lines that follow, and one line of JSON for each run (its run.json). Reading a file never
executes code.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.records.files import write_bytes
from experiments.records.status import Status

RECORDS_FORMAT = "# AdaShift Lab records, format 1"
MAX_RECORDS_BYTES = 2**30  # a small file can unpack to terabytes


class RecordsError(OSError):
    """A records file that cannot be used. One line: which file, what is wrong, how to fix it."""


@dataclass(frozen=True)
class Published:
    """A published run: its run.json and its metrics, one row per step."""

    info: dict[str, Any]
    metrics: pd.DataFrame

    @property
    def status(self) -> Status:
        return Status.in_info(self.info)


Runs = Mapping[str, Published]  # by name, such as "adam-0cd7570d/seed=0"


def path_of(published: Path, experiment: str) -> Path:
    return published / "records" / f"{experiment}.csv.xz"


def load(published: Path, experiment: str) -> Runs:
    """Return the published runs of an experiment; empty if there are none."""
    path = path_of(published, experiment)
    return read_runs(path, path.stat().st_mtime_ns) if path.exists() else {}


def load_infos(published: Path, experiment: str) -> list[dict[str, Any]]:
    """Return the run.json of each published run; empty if the file is missing or invalid.

    The metrics are not unpacked, which would take longer than all else in `make status`.
    """
    path = path_of(published, experiment)
    try:
        with lzma.open(path) as file:
            lines = islice(takewhile(lambda line: line.startswith(b"# "), file), 2, None)
            return [json.loads(line[2:]) for line in lines]
    except (OSError, EOFError, ValueError, lzma.LZMAError):
        return []


@cache
def read_runs(path: Path, mtime: int) -> Runs:
    """Return the runs of a file; `mtime` is part of the cache's key."""
    text = unpack(path)
    head, _, rest = text.partition(b"\n")
    if head.decode(errors="replace") != RECORDS_FORMAT:
        raise RecordsError(
            f"{path} is not a records file: expected the first line {RECORDS_FORMAT!r}"
        )
    checksum, _, rest = rest.partition(b"\n")
    if checksum.decode(errors="replace") != f"# sha256 {hashlib.sha256(rest).hexdigest()}":
        raise RecordsError(f"checksum mismatch in {path}: restore it with git checkout -- {path}")
    try:
        return parse(rest)
    except (KeyError, TypeError, ValueError) as error:  # pandas' own errors are ValueErrors
        raise RecordsError(
            f"{path} cannot be parsed: {type(error).__name__} {error}; "
            f"restore it with git checkout -- {path}"
        ) from error


def parse(text: bytes) -> Runs:
    """Return the runs of a file from the lines below its checksum."""
    lines = text.split(b"\n")
    count = next(i for i, line in enumerate(lines) if not line.startswith(b"# "))
    infos = [json.loads(line[2:]) for line in lines[:count]]
    rows = io.BytesIO(b"\n".join(lines[count:]))
    table = pd.read_csv(rows)
    parts = dict(list(table.groupby("run", sort=False)))
    if unknown := parts.keys() - {info["run"] for info in infos}:
        raise ValueError(f"{min(unknown)} has metrics but no run.json")
    empty = table.iloc[:0]  # for a run that diverged before its first evaluation
    return {i["run"]: Published(i, own_columns(parts.get(i["run"], empty))) for i in infos}


def unpack(path: Path) -> bytes:
    try:
        with lzma.open(path) as file:
            text = file.read(MAX_RECORDS_BYTES + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise RecordsError(
            f"{path} is truncated or not an xz file: restore it with git checkout -- {path}"
        ) from error
    if len(text) > MAX_RECORDS_BYTES:
        raise RecordsError(
            f"{path} unpacks to more than {MAX_RECORDS_BYTES:,} bytes: "
            f"restore it with git checkout -- {path}"
        )
    return text


def own_columns(part: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of one run without the metrics that only other runs have."""
    table = part.drop(columns="run").reset_index(drop=True)
    table = table[["step", *table.columns[table.notna().any()].drop("step", "ignore")]]
    return table.astype({name: float for name in table.columns if name != "step"})


def save(published: Path, experiment: str, runs: Runs) -> None:
    """Write a records file unless it already has this content."""
    path, content = path_of(published, experiment), serialize(runs)
    if not path.exists() or unpack(path) != content:
        write_bytes(path, lzma.compress(content, preset=9))


def serialize(runs: Runs) -> bytes:
    names = sorted(runs)
    infos = [json.dumps({**runs[n].info, "run": n}, ensure_ascii=False) for n in names]
    table = pd.concat([runs[n].metrics for n in names], keys=names, names=["run", None])
    table = table.copy().reset_index("run")  # copy() defragments it; pandas would warn
    metrics = sorted(table.columns.drop(["run", "step"]))
    rows = table[["run", "step", *metrics]].to_csv(index=False, lineterminator="\n")
    rest = "".join(f"# {info}\n" for info in infos).encode() + rows.encode()
    return f"{RECORDS_FORMAT}\n# sha256 {hashlib.sha256(rest).hexdigest()}\n".encode() + rest


def seeds_of(runs: Runs, setting: str) -> Iterable[Published]:
    """Return the published runs of one setting, such as "adam-0cd7570d"."""
    return [run for name, run in runs.items() if name.split("/")[0] == setting]


def experiments(published: Path) -> list[str]:
    """Return the names of the experiments that have published records."""
    return sorted(p.name.removesuffix(".csv.xz") for p in published.glob("records/*.csv.xz"))
