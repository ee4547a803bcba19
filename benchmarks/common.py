"""What the benchmarks share: the command, the page, the environment, and interleaved timing."""

from __future__ import annotations

import argparse
import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from experiments.config.paths import ROOT
from experiments.records.provenance import processor

QUICK_NOTE = "**Quick mode, for the tests: these numbers mean nothing.**"


@dataclass(frozen=True)
class Benchmark:
    """A command that measures, writes results/benchmarks/<name>.csv and .md, and prints a summary.

    `quick` measures sizes that take seconds and mean nothing. `finish` is called with the table and
    the path of the files without a suffix: to draw a chart, or to raise an OSError.
    """

    name: str
    title: str
    measure: Callable[[bool], pd.DataFrame]  # quick → the table of the csv
    summarize: Callable[[pd.DataFrame], pd.DataFrame]
    sections: Callable[[pd.DataFrame], list[str]]  # the Markdown page below its title
    finish: Callable[[pd.DataFrame, Path, bool], None] = lambda table, stem, quick: None

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Run the command; `arguments` are those of sys.argv by default."""
        parser = argparse.ArgumentParser(description=self.title)
        parser.add_argument("--quick", action="store_true", help="small sizes, for the tests")
        parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="FOLDER")
        parsed = parser.parse_args(arguments)
        try:
            table = self.run(parsed.results, parsed.quick)
        except OSError as error:
            sys.exit(f"error: {error}")
        print(self.summarize(table).to_string(index=False))
        print(f"Written: {parsed.results}/benchmarks/{self.name}.csv and .md")

    def run(self, results: Path, quick: bool) -> pd.DataFrame:
        table = self.measure(quick)
        stem = results / "benchmarks" / self.name
        stem.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(stem.with_suffix(".csv"), index=False, float_format="%.6g")
        stem.with_suffix(".md").write_text(self.page(table, quick), encoding="utf-8")
        self.finish(table, stem, quick)
        return table

    def page(self, table: pd.DataFrame, quick: bool) -> str:
        note = [QUICK_NOTE] if quick else []
        return "\n\n".join([f"# {self.title}", *note, *self.sections(table)]) + "\n"


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleave(workloads: Mapping[str, Any], rounds: int) -> pd.DataFrame:
    """Return the seconds of each step(), one row per round.

    Every round rotates the order, and every other round reverses it, so that whatever else the
    machine does affects all workloads alike.
    """
    names, rows = list(workloads), []
    gc.disable()
    try:
        for r in range(rounds):
            order = names[r % len(names) :] + names[: r % len(names)]
            rows.append({name: seconds(workloads[name].step) for name in order[:: (-1) ** r]})
    finally:
        gc.enable()
    return pd.DataFrame(rows, columns=names)


def environment() -> dict[str, Any]:
    return {
        "machine": f"{processor()}, {os.cpu_count()} cores, {platform.system()}",
        "software": f"torch {torch.__version__}, Python {platform.python_version()}",
        "threads": torch.get_num_threads(),
    }


def bullet_list(facts: Mapping[str, Any]) -> str:
    return "\n".join(f"- {key}: {value}" for key, value in facts.items())
