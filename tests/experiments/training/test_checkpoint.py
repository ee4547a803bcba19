"""What a training leaves when it is killed, and how it goes on."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from adashift import AdaShift
from benchmarks.kill_and_resume import record_of
from experiments.config.errors import ConfigError
from experiments.config.paths import ROOT
from experiments.records.files import is_locked, locked
from experiments.records.record import read_info
from experiments.training import signals
from experiments.training.checkpoint import NAME, Checkpoint
from experiments.training.execute import checkpoint_of, execute, no_tags
from experiments.training.pool import one_by_one
from tests.experiments.killing import Killed, die_after, run_of

CPU = torch.device("cpu")
EXPERIMENTS = {
    "mnist_lr": [],
    "mnist_correlation": ["task.hidden=[8,8]"],
    "mnist_net_update": ["task.hidden=[8,8]"],
    "resnet_cifar10": [],
    "densenet_cifar10": ["model.dropout=0.2"],
    "wgan_critic": ["task.objective={_target_:experiments.tasks.gan.MaxGP,weight:0.1}"],
    "wgan_gp": [],
    "nmt": ["steps=20"],
    "ill_conditioned_linear": ["task.sampled=100", "task.batch=10"],
    "counterexample_stochastic": [],
}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_killed_run_goes_on_to_the_same_record(experiment, tmp_path, monkeypatch):
    whole = run_of(tmp_path / "whole", experiment, *EXPERIMENTS[experiment])
    assert execute(whole) == "finished"
    run = run_of(tmp_path / "killed", experiment, *EXPERIMENTS[experiment], "checkpoint_every=0")
    assert run.folder.name == whole.folder.name
    for saves in (2, 4):
        with monkeypatch.context() as patched, pytest.raises(Killed):
            die_after(patched, saves)
            execute(run)
            raise Killed  # one that keeps no checkpoints
    torch.manual_seed(99)  # another process has other random numbers
    assert execute(run) == "finished"
    assert record_of(run) == record_of(whole)


def test_a_run_that_goes_on_does_not_start_again(tmp_path, monkeypatch):
    run = run_of(tmp_path, "mnist_lr", "checkpoint_every=0", "steps=30")
    with monkeypatch.context() as patched, pytest.raises(Killed):
        die_after(patched, 19)
        execute(run)
    taken = []
    step = AdaShift.step
    monkeypatch.setattr(AdaShift, "step", lambda self, *a: taken.append(1) or step(self, *a))
    assert execute(run) == "finished"
    assert len(taken) == 10
    assert not (run.folder / NAME).exists()


def test_time_is_that_of_all_processes(tmp_path, monkeypatch):
    run = run_of(tmp_path, "mnist_lr", "checkpoint_every=0")
    with monkeypatch.context() as patched, pytest.raises(Killed):
        die_after(patched, 2)
        execute(run)
    state = checkpoint_of(run, CPU).load()
    state["record"]["seconds"] = 1000.0
    checkpoint_of(run, CPU).save(state)
    monkeypatch.setattr(time, "time", lambda: 0.0)  # the clock is set back
    assert execute(run) == "finished"
    assert 1000 < read_info(run.folder)["seconds"] < 1100


def test_force_starts_again(tmp_path, monkeypatch):
    run = run_of(tmp_path, "mnist_lr", "checkpoint_every=0")
    with monkeypatch.context() as patched, pytest.raises(Killed):
        die_after(patched, 2)
        execute(run)
    checkpoint_of(run, CPU).save({"not": "a state"})
    with pytest.raises(ConfigError, match=r"does not fit \(KeyError: 'done'\): force=true starts"):
        execute(run)
    assert execute(run_of(tmp_path, "mnist_lr", "force=true")) == "finished"


# Files that do not fit


@pytest.fixture
def checkpoint(tmp_path):
    kept = Checkpoint(tmp_path, "one", every=60)
    kept.save({"x": torch.arange(5.0), "name": "θ"})
    return kept


def test_a_state_comes_back(checkpoint):
    state = checkpoint.load()
    assert state["x"].tolist() == [0, 1, 2, 3, 4] and state["name"] == "θ"
    assert not list(checkpoint.path.parent.glob(".*"))  # no draft is left


def test_a_state_is_due_after_its_time(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    kept = Checkpoint(tmp_path, "one", every=60)
    assert not kept.due
    now[0] += 60
    assert kept.due
    kept.save({})
    assert not kept.due


def relabel(path, **changes):
    line, _, content = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps(json.loads(line) | changes).encode() + b"\n" + content)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-7]), "cut short or damaged"),
        (lambda p: p.write_bytes(p.read_bytes()[:20]), "no checkpoint of this project"),
        (lambda p: p.write_bytes(b""), "no checkpoint of this project"),
        (lambda p: p.write_bytes(p.read_bytes().replace(b"\x00\x00", b"\x00\x01", 1)), "damaged"),
        (lambda p: relabel(p, of="two"), "of another run, two"),
        (lambda p: relabel(p, format="AdaShift checkpoint 0"), "another version"),
        (lambda p: torch.save({"x": 1}, p), "no checkpoint of this project"),
    ],
)
def test_what_does_not_fit_is_passed_over_with_a_reason(checkpoint, spoil, reason, capsys):
    spoil(checkpoint.path)
    assert checkpoint.load() is None
    line = capsys.readouterr().err
    assert reason in line and line.count("\n") == 1 and str(checkpoint.path) in line


def test_a_checkpoint_cannot_run_code(checkpoint, capsys):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(checkpoint.path.parent / "evil"),)

    checkpoint.save({"x": Evil()})
    checkpoint.before.unlink()
    assert checkpoint.load() is None
    assert "could do harm" in capsys.readouterr().err
    assert not (checkpoint.path.parent / "evil").exists()


def test_the_one_before_is_used_where_the_newest_is_spoilt(checkpoint, capsys):
    checkpoint.save({"x": 2})
    checkpoint.path.write_bytes(checkpoint.path.read_bytes()[:-7])
    assert checkpoint.load()["name"] == "θ"
    assert "cut short" in capsys.readouterr().err
    checkpoint.remove()
    assert not list(checkpoint.path.parent.iterdir())


def test_what_a_killed_process_left_is_removed(tmp_path):
    whole, run = run_of(tmp_path / "whole", "mnist_lr"), run_of(tmp_path / "killed", "mnist_lr")
    execute(whole)
    run.folder.mkdir(parents=True)
    (run.folder / ".checkpoint.pt.4321").write_bytes(b"half of it")
    execute(run)
    checkpoint_of(run, CPU).save({})  # as if it had been killed just before this is removed
    execute(run)
    assert record_of(run) == record_of(whole)


# Two processes


def test_a_lock_is_one_process_at_a_time(tmp_path):
    assert not is_locked(tmp_path)
    with locked(tmp_path) as mine:
        assert mine and is_locked(tmp_path)
        with locked(tmp_path) as again:
            assert not again
    assert not is_locked(tmp_path)


def test_a_run_that_is_trained_elsewhere_is_busy(tmp_path):
    run = run_of(tmp_path, "mnist_lr")
    with locked(run.folder):
        assert execute(run, wait=False) == "busy"
    assert execute(run, wait=False) == "finished"


def test_a_run_whose_process_is_gone_was_killed(tmp_path, monkeypatch):
    run = run_of(tmp_path, "mnist_lr", "checkpoint_every=0")
    with monkeypatch.context() as patched, pytest.raises(Killed):
        die_after(patched, 1)
        patched.setattr("experiments.records.record.Record.__exit__", lambda *_: None)
        execute(run)
    assert run.status == "killed"
    with locked(run.folder):
        assert run.status == "running"


# Signals


def start(tmp_path, *words):
    command = [sys.executable, "run.py", "experiment=mnist_lr", "optimizer=adashift"]
    command += ["scale=smoke", "tracking=off", f"results={tmp_path}", *words]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE)
    folder = None
    for _ in range(1200):
        time.sleep(0.05)
        folder = next(tmp_path.glob("runs/*/*/*/checkpoint.pt"), None)
        if folder or process.poll() is not None:
            break
    assert folder, process.communicate()
    return process


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_a_run_so_that_it_can_go_on(number, tmp_path):
    words = ["steps=3000", "log_every=500"]
    process = start(tmp_path / "cut", *words, "checkpoint_every=0")
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    run = run_of(tmp_path / "cut", "mnist_lr", *words)
    if number == signal.SIGKILL:
        assert process.returncode == -9 and run.status == "killed"
    else:
        assert process.returncode == 128 + number and run.status == "interrupted"
        assert "stopping after this step" in error and "the same command goes on" in error
        assert "Traceback" not in error
    before = checkpoint_of(run, CPU).load()["done"]
    assert 0 < before < 3000
    whole = run_of(tmp_path / "whole", "mnist_lr", *words)
    assert execute(run) == execute(whole) == "finished"
    assert record_of(run) == record_of(whole)


def test_a_second_ctrl_c_leaves_at_once(monkeypatch):
    asked = signals.Asked()
    asked(signal.SIGINT, None)
    assert asked.by == signal.SIGINT
    asked(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        asked(signal.SIGINT, None)


def test_after_a_signal_no_other_run_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(signals.ASKED, "by", signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        execute(run_of(tmp_path, "mnist_lr"))
    assert not any(tmp_path.iterdir())


def test_in_a_team_the_first_process_says_when():
    asked = signals.Asked()
    asked.follows = True
    asked(signal.SIGTERM, None)
    assert asked.by is None


def test_the_last_runs_of_a_figure_end_with_it(tmp_path, monkeypatch):
    """Those that are trained one by one, after a worker was killed."""
    run = run_of(tmp_path, "mnist_lr", "steps=1000000", "checkpoint_every=0")

    def interrupt():
        while not checkpoint_of(run, CPU).path.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(signals.ASKED, "by", None)  # and again None after this test
    threading.Thread(target=interrupt, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), signals.answered_at_once():
        list(one_by_one([run], no_tags))
    assert time.monotonic() - start < 60 and run.status == "interrupted"


def test_a_worker_ends_with_its_parent(tmp_path):
    script = f"""
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from experiments.training.signals import end_with_parent

def work():
    Path({str(tmp_path / "worker")!r}).write_text(str(os.getpid()))
    time.sleep(100)

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=end_with_parent)
    pool.submit(work).result()
"""
    (tmp_path / "parent.py").write_text(script)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], env=env)
    while not (tmp_path / "worker").exists() or not (tmp_path / "worker").read_text():
        assert parent.poll() is None
        time.sleep(0.05)
    worker = int((tmp_path / "worker").read_text())
    parent.kill()
    parent.wait()
    for _ in range(200):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker is still there")
