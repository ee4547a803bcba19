"""What a figure or a sweep says of its time before it trains."""

import json

import pytest

from experiments.config import gpus
from experiments.config.compose import compose
from experiments.records.estimate import Estimate
from experiments.records.record import INFO
from experiments.records.run import Run
from experiments.training import forecast


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Return two seeds of a setting."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))

    def runs(*words):
        words = [f"results={tmp_path / 'results'}", *words]
        return [Run(compose([*words, f"seed={seed}"])) for seed in range(2)]

    return runs


def lines_for(monkeypatch, runs, seconds, **about):
    found = Estimate(seconds, at_once=2, source="published runs", **about)
    monkeypatch.setattr(forecast, "estimate", lambda *_: found)
    return forecast.forecast_lines(runs, 2)


def test_the_time_its_source_and_the_files_are_reported(runs, monkeypatch):
    (line,) = lines_for(monkeypatch, runs("experiment=mnist_mlp"), 90)
    assert line == (
        "about 1.5 min, 2 at a time, estimated from published runs; "
        "each run writes metrics.csv and run.json to results/runs"
    )


def test_a_busy_machine_is_reported(runs, monkeypatch):
    many = runs("experiment=mnist_mlp")
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 0.0, 0.0))
    (line,) = lines_for(monkeypatch, many, 90)
    assert " (longer while the machine is busy: load 1000.0); " in line


def test_an_unknown_time_is_reported(runs):
    (line,) = forecast.forecast_lines(runs("experiment=wgan_gp", "scale=smoke"), None)
    assert line.startswith(
        "time unknown, no finished run is similar (make plan counts operations); "
    )
    assert forecast.forecast_lines([], None) == []


def test_more_than_ten_minutes_are_reported_with_ways_to_make_it_shorter(runs, monkeypatch):
    many = runs("experiment=resnet_cifar10", "scale=laptop")
    known = {run.entry for run in many[:2]}
    monkeypatch.setattr(forecast, "published_entries", lambda *of: known)
    assert len(lines_for(monkeypatch, many, 600)) == 1
    _, line = lines_for(monkeypatch, many, 601)
    assert line.startswith("to make it shorter: scale=smoke (with make: SCALE=smoke)")
    assert "records=all, which uses 2 published runs" in line and "fewer seeds" in line
    _, line = lines_for(monkeypatch, runs("experiment=resnet_cifar10", "scale=paper"), 601)
    assert "scale=laptop" in line and "records=all" not in line


@pytest.mark.parametrize(
    ("words", "cores", "gpus_found", "advised"),
    [
        (["threads=1"], 2, 0, True),
        (["threads=1"], 1, 0, False),
        (["threads=null"], 2, 0, False),  # a run uses all cores
        (["threads=1"], 2, 1, False),
        (["threads=1", "device=cpu"], 2, 1, True),
    ],
)
def test_joblib_is_advised_if_a_sweep_leaves_cores_idle(
    runs, monkeypatch, words, cores, gpus_found, advised
):
    monkeypatch.setattr(gpus, "cores", lambda: cores)
    monkeypatch.setattr(gpus, "count_gpus", lambda: gpus_found)
    many = runs("experiment=resnet_cifar10", "scale=laptop", *words)
    in_turn, as_a_figure = Estimate(601, at_once=1), Estimate(601, at_once=cores)
    assert ("engine=joblib" in forecast.shorter(many, in_turn)) == advised
    assert "engine=joblib" not in forecast.shorter(many, as_a_figure)


def test_runs_that_were_finished_in_this_process_count(runs, monkeypatch):
    (first, second) = runs("experiment=wgan_gp", "scale=smoke")
    assert forecast.forecast_lines([first], 1)[0].startswith("time unknown")
    config = first.config.model_dump(mode="json", exclude={"results", "published"})
    info = {"status": "finished", "seconds": 90, "machine": {}, "config": config, "step": 1}
    first.folder.mkdir(parents=True)
    (first.folder / INFO).write_text(json.dumps(info))
    assert forecast.forecast_lines([second], 1)[0].startswith("about 1.5 min, 1 at a time")


LION = ("experiment=counterexample_stochastic", "optimizer=lion", "optimizer.lr=0.001")


def test_an_optimizer_that_was_never_timed_is_measured_once_for_all_seeds(runs):
    timed, *_ = runs("experiment=counterexample_stochastic", "optimizer=adam")
    with_data = runs("experiment=mnist_mlp", "optimizer=lion", "optimizer.lr=0.001")
    smoke = runs(*LION, "scale=smoke")
    assert forecast.untimed([timed, *with_data, *smoke]) == []
    lions = runs(*LION)
    assert forecast.untimed([timed, *lions]) == lions[:1]


def test_slow_steps_are_reported_with_their_reason(runs):
    time, line, *_ = forecast.forecast_lines(runs(*LION, "steps=100000000"), 1)
    assert time.startswith("about ")
    assert line.startswith("counterexample_stochastic with lion takes ")
    assert line.endswith("(measured): it has no filter form, so its steps are taken one by one")


def test_a_run_that_cannot_be_measured_is_of_unknown_length(runs):

    broken = runs(*LION, "+optimizer.nonsense=1")
    assert forecast.measure_paces(broken[:1]) == {}
