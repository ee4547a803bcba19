"""Records: metrics.csv is exact, run.json says how a run ended."""

from pathlib import Path

import pytest

from experiments.config.compose import compose
from experiments.records.record import Record, read_info, read_metrics
from experiments.records.run import Run
from experiments.records.status import Status
from experiments.training.execute import execute

PAIR = ["experiment=counterexample_stochastic", "optimizer=adam", "scale=smoke"]


def request(tmp_path: Path, *overrides: str) -> Run:
    return Run(compose([*PAIR, f"results={tmp_path}", "tracking=off", *overrides]))


def test_metrics_are_read_bit_identical(tmp_path):
    values = [0.1 + 0.2, 1 / 3, -1e-300, 2.0**53 + 2]
    with Record(tmp_path, request(tmp_path).config) as record:
        for step, value in enumerate(values, 1):
            record.log(step, {"x": value, "y": -value} if step % 2 else {"x": value})
        record.status = Status.FINISHED
    table = read_metrics(tmp_path)
    assert table["x"].tolist() == values
    assert table["y"].dropna().tolist() == [-values[0], -values[2]]


def test_run_json_has_the_config_and_the_status(tmp_path):
    run = request(tmp_path, "seed=4")
    assert run.status == "missing"
    assert execute(run) == "finished"
    info = run.info
    assert info["status"] == "finished" and info["error"] is None
    assert info["config"]["seed"] == 4 and info["config"]["task"]["problem"]["C"] == 101
    assert info["versions"]["torch"] and info["seconds"] > 0 and info["machine"]["cores"]
    assert "results" not in info["config"]


def test_an_error_is_recorded_and_raised(tmp_path):
    with pytest.raises(ZeroDivisionError), Record(tmp_path, request(tmp_path).config):
        _ = 1 / 0
    assert read_info(tmp_path)["status"] == "failed"
    assert "ZeroDivisionError" in read_info(tmp_path)["error"]


def test_an_interrupted_run_is_not_finished(tmp_path):
    with pytest.raises(KeyboardInterrupt), Record(tmp_path, request(tmp_path).config) as record:
        record.log(1, {"x": 1.0})
        raise KeyboardInterrupt
    assert read_info(tmp_path)["status"] == "interrupted"
    assert read_metrics(tmp_path)["x"].tolist() == [1.0]


def test_a_truncated_run_json_counts_as_missing(tmp_path):
    run = request(tmp_path)
    execute(run)
    text = (run.folder / "run.json").read_text()
    (run.folder / "run.json").write_text(text[: len(text) // 2])
    assert run.status == "missing" and not run.done


def test_a_finished_record_survives_an_interrupted_rerun(tmp_path):
    run = request(tmp_path)
    execute(run)
    before = {p.name: p.read_bytes() for p in run.folder.iterdir()}
    with pytest.raises(KeyboardInterrupt), Record(run.folder, run.config) as record:
        record.log(1, {"theta": 0.0})
        raise KeyboardInterrupt
    assert before == {p.name: p.read_bytes() for p in run.folder.iterdir()}


def test_the_same_command_writes_byte_identical_metrics(tmp_path):
    first, second = (request(tmp_path / name) for name in ("a", "b"))
    for run in (first, second):
        execute(run)
    assert (first.folder / "metrics.csv").read_bytes() == (
        second.folder / "metrics.csv"
    ).read_bytes()
    other = request(tmp_path / "a", "seed=1")
    execute(other)
    assert (first.folder / "metrics.csv").read_bytes() != (
        other.folder / "metrics.csv"
    ).read_bytes()


def test_a_finished_run_is_not_trained_again_unless_forced(tmp_path):
    run = request(tmp_path)
    execute(run)
    started = run.info["started"], (run.folder / "run.json").stat().st_mtime_ns
    lines = []
    execute(run, announce=lines.append)
    assert started == (run.info["started"], (run.folder / "run.json").stat().st_mtime_ns)
    assert "already finished" in lines[0]
    execute(request(tmp_path, "force=true"))
    assert (run.folder / "run.json").stat().st_mtime_ns != started[1]
