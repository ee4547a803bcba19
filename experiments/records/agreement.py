"""Compares a run with the published run of the same identity and seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.records import archive
from experiments.records.run import Run

# From best to worst.
IDENTICAL, ROUNDED, WITHIN_SPREAD, DIFFERENT = LEVELS = (
    "identical", "equal up to rounding", "within the spread of the published seeds", "different",
)  # fmt: skip
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-6, 1e-12  # differences that rounding explains
SPREAD_FACTOR = 2.0  # of the largest distance between two published seeds


@dataclass(frozen=True)
class Agreement:
    """The result of a comparison; `detail` says where the first difference is and how large."""

    run: Run
    level: str
    detail: str = ""
    gap: float = 0.0  # relative, at the first difference

    def __str__(self) -> str:
        return f"{self.level}: {self.detail}" if self.detail else self.level


def compare(run: Run) -> Agreement | None:
    """Compare a finished run of this results folder; return None if it is not published."""
    twin = run.twin
    if twin is None or run.source is twin or not run.done:
        return None
    if run.status != twin.status:
        detail = f"status {run.status}, published {twin.status}"
        return Agreement(run, DIFFERENT, detail, math.inf)
    mine, theirs = (table.set_index("step") for table in (run.metrics(), twin.metrics))
    if mine.index.tolist() != theirs.index.tolist():
        ends = [
            f"{len(table)} records up to step {table.index.max():,}" for table in (mine, theirs)
        ]
        return Agreement(run, DIFFERENT, f"{ends[0]}, published {ends[1]}", math.inf)
    seeds = archive.seeds_of(run.published_runs, run.setting)
    curves = [seed.metrics.set_index("step") for seed in seeds]
    return Agreement(run, *compare_metrics(mine, theirs, curves))


def compare_metrics(
    mine: pd.DataFrame, theirs: pd.DataFrame, seeds: Sequence[pd.DataFrame]
) -> tuple[str, str, float]:
    """Return level, detail and relative gap; `seeds` are all published runs of the setting."""
    mine, theirs = (table.dropna(axis=1, how="all") for table in (mine, theirs))
    names = sorted(mine.columns)
    if names != sorted(theirs.columns):
        alone = ", ".join(sorted({*mine.columns} ^ {*theirs.columns}))
        return DIFFERENT, f"only one of the two has {alone}", math.inf
    a, b = (table[names].to_numpy(float) for table in (mine, theirs))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return IDENTICAL, "", 0.0
    relative = relative_gap(a, b)
    close = same | (relative <= RELATIVE_TOLERANCE)
    if close.all():
        return ROUNDED, describe_rounding(largest := float(relative.max())), largest
    row = int(np.argmin(close.all(axis=1)))
    column = int(np.argmax(relative[row]))
    gap = float(relative[row, column])
    detail = (
        f"{names[column]} at step {mine.index[row]:,} is {a[row, column]:.7g}, published "
        f"{b[row, column]:.7g} ({100 * gap:.2g} %)"
    )
    # Two trainings that differ by rounding diverge and never have equal rows again.
    returns = same[row + 1 :].all(axis=1).any()
    near = np.isfinite(relative).all() and all(is_near(n, mine, theirs, seeds) for n in names)
    return (WITHIN_SPREAD if near and not returns else DIFFERENT), detail, gap


def describe_rounding(largest: float) -> str:
    if largest == 0.0:  # every difference is within the absolute tolerance
        return f"absolute differences of at most {ABSOLUTE_TOLERANCE:g}"
    return f"largest relative difference {largest:.1e}"


def relative_gap(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return |a − b| / max(|a|, |b|) of each pair.

    It is 0 within the absolute tolerance or if both are NaN, and inf if one alone is NaN or inf.
    """
    both = np.isfinite(a) & np.isfinite(b)
    with np.errstate(all="ignore"):
        gap, size = np.abs(a - b), np.maximum(np.abs(a), np.abs(b))
        relative = np.where(both, np.where(gap > ABSOLUTE_TOLERANCE, gap / size, 0.0), np.inf)
    return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, relative)


def is_near(
    name: str, mine: pd.DataFrame, theirs: pd.DataFrame, seeds: Sequence[pd.DataFrame]
) -> bool:
    """Return whether two curves of a metric are as close as those of the published seeds."""
    curves = [seed[name] for seed in seeds if name in seed]
    limit = max((distance(x, y) for x, y in combinations(curves, 2)), default=0.0)
    return distance(mine[name], theirs[name]) <= SPREAD_FACTOR * limit


def distance(x: pd.Series, y: pd.Series) -> float:
    """Return the mean absolute difference over the steps that both have."""
    gaps = (x - y).abs().dropna()
    return float(gaps.mean()) if len(gaps) else 0.0


def summary(runs: Sequence[Run]) -> str:
    """Return one line on the runs that are also published; empty if none is."""
    found = [agreement for run in runs if (agreement := compare(run)) is not None]
    if not found:
        return ""
    parts = []
    for level in LEVELS:
        members = [agreement for agreement in found if agreement.level == level]
        if members:
            worst = max(members, key=lambda agreement: agreement.gap)
            name = f"{worst.run.name}: " if level in (WITHIN_SPREAD, DIFFERENT) else ""
            detail = f" ({name}{worst.detail})" if worst.detail else ""
            parts.append(f"{len(members)} {level}{detail}")
    unknown = sum(run.twin is None for run in runs)
    new = f"; {unknown} not published" if unknown else ""
    return f"compared with the published runs: {', '.join(parts)}{new}"
