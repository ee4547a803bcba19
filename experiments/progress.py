"""Progress bars: shown after three seconds, with few updates if stderr is not a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from multiprocessing import parent_process
from typing import Any

from tqdm import tqdm


def progress(items: Iterable[Any] | None = None, **about: Any) -> tqdm[Any]:
    """Return a bar with speed and remaining time over `items`, or, with total=…, for `update`."""
    # No bar in a worker, whose parent has one, or in torchrun's processes after the first.
    about |= {"disable": parent_process() is not None or os.environ.get("RANK", "0") != "0"}
    pause = 0.5 if sys.stderr.isatty() else 30.0
    return tqdm(items, delay=3, leave=False, mininterval=pause, dynamic_ncols=True, **about)
