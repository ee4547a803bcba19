"""The speed of this machine, by a fixed workload on one core that takes a fraction of a second.

run.json holds its time, so that run times of one machine can be converted to another.
"""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np

MAX_AGE = 86400.0  # seconds until it is measured again
REPEATS = 5


@cache
def probe() -> float:
    """Return the seconds of the workload on this machine; measured at most once a day."""
    path = cache_folder() / f"probe-{sha256(platform.node().encode()).hexdigest()[:8]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(path.read_text())
        if 0 <= time.time() - kept["time"] < MAX_AGE:
            return float(kept["seconds"])
    seconds = measured()
    with suppress(OSError):  # the next process measures again
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(json.dumps({"seconds": seconds, "time": time.time()}))
    return seconds


def measured() -> float:
    """Return the best time of the workload: other processes can only make it slower."""
    left = np.linspace(-1, 1, 64**3, dtype=np.float32).reshape(64, 64, 64)
    large, out = np.ones(2**22, dtype=np.float32), np.empty(2**22, dtype=np.float32)
    return round(min(workload(left, large, out) for _ in range(REPEATS)), 4)


def workload(left: np.ndarray, large: np.ndarray, out: np.ndarray) -> float:
    """Time products of matrices that BLAS computes in one thread, memory, and the interpreter."""
    begun = time.perf_counter()
    for _ in range(20):
        left @ left
    for _ in range(8):
        np.add(large, out, out=out)
    sum(i & 3 for i in range(500_000))
    return time.perf_counter() - begun


def cache_folder() -> Path:
    """Return the folder in which compiled kernels are kept too."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("ADASHIFT_CACHE") or os.path.join(home, "adashift"))
