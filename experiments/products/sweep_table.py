"""The table at the end of a sweep: what was varied, the metrics over the seeds, the best first."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from math import inf, isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from experiments.config.command_line import key_of
from experiments.config.schema import OUTSIDE_IDENTITY, Config, leaves
from experiments.products.markdown import text_table
from experiments.products.summaries import score, tail_mean
from experiments.progress import count_of
from experiments.records.files import write_if_changed
from experiments.records.record import METRICS
from experiments.records.run import Run, typed
from experiments.records.status import Status

Request = tuple[Run, Sequence[str]]  # a run, and the overrides that asked for it

MOST_ROWS = 20  # in the terminal; the csv has all
AVERAGED = "mean over the last tenth of a run"
SPREAD = " ± standard deviation over the seeds"


def report_sweep(requests: Sequence[Request]) -> Iterator[str]:
    """Write a csv for each experiment of a sweep; yield what to print."""
    for members in by_experiment(requests):
        runs = [run for run, _ in members]
        table, path = sweep_table(members), csv_path(runs)
        write_if_changed(path, table.to_csv(index=False, float_format="%.10g").encode())
        yield from ("", title(runs, len(table)), "", shown(table, metrics_of(runs)), "")
        yield from (*advice(table, runs[0].config), f"table:  {path} (all metrics, commands)")


def by_experiment(requests: Sequence[Request]) -> list[list[Request]]:
    """Metrics of different experiments cannot be compared: each has its own table."""
    parts = dict[str, list[Request]]()
    for run, words in requests:
        parts.setdefault(run.config.experiment, []).append((run, words))
    return list(parts.values())


def csv_path(runs: Sequence[Run]) -> Path:
    """The same runs have the same file, whatever the command line that asked for them."""
    config = runs[0].config
    digest = hashlib.sha256("\n".join(sorted(run.entry for run in runs)).encode()).hexdigest()
    return config.results / "sweeps" / f"{config.experiment}-{digest[:8]}.csv"


# -- the numbers -------------------------------------------------------------------------------


def sweep_table(requests: Sequence[Request]) -> pd.DataFrame:
    """Return a row for each setting, the best first; diverged and failed ones are last."""
    seeds = dict[str, list[Run]]()
    for run, _ in requests:
        seeds.setdefault(run.setting, []).append(run)
    metrics = metrics_of([run for run, _ in requests])
    values = {run.setting: row for (run, _), row in zip(requests, varied(requests), strict=True)}
    settings = sorted(seeds.values(), key=rank)
    return pd.DataFrame([values[runs[0].setting] | row_of(runs, metrics) for runs in settings])


def rank(runs: Sequence[Run]) -> tuple[int, float]:
    """Sort by the worst status of the seeds, then by their mean score."""
    sign = {"highest": -1, "lowest": 1, None: nan}[runs[0].config.best]
    status = max([*Status].index(run.status) for run in runs)
    value = nan if status else sign * fmean(map(score, runs))
    return status, inf if isnan(value) else value


def row_of(runs: Sequence[Run], metrics: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"seeds": len(runs), "status": status_text(runs)}
    for metric in metrics:
        values = pd.Series([number(run, metric) for run in runs])
        row[metric] = values.mean(skipna=False)  # the mean of the others would be biased
        row[f"{metric} sd"] = values.std(skipna=False)
    return row | {"command": runs[0].command(), "folder": str(runs[0].folder.parent)}


def number(run: Run, metric: str) -> float:
    """The metric over the last tenth of a run; NaN if the run is not finished or lacks it."""
    if run.status != Status.FINISHED or metric not in run.metrics():
        return float("nan")
    return tail_mean(run.metrics(), metric)


def status_text(runs: Sequence[Run]) -> str:
    """finished, or 2 finished, 1 diverged"""
    counts = Counter(run.status for run in runs)
    if len(counts) == 1:
        return str(runs[0].status)
    return ", ".join(f"{counts[status]} {status}" for status in Status if status in counts)


def metrics_of(runs: Sequence[Run], patterns: Sequence[str] = ()) -> list[str]:
    """Return the recorded metrics, in the order of the patterns or of the experiment's list."""
    tables = [run.metrics() for run in runs if has_metrics(run)]
    recorded = [str(name) for table in tables for name in table.columns.drop("step")]
    wanted = patterns or runs[0].config.metrics or ["*"]
    return list(dict.fromkeys(n for p in wanted for n in recorded if fnmatchcase(n, p)))


def has_metrics(run: Run) -> bool:
    """Whether metrics can be read; also of a run that was interrupted."""
    return run.done or (run.source == run.folder and (run.folder / METRICS).exists())


# -- what was varied ---------------------------------------------------------------------------


def varied(requests: Sequence[Request]) -> list[dict[str, str]]:
    """Return for each run the settings that were overridden and in which the runs differ.

    Settings that only follow from others, such as the tuned learning rate of an optimizer, are left
    out. The seed is not a setting.
    """
    keys = list(dict.fromkeys(key_of(word) for _, words in requests for word in words))
    every = [settings_of(run.config) for run, _ in requests]
    names = dict.fromkeys(n for key in keys for one in every for n in one if is_in(n, key))
    names = dict.fromkeys(n for n in names if len({one.get(n) for one in every}) > 1)
    return [{name: one.get(name, "") for name in names} for one in every]


def is_in(name: str, key: str) -> bool:
    """Whether an override of a key sets this setting; schedule={…} sets schedule.milestones."""
    return name == key or (key != "optimizer" and name.startswith(f"{key}."))


def settings_of(config: Config) -> dict[str, str]:
    """Return every setting of a run as typed on the command line: key → value."""
    values = leaves(config.model_dump(mode="json", exclude=OUTSIDE_IDENTITY))
    values["optimizer"] = values.pop("optimizer_name")
    return {typed(key): typed_value(value) for key, value in values.items()}


def typed_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


# -- the text ----------------------------------------------------------------------------------


def title(runs: Sequence[Run], count: int) -> str:
    config = runs[0].config
    scales = " and ".join(sorted({run.config.shown_scale for run in runs}))
    order = f"{config.best} {config.metrics[0]} first" if config.best else "not ranked"
    spread = SPREAD if len(runs) > count else ""
    settings = count_of(count, "setting")
    return f"{config.experiment}, {scales} scale, {settings}, {order}; {AVERAGED}{spread}"


def shown(table: pd.DataFrame, metrics: Sequence[str]) -> str:
    """Return the table as text; on a terminal, with as many metrics as fit into its width."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else inf
    texts = [text_table(columns_shown(table, metrics[:n])) for n in range(len(metrics), 0, -1)]
    texts = texts or [text_table(columns_shown(table, []))]
    fitting = (text for text in texts if text.index("\n") <= width)
    more = f"\n… and {len(table) - MOST_ROWS} more" if len(table) > MOST_ROWS else ""
    return next(fitting, texts[-1]) + more


def columns_shown(table: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    part = table.head(MOST_ROWS)
    numbers = {metric: [*map(mean_sd, part[metric], part[f"{metric} sd"])] for metric in metrics}
    status = {} if (table["status"] == Status.FINISHED).all() else {"status": part["status"]}
    return part.loc[:, :"seeds"].assign(**numbers, **status)


def mean_sd(mean: float, sd: float) -> str:
    """0.9254 ± 0.0004; no spread for a single seed, empty if a run is not finished"""
    if pd.isna(mean):
        return ""
    return f"{mean:.4g}" if pd.isna(sd) else f"{mean:.4g} ± {sd:.2g}"


def advice(table: pd.DataFrame, config: Config) -> list[str]:
    """Return the commands that train the best setting and show its curves."""
    best = table.iloc[0]
    if config.best is None or best["status"] != Status.FINISHED or config.metrics[0] not in best:
        return []
    equal = int((table[config.metrics[0]] == best[config.metrics[0]]).sum())
    tie = [f"tie:    {equal} settings have the same {config.metrics[0]}"] if equal > 1 else []
    show = f"python -m experiments show {shlex.quote(best['folder'])}"
    return [f"best:   {best['command']}", *tie, f"curves: {show}"]
