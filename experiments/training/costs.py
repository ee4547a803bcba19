"""Counts what a training costs, on the meta device: nothing is computed and no data is needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from experiments.config.build import build
from experiments.config.errors import ConfigError
from experiments.config.schema import Config
from experiments.records.costs import Cost, Rates, Work, cost_key, device_key, known_costs
from experiments.task import Step, Task
from experiments.training.device import pick_device

META = torch.device("meta")
aten = torch.ops.aten
NUMBER = 1  # what is read from the meta device
MAX_READS = 200  # of a task that is built, a step or an evaluation
GATHERS = {aten.index, aten.index_select, aten.gather, aten.embedding}  # read what they return
PERIODS, MEASURED = 5, 0.05  # how often and how many seconds a rate is measured
SMALL_CALLS = 6  # operations of differentiate()
FAILURES = (RuntimeError, TypeError, ValueError, IndexError, AssertionError, ConfigError, OSError)


class Meter(TorchDispatchMode):
    """Counts the operations on the meta device and their bytes; answers reads from it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.moved, self.reads = 0, 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if is_empty(x)]
        found = read(func, args, kwargs) if given else None
        self.reads += found is not None
        if self.reads > MAX_READS:
            raise RuntimeError("what it does depends on numbers, which the meta device lacks")
        answer = func(*args, **kwargs) if found is None else found
        if not is_view(func):
            made = [x for x in tree_leaves(answer) if is_empty(x)]
            self.calls += bool(given or made)
            touched = made * 2 if func.overloadpacket in GATHERS else given + made
            self.moved += sum(x.numel() * x.element_size() for x in touched)
        return answer


def is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device == META


def is_view(func: Any) -> bool:
    """Whether the operation moves no bytes: all that it returns are views."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)


def read(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what a read from the meta device gives, or None if `func` reads nothing."""
    tensor, packet = args[0], func.overloadpacket
    if packet is aten._local_scalar_dense:
        return torch.full((), NUMBER, dtype=tensor.dtype).item()
    if packet is aten._to_copy and kwargs.get("device") not in (None, META):
        return torch.full(tensor.shape, NUMBER, dtype=kwargs.get("dtype") or tensor.dtype)
    if packet is aten.bincount:
        return torch.empty(args[2], dtype=torch.int64, device=META)
    if packet is aten.nonzero:
        return torch.empty(tensor.numel(), tensor.dim(), dtype=torch.int64, device=META)
    if packet is aten.index and is_masked(args[1]):  # as if the mask were true everywhere
        mask = args[1][0]
        return tensor.flatten(0, mask.dim() - 1)
    return None


def is_masked(indices: Any) -> bool:
    return len(indices) == 1 and is_empty(indices[0]) and indices[0].dtype == torch.bool


# -- counting ----------------------------------------------------------------------------------


def count_cost(config: Config) -> Cost | None:
    """Return the cost of a run; None if it has no data, or if it cannot be counted."""
    if "data" not in config.task:
        return None
    try:
        with Meter():
            task = build(config.task, "task", seed=config.seed, device=META)
        return cost_of(task, config) if isinstance(task, Task) else None
    except FAILURES:
        return None


def cost_of(task: Task, config: Config) -> Cost:
    steps, every = config.steps or task.total_steps, config.log_every or task.epoch_steps
    assert steps and every
    taken = first_steps(task)
    with saved_for_backward() as saved:
        work = counted(lambda: [step.loss().backward() for step in taken])
    samples, unit = samples_of(task, config)
    return Cost(
        steps=steps,
        samples=samples,
        unit=unit,
        step=work * (1 / len(taken)),
        evaluation=evaluation_of(task),
        evaluations=-(-steps // every),
        parameters=sum(p.numel() for params in task.players().values() for p in params),
        activations=sum(saved.values()) // len(taken),
    )


def first_steps(task: Task) -> list[Step]:
    """Return steps until every player has had one: a round of a GAN."""
    taken, players = list[Step](), set(task.players())
    for step in task.steps():
        assert isinstance(step, Step)
        taken.append(step)
        players.discard(step.player)
        if not players:
            break
    return taken


def counted(act: Callable[[], object]) -> Work:
    """Return the work of an action."""
    with Meter() as meter, FlopCounterMode(display=False) as flops:
        act()
    return Work(flops.get_total_flops(), meter.moved, meter.calls)


def evaluation_of(task: Task) -> Work:
    """Return the work of an evaluation; none for a search, whose length depends on numbers."""
    try:
        return counted(task.evaluate)
    except FAILURES:
        return Work(0, 0, 0)


@contextmanager
def saved_for_backward() -> Iterator[dict[int, int]]:
    """Yield the bytes that the forward pass saves, by storage; without parameters."""
    sizes, kept = dict[int, int](), list[Any]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, torch.nn.Parameter):
            sizes[storage._cdata] = storage.nbytes()
            kept.append(storage)  # its address must not be used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def samples_of(task: Task, config: Config) -> tuple[int, str]:
    """Return how many images or words a step uses."""
    settings = config.task.get("trainer", config.task)
    batch = int(settings["batch"])
    train: Any = getattr(getattr(task, "data", None), "train", None)
    if not hasattr(train, "target"):
        return batch, "images"
    lengths = [side.lengths.double().mean().item() for side in (train.source, train.target)]
    return round(batch * sum(lengths)), "tokens"


def state_bytes(optimizer: dict[str, Any]) -> float:
    """Return the bytes of an optimizer's state for each parameter, measured on a small matrix."""
    matrix = torch.nn.Parameter(torch.zeros(64, 64))
    stepping = build(optimizer, "optimizer")([matrix])
    matrix.grad = torch.ones_like(matrix)
    stepping.step()
    tensors = [x for x in tree_leaves(dict(stepping.state)) if isinstance(x, Tensor)]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values()) / matrix.numel()


# -- the speed of this machine -----------------------------------------------------------------


def measure_rates(device: torch.device, threads: int | None) -> Rates:
    """Measure a convolution and its backward pass, a sum of large tensors, and small operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        images = torch.ones(32, 32, 16, 16, device=device, requires_grad=True)
        kernel = torch.ones(32, 32, 3, 3, device=device, requires_grad=True)
        large, other = torch.ones(2, 2**24, device=device)
        small = torch.ones(4, device=device, requires_grad=True)
        flops = 3 * 2 * images.numel() * kernel.numel() / 32
        return Rates(
            flops=flops * per_second(lambda: convolve(images, kernel), device),
            bandwidth=3 * large.nbytes * per_second(lambda: large.add_(other), device),
            calls=SMALL_CALLS * per_second(lambda: differentiate(small), device),
        )
    finally:
        torch.set_num_threads(before)


def convolve(images: Tensor, kernel: Tensor) -> None:
    torch.autograd.grad(F.conv2d(images, kernel, padding=1).sum(), [images, kernel])


def differentiate(small: Tensor) -> None:
    torch.autograd.grad((small * small).sum(), small)


def per_second(act: Callable[[], object], device: torch.device) -> float:
    """Return how often an action can be done per second, in the best of several short periods."""
    act()
    return max(rate_in(MEASURED, act, device) for _ in range(PERIODS))


def rate_in(period: float, act: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    begun, done = time.perf_counter(), 0
    while time.perf_counter() - begun < period:
        act()
        done += 1
    synchronize(device)
    return done / (time.perf_counter() - begun)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- for a plan --------------------------------------------------------------------------------


def count_all(configs: Iterable[Config]) -> None:
    """Count what has not been counted, measure this machine, and keep both."""
    known = known_costs()
    for config in configs:
        key = cost_key(config)
        if key not in known.costs and (cost := count_cost(config)) is not None:
            known.costs[key] = cost
        if (name := device_key(config)) not in known.measured:
            known.rates[name] = measure_rates(pick_device(config.device), config.threads)
            known.measured.add(name)
    known.save()
