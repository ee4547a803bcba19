"""The index of runs, runs.csv: settings, status, provenance, and the products that use each run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.records.files import write_text
from experiments.records.run import Run, given

Rows = dict[str, dict[str, str]]
INDEX_COLUMNS = (
    "run", "experiment", "optimizer", "settings", "scale", "seed", "status", "seconds", "metrics",
    "started", "commit", "machine", "versions", "records", "serves", "command",
)  # fmt: skip
WITHOUT = "no"  # in the column `records`: the row was published before records were kept


def update_index(path: Path, product: str, runs: Sequence[Run], products: Collection[str]) -> None:
    """Update the rows of a product's runs; `product` is one of `products`, such as figure-03."""
    before = read_index(path)
    rows = serving_only(before, {*products} - {product})
    for run in runs:
        name = name_of(run)
        if run.done:
            rows[name] = index_row(run) | {"serves": rows.get(name, {}).get("serves", "")}
        if name in rows:
            rows[name] = serving(rows[name], product)
    rows = {name: row for name, row in rows.items() if row["serves"]}
    if rows != before:
        write_index(path, rows)


def name_of(run: Run) -> str:
    """Return the folder of a run below results/runs."""
    return f"{run.config.experiment}/{run.entry}"


def serving_only(rows: Rows, products: Collection[str]) -> Rows:
    """Return the rows with every other product removed from `serves`."""
    return {
        name: row | {"serves": " ".join(p for p in row["serves"].split() if p in products)}
        for name, row in rows.items()
    }


def serving(row: dict[str, str], product: str) -> dict[str, str]:
    return row | {"serves": " ".join(sorted({*row["serves"].split(), product}))}


def index_row(run: Run) -> dict[str, str]:
    """Return the row of a finished run."""
    config, info = run.config, run.info
    machine, versions = info["machine"], info["versions"]
    return {
        "run": name_of(run),
        "experiment": config.experiment,
        "optimizer": config.optimizer_name,
        "settings": settings(config.identity()["optimizer"]),
        "scale": config.scale,
        "seed": str(config.seed),
        "status": run.status,
        "seconds": f"{info['seconds']:.1f}",
        "metrics": last_metrics(run.metrics()),
        "started": info["started"],
        "commit": short_commit(info["commit"]),
        "machine": f"{machine['processor']}, {machine['cores']} cores",
        "versions": f"Python {machine['python']}, torch {versions['torch']}",
        "records": "yes",
        "command": info["command"],
    }


def short_commit(commit: str | None) -> str:
    """Return twelve digits, and the suffix of a checkout with changes."""
    digits, _, mark = str(commit).partition("-")
    return digits[:12] + (f"-{mark}" if mark else "")


def settings(optimizer: Mapping[str, Any]) -> str:
    """lr=0.01 betas=[0,0.999] n=1"""
    chosen = {k: v for k, v in optimizer.items() if not k.startswith("_") and v is not None}
    return " ".join(given(k, v, plus="") for k, v in chosen.items())


def last_metrics(metrics: pd.DataFrame, most: int = 8) -> str:
    """Return the last value of the first `most` metrics; empty if nothing was recorded."""
    if metrics.empty:
        return ""
    ends = {name: metrics[name].dropna() for name in metrics.columns if name != "step"}
    words = [f"{name}={values.iloc[-1]:.5g}" for name, values in ends.items() if len(values)]
    return " ".join([f"step={metrics['step'].iloc[-1]}", *words[:most]])


def read_index(path: Path) -> Rows:
    return read_rows(path, "run")


def read_rows(path: Path, key: str) -> Rows:
    """Return a csv as strings, by the column that names its rows; empty if it does not exist."""
    if not path.exists():
        return {}
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    return {str(r[key]): {str(k): str(v) for k, v in r.items()} for r in table.to_dict("records")}


def write_index(path: Path, rows: Rows) -> None:
    ordered = [rows[name] for name in sorted(rows)]
    write_text(path, pd.DataFrame(ordered, columns=INDEX_COLUMNS).to_csv(index=False))
