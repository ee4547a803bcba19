"""A few of the kills of `make torture`, in processes of their own."""

import os
import subprocess
import sys

import pandas as pd
import pytest

from benchmarks.kill_and_resume import MOMENTS, PROBLEMS, QUICK, summary
from experiments.config.paths import ROOT


@pytest.mark.slow
def test_killed_runs_are_continued_to_the_same_record(tmp_path):
    command = [sys.executable, "-m", "benchmarks.kill_and_resume", "--quick", "--results", tmp_path]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    table = pd.read_csv(tmp_path / "benchmarks/torture.csv")
    assert len(table) == QUICK and table["same"].all()
    assert set(table["experiment"]) <= set(PROBLEMS) and set(table["moment"]) <= set(MOMENTS)
    page = (tmp_path / "benchmarks/torture.md").read_text()
    assert "found torn and passed over: 0" in page and "A few kills, for the tests" in page


def test_a_record_that_differs_is_counted_once():
    kills = pd.DataFrame(
        {
            "experiment": ["a", "a", "a", "b"],
            "run": [1, 1, 2, 3],
            "moment": ["start", "training", "end", "training"],
            "same": [False, False, True, True],
        }
    )
    assert summary(kills)["records that differ"].tolist() == [1, 0, 1]
    assert summary(kills)["kills"].tolist() == [3, 1, 4]
    assert summary(kills)["kills: training"].tolist() == [1, 1, 2]
