"""The newest m gradients, weighted by β1^i, at a cost that does not grow with m and without drift.

A running sum that adds the newest gradient and subtracts the oldest keeps the rounding error of
every outlier, and inf − inf is NaN for ever. So nothing is subtracted here. Time is cut into blocks
of m steps, and the window is the end of the last block and the start of this one:

    back    Σ β1^(j−i) g_i over this block's gradients 0 … j, grown by one each step
    slot k  of the last block: Σ β1^(m−1−i) g_i over i = k … m−1, a sum from k to the block's end

At position j the window is back + β1^(j+1) · slot (j+1): two buffers are read, whatever m is. The
gradient then takes the place of slot j, which no later step reads. When the block is full its
gradients are turned into sums from the end, in place: m additions in m steps. What has left the
window is in no sum that is read again.

The sums are right for one β1. When it changes, the gradients of this block, which are still there,
are added up anew, and those of the last block are taken out of their sums; as long as β1 goes on
changing they are left as they are and added up at every step.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]
Terms = list[tuple[Tensor, float]]

# Sums of a last block can be taken apart again while the smallest weight in them is not smaller.
RECOVERABLE = 1e-3


@cache
def total_weight(beta1: float, m: int) -> float:
    """Σ_{i<m} β1^i

    >>> total_weight(0.5, 3)
    1.75
    """
    return sum(beta1**i for i in range(m))


def push(state: State, g: Tensor, t: int, beta1: float, m: int) -> Terms:
    """Take in g_t; return buffers and coefficients whose sum is m_t (right from t = m on).

    g is read now and its values are kept; the buffers must not be changed by the caller.
    """
    if m == 1:
        return [(g, 1.0)]
    j = (t - 1) % m
    if t == 1:
        state.update(back=torch.zeros_like(g), beta1=beta1, summed=0)
        state.update({f"slot{k}": torch.zeros_like(g) for k in range(m)})
    elif j == 0:
        close_block(state, beta1, m)
    elif beta1 != state["beta1"]:
        rebase(state, j, beta1, m)
    state["beta1"] = beta1
    if j == 0 or beta1 == 0:
        state["back"].copy_(g)  # 0 · inf would be NaN
    else:
        scale_and_add(state["back"], beta1, g)
    state[f"slot{j}"].copy_(g)
    terms = [(state["back"], 1.0)] + (front(state, j, beta1, m) if t > m else [])
    total = total_weight(beta1, m)
    return [(buffer, weight / total) for buffer, weight in terms if weight > 0]


def front(state: State, j: int, beta1: float, m: int) -> Terms:
    """What of the last block is still in the window."""
    if state["summed"]:
        return [(state[f"slot{j + 1}"], beta1 ** (j + 1))] if j + 1 < m else []
    return [(state[f"slot{k}"], beta1 ** (j + m - k)) for k in range(j + 1, m)]


def close_block(state: State, beta1: float, m: int) -> None:
    """Turn the full block's gradients into sums from its end, if β1 has come to rest."""
    state["summed"] = int(beta1 == state["beta1"] and beta1 ** (m - 1) >= RECOVERABLE)
    if state["summed"]:
        for k in range(m - 2, 0, -1):
            scale_and_add(state[f"slot{k}"], beta1 ** (m - 1 - k), state[f"slot{k + 1}"])


def rebase(state: State, j: int, beta1: float, m: int) -> None:
    """Make back for another β1, and take the sums of the last block apart."""
    old = state["beta1"]
    if state["summed"]:
        for k in range(j + 1, m - 1):
            difference = state[f"slot{k}"] - state[f"slot{k + 1}"]
            state[f"slot{k}"] = difference.div_(old ** (m - 1 - k))
        state["summed"] = 0
    state["back"].copy_(state["slot0"])
    for i in range(1, j):
        scale_and_add(state["back"], beta1, state[f"slot{i}"])


def scale_and_add(x: Tensor, factor: float, y: Tensor) -> None:
    """x ← factor · x + y, in one pass over memory."""
    torch.add(y, x, alpha=factor, out=x)
