"""The update of many parameters at once: few kernel launches, the default on a GPU.

With fused=True a Triton kernel updates each parameter in one pass (adashift/_steps/gpu.py).
"""

import warnings
from collections import defaultdict
from functools import cache
from math import inf
from typing import Any

import torch
from torch import Tensor

from adashift._base import ParamGroup, ParamState
from adashift._spatial import phi_of_square
from adashift._window import WindowPlan, total_weight

Entry = tuple[Tensor, Tensor, ParamState, WindowPlan, int]  # θ, g, state, window plan, t


@cache
def triton_steps() -> Any:
    """Return the module of the Triton kernel, or warn and return None if Triton is missing."""
    try:
        from adashift._steps import gpu
    except ImportError as error:
        warnings.warn(
            f"fused=True needs Triton on this device, but {error}; "
            "using foreach instead: install Triton or drop fused=True",
            stacklevel=2,
        )
        return None
    return gpu


def grouped(entries: list[Entry]) -> list[list[Entry]]:
    """Return lists of entries that share device, dtype, t and the parts of the window plan."""
    lists = defaultdict(list)
    for entry in entries:
        p, g, _, plan, t = entry
        lists[p.device, p.dtype, g.dtype, t, len(plan.front), len(plan.closing)].append(entry)
    return list(lists.values())


def step_foreach(entries: list[Entry], group: ParamGroup) -> None:
    for same in grouped(entries):
        step_list(same, group)


def step_list(entries: list[Entry], group: ParamGroup) -> None:
    ps, gs, states, plans, (t, *_) = map(list, zip(*entries, strict=True))
    (beta1, beta2), n = group["betas"], group["n"]
    total, name = total_weight(beta1, group["m"] or n), f"phi{t % n}"
    to_suffix_sums_foreach([plan.closing for plan in plans], beta1)
    sizes: list[Any] = []
    if t > n:
        vs = [state["v"] for state in states]
        torch._foreach_mul_(vs, beta2)
        torch._foreach_add_(vs, [state[name] for state in states], alpha=1 - beta2)
        sizes = step_sizes(vs, 1 - beta2 ** (t - n), group)
    one_pass = triton_steps() if group["fused"] else None
    if one_pass and all(
        one_pass.triton_supports(p, g, plan, group["phi"]) for p, g, _, plan, _ in entries
    ):
        each = zip(ps, gs, plans, sizes or len(ps) * [None], strict=True)
        decay = 1 - group["lr"] * group["weight_decay"] * group["decoupled_weight_decay"]
        new = [
            one_pass.step_triton(*args, beta1, total, float(decay), group["phi"]) for args in each
        ]
    else:
        terms = add_gradients(gs, plans, beta1, total)
        if sizes:
            apply_steps(ps, terms, sizes, group)
        new = phi_of_squares(gs, group["phi"])
    for state, phi in zip(states, new, strict=True):
        state[name] = phi


def to_suffix_sums_foreach(closing: list[list[Tensor]], beta1: float) -> None:
    """Convert the gradients of full blocks to suffix sums, in place."""
    slots = list(map(list, zip(*closing, strict=True)))
    for k in range(len(slots) - 2, -1, -1):
        torch._foreach_mul_(slots[k], beta1 ** (len(slots) - 1 - k))
        torch._foreach_add_(slots[k], slots[k + 1])


def phi_of_squares(gs: list[Tensor], phi: Any) -> list[Tensor]:
    """Return φ(g²) of each gradient."""
    if phi not in ("max", "mean") or hasattr(gs[0], "placements"):
        return [phi_of_square(phi, g) for g in gs]
    norms = list(torch._foreach_norm(gs, inf if phi == "max" else 2))
    torch._foreach_mul_(norms, norms)
    if phi == "mean":
        torch._foreach_div_(norms, [g.numel() for g in gs])
    return norms


def add_gradients(
    gs: list[Tensor], plans: list[WindowPlan], beta1: float, total: float
) -> list[tuple[list[Tensor], float]]:
    """Add the gradients; return lists of buffers and coefficients whose sum is m_t."""
    parts: dict[str, Any] = {f: [getattr(plan, f) for plan in plans] for f in WindowPlan._fields}
    terms = [(gs, 1.0)]
    if plans[0].keep is not None:
        if plans[0].keep is not plans[0].earlier:
            torch._foreach_copy_(parts["keep"], parts["earlier"])
        torch._foreach_mul_(parts["keep"], beta1)
        torch._foreach_add_(parts["keep"], gs)
        terms = [(parts["keep"], 1.0)]
    elif plans[0].earlier is not None:
        terms += [(parts["earlier"], beta1)]
    if plans[0].slot is not None:
        torch._foreach_copy_(parts["slot"], gs)
    for front in zip(*parts["front"], strict=True):
        terms.append(([buffer for buffer, _ in front], front[0][1]))
    return [(buffers, weight / total) for buffers, weight in terms]


def step_sizes(vs: list[Tensor], correction: float, group: ParamGroup) -> list[Tensor]:
    """Return α / (√v̂ + ε), and 0 where v is still 0."""
    roots = list(torch._foreach_div(vs, correction))
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, group["eps"])
    return [torch.where(v == 0, 0.0, group["lr"] / r) for v, r in zip(vs, roots, strict=True)]


def apply_steps(
    ps: list[Tensor],
    terms: list[tuple[list[Tensor], float]],
    sizes: list[Tensor],
    group: ParamGroup,
) -> None:
    """θ −= size · m_t, one pass for each term of m_t."""
    if group["weight_decay"] and group["decoupled_weight_decay"]:
        rate = group["lr"] * group["weight_decay"]
        torch._foreach_mul_(ps, [1 - torch.where(size == 0, size, rate) for size in sizes])
    for buffers, weight in terms:
        torch._foreach_addcmul_(ps, buffers, sizes, value=-weight)
