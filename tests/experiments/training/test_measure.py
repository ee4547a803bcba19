"""The loop of measurements, and measurements as runs."""

import os
import signal
from itertools import count

import pytest
import torch

from experiments.config.errors import ConfigError
from experiments.task import Measurement
from experiments.training import signals
from experiments.training.execute import execute
from experiments.training.measure import measure
from tests.experiments.killing import run_of


class Squares(Measurement):
    """Rows n, n²; all of them up to `last`, or without end."""

    def __init__(self, last=None, bad=None, interrupted=None):
        self.last, self.bad, self.interrupted = last, bad, interrupted

    def rows(self, optimizer):
        for n in count(1) if self.last is None else range(1, self.last + 1):
            if n == self.interrupted:
                os.kill(os.getpid(), signal.SIGTERM)
            yield {"n": n, "square": torch.nan if n == self.bad else n**2}


class Rows(list):
    """A record that keeps what is logged."""

    def log(self, step, metrics):
        assert metrics["n"] == step
        self.append(step)


def measured(measurement, steps, log_every=1):
    rows = Rows()
    return measure(measurement, None, rows, steps=steps, log_every=log_every), rows


@pytest.fixture
def stop_request(monkeypatch):
    """Forget the signal after the test."""
    monkeypatch.setattr(signals.stop_request, "received", None)


def test_endless_rows_end_after_the_given_steps():
    assert measured(Squares(), steps=3) == ("finished", [1, 2, 3])


@pytest.mark.parametrize("steps", [5, 1_000_000, None])
def test_all_rows_are_recorded_if_there_are_fewer(steps):
    assert measured(Squares(last=5), steps) == ("finished", [1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("steps", "log_every", "logged"), [(6, 3, [3, 6]), (7, 3, [3, 6, 7]), (2, 5, [2])]
)
def test_the_last_row_is_always_recorded_and_only_once(steps, log_every, logged):
    assert measured(Squares(), steps, log_every) == ("finished", logged)


@pytest.mark.parametrize("steps", [100, None])
@pytest.mark.parametrize(("last", "logged"), [(6, [3, 6]), (7, [3, 6, 7]), (2, [2]), (0, [])])
def test_the_last_row_is_recorded_if_the_rows_end_early(steps, last, logged):
    assert measured(Squares(last=last), steps, log_every=3) == ("finished", logged)
    if last:
        assert measured(Squares(last=last, bad=last), steps, log_every=3) == ("diverged", logged)


def test_a_row_with_nan_ends_the_run_and_is_recorded():
    assert measured(Squares(bad=3), steps=5) == ("diverged", [1, 2, 3])
    assert measured(Squares(bad=5), steps=5)[0] == "diverged"


def test_a_signal_ends_the_run_after_the_row(stop_request):
    assert measured(Squares(interrupted=3), steps=5) == ("interrupted", [1, 2, 3])


def test_a_signal_during_the_last_row_changes_nothing(stop_request):
    assert measured(Squares(interrupted=5), steps=5) == ("finished", [1, 2, 3, 4, 5])


# As runs


def test_a_failed_measurement_starts_again(tmp_path, monkeypatch):
    whole, broken = (run_of(tmp_path / name, "lemma_2", optimizer="adam") for name in "ab")
    assert execute(whole) == "finished"
    with monkeypatch.context() as patch:
        patch.setattr("experiments.tasks.lemmas.Lemma2.check", None)
        with pytest.raises(TypeError):
            execute(broken)
    assert broken.status == "failed"
    assert execute(broken) == "finished"
    assert not list(broken.folder.glob("checkpoint*"))
    contents = [(run.folder / "metrics.csv").read_bytes() for run in (whole, broken)]
    assert contents[0] == contents[1] and contents[0].count(b"C,") == 20


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["experiment=lemma_2", "optimizer=adashift", "optimizer.lr=1"], "use optimizer=adam"),
        (["experiment=final_theta_sequential", "optimizer=sgd", "optimizer.lr=1"], "SGD has none"),
        (
            ["+schedule={_target_:experiments.schedules.linear,_partial_:true}"],
            "schedule is set, but lemma_2 trains nothing: remove it",
        ),
        (
            ["task._target_=argparse.Namespace"],
            "task._target_=argparse.Namespace builds a Namespace; expected a Task or a Measurement",
        ),
    ],
)
def test_an_invalid_measurement_is_reported_before_a_file_is_written(tmp_path, words, complaint):
    run = run_of(tmp_path, "lemma_2", *words, optimizer="adam")
    with pytest.raises(ConfigError, match=complaint):
        execute(run)
    assert not list(tmp_path.rglob("run.json"))
