"""The window of the first moment: the newest m gradients, weighted by β1^i.

The m slots of a parameter hold its newest gradients, and a running sum follows them:

    S_t = β1 S_{t-1} + g_t − β1^m g_{t-m}          m_t = S_t / W,  W = Σ_{i<m} β1^i

This reads and writes as much as Adam does, whatever m is. Alone it would keep the rounding error
of every outlier, and inf − inf is NaN forever. So each parameter has a bound e of that error.
Let u be the unit of rounding, G the largest |g| in the window, and G⁺ that of the window and the
gradient that leaves it. |S| ≤ W G⁺, and a step rounds three times:

    e_t = β1 e_{t-1} + 3u (β1 W + 1 + β1^m) G⁺ = β1 e_{t-1} + 3u (W + 2 β1^m) G⁺

If e_t would exceed 25u W² G, or is not finite, or β1 has changed, S_t is summed again from the
slots, from the oldest to the newest, which rounds twice for each: e_t = 2u W² G. So at every step

    |error of m_t| ≤ 25u W G

which is 1e-5 of the largest gradient in the window for float32, β1 = 0.9 and m = 10. The decision
is made before g_t is known, with G taken over the other gradients: a larger g_t adds more to the
right of the comparison than to the left. Gradients of about one size never need it.

m = inf keeps no slots: S_t = β1 S_{t-1} + g_t and W_t = β1 W_{t-1} + 1.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import inf, isnan, nan

import torch
from torch import Tensor

from adashift._base import ParamGroup, ParamState

NUMBERS = range(4)  # places in state["number"]; m peaks follow
CORRECTION, WEIGHT, BETA1, PEAKS = NUMBERS
ERROR = WEIGHT  # a window with an end has no weight to follow, one without no error to bound
UNKNOWN = -1.0  # the error after a step without a running sum; −k: k − 1 peaks are known again


@lru_cache(64)
def total_weight(beta1: float, m: int) -> float:
    """Σ_{i<m} β1^i

    >>> total_weight(0.5, 3)
    1.75
    """
    return sum(beta1**i for i in range(m))


def window_length(group: ParamGroup) -> int:
    """m; 0 stands for a window without end."""
    m = group["m"] or group["n"]
    return 0 if m == inf else int(m)


def largest(values: Sequence[float]) -> float:
    """The largest number, or NaN if there is one."""
    return nan if any(map(isnan, values)) else max(values, default=0.0)


class Bound:
    """The bound of one parameter's sum before step t, read from state["number"]."""

    def __init__(self, number: Tensor, t: int, beta1: float, m: int) -> None:
        _, error, last_beta1, *peaks = number.tolist()
        self.number, self.t, self.beta1, self.m = number, t, beta1, m
        self.total, self.unit = total_weight(beta1, m), torch.finfo(number.dtype).eps / 2
        self.leaving = peaks.pop(t % m)
        self.peak = largest(peaks)
        error = beta1 * error + self.rounding(self.peak)
        same = beta1 != 0 and last_beta1 == torch.tensor(beta1, dtype=number.dtype).item()
        most = 25 * self.unit * self.total**2 * self.peak
        self.sums_again = not (same and error < inf and error <= most)

    def rounding(self, peak: float) -> float:
        return 3 * self.unit * (self.total + 2 * self.beta1**self.m) * largest([peak, self.leaving])

    def advance(self, newest: float) -> None:
        """Note the largest |g_t|, and the error after the step."""
        peak = largest([self.peak, newest])
        error = 2 * self.unit * self.total**2 * peak
        if not self.sums_again:
            error = self.beta1 * self.number[ERROR].item() + self.rounding(peak)
        self.number[ERROR] = error * (1 + 4 * self.unit)
        self.number[BETA1] = self.beta1
        self.number[PEAKS + self.t % self.m] = newest


def forget_error(state: ParamState) -> None:
    """Let a way with a running sum begin with a sum over all slots, whose sizes it must look up."""
    if "slots" in state:
        state["number"][ERROR] = UNKNOWN


def recover_error(state: ParamState) -> None:
    """Undo `forget_error`: find the largest gradient of every slot."""
    if "slots" in state and state["number"][ERROR] < 0:
        state["number"][PEAKS:] = state["slots"].flatten(1).abs().amax(1)
        state["number"][ERROR] = inf
