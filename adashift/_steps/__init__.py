"""One module for each way to compute an AdaShift step, all sharing the same state and window.

A module here takes parameters whose options are already checked and updates them. Options, the
choice between the ways and the equations' documentation belong in adashift/optimizer.py. This
file has what the kernels of a CPU and of a GPU are given: a row for each parameter, and the rule.
"""

from typing import Any

from torch import Tensor

from adashift._base import ParamGroup, ParamState, state_dtype_of
from adashift._state import TENSORS, compact, is_dense, is_plain, options_of
from adashift._window import total_weight


def fits_kernels(p: Tensor, state: ParamState, group: ParamGroup) -> bool:
    """Whether parameter, gradient and state lie in memory as the kernels expect them."""
    g, phi, row = p.grad, group["phi"], p.stride(0) if p.dim() else 1
    if not (is_plain(p) and is_dense(p) and isinstance(phi, str)):
        return False
    rows_apart = phi == "row" and p.dim() > 1 and row * p.shape[0] != p.numel()
    slot_dtype = group["state_dtype"] or state_dtype_of(p)
    names = ("sum", "slots", "v", "phi") if phi == "none" else ("sum", "slots")
    kept = [state[name] for name in names if name in state]
    assert g is not None
    return (
        (g.dtype, g.stride()) == (p.dtype, p.stride())
        and not g.is_neg()  # a sign that is not in memory
        and not rows_apart
        and state["number"].dtype == state_dtype_of(p)  # a checkpoint keeps its own
        and ("slots" not in state or state["slots"].dtype == slot_dtype)
        and all(x.stride()[x.dim() - p.dim() :] == p.stride() for x in kept)
    )


def address_of(x: Tensor | None) -> int:
    return x.data_ptr() if x is not None else 0


def rows_of(p: Tensor, group: ParamGroup) -> int:
    """The number of blocks that have a v of their own, as far as kernels must know."""
    return p.shape[0] if group["phi"] == "row" and p.dim() else 1


def row_of(p: Tensor, state: ParamState, rows: int, key: int) -> list[int]:
    """What the kernels read of a parameter; the addresses of gradients follow in every step.

    The noise of stochastic rounding depends on t and `key`, the place in the table, and not on a
    random generator: replicas of a model must round alike, whatever their seeds are.
    """
    state |= {name: compact(state[name]) for name in ("slots", "phi", "number") if name in state}
    kept = [address_of(state.get(name)) for name in TENSORS]
    return [address_of(p), *kept, p.numel(), rows, key]


def rule_of(group: ParamGroup, lr: float) -> dict[str, Any]:
    """The numbers of a step, which may change from one to the next."""
    (beta1, beta2), options = map(float, group["betas"]), options_of(group)
    decay, decoupled = group["weight_decay"], group["decoupled_weight_decay"]
    return {
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "eps": float(group["eps"]),
        "decay": decay if decoupled else 0.0,
        "coupled": 0.0 if decoupled else decay,
        "sign": -1.0 if group["maximize"] else 1.0,
        "total": total_weight(beta1, options["m"]),
        "last": beta1 ** options["m"],
        **options,
    }
