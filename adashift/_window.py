"""The newest m gradients, weighted by β1^i, at a cost that does not grow with m and without drift.

A running sum that adds the newest gradient and subtracts the oldest keeps the rounding error of
every outlier, and inf − inf is NaN for ever. So nothing is subtracted here. Time is cut into blocks
of m steps, and the window is the end of the last block and the start of this one:

    back    Σ β1^(j−i) g_i over this block's gradients 0 … j, grown by one each step
    slot k  of the last block: Σ β1^(m−1−i) g_i over i = k … m−1, a sum from k to the block's end

At position j the window is back + β1^(j+1) · slot (j+1): two buffers are read, whatever m is. The
gradient then takes the place of slot j, which no later step reads. When the block is full its
gradients are turned into sums from the end, in place: m additions in m steps. What has left the
window is in no sum that is read again. At j = 0 slot 0 is all there is of back, and at j = m − 1
nobody will read it: it is not written then.

The sums are right for one β1. When it changes, the gradients of this block, which are still there,
are added up anew, and those of the last block are taken out of their sums; as long as β1 goes on
changing they are left as they are and added up at every step.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from adashift._base import ParamState

Terms = list[tuple[Tensor, float]]

# Sums of a last block can be taken apart again while the smallest weight in them is not smaller.
RECOVERABLE = 1e-3


class WindowPlan(NamedTuple):
    """What a step reads and writes of the window; g itself has the weight 1."""

    earlier: Tensor | None  # this block's sum so far, whose weight is β1
    keep: Tensor | None  # where the sum with g goes
    slot: Tensor | None  # where g goes
    front: Terms  # what the last block still has in the window
    closing: list[Tensor]  # slots 1 … of a full block, to be summed up before front is read


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
    """Make the window ready for g_t; the caller must do as the WindowPlan says."""
    if m == 1:
        return NO_WINDOW
    j, slot, closing = (t - 1) % m, slot_names(m), []
    if t == 1:
        state.update(back=torch.zeros_like(g), beta1=beta1, summed=0)
        state.update({name: torch.zeros_like(g) for name in slot})
    elif j == 0:
        settled = beta1 == state["beta1"] and beta1 ** (m - 1) >= RECOVERABLE
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


def add_gradient(move: WindowPlan, g: Tensor, beta1: float, m: int) -> Terms:
    """Take in g_t; return buffers and coefficients whose sum is m_t (right from t = m on).

    The buffers, of which g is one, must not be changed by the caller.
    """
    to_suffix_sums(move.closing, beta1)
    terms = [(g, 1.0)]
    if move.keep is not None and move.earlier is not None:
        terms = [(torch.add(g, move.earlier, alpha=beta1, out=move.keep), 1.0)]
    elif move.earlier is not None:
        terms += [(move.earlier, beta1)]
    if move.slot is not None:
        move.slot.copy_(g)
    total = total_weight(beta1, m)
    return [(buffer, weight / total) for buffer, weight in terms + move.front]


def previous_block_terms(state: ParamState, t: int, beta1: float, m: int) -> Terms:
    """What of the last block is still in the window."""
    j, slot = (t - 1) % m, slot_names(m)
    if t <= m or beta1 == 0:
        return []
    if state["summed"]:
        return [(state[slot[j + 1]], beta1 ** (j + 1))] if j + 1 < m else []
    terms = [(state[slot[k]], beta1 ** (j + m - k)) for k in range(j + 1, m)]
    return [(buffer, weight) for buffer, weight in terms if weight > 0]


def to_suffix_sums(closing: list[Tensor], beta1: float) -> None:
    """Turn the gradients of a full block into sums from its end."""
    for k in range(len(closing) - 2, -1, -1):
        weight = beta1 ** (len(closing) - 1 - k)
        torch.add(closing[k + 1], closing[k], alpha=weight, out=closing[k])


def rebuild_sums(state: ParamState, j: int, beta1: float, m: int) -> None:
    """Make back for another β1, and take the sums of the last block apart."""
    old, slot = state["beta1"], slot_names(m)
    if state["summed"]:
        for k in range(j + 1, m - 1):
            difference = state[slot[k]] - state[slot[k + 1]]
            state[slot[k]] = difference.div_(old ** (m - 1 - k))
        state["summed"] = 0
    state["back"].copy_(state["slot0"])
    for i in range(1, j):
        torch.add(state[slot[i]], state["back"], alpha=beta1, out=state["back"])
