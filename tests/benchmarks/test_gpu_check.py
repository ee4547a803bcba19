"""`make gpu-check`: what can be shown of it without a GPU."""

import math

import pandas as pd
import pytest
import torch

from benchmarks import gpu_check


def test_without_a_gpu_it_stops_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^error: torch finds no GPU; run this on .*driver$"):
        gpu_check.main([])


@pytest.mark.filterwarnings("ignore:m=inf with betas")
def test_checks_pass_on_a_cpu_and_notice_a_wrong_step(monkeypatch):
    checks = gpu_check.check_rows(torch.device("cpu"))
    assert len(checks) == 4 * 4 * 3 and checks["passed"].all(), checks[~checks["passed"]]
    monkeypatch.setattr(gpu_check, "AdaShift", lambda p, n, **o: torch.optim.SGD(p, lr=0.01))
    assert not gpu_check.check_rows(torch.device("cpu"))["passed"].any()


def test_page():
    checks = pd.DataFrame({"check": ["a", "b"], "error": [1e-9, math.nan], "tolerance": 1e-6})
    checks["passed"] = [True, False]
    times = pd.DataFrame({"list": ["a list"], "contender": ["Adam fused"], "ms per step": [1.5]})
    text = gpu_check.page(checks, times, {"GPU": "none"})
    assert "Checks passed: 1 of 2." in text and "| b | nan |" in text and "| a |" not in text
    assert "| a list | Adam fused | 1.5 |" in text
    assert "closest" in gpu_check.page(checks[:1], times, {})
