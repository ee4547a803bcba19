"""Baselines of the paper that torch.optim does not provide."""

from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from adashift._base import PerParameter, check_betas, check_number
from adashift._spatial import Phi, get_phi, zero_v


class AdamNC(PerParameter):
    """Adam with v_t the average of all squared gradients so far (Reddi et al. 2018).

        m_t     = β1 m_{t-1} + (1 - β1) g_t
        v_t     = (1 - 1/t) v_{t-1} + (1/t) g_t²
        θ_{t+1} = θ_t - lr m_t / (1 - β1^t) / (√v_t + eps)

    β2 is 1 - 1/t and an average needs no bias correction, so the argument is `beta1` instead of
    `betas`. The learning rate is constant; use a scheduler for the α/√t of the convergence proof.

    Example:
        >>> theta = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = AdamNC([theta], lr=0.1)
        >>> (theta**2).sum().backward()
        >>> optimizer.step()
        >>> theta
        Parameter containing:
        tensor([0.9000], requires_grad=True)
    """

    own_options = ("beta1",)

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, beta1: float = 0.9, eps: float = 1e-8
    ) -> None:
        super().__init__(params, dict(lr=lr, beta1=beta1, eps=eps))

    @staticmethod
    def _check(options: dict[str, Any]) -> dict[str, Any]:
        return options | {
            "lr": check_number("lr", options["lr"], 0, inf, 0.001),
            "beta1": check_number("beta1", options["beta1"], 0, 1, 0.9),
            "eps": float(check_number("eps", options["eps"], 0, inf, 1e-8)),
        }

    def _update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        alpha, beta1, eps = group["lr"], group["beta1"], group["eps"]
        if not state:
            state.update(step=0, m=torch.zeros_like(g), v=torch.zeros_like(g))
        state["step"] = t = state["step"] + 1
        state["m"] = m = beta1 * state["m"] + (1 - beta1) * g
        state["v"] = v = (1 - 1 / t) * state["v"] + (1 / t) * g**2
        p.sub_(alpha * (m / (1 - beta1**t)) / (v.sqrt() + eps))


class SpatialOnly(PerParameter):
    """Adam with v_t computed from φ(g_t²): AdaShift's φ without its shift.

        m_t     = β1 m_{t-1} + (1 - β1) g_t
        v_t     = β2 v_{t-1} + (1 - β2) φ(g_t²)
        θ_{t+1} = θ_t - lr m_t / (1 - β1^t) / (√(v_t / (1 - β2^t)) + eps)

    phi is as for AdaShift; "none" gives Adam.

    Example:
        >>> theta = torch.nn.Parameter(torch.tensor([1.0, 0.5]))
        >>> optimizer = SpatialOnly([theta], lr=0.1)
        >>> (theta**2).sum().backward()
        >>> optimizer.step()
        >>> theta
        Parameter containing:
        tensor([0.9000, 0.4500], requires_grad=True)
    """

    own_options = ("betas", "phi")
    foreign_options = ("n",)  # AdaShift has both of ours

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        phi: Phi = "max",
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, phi=phi))

    @staticmethod
    def _check(options: dict[str, Any]) -> dict[str, Any]:
        get_phi(options["phi"])
        return options | {
            "lr": check_number("lr", options["lr"], 0, inf, 0.01),
            "betas": check_betas(options["betas"]),
            "eps": float(check_number("eps", options["eps"], 0, inf, 1e-8)),
        }

    def _update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        (beta1, beta2), phi = group["betas"], get_phi(group["phi"])
        if not state:
            state.update(step=0, m=torch.zeros_like(g), v=zero_v(group["phi"], g))
        state["step"] = t = state["step"] + 1
        state["m"] = m = beta1 * state["m"] + (1 - beta1) * g
        state["v"] = v = beta2 * state["v"] + (1 - beta2) * phi(g**2)
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        p.sub_(group["lr"] * m_hat / (v_hat.sqrt() + group["eps"]))
