"""Makes a product: trains its missing runs, writes it, judges its claims, lists its runs.

A product is a figure, a table or a file of claims. What it is made from is decided by `records`:
own runs, published ones, or both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from experiments.config.errors import ConfigError, NotPublishedError
from experiments.config.paths import shown_path
from experiments.config.schema import Config
from experiments.products.claims import family_of, judge_spec, kept, read_verdicts, write_verdicts
from experiments.products.schema import CurvesPanel, Spec
from experiments.products.specs import all_specs, everything, figures_using, load_spec
from experiments.records import agreement, index
from experiments.records.files import locked
from experiments.records.run import Groups, Run, all_runs
from experiments.records.tracking import publish_figure

PREFIXES = "TFCIJKLS"  # of the claims' names, in order


def make(kind: str, name: str, overrides: Sequence[str]) -> None:
    """Make the product that conf/<kind>/<name>.yaml describes."""
    spec = load_spec(kind, name)
    all_specs()  # claims.csv and runs.csv need all of them after the training
    groups = groups_of(spec, overrides)
    train_missing(groups, f"{kind} {name}")
    if said := write_product(kind, name, spec, groups):
        print(said)
    show(update_verdicts(spec, groups))
    keep_index(f"{kind}-{name}", groups)
    if line := agreement.summary(all_runs(groups)):
        print(line)


def groups_of(spec: Spec, overrides: Sequence[str]) -> Groups:
    """The runs of a spec; of published ones those at paper scale, if all of them are published."""
    groups = spec.expand(overrides)
    scale = [word for word in overrides if word.startswith("scale=")][-1:]
    if config_of(groups).records != "published" or scale not in ([], ["scale=auto"]):
        return groups
    small = {r.config.experiment: r for r in all_runs(groups) if r.config.scale != "paper"}
    if not small or not all(has_paper_scale(run) for run in small.values()):
        return groups
    paper = spec.expand([*overrides, "scale=paper"])
    return paper if all(run.done for run in all_runs(paper)) else groups


def has_paper_scale(run: Run) -> bool:
    """Whether any run of its experiment is published at paper scale."""
    published = run.published_runs.values()
    return any(other.info["config"]["scale"] == "paper" for other in published)


def config_of(groups: Groups) -> Config:
    return next(iter(groups.values()))[0].config


def train_missing(groups: Groups, title: str) -> None:
    runs = all_runs(groups)
    missing = [run for run in runs if not run.done]
    if config_of(groups).records == "published":
        if missing:
            raise NotPublishedError(
                f"{title}: {len(missing)} of {len(runs)} runs are not published, for example "
                f"{missing[0].name}; use records=all to train them, or records=own to train all"
            )
    elif missing or config_of(groups).force:
        from experiments.training.pool import execute_all

        execute_all(runs, title, figures_using)


def write_product(kind: str, name: str, spec: Spec, groups: Groups) -> str:
    """Write the files of a product; return what to say of them."""
    if kind == "table":
        return write_table_files(name, spec, groups)
    return write_figure_files(f"figure-{name}", spec, groups) if kind == "figure" else ""


def write_figure_files(name: str, spec: Spec, groups: Groups) -> str:
    from experiments.products.figures import draw_figure

    stem, config = place(groups, f"figures/{name}"), config_of(groups)
    count = len(all_runs(groups))
    if not draw_figure(spec, groups, stem):
        return f"{shown_path(stem)}.png, .pdf and .csv are up to date with {count} runs"
    publish_figure(config, name, stem.with_suffix(".png"))
    return f"{shown_path(stem)}.png, .pdf and .csv drawn from {count} runs"


def write_table_files(name: str, spec: Spec, groups: Groups) -> str:
    stem = place(groups, f"tables/table-{name}")
    if spec.rule:
        from experiments.products.search_tables import write_search_table  # with a picture

        picture = place(groups, f"figures/table-{name}")
        write_search_table(spec, spec.rule, groups, stem, picture)
    elif spec.contest:
        from experiments.products.contest import write_contest

        write_contest(spec, spec.contest, groups, stem, place(groups, f"figures/table-{name}"))
    else:
        from experiments.products.tables import write_table

        write_table(spec, groups, stem)
    return stem.with_suffix(".md").read_text()


def make_figure_with(extra: Sequence[str], name: str, overrides: Sequence[str]) -> None:
    """A copy of a figure with curves of other optimizers; the usual ones may be published runs."""
    usual = load_spec("figure", name)
    if not any(isinstance(panel, CurvesPanel) for panel in usual.panels):
        raise ConfigError(f"figure {name} has no panel of curves, so there is no place for another")
    for optimizer in extra:
        requests = usual.with_extra([optimizer]).runs.values()
        if all(words in usual.runs.values() for words in requests):
            raise ConfigError(f"figure {name} already has {optimizer}: drop it from --extra")
    spec = usual.with_extra(extra)
    groups = spec.expand(["records=all", *overrides])
    train_missing(groups, f"figure {name} with {', '.join(extra)}")
    print(write_figure_files(f"figure-{name}-with-{'-'.join(extra)}", spec, groups))


def place(groups: Groups, name: str) -> Path:
    """Where a product goes; one of other runs or other records never replaces the usual one."""
    config = config_of(groups)
    scale = "" if config.scale in ("paper", config.cpu_scale) else f"-{config.scale}"
    own = config.records == "own" or config.results == config.published
    records = "" if own else f"-{config.records}"
    return config.results / f"{name}{scale}{speed_suffix(config)}{records}"


def speed_suffix(config: Config) -> str:
    return "-fast" if config.speed == "fast" else ""


# -- verdicts and the list of runs -------------------------------------------------------------


def one_at_a_time(groups: Groups) -> AbstractContextManager[bool]:
    """runs.csv and claims.csv are read, changed and written by one process at a time."""
    return locked(config_of(groups).results / "runs", lambda line: None)


def keep_index(product: str, groups: Groups) -> None:
    """Bring runs.csv up to date for one product."""
    with one_at_a_time(groups):
        products = {f"{kind}-{name}" for kind, name in everything()}
        path = place(groups, "runs").with_suffix(".csv")
        index.update_index(path, product, all_runs(groups), products)


def update_verdicts(spec: Spec, groups: Groups) -> list[dict[str, str]]:
    """Judge the claims of a spec, and bring claims.csv and claims.md up to date."""
    stem, config = place(groups, "claims"), config_of(groups)
    published = read_verdicts(config.published / "claims.csv") if config.records != "own" else {}
    with one_at_a_time(groups):
        rows = [kept(row, published) for row in judge_spec(spec, groups)]
        known = read_verdicts(stem.with_suffix(".csv")) | {row["id"]: row for row in rows}
        if rows:
            write_verdicts(current_verdicts(known), stem, family_of(all_specs()))
    return rows


def show(rows: Sequence[dict[str, str]]) -> None:
    for row in rows:
        print(f"{row['id']:12} {row['verdict']:12} {row['claim']}")
        for number in filter(None, row["numbers"].split("; ")):
            print(f"{'':25} {number}")


def current_verdicts(known: Mapping[str, dict[str, str]]) -> list[dict[str, str]]:
    """The claims that conf/ has now; what it has no longer is dropped."""
    current = [claim.id for spec in all_specs() for claim in spec.claims]
    return [known[i] for i in sorted(current, key=natural) if i in known]


def natural(name: str) -> list[str | int]:
    """T first, as the theory comes first; F2 before F10."""
    parts = re.split(r"(\d+)", name)
    return [PREFIXES.find(parts[0]), *(int(p) if p.isdigit() else p for p in parts[1:])]
