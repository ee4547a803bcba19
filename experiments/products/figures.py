"""Draws any figure spec: png and pdf, and the plotted numbers as csv.

The code does not depend on the figure: conf/figure says what is shown, conf/figure/_style.yaml
how an optimizer looks.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from experiments.products.schema import CurvesPanel, HeatmapPanel, Panel, Spec
from experiments.products.style import Look, label_of, looks_of
from experiments.records.files import write_if_changed
from experiments.records.run import Groups, Run
from experiments.records.status import Status

plt.rcParams.update(
    {
        "font.size": 9,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.25,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "pdf.fonttype": 42,
    }
)


DrawFunction = Callable[[Axes, Sequence["RunGroup"], Any], pd.DataFrame]  # Any: its own panel


@dataclass(frozen=True)
class RunGroup:
    """The finished runs behind one name of a spec, one per seed."""

    name: str
    label: str
    runs: Sequence[Run]
    look: Look | None = None  # None: that of its optimizer

    @property
    def optimizer(self) -> str:
        return self.runs[0].config.optimizer_name

    @property
    def style(self) -> dict[str, Any]:
        look = self.look or looks_of([(self.optimizer, {})])[0]
        return {"color": look.color, "linestyle": (0, look.dashes) if look.dashes else "-"}

    def table(self, metric: str) -> pd.DataFrame:
        """A row for each step, a column for each seed; a run that diverged ends early."""
        columns = {r.config.seed: metric_series(r, metric) for r in self.runs}
        return pd.DataFrame(columns)


def metric_series(run: Run, metric: str) -> pd.Series:
    """Step → value; all NaN for a run that diverged before its first evaluation."""
    metrics = run.metrics().set_index("step")
    if run.status == Status.DIVERGED and metric not in metrics:
        return pd.Series(np.nan, index=metrics.index)
    return metrics[metric]


def draw_figure(
    spec: Spec, groups: Groups, stem: Path, functions: Mapping[str, DrawFunction] | None = None
) -> bool:
    """Write stem.png, stem.pdf and stem.csv; return whether one of them is new or has changed."""
    columns = len(spec.panels) if len(spec.panels) < 4 else 2
    rows = -(-len(spec.panels) // columns)
    figure, axes = panel_grid(rows, columns)
    numbers = []
    for ax, panel in zip(axes.flat, spec.panels, strict=False):
        data = draw_panel(ax, panel, groups, (functions or FUNCTIONS)[panel.draw])
        columns_after = data.columns.drop("panel", "ignore")
        numbers.append(data.assign(panel=panel.letter)[["panel", *columns_after]])
    for ax in axes.flat[len(spec.panels) :]:
        ax.remove()
    finish(figure, spec, groups)
    table = pd.concat(numbers).to_csv(index=False, float_format="%.10g")
    is_new = write_if_changed(stem.with_suffix(".csv"), table.encode())
    return save_figure(figure, stem) or is_new


def panel_grid(rows: int, columns: int) -> tuple[Figure, Any]:
    """An empty figure and its panels."""
    size = (4.7 * columns, 3.7 * rows)
    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")


def save_figure(figure: Figure, stem: Path) -> bool:
    """Write stem.png and stem.pdf; return whether one of them is new or has changed."""
    files = {".png": rendered(figure, "png", dpi=160)}
    figure.set_layout_engine("none")  # the layout is known; computing it takes longer than drawing
    files[".pdf"] = rendered(figure, "pdf", metadata={"CreationDate": None})
    plt.close(figure)
    return any([write_if_changed(stem.with_suffix(end), new) for end, new in files.items()])


def rendered(figure: Figure, form: str, **options: Any) -> bytes:
    """The content of the file, without a date: equal runs give equal files."""
    file = io.BytesIO()
    figure.savefig(file, format=form, **options)
    return file.getvalue()


def draw_panel(ax: Axes, panel: Panel, groups: Groups, function: DrawFunction) -> pd.DataFrame:
    ax.set_title(panel.title, fontsize=10)
    ax.set(**panel.axes.model_dump(exclude_unset=True))
    members = [run_group(name, label, groups) for name, label in panel.runs.items()]
    return function(ax, shaded(members), panel)


def run_group(name: str, label: str | None, groups: Groups) -> RunGroup:
    runs = groups[name]
    return RunGroup(name, label or label_of(runs[0].config.optimizer_name), runs)


def shaded(members: Sequence[RunGroup]) -> list[RunGroup]:
    """Give each group its look among the others of the panel."""
    looks = looks_of([(g.optimizer, g.runs[0].config.optimizer) for g in members])
    return [replace(group, look=look) for group, look in zip(members, looks, strict=True)]


def curves(ax: Axes, groups: Sequence[RunGroup], panel: CurvesPanel) -> pd.DataFrame:
    smooth, orders = panel.smooth, panel.orders
    table = pd.concat([numbers_of(group, panel.metric, smooth, orders) for group in groups])
    for group in groups:
        part = table[table["curve"] == group.label].set_index("step")
        draw_curve(ax, part, group, prefix_of(smooth, orders), orders, 0.54 / max(3, len(groups)))
    if ax.get_xscale() == "linear":
        ax.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4))
    if panel.legend:
        ax.legend(loc=panel.legend, fontsize=8)
    return table


def prefix_of(smooth: int, orders: bool) -> str:
    """The prefix of the columns that a curve is drawn from."""
    return ("log10_" if orders else "") + ("smooth_" if smooth > 1 else "")


def draw_curve(
    ax: Axes, part: pd.DataFrame, group: RunGroup, prefix: str, orders: bool, opacity: float
) -> None:
    """Draw the mean, and a band of one standard deviation with this opacity."""

    def shown(values: pd.Series) -> pd.Series:
        return 10.0**values if orders else values

    color, middle, spread = group.style["color"], part[f"{prefix}mean"], part[f"{prefix}sd"]
    if "smooth" in prefix:
        raw = part[f"{prefix.replace('smooth_', '')}mean"]
        ax.plot(raw.index, shown(raw), lw=0.6, alpha=0.3, color=color)
    ax.plot(middle.index, shown(middle), label=group.label, lw=1.4, **group.style)
    band = shown(middle - spread), shown(middle + spread)
    ax.fill_between(middle.index, *band, alpha=opacity, lw=0, color=color)
    for step, values in crosses(part):
        for value in values:
            mark_end(ax, step, value, color)


def mark_end(ax: Axes, step: int, value: float, color: Any) -> None:
    """Draw an × at the last finite value of a run that diverged, or at the upper edge."""
    look = {"marker": "x", "ms": 8, "mew": 2, "color": color}
    if np.isfinite(value):
        ax.plot([step], [value], **look)
    else:
        ax.plot([step], [1.0], transform=ax.get_xaxis_transform(), clip_on=False, **look)


def crosses(part: pd.DataFrame) -> list[tuple[int, list[float]]]:
    """The steps at which runs of a curve diverged, and their last values."""
    ended = part["diverged"].dropna() if "diverged" in part else pd.Series(dtype=str)
    return [(step, [float(v) for v in str(text).split()]) for step, text in ended.items()]


@np.errstate(divide="ignore", invalid="ignore")  # log10 of 0; a run that diverged
def numbers_of(group: RunGroup, metric: str, smooth: int, orders: bool) -> pd.DataFrame:
    """The numbers of one curve, a row for each step."""
    raw = np.log10(group.table(metric)) if orders else group.table(metric)
    table = box_mean(raw, smooth)
    numbers = over_seeds(raw)
    if smooth > 1:
        numbers = numbers.join(over_seeds(table)[["mean", "sd"]].add_prefix("smooth_"))
    if orders:
        numbers = numbers.rename(columns=lambda name: name if name == "n" else f"log10_{name}")
    ends: dict[int, list[str]] = {}
    for run in group.runs:
        if run.status == Status.DIVERGED:
            step, value = last_number(table[run.config.seed])
            ends.setdefault(step, []).append(f"{10.0**value if orders else value:.10g}")
    if ends:
        numbers["diverged"] = pd.Series({step: " ".join(values) for step, values in ends.items()})
    numbers = numbers.reset_index(names="step").assign(curve=group.label)
    return numbers[["curve", *numbers.columns.drop("curve")]]


def last_number(values: pd.Series) -> tuple[int, float]:
    """The last step and finite value; ∞ at the first step if there is none (a csv loses NaN)."""
    known = values[np.isfinite(values)]
    if len(known):
        return known.index[-1], known.iloc[-1]
    return (values.index[0] if len(values) else 0), np.inf


def over_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Mean, standard deviation and number of runs at each step."""
    # The line ends where a run ended early: the mean of the others would be biased.
    return pd.DataFrame(
        {
            "mean": table.mean(axis=1, skipna=False),
            "sd": table.std(axis=1).fillna(0),
            "n": table.count(axis=1),
        }
    )


def box_mean(table: pd.DataFrame, width: int) -> pd.DataFrame:
    """Centred moving average over `width` records, fewer at the ends; NaN after a run has ended."""
    means = table.rolling(width, center=True, min_periods=1).mean()
    return means.where(table.notna())


def heatmap(ax: Axes, groups: Sequence[RunGroup], panel: HeatmapPanel) -> pd.DataFrame:
    (group,) = groups
    wanted = [name for name in (panel.metric, panel.contours, panel.where) if name]
    cells = pd.concat([run.metrics() for run in group.runs])
    table = cells.groupby(["beta2", "beta1"])[wanted].agg(panel.middle).reset_index()
    x, y, z = grid_of(table, panel.metric)
    if panel.where:
        z = np.ma.masked_where(grid_of(table, panel.where)[2] < 0.5, z)
    limit = np.abs(z).max()
    look = CenteredNorm(halfrange=limit) if panel.centered else LogNorm(z.min(), z.max())
    colors = "RdBu_r" if panel.centered else "viridis"
    image = ax.pcolormesh(x, y, z, norm=look, cmap=colors, shading="nearest", rasterized=True)
    ax.grid(False)
    ax.set_facecolor("0.7")
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02)
    if not panel.centered:
        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        bar.ax.yaxis.set_major_formatter(ScalarFormatter())
        bar.ax.yaxis.set_minor_locator(NullLocator())
    if panel.centered:
        ax.contour(x, y, z, levels=[0], colors="black", linewidths=1)
        ax.plot([], [], color="black", lw=1, label="0")
    if panel.contours:
        lines = ax.contour(
            x, y, grid_of(table, panel.contours)[2], panel.contour_levels, colors="white"
        )
        lines.set_linewidth(1)
        ax.clabel(lines, fontsize=7, fmt="%g")
        ax.plot([], [], color="white", lw=1, label=panel.contour_label)
    if panel.where:
        ax.fill_between([], [], color="0.7", label=panel.where_label)
    if panel.centered or panel.contours or panel.where:
        ax.legend(loc="lower left", fontsize=7, facecolor="0.35", labelcolor="white", frameon=True)
    return table.assign(n=len(group.runs))


def grid_of(table: pd.DataFrame, metric: str) -> tuple[Any, Any, Any]:
    grid = table.pivot(index="beta2", columns="beta1", values=metric)
    return grid.columns.to_numpy(), grid.index.to_numpy(), grid.to_numpy()


FUNCTIONS: dict[str, DrawFunction] = {"curves": curves, "heatmap": heatmap}


def finish(figure: Figure, spec: Spec, groups: Groups) -> None:
    """Add the title, and below the panels the scale, the number of seeds and the note."""
    scale = scale_of(groups)
    figure.suptitle(spec.title, fontsize=11)
    seeds = f"{spec.seeds} seed{'s' if spec.seeds > 1 else ''}"
    note = " · ".join(filter(None, [f"{scale} scale", seeds, spec.note]))
    figure.supxlabel(note, fontsize=7.5, color="0.35")
    if scale != "paper":
        figure.text(
            0.995, 0.985, f"{scale} scale", ha="right", va="top", color="firebrick", weight="bold"
        )


def scale_of(groups: Groups) -> str:
    scales = sorted({run.config.shown_scale for runs in groups.values() for run in runs})
    return " and ".join(scales)
