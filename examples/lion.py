"""An example of a custom optimizer; with conf/optimizer/lion.yaml it can be added to any figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023: a step of one size, by the sign of a mean of gradient and momentum.

    θ_t = θ_{t-1} - lr (sign(β1 m_{t-1} + (1 - β1) g_t) + weight_decay θ_{t-1})
    m_t = β2 m_{t-1} + (1 - β2) g_t
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(torch.lerp(m, p.grad, 1 - beta1).sign(), alpha=group["lr"])
                m.lerp_(p.grad, 1 - beta2)
        return loss
