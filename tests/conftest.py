import os

import pytest

# Some virtual machines report AMX and do not allow it: bfloat16 would end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


@pytest.fixture(autouse=True)
def nobody_is_logged_in(monkeypatch, tmp_path_factory):
    """Tests must not depend on the W&B account of whoever runs them."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.getbasetemp()))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
