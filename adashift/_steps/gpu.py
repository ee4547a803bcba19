"""AdaShift's step on a GPU in two launches: which parameters they take, and the table they read.

The kernels are in kernel.py, which is imported only where they are used: it needs Triton.
"""

import warnings
from functools import cache
from itertools import accumulate
from math import inf
from typing import Any

import torch
from torch import Tensor

from adashift._base import ParamGroup, ParamState
from adashift._spatial import PHI
from adashift._window import compact, is_dense, is_plain, total_weight

TILE, LANES, WARPS = 1024, 1024, 8  # elements, and partial results, that a program takes at a time
DEVICES = ("cuda",)  # torch uses this name for ROCm too
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

captured: list[Tensor] = []  # what CUDA graphs read; they may be replayed until the process ends


# -- which parameters it takes -----------------------------------------------------------------


@cache
def available(device: torch.device) -> bool:
    """Whether Triton can run a kernel here, and passes a float64 to it unchanged."""
    try:
        from adashift._steps import kernel

        out = torch.zeros((), dtype=torch.float64, device=device)
        with torch.cuda.device_of(out):
            kernel.write_number[(1,)](0.1, out)
        if out.item() != 0.1:
            raise RuntimeError("this version rounds float64 arguments to float32")
        return True
    except Exception as error:  # no Triton, no C compiler, an old GPU: they share no other class
        reason = (str(error).splitlines() or ["no reason given"])[0]
        warnings.warn(
            f"AdaShift's kernels need Triton, which fails on {device}: {type(error).__name__}: "
            f"{reason}; a slower path is used: install Triton and a C compiler, or set fused=False",
            stacklevel=2,
        )
        return False


def supports(p: Tensor, group: ParamGroup) -> bool:
    """Whether there is a kernel for this parameter."""
    known = p.device.type in DEVICES and p.dtype in DTYPES and isinstance(group["phi"], str)
    return known and is_plain(p) and is_dense(p) and available(p.device)


# -- the table ---------------------------------------------------------------------------------


class JobTable:
    """The parameters of one group, device and dtype that the kernels take, as rows of addresses.

    A table is kept as long as its parameters and their state stay where they are; from step to step
    only the addresses of gradients change.
    """

    def __init__(self, params: list[Tensor], states: list[ParamState], group: ParamGroup) -> None:
        self.params, self.held = params, states  # what the rows have addresses of
        self.device, self.addresses = params[0].device, [address_of(p.grad) for p in params]
        self.variant = variant_of(params[0], states[0], group)
        parts = table_parts(params, states, group["phi"])
        parts["gradients"] = torch.tensor(self.addresses)
        self.memory = upload(torch.cat([*parts.values()]), self.device)  # all in one copy
        shares = self.memory.split([len(part) for part in parts.values()])
        self.part = dict(zip(parts, shares, strict=True))
        self.part["tops"] = self.part["tops"].view(states[0]["number"].dtype)
        self.part["squares"] = self.part["squares"].view(torch.float64)

    def gradients(self) -> Tensor:
        """The addresses of the gradients on the device, copied there if they have changed."""
        addresses, table = [address_of(p.grad) for p in self.params], self.part["gradients"]
        if addresses != self.addresses:
            table = upload(torch.tensor(addresses), self.device)
        if is_capturing(self.device):
            captured.extend([self.memory, table])
        else:  # a copy in a graph has not been made yet
            self.addresses, self.part["gradients"] = addresses, table
        return table

    def step(self, group: ParamGroup) -> None:
        from adashift._steps import kernel

        values = self.part | self.variant | rule_of(group, self.device)
        with torch.cuda.device_of(self.memory):
            values["gradients"] = self.gradients()
            launch(kernel.step_tiles, len(self.part["tiles"]), values)
            launch(kernel.finish_step, len(self.part["blocks"]), values)
        torch.autograd.graph.increment_version(self.params)


def table_parts(params: list[Tensor], states: list[ParamState], phi: str) -> dict[str, Tensor]:
    """What the kernels find on the device, as integers; partial results start with 0."""
    rows = [p.shape[0] if phi == "row" and p.dim() else 1 for p in params]
    tiles = [-(-p.numel() // TILE) for p in params]
    partials = [count + row - 1 for count, row in zip(tiles, rows, strict=True)]
    blocks = [-(-row // LANES) for row in rows]
    firsts = zip(*(accumulate(x, initial=0) for x in (tiles, partials, blocks)), strict=True)
    jobs = enumerate(zip(params, states, rows, firsts, strict=False))
    table = [[*job(p, state, row), key, *first] for key, (p, state, row, first) in jobs]
    each, zeros = torch.arange(len(params)), torch.zeros(sum(partials), dtype=torch.int64)
    return {
        "table": torch.tensor(table).flatten(),
        "tiles": each.repeat_interleave(torch.tensor(tiles)),  # to which parameter each belongs
        "blocks": each.repeat_interleave(torch.tensor(blocks)),
        "tops": zeros,
        "squares": zeros,
        "plan": torch.zeros(2 * len(params), dtype=torch.int64),
    }


def job(p: Tensor, state: ParamState, rows: int) -> list[int]:
    """The first columns of a parameter's row; its clock moves to the device."""
    state["step"] = state["step"].to(p.device, non_blocking=True)
    state |= {name: compact(state[name]) for name in ("slots", "phi", "number") if name in state}
    names = ("sum", "slots", "v", "phi", "number", "step")
    return [address_of(p), *(address_of(state.get(name)) for name in names), p.numel(), rows]


def address_of(x: Tensor | None) -> int:
    return x.data_ptr() if x is not None else 0


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting; in a graph, every replay copies again."""
    host = host.pin_memory() if device.type == "cuda" else host
    captured.extend([host] * is_capturing(device))
    return host.to(device, non_blocking=True)


# -- the arguments of the kernels --------------------------------------------------------------


def variant_of(p: Tensor, state: ParamState, group: ParamGroup) -> dict[str, Any]:
    """What the kernels are compiled for."""
    import triton.language as tl

    real, m = state["number"].dtype, state["m"]
    slot = state["slots"].dtype if "slots" in state else real
    types = {"REAL": real, "PARAM": p.dtype, "SLOT": slot}
    return {
        "PHI": list(PHI).index(group["phi"]),
        "KIND": 0 if m == 1 else 1 if m else 2,
        "PLACES": 1 << (m - 1).bit_length() if m else 1,
        "UNIT": torch.finfo(real).eps / 2,
        "TILE": TILE,
        "LANES": LANES,
        **{name: getattr(tl, str(dtype).removeprefix("torch.")) for name, dtype in types.items()},
    }


def rule_of(group: ParamGroup, device: torch.device) -> dict[str, Any]:
    """What may change from step to step; a learning rate on the device is read there."""
    (beta1, beta2), lr, m = map(float, group["betas"]), group["lr"], group["m"] or group["n"]
    on_device = isinstance(lr, Tensor) and lr.device == device
    m, decay, decoupled = (
        0 if m == inf else m,
        group["weight_decay"],
        group["decoupled_weight_decay"],
    )
    return {
        "lr_at": lr if on_device else None,
        "lr": 0.0 if on_device else float(lr),
        "beta1": beta1,
        "beta2": beta2,
        "eps": float(group["eps"]),
        "decay": decay if decoupled else 0.0,
        "coupled": 0.0 if decoupled else decay,
        "sign": -1.0 if group["maximize"] else 1.0,
        "total": total_weight(beta1, m),
        "last": beta1**m,
        "n": group["n"],
        "m": m,
        "STOCHASTIC": group["stochastic_rounding"],
    }


def launch(kernel: Any, programs: int, values: dict[str, Any]) -> None:
    """Without fused multiply-add a step rounds in the same way on every GPU."""
    arguments = {name: values[name] for name in kernel.arg_names}
    kernel[(programs,)](**arguments, num_warps=WARPS, enable_fp_fusion=False)
