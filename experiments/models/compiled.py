"""torch.compile with the settings of all networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function, *, dynamic: bool = False, graphs: bool = False) -> Function:
    """Return a network or a function that torch.compile translates at its first call.

    `dynamic` compiles once for all sizes instead of once for each. `graphs` replays CUDA graphs: a
    deep, narrow network takes less time than its launches. Compiled code belongs to the class, not
    to the network, so the next seed in this process uses it again.
    """
    from torch._inductor import config  # takes a second, so it is imported late

    config.fallback_random = True  # dropout draws the same as without compiling
    mode = "reduce-overhead" if graphs else "default"
    return torch.compile(function, dynamic=dynamic, mode=mode)  # type: ignore[return-value]
