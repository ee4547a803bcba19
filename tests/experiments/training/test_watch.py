"""The lines of a figure or a sweep: every run in progress, and the time left for all of them."""

import json
import math
import re
import signal
import subprocess
import sys
import time

import pytest

from experiments.config import gpus
from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.config.paths import ROOT
from experiments.progress import LogFile, Snapshot, Terminal
from experiments.records.files import locked
from experiments.records.record import PROGRESS
from experiments.records.run import Run
from experiments.records.status import Status
from experiments.training.execute import execute
from experiments.training.pool import execute_all
from experiments.training.watch import (
    RunProgress,
    Watch,
    labels,
    read_snapshot,
    seconds_left,
)
from tests.experiments.killing import run_of


def half(seconds=5.0, first=0):
    return Snapshot(done=50, total=100, first=first, seconds=seconds)


@pytest.mark.parametrize(
    ("elapsed", "trained", "running", "waiting", "workers", "expected"),
    [
        (5.0, 0, [half()], 0, 1, 5),
        (5.0, 0, [half()], 3, 1, 35),
        (15.0, 1, [half()], 0, 1, 5),
        (5.0, 0, [half(), half()], 2, 2, 15),  # two more runs of 10 s, at the same time
        (5.0, 0, [half(), half()], 1, 2, 15),  # one worker has nothing to do at the end
        (15.0, 2, [half(), half()], 0, 2, 5),
        (11.0, 2, [], 2, 2, 11),  # both workers are preparing their next run
        (2.5, 0, [half(2.5, first=25)], 0, 1, 5),  # resumed at 25 %
        (5.0, 0, [Snapshot(9, None, 0, 5.0)], 3, 1, math.nan),
        (1.0, 0, [], 4, 1, math.nan),
    ],
)
def test_the_time_left(elapsed, trained, running, waiting, workers, expected):
    found = seconds_left(elapsed, trained, running, waiting, workers)
    assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_a_run_is_named_by_what_it_does_not_share():
    def run(*words):
        return Run(compose(["experiment=mnist_lr", "tracking=off", *words]))

    seeds = [run("optimizer=adam", f"seed={seed}") for seed in (0, 1)]
    assert list(labels(seeds).values()) == ["adam seed=0", "adam seed=1"]
    rates = [run("optimizer=adam", f"optimizer.lr={lr}") for lr in (0.01, 0.1)]
    others = [run("optimizer=sgd"), run("experiment=mnist_mlp", "optimizer=sgd")]
    assert list(labels([*rates, *others]).values()) == [
        "mnist_lr adam lr=0.01 seed=0",
        "mnist_lr adam lr=0.1 seed=0",
        "mnist_lr sgd seed=0",
        "mnist_mlp sgd seed=0",
    ]


def test_a_run_notes_how_far_it_is(tmp_path):
    run = run_of(tmp_path, "mnist_lr")
    with locked(run.folder), RunProgress(run).begin(100) as progress:
        progress.log({"validation_loss": 0.3, "validation_accuracy": 0.9, "classifier/loss": 0.2})
        progress.due = 0.0
        progress.advance(40)
        state = read_snapshot(run.folder)
        assert state is not None and (state.done, state.total, state.unit) == (40, 100, "step")
        assert list(state.values) == ["classifier/loss", "validation_accuracy"]
        (run.folder / PROGRESS).write_text("")  # half written
        assert read_snapshot(run.folder) is None
    assert (run.folder / PROGRESS).exists()  # it was not the last step
    progress.remove()
    assert not (run.folder / PROGRESS).exists()


def leave_progress(run, done=50):
    run.folder.mkdir(parents=True, exist_ok=True)
    state = {"done": done, "total": 100, "first": 0, "seconds": 5.0, "unit": "step"}
    (run.folder / PROGRESS).write_text(json.dumps(state | {"values": {"validation_accuracy": 0.9}}))


def test_the_file_of_a_killed_process_is_ignored(tmp_path):
    run = run_of(tmp_path, "mnist_lr")
    leave_progress(run)
    assert read_snapshot(run.folder) is None
    with locked(run.folder):
        assert read_snapshot(run.folder) is not None


def drawn(watch):
    watch.output, lines = Terminal(), []
    watch.output.draw = lines.extend
    watch.look()
    return lines


def test_a_terminal_has_a_line_for_all_runs_and_one_for_each_in_progress(tmp_path):
    runs = [run_of(tmp_path, "mnist_lr", f"seed={seed}") for seed in range(4)]
    watch = Watch(runs, "figure 2")
    assert drawn(watch) == ["figure 2: 0/4 runs  0%"]
    execute(runs[0])  # a launcher that has not returned it yet
    leave_progress(runs[1])
    with locked(runs[1].folder):
        whole, line = drawn(watch)
    assert re.fullmatch(r"figure 2: 1/4 runs  38%  left \d+ s|.*left \d\.\d s", whole)
    assert line == "  adashift seed=1   50%  validation_accuracy 0.9  10 steps/s"
    watch.note_end(runs[0], Status.FINISHED)  # is counted once
    watch.note_end(runs[2], Status.FAILED)
    assert drawn(watch)[0].startswith("figure 2: 2/4 runs, 1 failed  50%")


def test_a_log_file_has_a_line_when_a_run_begins_and_when_it_ends(tmp_path, capsys):
    run = run_of(tmp_path, "mnist_lr")
    watch = Watch([run], "figure 2")
    watch.output = LogFile()
    leave_progress(run)
    with locked(run.folder):
        watch.look()
        watch.look()
    execute(run)
    watch.look()
    begun, ended = capsys.readouterr().out.splitlines()
    assert begun == "figure 2: adashift seed=0 started"
    pattern = r"figure 2: adashift seed=0 finished \(1/1\)  validation_accuracy [\d.]+  [\d.]+ s"
    assert re.fullmatch(pattern, ended)


def runs_in_workers(folder, seeds, *words):
    """Runs that are long enough to be seen, of a scale that is trained by workers."""
    always = ["experiment=mnist_lr", "scale=paper", "tracking=off", f"results={folder}"]
    always += ["data._target_=experiments.data.mnist.generate_digits", "steps=1500"]
    return [Run(compose([*always, *words, f"seed={seed}"])) for seed in seeds]


@pytest.mark.slow
def test_several_workers_and_a_killed_one(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(gpus, "cores", lambda: 2)
    killed = runs_in_workers(tmp_path, [0], "optimizer._target_=tests.experiments.killing.Lethal")
    others = runs_in_workers(tmp_path, [1, 2])
    with pytest.raises(ConfigError, match="1 of 3 runs failed"):
        execute_all([*killed, *others], "figure 2")
    out = capfd.readouterr().out
    assert out.count("finished (") == 2 and "seed=0 killed (" in out
    assert "figure 2: 3 runs ended after" in out
    assert "\x1b" not in out and "\r" not in out
    assert not [path for run in others for path in run.folder.glob(PROGRESS)]


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_a_run_that_is_not_in_progress(tmp_path):
    words = ["experiment=mnist_lr", "optimizer=adam", "tracking=off", "steps=1000000"]
    command = [sys.executable, "run.py", *words, f"results={tmp_path}"]
    (run,) = [Run(compose(command[2:]))]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while read_snapshot(run.folder) is None and time.monotonic() < end:
        time.sleep(0.1)
    assert read_snapshot(run.folder) is not None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (run.folder / PROGRESS).exists() and read_snapshot(run.folder) is None
