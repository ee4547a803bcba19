"""What a figure or a sweep says of its time before it trains."""

import pytest

from experiments.config.compose import compose
from experiments.records.estimate import Estimate
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
