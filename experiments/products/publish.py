"""`make publish`: adds your finished runs to the published records, and rewrites all products.

Everything is written to a new folder, from its records alone, which then replaces the old folder in
one step: an interrupted publication changes nothing.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.config.paths import ROOT, shown_path
from experiments.config.schema import Config
from experiments.products.make import groups_of, keep_index, update_verdicts, write_product
from experiments.products.pages import fill_examples, fill_pages, fill_times
from experiments.products.report import Place, load_products, overview
from experiments.products.specs import everything, load_spec
from experiments.progress import count_of
from experiments.records import archive, files, provenance
from experiments.records.archive import Published
from experiments.records.index import read_index
from experiments.records.run import Run, all_runs, given

SCALES = ("paper", "auto")  # auto: the scale of an experiment on a CPU


def publish(overrides: Sequence[str]) -> Iterator[str]:
    """Merge own runs into the published records and rewrite all products; yield progress lines."""
    config = compose([*overrides, "records=own"])
    commit = provenance.commit()
    if commit is None or "dirty" in commit:
        problem = "has uncommitted changes: commit them" if commit else "is not in git: clone it"
        raise ConfigError(f"the code {problem} before you publish")
    new = config.published.with_name(f".{config.published.name}-new")
    with files.locked(config.published.with_name(f".{config.published.name}-lock"), print):
        if not config.published.exists() and aside(config.published).exists():
            aside(config.published).rename(config.published)  # killed between two renames
        for left in (new, aside(config.published)):
            shutil.rmtree(left, ignore_errors=True)  # left by a killed publication
        if config.published.exists():
            shutil.copytree(config.published, new)
        used = used_runs(config)
        yield f"{count_of(merge(config, used, new), 'run')} added to the records"
        remove_unknown_products(new)
        complete = sum(list(rewrite(new)))
        yield f"{count_of(remove_unused_runs(used, new), 'unused run')} removed"
        products = load_products(Place(new))
        files.write_text(new / "README.md", overview(products))
        shutil.rmtree(new / "runs")  # it only holds the lock of runs.csv and claims.csv
        exchange(new, config.published)
        shutil.rmtree(new, ignore_errors=True)
        if config.published == ROOT / "results" / "published":
            published = load_products(Place(config.published))
            fill_pages(published)
            fill_times(published)
            fill_examples(published[0].index)
    count = f"{complete} of {len(products)} products are made from records"
    yield f"{shown_path(config.published)}: {count}"


# -- records -----------------------------------------------------------------------------------


def merge(config: Config, used: Mapping[str, Run], new: Path) -> int:
    """Add own runs that a product uses to the records; return how many."""
    added = 0
    for experiment in sorted({run.config.experiment for run in used.values()}):
        before = archive.load(new, experiment)
        new_runs = [
            run
            for run in used.values()
            if run.config.experiment == experiment
            and (run.entry not in before or config.force)
            and run.done
        ]
        refuse_uncommitted_code(new_runs)
        if new_runs:
            found = {run.entry: Published(public(run), run.metrics()) for run in new_runs}
            archive.save(new, experiment, {**before, **found})
        added += len(new_runs)
    return added


def remove_unused_runs(used: Collection[str], new: Path) -> int:
    """Remove the records that no product needs, now or until its new runs are trained."""
    needed, removed = {*used, *read_index(new / "runs.csv")}, 0
    for experiment in archive.experiments(new):
        before = archive.load(new, experiment)
        after = {name: run for name, run in before.items() if f"{experiment}/{name}" in needed}
        removed += len(before) - len(after)
        if not after:
            archive.path_of(new, experiment).unlink()
        elif len(after) < len(before):
            archive.save(new, experiment, after)
    return removed


def used_runs(config: Config) -> dict[str, Run]:
    """Return every run that a product uses, by name."""
    words = [*folder_overrides(config.results, config.published), "records=published"]
    runs = [
        Run(run.config.model_copy(update={"records": "own"}))
        for kind, name in everything()
        for scale in SCALES
        for run in all_runs(load_spec(kind, name).expand([*words, f"scale={scale}"]))
    ]
    return {f"{run.config.experiment}/{run.entry}": run for run in runs}


def folder_overrides(results: Path, published: Path) -> list[str]:
    return [given("results", str(results), ""), given("published", str(published), "")]


def refuse_uncommitted_code(runs: Iterable[Run]) -> None:
    """Raise an error for runs that no commit can reproduce."""
    unknown = [run for run in runs if "dirty" in (run.info.get("commit") or "dirty")]
    if unknown:
        raise ConfigError(
            f"uncommitted changes were used to train {count_of(len(unknown), 'run')}, for example "
            f"{unknown[0].folder}: train them again with force=true, or delete them"
        )


def public(run: Run) -> dict[str, object]:
    """Return run.json without the checksum of metrics.csv and without the W&B account."""
    info = {key: value for key, value in run.info.items() if key != "sha256"}
    settings = {key: value for key, value in info["config"].items() if key != "tracking"}
    return info | {"config": settings}


# -- products ----------------------------------------------------------------------------------


def rewrite(new: Path) -> Iterator[bool]:
    """Rewrite every product; yield whether all of its runs have records."""
    words = [*folder_overrides(new, new), "records=published", "scale=auto", "tracking=off"]
    for kind, name in everything():
        spec = load_spec(kind, name)
        groups = groups_of(spec, words)
        complete = all(run.done for run in all_runs(groups))
        # Else its files and its rows of runs.csv stay those of earlier runs. A contest leaves out
        # the problems that are not finished.
        if complete or (spec.contest and any(run.done for run in all_runs(groups))):
            write_product(kind, name, spec, groups)
            keep_index(f"{kind}-{name}", groups)
        update_verdicts(spec, groups)
        yield complete


def remove_unknown_products(new: Path) -> None:
    """Remove the files of products that are not in conf/."""
    names = {f"{kind}-{name}" for kind, name in everything()}
    for path in [*new.glob("figures/*"), *new.glob("tables/*")]:
        if path.stem not in names:
            path.unlink()


# -- one step ----------------------------------------------------------------------------------

AT_FDCWD, RENAME_EXCHANGE = -100, 2


def exchange(new: Path, old: Path) -> None:
    """Swap two folders, in one step if the system can, else in three."""
    if not old.exists():
        new.rename(old)
        return
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        names = os.fsencode(new), os.fsencode(old)
        if rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
            return
    except AttributeError:  # not Linux
        pass
    old.rename(aside(old))
    new.rename(old)
    aside(old).rename(new)


def aside(published: Path) -> Path:
    return published.with_name(f".{published.name}-old")
