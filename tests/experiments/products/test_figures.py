"""Curves: what is drawn over the seeds, smoothed and not."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from experiments.products.figures import RunGroup, box_mean, curves, last_number
from experiments.products.schema import CurvesPanel


@dataclass
class FakeRun:
    values: list
    seed: int
    status: str = "finished"
    done: bool = True
    config: SimpleNamespace = field(init=False)

    def __post_init__(self):
        self.config = SimpleNamespace(seed=self.seed, optimizer_name="adam")

    def metrics(self):
        steps = 10 * np.arange(1, len(self.values) + 1)
        return pd.DataFrame({"step": steps, "x": np.array(self.values, dtype=float)})


def drawn(*runs, **options):
    ax = Figure().subplots()
    panel = CurvesPanel(title="(a) x", metric="x", runs=["adam"], **options)
    return ax, curves(ax, [RunGroup("adam", "Adam", runs)], panel)


def test_without_smoothing_there_is_one_line_and_no_other_columns():
    ax, table = drawn(FakeRun([1, 2, 3], 0), FakeRun([3, 2, 1], 1))
    assert list(table.columns) == ["curve", "step", "mean", "sd", "n"]
    assert len(ax.lines) == 1 and table["mean"].tolist() == [2, 2, 2]


def test_the_smooth_curve_is_drawn_over_the_raw_one_and_the_table_has_both():
    values = [[0, 6, 0, 6, 0], [0, 12, 0, 12, 0]]
    ax, table = drawn(*(FakeRun(v, seed) for seed, v in enumerate(values)), smooth=3)
    assert table["mean"].tolist() == [0, 9, 0, 9, 0]
    assert table["smooth_mean"].tolist() == pytest.approx([4.5, 3, 6, 3, 4.5])
    smoothed = [[3, 2, 4, 2, 3], [6, 4, 8, 4, 6]]  # each run for itself, then the spread
    assert table["smooth_sd"].tolist() == pytest.approx(np.std(smoothed, axis=0, ddof=1).tolist())
    raw, smooth = ax.lines
    assert raw.get_ydata().tolist() == table["mean"].tolist()
    assert smooth.get_ydata().tolist() == table["smooth_mean"].tolist()
    assert raw.get_alpha() < 0.5 and raw.get_zorder() <= smooth.get_zorder()
    assert raw.get_color() == smooth.get_color() and smooth.get_alpha() is None
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["Adam"]


def test_a_smooth_curve_ends_where_a_run_has_ended():
    table = pd.DataFrame({0: [1.0, 2.0, 3.0, 4.0], 1: [1.0, 2.0, np.nan, np.nan]})
    means = box_mean(table, 3)
    assert means[0].tolist() == [1.5, 2, 3, 3.5]
    assert means[1].tolist()[:2] == [1.5, 1.5] and means[1][2:].isna().all()
    short = FakeRun([1, 2], 1, "diverged")
    ax, numbers = drawn(FakeRun([1, 2, 3, 4], 0), short, smooth=3)
    assert numbers["smooth_mean"].isna().tolist() == [False, False, True, True]
    (cross,) = [line for line in ax.lines if line.get_marker() == "x"]
    assert cross.get_xdata().tolist() == [20]


def test_a_cross_marks_where_runs_diverged_also_with_orders():
    runs = FakeRun([1, 2, 3, 4], 0), FakeRun([1, 3], 1, "diverged"), FakeRun([2, 5], 2, "diverged")
    ax, table = drawn(*runs, smooth=3, orders=True)
    crosses = [line.get_ydata().item() for line in ax.lines if line.get_marker() == "x"]
    assert len(ax.lines) == 4 and crosses == pytest.approx([3**0.5, 10**0.5])
    assert table["diverged"].dropna().tolist() == ["1.732050808 3.16227766"]


def test_a_run_that_diverged_before_its_first_record_is_drawn():
    assert last_number(pd.Series(dtype=float)) == (0, np.inf)
    for runs in ([FakeRun([1, 2], 0), FakeRun([], 1, "diverged")], [FakeRun([], 0, "diverged")]):
        _, table = drawn(*runs)
        assert table["diverged"].dropna().tolist() == ["inf"]
