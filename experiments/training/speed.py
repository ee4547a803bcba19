"""speed=fast: what a run gives up of the last digits for speed; speed=exact undoes all of it."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from experiments.config.build import import_target
from experiments.config.schema import Config


def set_precision(fast: bool, device: torch.device, deterministic: bool) -> None:
    """Let a GPU round inputs of float32 products to 10 bits (TF32), and choose algorithms by time.

    Exact is set as well: torch uses TF32 in convolutions by default, and a process trains runs of
    both kinds.
    """
    if device.type != "cuda":
        return
    # Not the newer fp32_precision: after it, torch.compile fails where it reads these switches.
    torch.backends.cuda.matmul.allow_tf32 = fast
    torch.backends.cudnn.allow_tf32 = fast
    torch.backends.cudnn.benchmark = fast and not deterministic


def task_node(config: Config, device: torch.device) -> dict[str, Any]:
    """Return the node of the task; fast: with the settings for speed that its trainer has."""
    trainer = config.task.get("trainer")
    if config.speed == "exact" or trainer is None:
        return config.task
    known = inspect.signature(import_target(trainer["_target_"], "trainer")).parameters
    chosen = {key: value for key, value in fast_settings(device).items() if key in known}
    return config.task | {"trainer": trainer | chosen}


def fast_settings(device: torch.device) -> dict[str, bool]:
    """Return settings of a trainer; few CPUs compute bfloat16 faster than float32."""
    bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return {"channels_last": True, "compile": True, "autocast": bfloat16}
