"""The step of one parameter by torch operations: for every tensor that no kernel takes."""

from math import nan, sqrt

import torch
from torch import Tensor

from adashift._base import ParamGroup, ParamState
from adashift._spatial import phi_of_square
from adashift._state import is_plain
from adashift._window import CORRECTION, WEIGHT, Bound, forget_error, recover_error, total_weight

Moment = tuple[Tensor, float | Tensor]  # the sum of a window, and its total weight


def step_single(p: Tensor, g: Tensor, state: ParamState, group: ParamGroup) -> None:
    """Move p; the host knows t."""
    state["step"] = state["step"].cpu()  # a kernel may have kept it on a GPU
    t, (beta1, beta2) = int(state["step"].add_(1)), map(float, group["betas"])
    moment = window_sum(g, state, t, beta1)
    if t > state["n"]:
        v, correction = shifted_v(state, t, beta2)
        move = move_block if v.dim() == 0 and v.is_cpu else move_tensor
        move(p, moment, v, correction, group)
    state["phi"][t % state["n"]].copy_(phi_of_square(group["phi"], g))


def shifted_v(state: ParamState, t: int, beta2: float) -> tuple[Tensor, Tensor]:
    """Return v_t, which sees g_{t-n} and never g_t, and 1 − β2^(t−n)."""
    correction = state["number"][CORRECTION].mul_(beta2).add_(1 - beta2)
    return state["v"].mul_(beta2).add_(state["phi"][t % state["n"]], alpha=1 - beta2), correction


def window_sum(g: Tensor, state: ParamState, t: int, beta1: float) -> Moment:
    """Take g_t into the window; return m_t times its weight, and the weight."""
    m = state["m"]
    if m < 2:
        return (g, 1.0) if m == 1 else endless_sum(g, state, beta1)
    slots, total = state["slots"], state["sum"]
    if g.is_cpu and is_plain(g):  # elsewhere, reading a number would wait for the device
        recover_error(state)
        bound = Bound(state["number"], t, beta1, m)
        if not bound.sums_again:
            total.mul_(beta1).sub_(slots[t % m], alpha=beta1**m)
            total.add_(slots[t % m].copy_(g))
        bound.advance(g.abs().max().item())
        if not bound.sums_again:
            return total, bound.total
    else:
        forget_error(state)
    slots[t % m].copy_(g)
    return sum_slots(slots, t, beta1, total), total_weight(beta1, m)


def sum_slots(slots: Tensor, t: int, beta1: float, out: Tensor) -> Tensor:
    """Σ_i β1^i g_{t-i}"""
    m = len(slots)
    out.copy_(slots[t % m if beta1 == 0 else (t + 1) % m])
    for k in range(2, m + 1) if beta1 else ():  # the oldest first
        torch.add(slots[(t + k) % m], out, alpha=beta1, out=out)
    return out


def endless_sum(g: Tensor, state: ParamState, beta1: float) -> Moment:
    weight, total = state["number"][WEIGHT].mul_(beta1).add_(1), state["sum"]
    return total.copy_(g) if beta1 == 0 else total.mul_(beta1).add_(g), weight


def move_block(p: Tensor, moment: Moment, v: Tensor, correction: Tensor, group: ParamGroup) -> None:
    """θ −= α m_t / (√v̂ + ε) where v is a number on the host: the step is never stored."""
    (total, weight), alpha, scale = moment, float(group["lr"]), v.item()
    if scale == 0:  # ε alone is no scale of gradients
        return
    root = sqrt(scale / correction.item()) if scale >= 0 else nan
    size = alpha / (root + group["eps"]) / float(weight)
    decay = 1 - alpha * decoupled_decay(group)
    if p.dtype == total.dtype:
        p.mul_(decay) if decay != 1 else None
        p.add_(total, alpha=-size)
    else:
        p.copy_(rounded(p.to(total.dtype).mul_(decay).add_(total, alpha=-size), p.dtype, group))


def move_tensor(
    p: Tensor, moment: Moment, v: Tensor, correction: Tensor, group: ParamGroup
) -> None:
    """The same for v of any shape, on any device."""
    (total, weight), alpha = moment, learning_rate(group)
    step = total / (v / correction).sqrt_().add_(group["eps"]).mul_(weight) * alpha
    if decay := decoupled_decay(group):
        step.add_(alpha * decay * p)
    new = p.to(step.dtype) - torch.where(v == 0, 0.0, step)
    p.copy_(rounded(new, p.dtype, group))


def learning_rate(group: ParamGroup) -> float | Tensor:
    """A tensor is never read on the host, and has no dimension that a step would inherit."""
    lr = group["lr"]
    return lr.reshape(()) if isinstance(lr, Tensor) else float(lr)


def decoupled_decay(group: ParamGroup) -> float:
    return float(group["weight_decay"]) if group["decoupled_weight_decay"] else 0.0


def rounded(x: Tensor, dtype: torch.dtype, group: ParamGroup) -> Tensor:
    """x, whose last bits are rounded up or down by chance if that is asked for."""
    if not (group["stochastic_rounding"] and dtype == torch.bfloat16):
        return x
    x = x.float()  # the state may still be that of a float64 parameter
    noise = torch.randint_like(x, 2**16, dtype=torch.int32)
    found = ((x.view(torch.int32) + noise) & -(2**16)).view(torch.float32)
    return torch.where(x.isfinite(), found, x)


# -- the host reads nothing --------------------------------------------------------------------


def step_capturable(p: Tensor, g: Tensor, state: ParamState, group: ParamGroup) -> None:
    """Move p; t stays on the device, so that a graph can repeat the step.

    Every slot is looked at in every step: the cost grows with m.
    """
    n, m, number = state["n"], state["m"], state["number"]
    state["step"] = state["step"].to(p.device)
    t, (beta1, beta2) = state["step"].add_(1), map(float, group["betas"])
    moment: Moment = g, 1.0
    if m == 0:
        moment = endless_sum(g, state, beta1)
    elif m > 1:
        forget_error(state)
        put(state["slots"], t % m, g)
        moment = sum_by_age(state["slots"], t, beta1, g.dtype), total_weight(beta1, m)
    phi, moves = state["phi"], t > n
    old = sum(torch.where(t % n == k, phi[k], 0.0) for k in range(n))
    put(phi, t % n, phi_of_square(group["phi"], g))
    new = torch.where(moves, beta2 * number[CORRECTION] + (1 - beta2), 0.0)
    correction = number[CORRECTION].copy_(new)
    v = state["v"].copy_(torch.where(moves, beta2 * state["v"] + (1 - beta2) * old, 0.0))
    move_tensor(p, moment, v, torch.where(moves, correction, 1.0), group)


def put(ring: Tensor, place: Tensor, x: Tensor) -> None:
    """ring[place] ← x"""
    for k in range(len(ring)):
        ring[k].copy_(torch.where(place == k, x, ring[k]))


def sum_by_age(slots: Tensor, t: Tensor, beta1: float, dtype: torch.dtype) -> Tensor:
    """Σ_i β1^i g_{t-i}"""
    total: Tensor | float = 0.0
    for k in range(len(slots)):
        weight = torch.full_like(t, beta1, dtype=dtype) ** ((t - k) % len(slots))
        total = total + torch.where(weight > 0, weight * slots[k].to(dtype), 0.0)
    assert isinstance(total, Tensor)
    return total
