"""Device, threads and determinism of one run."""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from experiments.config.errors import ConfigError
from experiments.config.schema import Config
from experiments.records.files import locked
from experiments.training.speed import set_precision

ALL_THREADS = torch.get_num_threads()  # the cores, or what OMP_NUM_THREADS allows


def set_up_torch(config: Config, device: torch.device) -> bool:
    """Configure torch; return whether the run is to be bit-identical every time."""
    torch.set_num_threads(config.threads or ALL_THREADS)
    # Softmax can give denormal numbers (below 1e-38), which slow a CPU down ten times.
    torch.set_flush_denormal(True)
    same = device.type == "cpu" if config.deterministic is None else config.deterministic
    torch.use_deterministic_algorithms(same, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    set_precision(config.speed == "fast", device, same)
    if device.type == "cuda":
        torch.backends.cudnn.deterministic = same
        if same:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
    return same


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
def device_for(wanted: str) -> Iterator[torch.device]:
    """Yield the device; `auto` takes a GPU that no other run on this machine uses, if any."""
    device = pick_device(wanted)
    with ExitStack() as held:
        for number in range(torch.cuda.device_count()) if wanted == "auto" else ():
            name = torch.cuda.get_device_properties(number).uuid  # the same in every process
            place = Path(tempfile.gettempdir()) / f"adashift-{os.getuid()}" / f"gpu-{name}"
            if held.enter_context(locked(place)):
                device = torch.device("cuda", number)
                break
        yield device
