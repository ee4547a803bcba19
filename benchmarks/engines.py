"""One sweep on every engine, in peace and disturbed: how long it takes, and whether records differ.

python -m benchmarks.engines     results/benchmarks/bench-engines.md and bench-engines.csv

Engines that `make setup-cluster` has not installed are left out. Let the machine be idle.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from benchmarks.common import command, listed, machine, write
from benchmarks.kill_and_resume import record_of
from experiments.config.compose import compose, expand
from experiments.config.paths import ROOT
from experiments.products.markdown import markdown_table
from experiments.records.run import Run

SWEEP = ["experiment=mnist_lr", "optimizer=adam,adashift,amsgrad,sgd", "seed=0,1,2", "tracking=off"]
LENGTH = ["scale=paper", "steps=2000"]
SERIAL = "one after the other"
ENGINES = {"joblib": "joblib", "submitit_local": "submitit", "ray": "ray"}  # engine= → package
ROUNDS = 3
MOST = 1800  # seconds of a sweep; a launcher that hangs must not hang the bench
BEGUN = re.compile(r"scale.*, [\d,]+ steps: ")  # what run.py says when it begins to train


@dataclass
class Sweep:
    """The sweep in a folder of its own, trained by processes that are started here."""

    folder: Path
    words: Sequence[str]

    def runs(self) -> list[Run]:
        points = expand([*self.words, f"results={self.folder}"])
        return [Run(compose([w for w in point if not w.startswith("engine=")])) for point in points]

    def start(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, str(ROOT / "run.py"), "-m", *self.words]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*words, f"results={self.folder}"], cwd=self.folder, stdout=log, stderr=log
            )

    def wait_for(self, *launchers: subprocess.Popen[bytes]) -> None:
        for launcher in launchers:
            try:
                failed = launcher.wait(timeout=MOST)
            except subprocess.TimeoutExpired:
                failed = True
                launcher.kill()
            if failed:
                raise OSError(f"a sweep failed: {self.log.read_text(errors='replace')[-2000:]}")

    @property
    def log(self) -> Path:
        return self.folder / "log"


def in_peace(sweep: Sweep) -> int:
    sweep.wait_for(sweep.start())
    return trained_again(sweep)


def launcher_killed(sweep: Sweep) -> int:
    """Kill the launcher when half of the runs are done, then give the same command again."""
    launcher = sweep.start()
    runs = sweep.runs()
    while sum(run.done for run in runs) < len(runs) / 2:
        if launcher.poll() is not None:
            raise OSError("the sweep was over before its launcher could be killed")
        time.sleep(0.02)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    before = {run.folder: run.info for run in runs if run.done}
    sweep.wait_for(sweep.start())
    return sum(run.info != before.get(run.folder, run.info) for run in runs)


def two_launchers(sweep: Sweep) -> int:
    sweep.wait_for(sweep.start(), sweep.start())
    return trained_again(sweep)


def trained_again(sweep: Sweep) -> int:
    """Trainings beyond one a run; those of submitit, whose jobs have their own logs, not seen."""
    begun = len(BEGUN.findall(sweep.log.read_text(errors="replace")))
    return max(0, begun - len(sweep.runs()))


def ways(quick: bool) -> dict[str, tuple[list[str], Callable[[Sweep], int]]]:
    """Name → the words that choose an engine, and what is done to the sweep."""
    found = [] if quick else [e for e, package in ENGINES.items() if find_spec(package)]
    disturbed = "joblib" if "joblib" in found else None
    words = [f"engine={disturbed}"] if disturbed else []
    name = disturbed or SERIAL
    return {
        SERIAL: ([], in_peace),
        **{engine: ([f"engine={engine}"], in_peace) for engine in found},
        f"{name}, launcher killed": (words, launcher_killed),
        f"{name}, two launchers": (words, two_launchers),
    }


def try_out(folder: Path, words: Sequence[str], trial: Callable[[Sweep], int]) -> pd.Series:
    sweep = Sweep(folder, words)
    folder.mkdir(parents=True)
    start = time.monotonic()
    again = trial(sweep)
    seconds = time.monotonic() - start
    records = {run.name: record_of(run) for run in sweep.runs()}
    return pd.Series({"seconds": seconds, "again": again, "records": records})


def go_round(folder: Path, quick: bool, backwards: bool) -> pd.DataFrame:
    """A row per way; what is slow about the machine at the moment falls on all of them."""
    size = ["scale=smoke"] if quick else LENGTH
    every = ways(quick)
    rows = {
        name: try_out(folder / str(number), [*SWEEP, *size, *words], trial)
        for number, (name, (words, trial)) in sorted(enumerate(every.items()), reverse=backwards)
    }
    table = pd.DataFrame([rows[name].rename(name) for name in every])
    usual = table.loc[SERIAL, "records"]
    different = [sum(r[name] != usual[name] for name in usual) for r in table["records"]]
    ratio = table.loc[SERIAL, "seconds"] / table["seconds"]
    table = table.assign(runs=len(usual), differ=different, faster=ratio)
    return table.drop(columns="records").rename_axis("way").reset_index()


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """A row per way: the median over the rounds, and the worst of what must not be."""
    rows = []
    for name, part in table.groupby("way", sort=False):
        rows.append(
            {
                "way": name,
                "runs": part["runs"].max(),
                "seconds": f"{part['seconds'].median():.0f}",
                "times as fast": f"{part['faster'].median():.2f}",
                "from – to": f"{part['faster'].min():.2f}–{part['faster'].max():.2f}",
                "trained again": part["again"].sum(),
                "records that differ": part["differ"].sum(),
            }
        )
    return pd.DataFrame(rows)


EXPLANATION = f"""\
The sweep:

    run.py -m {" ".join([*SWEEP, *LENGTH])}

with `engine=` as named. A time is that of the whole command, with the start of its processes, in a
folder of its own. In a round every way has its turn; the ratio is that to {SERIAL} in the same
round: median and range. Launcher killed: SIGKILL when half of the runs are done, then the same
command; a run that was done and is trained again would be counted. Two launchers: the same command
twice at once. A record differs if a byte of metrics.csv or of a file beside it does (run.json has
times and is left out). Ray starts a cluster of one node first, and its workers at nice 15."""


def document(table: pd.DataFrame, quick: bool) -> str:
    facts = machine() | {"rounds": int(table["round"].max()) + 1}
    parts = ["# One sweep on every engine"]
    parts += ["**Short runs, for the tests: these times mean nothing.**"] if quick else []
    parts += [listed(facts), markdown_table(readable(table)), EXPLANATION]
    return "\n\n".join(parts) + "\n"


def bench(results: Path, quick: bool) -> pd.DataFrame:
    with tempfile.TemporaryDirectory() as scratch:
        rounds = [
            go_round(Path(scratch) / str(r), quick, backwards=r % 2 == 1).assign(round=r)
            for r in range(1 if quick else ROUNDS)
        ]
    table = pd.concat(rounds, ignore_index=True)
    write(table, document(table, quick), results / "benchmarks" / "bench-engines")
    if table["differ"].any() or table["again"].any():
        raise OSError(
            f"records differ or were made twice, see {results}/benchmarks/bench-engines.csv"
        )
    return table


def main(words: Sequence[str] | None = None) -> None:
    command(bench, readable, "One sweep on every engine.", "bench-engines", words)


if __name__ == "__main__":
    main()
