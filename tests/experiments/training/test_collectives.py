"""One run in two processes of torchrun: the curve of one process, and one record."""

import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from benchmarks.kill_and_resume import record_of
from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.config.paths import ROOT
from experiments.records.run import Run
from experiments.training import collectives
from experiments.training.execute import checkpoint_of, execute

# SGD: Adam amplifies the gradient of a bias before a batch norm, which is a rounding error.
WORDS = ["experiment=resnet_cifar10", "optimizer=sgd", "scale=smoke", "tracking=off", "steps=20"]


def torchrun(folder, *words):
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(ROOT / "run.py")]
    return subprocess.run(
        [sys.executable, *command, *words, f"results={folder}"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
def test_two_processes_give_the_curve_of_one(tmp_path):
    one = Run(compose([*WORDS, f"results={tmp_path / 'one'}"]))
    assert execute(one) == "finished"
    out = torchrun(tmp_path, *WORDS)
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("finished") == 1  # only the leader prints
    two = Run(compose([*WORDS, f"results={tmp_path}"]))
    assert two.done and two.info["machine"]["processes"] == 2
    ours, theirs = one.metrics(), two.metrics()
    assert list(ours["step"]) == [5, 10, 15, 20]
    np.testing.assert_allclose(theirs["classifier/loss"], ours["classifier/loss"], rtol=1e-4)
    # One process with another memory layout of the images differs by as much.
    np.testing.assert_allclose(theirs["test_loss"], ours["test_loss"], rtol=5e-3)
    assert ours["classifier/loss"].iloc[0] - ours["classifier/loss"].iloc[-1] > 0.3


@pytest.mark.slow
def test_torchrun_resumes_to_the_same_record(tmp_path):
    words = [*WORDS[:-1], "steps=60", "checkpoint_every=0"]
    whole, run = (Run(compose([*words, f"results={tmp_path / n}"])) for n in ("whole", "stopped"))
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(ROOT / "run.py")]
    process = subprocess.Popen(
        [sys.executable, *command, *words, f"results={tmp_path / 'stopped'}"],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    checkpoint = checkpoint_of(run, torch.device("cpu"))
    while not checkpoint.path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=120)
    assert run.status == "interrupted" and 0 < checkpoint.load()["done"] < 60
    for folder in ("whole", "stopped"):
        out = torchrun(tmp_path / folder, *words)
        assert out.returncode == 0, out.stderr
    assert record_of(run) == record_of(whole)


def test_a_rank_that_torchrun_did_not_set_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    words = ["experiment=mnist_lr", "scale=smoke", "tracking=off", f"results={tmp_path}"]
    assert execute(Run(compose(words))) == "finished"


@pytest.mark.parametrize(
    ("words", "count", "message"),
    [
        (["experiment=mnist_lr"], 2, "mnist_lr supports one process: start it without torchrun"),
        (WORDS, 3, "batch is 20; expected a multiple of 3, the number of processes"),
    ],
)
def test_an_invalid_number_of_processes_is_an_error(tmp_path, monkeypatch, words, count, message):
    monkeypatch.setattr(collectives, "world_size", lambda: count)
    monkeypatch.setattr("experiments.training.execute.world_size", lambda: count)
    run = Run(compose([*words, "scale=smoke", f"results={tmp_path}", "tracking=off"]))
    with pytest.raises(ConfigError, match=message):
        execute(run)
    assert not any(tmp_path.iterdir())
