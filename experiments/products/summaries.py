"""Statistics: one number from the metrics of one run, for claims and tables.

Each takes the metrics of a run, a row per step, and the name of the metric.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import numpy as np
import pandas as pd

from experiments.records.run import Run
from experiments.records.status import Status

WORST = {"highest": -inf, "lowest": inf, None: nan}


def score(run: Run) -> float:
    """Return what a sweeper optimizes: the main metric, as the mean over the last tenth of a run.

    Sweepers maximize it if `best` is highest and minimize it if `best` is lowest. A run that
    diverged has the worst value: -inf or inf. NaN: the run has no main metric, or no best.
    """
    if run.status == Status.DIVERGED:
        return WORST[run.config.best]
    metrics, main = run.metrics(), next(iter(run.config.metrics), "")
    return tail_mean(metrics, main) if main in metrics else nan


def first(metrics: pd.DataFrame, metric: str) -> float:
    return float(metrics[metric].dropna().iloc[0])


def last(metrics: pd.DataFrame, metric: str) -> float:
    return float(metrics[metric].dropna().iloc[-1])


def mean(metrics: pd.DataFrame, metric: str) -> float:
    return float(metrics[metric].mean())


def largest(metrics: pd.DataFrame, metric: str) -> float:
    return float(metrics[metric].max())


def smallest(metrics: pd.DataFrame, metric: str) -> float:
    return float(metrics[metric].min())


def median(metrics: pd.DataFrame, metric: str) -> float:
    return float(metrics[metric].median())


def tail(metrics: pd.DataFrame, metric: str) -> pd.Series:
    """The last tenth of a curve, which is less noisy than the last point."""
    curve = metrics[metric].dropna()
    return curve.iloc[-max(1, len(curve) // 10) :]


def tail_mean(metrics: pd.DataFrame, metric: str) -> float:
    return float(tail(metrics, metric).mean())


def tail_log10(metrics: pd.DataFrame, metric: str) -> float:
    """Mean of log10 over the last tenth of a curve."""
    return float(np.log10(tail(metrics, metric)).mean())


def tail_log10_sd(metrics: pd.DataFrame, metric: str) -> float:
    """Standard deviation of log10 over the last tenth of a curve."""
    return float(np.log10(tail(metrics, metric)).std(ddof=0))


def tail_sd(metrics: pd.DataFrame, metric: str) -> float:
    """Standard deviation over the last tenth of a curve."""
    return float(tail(metrics, metric).std(ddof=0))


def rise_log10(metrics: pd.DataFrame, metric: str) -> float:
    """The largest rise above an earlier value, in log10."""
    curve = np.log10(metrics[metric].dropna())
    return float((curve - curve.cummin()).max())


def early_mean(metrics: pd.DataFrame, metric: str) -> float:
    """Mean over the first third of the steps."""
    early = metrics["step"] <= metrics["step"].iloc[-1] / 3
    return float(metrics.loc[early, metric].mean())


def trend(metrics: pd.DataFrame, metric: str) -> float:
    """Rank correlation with the step: 1 if it only rises, −1 if it only falls."""
    from scipy.stats import spearmanr  # slow to import, and specs are checked without it

    rows = metrics.dropna(subset=metric)
    return float(spearmanr(rows["step"], rows[metric]).statistic)


def falls_along_beta1(metrics: pd.DataFrame, metric: str) -> float:
    """The share of neighbours on the grid between which a metric falls by over 10 % as β1 rises."""
    return share_of_falls(metrics, metric, "beta1", "beta2")


def falls_along_beta2(metrics: pd.DataFrame, metric: str) -> float:
    """The same along β2."""
    return share_of_falls(metrics, metric, "beta2", "beta1")


def share_of_falls(metrics: pd.DataFrame, metric: str, along: str, across: str) -> float:
    cells = metrics.dropna(subset=metric)
    grid = cells.pivot(index=across, columns=along, values=metric).to_numpy()
    return float((grid[:, 1:] < 0.9 * grid[:, :-1]).mean())


def differs_from_exact(metrics: pd.DataFrame, metric: str) -> float:
    """The share of cells in which a metric differs from the metric `exact`."""
    cells = metrics.dropna(subset=[metric, "exact"])
    return float((cells[metric] != cells["exact"]).mean())


STATISTICS: dict[str, Callable[[pd.DataFrame, str], float]] = {
    function.__name__: function
    for function in (
        first, last, mean, largest, smallest, median, tail_mean, tail_log10, tail_log10_sd, tail_sd,
        rise_log10, early_mean, trend, falls_along_beta1, falls_along_beta2, differs_from_exact,
    )
}  # fmt: skip

# statistic → metrics that it reads besides its argument
OTHER_METRICS = {
    "falls_along_beta1": ["beta1", "beta2"],
    "falls_along_beta2": ["beta1", "beta2"],
    "differs_from_exact": ["exact"],
}
