"""The update of one parameter by plain torch operations: the default on a CPU."""

import math

import torch
from torch import Tensor

from adashift._base import ParamGroup, ParamState
from adashift._spatial import phi_of_square
from adashift._window import Terms, WindowPlan, add_gradient


def step_single(
    p: Tensor, g: Tensor, state: ParamState, move: WindowPlan, t: int, group: ParamGroup
) -> None:
    """One parameter's step by plain torch operations."""
    n, (beta1, beta2), phi = group["n"], group["betas"], group["phi"]
    terms = add_gradient(move, g, beta1, group["m"] or n)
    phi_old = state[f"phi{t % n}"]  # φ(g_{t-n}²): all that v needs of an old gradient
    state[f"phi{t % n}"] = phi_of_square(phi, g)
    if t > n:
        by = step_with_scalar_v if is_cpu_scalar(phi_old) else step_with_tensor_v
        by(p, terms, state, phi_old, 1 - beta2 ** (t - n), group)


def is_cpu_scalar(x: Tensor) -> bool:
    """Whether reading x is cheap; on a GPU it would wait for all that is under way."""
    return x.dim() == 0 and x.device.type == "cpu"


def weighted_sum(terms: Terms) -> Tensor:
    (buffer, weight), *others = terms
    m = weight * buffer
    for buffer, weight in others:
        m.add_(buffer, alpha=weight)
    return m


def step_with_scalar_v(
    p: Tensor,
    terms: Terms,
    state: ParamState,
    phi_old: Tensor,
    correction: float,
    group: ParamGroup,
) -> None:
    """θ −= α m_t / (√v̂ + ε) where v is one number: neither m_t nor the step is ever made."""
    alpha, beta2 = float(group["lr"]), group["betas"][1]
    v = beta2 * state["v"].item() + (1 - beta2) * phi_old.item()  # sees g_{t-n}, never g_t
    state["v"].fill_(v)
    if v == 0:  # no scale of gradients yet, and ε alone is none; NaN goes on
        return
    if group["weight_decay"] and group["decoupled_weight_decay"]:
        p.mul_(1 - alpha * group["weight_decay"])
    step_size = alpha / (math.sqrt(v / correction) + group["eps"])
    if p.dtype != terms[0][0].dtype:  # half precision: round once
        terms = [(weighted_sum(terms), 1.0)]
    for buffer, weight in terms:
        p.add_(buffer, alpha=-step_size * weight)


def step_with_tensor_v(
    p: Tensor,
    terms: Terms,
    state: ParamState,
    phi_old: Tensor,
    correction: float,
    group: ParamGroup,
) -> None:
    """The same where v is a tensor of any shape, or where reading it would be dear."""
    alpha, beta2 = group["lr"], group["betas"][1]
    v = state["v"].mul_(beta2).add_(phi_old, alpha=1 - beta2)
    step = weighted_sum(terms).div_((v / correction).sqrt_().add_(group["eps"])).mul_(alpha)
    if group["weight_decay"] and group["decoupled_weight_decay"]:
        step.add_(alpha * group["weight_decay"] * p)
    p.sub_(torch.where(v == 0, 0.0, step))
