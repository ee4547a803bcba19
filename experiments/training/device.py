"""Device, threads and determinism of one run."""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.config.errors import ConfigError
from experiments.config.schema import Config
from experiments.progress import count_of
from experiments.records.files import locked
from experiments.training.speed import set_precision

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
SECONDS_BETWEEN_TRIES = 1.0  # to find a free GPU

ALL_THREADS = torch.get_num_threads()  # the cores, or what OMP_NUM_THREADS allows


def set_up_torch(config: Config, device: torch.device) -> bool:
    """Configure torch; return whether the run is to be bit-identical every time."""
    torch.set_num_threads(config.threads or ALL_THREADS)
    keep_freed_memory()
    # Softmax can give denormal numbers (below 1e-38), which slow a CPU down ten times.
    torch.set_flush_denormal(True)
    same = device.type == "cpu" if config.deterministic is None else config.deterministic
    torch.use_deterministic_algorithms(same, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    set_precision(config.speed == "fast", device, same)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # of streams and graphs
        torch.backends.cudnn.deterministic = same
        if same:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
    return same


def keep_freed_memory() -> None:
    """Keep freed memory: every step needs the same tensors, and glibc would return theirs."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # the largest that it accepts


@contextmanager
def noted_kernels() -> Iterator[list[str]]:
    """Yield a list that collects torch's non-deterministic kernels instead of warning of them."""
    names, show = list[str](), warnings.showwarning

    def note(message: Warning | str, *about: Any) -> None:
        found = re.match(r"(\S+) does not have a deterministic implementation", str(message))
        if not found:
            show(message, *about)
        elif found[1] not in names:
            names.append(found[1])

    with warnings.catch_warnings():
        warnings.showwarning = note  # type: ignore[assignment]
        yield names


def pick_device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={wanted} is not available: torch finds no GPU; use device=cpu")
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device=mps is not available: torch finds no Apple GPU; use device=cpu")
    return torch.device(wanted)


@contextmanager
def device_for(
    wanted: str, runs_per_gpu: int = 1, announce: Callable[[str], None] = print
) -> Iterator[torch.device]:
    """Yield the device; `auto` takes the GPU with the fewest runs on this machine.

    If each has `runs_per_gpu` of them, it waits until one of them ends.
    """
    device = pick_device(wanted)
    with ExitStack() as held:
        if wanted == "auto" and device.type == "cuda":
            device = torch.device("cuda", take_gpu(held, runs_per_gpu, announce))
        yield device


def take_gpu(held: ExitStack, runs_per_gpu: int, announce: Callable[[str], None]) -> int:
    """Return the number of a GPU with a free slot; `held` keeps the lock of the slot."""
    if dist.is_torchelastic_launched():  # its processes must not share a GPU
        number = int(os.environ["LOCAL_RANK"])
        held.enter_context(locked_slot(number, 0))
        return number
    count, announced = torch.cuda.device_count(), False
    while True:
        for place in range(runs_per_gpu):
            for number in range(count):
                with ExitStack() as attempt:
                    if attempt.enter_context(locked_slot(number, place)):
                        held.push(attempt.pop_all())
                        return number
        if not announced:
            announced = True
            announce(
                f"waiting: {count_of(count, 'GPU')} with {count_of(runs_per_gpu, 'run')} each; set "
                f"runs_per_gpu={runs_per_gpu + 1} to share them with more, or choose one with "
                "device=cuda:0"
            )
        time.sleep(SECONDS_BETWEEN_TRIES)


def locked_slot(number: int, place: int) -> AbstractContextManager[bool]:
    """Lock the folder of one of the runs on a GPU; yield whether it was free."""
    name = torch.cuda.get_device_properties(number).uuid  # the same in every process
    folder = Path(tempfile.gettempdir()) / f"adashift-{os.getuid()}" / f"gpu-{name}-{place}"
    return locked(folder, setting="TMPDIR=…")
