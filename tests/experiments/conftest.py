import pytest
import torch


@pytest.fixture(autouse=True)
def restore_denormals():
    """A run flushes denormals to zero for its whole process; other tests need them."""
    yield
    torch.set_flush_denormal(False)
