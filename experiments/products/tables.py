"""Writes any table spec as csv and Markdown: our numbers and the paper's beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.config.errors import ConfigError
from experiments.products.comparison import values, with_interval
from experiments.products.inference import interval
from experiments.products.markdown import markdown_table
from experiments.products.schema import Spec, TableCell, TableRow
from experiments.records.files import write_text
from experiments.records.run import Groups, Run


def write_table(spec: Spec, groups: Groups, stem: Path) -> None:
    """Write stem.csv, a line for each number of ours, and stem.md, a line for each of the paper."""
    require_runs(groups)
    table = pd.DataFrame([line for row in spec.rows for line in table_lines(row, groups)])
    scales = sorted({run.config.shown_scale for runs in groups.values() for run in runs})
    csv = table if table["column"].nunique() > 1 else table.drop(columns="column")
    write_text(stem.with_suffix(".csv"), csv.to_csv(index=False, float_format="%.10g"))
    write_text(stem.with_suffix(".md"), table_page(spec, table, " and ".join(scales)))


def require_runs(groups: Groups) -> None:
    missing = [run for runs in groups.values() for run in runs if not run.done]
    if missing:
        raise ConfigError(f"{len(missing)} runs are missing; run {commands(missing)}")


def commands(runs: Sequence[Run]) -> str:
    more = f", … and {len(runs) - 3} more" if len(runs) > 3 else ""
    return ", ".join(run.command() for run in runs[:3]) + more


def table_lines(row: TableRow, groups: Groups) -> Iterator[dict[str, object]]:
    for item, paper in zip(row.over, row.papers(), strict=True):
        for name, cell in row.cells().items():
            label = {"": row.label.replace("{}", str(item)), "column": name}
            yield label | numbers_in(cell, str(item), groups) | {"paper": paper}


@np.errstate(invalid="ignore")  # a run that diverged
def numbers_in(cell: TableCell, item: str, groups: Groups) -> dict[str, object]:
    found = values(groups[cell.run], cell.metric.replace("{}", item), cell.statistic)
    low, high = interval(found)
    return {"ours": found.mean(), "low": low, "high": high, "n": len(found)}


def table_page(spec: Spec, table: pd.DataFrame, scale: str) -> str:
    seeds = " and ".join(str(n) for n in sorted(table["n"].unique()))
    lines = [
        f"# {spec.title}",
        "",
        f"{scale} scale; mean over {seeds} seeds, 95 % interval in brackets.",
        "",
    ]
    lines += [spec.note, ""] if spec.note else []
    names = list(table["column"].unique())
    rows = []
    for label, group in table.groupby("", sort=False):
        numbers = map(with_interval, group["ours"], group["low"], group["high"])
        paper = group["paper"].iloc[0]
        cells = {"": label, "paper": "" if pd.isna(paper) else f"{paper:.6g}"}
        rows.append(cells | dict(zip(group["column"], numbers, strict=True)))
    lines.append(markdown_table(pd.DataFrame(rows, columns=["", "paper", *names]).fillna("")))
    return "\n".join(lines) + "\n"
