"""Runs one sweep on every engine, undisturbed and disturbed, and compares times and records.

    python -m benchmarks.engines [--quick] [--results FOLDER]

Engines that `make setup-cluster` has not installed are skipped. Run it on an idle machine.
"""

from __future__ import annotations

import math
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

from benchmarks.common import Benchmark, bullet_list, environment
from benchmarks.kill_and_resume import record_of
from experiments.config.compose import compose, expand
from experiments.config.paths import ROOT
from experiments.products.markdown import markdown_table
from experiments.records.run import Run

SWEEP = ["experiment=mnist_lr", "optimizer=adam,adashift,amsgrad,sgd", "seed=0,1,2", "tracking=off"]
FULL_SIZE = ["scale=paper", "steps=2000"]
SERIAL = "serial"
ENGINES = {"joblib": "joblib", "submitit_local": "submitit", "ray": "ray"}  # engine= → package
ROUNDS = 3
SWEEP_TIMEOUT = 1800  # seconds; a launcher may hang
STARTED = re.compile(r"scale.*, [\d,]+ steps: ")  # what run.py prints when a training starts


@dataclass
class Sweep:
    """The sweep in a folder of its own, trained by processes that are started here."""

    folder: Path
    overrides: Sequence[str]

    def runs(self) -> list[Run]:
        points = expand([*self.overrides, f"results={self.folder}"])
        return [Run(compose([w for w in point if not w.startswith("engine=")])) for point in points]

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(ROOT / "run.py"), "-m", *self.overrides]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*command, f"results={self.folder}"], cwd=self.folder, stdout=log, stderr=log
            )

    def wait_for(self, *launchers: subprocess.Popen[bytes]) -> None:
        for launcher in launchers:
            try:
                failed = launcher.wait(timeout=SWEEP_TIMEOUT)
            except subprocess.TimeoutExpired:
                failed = True
                launcher.kill()
            if failed:
                raise OSError(f"a sweep failed: {self.log.read_text(errors='replace')[-2000:]}")

    @property
    def log(self) -> Path:
        return self.folder / "log"


def launch_once(sweep: Sweep) -> float:
    sweep.wait_for(sweep.start())
    return count_retrained(sweep)


def kill_launcher(sweep: Sweep) -> float:
    """Kill the launcher when half of the runs are finished, then rerun the same command."""
    launcher = sweep.start()
    runs = sweep.runs()
    while sum(run.done for run in runs) < len(runs) / 2:
        if launcher.poll() is not None:
            raise OSError("the sweep ended before its launcher could be killed")
        time.sleep(0.02)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    before = {run.folder: run.info for run in runs if run.done}
    sweep.wait_for(sweep.start())
    return sum(run.info != before.get(run.folder, run.info) for run in runs)


def launch_twice(sweep: Sweep) -> float:
    sweep.wait_for(sweep.start(), sweep.start())
    return count_retrained(sweep)


def count_retrained(sweep: Sweep) -> float:
    """Return the trainings beyond one per run; NaN for submitit, whose jobs have other logs."""
    if any("submitit" in override for override in sweep.overrides):
        return math.nan
    started = len(STARTED.findall(sweep.log.read_text(errors="replace")))
    return max(0, started - len(sweep.runs()))


Trial = Callable[[Sweep], float]  # trains the sweep and returns how many runs were trained again


def trials(quick: bool) -> dict[str, tuple[list[str], Trial]]:
    """Return, by name, the overrides that choose an engine, and the trial."""
    found = [] if quick else [e for e, package in ENGINES.items() if find_spec(package)]
    disturbed = "joblib" if "joblib" in found else None
    overrides = [f"engine={disturbed}"] if disturbed else []
    name = disturbed or SERIAL
    return {
        SERIAL: ([], launch_once),
        **{engine: ([f"engine={engine}"], launch_once) for engine in found},
        f"{name}, launcher killed": (overrides, kill_launcher),
        f"{name}, two launchers": (overrides, launch_twice),
    }


def time_trial(folder: Path, overrides: Sequence[str], trial: Trial) -> pd.Series:
    sweep = Sweep(folder, overrides)
    folder.mkdir(parents=True)
    start = time.monotonic()
    again = trial(sweep)
    seconds = time.monotonic() - start
    records = {run.name: record_of(run) for run in sweep.runs()}
    return pd.Series({"seconds": seconds, "again": again, "records": records})


def time_round(folder: Path, quick: bool, backwards: bool) -> pd.DataFrame:
    """Time every trial once; return one row per trial."""
    size = ["scale=smoke"] if quick else FULL_SIZE
    every = trials(quick)
    rows = {
        name: time_trial(folder / str(number), [*SWEEP, *size, *overrides], trial)
        for number, (name, (overrides, trial)) in sorted(
            enumerate(every.items()), reverse=backwards
        )
    }
    table = pd.DataFrame([rows[name].rename(name) for name in every])
    serial = table.loc[SERIAL, "records"]
    different = [sum(r[name] != serial[name] for name in serial) for r in table["records"]]
    ratio = table.loc[SERIAL, "seconds"] / table["seconds"]
    table = table.assign(runs=len(serial), differ=different, faster=ratio)
    return table.drop(columns="records").rename_axis("trial").reset_index()


def time_engines(quick: bool) -> pd.DataFrame:
    with tempfile.TemporaryDirectory() as scratch:
        rounds = [
            time_round(Path(scratch) / str(r), quick, backwards=r % 2 == 1).assign(round=r)
            for r in range(1 if quick else ROUNDS)
        ]
    return pd.concat(rounds, ignore_index=True)


def engines_summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row per trial: medians over the rounds, sums of what must not happen."""
    rows = []
    for name, part in table.groupby("trial", sort=False):
        rows.append(
            {
                "trial": name,
                "runs": part["runs"].max(),
                "seconds": f"{part['seconds'].median():.0f}",
                "speedup": f"{part['faster'].median():.2f}",
                "range": f"{part['faster'].min():.2f}–{part['faster'].max():.2f}",
                "trained again": "–" if part["again"].isna().any() else part["again"].sum(),
                "records that differ": part["differ"].sum(),
            }
        )
    return pd.DataFrame(rows)


ENGINES_EXPLANATION = f"""\
The sweep:

    run.py -m {" ".join([*SWEEP, *FULL_SIZE])}

with `engine=` as named. Seconds are those of the whole command, including the start of its
processes. Every round runs each trial once in a new folder; the speedup is relative to {SERIAL} in
the same round: median and range. Launcher killed: SIGKILL when half of the runs are finished, then
the same command again; a finished run that is trained again is counted. Two launchers: the same
command twice at the same time. The jobs of submitit have other logs, in which trainings are not
counted. A record differs if a byte of metrics.csv or of a file beside it
does, except run.json, which has times. Ray first starts a cluster of one node; its workers run at
nice 15."""


def engines_sections(table: pd.DataFrame) -> list[str]:
    facts = environment() | {"rounds": int(table["round"].max()) + 1}
    return [bullet_list(facts), markdown_table(engines_summary(table)), ENGINES_EXPLANATION]


def check_engines(table: pd.DataFrame, stem: Path, quick: bool) -> None:
    if table["differ"].any() or table["again"].any():
        raise OSError(f"records differ or runs were trained again, see {stem}.csv")


ENGINES_BENCHMARK = Benchmark(
    "bench-engines",
    "One sweep on every engine",
    time_engines,
    engines_summary,
    engines_sections,
    check_engines,
)

if __name__ == "__main__":
    ENGINES_BENCHMARK.main()
