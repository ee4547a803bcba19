"""The average of the newest m gradients with weights β1^i, in O(1) per step and without drift.

A running sum that adds the newest gradient and subtracts the oldest keeps the rounding error of
every outlier, and inf − inf stays NaN. So a step never subtracts. Time is divided into blocks of m
steps, and the window covers the end of the previous block and the start of the current one:

    back    Σ β1^(j−i) g_i over gradients 0 … j of the current block, one term more each step
    slot k  Σ β1^(m−1−i) g_i over i = k … m−1 of the previous block, a suffix sum

At position j the window is back + β1^(j+1) · slot (j+1), so a step reads two buffers for any m. The
gradient is then stored in slot j, which no later step reads. When the block is full, its gradients
are converted to suffix sums in place: m additions every m steps. A gradient that has left the
window is not part of any sum that is read later. `back` is not written at j = 0, where slot 0 has
the same value, nor at j = m − 1, where no later step reads it.

The sums hold for one β1. When β1 changes, `back` is recomputed from the gradients of the current
block, and the suffix sums of the previous block are converted back to gradients. While β1 keeps
changing, the gradients are stored as they are and summed at every step.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from adashift._base import ParamState

Terms = list[tuple[Tensor, float]]

# Suffix sums are used only if their smallest weight is at least this: then they can be undone.
MIN_WEIGHT = 1e-3


class WindowPlan(NamedTuple):
    """The buffers of the window that a step reads and writes; g itself has weight 1."""

    earlier: Tensor | None  # sum over the current block so far, with weight β1
    keep: Tensor | None  # destination of earlier·β1 + g
    slot: Tensor | None  # destination of g
    front: Terms  # what the window includes of the previous block
    closing: list[Tensor]  # slots 1 … of a full block, to convert to suffix sums first


NO_WINDOW = WindowPlan(None, None, None, [], [])  # m = 1


@cache
def total_weight(beta1: float, m: int) -> float:
    """Σ_{i<m} β1^i

    >>> total_weight(0.5, 3)
    1.75
    """
    return sum(beta1**i for i in range(m))


@cache
def slot_names(m: int) -> list[str]:
    return [f"slot{k}" for k in range(m)]


def plan_window(state: ParamState, g: Tensor, t: int, beta1: float, m: int) -> WindowPlan:
    """Prepare the window for g_t; the caller must carry out the returned plan."""
    if m == 1:
        return NO_WINDOW
    j, slot, closing = (t - 1) % m, slot_names(m), []
    if t == 1:
        state.update(back=torch.zeros_like(g), beta1=beta1, summed=0)
        state.update({name: torch.zeros_like(g) for name in slot})
    elif j == 0:
        settled = beta1 == state["beta1"] and beta1 ** (m - 1) >= MIN_WEIGHT
        state["summed"] = int(settled)
        closing = [state[name] for name in slot[1:]] if settled else []
    elif beta1 != state["beta1"]:
        rebuild_sums(state, j, beta1, m)
    state["beta1"] = beta1
    earlier = None
    if j > 0 and beta1 > 0:  # 0 · inf would be NaN
        earlier = state["slot0" if j == 1 else "back"]
    keep = state["back"] if earlier is not None and j < m - 1 else None
    return WindowPlan(
        earlier, keep, state[slot[j]], previous_block_terms(state, t, beta1, m), closing
    )


def add_gradient(plan: WindowPlan, g: Tensor, beta1: float, m: int) -> Terms:
    """Add g_t to the window; return buffers and coefficients whose sum is m_t (valid from t = m).

    The caller must not modify the buffers, one of which is g.
    """
    to_suffix_sums(plan.closing, beta1)
    terms = [(g, 1.0)]
    if plan.keep is not None and plan.earlier is not None:
        terms = [(torch.add(g, plan.earlier, alpha=beta1, out=plan.keep), 1.0)]
    elif plan.earlier is not None:
        terms += [(plan.earlier, beta1)]
    if plan.slot is not None:
        plan.slot.copy_(g)
    total = total_weight(beta1, m)
    return [(buffer, weight / total) for buffer, weight in terms + plan.front]


def previous_block_terms(state: ParamState, t: int, beta1: float, m: int) -> Terms:
    """Return the terms of the previous block that are in the window."""
    j, slot = (t - 1) % m, slot_names(m)
    if t <= m or beta1 == 0:
        return []
    if state["summed"]:
        return [(state[slot[j + 1]], beta1 ** (j + 1))] if j + 1 < m else []
    terms = [(state[slot[k]], beta1 ** (j + m - k)) for k in range(j + 1, m)]
    return [(buffer, weight) for buffer, weight in terms if weight > 0]


def to_suffix_sums(closing: list[Tensor], beta1: float) -> None:
    """Convert the gradients of a full block to suffix sums, in place."""
    for k in range(len(closing) - 2, -1, -1):
        weight = beta1 ** (len(closing) - 1 - k)
        torch.add(closing[k + 1], closing[k], alpha=weight, out=closing[k])


def rebuild_sums(state: ParamState, j: int, beta1: float, m: int) -> None:
    """Recompute `back` for a new β1 and convert suffix sums back to gradients."""
    old, slot = state["beta1"], slot_names(m)
    if state["summed"]:
        for k in range(j + 1, m - 1):
            difference = state[slot[k]] - state[slot[k + 1]]
            state[slot[k]] = difference.div_(old ** (m - 1 - k))
        state["summed"] = 0
    state["back"].copy_(state["slot0"])
    for i in range(1, j):
        torch.add(state[slot[i]], state["back"], alpha=beta1, out=state["back"])
