"""`make gpu-check`: what can be shown of it without a GPU."""

import math
import sys

import pandas as pd
import pytest
import torch

from benchmarks import gpu_check
from experiments.config.paths import choices_of
from experiments.tasks.mnist import LinearClassifier


def test_without_a_gpu_it_stops_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^error: torch finds no GPU; run this on .*driver$"):
        gpu_check.main([])


def test_quick_trains_two_experiments(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "check_rows", lambda device: None)
    monkeypatch.setattr(gpu_check, "train_rows", lambda device, names: sys.exit(" ".join(names)))
    with pytest.raises(SystemExit, match=r"^mnist_lr lemma_2$"):
        gpu_check.main(["--quick"])


@pytest.mark.filterwarnings("ignore:m=inf with betas")
def test_checks_pass_on_a_cpu_and_notice_a_wrong_step(monkeypatch):
    checks = gpu_check.check_rows(torch.device("cpu"))
    assert len(checks) == 4 * 4 * 3 and checks["passed"].all(), checks[~checks["passed"]]
    monkeypatch.setattr(gpu_check, "AdaShift", lambda p, n, **o: torch.optim.SGD(p, lr=0.01))
    assert not gpu_check.check_rows(torch.device("cpu"))["passed"].any()


def test_page():
    checks = pd.DataFrame({"check": ["a", "b"], "error": [1e-9, math.nan], "tolerance": 1e-6})
    checks["passed"] = [True, False]
    times = pd.DataFrame({"list": ["one tensor"], "contender": ["Adam"], "ms per step": [1.5]})
    text = gpu_check.page(checks, times, ["## Training"], {"GPU": "none"})
    assert "Checks passed: 1 of 2." in text and "| b | nan |" in text and "| a |" not in text
    assert "| one tensor | Adam | 1.5 |" in text
    assert "closest" in gpu_check.page(checks[:1], times, [], {})


def test_a_run_on_the_device_is_compared_with_one_on_the_cpu(monkeypatch):
    """The CPU is the device here; without compiling, which takes most of the time."""
    monkeypatch.setattr("experiments.training.speed.fast_settings", lambda device: {})
    table = gpu_check.train_rows("cpu", ["mnist_lr", "resnet_cifar10", "lemma_2"])
    assert list(table["speed"]) == ["exact", "fast"] * 3
    assert (table["gap"] == 0).all() and table["passed"].all()
    text = "\n\n".join(gpu_check.training_part(table, "run.py …: identical"))
    assert (
        "Runs within their tolerance: 6 of 6." in text and "| mnist_lr | exact | 0.0e+00 |" in text
    )


def test_a_wrong_result_and_a_failed_run_do_not_pass(monkeypatch):
    usual, loss = LinearClassifier.steps, LinearClassifier.loss
    runs = []

    def shifted(self, rows):
        return loss(self, rows) * (1 + 0.01 * (len(runs) == 2))  # 1 % off in the exact run

    def counted(self):
        runs.append(self)
        if len(runs) == 3:
            raise RuntimeError("CUDA error: an illegal instruction was encountered")
        return usual(self)

    monkeypatch.setattr(LinearClassifier, "loss", shifted)
    monkeypatch.setattr(LinearClassifier, "steps", counted)
    exact, fast = gpu_check.train_rows("cpu", ["mnist_lr"]).to_dict("records")
    assert not exact["passed"] and 0.005 < exact["gap"] < 0.05
    assert not fast["passed"] and math.isnan(fast["gap"])
    assert (
        fast["outcome"]
        == "failed: RuntimeError: CUDA error: an illegal instruction was encountered"
    )


@pytest.mark.slow
def test_every_experiment_and_a_published_run_are_compared(monkeypatch):
    monkeypatch.setattr("experiments.training.speed.fast_settings", lambda device: {})
    assert gpu_check.train_rows("cpu", choices_of("experiment"))["passed"].all()
    assert "different" not in gpu_check.published_agreement("cpu")
