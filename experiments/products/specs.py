"""The specs of conf/figure, conf/table and conf/claim: named runs, and what is made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator

from experiments.config.compose import config_source, sweep_points
from experiments.config.errors import ConfigError, one_line_errors
from experiments.config.paths import CONF
from experiments.records.run import Run, cached_config

COUNTS = {"figure": 24, "table": 9}

ABOUT_THE_MACHINE = (
    "scale", "records", "tracking", "results", "published", "device", "threads", "force",
)  # fmt: skip


class Search(BaseModel):
    """What is tried for one optimizer: the paper's setting, and what files of conf/sweep list."""

    model_config = ConfigDict(extra="forbid")
    label: str
    paper: list[str]
    sweeps: list[str]

    def runs(self, name: str) -> dict[str, list[str]]:
        """Name → overrides; the first is the paper's setting, whether or not a sweep has it too."""
        points = [point for sweep in self.sweeps for point in sweep_points(sweep)]
        return {name: self.paper} | {" ".join([name, *p]): [*self.paper, *p] for p in points}


class Spec(BaseModel):
    """A figure, a table or a set of claims as it stands in conf/: named runs and their use."""

    model_config = ConfigDict(extra="forbid")
    title: str
    shows: str = ""  # in the paper, in one sentence of ours
    note: str = ""
    seeds: PositiveInt
    once: list[str] = []  # runs that one seed settles: no randomness, or many cases in one run
    base: list[str] = []
    runs: dict[str, list[str]] = {}
    search: dict[str, Search] = {}
    rule: dict[str, Any] = {}  # how a search is judged and shown
    panels: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    claims: list[dict[str, Any]] = []

    @model_validator(mode="after")
    def name_what_is_searched(self) -> Self:
        for name, search in self.search.items():
            self.runs |= search.runs(name)
        return self

    def with_extra(self, optimizers: Sequence[str]) -> Self:
        """A curve for each of these optimizers in every panel of curves, on the panel's problem."""
        runs, panels = dict(self.runs), []
        for panel in self.panels:
            names = dict(
                panel["runs"] if isinstance(panel["runs"], dict) else dict.fromkeys(panel["runs"])
            )
            if panel["draw"].endswith(".curves"):
                problem = self.problem_of(list(names))
                for optimizer in optimizers:
                    name = " ".join([optimizer, *problem])
                    runs[name] = [*problem, f"optimizer={optimizer}"]
                    names[name] = None
            panels.append(panel | {"runs": names})
        return self.model_copy(update={"runs": runs, "panels": panels})

    def problem_of(self, names: Sequence[str]) -> tuple[str, ...]:
        """What most of these runs are asked for beside their optimizer."""
        asked = [tuple(w for w in self.runs[n] if not w.startswith("optimizer")) for n in names]
        return Counter(asked).most_common(1)[0][0]

    def settings(self, overrides: Sequence[str]) -> dict[str, Run]:
        """Name → run with the first seed; `overrides` come last and hold for all of them."""
        with config_source():  # opened once and not for each run
            return {
                name: Run(cached_config((*self.base, *extra, *overrides)))
                for name, extra in self.runs.items()
            }

    def expand(self, overrides: Sequence[str] = ()) -> dict[str, list[Run]]:
        """Name → one run per seed."""
        return {
            name: [first.with_seed(seed) for seed in range(1 if name in self.once else self.seeds)]
            for name, first in self.settings(overrides).items()
        }


def refuse_other_runs(overrides: Sequence[str]) -> None:
    """A figure of the paper is made of the runs that its file names, whatever is asked here."""
    for word in overrides:
        key = word.lstrip("+~").split("=")[0].split(".")[0]
        if key not in ABOUT_THE_MACHINE:
            raise ConfigError(
                f"{word}: only {', '.join(ABOUT_THE_MACHINE)} can be set here, the rest stands in "
                "conf/; run.py makes any other run"
            )


def numbers(kind: str, names: Sequence[str]) -> list[str]:
    """Two-digit names of what was asked for."""
    if not names:
        raise ConfigError(f"which {kind}? Give a number from 1 to {COUNTS[kind]}, or all")
    if "all" in names:
        return [path.stem for path in specs(kind)]
    own = [name for name in names if spec_path(kind, name).exists()]
    for name in names:
        if name not in own and not (name.isdecimal() and 1 <= int(name) <= COUNTS[kind]):
            raise ConfigError(
                f"there is no {kind} {name}: the paper has {kind}s 1 to {COUNTS[kind]}"
            )
    return [name if name in own else f"{int(name):02d}" for name in names]


def asked_for(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Kind and name of specs, from words as `make` has them: figure-4, table-5."""
    for word in names:
        kind, _, name = word.partition("-")
        if kind not in COUNTS:
            raise ConfigError(f"{word} is unknown: give figure-4, table-5, figure-all …")
        yield from ((kind, number) for number in numbers(kind, [name]))


def everything() -> Iterator[tuple[str, str]]:
    """Kind and name of every spec."""
    for kind in ("figure", "table", "claim"):
        yield from ((kind, path.stem) for path in specs(kind))


def spec_path(kind: str, name: str) -> Path:
    return CONF / kind / f"{name}.yaml"


def load_spec(kind: str, name: str) -> Spec:
    """Read conf/<kind>/<name>.yaml; `kind` is figure, table or claim."""
    path = spec_path(kind, name)
    if not path.exists():
        built = ", ".join(str(int(p.stem)) for p in specs(kind) if p.stem.isdigit()) or "none yet"
        raise ConfigError(
            f"{kind} {name.lstrip('0')} is not built yet: conf/{kind}/{path.name} is missing "
            f"(built so far: {built})"
        )
    return parse_spec(path, path.stat().st_mtime_ns)


@cache
def parse_spec(path: Path, changed: int) -> Spec:
    with one_line_errors():
        return Spec.model_validate(OmegaConf.to_container(OmegaConf.load(path), resolve=True))


def specs(kind: str) -> list[Path]:
    """The files of conf/<kind> that hold a spec, in order."""
    return sorted(p for p in (CONF / kind).glob("*.yaml") if not p.stem.startswith("_"))


def figures_using(run: Run) -> list[str]:
    """The tags of a run: the figures and tables whose pictures it is part of."""
    return [f"{kind}-{name}" for kind, name in users_of(run)]


def users_of(run: Run) -> Iterator[tuple[str, str]]:
    c = run.config
    names = {f"experiment={c.experiment}", f"optimizer={c.optimizer_name}"}
    for kind in ("figure", "table"):
        for path in specs(kind):
            # Parsing and composing are slow, so only what names this pair goes through them.
            if f"experiment={c.experiment}" not in path.read_text():
                continue
            spec = load_spec(kind, path.stem)
            alike = [o for o in spec.runs.values() if names <= {*spec.base, *o}]
            requests = [cached_config((*spec.base, *o, f"scale={c.scale}")) for o in alike]
            if any(c.identity() == r.identity() for r in requests):
                yield kind, path.stem
