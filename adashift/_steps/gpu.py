"""The step of one parameter on a GPU in one pass over memory."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adashift._window import WindowPlan

BLOCK = 1024


@triton.jit
def step_kernel(  # type: ignore[no-untyped-def]
    p_at, g_at, earlier_at, keep_at, slot_at, front_at, size_at, phi_at,
    count, beta1, weight, total, decay,
    EARLIER: tl.constexpr, KEEP: tl.constexpr, SLOT: tl.constexpr, FRONT: tl.constexpr,
    MOVES: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    g = tl.load(g_at + i, mask=inside, other=0.0)
    m = g
    if EARLIER:
        m += beta1 * tl.load(earlier_at + i, mask=inside, other=0.0)
    if KEEP:
        tl.store(keep_at + i, m, mask=inside)
    if SLOT:
        tl.store(slot_at + i, g, mask=inside)
    if MOVES:
        if FRONT:
            m += weight * tl.load(front_at + i, mask=inside, other=0.0)
        size = tl.load(size_at)
        p = tl.load(p_at + i, mask=inside, other=0.0)
        tl.store(p_at + i, tl.where(size == 0, p, decay * p - size * m / total), mask=inside)
    square = g * g
    if MEAN:
        tl.atomic_add(phi_at, tl.sum(square) / count)
    else:
        tl.atomic_max(phi_at, tl.max(square))
    if tl.sum((square != square).to(tl.int32)) > 0:  # a maximum may pass over NaN
        tl.atomic_add(phi_at, float("nan"))


def triton_supports(p: Tensor, g: Tensor, move: WindowPlan, phi: Any) -> bool:
    """Whether the kernel can take this parameter; others go the way of lists."""
    buffers = [b for b in (g, move.slot, *(b for b, _ in move.front)) if b is not None]
    plain = p.is_contiguous() and all(b.is_contiguous() for b in buffers)
    return plain and phi in ("max", "mean") and len(move.front) < 2 and not hasattr(p, "placements")


def step_triton(
    p: Tensor, g: Tensor, move: WindowPlan, size: Tensor | None, beta1: float, total: float,
    decay: float, phi: str,
) -> Tensor:  # fmt: skip
    """Take in g and, if there is a step size, move p; return φ(g²)."""
    front, weight = move.front[0] if move.front else (None, 0.0)
    found = torch.zeros((), dtype=g.dtype, device=g.device)
    buffers = [move.earlier, move.keep, move.slot, front, size]
    here = [found if b is None else b for b in buffers]  # some pointer where none is used
    parts = [b is not None for b in buffers]
    step_kernel[(triton.cdiv(p.numel(), BLOCK),)](
        p, g, *here, found, p.numel(), beta1, weight, total, decay, *parts, phi == "mean", BLOCK
    )
    return found
