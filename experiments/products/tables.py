"""Writes any table spec as csv and Markdown: our numbers and the paper's beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict

from experiments.config.errors import ConfigError, one_line_errors
from experiments.products.claims import interval, values
from experiments.products.markdown import markdown_table
from experiments.products.specs import Spec
from experiments.records.files import write_text
from experiments.records.run import Groups, Run


class Number(BaseModel):
    """One number of ours: which runs, which metric."""

    model_config = ConfigDict(extra="forbid")
    run: str
    metric: str
    statistic: str = "last"


class Row(BaseModel):
    """One number of the paper, and ours: a single one, or one for each named column.

    With `over`, one row for each of its items, which takes the place of {} in label and metric.
    """

    model_config = ConfigDict(extra="forbid")
    label: str
    run: str = ""
    metric: str = ""
    statistic: str = "last"
    columns: dict[str, Number] = {}
    over: list[int | float | str] = [""]
    paper: float | list[float] | None = None


def write_table(spec: Spec, groups: Groups, stem: Path) -> None:
    """Write stem.csv, a line for each number of ours, and stem.md, a line for each of the paper."""
    refuse_missing(groups)
    with one_line_errors():
        rows = [Row.model_validate(raw) for raw in spec.rows]
    table = pd.DataFrame([line for row in rows for line in lines_of(row, groups)])
    scales = sorted({run.config.scale for runs in groups.values() for run in runs})
    csv = table if table["column"].nunique() > 1 else table.drop(columns="column")
    write_text(stem.with_suffix(".csv"), csv.to_csv(index=False, float_format="%.10g"))
    write_text(stem.with_suffix(".md"), page(spec, table, " and ".join(scales)))


def refuse_missing(groups: Groups) -> None:
    missing = [run for runs in groups.values() for run in runs if not run.done]
    if missing:
        raise ConfigError(f"{len(missing)} runs are missing, make them first: {commands(missing)}")


def commands(runs: Sequence[Run]) -> str:
    more = f", … and {len(runs) - 3} more" if len(runs) > 3 else ""
    return ", ".join(run.command() for run in runs[:3]) + more


def lines_of(row: Row, groups: Groups) -> Iterator[dict[str, object]]:
    columns = row.columns or {
        "ours": Number(run=row.run, metric=row.metric, statistic=row.statistic)
    }
    papers = row.paper if isinstance(row.paper, list) else [row.paper] * len(row.over)
    if len(papers) != len(row.over):
        raise ConfigError(
            f"row {row.label}: {len(papers)} numbers of the paper for {len(row.over)} rows; give "
            "one for each item of `over`"
        )
    for item, paper in zip(row.over, papers, strict=True):
        for name, number in columns.items():
            label = {"": row.label.replace("{}", str(item)), "column": name}
            yield label | ours(number, str(item), groups) | {"paper": paper}


@np.errstate(invalid="ignore")  # a run that diverged
def ours(number: Number, item: str, groups: Groups) -> dict[str, object]:
    if number.run not in groups:
        raise ConfigError(f"a row of the table shows {number.run!r}, which no run is named")
    found = values(groups[number.run], number.metric.replace("{}", item), number.statistic)
    low, high = interval(found)
    return {"ours": found.mean(), "low": low, "high": high, "n": len(found)}


def page(spec: Spec, table: pd.DataFrame, scale: str) -> str:
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
        numbers = map(shown, group["ours"], group["low"], group["high"])
        paper = group["paper"].iloc[0]
        cells = {"": label, "paper": "" if pd.isna(paper) else f"{paper:.6g}"}
        rows.append(cells | dict(zip(group["column"], numbers, strict=True)))
    lines.append(markdown_table(pd.DataFrame(rows, columns=["", "paper", *names]).fillna("")))
    return "\n".join(lines) + "\n"


def shown(mean: float, low: float, high: float) -> str:
    """-0.0012 [-0.0014, -0.001]; no brackets where nothing varies."""
    return f"{mean:.4g}" + ("" if low == high else f" [{low:.4g}, {high:.4g}]")
