"""A small sweep in peace, killed and started twice, as `make bench-engines` does it."""

import os
import subprocess
import sys

import pandas as pd
import pytest

from benchmarks import engines
from benchmarks.engines import SERIAL, Sweep, readable, trained_again
from experiments.config.paths import ROOT


@pytest.mark.slow
def test_a_disturbed_sweep_gives_the_records_of_an_undisturbed_one(tmp_path):
    command = [sys.executable, "-m", "benchmarks.engines", "--quick", "--results", tmp_path]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    table = pd.read_csv(tmp_path / "benchmarks/bench-engines.csv")
    assert table["way"].tolist() == [
        SERIAL,
        f"{SERIAL}, launcher killed",
        f"{SERIAL}, two launchers",
    ]
    assert table["runs"].eq(12).all() and table["differ"].eq(0).all() and table["again"].eq(0).all()
    assert table.set_index("way")["faster"][SERIAL] == 1
    assert "these times mean nothing" in (tmp_path / "benchmarks/bench-engines.md").read_text()


def test_what_is_trained_twice_is_counted(tmp_path):
    words = ["experiment=mnist_lr", "seed=0,1", "scale=smoke", "tracking=off"]
    sweep = Sweep(tmp_path, words)
    line = "smoke scale (scale=paper for the paper's size), 40 steps: runs/seed={}\nfinished\n"
    sweep.log.write_text(line.format(0) + line.format(1))
    assert trained_again(sweep) == 0
    sweep.log.write_text(line.format(0) + line.format(1) + line.format(0))
    assert trained_again(sweep) == 1


def test_a_sweep_that_fails_ends_the_bench_with_what_it_said(tmp_path):
    sweep = Sweep(tmp_path, ["experiment=mnist_lrr", "seed=0,1", "tracking=off"])
    with pytest.raises(OSError, match="experiment=mnist_lrr is unknown"):
        sweep.wait_for(sweep.start())


def test_a_record_that_differs_fails_the_bench(tmp_path, monkeypatch):
    rows = pd.DataFrame({"way": [SERIAL], "seconds": 1.0, "again": 0, "runs": 12, "faster": 1.0})
    monkeypatch.setattr(engines, "go_round", lambda *_, **__: rows.assign(differ=1))
    with pytest.raises(OSError, match="records differ"):
        engines.bench(tmp_path, quick=True)
    assert readable(rows.assign(differ=1))["records that differ"].tolist() == [1]
