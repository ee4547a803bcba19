"""run_summary(): what a single run prints when it ends, from its record."""

from __future__ import annotations

import shlex

import pandas as pd

from experiments.config.build import import_target
from experiments.config.paths import shown_path
from experiments.progress import aligned, duration, number
from experiments.records import archive
from experiments.records.agreement import compare
from experiments.records.archive import Published
from experiments.records.metrics import best_row, direction, last_value, shown_names
from experiments.records.record import METRICS
from experiments.records.run import Run
from experiments.task import Measurement

METRICS_SHOWN = 12


def run_summary(run: Run) -> str:
    """Return status, time, metrics, agreement with the published run, and where the record is."""
    table = metrics_of(run)
    names = shown_names(run.config, table.columns.drop("step"))
    rows = rows_of_measurement if is_measurement(run) else rows_of_training
    shown = rows(run, table, names[:METRICS_SHOWN]) if names else []
    lines = [f"  {line}" for line in aligned(shown)]
    if len(names) > METRICS_SHOWN:
        lines.append(f"  … and {len(names) - METRICS_SHOWN} more metrics in the record")
    return "\n".join([first_line(run), "", *lines, *[""] * bool(lines), *places(run)])


def metrics_of(run: Run) -> pd.DataFrame:
    """Return the metrics so far; a run that failed early has none."""
    written = isinstance(run.source, Published) or (run.folder / METRICS).exists()
    return run.metrics() if written else pd.DataFrame({"step": []})


def first_line(run: Run) -> str:
    c, info, status = run.config, run.info, run.status
    unit = "rows" if is_measurement(run) else "steps"
    step, seconds = info["step"], info["seconds"]
    if status.is_final:
        speed = f" ({number(step / seconds, 3)} {unit}/s)" if seconds else ""
        count = f"{step:,} {unit} in {duration(seconds)}{speed}"
    else:  # what was trained since then is only in the checkpoint
        count = f"last record at step {step:,}" if step else "nothing recorded"
    name = f"{c.experiment} {c.optimizer_name} seed={c.seed}"
    return f"{name}: {status}, {count}"


def rows_of_training(run: Run, table: pd.DataFrame, names: list[str]) -> list[list[str]]:
    """Return the last value of each metric, and the best one if there is a best."""
    rows = [["metric", "last", "best", "at step"]]
    for name in names:
        best = direction(run.config, name)
        found = best_row(table, name, best) if best else None
        step, value = (f"{found[0]:,}", number(found[1])) if found else ("", "")
        rows.append([name, number(last_value(table, name)), value, step])
    return rows


def rows_of_measurement(run: Run, table: pd.DataFrame, names: list[str]) -> list[list[str]]:
    """Return the range of each metric: the rows are different settings, and none is the last."""
    ends = [(name, table[name].min(), table[name].max()) for name in names]
    return [["metric", "lowest", "highest"], *([n, number(a), number(b)] for n, a, b in ends)]


def places(run: Run) -> list[str]:
    """Return how the run compares with the published one, where its record is, how to draw it."""
    agreement = compare(run)
    lines = [f"published run  {agreement}"] if agreement else published_seeds(run)
    if isinstance(run.source, Published):
        record = archive.path_of(run.config.published, run.config.experiment)
        request = [*run.words(), "records=published"]
    else:
        record, request = run.folder, [shown_path(run.folder)]
    command = shlex.join(["python", "-m", "experiments", "show", *request])
    return [*lines, f"record         {shown_path(record)}", f"curves         {command}"]


def published_seeds(run: Run) -> list[str]:
    """Return the last value of the main metric of other seeds, if this seed is not published."""
    if isinstance(run.source, Published) or not run.done or not run.config.metrics:
        return []
    name = run.config.metrics[0]
    tables = [seed.metrics for seed in archive.seeds_of(run.published_runs, run.setting)]
    ends = pd.Series([last_value(table, name) for table in tables if name in table])
    if len(ends) < 2:
        return []
    return [f"published      {name} {ends.mean():.4g} ± {ends.std():.2g} ({len(ends)} other seeds)"]


def is_measurement(run: Run) -> bool:
    target = import_target(run.config.task["_target_"], "task")
    return isinstance(target, type) and issubclass(target, Measurement)
