"""The specs of conf/figure, conf/table and conf/claim: which exist, and how one is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from omegaconf import OmegaConf

from experiments.config.errors import ConfigError, one_line_errors, short_path
from experiments.config.paths import CONF
from experiments.config.schema import Config
from experiments.products.checks import check_content, check_name, checked
from experiments.products.schema import Spec
from experiments.records.run import Run, cached_config

COUNTS = {"figure": 24, "table": 9}

ABOUT_THE_MACHINE = (
    "scale", "records", "tracking", "results", "published", "device", "threads", "force", "speed",
    "runs_per_gpu",
)  # fmt: skip


def refuse_other_runs(overrides: Sequence[str]) -> None:
    """Raise an error for overrides that would change the runs: conf/ alone defines them."""
    for word in overrides:
        key = word.lstrip("+~").split("=")[0].split(".")[0]
        if key not in ABOUT_THE_MACHINE:
            raise ConfigError(
                f"{word} cannot be set here: set only {', '.join(ABOUT_THE_MACHINE)}, or use "
                "run.py for other runs"
            )


def full_names(kind: str, names: Sequence[str]) -> list[str]:
    """The names of the requested specs, numbers with two digits."""
    if not names:
        raise ConfigError(f"which {kind}? Give a number from 1 to {COUNTS[kind]}, or all")
    if "all" in names:
        if others_named := [name for name in names if name != "all"]:
            raise ConfigError(f"all is every {kind}: drop {' '.join(others_named)}")
        return [path.stem for path in specs(kind)]
    own = [name for name in names if spec_path(kind, name).exists()]
    for name in names:
        if name not in own and not (name.isdecimal() and 1 <= int(name) <= COUNTS[kind]):
            raise ConfigError(
                f"there is no {kind} {name}: the paper has {kind}s 1 to {COUNTS[kind]}"
                f"{others(kind)}"
            )
    return [name if name in own else f"{int(name):02d}" for name in names]


def others(kind: str) -> str:
    """The specs that are not in the paper, as the end of a message."""
    names = [path.stem for path in specs(kind) if not path.stem.isdigit()]
    return f", conf/{kind} also has {', '.join(names)}" if names else ""


def asked_for(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Kind and name of specs from words such as figure-4 or table-5."""
    for word in names:
        kind, _, name = word.partition("-")
        if kind not in COUNTS or not name:
            raise ConfigError(f"{word} is unknown: expected figure-4, table-5, figure-all …")
        yield from ((kind, number) for number in full_names(kind, [name]))


def everything() -> Iterator[tuple[str, str]]:
    """Kind and name of every spec."""
    for kind in ("figure", "table", "claim"):
        yield from ((kind, path.stem) for path in specs(kind))


def spec_path(kind: str, name: str) -> Path:
    return CONF / kind / f"{name}.yaml"


def all_specs() -> list[Spec]:
    return [load_spec(kind, name) for kind, name in everything()]


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
    """The checked spec of a file; `changed` is its time stamp, so that a new version is read."""
    file = short_path(path)
    try:
        with one_line_errors():
            raw = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
            spec = with_borrowed_runs(checked(raw))
            check_content(spec, path.parent.name)
            return spec
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(file) else f"{file}: {text}") from error


def with_borrowed_runs(spec: Spec) -> Spec:
    """The spec with the runs of other specs that its contest names: figure-04/adam.

    The best run of a search that is not finished is left out.
    """
    for name in sorted(spec.contest.borrowed()) if spec.contest else ():
        product, _, run = name.partition("/")
        lender = load_spec(*product.split("-"))
        if run in lender.awaited:
            continue
        check_name("contest", f"runs of {product}", run, lender.runs)
        if lender.seeds_of(run) != spec.seeds_of(name):
            raise ConfigError(f"contest names {name}, which has other seeds: use the same")
        spec.runs[name] = [*lender.base, *lender.runs[run]]
    return spec


def specs(kind: str) -> list[Path]:
    """The files of conf/<kind> that hold a spec, in order."""
    return sorted(p for p in (CONF / kind).glob("*.yaml") if not p.stem.startswith("_"))


def figures_using(run: Run) -> list[str]:
    """The tags of a run: the figures and tables that it is part of."""
    return [f"{kind}-{name}" for kind, name in users_of(run)]


def users_of(run: Run) -> Iterator[tuple[str, str]]:
    for kind in ("figure", "table"):
        for path in specs(kind):
            with suppress(ConfigError):  # a mistake in a spec must not stop a single run
                if uses(kind, path, run.config):
                    yield kind, path.stem


def uses(kind: str, path: Path, c: Config) -> bool:
    # Parsing and composing are slow: skip files that do not name the experiment.
    if f"experiment={c.experiment}" not in path.read_text():
        return False
    spec = load_spec(kind, path.stem)
    names = {f"experiment={c.experiment}", f"optimizer={c.optimizer_name}"}
    alike = [o for o in spec.runs.values() if names <= {*spec.base, *o}]
    requests = [cached_config((*spec.base, *o, f"scale={c.scale}")) for o in alike]
    return any(c.identity() == r.identity() for r in requests)
