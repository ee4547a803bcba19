"""`make verify`: trains the cheapest published run of every experiment again and compares it."""

from __future__ import annotations

import shlex
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.records import archive
from experiments.records.agreement import DIFFERENT, compare
from experiments.records.archive import Published
from experiments.records.run import Run, given
from experiments.training.pool import execute_all
from experiments.training.scheduler import FailedRunsError, RunOutcome

OUTDATED = "not compared: conf/ has changed since it was published"
COLUMNS = ("experiment", "run", "published, s", "here, s", "agreement")


def verify(overrides: Sequence[str]) -> bool:
    """Print how the runs compare; return whether all that could be compared agree."""
    published = compose(overrides).published
    cheapest = [cheapest_of(published, name) for name in archive.experiments(published)]
    if not cheapest:
        raise ConfigError(f"{published / 'records'} has no published records to compare with")
    with tempfile.TemporaryDirectory(prefix="adashift-verify-") as folder:
        words = [*overrides, given("results", folder, "")]
        runs = [repeated(run, words) for run in cheapest]
        same = [run for run, old in zip(runs, cheapest, strict=True) if run.entry == entry_of(old)]
        failures = failures_of(same)
        agreements = [
            agreement_of(run, failures.get(run.folder)) if run in same else OUTDATED for run in runs
        ]
        rows = [COLUMNS, *map(row_of, runs, cheapest, agreements)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    differ = any(text.startswith(DIFFERENT) for text in agreements)
    return not differ and all(failure.lacks_data for failure in failures.values())


def failures_of(runs: Sequence[Run]) -> Mapping[Path, RunOutcome]:
    """Train the runs; return the failures by folder."""
    try:
        if runs:
            execute_all(runs, "verify")
    except FailedRunsError as error:
        return error.failures
    return {}


def cheapest_of(published: Path, experiment: str) -> Published:
    """The shortest run; if there are any, of a setting whose spread is known from three seeds."""
    runs = archive.load(published, experiment)
    seeds = Counter(name.split("/")[0] for name in runs)

    def cost(name: str) -> tuple[bool, float]:
        return seeds[name.split("/")[0]] < 3, float(runs[name].info["seconds"])

    return runs[min(runs, key=cost)]


def repeated(run: Published, overrides: Sequence[str]) -> Run:
    """The same run, to be trained in another folder."""
    words = shlex.split(run.info["command"])[2:]
    return Run(compose([*words, *overrides, "records=own", "tracking=off"]))


def entry_of(run: Published) -> str:
    return str(run.info["run"])


def agreement_of(run: Run, failure: RunOutcome | None) -> str:
    return f"not compared: {failure.error}" if failure else str(compare(run))


def row_of(run: Run, published: Published, agreement: str) -> tuple[str, ...]:
    there, here = (f"{info['seconds']:.1f}" if info else "–" for info in (published.info, run.info))
    return run.config.experiment, entry_of(published), there, here, agreement
