import os
import tempfile

import pytest

# Some virtual machines report AMX but do not allow it: bfloat16 would kill the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Tests use the data in ADASHIFT_DATA, never a user's own data/ folder.
os.environ.setdefault("ADASHIFT_DATA", os.path.join(tempfile.gettempdir(), "adashift-no-data"))
USER_VARIABLES = (
    "WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "NETRC", "HYDRA_FULL_ERROR",
    "RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "ADASHIFT_CACHE", "XDG_CACHE_HOME",
    "GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE",  # set inside a Git hook
)  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def clean_environment(tmp_path_factory):
    """Hide the user's account and settings; for the session, so that module fixtures see it too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.getbasetemp()))
        for name in USER_VARIABLES:
            patch.delenv(name, raising=False)
        yield
