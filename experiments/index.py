"""The index of all runs, results/runs.csv: what was trained, where, how it ended, what it serves.

Runs themselves are too large to commit. A row stands for one of them wherever it was made: where a
run is at hand its row is written anew, where it is not the row that is known stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.record import write_text
from experiments.runs import Run, spec_path

Rows = dict[str, dict[str, str]]
COLUMNS = (
    "run", "experiment", "optimizer", "settings", "scale", "seed", "status", "seconds", "metrics",
    "started", "commit", "machine", "versions", "serves", "command",
)  # fmt: skip
ELSEWHERE = "made elsewhere"  # before there was an index


def update(path: Path, product: str, runs: Sequence[Run], is_made: bool) -> None:
    """Bring the rows of a product's runs up to date.

    `product` is figure-03, table-01 or claim-theory; `is_made` says that it exists, so that runs
    which are neither here nor in the index were made elsewhere.
    """
    before = read(path)
    rows = released(before, product)
    for run in runs:
        name = name_of(run)
        known = rows.get(name)
        if run.done or (known is None and is_made):
            rows[name] = row_of(run) | {"serves": known["serves"] if known else ""}
        if name in rows:
            rows[name] = serving(rows[name], product)
    rows = {name: row for name, row in rows.items() if row["serves"]}
    if rows != before:
        write(path, rows)


def name_of(run: Run) -> str:
    """Which run it is: its folder below results/runs."""
    return run.folder.relative_to(run.config.results / "runs").as_posix()


def released(rows: Rows, product: str) -> Rows:
    """Without what this product, or one that conf/ has no longer, was served by."""

    def stays(name: str) -> bool:
        kind, _, number = name.partition("-")
        return name != product and spec_path(kind, number).exists()

    return {
        name: row | {"serves": " ".join(filter(stays, row["serves"].split()))}
        for name, row in rows.items()
    }


def serving(row: dict[str, str], product: str) -> dict[str, str]:
    return row | {"serves": " ".join(sorted({*row["serves"].split(), product}))}


def row_of(run: Run) -> dict[str, str]:
    config = run.config
    about = {
        "run": name_of(run),
        "experiment": config.experiment,
        "optimizer": config.optimizer_name,
        "settings": settings(config.optimizer),
        "scale": config.scale,
        "seed": str(config.seed),
        "command": run.command(),
    }
    found = of_record(run) if run.done else {"status": ELSEWHERE}
    return dict.fromkeys(COLUMNS, "") | about | found


def of_record(run: Run) -> dict[str, str]:
    info = run.info
    machine, versions = info["machine"], info["versions"]
    return {
        "status": run.status,
        "seconds": f"{info['seconds']:.1f}",
        "metrics": last_metrics(run.metrics()),
        "started": info["started"],
        "commit": shortened(info["commit"]),
        "machine": f"{machine['system'].split('-')[0]}, {machine['cores']} cores",
        "versions": f"Python {machine['python']}, torch {versions['torch']}",
    }


def shortened(commit: str | None) -> str:
    """Twelve digits, and the mark of a changed checkout."""
    digits, _, mark = str(commit).partition("-")
    return digits[:12] + (f"-{mark}" if mark else "")


def settings(optimizer: Mapping[str, Any]) -> str:
    """lr=0.01 betas=[0,0.999] n=1"""
    given = {k: v for k, v in optimizer.items() if not k.startswith("_") and v is not None}
    return " ".join(f"{k}={json.dumps(v, separators=(',', ':'))}" for k, v in given.items())


def last_metrics(metrics: pd.DataFrame, most: int = 8) -> str:
    """The last number of each metric, of the first few if there are many."""
    ends = {name: metrics[name].dropna() for name in metrics.columns if name != "step"}
    words = [f"{name}={values.iloc[-1]:.5g}" for name, values in ends.items() if len(values)]
    return " ".join([f"step={metrics['step'].iloc[-1]}", *words[:most]])


def read(path: Path) -> Rows:
    return read_rows(path, "run")


def read_rows(path: Path, key: str) -> Rows:
    """A csv as texts, by the column that names its rows; empty if there is none."""
    if not path.exists():
        return {}
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    return {str(r[key]): {str(k): str(v) for k, v in r.items()} for r in table.to_dict("records")}


def write(path: Path, rows: Rows) -> None:
    ordered = [rows[name] for name in sorted(rows)]
    write_text(path, pd.DataFrame(ordered, columns=COLUMNS).to_csv(index=False))
