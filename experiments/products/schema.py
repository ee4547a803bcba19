"""The typed form of a spec: its runs, panels, table rows, searches and claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cached_property, partial
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from experiments.config.compose import config_source, sweep_points
from experiments.products.summaries import STATISTICS
from experiments.records.run import Run, cached_config

MOST_NAMES = 12  # in a message


def nearest(name: object, known: Iterable[str]) -> str:
    """The known names, the most similar first."""
    names = get_close_matches(str(name), [*known], n=MOST_NAMES + 1, cutoff=0)
    return ", ".join(names[:MOST_NAMES]) + (", …" if len(names) > MOST_NAMES else "")


class SpecPart(BaseModel):
    """A part of a spec. An unknown key raises an error that lists the allowed keys."""

    @model_validator(mode="before")
    @classmethod
    def check_keys(cls, values: Any) -> Any:
        for key in values if isinstance(values, dict) else ():
            if key not in cls.model_fields:
                about = {"key": key, "allowed": nearest(key, cls.model_fields)}
                message = "{key} is unknown; allowed are {allowed}"
                raise PydanticCustomError("unknown_key", message, about)
        return values


def known_statistic(name: str) -> str:
    if name not in STATISTICS:
        raise ValueError(f"{name} is unknown; allowed are {nearest(name, STATISTICS)}")
    return name


def with_labels(runs: Any) -> Any:
    """`[adam, amsgrad]` as `{adam: null, amsgrad: null}`: without labels of their own."""
    return dict.fromkeys(runs) if isinstance(runs, list) else runs


Statistic = Annotated[str, AfterValidator(known_statistic)]
Labels = Annotated[dict[str, str | None], BeforeValidator(with_labels)]  # None: the optimizer's


# -- panels ------------------------------------------------------------------------------------

Limits = tuple[int | float | None, int | float | None]
AxisScale = Literal["linear", "log"]
LegendPlace = Literal[
    "best", "upper right", "upper left", "lower left", "lower right", "right", "center left",
    "center right", "lower center", "upper center", "center",
]  # fmt: skip


class PanelAxes(SpecPart):
    """Labels, scales and limits, as matplotlib's `Axes.set` takes them."""

    xlabel: str = ""
    ylabel: str = ""
    xscale: AxisScale = "linear"
    yscale: AxisScale = "linear"
    xlim: Limits | None = None
    ylim: Limits | None = None


class Panel(SpecPart):
    """What every panel has."""

    title: str
    metric: str
    runs: Annotated[Labels, Field(min_length=1)]
    axes: PanelAxes = PanelAxes()

    @property
    def letter(self) -> str:
        """The first word of the title without brackets: a"""
        return self.title.partition(" ")[0].strip("()")

    @property
    def subject(self) -> str:
        """The title without the letter."""
        return self.title.partition(" ")[2]

    def metrics(self) -> list[str]:
        """Every metric that is drawn."""
        return [self.metric]


class CurvesPanel(Panel):
    """Mean over the seeds, with a band of one standard deviation; an × where runs diverged.

    With `smooth`, each run is first averaged over that many records, and the unsmoothed mean is
    drawn faintly behind. With `orders`, means and bands are those of log10 of the metric, for seeds
    that are orders of magnitude apart.
    """

    draw: Literal["curves"] = "curves"
    legend: LegendPlace | tuple[float, float] | None = "best"
    smooth: Annotated[int, Field(ge=1)] = 1
    orders: bool = False


class HeatmapPanel(Panel):
    """A metric over β1 (x) and β2 (y), the `middle` (mean or median) over the seeds.

    `contours` names a second metric, drawn as lines over the first; cells in which the metric
    `where` is 0 are grey; `centered` makes 0 the middle of the colours and draws its line.
    """

    draw: Literal["heatmap"]
    runs: Annotated[Labels, Field(min_length=1, max_length=1)]
    contours: str | None = None
    contour_label: str = ""
    contour_levels: list[float] | None = None
    where: str | None = None
    where_label: str = ""
    centered: bool = False
    middle: Literal["mean", "median"] = "mean"

    def metrics(self) -> list[str]:
        wanted = (self.metric, self.contours, self.where, "beta1", "beta2")
        return [name for name in wanted if name]


class SearchPanel(Panel):
    """A metric of a search along one setting, a line for each optimizer."""

    draw: Literal["lines"] = "lines"
    runs: Labels = {}  # names of searches; empty: all of them
    legend: bool = False


def kind_of_panel(raw: Any) -> str:
    get = raw.get if isinstance(raw, dict) else partial(getattr, raw)
    return str(get("draw", "curves"))


AnyPanel = Annotated[
    Annotated[CurvesPanel, Tag("curves")] | Annotated[HeatmapPanel, Tag("heatmap")],
    Discriminator(kind_of_panel),
]


# -- tables ------------------------------------------------------------------------------------


class TableCell(SpecPart):
    """One number of ours: a statistic of a metric of a run."""

    run: str
    metric: str
    statistic: Statistic = "last"


class TableRow(SpecPart):
    """One number of the paper, and ours: a single one, or one for each named column.

    With `over`, one row for each of its items, which replaces {} in label and metric.
    """

    label: str
    run: str = ""
    metric: str = ""
    statistic: Statistic = "last"
    columns: dict[str, TableCell] = {}
    over: Annotated[list[int | float | str], Field(min_length=1)] = [""]
    paper: float | list[float] | None = None

    @model_validator(mode="after")
    def check_numbers(self) -> Self:
        if not self.columns and not (self.run and self.metric):
            raise ValueError("a number is missing: set run and metric, or columns")
        if isinstance(self.paper, list) and len(self.paper) != len(self.over):
            raise ValueError(
                f"{len(self.paper)} paper values for {len(self.over)} rows: give one for each item "
                "of `over`"
            )
        return self

    def cells(self) -> dict[str, TableCell]:
        """Column → number."""
        only = {"run": self.run, "metric": self.metric, "statistic": self.statistic}
        return self.columns or {"ours": TableCell(**only)}

    def papers(self) -> list[float | None]:
        """The paper's number for each item of `over`."""
        return [*self.paper] if isinstance(self.paper, list) else [self.paper] * len(self.over)


class Search(SpecPart):
    """What is tried for one optimizer: the paper's setting, and what files of conf/sweep list.

    `best` is what the search has selected, as overrides of the paper's setting; None: not yet. It
    is the run `<name> best`, which has the seeds of the spec and not those of the search.
    """

    label: str
    paper: list[str]
    best: list[str] | None = None
    sweeps: list[str]

    def runs(self, name: str) -> dict[str, list[str]]:
        """Name → overrides; the first is the paper's setting, whether or not a sweep has it too."""
        points = [point for sweep in self.sweeps for point in sweep_points(sweep)]
        return {name: self.paper} | {" ".join([name, *p]): [*self.paper, *p] for p in points}


class SearchRule(SpecPart):
    """Which setting is the best, and what is shown of all of them."""

    seeds: PositiveInt | None = None  # of what is tried, from 0 on; None: those of the spec
    metric: str
    statistic: Statistic = "last"
    best: Literal["highest", "lowest"]
    beside: list[str] = []  # metrics that are shown, but not used for selection
    settings: list[str]  # of the optimizer, as far as it has them
    along: str  # the setting on the x axis
    panels: list[SearchPanel] = []

    @model_validator(mode="after")
    def check_names(self) -> Self:
        if self.along not in self.settings:
            raise ValueError(
                f"along={self.along} is invalid: expected one of {', '.join(self.settings)}"
            )
        for panel in self.panels:
            if panel.metric not in self.metrics():
                raise ValueError(
                    f"the panel {panel.title} draws {panel.metric}; add it to `beside`"
                )
        return self

    def metrics(self) -> list[str]:
        return [self.metric, *self.beside]

    @property
    def others(self) -> list[str]:
        return [key for key in self.settings if key != self.along]

    def __str__(self) -> str:
        return f"{self.best} {self.metric} ({self.statistic}), mean over the seeds"


# -- contests ----------------------------------------------------------------------------------


class ContestTask(SpecPart):
    """A problem of a contest: what is measured, and the run of every contender.

    `paper` has the runs with the paper's learning rates, `best` those with the best ones of an
    equal search. A run is one of the spec, or figure-04/adam: one of another spec.
    """

    label: str
    metric: str
    statistic: Statistic = "last"
    margin: PositiveFloat  # the smallest difference that counts
    paper: dict[str, str] = {}
    best: dict[str, str] = {}

    def runs(self) -> list[str]:
        return [*self.paper.values(), *self.best.values()]


class Contest(SpecPart):
    """One optimizer against others, over several problems."""

    subject: str
    rival: str  # the one that is shown for each problem
    tasks: Annotated[list[ContestTask], Field(min_length=1)]

    @model_validator(mode="after")
    def check_contenders(self) -> Self:
        for task in self.tasks:
            for runs in (task.paper, task.best):
                if runs and not {self.subject, self.rival} <= runs.keys():
                    raise ValueError(
                        f"{task.label} names {', '.join(runs)}: expected {self.subject} and "
                        f"{self.rival} among them"
                    )
        return self

    def borrowed(self) -> set[str]:
        """The runs of other specs."""
        return {name for task in self.tasks for name in task.runs() if "/" in name}


# -- claims ------------------------------------------------------------------------------------


class Comparison(SpecPart):
    """A part of a claim: left is above, below or near right, by a margin.

    A side names runs, which are compared seed by seed; several names mean the range over them, the
    largest difference between two of them. `margin`, `metric` and `statistic` default to those of
    the claim.
    """

    left: str | list[str]
    relation: Literal["above", "below", "near"]
    right: float | str | list[str] = 0.0
    margin: NonNegativeFloat | None = None
    metric: str | None = None
    statistic: Statistic | None = None

    def runs(self) -> list[str]:
        """Every run that is compared."""
        sides = [[x] if isinstance(x, str) else x for x in (self.left, self.right)]
        return [name for side in sides if isinstance(side, list) for name in side]


class Claim(SpecPart):
    """A sentence of the paper; it holds if every part does."""

    id: str
    place: str
    text: str
    metric: str
    statistic: Statistic = "last"
    parts: Annotated[list[Comparison], Field(min_length=1)]
    margin: NonNegativeFloat = 0.0  # the smallest effect that counts, or the largest that is alike
    why: str = ""  # the reason for a margin, or what a careful reader should know
    ours: bool = False  # not a claim of the paper
    main: bool = False  # one of the claims on the first screen of the report
    exploratory: bool = False  # worded, or its bounds set, after some of its runs had been seen

    def runs(self) -> set[str]:
        return {name for part in self.parts for name in part.runs()}

    def metric_of(self, part: Comparison) -> str:
        return part.metric or self.metric

    def statistic_of(self, part: Comparison) -> str:
        return part.statistic or self.statistic

    def margin_of(self, part: Comparison) -> float:
        return self.margin if part.margin is None else part.margin


# -- the whole ---------------------------------------------------------------------------------


class Spec(SpecPart):
    """A figure, a table or a set of claims as conf/ describes it: named runs and their use."""

    title: str
    shows: str = ""  # in the paper, in one sentence of ours
    note: str = ""
    seeds: PositiveInt
    first_seed: NonNegativeInt = 0  # verdicts rest on seeds without earlier results
    once: list[str] = []  # runs that one seed settles: no randomness, or many cases in one run
    base: list[str] = []
    runs: dict[str, list[str]] = {}
    labels: dict[str, str] = {}  # of runs that need other words than in the legend, or have none
    search: dict[str, Search] = {}
    rule: SearchRule | None = None  # how a search is judged and shown
    panels: list[AnyPanel] = []
    rows: list[TableRow] = []
    contest: Contest | None = None
    claims: list[Claim] = []

    @model_validator(mode="after")
    def name_what_is_searched(self) -> Self:
        if bool(self.search) != bool(self.rule):
            raise ValueError("`search` and `rule` belong together: set both, or neither")
        for name, search in self.search.items():
            self.runs |= search.runs(name)
            if search.best is not None:
                self.runs[f"{name} best"] = [*search.paper, *search.best]
        return self

    @property
    def awaited(self) -> set[str]:
        """The best runs of searches that are not finished; claims may name them."""
        return {f"{name} best" for name, search in self.search.items() if search.best is None}

    @model_validator(mode="after")
    def check_margins(self) -> Self:
        """Random runs that are compared need a margin, so that no difference is an answer."""
        for claim in self.claims:
            for part in claim.parts:
                is_bound = isinstance(part.right, float) and part.relation != "near"
                is_exact = {*part.runs()} <= {*self.once}
                if not (is_bound or is_exact or claim.margin_of(part)):
                    raise ValueError(
                        f"claim {claim.id} compares {' and '.join(part.runs())} without a margin: "
                        "set the smallest effect that counts, and give its reason in `why`"
                    )
        return self

    def with_extra(self, optimizers: Sequence[str]) -> Self:
        """A curve for each of these optimizers in every panel of curves, on the panel's problem."""
        runs, panels = dict(self.runs), []
        for panel in self.panels:
            names = dict(panel.runs)
            if isinstance(panel, CurvesPanel):
                problem = self.problem_of(list(names))
                for optimizer in optimizers:
                    name = " ".join([optimizer, *problem])
                    runs[name] = [*problem, f"optimizer={optimizer}"]
                    names[name] = None
            panels.append(panel.model_copy(update={"runs": names}))
        return self.model_copy(update={"runs": runs, "panels": panels})

    def problem_of(self, names: Sequence[str]) -> tuple[str, ...]:
        """The overrides that most of these runs share, without those of the optimizer."""
        asked = [tuple(w for w in self.runs[n] if not w.startswith("optimizer")) for n in names]
        return Counter(asked).most_common(1)[0][0]

    def settings(self, overrides: Sequence[str]) -> dict[str, Run]:
        """Name → run with the first seed; `overrides` are applied last, to all of them."""
        with config_source():  # opened once and not for each run
            return {
                name: Run(cached_config((*self.base, *extra, *overrides)))
                for name, extra in self.runs.items()
            }

    def expand(self, overrides: Sequence[str] = ()) -> dict[str, list[Run]]:
        """Name → one run per seed."""
        return {
            name: [first.with_seed(seed) for seed in self.seeds_of(name)]
            for name, first in self.settings(overrides).items()
        }

    def seeds_of(self, name: str) -> range:
        if name in self.once:
            return range(1)
        if self.rule and self.rule.seeds and name in self.tried:
            return range(self.rule.seeds)
        return range(self.first_seed, self.first_seed + self.seeds)

    @cached_property
    def tried(self) -> set[str]:
        """The runs of the search, without the best ones on seeds of their own."""
        return {run for name, search in self.search.items() for run in search.runs(name)}
