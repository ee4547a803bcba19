"""What a single run prints when it ends."""

import re

import pandas as pd
import pytest

from experiments.config.compose import compose
from experiments.records.metrics import best_row, direction, last_value, shown_names
from experiments.records.record import Record
from experiments.records.run import Run
from experiments.records.status import Status
from experiments.training.execute import execute
from experiments.training.run_summary import run_summary
from tests.experiments.command_line import run_py
from tests.experiments.killing import run_of

ROWS = {
    10: {"validation_accuracy": 0.5, "validation_loss": 2.0, "test_accuracy": 0.4},
    20: {"validation_accuracy": 0.75, "validation_loss": 1.0, "test_accuracy": 0.7},
    30: {"validation_accuracy": 0.625, "validation_loss": 1.5, "test_accuracy": 0.6},
}


def record(run, status, rows=ROWS):
    with Record(run.folder, run.config) as record:
        for step, row in rows.items():
            record.log(step, row)
        record.status = status
    return run_summary(run).splitlines()


def test_last_and_best_values(tmp_path):
    run = run_of(tmp_path, "mnist_lr")
    lines = record(run, Status.FINISHED)
    assert re.fullmatch(r"mnist_lr adashift seed=0: finished, 30 steps in .* steps/s\)", lines[0])
    assert lines[2:6] == [
        "  metric                last  best  at step",
        "  validation_accuracy  0.625  0.75       20",
        "  validation_loss        1.5     1       20",
        "  test_accuracy          0.6",  # no choice by the test images
    ]
    assert lines[-2:] == [
        f"record         {run.folder}",
        f"curves         python -m experiments show {run.folder}",
    ]


@pytest.mark.parametrize("status", [Status.DIVERGED, Status.INTERRUPTED])
def test_a_run_that_did_not_finish_shows_its_last_values(tmp_path, status):
    rows = ROWS | {40: {"validation_accuracy": 0.1, "validation_loss": float("nan")}}
    text = "\n".join(record(run_of(tmp_path, "mnist_lr"), status, rows))
    assert f": {status}, " in text and re.search(r"validation_accuracy +0\.1 +0\.75 +20", text)
    assert ("last record at step 40" in text) == (status == Status.INTERRUPTED)


def test_a_run_that_failed_before_its_first_record(tmp_path):
    run = run_of(tmp_path, "mnist_lr")
    Record(run.folder, run.config).note_failure("out of memory")
    assert run_summary(run).splitlines()[:3] == [
        "mnist_lr adashift seed=0: failed, nothing recorded", "", f"record         {run.folder}",
    ]  # fmt: skip


def test_a_measurement_has_ranges(tmp_path):
    run = run_of(tmp_path, "lemma_2", optimizer="adam")
    lines = record(run, Status.FINISHED, {1: {"v_error": 2.0}, 2: {"v_error": 1.0}})
    assert ": finished, 2 rows in " in lines[0]
    assert lines[2:4] == ["  metric   lowest  highest", "  v_error       1        2"]


def test_a_published_run(tmp_path):
    words = ["optimizer=adashift", "seed=10", "records=published", f"results={tmp_path}"]
    run = Run(compose(words))
    lines = run_summary(run).splitlines()
    assert ": finished, 10,000,000 steps in" in lines[0] and lines[-2].endswith(".csv.xz")
    assert lines[-1].endswith(" scale=paper seed=10 records=published")


def test_a_seed_that_is_not_published_is_shown_next_to_those_that_are(tmp_path):
    run = Run(compose(["optimizer=adashift", "seed=0", "tracking=off", f"results={tmp_path}"]))
    execute(run)
    published = [
        Run(compose(["optimizer=adashift", f"seed={s}", "records=published"]))
        for s in range(10, 40)
    ]
    ends = pd.Series([r.metrics()["theta"].iloc[-1] for r in published])
    expected = f"published      theta {ends.mean():.4g} ± {ends.std():.2g} (30 other seeds)"
    assert expected in run_summary(run).splitlines()


def test_a_finished_run_prints_the_same_summary_again(tmp_path, capsys):
    words = ["seed=10", "tracking=off", f"results={tmp_path}"]
    assert run_py(*words) is None
    first = capsys.readouterr().out
    assert run_py(*words) is None
    again = capsys.readouterr().out.splitlines()
    assert again[0].startswith("already finished (use force=true")
    assert again[1:] == first.splitlines()[-len(again) + 1 :]
    assert "published run  identical" in again


# Metrics


def test_the_main_metric_is_first_and_patterns_are_last():
    config = compose(["experiment=mnist_correlation", "scale=smoke"])
    names = ["classifier/loss", "temporal/n=1", "temporal/largest", "spatial/n=1"]
    assert shown_names(config, names) == [
        "temporal/largest", "classifier/loss", "temporal/n=1", "spatial/n=1",
    ]  # fmt: skip
    undeclared = config.model_copy(update={"metrics": []})
    assert shown_names(undeclared, names) == names


def test_the_best_value_is_finite():
    table = pd.DataFrame({"step": [1, 2, 3], "x": [1.0, float("inf"), 0.5], "y": [1.0, None, None]})
    assert best_row(table, "x", "highest") == (1, 1.0)
    assert best_row(table, "x", "lowest") == (3, 0.5)
    assert last_value(table, "y") == 1.0
    config = compose(["experiment=mnist_correlation", "scale=smoke"])
    assert direction(config, "temporal/largest") is None
    assert direction(config, "test_loss") == "lowest" and direction(config, "test_accuracy") is None
