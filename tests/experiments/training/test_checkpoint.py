"""Checkpoints, locks and signals: a killed or interrupted training resumes with the same record."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch

from adashift import AdaShift
from benchmarks.kill_and_resume import record_of
from experiments.config.errors import ConfigError
from experiments.config.paths import ROOT
from experiments.records.files import is_locked, locked
from experiments.records.record import read_info
from experiments.records.status import Status
from experiments.training import signals
from experiments.training.checkpoint import NAME, Checkpoint
from experiments.training.execute import checkpoint_of, execute, no_tags
from experiments.training.pool import in_pool
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
def test_a_killed_run_resumes_to_the_same_record(experiment, tmp_path, monkeypatch):
    whole = run_of(tmp_path / "whole", experiment, *EXPERIMENTS[experiment])
    assert execute(whole) == "finished"
    run = run_of(tmp_path / "killed", experiment, *EXPERIMENTS[experiment], "checkpoint_every=0")
    assert run.folder.name == whole.folder.name
    for saves in (2, 4):
        with monkeypatch.context() as patched, pytest.raises(Killed):
            die_after(patched, saves)
            execute(run)
            raise Killed  # an experiment without checkpoints
    torch.manual_seed(99)  # another process has other random numbers
    assert execute(run) == "finished"
    assert record_of(run) == record_of(whole)


def test_a_run_that_resumes_does_not_repeat_steps(tmp_path, monkeypatch):
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


def test_seconds_include_those_before_resuming(tmp_path, monkeypatch):
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
    with pytest.raises(ConfigError, match=r"incompatible code \(KeyError: 'done'\): use force"):
        execute(run)
    assert execute(run_of(tmp_path, "mnist_lr", "force=true")) == "finished"


# Files that are invalid


@pytest.fixture
def checkpoint(tmp_path):
    kept = Checkpoint(tmp_path, "one", CPU, every=60)
    kept.save({"x": torch.arange(5.0), "name": "θ"})
    return kept


def test_a_state_is_loaded_as_saved(checkpoint):
    state = checkpoint.load()
    assert state["x"].tolist() == [0, 1, 2, 3, 4] and state["name"] == "θ"
    assert not list(checkpoint.path.parent.glob(".*"))  # no draft remains


def test_a_state_is_due_after_its_time(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    kept = Checkpoint(tmp_path, "one", CPU, every=60)
    assert not kept.due
    now[0] += 60
    assert kept.due
    kept.save({})
    assert not kept.due


def test_what_was_on_a_gpu_is_loaded_to_the_gpu_of_the_run(tmp_path, monkeypatch):
    """The meta device stands for the GPU of the run; the file says cuda:1, which does not exist."""
    on_gpu, on_cpu = torch.arange(5.0), torch.arange(3)
    places = {on_gpu.untyped_storage().data_ptr(): "cuda:1"}
    monkeypatch.setattr(
        "torch.serialization.location_tag", lambda kept: places.get(kept.data_ptr(), "cpu")
    )
    kept = Checkpoint(tmp_path, "one", torch.device("meta"), every=60)
    kept.save({"losses": on_gpu, "order": on_cpu})
    state = kept.load()
    assert state["losses"].device.type == "meta"
    assert state["order"].tolist() == [0, 1, 2]


def relabel(path, **changes):
    line, _, content = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps(json.loads(line) | changes).encode() + b"\n" + content)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-7]), "truncated or damaged"),
        (lambda p: p.write_bytes(p.read_bytes()[:20]), "not a checkpoint of this project"),
        (lambda p: p.write_bytes(b""), "not a checkpoint of this project"),
        (lambda p: p.write_bytes(p.read_bytes().replace(b"\x00\x00", b"\x00\x01", 1)), "damaged"),
        (lambda p: relabel(p, of="two"), "belongs to another run, two"),
        (lambda p: relabel(p, format="AdaShift checkpoint 0"), "another version"),
        (lambda p: torch.save({"x": 1}, p), "not a checkpoint of this project"),
    ],
)
def test_an_invalid_file_is_skipped_with_a_reason(checkpoint, spoil, reason, capsys):
    spoil(checkpoint.path)
    assert checkpoint.load() is None
    line = capsys.readouterr().err
    assert reason in line and line.count("\n") == 1 and str(checkpoint.path) in line


def test_a_checkpoint_cannot_execute_code(checkpoint, capsys):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(checkpoint.path.parent / "evil"),)

    checkpoint.save({"x": Evil()})
    checkpoint.before.unlink()
    assert checkpoint.load() is None
    assert "could execute code" in capsys.readouterr().err
    assert not (checkpoint.path.parent / "evil").exists()


def test_the_previous_checkpoint_is_used_if_the_newest_is_damaged(checkpoint, capsys):
    checkpoint.save({"x": 2})
    checkpoint.path.write_bytes(checkpoint.path.read_bytes()[:-7])
    assert checkpoint.load()["name"] == "θ"
    assert "truncated" in capsys.readouterr().err
    checkpoint.remove()
    assert not list(checkpoint.path.parent.iterdir())


def test_files_of_a_killed_process_are_removed(tmp_path):
    whole, run = run_of(tmp_path / "whole", "mnist_lr"), run_of(tmp_path / "killed", "mnist_lr")
    execute(whole)
    run.folder.mkdir(parents=True)
    (run.folder / ".checkpoint.pt.4321").write_bytes(b"incomplete")
    execute(run)
    checkpoint_of(run, CPU).save({})  # as if the process had been killed before it removed this
    execute(run)
    assert record_of(run) == record_of(whole)


# Locks


def test_a_lock_has_one_owner_at_a_time(tmp_path):
    assert not is_locked(tmp_path)
    with locked(tmp_path) as mine:
        assert mine and is_locked(tmp_path)
        with locked(tmp_path) as again:
            assert not again
    assert not is_locked(tmp_path)


def test_a_run_that_another_process_trains_is_running(tmp_path):
    run = run_of(tmp_path, "mnist_lr")
    with locked(run.folder):
        assert execute(run, wait=False) == Status.RUNNING
    assert execute(run, wait=False) == "finished"


def test_a_run_without_a_process_was_killed(tmp_path, monkeypatch):
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
def test_a_run_stopped_by_a_signal_resumes(number, tmp_path):
    words = ["steps=3000", "log_every=500"]
    process = start(tmp_path / "cut", *words, "checkpoint_every=0")
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    run = run_of(tmp_path / "cut", "mnist_lr", *words)
    if number == signal.SIGKILL:
        assert process.returncode == -9 and run.status == "killed"
    else:
        assert process.returncode == 128 + number and run.status == "interrupted"
        assert "stopping after this step" in error and "rerun the same command to resume" in error
        assert "Traceback" not in error
    before = checkpoint_of(run, CPU).load()["done"]
    assert 0 < before < 3000
    whole = run_of(tmp_path / "whole", "mnist_lr", *words)
    assert execute(run) == execute(whole) == "finished"
    assert record_of(run) == record_of(whole)


def test_a_second_ctrl_c_stops_at_once():
    request = signals.StopRequest()
    request(signal.SIGINT, None)
    assert request.received == signal.SIGINT
    request(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        request(signal.SIGINT, None)


def test_after_a_signal_no_other_run_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(signals.stop_request, "received", signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        execute(run_of(tmp_path, "mnist_lr"))
    assert not any(tmp_path.iterdir())


def test_a_follower_ignores_signals():
    request = signals.StopRequest()
    request.ignored = True
    request(signal.SIGTERM, None)
    assert request.received is None


def test_workers_stop_with_the_process_that_started_them(tmp_path, monkeypatch):
    run = run_of(tmp_path, "mnist_lr", "steps=1000000", "checkpoint_every=0")

    def interrupt():
        while not checkpoint_of(run, CPU).path.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(signals.stop_request, "received", None)  # and again None after this test
    threading.Thread(target=interrupt, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), signals.answered_at_once():
        list(in_pool(no_tags, 1, [run]))
    assert time.monotonic() - start < 60 and run.status == "interrupted"


def test_ctrl_c_ends_training_and_idle_workers(tmp_path):
    script = f"""
from pathlib import Path
from experiments.training.execute import no_tags
from experiments.training.pool import in_pool
from tests.experiments.killing import run_of
if __name__ == "__main__":
    words = [("steps=1000000", "checkpoint_every=0"), ("steps=2",)]
    runs = [run_of(Path({str(tmp_path)!r}), "mnist_lr", *w) for w in words]
    for run, _ in in_pool(no_tags, 2, runs):
        print(run.folder, flush=True)
"""
    (tmp_path / "script.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    run = run_of(tmp_path, "mnist_lr", "steps=1000000", "checkpoint_every=0")
    try:
        assert process.stdout.readline()  # one of the two workers is idle now
        wait_for(checkpoint_of(run, CPU).path)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=30)
    finally:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, signal.SIGKILL)
    assert run.status == "interrupted"


def wait_for(path, seconds=60):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.05)


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
    pytest.fail("the worker is still running")
