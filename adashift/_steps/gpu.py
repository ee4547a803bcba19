"""The update of one parameter on a GPU by a Triton kernel, in one pass over memory."""

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
    if tl.sum((square != square).to(tl.int32)) > 0:  # tl.max may ignore NaN
        tl.atomic_add(phi_at, float("nan"))


def triton_supports(p: Tensor, g: Tensor, plan: WindowPlan, phi: Any) -> bool:
    """Return whether the kernel supports this parameter; foreach updates the others."""
    buffers = [b for b in (g, plan.slot, *(b for b, _ in plan.front)) if b is not None]
    plain = p.is_contiguous() and all(b.is_contiguous() for b in buffers)
    return plain and phi in ("max", "mean") and len(plan.front) < 2 and not hasattr(p, "placements")


def step_triton(
    p: Tensor, g: Tensor, plan: WindowPlan, size: Tensor | None, beta1: float, total: float,
    decay: float, phi: str,
) -> Tensor:  # fmt: skip
    """Add g to the window and, given a step size, update p; return φ(g²)."""
    front, weight = plan.front[0] if plan.front else (None, 0.0)
    found = torch.zeros((), dtype=g.dtype, device=g.device)
    buffers = [plan.earlier, plan.keep, plan.slot, front, size]
    here = [found if b is None else b for b in buffers]  # any valid pointer for unused arguments
    parts = [b is not None for b in buffers]
    step_kernel[(triton.cdiv(p.numel(), BLOCK),)](
        p, g, *here, found, p.numel(), beta1, weight, total, decay, *parts, phi == "mean", BLOCK
    )
    return found
