"""What the benches share: steps of all contenders in turn, the machine, the page, the command."""

from __future__ import annotations

import argparse
import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from experiments.config.paths import ROOT
from experiments.records.provenance import processor


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleave(entrants: Mapping[str, Any], rounds: int) -> pd.DataFrame:
    """Seconds per step, a row per round: the order is rotated, and backwards every other round."""
    names, rows = list(entrants), []
    gc.disable()
    try:
        for r in range(rounds):
            order = names[r % len(names) :] + names[: r % len(names)]
            rows.append({name: seconds(entrants[name].step) for name in order[:: (-1) ** r]})
    finally:
        gc.enable()
    return pd.DataFrame(rows, columns=names)


def machine() -> dict[str, Any]:
    return {
        "machine": f"{processor()}, {os.cpu_count()} cores, {platform.system()}",
        "software": f"torch {torch.__version__}, Python {platform.python_version()}",
        "threads": torch.get_num_threads(),
    }


def listed(facts: Mapping[str, Any]) -> str:
    return "\n".join(f"- {key}: {value}" for key, value in facts.items())


def write(table: pd.DataFrame, page: str, stem: Path) -> None:
    """Write stem.csv and stem.md."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(stem.with_suffix(".csv"), index=False, float_format="%.6g")
    stem.with_suffix(".md").write_text(page, encoding="utf-8")


def command(
    bench: Callable[[Path, bool], pd.DataFrame],
    readable: Callable[[pd.DataFrame], pd.DataFrame],
    about: str,
    name: str,
    words: Sequence[str] | None,
) -> None:
    """The command line of a bench; words=None takes those that Python was called with."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="small sizes: seconds, no meaning")
    parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="FOLDER")
    arguments = parser.parse_args(words)
    try:
        table = bench(arguments.results, arguments.quick)
    except OSError as error:
        sys.exit(f"error: {error}")
    print(readable(table).to_string(index=False))
    print(f"Written: {arguments.results}/benchmarks/{name}.csv and .md")
