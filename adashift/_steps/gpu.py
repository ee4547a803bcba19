"""AdaShift's step on a GPU in two launches: which parameters they take, and the table they read.

The kernels are in kernel.py, which is imported only where they are used: it needs Triton.
"""

import warnings
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from adashift._base import ParamGroup, ParamState
from adashift._steps import address_of, row_of, rows_of, rule_of

TILE, LANES, WARPS = 1024, 1024, 8  # elements, and partial results, that a program takes at a time
DEVICES = ("cuda",)  # torch uses this name for ROCm too
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

captured: list[Tensor] = []  # what CUDA graphs read; they may be replayed until the process ends


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


class GpuTable:
    """Parameters of one group, device and dtype, as rows of addresses: see CpuTable."""

    @staticmethod
    def takes(p: Tensor, group: ParamGroup) -> bool:
        return p.device.type in DEVICES and p.dtype in DTYPES and available(p.device)

    def __init__(self, params: list[Tensor], states: list[ParamState], group: ParamGroup) -> None:
        self.params, self.device = params, params[0].device
        self.addresses = [address_of(p.grad) for p in params]
        self.variant = variant_of(params[0], states[0])
        parts = table_parts(params, states, group)
        self.held = [list(state.values()) for state in states]  # the rows have addresses of these
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

        values = self.part | self.variant | arguments_of(group, self.device)
        with torch.cuda.device_of(self.memory):
            values["gradients"] = self.gradients()
            launch(kernel.step_tiles, len(self.part["tiles"]), values)
            launch(kernel.finish_step, len(self.part["blocks"]), values)
        torch.autograd.graph.increment_version(self.params)


def table_parts(
    params: list[Tensor], states: list[ParamState], group: ParamGroup
) -> dict[str, Tensor]:
    """What the kernels find on the device, as integers; partial results start with 0."""
    for state in states:  # a clock moves to the device
        state["step"] = state["step"].to(params[0].device, non_blocking=True)
    rows = [rows_of(p, group) for p in params]
    tiles = [-(-p.numel() // TILE) for p in params]
    partials = [count + row - 1 for count, row in zip(tiles, rows, strict=True)]
    blocks = [-(-row // LANES) for row in rows]
    firsts = zip(*(accumulate(x, initial=0) for x in (tiles, partials, blocks)), strict=True)
    jobs = enumerate(zip(params, states, rows, firsts, strict=False))
    table = [[*row_of(p, state, row, key), *first] for key, (p, state, row, first) in jobs]
    each, zeros = torch.arange(len(params)), torch.zeros(sum(partials), dtype=torch.int64)
    return {
        "table": torch.tensor(table).flatten(),
        "tiles": each.repeat_interleave(torch.tensor(tiles)),  # to which parameter each belongs
        "blocks": each.repeat_interleave(torch.tensor(blocks)),
        "tops": zeros,
        "squares": zeros,
        "plan": torch.zeros(2 * len(params), dtype=torch.int64),
    }


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting; in a graph, every replay copies again."""
    host = host.pin_memory() if device.type == "cuda" else host
    captured.extend([host] * is_capturing(device))
    return host.to(device, non_blocking=True)


def variant_of(p: Tensor, state: ParamState) -> dict[str, Any]:
    """What the kernels are compiled for."""
    import triton.language as tl

    real, m = state["number"].dtype, state["m"]
    slot = state["slots"].dtype if "slots" in state else real
    types = {"REAL": real, "PARAM": p.dtype, "SLOT": slot}
    return {
        "PHI": state["kind"],
        "KIND": 0 if m == 1 else 1 if m else 2,
        "PLACES": 1 << (m - 1).bit_length() if m else 1,
        "UNIT": torch.finfo(real).eps / 2,
        "TILE": TILE,
        "LANES": LANES,
        **{name: getattr(tl, str(dtype).removeprefix("torch.")) for name, dtype in types.items()},
    }


def arguments_of(group: ParamGroup, device: torch.device) -> dict[str, Any]:
    """What may change from step to step; a learning rate on the device is read there."""
    lr = group["lr"]
    on_device = isinstance(lr, Tensor) and lr.device == device
    rule = rule_of(group, 0.0 if on_device else float(lr))
    return rule | {"lr_at": lr if on_device else None, "STOCHASTIC": group["stochastic_rounding"]}


def launch(kernel: Any, programs: int, values: dict[str, Any]) -> None:
    """Without fused multiply-add a step rounds in the same way on every GPU."""
    arguments = {name: values[name] for name in kernel.arg_names}
    kernel[(programs,)](**arguments, num_warps=WARPS, enable_fp_fusion=False)
