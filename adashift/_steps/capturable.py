"""The update without host values or branches that depend on t, for CUDA graphs and torch.compile.

A graph repeats the same operations on the same memory. Therefore t is a tensor, a gradient is
stored by a masked write to every slot, and the window is summed at every step, at a cost that grows
with m.
"""

import math

import torch
from torch import Tensor

from adashift._base import ParamGroup, ParamState
from adashift._spatial import phi_of_square, zero_v


def key_names(start: str, count: int) -> list[str]:
    return [f"{start}{k}" for k in range(count)]


def initial_state(g: Tensor, group: ParamGroup) -> ParamState:
    n, m = group["n"], group["m"] or group["n"]
    v = zero_v(group["phi"], g)
    state: ParamState = {"step": torch.zeros((), dtype=torch.float32, device=g.device), "v": v}
    state |= {name: torch.zeros_like(v) for name in key_names("phi", n)}
    return state | {name: torch.zeros_like(g) for name in key_names("slot", m if m > 1 else 0)}


def write_at(state: ParamState, places: list[str], place: Tensor, x: Tensor) -> None:
    """state[places[place]] ← x"""
    for k, name in enumerate(places):
        state[name].copy_(torch.where(place == k, x, state[name]))


def first_moment(state: ParamState, g: Tensor, beta1: float, m: int) -> Tensor:
    if m == 1:
        return g
    j, slots = (state["step"] - 1) % m, key_names("slot", m)
    write_at(state, slots, j, g)
    weighted = torch.zeros_like(g)
    for k, name in enumerate(slots):
        weight = torch.full_like(j, beta1, dtype=g.dtype) ** ((j - k) % m)
        weighted += torch.where(weight > 0, weight * state[name], 0.0)
    return weighted / sum(beta1**i for i in range(m))


def step_capturable(p: Tensor, g: Tensor, state: ParamState, group: ParamGroup) -> None:
    """Update one parameter without reading anything on the host."""
    n, (beta1, beta2), alpha = group["n"], group["betas"], group["lr"]
    state["step"] += 1
    t = state["step"]
    m = first_moment(state, g, beta1, group["m"] or n)
    phis = key_names("phi", n)
    old = sum(torch.where(t % n == k, state[name], 0.0) for k, name in enumerate(phis))
    write_at(state, phis, t % n, phi_of_square(group["phi"], g))
    v = state["v"].copy_(torch.where(t > n, beta2 * state["v"] + (1 - beta2) * old, state["v"]))
    past = (t - n).clamp(min=1).to(v.dtype)
    correction = -torch.expm1(past * (math.log(beta2) if beta2 else -math.inf))  # 1 - β2^(t-n)
    step = alpha * m / ((v / correction).sqrt() + group["eps"])
    if group["weight_decay"] and group["decoupled_weight_decay"]:
        step = step + alpha * group["weight_decay"] * p
    p.sub_(torch.where((t > n) & (v != 0), step, 0.0))
