"""How many GPUs and cores this machine has, without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess


def has_gpu() -> bool:
    """Whether a CUDA device is at hand, without importing torch (figures are drawn without it)."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and shutil.which("nvidia-smi") is not None


def count_gpus() -> int:
    """Of this process, as CUDA_VISIBLE_DEVICES allows, without importing torch."""
    if not has_gpu():
        return 0
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len(visible.split(","))
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return len(listed.stdout.splitlines())


def jobs_at_once(threads: int | None) -> int:
    """How many runs this machine takes: one for each GPU, else as many as the cores serve."""
    return count_gpus() or max(1, (os.cpu_count() or 1) // (threads or 1))
