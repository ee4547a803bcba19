"""The GPUs and cores of this machine, counted without importing torch, and how runs share them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache

from experiments.config.errors import ConfigError, invalid
from experiments.config.schema import GPU_MEMORY, Config

USABLE_MEMORY = 0.9  # of a GPU; other programs and the driver need some
MOST_RUNS_PER_GPU = 4  # by default: kernels of several processes take turns


def has_gpu() -> bool:
    """Whether a CUDA device is available; figures are drawn without torch, so do not import it."""
    return count_gpus() > 0


def uses_gpu(device: str) -> bool:
    """Whether runs with this `device` are trained on a CUDA device of this machine."""
    return device != "cpu" and has_gpu()


def count_gpus() -> int:
    """The number of GPUs that CUDA_VISIBLE_DEVICES makes visible to this process."""
    listed = len(nvidia_smi("-L"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not listed:
        return listed
    return 0 if visible in ("", "-1") else len(visible.split(","))


def memory_of_a_gpu() -> float:
    """The memory of the smallest GPU in GiB; 0 if unknown."""
    listed = nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    sizes = [int(line) for line in listed if line.strip().isdecimal()]
    return min(sizes, default=0) / 1024


@cache
def nvidia_smi(*arguments: str) -> list[str]:
    """The lines that nvidia-smi prints; none if it fails, as it does without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    asked = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True)
    return [] if asked.returncode else asked.stdout.splitlines()


def device_name(device: str) -> str:
    """The name of the GPU on which runs with this `device` are trained here, else cpu or mps."""
    if not uses_gpu(device):
        return "mps" if device == "mps" else "cpu"
    first = nvidia_smi("-L")[0]  # GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-…)
    return first.partition(": ")[2].partition(" (UUID")[0] or "gpu"


def cores() -> int:
    """The number of cores that this process may use: Slurm and taskset allow it only some."""
    if hasattr(os, "sched_getaffinity"):  # macOS lacks it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def runs_on_a_gpu(wanted: int | str, memory: float | None) -> int:
    """The number of runs that share a GPU; auto: by the GiB that a run needs, and by the cores."""
    if wanted != "auto":
        return number_of_runs(wanted)
    by_memory = int(USABLE_MEMORY * memory_of_a_gpu() / (memory or GPU_MEMORY))
    by_cores = cores() // max(1, count_gpus())  # a core launches a run's kernels
    return max(1, min(by_memory, by_cores, MOST_RUNS_PER_GPU))


def number_of_runs(wanted: int | str) -> int:
    """Check the number, because an engine is resolved before the config of a run is."""
    if not str(wanted).isdecimal() or int(wanted) < 1:
        expected = f"expected {Config.model_fields['runs_per_gpu'].description}"
        raise ConfigError(invalid("runs_per_gpu", wanted, expected))
    return int(wanted)


def gpus_for(device: str) -> int:
    """The number of GPUs that runs with this `device` are spread over."""
    return count_gpus() if device == "auto" else int(device != "cpu")


def jobs_at_once(
    device: str, threads: int | None, runs_per_gpu: int | str, gpu_memory: float | None
) -> int:
    """The number of runs to train in parallel: some per GPU, else as many as the cores allow."""
    if gpus := gpus_for(device):
        return gpus * runs_on_a_gpu(runs_per_gpu, gpu_memory)
    return max(1, cores() // (threads or 1))


def runs_at_once(configs: Iterable[Config]) -> int:
    """The number of these runs that a figure trains in parallel on this machine."""
    return min((runs_like(config) for config in configs), default=1)


def runs_like(config: Config) -> int:
    if config.scale == "smoke":
        return 1  # such a run takes less time than the start of a worker
    threads = config.threads or cores()  # several runs with all threads would be slower
    return jobs_at_once(config.device, threads, config.runs_per_gpu, config.gpu_memory)


def gpus_of_a_job(device: str, runs_per_gpu: int | str, gpu_memory: float | None) -> float:
    """The part of a GPU that a job of Ray asks for."""
    return 1 / runs_on_a_gpu(runs_per_gpu, gpu_memory) if gpus_for(device) else 0
