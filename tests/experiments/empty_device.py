"""A device that holds no numbers: PyTorch's meta device, with the rules of a GPU.

Operations compute shapes only, so that networks of any size take their steps in milliseconds on a
machine without a GPU.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")
NUMBER = 2  # every number that is read from the device
READS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
aten = torch.ops.aten
# They take lengths from the CPU, where they are needed to launch the kernels.
PACKING = {aten._pack_padded_sequence, aten._pack_padded_sequence_backward}
FRESH = {aten.lift_fresh, aten.lift}  # torch.tensor(…, device=…)


class Violation(AssertionError):
    """What a GPU does not support, or what makes it wait."""


class EmptyDevice(TorchDispatchMode):
    """Raises on a mix of devices and, except in `reading()`, on a read; counts copies to it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_read, self.copies, self.operations = False, 0, 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Allow reads from the device, as when a model is built or evaluated."""
        before, self.may_read = self.may_read, True
        yield
        self.may_read = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [*tensors_in(args), *tensors_in(kwargs.values())]
        here = [x for x in given if x.device == META]
        there = [x for x in given if x.device != META]
        self.operations += bool(here)
        if here and is_read(func, args, kwargs):
            return self.read(func, args, kwargs)
        if (func.overloadpacket is aten.copy_ and here and there) or moves(func, there, kwargs):
            self.copies += 1
        elif here and any(x.dim() for x in there) and func.overloadpacket not in PACKING:
            raise Violation(f"{func} mixes devices")
        elif func.overloadpacket in FRESH and here:
            self.copies += 1
        answer = func(*args, **kwargs)
        if kwargs.get("generator") is not None and answer.device == META:
            raise Violation(f"{func} draws on the device with a generator of the CPU")
        return answer

    def read(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what a read could give."""
        if not self.may_read:
            raise Violation(f"{func} waits for the device")
        tensor, packet = args[0], func.overloadpacket
        if packet is aten._to_copy:
            return torch.full(tensor.shape, NUMBER, dtype=kwargs.get("dtype") or tensor.dtype)
        if packet is aten.copy_:
            return tensor.fill_(NUMBER)
        if packet is aten._local_scalar_dense:
            return torch.full((), NUMBER, dtype=tensor.dtype).item()
        if packet is aten.nonzero:
            return torch.empty(tensor.numel(), tensor.dim(), dtype=torch.int64, device=META)
        if packet is aten.bincount:
            return torch.empty(args[2], dtype=torch.int64, device=META)  # its least length
        raise Violation(f"{func} reads from the device in a way that this test does not know")


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors, also those of lists; twice as fast as torch's tree_leaves."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (x for x in value if isinstance(x, Tensor))


def is_read(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the host must wait for the result."""
    packet = func.overloadpacket
    if packet is aten._to_copy:
        return "device" in kwargs and kwargs["device"] not in (None, META)
    if packet is aten.copy_:
        return args[0].device != META
    if packet in (aten.index, aten.index_put, aten.index_put_):
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    if packet is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    return bool(READS & set(func.tags))


def moves(func: Any, there: list[Tensor], kwargs: dict[str, Any]) -> bool:
    return func.overloadpacket is aten._to_copy and bool(there) and kwargs.get("device") == META
