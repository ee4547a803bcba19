"""Many runs on this machine: workers, failures, killed workers, missing data, a full disk."""

from dataclasses import replace

import pytest

from experiments.config import gpus
from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.data import mnist
from experiments.records.files import WriteError, locked
from experiments.records.record import KILLED
from experiments.records.run import Run
from experiments.records.status import Status
from experiments.training.execute import execute
from experiments.training.pool import execute_all, side_by_side
from experiments.training.scheduler import FailedRunsError


def runs(folder, *overrides, seeds=(0, 1, 2)):
    """Short runs on generated images, of a scale that is trained by workers."""
    always = ["experiment=mnist_lr", "scale=paper", "tracking=off", f"results={folder}"]
    always += ["data._target_=experiments.data.mnist.generate_digits", "steps=40", "log_every=2"]
    return [Run(compose([*always, *overrides, f"seed={seed}"])) for seed in seeds]


def test_workers_write_the_records_that_one_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "cores", lambda: 2)
    in_turn, together = runs(tmp_path / "a"), runs(tmp_path / "b")
    for run in in_turn:
        assert execute(run) == "finished"
    assert side_by_side(together) == 2
    execute_all(together, "three runs")
    for a, b in zip(in_turn, together, strict=True):
        assert b.done and a.folder != b.folder
        content = (a.folder / "metrics.csv").read_bytes()
        assert content == (b.folder / "metrics.csv").read_bytes() and len(content) > 500


@pytest.mark.parametrize(
    ("cores", "threads", "expected"),
    [(1, "1", 1), (2, "1", 2), (8, "1", 3), (8, "4", 2), (8, "5", 1), (8, "null", 1)],
)
def test_the_number_of_workers_depends_on_the_cores(
    tmp_path, monkeypatch, cores, threads, expected
):
    monkeypatch.setattr(gpus, "cores", lambda: cores)
    assert side_by_side(runs(tmp_path, f"threads={threads}")) == expected


@pytest.mark.parametrize(
    ("found", "words", "expected"),
    [(1, [], 4), (2, [], 6), (2, ["runs_per_gpu=1"], 2), (1, ["runs_per_gpu=3"], 3),
     (2, ["device=cuda:1", "runs_per_gpu=2"], 2), (1, ["device=cpu", "threads=32"], 2)],
)  # fmt: skip
def test_the_number_of_workers_depends_on_the_gpus(tmp_path, monkeypatch, found, words, expected):
    monkeypatch.setattr(gpus, "count_gpus", lambda: found)
    monkeypatch.setattr(gpus, "memory_of_a_gpu", lambda: 24.0)
    monkeypatch.setattr(gpus, "cores", lambda: 64)
    assert side_by_side(runs(tmp_path, *words, seeds=range(6))) == expected


def test_smoke_runs_need_no_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "cores", lambda: 2)
    assert side_by_side(runs(tmp_path, "scale=smoke")) == 1


@pytest.mark.parametrize("scale", ["smoke", "paper"])  # in this process, in workers
def test_failures_with_the_same_cause_are_reported_once(tmp_path, monkeypatch, capsys, scale):
    monkeypatch.setattr(gpus, "cores", lambda: 2)
    valid = runs(tmp_path, f"scale={scale}", seeds=[0])
    invalid = runs(tmp_path, f"scale={scale}", "optimizer.n=2", "optimizer.m=3", seeds=range(5))
    with pytest.raises(ConfigError, match=r"figure 1: 5 of 6 runs failed, see above"):
        execute_all([*invalid, *valid], "figure 1")
    assert [run.status for run in invalid] == [Status.FAILED] * 5 and valid[0].done
    cause, *commands, more = capsys.readouterr().err.splitlines()
    assert cause.startswith("failed: optimizer=adashift is invalid with these settings: ")
    assert commands == [f"    {run.command()}" for run in invalid[:3]]
    assert more == "    … and 2 more"


def test_a_run_that_kills_its_worker_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpus, "cores", lambda: 2)
    (lethal,) = runs(tmp_path, "optimizer._target_=tests.experiments.killing.Lethal", seeds=[0])
    others = runs(tmp_path, seeds=[1, 2, 3])
    with pytest.raises(ConfigError, match="1 of 4 runs failed"):
        execute_all([lethal, *others], "figure 1")
    assert lethal.status == Status.KILLED and all(run.done for run in others)
    assert capsys.readouterr().err == f"failed: {KILLED}\n    {lethal.command()}\n"


def test_missing_data_stop_only_the_runs_that_need_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mnist, "MNIST_FILES", replace(mnist.MNIST_FILES, sources=list))
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("ADASHIFT_DATA", str(tmp_path / "data"))
    mnist.load_mnist.cache_clear()
    target = "data._target_=experiments.data.mnist.load_mnist"
    needing = runs(tmp_path, "scale=smoke", target, seeds=[0, 1])
    (other,) = runs(tmp_path, "scale=smoke", seeds=[2])
    with pytest.raises(FailedRunsError, match="2 of 3 runs failed") as error:
        execute_all([*needing, other], "verify")
    assert other.done and [run.status for run in needing] == [Status.FAILED] * 2
    assert all(failure.lacks_data for failure in error.value.failures.values())
    download, line = capsys.readouterr().err.splitlines()  # mirrors are tried once
    assert "MNIST" in download
    assert line.startswith("failed: MNIST") and line.endswith("(runs affected: 2)")


def test_a_full_disk_stops_all_runs(tmp_path, monkeypatch):
    first, second = runs(tmp_path, "scale=smoke", seeds=[0, 1])

    def full(self, *_):
        raise WriteError("metrics.csv cannot be written (No space left on device)")

    monkeypatch.setattr("experiments.records.record.Record.log", full)
    with pytest.raises(WriteError, match="No space left"):
        execute_all([first, second], "figure 1")
    assert first.status == Status.FAILED and second.status == Status.MISSING


def test_a_run_that_another_process_trains_comes_last(tmp_path, monkeypatch, capsys):
    first, second = runs(tmp_path, "scale=smoke", seeds=[0, 1])
    elsewhere, ended = locked(first.folder), []
    elsewhere.__enter__()
    monkeypatch.setattr("experiments.training.pool.execute", noting(ended, elsewhere))
    execute_all([first, second], "figure 1")
    assert ended == [(0, Status.RUNNING), (1, Status.FINISHED), (0, Status.FINISHED)]


def noting(ended, elsewhere):
    """execute() that notes how each attempt ends; after seed 1 the other process is killed."""

    def execute_and_note(run, *about, **more):
        ended.append((run.config.seed, execute(run, *about, **more)))
        if run.config.seed == 1:
            elsewhere.__exit__(None, None, None)
        return ended[-1][1]

    return execute_and_note
