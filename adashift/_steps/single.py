"""The update of one parameter by plain torch operations: the default on a CPU."""

import math

import torch
from torch import Tensor

from adashift._base import ParamGroup, ParamState
from adashift._spatial import phi_of_square
from adashift._window import Terms, WindowPlan, add_gradient


def step_single(
    p: Tensor, g: Tensor, state: ParamState, plan: WindowPlan, t: int, group: ParamGroup
) -> None:
    """Update one parameter with plain torch operations."""
    n, (beta1, beta2), phi = group["n"], group["betas"], group["phi"]
    terms = add_gradient(plan, g, beta1, group["m"] or n)
    phi_old = state[f"phi{t % n}"]  # φ(g_{t-n}²)
    state[f"phi{t % n}"] = phi_of_square(phi, g)
    if t > n:
        by = step_with_scalar_v if is_cpu_scalar(phi_old) else step_with_tensor_v
        by(p, terms, state, phi_old, 1 - beta2 ** (t - n), group)


def is_cpu_scalar(x: Tensor) -> bool:
    """Return whether reading x is cheap; on a GPU it would synchronize."""
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
    """θ −= α m_t / (√v̂ + ε) for a scalar v, without temporary tensors for m_t or the step."""
    alpha, beta2 = float(group["lr"]), group["betas"][1]
    v = beta2 * state["v"].item() + (1 - beta2) * phi_old.item()  # sees g_{t-n}, never g_t
    state["v"].fill_(v)
    if v == 0:  # no gradient has reached v yet; NaN continues
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
    """The same for a v of any shape, or where reading v would synchronize."""
    alpha, beta2 = group["lr"], group["betas"][1]
    v = state["v"].mul_(beta2).add_(phi_old, alpha=1 - beta2)
    step = weighted_sum(terms).div_((v / correction).sqrt_().add_(group["eps"])).mul_(alpha)
    if group["weight_decay"] and group["decoupled_weight_decay"]:
        step.add_(alpha * group["weight_decay"] * p)
    p.sub_(torch.where(v == 0, 0.0, step))
