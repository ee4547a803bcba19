"""The state of a parameter: what it holds, where it is in memory, and whether it fits.

step          t, the number of gradients so far
n, m, kind    the options that decide the rest: m = 0 is a window without end, kind is φ
sum           Σ β1^i g_{t-i}, unless m = 1
slots         the newest m gradients, for 1 < m < inf
v, phi        v_t, and φ(g²) of the last n steps
number        CORRECTION, WEIGHT or ERROR, BETA1, and m PEAKS: see _window.py
"""

from math import inf

import torch
from torch import Tensor

from adashift._base import ParamGroup, ParamState, state_dtype_of
from adashift._spatial import PHI, zero_v
from adashift._window import PEAKS, window_length

TENSORS = ("sum", "slots", "v", "phi", "number", "step")
KINDS = [*PHI, "a function"]
FLAT = ("_is_flat_param", "_fsdp_flattened")  # FSDP1: shards of many parameters in one tensor
PLACE = {"sum": 1, "slots": 2}  # see zeros_beside


def is_plain(x: Tensor) -> bool:
    """Whether x is a tensor with memory of its own, and not a DTensor or another wrapper."""
    return type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


def is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(x))


def zeros_beside(p: Tensor, dtype: torch.dtype, count: int = 0, place: int = 0) -> Tensor:
    """Zeros of the shape and memory layout of p, or a stack of `count` of them.

    Large buffers start at different places of a memory page (`place` 0 to 3): if all of them
    started at the same one, a step that goes through them together would be slower.
    """
    if not (is_plain(p) and is_dense(p)):
        one = torch.zeros_like(p, dtype=dtype)
        return torch.stack([one] * count) if count else one
    size, stride = tuple(p.shape), p.stride()
    if count:
        size, stride = (count, *size), (p.numel(), *stride)
    elements = p.numel() * max(count, 1)
    start = place * 1024 // dtype.itemsize if elements * dtype.itemsize >= 2**20 else 0
    return p.new_zeros(start + elements, dtype=dtype).as_strided(size, stride, start)


def compact(x: Tensor) -> Tensor:
    """x with its parts one after the other; foreach may have put them between those of others."""
    size = x[0].numel()
    if x.stride(0) == size:
        return x
    return x.new_empty(x.numel()).as_strided(x.shape, (size, *x.stride()[1:])).copy_(x)


def options_of(group: ParamGroup) -> dict[str, int]:
    """The options that decide what the state holds, as numbers that every checkpoint can keep."""
    phi = group["phi"]
    kind = KINDS.index(phi if isinstance(phi, str) else KINDS[-1])
    return {"n": group["n"], "m": window_length(group), "kind": kind}


def shapes_of(theta: Tensor, n: int, m: int, kind: int) -> dict[str, tuple[int, ...]]:
    """Shapes that the kernels trust; a function φ, which no kernel takes, decides about v."""
    whole = tuple(theta.shape)
    shapes = {"sum": whole, "slots": (m, *whole), "number": (PEAKS + (m if m > 1 else 0),)}
    row = (*whole[:1], *[1] * (len(whole) - 1))
    v = {"max": (), "mean": (), "row": row, "none": whole}.get(KINDS[kind])
    return shapes if v is None else shapes | {"v": v, "phi": (n, *v)}


def new_state(theta: Tensor, group: ParamGroup) -> ParamState:
    """Create every key at once: distributed checkpoints load only existing keys."""
    options, dtype, device = options_of(group), state_dtype_of(theta), theta.device
    n, m = options["n"], options["m"]
    v = zero_v(group["phi"], torch.zeros_like(theta, dtype=dtype))
    elementwise = v.shape == theta.shape and v.dim() > 0
    state = {
        "step": torch.zeros((), dtype=torch.int64),
        **options,
        "v": zeros_beside(theta, dtype) if elementwise else v,
        "phi": zeros_beside(theta, dtype, n) if elementwise else torch.stack([v] * n),
        "number": torch.zeros(shapes_of(theta, **options)["number"], dtype=dtype, device=device),
    }
    if m != 1:
        state["sum"] = zeros_beside(theta, dtype, place=PLACE["sum"])
    if m > 1:
        slot_dtype = group["state_dtype"] or dtype
        state["slots"] = zeros_beside(theta, slot_dtype, m, PLACE["slots"])
    return state


def restored(theta: Tensor, name: str, value: Tensor) -> Tensor:
    """A copy of a part of a checkpoint, where `new_state` would have put it."""
    if name == "step":
        return value.to("cpu", copy=True)
    if not is_plain(theta) or value.shape[value.dim() - theta.dim() :] != theta.shape:
        return value.to(theta.device, copy=True)
    count = len(value) if value.dim() > theta.dim() else 0
    return zeros_beside(theta, value.dtype, count, PLACE.get(name, 0)).copy_(value)


def check_state(theta: Tensor, state: ParamState, group: ParamGroup) -> None:
    """Raise RuntimeError if this is not the state of this parameter with these options."""
    if "number" not in state:
        raise RuntimeError(
            f"the state has {', '.join(map(str, state))}: it is that of another optimizer or of an "
            "earlier version; start with a new AdaShift"
        )
    for name, new in options_of(group).items():
        if (old := state[name]) != new:
            name = "phi" if name == "kind" else name
            was, now = (KINDS[x] if name == "phi" else x or inf for x in (old, new))
            raise RuntimeError(
                f"{name} changed from {was} to {now} during training; the stored state needs "
                f"{name}={was}: restore it, or create a new AdaShift, which starts with n steps "
                "without updates"
            )
    shapes = shapes_of(theta, state["n"], state["m"], state["kind"])
    for name, x in ((name, state[name]) for name in shapes if name in state):
        if x.device != theta.device:
            raise RuntimeError(f"state {name!r} is on {x.device}, its parameter on {theta.device}")
        if tuple(x.shape) != shapes[name]:
            raise RuntimeError(
                f"state {name!r} has shape {tuple(x.shape)}, but a parameter of shape "
                f"{tuple(theta.shape)} needs {shapes[name]}: build a new AdaShift after a change "
                "of shape"
            )


def check_parameter(p: Tensor, group: ParamGroup) -> None:
    """Raise RuntimeError if the blocks of p, or its gradient, are not those that a step expects."""
    if group["phi"] != "none" and any(getattr(p, mark, False) for mark in FLAT):
        raise RuntimeError(
            "a parameter is flattened by FullyShardedDataParallel, so phi would see shards and "
            "not blocks: use fully_shard (FSDP2), or phi='none'"
        )
    g = p.grad
    assert g is not None
    if (g.shape, g.device) != (p.shape, p.device):
        raise RuntimeError(
            f"a gradient has shape {tuple(g.shape)} on {g.device}, its parameter {tuple(p.shape)} "
            f"on {p.device}: call zero_grad() after replacing p.data"
        )
