"""One run in two processes of torchrun: the curve of one process, and one record."""

import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.config.paths import ROOT
from experiments.records.run import Run
from experiments.training import collectives
from experiments.training.execute import checkpoint_of, execute

# SGD: Adam makes steps of the rounding errors that are the gradient of a bias before a batch norm.
WORDS = ["experiment=resnet_cifar10", "optimizer=sgd", "scale=smoke", "tracking=off", "steps=20"]


def torchrun(folder, *words):
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(ROOT / "run.py")]
    return subprocess.run(
        [sys.executable, *command, *words, f"results={folder}"],
        capture_output=True, text=True, cwd=folder, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
def test_two_processes_give_the_curve_of_one(tmp_path):
    one = Run(compose([*WORDS, f"results={tmp_path / 'one'}"]))
    assert execute(one) == "finished"
    out = torchrun(tmp_path, *WORDS)
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("finished") == 1  # the first process speaks for both
    two = Run(compose([*WORDS, f"results={tmp_path}"]))
    assert two.done and two.info["machine"]["processes"] == 2
    ours, theirs = one.metrics(), two.metrics()
    assert list(ours["step"]) == [5, 10, 15, 20]
    np.testing.assert_allclose(theirs["classifier/loss"], ours["classifier/loss"], rtol=1e-4)
    # As far apart as one process is from itself with images in another memory layout.
    np.testing.assert_allclose(theirs["test_loss"], ours["test_loss"], rtol=5e-3)
    assert ours["classifier/loss"].iloc[0] - ours["classifier/loss"].iloc[-1] > 0.3


@pytest.mark.slow
def test_torchrun_that_is_stopped_leaves_a_checkpoint(tmp_path):
    words = [*WORDS[:-1], "steps=100000", "checkpoint_every=0.5", f"results={tmp_path}"]
    run = Run(compose(words))
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(ROOT / "run.py")]
    process = subprocess.Popen(
        [sys.executable, *command, *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    checkpoint = checkpoint_of(run, torch.device("cpu"))
    while not checkpoint.path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=120)
    assert run.status == "interrupted" and checkpoint.load()["done"] > 0


def test_a_rank_that_torchrun_has_not_given_means_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    words = ["experiment=mnist_lr", "scale=smoke", "tracking=off", f"results={tmp_path}"]
    assert execute(Run(compose(words))) == "finished"


@pytest.mark.parametrize(
    ("words", "count", "message"),
    [
        (["experiment=mnist_lr"], 2, "mnist_lr is for one process: start it without torchrun"),
        (WORDS, 3, "a batch of 20 is not for 3 processes"),
    ],
)
def test_what_cannot_be_divided_is_refused(tmp_path, monkeypatch, words, count, message):
    monkeypatch.setattr(collectives, "size", lambda: count)
    monkeypatch.setattr("experiments.training.execute.size", lambda: count)
    run = Run(compose([*words, "scale=smoke", f"results={tmp_path}", "tracking=off"]))
    with pytest.raises(ConfigError, match=message):
        execute(run)
    assert not any(tmp_path.iterdir())
