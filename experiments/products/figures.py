"""Draws any figure spec: png and pdf, and the plotted numbers as csv.

The code knows no figure number. What a figure shows stands in conf/figure, what an optimizer
looks like in conf/figure/_style.yaml.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import hydra.utils
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from experiments.products.specs import Spec
from experiments.products.style import Look, label_of, looks_of
from experiments.records.files import write_if_changed
from experiments.records.run import Run
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


@dataclass(frozen=True)
class Group:
    """The finished runs behind one name of a spec, one per seed."""

    name: str
    label: str
    runs: Sequence[Run]
    look: Look | None = None  # None: that of its optimizer where nothing else is in the panel

    @property
    def optimizer(self) -> str:
        return self.runs[0].config.optimizer_name

    @property
    def style(self) -> dict[str, Any]:
        look = self.look or looks_of([self.optimizer])[0]
        return {"color": look.color, "linestyle": (0, look.dashes) if look.dashes else "-"}

    def table(self, metric: str) -> pd.DataFrame:
        """Step × seed; a run that diverged ends early."""
        columns = {r.config.seed: values_of(r, metric) for r in self.runs}
        return pd.DataFrame(columns)


def values_of(run: Run, metric: str) -> pd.Series:
    """Step → value; a run that diverged may have been too spoilt to be judged even once."""
    metrics = run.metrics().set_index("step")
    if run.status == Status.DIVERGED and metric not in metrics:
        return pd.Series(np.nan, index=metrics.index)
    return metrics[metric]


def draw(spec: Spec, groups: Mapping[str, Sequence[Run]], stem: Path) -> bool:
    """Write stem.png, stem.pdf and stem.csv; return whether one of them is new or has changed."""
    columns = len(spec.panels) if len(spec.panels) < 4 else 2
    rows = -(-len(spec.panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.7 * columns, 3.7 * rows), squeeze=False, layout="constrained"
    )
    numbers = []
    for ax, panel in zip(axes.flat, spec.panels, strict=False):
        letter = panel["title"].split()[0].strip("()")
        data = draw_panel(ax, dict(panel), groups)
        numbers.append(data.assign(panel=letter)[["panel", *data.columns.drop("panel", "ignore")]])
    for ax in axes.flat[len(spec.panels) :]:
        ax.remove()
    finish(figure, spec, groups)
    table = pd.concat(numbers).to_csv(index=False, float_format="%.10g")
    files = {".png": rendered(figure, "png", dpi=160), ".csv": table.encode()}
    figure.set_layout_engine("none")  # the places are found, which takes longer than to draw
    files[".pdf"] = rendered(figure, "pdf", metadata={"CreationDate": None})
    plt.close(figure)
    return any([write_if_changed(stem.with_suffix(end), new) for end, new in files.items()])


def rendered(figure: Figure, form: str, **options: Any) -> bytes:
    """Without a date: equal runs give equal files."""
    file = io.BytesIO()
    figure.savefig(file, format=form, **options)
    return file.getvalue()


def draw_panel(
    ax: Axes, panel: dict[str, Any], groups: Mapping[str, Sequence[Run]]
) -> pd.DataFrame:
    title, target, names = panel.pop("title"), panel.pop("draw"), panel.pop("runs")
    ax.set_title(title, fontsize=10)
    ax.set(**panel.pop("axes", {}))
    members = [named(name, label, groups) for name, label in labels(names).items()]
    data = hydra.utils.get_method(target)(ax, shaded(members), **panel)
    assert isinstance(data, pd.DataFrame)
    return data


def labels(names: Any) -> dict[str, str | None]:
    """`[adam, amsgrad]` or `{adam: a label of its own}`."""
    return dict(names) if isinstance(names, dict) else dict.fromkeys(names)


def named(name: str, label: str | None, groups: Mapping[str, Sequence[Run]]) -> Group:
    runs = groups[name]
    return Group(name, label or label_of(runs[0].config.optimizer_name), runs)


def shaded(members: Sequence[Group]) -> list[Group]:
    """Curves of one optimizer share its colour and differ in their shade and dashes."""
    looks = looks_of([group.optimizer for group in members])
    return [replace(group, look=look) for group, look in zip(members, looks, strict=True)]


def curves(
    ax: Axes,
    groups: Sequence[Group],
    metric: str,
    legend: Any = "best",
    smooth: int = 1,
    orders: bool = False,
) -> pd.DataFrame:
    """Mean over the seeds, with a band of one standard deviation; an × where runs diverged.

    With `smooth`, each run is first averaged over so many records, and the mean as it was recorded
    stands faint behind. With `orders`, means and bands are those of log10 of the metric: of seeds
    that are orders of magnitude apart a mean would show the worst alone.
    """
    table = pd.concat([numbers_of(group, metric, smooth, orders) for group in groups])
    for group in groups:
        part = table[table["curve"] == group.label].set_index("step")
        draw_curve(ax, part, group, prefix_of(smooth, orders), orders)
    if ax.get_xscale() == "linear":
        ax.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4))
    ax.legend(loc=legend, fontsize=8)
    return table


def prefix_of(smooth: int, orders: bool) -> str:
    """Of the columns that a curve is drawn from."""
    return ("log10_" if orders else "") + ("smooth_" if smooth > 1 else "")


def draw_curve(ax: Axes, part: pd.DataFrame, group: Group, prefix: str, orders: bool) -> None:
    def shown(values: pd.Series) -> pd.Series:
        return 10.0**values if orders else values

    color, middle, spread = group.style["color"], part[f"{prefix}mean"], part[f"{prefix}sd"]
    if "smooth" in prefix:
        raw = part[f"{prefix.replace('smooth_', '')}mean"]
        ax.plot(raw.index, shown(raw), lw=0.6, alpha=0.3, color=color)
    ax.plot(middle.index, shown(middle), label=group.label, lw=1.4, **group.style)
    band = shown(middle - spread), shown(middle + spread)
    ax.fill_between(middle.index, *band, alpha=0.18, lw=0, color=color)
    for step, values in crosses(part):
        for value in values:
            mark_end(ax, step, value, color)


def mark_end(ax: Axes, step: int, value: float, color: Any) -> None:
    """An × at the last number of a run that diverged, at the upper edge if it never had one."""
    look = {"marker": "x", "ms": 8, "mew": 2, "color": color}
    if np.isfinite(value):
        ax.plot([step], [value], **look)
    else:
        ax.plot([step], [1.0], transform=ax.get_xaxis_transform(), clip_on=False, **look)


def crosses(part: pd.DataFrame) -> list[tuple[int, list[float]]]:
    """Where runs of a curve diverged, at which values."""
    ended = part["diverged"].dropna() if "diverged" in part else pd.Series(dtype=str)
    return [(step, [float(v) for v in str(text).split()]) for step, text in ended.items()]


@np.errstate(divide="ignore", invalid="ignore")  # log10 of 0; a run that diverged
def numbers_of(group: Group, metric: str, smooth: int, orders: bool) -> pd.DataFrame:
    """What is drawn of one curve: a row for each step."""
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
    """Step and value; ∞ at the first step if there is none (a csv would lose NaN)."""
    known = values[np.isfinite(values)]
    return (known.index[-1], known.iloc[-1]) if len(known) else (values.index[0], np.inf)


def over_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Mean, standard deviation and number of runs at each step."""
    # Where a run has ended early the mean of the others would be flattery: the line ends.
    return pd.DataFrame(
        {
            "mean": table.mean(axis=1, skipna=False),
            "sd": table.std(axis=1).fillna(0),
            "n": table.count(axis=1),
        }
    )


def box_mean(table: pd.DataFrame, width: int) -> pd.DataFrame:
    """Mean of `width` records around each; fewer at the ends, none where a run has ended."""
    means = table.rolling(width, center=True, min_periods=1).mean()
    return means.where(table.notna())


def heatmap(
    ax: Axes,
    groups: Sequence[Group],
    metric: str,
    contours: str | None = None,
    contour_label: str = "",
    contour_levels: Sequence[float] | None = None,
    where: str | None = None,
    where_label: str = "",
    centered: bool = False,
    middle: str = "mean",
) -> pd.DataFrame:
    """A metric over β1 (x) and β2 (y), the `middle` (mean or median) over the seeds.

    `contours` names a second metric, drawn as lines over the first; cells in which the metric
    `where` is 0 are grey; `centered` makes 0 the middle of the colours and draws its line.
    """
    (group,) = groups
    wanted = [name for name in (metric, contours, where) if name]
    cells = pd.concat([run.metrics() for run in group.runs])
    table = cells.groupby(["beta2", "beta1"])[wanted].agg(middle).reset_index()
    x, y, z = grid_of(table, metric)
    if where:
        z = np.ma.masked_where(grid_of(table, where)[2] < 0.5, z)
    limit = np.abs(z).max()
    look = CenteredNorm(halfrange=limit) if centered else LogNorm(z.min(), z.max())
    colors = "RdBu_r" if centered else "viridis"
    image = ax.pcolormesh(x, y, z, norm=look, cmap=colors, shading="nearest", rasterized=True)
    ax.grid(False)
    ax.set_facecolor("0.7")
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02)
    if not centered:
        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        bar.ax.yaxis.set_major_formatter(ScalarFormatter())
        bar.ax.yaxis.set_minor_locator(NullLocator())
    if centered:
        ax.contour(x, y, z, levels=[0], colors="black", linewidths=1)
        ax.plot([], [], color="black", lw=1, label="0")
    if contours:
        lines = ax.contour(x, y, grid_of(table, contours)[2], contour_levels, colors="white")
        lines.set_linewidth(1)
        ax.clabel(lines, fontsize=7, fmt="%g")
        ax.plot([], [], color="white", lw=1, label=contour_label)
    if where:
        ax.fill_between([], [], color="0.7", label=where_label)
    if centered or contours or where:
        ax.legend(loc="lower left", fontsize=7, facecolor="0.35", labelcolor="white", frameon=True)
    return table.assign(n=len(group.runs))


def grid_of(table: pd.DataFrame, metric: str) -> tuple[Any, Any, Any]:
    grid = table.pivot(index="beta2", columns="beta1", values=metric)
    return grid.columns.to_numpy(), grid.index.to_numpy(), grid.to_numpy()


def finish(figure: Figure, spec: Spec, groups: Mapping[str, Sequence[Run]]) -> None:
    """Title, and on the face of the figure: scale, seeds, and what a careful reader asks."""
    scale = scale_of(groups)
    figure.suptitle(spec.title, fontsize=11)
    seeds = f"{spec.seeds} seed{'s' if spec.seeds > 1 else ''}"
    note = " · ".join(filter(None, [f"{scale} scale", seeds, spec.note]))
    figure.supxlabel(note, fontsize=7.5, color="0.35")
    if scale != "paper":
        figure.text(
            0.995, 0.985, f"{scale} scale", ha="right", va="top", color="firebrick", weight="bold"
        )


def scale_of(groups: Mapping[str, Sequence[Run]]) -> str:
    scales = sorted({run.config.scale for runs in groups.values() for run in runs})
    return " and ".join(scales)
