"""`make kill-and-resume` with a few kills, and its summary."""

import os
import subprocess
import sys

import pandas as pd
import pytest

from benchmarks.kill_and_resume import MOMENTS, PROBLEMS, QUICK_KILLS, kills_summary
from experiments.config.paths import ROOT


@pytest.mark.slow
def test_killed_runs_are_resumed_to_the_same_record(tmp_path):
    command = [sys.executable, "-m", "benchmarks.kill_and_resume", "--quick", "--results", tmp_path]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    table = pd.read_csv(tmp_path / "benchmarks/kill-and-resume.csv")
    assert len(table) == QUICK_KILLS and table["same"].all()
    assert set(table["experiment"]) <= set(PROBLEMS) and set(table["moment"]) <= set(MOMENTS)
    page = (tmp_path / "benchmarks/kill-and-resume.md").read_text()
    assert "checkpoints that were skipped: 0" in page and "these numbers mean nothing" in page


def test_a_record_that_differs_is_counted_once():
    kills = pd.DataFrame(
        {
            "experiment": ["a", "a", "a", "b"],
            "run": [1, 1, 2, 3],
            "moment": ["start", "training", "end", "training"],
            "same": [False, False, True, True],
        }
    )
    assert kills_summary(kills)["records that differ"].tolist() == [1, 0, 1]
    assert kills_summary(kills)["kills"].tolist() == [3, 1, 4]
    assert kills_summary(kills)["kills: training"].tolist() == [1, 1, 2]
