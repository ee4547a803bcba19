import pytest


@pytest.fixture(autouse=True)
def nobody_is_logged_in(monkeypatch, tmp_path_factory):
    """Tests must not depend on the W&B account of whoever runs them."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.getbasetemp()))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
