"""`make bench-engines` with a small sweep: launched once, killed, and launched twice."""

import os
import subprocess
import sys

import pandas as pd
import pytest

from benchmarks import engines
from benchmarks.engines import (
    ENGINES_BENCHMARK,
    SERIAL,
    Sweep,
    count_retrained,
    engines_summary,
)
from experiments.config.paths import ROOT


@pytest.mark.slow
def test_a_disturbed_sweep_writes_the_records_of_an_undisturbed_one(tmp_path):
    command = [sys.executable, "-m", "benchmarks.engines", "--quick", "--results", tmp_path]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    table = pd.read_csv(tmp_path / "benchmarks/bench-engines.csv")
    assert table["trial"].tolist() == [
        SERIAL,
        f"{SERIAL}, launcher killed",
        f"{SERIAL}, two launchers",
    ]
    assert table["runs"].eq(12).all() and table["differ"].eq(0).all() and table["again"].eq(0).all()
    assert table.set_index("trial")["faster"][SERIAL] == 1
    assert "these numbers mean nothing" in (tmp_path / "benchmarks/bench-engines.md").read_text()


def test_runs_that_are_trained_again_are_counted(tmp_path):
    overrides = ["experiment=mnist_lr", "seed=0,1", "scale=smoke", "tracking=off"]
    sweep = Sweep(tmp_path, overrides)
    line = "smoke scale (scale=paper for the paper's size), 40 steps: runs/seed={}\nfinished\n"
    sweep.log.write_text(line.format(0) + line.format(1))
    assert count_retrained(sweep) == 0
    sweep.log.write_text(line.format(0) + line.format(1) + line.format(0))
    assert count_retrained(sweep) == 1


def test_submitit_has_no_count_of_trainings(tmp_path):
    """Its jobs have logs of their own."""
    sweep = Sweep(tmp_path, ["experiment=mnist_lr", "engine=submitit_local"])
    sweep.log.touch()
    again = pd.Series([0, count_retrained(sweep)], dtype=object)  # as rows of several types have it
    rows = pd.DataFrame({"trial": [SERIAL, "submitit_local"], "again": again})
    rows = rows.assign(seconds=1.0, runs=12, faster=1.0, differ=0)
    assert engines_summary(rows)["trained again"].tolist() == [0, "–"]
    engines.check_engines(rows, tmp_path, quick=False)


def test_a_failed_sweep_stops_the_benchmark_with_its_message(tmp_path):
    sweep = Sweep(tmp_path, ["experiment=mnist_lrr", "seed=0,1", "tracking=off"])
    with pytest.raises(OSError, match="experiment=mnist_lrr is unknown"):
        sweep.wait_for(sweep.start())


def test_a_record_that_differs_fails_the_benchmark(tmp_path, monkeypatch):
    rows = pd.DataFrame({"trial": [SERIAL], "seconds": 1.0, "again": 0, "runs": 12, "faster": 1.0})
    monkeypatch.setattr(engines, "time_round", lambda *_, **__: rows.assign(differ=1))
    with pytest.raises(OSError, match="records differ"):
        ENGINES_BENCHMARK.run(tmp_path, quick=True)
    assert engines_summary(rows.assign(differ=1))["records that differ"].tolist() == [1]
