import pytest
import torch

from experiments.config import gpus
from experiments.config.gpus import nvidia_smi


@pytest.fixture(autouse=True)
def restore_denormals():
    """A run flushes denormals to zero for its whole process; other tests need them."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
    """Tests that train several runs do so in this process, on any machine."""
    monkeypatch.setattr(gpus, "cores", lambda: 1)
    nvidia_smi.cache_clear()
    yield
    nvidia_smi.cache_clear()
