"""Every example runs as a user would start it, and its loss falls."""

import copy
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adashift import AdaShift
from examples.gradient_release import release_gradients

ROOT = Path(__file__).parents[2]
NEEDS = {
    "plain_loop": "torch",
    "gradient_release": "torch",
    "with_lightning": "lightning",
    "with_transformers": "transformers",
    "with_accelerate": "accelerate",
}


@pytest.mark.parametrize("example", NEEDS)
def test_the_loss_falls(example, tmp_path):
    if importlib.util.find_spec(NEEDS[example]) is None:
        pytest.skip(f"needs {NEEDS[example]}: make test-examples")
    command = [sys.executable, str(ROOT / f"examples/{example}.py")]
    paths = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"\bloss'?:? '?([\d.]+)", done.stdout)]
    assert len(losses) >= 5 and losses[-1] < losses[0] / 4
    assert not list(tmp_path.iterdir())


def test_each_example_is_tested():
    scripts = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert scripts - {"lion"} == set(NEEDS)


def test_released_gradients_give_the_same_training():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    release_gradients(model, lambda params: AdaShift(params, n=3))
    optimizer = AdaShift(plain.parameters(), n=3)
    for _ in range(12):
        x = torch.randn(8, 3)
        model(x).square().sum().backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.zero_grad()
        plain(x).square().sum().backward()
        optimizer.step()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
