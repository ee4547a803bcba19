"""`make verify`: which failures count."""

import pytest

from experiments.products.verify import OUTDATED, verify
from experiments.records.status import Status
from experiments.training.scheduler import FailedRunsError, RunOutcome


@pytest.mark.parametrize("lacks_data", [True, False])
def test_runs_that_failed_are_not_compared(monkeypatch, capsys, lacks_data):
    failure = RunOutcome(Status.FAILED, "no such file", lacks_data)

    def fail(runs, title):
        raise FailedRunsError("all runs failed", {run.folder: failure for run in runs})

    monkeypatch.setattr("experiments.products.verify.execute_all", fail)
    assert verify([]) == lacks_data  # missing data say nothing about the published results
    _, *rows = capsys.readouterr().out.splitlines()
    same = [row for row in rows if not row.endswith(OUTDATED)]
    assert len(same) > 10 and all(row.endswith(" not compared: no such file") for row in same)
