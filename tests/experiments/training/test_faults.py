"""Faults around a run: each is reported in one line, and no other run is affected."""

import errno
import hashlib
import os
import resource
import shutil
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from benchmarks.kill_and_resume import record_of
from experiments.data import files as data_files
from experiments.data import folder, mnist
from experiments.data.files import DataError
from experiments.products import figures
from experiments.products.figures import draw_figure
from experiments.products.specs import load_spec
from experiments.records import files
from experiments.records.files import WriteError
from experiments.records.record import read_info, read_metrics
from experiments.training import execute as execution
from experiments.training.execute import execute
from experiments.training.loop import Training
from tests.experiments.killing import Killed, die_after, run_of

CPU = torch.device("cpu")


@pytest.fixture
def earlier(tmp_path):
    """A finished run, whose files must not change."""
    run = run_of(tmp_path, "mnist_lr", "steps=4")
    execute(run)
    before = {path: path.read_bytes() for path in run.folder.iterdir()}
    yield run
    assert {path: path.read_bytes() for path in run.folder.iterdir()} == before


def one_line(error):
    message = str(error.value)
    assert "\n" not in message and len(message) > 40
    return message


# Truncated files


def test_a_truncated_checkpoint_costs_only_time(tmp_path, monkeypatch, capsys):
    whole = run_of(tmp_path / "whole", "mnist_lr")
    execute(whole)
    run = run_of(tmp_path / "torn", "mnist_lr", "checkpoint_every=0")
    with monkeypatch.context() as patched, pytest.raises(Killed):
        die_after(patched, 3)
        execute(run)
    for path in run.folder.glob("checkpoint*.pt"):
        path.write_bytes(path.read_bytes()[:-100])
    assert execute(run) == "finished"
    assert capsys.readouterr().err.count("skipping checkpoint") == 2
    assert record_of(run) == record_of(whole)


def test_truncated_metrics_are_written_again(tmp_path, monkeypatch):
    whole = run_of(tmp_path / "whole", "mnist_lr")
    execute(whole)
    run = run_of(tmp_path / "torn", "mnist_lr", "checkpoint_every=0")
    with monkeypatch.context() as patched, pytest.raises(Killed):
        die_after(patched, 6)
        execute(run)
    for name in ("metrics.csv", ".metrics.csv"):
        (run.folder / name).write_text("step,metric,value\n10,class")
    assert execute(run) == "finished"
    assert record_of(run) == record_of(whole)


def test_a_finished_record_that_was_truncated_is_an_error(tmp_path):
    run = run_of(tmp_path, "mnist_lr", "steps=4")
    execute(run)
    path, whole = run.folder / "metrics.csv", (run.folder / "metrics.csv").read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(OSError, match=r"checksum mismatch in .*metrics.csv: delete") as error:
        run.metrics()
    one_line(error)
    path.unlink()
    assert not run.done and execute(run) == "finished"
    assert path.read_bytes() == whole


# Data


@pytest.fixture
def own_data(tmp_path, monkeypatch):
    """Files in the place of MNIST, with checksums of their own and no source to download from."""
    raw = tmp_path / "data/MNIST/raw"
    raw.mkdir(parents=True)
    content = {name: 20 * name.encode() for name in mnist.MNIST_FILES.checksums}
    for name, data in content.items():
        (raw / name).write_bytes(data)
    sums = {name: f"md5:{hashlib.md5(data).hexdigest()}" for name, data in content.items()}
    monkeypatch.setattr(
        mnist, "MNIST_FILES", replace(mnist.MNIST_FILES, checksums=sums, sources=list)
    )
    monkeypatch.setenv("ADASHIFT_DATA", str(tmp_path / "data"))
    mnist.load_mnist.cache_clear()
    yield raw
    mnist.load_mnist.cache_clear()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda raw: (raw / "t10k-labels-idx1-ubyte").unlink(), "the download failed"),
        (lambda raw: shutil.rmtree(raw.parent), "the download failed"),
        (lambda raw: flip_a_bit(raw / "t10k-labels-idx1-ubyte"), "checksum mismatch"),
    ],
    ids=["missing file", "missing folder", "altered file"],
)
def test_missing_or_altered_data(earlier, own_data, tmp_path, spoil, words):
    run = run_of(tmp_path, "mnist_lr", "data._target_=experiments.data.mnist.load_mnist", "steps=5")
    spoil(own_data)
    with pytest.raises(DataError, match=words) as error:
        execute(run)
    assert "t10k-labels-idx1-ubyte" in one_line(error)
    assert not run.folder.exists()


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def test_an_archive_with_paths_outside_of_it(tmp_path):
    path = tmp_path / "pets.zip"
    for name in ("../evil.png", "train/cat/../../../evil.png", "/evil.png"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, b"!")
        with pytest.raises(DataError, match=r"path escapes the archive: '.*evil.png'") as error:
            folder.load_folder(CPU, str(path))
        one_line(error)
    assert not list(tmp_path.parent.rglob("evil.png"))


def test_a_zip_bomb(tmp_path):
    path = tmp_path / "pets.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(3):
            archive.writestr(f"train/cat/{number}.bmp", bytes(30_000_000))
    assert path.stat().st_size < 100_000
    with pytest.raises(DataError, match=r"bytes and unpacks to 90,000,000, more than 200") as error:
        folder.load_folder(CPU, str(path))
    one_line(error)


def test_an_endless_download(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "MAX_UNPACKED_BYTES", 1_500_000)
    with (
        Path("/dev/zero").open("rb") as endless,
        (tmp_path / "kept").open("wb") as file,
        pytest.raises(ValueError, match="more than 1,500,000 bytes"),
    ):
        data_files.copy(endless, file)


# The disk


def test_a_full_disk_while_a_checkpoint_is_written(earlier, tmp_path):
    """A limit on the size of files simulates a full disk."""
    run = run_of(tmp_path, "mnist_lr", "checkpoint_every=0")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(WriteError, match=r"checkpoint.pt cannot be written \(File") as error:
            execute(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    one_line(error)
    assert not list(run.folder.glob(".*.*.*")) and run.status == "failed"
    assert execute(run) == "finished"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_while_metrics_are_written(earlier, tmp_path):
    run = run_of(tmp_path, "mnist_lr")
    run.folder.mkdir(parents=True)
    (run.folder / ".metrics.csv").symlink_to("/dev/full")
    with pytest.raises(WriteError, match=r"metrics.csv cannot be written \(No space") as error:
        execute(run)
    one_line(error)
    assert run.status == "killed"
    (run.folder / ".metrics.csv").unlink()
    assert execute(run) == "finished"


def test_a_full_disk_while_a_finished_run_is_trained_again(tmp_path, monkeypatch):
    run = run_of(tmp_path, "mnist_lr", "steps=4")
    execute(run)
    before = record_of(run)

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(WriteError, match="No space left"):
        patched.setattr(os, "fsync", full)
        execute(run_of(tmp_path, "mnist_lr", "steps=4", "force=true"))
    assert run.done and (run.folder / "metrics.csv").read_bytes() == before["metrics.csv"]


def test_a_read_only_results_folder(earlier, tmp_path, monkeypatch):
    """Simulated, because root may write anywhere."""
    run, opened = run_of(tmp_path, "mnist_lr"), Path.open

    def refuse(self, mode="r", *rest, **more):
        if set(mode) & set("wax+"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        return opened(self, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(WriteError, match=r"cannot be written \(Read-only file system\)") as error:
        execute(run)
    assert str(run.folder) in one_line(error) and "results=" in str(error.value)
    assert execute(earlier) == "finished" and earlier.status == "finished"  # reading works
    assert len(earlier.metrics()) > 0


# Two writers, and the clock


def test_two_processes_train_a_run_once(tmp_path):
    whole, run = run_of(tmp_path / "whole", "mnist_lr"), run_of(tmp_path / "two", "mnist_lr")
    execute(whole)
    lines, ends = [], []
    threads = [
        threading.Thread(target=lambda: ends.append(execute(run, announce=lines.append)))
        for _ in range(2)
    ]
    with files.locked(run.folder):
        for thread in threads:
            thread.start()
        while sum("waiting for another process" in line for line in lines) < 2:
            time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert ends == ["finished"] * 2
    assert sum("another process has trained it" in line for line in lines) == 1
    assert record_of(run) == record_of(whole)


def test_a_run_that_another_process_finishes_meanwhile_is_not_trained_again(tmp_path, monkeypatch):
    run, lines = run_of(tmp_path, "mnist_lr"), []
    prepare = execution.prepare

    def slowly(config, device):
        monkeypatch.setattr(execution, "prepare", prepare)
        execute(run)  # the other process
        return prepare(config, device)

    monkeypatch.setattr(execution, "prepare", slowly)
    assert execute(run, announce=lines.append) == "finished"
    assert len(lines) == 1 and "another process has trained it" in lines[0]


def test_a_clock_that_is_set_back(tmp_path, monkeypatch):
    whole, run = run_of(tmp_path / "whole", "mnist_lr"), run_of(tmp_path / "back", "mnist_lr")
    execute(whole)
    now = iter(range(10**9, 0, -3600))  # an hour earlier at every call
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    assert execute(run) == "finished"
    assert record_of(run) == record_of(whole)
    assert 0 < read_info(run.folder)["seconds"] < 600


# NaN and inf


WILD = ["optimizer.lr=1e19", "log_every=1"]  # every layer of a perceptron multiplies the error


def test_a_loss_that_is_nan(tmp_path):
    run, lines = run_of(tmp_path, "mnist_mlp", *WILD, optimizer="sgd"), []
    assert execute(run, announce=lines.append) == "diverged"
    step = read_info(run.folder)["step"]
    assert 1 <= step <= 4 and f"NaN or inf at step {step}" in lines[-1]
    assert read_metrics(run.folder)["step"].max() == step
    assert run.done and not list(run.folder.glob("checkpoint*"))


@pytest.mark.parametrize(
    "experiment",
    [
        "mnist_correlation", "mnist_net_update", "resnet_cifar10", "wgan_gp", "nmt",
        "ill_conditioned", "counterexample_stochastic",
    ],
)  # fmt: skip
def test_a_parameter_that_is_nan_means_diverged_not_failed(tmp_path, monkeypatch, experiment):
    take = Training.take

    def poisoned(self, step):
        take(self, step)
        self.players()[0][1][0].data.fill_(torch.nan)

    monkeypatch.setattr(Training, "take", poisoned)
    for number, words in enumerate((["log_every=1"], ["log_every=1000"])):
        run = run_of(tmp_path, experiment, *words, "++steps=3", f"seed={number}")
        assert execute(run) == "diverged"
        assert read_metrics(run.folder)["step"].tolist() == [run.info["step"]]


def test_levenberg_marquardt_does_not_fail_on_nan(tmp_path):
    words = ["optimizer.lr=1e19", "log_every=1", "steps=5", "task.hidden=2"]
    run = run_of(tmp_path, "ill_conditioned", *words, optimizer="levenberg_marquardt")
    assert execute(run) in ("finished", "diverged")  # it reverts steps that do not help


def test_an_error_caused_by_nan_means_diverged(tmp_path, monkeypatch):
    from experiments.tasks.mnist import LinearClassifier

    def evaluate(self):
        if not torch.stack([p.isfinite().all() for p in self.net.parameters()]).all():
            raise IndexError("no such word")
        return {"test_loss": 1.0}

    monkeypatch.setattr(LinearClassifier, "evaluate", evaluate)
    run = run_of(tmp_path, "mnist_mlp", *WILD, optimizer="sgd")
    assert execute(run) == "diverged"
    assert read_metrics(run.folder)["test_loss"].iloc[0] == 1
    run = run_of(tmp_path, "mnist_lr", "log_every=1", optimizer="sgd")
    monkeypatch.setattr(LinearClassifier, "evaluate", lambda self: [][0])
    with pytest.raises(IndexError):  # an error of the program is a failure
        execute(run)
    assert run.status == "failed" and "IndexError" in read_info(run.folder)["error"]


def test_a_large_finite_loss_is_fine(tmp_path):
    run = run_of(tmp_path, "mnist_mlp", "optimizer.lr=10", "steps=2", optimizer="sgd")
    assert execute(run) == "finished"
    assert run.metrics()["classifier/loss"].max() > 1e3
    large = torch.nn.Parameter(torch.full((1000,), 3e38))  # their sum overflows float32
    assert Training(Owner(large), {}, None).finite()
    large.data[7] = -torch.inf
    assert not Training(Owner(large), {}, None).finite()


class Owner:
    def __init__(self, parameter):
        self.parameter = parameter

    def players(self):
        return {"net": [self.parameter, torch.nn.Parameter(torch.empty(0))]}


def test_a_run_that_diverged_at_its_first_step_is_drawn(tmp_path, monkeypatch):
    spec = load_spec("figure", "03")
    (name, *_) = spec.runs
    panels = [panel.model_copy(update={"runs": {name: None}}) for panel in spec.panels]
    run = run_of(tmp_path, "mnist_mlp", *WILD, optimizer="sgd")
    monkeypatch.setattr("experiments.tasks.mnist.LinearClassifier.evaluate", lambda self: [][0])
    monkeypatch.setattr(Training, "finite", lambda self: False)
    assert execute(run) == "diverged" and run.info["step"] == 1
    marks, mark = [], figures.mark_end

    def noted(ax, *given):
        mark(ax, *given)
        marks.append(ax.lines[-1])

    monkeypatch.setattr(figures, "mark_end", noted)
    draw_figure(spec.model_copy(update={"panels": panels}), {name: [run]}, tmp_path / "figure")
    assert [line.get_marker() for line in marks] == ["x"] * len(panels)
    assert all(line.get_xdata() == [1] for line in marks)
    assert len(pd.read_csv(tmp_path / "figure.csv")) > 0
