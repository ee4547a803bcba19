import os
import tempfile

import pytest

# Some virtual machines report AMX and do not allow it: bfloat16 would end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Tests see data that ADASHIFT_DATA names, and never what a user happens to have in data/.
os.environ.setdefault("ADASHIFT_DATA", os.path.join(tempfile.gettempdir(), "adashift-no-data"))
FROM_OUTSIDE = (
    "WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "NETRC",
    "HYDRA_FULL_ERROR", "RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


@pytest.fixture(autouse=True)
def environment_of_nobody(monkeypatch, tmp_path_factory):
    """Tests must not depend on the account or the environment of whoever runs them."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.getbasetemp()))
    for name in FROM_OUTSIDE:
        monkeypatch.delenv(name, raising=False)
