"""Writes any table spec as csv and Markdown: our number, its interval, the paper's beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from pydantic import BaseModel, ConfigDict

from experiments.claims import interval, values
from experiments.config import one_line_errors
from experiments.record import write_text
from experiments.runs import Run, Spec


class Row(BaseModel):
    """One number of the paper: which runs, which metric, and what the paper prints."""

    model_config = ConfigDict(extra="forbid")
    label: str
    run: str
    metric: str
    statistic: str = "last"
    paper: float | None = None


def write_table(spec: Spec, groups: Mapping[str, Sequence[Run]], stem: Path) -> None:
    """Write stem.csv and stem.md."""
    with one_line_errors():
        rows = [Row.model_validate(raw) for raw in spec.rows]
    table = pd.DataFrame([numbers(row, groups[row.run]) for row in rows])
    scales = sorted({run.config.scale for runs in groups.values() for run in runs})
    write_text(stem.with_suffix(".csv"), table.to_csv(index=False, float_format="%.10g"))
    write_text(stem.with_suffix(".md"), page(spec, table, " and ".join(scales)))


def numbers(row: Row, runs: Sequence[Run]) -> dict[str, object]:
    ours = values(runs, row.metric, row.statistic)
    low, high = interval(ours)
    return {
        "": row.label,
        "ours": ours.mean(),
        "low": low,
        "high": high,
        "n": len(ours),
        "paper": row.paper,
    }


def page(spec: Spec, table: pd.DataFrame, scale: str) -> str:
    lines = [
        f"# {spec.title}",
        "",
        f"{scale} scale; mean over the seeds, 95 % interval in brackets.",
        "",
    ]
    lines += ["| | ours | paper |", "|---|---|---|"]
    for _, row in table.iterrows():
        span = "" if row["low"] == row["high"] else f" [{row['low']:.6g}, {row['high']:.6g}]"
        paper = "" if pd.isna(row["paper"]) else f"{row['paper']:.6g}"
        lines.append(f"| {row['']} | {row['ours']:.6g}{span} | {paper} |")
    return "\n".join(lines) + "\n"
