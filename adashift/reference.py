"""The algorithm of the paper's appendix, one line per equation: a slow float64 test reference.

Two mistakes of the printed algorithm are fixed. W is divided by Σ β1^i (printed: Σ β1^n), and
θ_{t+1} is computed from θ_t and g_t = ∇f_t(θ_t) (printed: θ_t from θ_{t-1}), where v = 0, p = 1 and
θ stay unchanged for t <= n. One condition is added: where v_t = 0 there is no update, because
dividing by ε alone would give huge steps.
"""

from collections import deque
from math import inf

import torch
from torch import Tensor

from adashift._spatial import Phi, get_phi


class AdaShiftReference:
    """AdaShift on one block: each gradient passed to `step` returns the updated parameter.

    >>> rule = AdaShiftReference(torch.zeros(1), lr=0.1, n=1)
    >>> [rule.step(torch.ones(1)).item() for t in (1, 2)]
    [0.0, -0.09999999900000002]
    """

    def __init__(
        self,
        theta: Tensor,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        n: int = 10,
        m: float | None = None,
        phi: Phi = "max",
    ) -> None:
        self.theta = theta.detach().double().clone()
        self.alpha, self.eps, self.phi = lr, eps, get_phi(phi)
        self.beta1, self.beta2 = betas
        self.n, self.m = n, n if m is None else m
        self.v = torch.zeros((), dtype=torch.float64)
        self.p = 1.0
        self.Q: deque[Tensor] = deque()
        self.S, self.W = torch.zeros((), dtype=torch.float64), 0.0  # of an endless window

    def first_moment(self, m: int) -> Tensor:
        newest = list(self.Q)[self.n - m :]  # g_{t-m+1}, ..., g_t
        W = [self.beta1**i for i in reversed(range(m))]
        terms = [w * g_i for w, g_i in zip(W, newest, strict=True) if w]  # 0 · inf would be NaN
        return torch.stack(terms).sum(0) / sum(W)

    def step(self, g: Tensor) -> Tensor:
        """Return θ_{t+1} for g_t."""
        self.Q.append(g.detach().double().clone())  # Push(Q, g_t)
        self.S = self.beta1 * self.S + self.Q[-1] if self.beta1 else self.Q[-1]
        self.W = self.beta1 * self.W + 1
        if len(self.Q) <= self.n:  # t <= n
            return self.theta
        g_shifted = self.Q.popleft()  # g_{t-n} = Pop(Q)
        m_t = self.S / self.W if self.m == inf else self.first_moment(int(self.m))
        self.p = self.p * self.beta2
        self.v = self.beta2 * self.v + (1 - self.beta2) * self.phi(g_shifted**2)
        step = self.alpha / ((self.v / (1 - self.p)).sqrt() + self.eps) * m_t
        self.theta = self.theta - torch.where(self.v == 0, 0.0, step)
        return self.theta
