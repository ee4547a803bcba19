"""Draws any figure spec: png and pdf, and the plotted numbers as csv.

The code knows no figure number. What a figure shows stands in conf/figure, what an optimizer
looks like in conf/figure/_style.yaml.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import hydra.utils
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm, LogNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter
from omegaconf import OmegaConf
from PIL import Image

from experiments.config import CONF
from experiments.runs import Run, Spec

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
# Curves of one optimizer: of a colour towards black (0) or white (1), and dashes.
SHADES = ((0, 0.0), (0, 0.45), (1, 0.45), (0, 0.7), (1, 0.65), (0, 0.25))
DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (2, 1)))


@dataclass(frozen=True)
class Group:
    """The finished runs behind one name of a spec, one per seed."""

    name: str
    label: str
    runs: Sequence[Run]
    shade: int = 0  # how many curves of the same optimizer stand before it in the panel

    @property
    def style(self) -> dict[str, Any]:
        color = np.array(to_rgb(styles()[self.runs[0].config.optimizer_name]["color"]))
        towards, part = SHADES[self.shade % len(SHADES)]
        mixed = tuple(color + part * (towards - color))
        return {"color": mixed, "linestyle": DASHES[self.shade % len(DASHES)]}

    def table(self, metric: str) -> pd.DataFrame:
        """Step × seed; a run that diverged ends early."""
        columns = {r.config.seed: values_of(r, metric) for r in self.runs}
        return pd.DataFrame(columns)


def values_of(run: Run, metric: str) -> pd.Series:
    """Step → value; a run that diverged may have been too spoilt to be judged even once."""
    metrics = run.metrics().set_index("step")
    if run.status == "diverged" and metric not in metrics:
        return pd.Series(np.nan, index=metrics.index)
    return metrics[metric]


def styles() -> dict[str, Any]:
    return dict(OmegaConf.to_container(OmegaConf.load(CONF / "figure" / "_style.yaml")))  # type: ignore[arg-type]


def draw(spec: Spec, groups: Mapping[str, Sequence[Run]], stem: Path) -> None:
    """Write stem.png, stem.pdf and stem.csv."""
    columns = len(spec.panels) if len(spec.panels) < 4 else 2
    rows = -(-len(spec.panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.7 * columns, 3.7 * rows), squeeze=False, layout="constrained"
    )
    numbers = []
    for ax, panel in zip(axes.flat, spec.panels, strict=False):
        data = draw_panel(ax, dict(panel), groups)
        data.insert(0, "panel", panel["title"].split()[0].strip("()"))
        numbers.append(data)
    for ax in axes.flat[len(spec.panels) :]:
        ax.remove()
    finish(figure, spec, groups)
    stem.parent.mkdir(parents=True, exist_ok=True)
    save(figure, stem, digest(spec, groups))
    table = pd.concat(numbers)
    table.to_csv(stem.with_suffix(".csv"), index=False, float_format="%.10g")


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
    return Group(name, label or styles()[runs[0].config.optimizer_name]["label"], runs)


def shaded(members: Sequence[Group]) -> list[Group]:
    """Curves of one optimizer share its colour and differ in their shade and dashes."""
    seen: dict[str, int] = {}
    out = []
    for g in members:
        optimizer = g.runs[0].config.optimizer_name
        out.append(Group(g.name, g.label, g.runs, seen.get(optimizer, 0)))
        seen[optimizer] = seen.get(optimizer, 0) + 1
    return out


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

    def shown(values: pd.Series) -> pd.Series:
        return 10.0**values if orders else values

    parts = []
    for group in groups:
        raw = np.log10(group.table(metric)) if orders else group.table(metric)
        table, color = box_mean(raw, smooth), group.style["color"]
        numbers = over_seeds(raw)
        if smooth > 1:
            ax.plot(numbers.index, shown(numbers["mean"]), lw=0.6, alpha=0.3, color=color)
            numbers = numbers.join(over_seeds(table)[["mean", "sd"]].add_prefix("smooth_"))
        middle, spread = (over_seeds(table)[name] for name in ("mean", "sd"))
        ax.plot(middle.index, shown(middle), label=group.label, lw=1.4, **group.style)
        band = shown(middle - spread), shown(middle + spread)
        ax.fill_between(middle.index, *band, alpha=0.18, lw=0, color=color)
        for run in group.runs:
            if run.status == "diverged":
                mark_end(ax, shown(table[run.config.seed]), color)
        if orders:
            numbers = numbers.rename(columns=lambda name: name if name == "n" else f"log10_{name}")
        parts.append(numbers.reset_index(names="step").assign(curve=group.label))
    if ax.get_xscale() == "linear":
        ax.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4))
    ax.legend(loc=legend, fontsize=8)
    table = pd.concat(parts)
    return table[["curve", *table.columns.drop("curve")]]


def mark_end(ax: Axes, values: pd.Series, color: Any) -> None:
    """An × at the last number of a run that diverged, at the upper edge if it never had one."""
    look = {"marker": "x", "ms": 8, "mew": 2, "color": color}
    known = values[np.isfinite(values)]
    if len(known):
        ax.plot(known.index[-1:], known.iloc[-1:], **look)
    else:
        place = ax.get_xaxis_transform()
        ax.plot(values.index[:1], [1.0], transform=place, clip_on=False, **look)


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


def digest(spec: Spec, groups: Mapping[str, Sequence[Run]]) -> str:
    """Changes when the spec, the look, this file, or a number behind the figure changes."""
    parts = [spec.model_dump_json(), str(styles()), Path(__file__).read_text()]
    parts += [run.fingerprint() for runs in groups.values() for run in runs]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def up_to_date(spec: Spec, groups: Mapping[str, Sequence[Run]], stem: Path) -> bool:
    files = [stem.with_suffix(s) for s in (".png", ".pdf", ".csv")]
    if not all(f.exists() for f in files):
        return False
    with Image.open(files[0]) as image:
        return bool(image.info.get("Source") == digest(spec, groups))


def save(figure: Figure, stem: Path, source: str) -> None:
    # The picture carries what it was made from, and no date: equal runs give equal files.
    figure.savefig(stem.with_suffix(".png"), dpi=160, metadata={"Source": source})
    figure.savefig(stem.with_suffix(".pdf"), metadata={"CreationDate": None, "Keywords": source})
    plt.close(figure)
