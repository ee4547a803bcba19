"""The GPUs and cores of this machine, counted without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess

USABLE_MEMORY = 0.9  # of a GPU; other programs and the driver need some
MOST_RUNS_PER_GPU = 4  # by default: kernels of several processes take turns


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
    return len(nvidia_smi("-L"))


def memory_of_a_gpu() -> float:
    """The memory of the smallest GPU in GiB; 0 if unknown."""
    listed = nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    sizes = [int(line) for line in listed if line.strip().isdecimal()]
    return min(sizes, default=0) / 1024


def nvidia_smi(*arguments: str) -> list[str]:
    if not has_gpu():
        return []
    asked = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True)
    return asked.stdout.splitlines()


def runs_on_a_gpu(wanted: int | str, memory: float) -> int:
    """The number of runs that share a GPU; auto: by the GiB that a run needs, and by the cores."""
    if wanted != "auto":
        return int(wanted)
    by_memory = int(USABLE_MEMORY * memory_of_a_gpu() / memory)
    by_cores = (os.cpu_count() or 1) // max(1, count_gpus())  # a core launches a run's kernels
    return max(1, min(by_memory, by_cores, MOST_RUNS_PER_GPU))


def jobs_at_once(threads: int | None, runs_per_gpu: int | str, gpu_memory: float) -> int:
    """The number of runs to train in parallel: some per GPU, else as many as the cores allow."""
    if gpus := count_gpus():
        return gpus * runs_on_a_gpu(runs_per_gpu, gpu_memory)
    return max(1, (os.cpu_count() or 1) // (threads or 1))


def gpus_of_a_job(runs_per_gpu: int | str, gpu_memory: float) -> float:
    """The part of a GPU that a job of Ray asks for."""
    return 1 / runs_on_a_gpu(runs_per_gpu, gpu_memory) if count_gpus() else 0
