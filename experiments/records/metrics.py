"""Which metrics of a run to show, and their last and best values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase

import pandas as pd

from experiments.config.schema import Config


def shown_names(config: Config, recorded: Iterable[str]) -> list[str]:
    """Return the recorded metrics in the order of the experiment's file: the main one is first.

    Metrics that the file gives as a pattern follow the others, because they can be many.
    """
    names = list(recorded)
    patterns = sorted(config.metrics, key=lambda pattern: "*" in pattern) or ["*"]
    found = [name for pattern in patterns for name in names if fnmatchcase(name, pattern)]
    return list(dict.fromkeys(found))


def is_loss(name: str) -> bool:
    """Return whether a metric is a loss, of which the lowest value is the best.

    >>> is_loss("classifier/loss"), is_loss("test_loss"), is_loss("theta")
    (True, True, False)
    """
    return name.replace("/", "_").rpartition("_")[2] == "loss"


def direction(config: Config, name: str) -> str | None:
    """Return which values of a metric are the best: highest, lowest or None (neither)."""
    if config.metrics[:1] == [name]:
        return config.best
    return "lowest" if is_loss(name) else None


def last_value(table: pd.DataFrame, name: str) -> float:
    """Return the last value that is not NaN, or NaN; not every row has every metric."""
    values = table[name].dropna()
    return float(values.iloc[-1]) if len(values) else math.nan


def best_row(table: pd.DataFrame, name: str, best: str) -> tuple[int, float] | None:
    """Return step and value of the best finite value."""
    finite = table[table[name].abs() < math.inf]
    if finite.empty:
        return None
    values = finite[name]
    row = values.idxmax() if best == "highest" else values.idxmin()
    return int(finite["step"][row]), float(values[row])
