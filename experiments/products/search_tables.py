"""Writes a search: every setting that was tried, the paper's beside the best, and a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.products.comparison import values
from experiments.products.figures import RunGroup, draw_figure, scale_of, shaded
from experiments.products.inference import interval
from experiments.products.markdown import markdown_table
from experiments.products.schema import SearchPanel, SearchRule, Spec
from experiments.products.tables import require_runs
from experiments.records.files import write_text
from experiments.records.run import Groups, Run
from experiments.records.status import Status

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_search_table(
    spec: Spec, rule: SearchRule, groups: Groups, stem: Path, picture: Path
) -> None:
    """Write stem.csv, every setting; stem.md, the paper's and the best; picture.png and .pdf."""
    require_runs(groups)
    table = judge_grid(members(spec), rule, groups)
    fresh = pd.DataFrame(fresh_rows(spec, rule, groups, table))
    write_text(stem.with_suffix(".csv"), table.to_csv(index=False, float_format="%.10g"))
    write_text(
        stem.with_suffix(".md"),
        search_page(spec, rule, table, face(spec, rule, groups, table), fresh),
    )
    functions = {"lines": partial(lines, rule=rule, table=table)}
    draw_figure(as_figure(spec, rule, table), groups, picture, functions)


def as_figure(spec: Spec, rule: SearchRule, table: pd.DataFrame) -> Spec:
    """The spec as a figure: its panels are those of the rule, its note is the rule."""
    note = fill("; ".join(filter(None, (steps_of(table), f"best: {rule}", spec.note))), 110)
    labels = {name: search.label for name, search in spec.search.items()}
    panels = [
        panel.model_copy(update={"runs": {name: labels[name] for name in panel.runs or labels}})
        for panel in rule.panels
    ]
    return spec.model_copy(update={"panels": panels, "note": note})


def members(spec: Spec) -> dict[str, list[str]]:
    """Label of an optimizer → the names of its runs, the paper's setting first."""
    return {search.label: list(search.runs(name)) for name, search in spec.search.items()}


# -- the numbers -------------------------------------------------------------------------------


def judge_grid(
    searches: Mapping[str, Sequence[str]], rule: SearchRule, groups: Groups
) -> pd.DataFrame:
    """A row for every setting of every optimizer."""
    parts = [
        judge_search([groups[name] for name in names], rule).assign(optimizer=label)
        for label, names in searches.items()
    ]
    table = pd.concat(parts, ignore_index=True)
    return table[["optimizer", *table.columns.drop("optimizer")]]


@np.errstate(invalid="ignore")  # a run that diverged
def judge_search(points: Sequence[Sequence[Run]], rule: SearchRule) -> pd.DataFrame:
    """A row for every setting of one optimizer; the first is the paper's."""
    unique = {runs[0].config.digest(): runs for runs in reversed(points)}
    scores = [scores_of(runs, rule) for runs in unique.values()]
    paper = next(s for s, runs in zip(scores, unique.values(), strict=True) if runs is points[0])
    rows = [
        setting(runs[0], rule) | score_columns(ours, paper) | counts(runs)
        for runs, ours in zip(unique.values(), scores, strict=True)
    ]
    table = pd.DataFrame(rows)
    table["paper"] = [ours is paper for ours in scores]
    table["best"] = table.index == best_of(table, rule)
    table["edge"] = table["best"] & is_edge(table, rule)
    order = table.assign(line=line_of(table, rule.others)).sort_values(["line", rule.along])
    return table.loc[order.index]


def scores_of(runs: Sequence[Run], rule: SearchRule) -> dict[str, NDArray[np.float64]]:
    """Metric → a number per seed."""
    return {m: values(runs, m, rule.statistic) for m in rule.metrics()}


def score_columns(
    scores: Mapping[str, NDArray[np.float64]], paper: Mapping[str, NDArray[np.float64]]
) -> dict[str, float]:
    """Mean, standard deviation and difference from the paper's setting, for each metric."""
    row = {}
    for metric, ours in scores.items():
        difference = ours - paper[metric]
        row[metric] = ours.mean()
        row[f"{metric} sd"] = ours.std(ddof=1) if len(ours) > 1 else 0.0
        row[f"{metric} difference"] = difference.mean()
        row[f"{metric} low"], row[f"{metric} high"] = interval(difference)
    return row


def steps(run: Run) -> int:
    """The number of steps: as configured, or as recorded if the length is given in epochs."""
    return run.config.steps or int(run.metrics()["step"].max())


def counts(runs: Sequence[Run]) -> dict[str, int]:
    diverged = sum(run.status == Status.DIVERGED for run in runs)
    return {"runs": len(runs), "diverged": diverged, "steps": steps(runs[0])}


def setting(run: Run, rule: SearchRule) -> dict[str, Any]:
    given = {key: run.config.optimizer.get(key) for key in rule.settings}
    return {k: list(map(float, v)) if isinstance(v, list) else v for k, v in given.items()}


def best_of(table: pd.DataFrame, rule: SearchRule) -> Any:
    """The index of the best row; settings with a diverged run rank last."""
    score = table[rule.metric] if rule.best == "highest" else -table[rule.metric]
    # The paper's setting wins a tie.
    order = pd.DataFrame({"score": score.fillna(-np.inf), "paper": table["paper"]})
    return order.sort_values(["score", "paper"], kind="stable").index[-1]


def is_edge(table: pd.DataFrame, rule: SearchRule) -> pd.Series:
    """Whether a setting is the first or the last on its line."""
    place = table[rule.along]
    line = place.groupby(line_of(table, rule.others))
    return (place == line.transform("min")) | (place == line.transform("max"))


def line_of(table: pd.DataFrame, others: Sequence[str]) -> pd.Series:
    """The name of the line of each setting: its other settings."""
    return pd.Series([words(row, others) for _, row in table.iterrows()], table.index, dtype=str)


def fresh_rows(
    spec: Spec, rule: SearchRule, groups: Groups, table: pd.DataFrame
) -> Iterator[dict[str, str]]:
    """The best setting that conf/ declares for each optimizer, on the seeds of the spec."""
    for name, search in spec.search.items():
        runs = groups.get(f"{name} best")
        if not runs:
            continue
        given = words(pd.Series(setting(runs[0], rule)), rule.settings)
        selected = words(
            paper_and_best(table[table["optimizer"] == search.label])[1], rule.settings
        )
        now = "" if given == selected else f" (the search now selects {selected}: change `best`)"
        numbers = scores_of(runs, rule)
        found = pd.Series(score_columns(numbers, numbers) | counts(runs))
        yield {
            "optimizer": search.label,
            "best setting": given + now,
            **{metric: mean_sd(found, metric) for metric in rule.metrics()},
            "diverged runs": f"{found['diverged']:g} of {len(runs)}",
        }


# -- the page ----------------------------------------------------------------------------------


def face(spec: Spec, rule: SearchRule, groups: Groups, table: pd.DataFrame) -> str:
    parts = (
        f"{scale_of(groups)} scale",
        steps_of(table),
        f"{rule.seeds or spec.seeds} seeds",
        spec.note,
    )
    return "; ".join(filter(None, parts)) + "."


def steps_of(table: pd.DataFrame) -> str:
    counts = sorted(table["steps"].unique())
    return f"{' and '.join(f'{count:,}' for count in counts)} steps a run"


def search_page(
    spec: Spec, rule: SearchRule, table: pd.DataFrame, about: str, fresh: pd.DataFrame
) -> str:
    text = (
        f"The best setting has the {rule}; settings with a diverged run rank last. Values are mean "
        "± standard deviation over the seeds; a difference is best − paper's, paired by seed, with "
        "its 95 % confidence interval. The same seeds selected the best setting, which biases its "
        "lead upwards; the other metrics were not used for selection. The csv of the same name "
        "lists every setting."
    )
    parts = [f"# {spec.title}", about, text, optimizer_table(table, partial(chosen_row, rule=rule))]
    for metric in rule.beside:
        parts.append(optimizer_table(table, partial(beside_row, metric=metric)))
    if not fresh.empty:
        parts.append(
            f"The best settings on {spec.seeds} other seeds, from {spec.first_seed} on, on which "
            "claims are judged:"
        )
        parts.append(markdown_table(fresh))
    return "\n\n".join(parts) + "\n"


def optimizer_table(table: pd.DataFrame, make_row: Callable[[pd.DataFrame], dict[str, str]]) -> str:
    """A line for each optimizer."""
    parts = table.groupby("optimizer", sort=False)
    return markdown_table(pd.DataFrame([{"optimizer": x} | make_row(part) for x, part in parts]))


def chosen_row(part: pd.DataFrame, rule: SearchRule) -> dict[str, str]:
    paper, best = paper_and_best(part)
    edge = " (at the edge of the grid)" if best["edge"] else ""
    chosen = "the paper's" if best["paper"] else words(best, rule.settings)
    return {
        "paper's setting": words(paper, rule.settings),
        f"its {rule.metric}": mean_sd(paper, rule.metric),
        "our best": "none, all diverged" if pd.isna(best[rule.metric]) else chosen + edge,
        f"best {rule.metric}": mean_sd(best, rule.metric),
        "difference": span(best, rule.metric),
        "settings": str(len(part)),
        "diverged runs": f"{part['diverged'].sum()} of {part['runs'].sum()}",
    }


def beside_row(part: pd.DataFrame, metric: str) -> dict[str, str]:
    paper, best = paper_and_best(part)
    return {
        f"{metric} of the paper's setting": mean_sd(paper, metric),
        "of our best": mean_sd(best, metric),
        "difference": span(best, metric),
    }


def paper_and_best(part: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    return part[part["paper"]].iloc[0], part[part["best"]].iloc[0]


def words(row: pd.Series, keys: Sequence[str]) -> str:
    """lr 0.01, betas (0, 0.999), n 1"""
    given = {key: row[key] for key in keys if not is_missing(row[key])}
    return ", ".join(f"{key} {setting_text(value)}" for key, value in given.items())


def is_missing(value: Any) -> bool:
    return not isinstance(value, list) and bool(pd.isna(value))


def setting_text(value: Any) -> str:
    return f"({', '.join(f'{x:g}' for x in value)})" if isinstance(value, list) else f"{value:g}"


def mean_sd(row: pd.Series, metric: str) -> str:
    if pd.isna(row[metric]):
        return f"{row['diverged']:g} of {row['runs']:g} runs diverged"
    return f"{row[metric]:.4g} ± {row[f'{metric} sd']:.2g}"


def span(row: pd.Series, metric: str) -> str:
    middle, low, high = (row[f"{metric} {name}"] for name in ("difference", "low", "high"))
    if row["paper"]:
        return "none"
    return "a run diverged" if pd.isna(middle) else f"{middle:+.2g} [{low:+.2g}, {high:+.2g}]"


# -- the plot ----------------------------------------------------------------------------------


def lines(
    ax: Axes,
    groups: Sequence[RunGroup],
    panel: SearchPanel,
    *,
    rule: SearchRule,
    table: pd.DataFrame,
) -> pd.DataFrame:
    """A metric along one setting: a line for each optimizer and each choice of the others.

    The legend is shared with the other panels, so it shows "ResNet: Adam" as Adam.
    """
    metric, along, owners = panel.metric, rule.along, {group.label: group for group in groups}
    table = table[table["optimizer"].isin(owners)]
    line = line_of(table, rule.others)
    parts = {key: part for key, part in table.groupby(["optimizer", line], sort=False)}
    looks = shaded([owners[label] for label, _ in parts])
    for ((label, other), part), look in zip(parts.items(), looks, strict=True):
        name = label.split(": ")[-1] + ("" if part["paper"].any() else f", {other}")
        draw_line(ax, part[along], part, metric, name, look.style)
    for name, mark in POINT_MARKS.items():
        ax.plot([], [], linestyle="", color="0.5", label=name, **mark)
    if panel.legend:
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7.5)
    return table[["optimizer", *rule.settings, metric, f"{metric} sd", "runs", "paper", "best"]]


POINT_MARKS: dict[str, dict[str, Any]] = {
    "the paper's setting": {"marker": "*", "ms": 12, "mec": "black", "mew": 0.6},
    "our best": {"marker": "o", "ms": 10, "mfc": "none", "mec": "black"},
    "beyond the axis": {"marker": "v", "ms": 5},
    "a run diverged": {"marker": "x", "ms": 7, "mew": 2},
}


def draw_line(
    ax: Axes, x: pd.Series, part: pd.DataFrame, metric: str, label: str, style: dict[str, Any]
) -> None:
    """Draw mean and standard deviation; values off the axis or diverged are drawn on its edge."""
    low, high = (-np.inf, np.inf) if ax.get_autoscaley_on() else ax.get_ylim()
    y = part[metric].astype(float).clip(low, high)
    spread = part[f"{metric} sd"].where(y == part[metric])
    ax.errorbar(x, y, spread, label=label, lw=1.3, marker=".", capsize=2, **style)
    for name, chosen in marked(part, metric, y).items():
        at = {"color": style["color"], "linestyle": "", "zorder": 5, "clip_on": False}
        # Not part of the layout: on a logarithmic axis 0 is infinitely far down.
        at |= POINT_MARKS[name] | {"in_layout": False}
        here, lost = chosen & y.notna(), chosen & y.isna()
        ax.plot(x[here], y[here], **at)
        ax.plot(x[lost], 0 * x[lost], transform=ax.get_xaxis_transform(), **at)


def marked(part: pd.DataFrame, metric: str, y: pd.Series) -> dict[str, pd.Series]:
    """Mark → the points of a line that have it."""
    beyond = y.notna() & (y != part[metric])
    flags = (part["paper"], part["best"] & y.notna(), beyond, y.isna())
    return dict(zip(POINT_MARKS, flags, strict=True))
