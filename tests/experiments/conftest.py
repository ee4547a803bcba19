import pytest
import torch


@pytest.fixture(autouse=True)
def denormals_are_back_after_a_test():
    """A run flushes them to zero for its whole process, and other tests draw them."""
    yield
    torch.set_flush_denormal(False)
