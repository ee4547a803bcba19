"""The one look of a progress bar: none for what takes seconds, few lines without a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from multiprocessing import parent_process
from typing import Any

from tqdm import tqdm


def progress(items: Iterable[Any] | None = None, **about: Any) -> tqdm[Any]:
    """A bar with speed and remaining time, over `items` or, with total=…, to be moved by hand."""
    # A worker, whose parent has a bar, or a process of torchrun that is not the first.
    about |= {"disable": parent_process() is not None or os.environ.get("RANK", "0") != "0"}
    pause = 0.5 if sys.stderr.isatty() else 30.0
    return tqdm(items, delay=3, leave=False, mininterval=pause, dynamic_ncols=True, **about)
