"""Writes a contest: one optimizer against others over several problems, and what it costs.

Problems whose runs are not finished are left out and named on the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from experiments.products.comparison import (
    about_metric,
    effect_of,
    side,
    verdict_of,
    with_interval,
)
from experiments.products.figures import (
    RunGroup,
    finish,
    panel_grid,
    save_figure,
    scale_of,
    shaded,
)
from experiments.products.inference import (
    Bounds,
    Values,
    center,
    difference_interval,
    mean_of_bounds,
    superiority,
    superiority_interval,
)
from experiments.products.markdown import markdown_table
from experiments.products.schema import Contest, ContestTask, Spec
from experiments.records.files import write_text
from experiments.records.run import Groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATES = {"paper": "the paper's learning rates", "best": "the best learning rates"}
MARKS: dict[str, dict[str, Any]] = {
    "paper": {"marker": "o", "mfc": "white", "color": "0.35"},
    "best": {"marker": "o", "color": "black"},
}
CHANCES = ("rates", "rival", "probability", "low", "high")
OUTCOMES = ("better", "alike", "worse", "open")
GAPS = np.geomspace(0.3, 300, 200)  # in margins
MEASURED = {  # contender in bench-optimizer.csv → label
    "Adam fused": "Adam",
    "AdaShift fused n=10 m=10": "AdaShift, n = m = 10",
    "AdaShift fused n=10 m=10 bf16 slots": "AdaShift, bfloat16 window",
    "AdaShift fused n=10 m=10 phi=row": "AdaShift, φ = row",
    "AdaShift fused n=44 m=inf": "AdaShift, m = ∞, n = 44",
    "AdaShift fused n=10 m=1": "AdaShift, m = 1",
}


@dataclass(frozen=True)
class Duel:
    """The subject against one rival on one problem; higher numbers are better."""

    task: ContestTask
    rates: str
    rival: str
    ours: Values
    theirs: Values

    @property
    def sign(self) -> float:
        return direction(self.task.metric)

    @property
    def difference(self) -> tuple[float, float, float]:
        """The mean difference and its interval."""
        ours, theirs = self.ours[None], self.theirs[None]
        resolution = about_metric("resolution", self.task.metric, 0.0)
        ends = difference_interval(ours, theirs, resolution=resolution)
        return effect_of(ours, theirs), *ends

    @property
    def probability(self) -> float:
        return superiority(self.ours, self.theirs)

    @property
    def bounds(self) -> Bounds:
        """Of the probability."""
        return superiority_interval(self.probability, len(self.ours), len(self.theirs))

    @property
    def outcome(self) -> str:
        _, low, high = self.difference
        for relation, word in (("above", "better"), ("below", "worse"), ("near", "alike")):
            if verdict_of(relation, low, high, self.task.margin) == "holds":
                return word
        return "open"

    def row(self) -> dict[str, object]:
        """In the direction of the metric."""
        middle, *ends = (self.sign * x for x in self.difference)
        low, high = sorted(ends)
        return {
            "problem": self.task.label,
            "metric": self.task.metric,
            "rates": self.rates,
            "rival": self.rival,
            "ours": self.sign * center(self.ours),
            "theirs": self.sign * center(self.theirs),
            "difference": middle,
            "low": low,
            "high": high,
            "margin": self.task.margin,
            "outcome": self.outcome,
            "probability": self.probability,
            "probability low": self.bounds[0],
            "probability high": self.bounds[1],
            "seeds": len(self.ours),
        }


def direction(metric: str) -> float:
    """1 if a higher value of the metric is better, else -1."""
    return -1.0 if about_metric("worst", metric, np.nan) > 0 else 1.0


# -- the numbers -------------------------------------------------------------------------------


def scores(task: ContestTask, rates: str, groups: Groups) -> dict[str, Values]:
    """Contender → a number per seed, higher is better; only those whose runs are finished."""
    names: Mapping[str, str] = getattr(task, rates)
    known = {x: name for x, name in names.items() if name in groups}
    done = {x: name for x, name in known.items() if all(run.done for run in groups[name])}
    sign = direction(task.metric)
    return {
        contender: sign * side(name, groups, task.metric, task.statistic)[0]
        for contender, name in done.items()
    }


def duels(contest: Contest, groups: Groups) -> Iterator[Duel]:
    for task in contest.tasks:
        for rates in RATES:
            found = scores(task, rates, groups)
            ours = found.pop(contest.subject, None)
            if ours is not None:
                for rival, theirs in found.items():
                    yield Duel(task, rates, rival, ours, theirs)


def totals(found: Sequence[Duel]) -> pd.DataFrame:
    """For each rival and rates, the mean probability over the problems."""
    rows = []
    for rates in RATES:
        for rival in dict.fromkeys(duel.rival for duel in found):
            mine = [duel for duel in found if (duel.rates, duel.rival) == (rates, rival)]
            if mine:
                middle, (low, high) = mean_of_bounds(
                    [duel.probability for duel in mine], [duel.bounds for duel in mine]
                )
                words = Counter(duel.outcome for duel in mine)
                counts = [words[outcome] for outcome in OUTCOMES]
                rows.append([rates, rival, middle, low, high, len(mine), *counts])
    return pd.DataFrame(rows, columns=[*CHANCES, "problems", *OUTCOMES])


def profile(contest: Contest, rates: str, groups: Groups) -> dict[str, Values]:
    """Contender → the share of runs whose gap to the best contender is at most GAPS margins.

    Every problem has the same weight. The contenders are those that have finished all problems
    that the subject and its main rival have finished.
    """
    found = [(task, scores(task, rates, groups)) for task in contest.tasks]
    found = [(task, x) for task, x in found if {contest.subject, contest.rival} <= x.keys()]
    contenders = [x for x in found[0][1] if all(x in each for _, each in found)] if found else []
    shares: dict[str, list[Values]] = {contender: [] for contender in contenders}
    for task, each in found:
        top = max(center(each[x]) for x in contenders)
        for contender, share in shares.items():
            gap = (top - each[contender]) / task.margin
            share.append((gap[:, None] <= GAPS).mean(0))
    return {x: np.mean(share, axis=0) for x, share in shares.items()}


# -- the files ---------------------------------------------------------------------------------


def write_contest(spec: Spec, contest: Contest, groups: Groups, stem: Path, picture: Path) -> None:
    """Write stem.csv, every duel; stem.md, the page to read; picture.png and .pdf."""
    found = [*duels(contest, groups)]
    table = pd.DataFrame([duel.row() for duel in found])
    config = next(iter(groups.values()))[0].config
    costs = read_costs(config.published / "benchmarks" / "bench-optimizer.csv")
    write_text(stem.with_suffix(".csv"), table.to_csv(index=False, float_format="%.10g"))
    page = contest_page(spec, contest, found, costs, scale_of(finished(groups)))
    write_text(stem.with_suffix(".md"), page)
    draw(spec, contest, found, groups, costs, picture)


def finished(groups: Groups) -> Groups:
    return {name: runs for name, runs in groups.items() if all(run.done for run in runs)}


def read_costs(path: Path) -> pd.DataFrame:
    """Bytes of state per parameter and the time of a step over Adam's; empty if not measured."""
    if not path.exists():
        return pd.DataFrame(columns=["label", "state_bytes", "low", "high"])
    table = pd.read_csv(path)
    table["label"] = table["contender"].map(MEASURED)
    grouped = table.groupby("label")
    costs = grouped["state_bytes"].median().to_frame()
    costs["low"], costs["high"] = grouped["to_fused"].min(), grouped["to_fused"].max()
    return costs.reindex(list(MEASURED.values())).dropna().reset_index()


# -- the page ----------------------------------------------------------------------------------

HOW_TO_READ = (
    "The probability is that of one run of {subject} being better than one run of the other "
    "optimizer, each with a seed of its own; 0.5 means that they are equally good. A problem is "
    "*better* or *worse* if the whole 95 % interval of the mean difference is beyond the margin, "
    "the smallest difference that counts; *alike* if the interval is within the margin on both "
    "sides; else *open*. A diverged run is worse than every other. *m = ∞* and *φ = row* are "
    "variants of {subject}, which were not trained on every problem. docs/statistics.md has the "
    "rule."
)
OF_ALL = (
    "The mean over the problems, each with the same weight. Its interval covers the randomness of "
    "the seeds, not the choice of the problems."
)
OF_FIGURE = (
    "In the figure, (d) and (e) show the share of runs whose distance from the best mean is less "
    "than so many margins, over all problems that {subject} and {rival} have finished. A curve "
    "further up is better. The lines in (f) are ranges over three models."
)
OF_COSTS = (
    "State of the optimizer in bytes per parameter, and the time of a step over that of Adam, both "
    "with fused=True on two cores: the range over one tensor of 25 million elements, ResNet-18 and "
    "DenseNet-121 (`make bench-optimizer`)."
)


def contest_page(
    spec: Spec, contest: Contest, found: Sequence[Duel], costs: pd.DataFrame, scale: str
) -> str:
    subject, rival = contest.subject, contest.rival
    parts = [
        f"# {spec.title}",
        f"{scale} scale; {spec.seeds} seeds" + (f"; {spec.note}." if spec.note else "."),
        HOW_TO_READ.format(subject=subject),
        "## All problems",
        markdown_table(pd.DataFrame(total_cells(totals(found), subject))),
        OF_ALL,
        OF_FIGURE.format(subject=subject, rival=rival),
    ]
    for rates, words in RATES.items():
        rows = [duel for duel in found if (duel.rates, duel.rival) == (rates, rival)]
        if rows:
            parts.append(f"## {subject} and {rival}, {words}")
            parts.append(markdown_table(pd.DataFrame(task_cells(rows, contest))))
    parts += not_finished(contest, found)
    if len(costs):
        parts += ["## Memory and time", OF_COSTS, markdown_table(pd.DataFrame(cost_cells(costs)))]
    return "\n\n".join(parts) + "\n"


def total_cells(table: pd.DataFrame, subject: str) -> Iterator[dict[str, str]]:
    for _, row in table.iterrows():
        yield {
            "rates": RATES[row["rates"]],
            f"{subject} against": row["rival"],
            "probability": f"{row['probability']:.2f} [{row['low']:.2f}, {row['high']:.2f}]",
            **{x: str(row[x]) for x in ("problems", *OUTCOMES)},
        }


def task_cells(rows: Sequence[Duel], contest: Contest) -> Iterator[dict[str, str]]:
    for duel in rows:
        numbers, (low, high) = duel.row(), duel.bounds
        middle, *ends = (duel.sign * x for x in duel.difference)
        yield {
            "problem": duel.task.label,
            "metric": f"{duel.task.metric}, {'higher' if duel.sign > 0 else 'lower'} is better",
            contest.subject: f"{numbers['ours']:.4g}",
            contest.rival: f"{numbers['theirs']:.4g}",
            "difference": with_interval(middle, *sorted(ends)),
            "margin": f"{duel.task.margin:g}",
            "outcome": f"**{duel.outcome}**",
            "probability": f"{duel.probability:.2f} [{low:.2f}, {high:.2f}]",
        }


def not_finished(contest: Contest, found: Sequence[Duel]) -> list[str]:
    """For each rates, the problems without a duel with the main rival."""
    done = {(duel.task.label, duel.rates) for duel in found if duel.rival == contest.rival}
    missing = {
        words: [
            task.label
            for task in contest.tasks
            if getattr(task, rates) and (task.label, rates) not in done
        ]
        for rates, words in RATES.items()
    }
    return [
        f"Not trained yet with {x}: {'; '.join(names)}." for x, names in missing.items() if names
    ]


def cost_cells(costs: pd.DataFrame) -> Iterator[dict[str, str]]:
    for _, row in costs.iterrows():
        low, high = f"{row['low']:.2f}", f"{row['high']:.2f}"
        yield {
            "optimizer": row["label"],
            "state, bytes per parameter": f"{round(row['state_bytes'], 1):g}",
            "time of a step over Adam's": low if low == high else f"{low} to {high}",
        }


# -- the figure --------------------------------------------------------------------------------


def draw(
    spec: Spec,
    contest: Contest,
    found: Sequence[Duel],
    groups: Groups,
    costs: pd.DataFrame,
    stem: Path,
) -> None:
    figure, ((by_task, by_rival, memory), (*profiles, time)) = panel_grid(2, 3)
    subject = contest.subject
    main = [duel for duel in found if duel.rival == contest.rival]
    draw_chances(by_task, [(d.rates, d.task.label, d.probability, *d.bounds) for d in main])
    title(by_task, f"(a) probability that {subject} beats {contest.rival}")
    draw_chances(by_rival, totals(found)[[*CHANCES]].to_numpy().tolist())
    title(by_rival, f"(b) probability that {subject} beats others, mean")
    for ax, rates, letter in zip(profiles, RATES, "de", strict=True):
        draw_profile(ax, contest, rates, groups)
        title(ax, f"({letter}) runs close to the best, {RATES[rates]}")
    draw_bars(memory, costs["label"], costs["state_bytes"], costs["state_bytes"])
    title(memory, "(c) memory: bytes of state per parameter")
    draw_bars(time, costs["label"], costs["low"], costs["high"])
    title(time, "(f) time of a step over Adam's")
    time.axvline(1, color="0.6", lw=1)
    finish(figure, spec, finished(groups))
    save_figure(figure, stem)


def title(ax: Axes, text: str) -> None:
    ax.set_title(text, fontsize=10)


def draw_chances(ax: Axes, rows: Sequence[Sequence[Any]]) -> None:
    """A line for each name, a point for each rates; a row: rates, name, middle, low, high."""
    names = [*dict.fromkeys(row[1] for row in rows)]
    offsets = dict(zip(RATES, (-0.13, 0.13), strict=True))
    for rates, mark in MARKS.items():
        chosen = [row for row in rows if row[0] == rates]
        y = [names.index(row[1]) + offsets[rates] for row in chosen]
        x, low, high = np.array([row[2:] for row in chosen], float).reshape(-1, 3).T
        look: dict[str, Any] = {"linestyle": "", "capsize": 2, "label": RATES[rates]}
        ax.errorbar(x, y, xerr=[x - low, high - x], **look, **mark)
    ax.axvline(0.5, color="0.6", lw=1)
    ax.set(xlim=(-0.02, 1.02))
    name_lines(ax, names)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, fontsize=8)


def name_lines(ax: Axes, names: Sequence[str]) -> None:
    """The first name on top."""
    ax.set_ylim(max(1, len(names)) - 0.4, -0.6)
    ax.set_yticks(range(len(names)), names)


def draw_profile(ax: Axes, contest: Contest, rates: str, groups: Groups) -> None:
    shares = profile(contest, rates, groups)
    asked = [pair for task in contest.tasks for pair in getattr(task, rates).items()]
    names = {contender: name for contender, name in asked if name in groups}
    for member in shaded([RunGroup(x, x, groups[names[x]]) for x in shares]):
        ax.plot(GAPS, shares[member.name], label=member.label, lw=1.6, **member.style)
    ax.axvline(1, color="0.6", lw=1)
    ax.set(xscale="log", xlabel="distance from the best mean, in margins")
    ax.set(ylim=(-0.02, 1.02), ylabel="share of runs that are closer")
    if shares:
        ax.legend(loc="lower right", fontsize=8)
    else:
        ax.text(0.5, 0.5, "not trained yet", transform=ax.transAxes, ha="center", color="0.35")


def draw_bars(ax: Axes, names: pd.Series, low: pd.Series, high: pd.Series) -> None:
    """A bar for each name, and the range if there is one."""
    ax.barh(range(len(names)), (low + high) / 2, xerr=(high - low) / 2, color="0.7", height=0.6)
    name_lines(ax, [*names])
