"""The GPUs and cores of this machine, counted without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess


def has_gpu() -> bool:
    """Whether a CUDA device is available; figures are drawn without torch, so do not import it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and shutil.which("nvidia-smi") is not None


def count_gpus() -> int:
    """The number of GPUs that CUDA_VISIBLE_DEVICES makes visible to this process."""
    if not has_gpu():
        return 0
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len(visible.split(","))
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return len(listed.stdout.splitlines())


def jobs_at_once(threads: int | None) -> int:
    """The number of runs to train in parallel: one per GPU, else as many as the cores allow."""
    return count_gpus() or max(1, (os.cpu_count() or 1) // (threads or 1))
