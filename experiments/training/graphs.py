"""CUDA graphs of training steps: a small step takes less time than the launches of its kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.task import CustomStep, Step

WARM_UP = 3  # steps before the capture, in which torch and optimizers allocate what they keep

Work = Callable[[], Tensor | None]
Capture = Callable[[Work], tuple[Callable[[], None], Tensor | None]]  # → replay, its result


def can_be_captured(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all that changes from step to step is on the device."""
    return isinstance(optimizer, torch.optim.SGD) or "capturable" in optimizer.defaults


def make_capturable(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        if "capturable" in group:
            group.update(capturable=True, fused=None)  # AdaShift allows one of the two


def capture(work: Work) -> tuple[Callable[[], None], Tensor | None]:
    """Record the kernels of `work` without running them."""
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as a tracker's, may use the device meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = work()
    return graph.replay, result


@contextmanager
def side_stream() -> Iterator[None]:
    """Run what comes before a capture as the capture does: not in the default stream."""
    if not torch.cuda.is_available():
        yield
        return
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield
    here.wait_stream(side)


@dataclass
class CapturedStep:
    """A step that is replayed: its arguments are copied into the tensors that the graph reads."""

    arguments: tuple[Any, ...]
    replay: Callable[[], None]
    loss: Tensor | None

    def take(self, arguments: tuple[Any, ...]) -> Tensor | None:
        for mine, new in zip(self.arguments, arguments, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(new)
            elif mine is not new:
                raise RuntimeError(f"a captured step got another {type(new).__name__}")
        self.replay()
        return None if self.loss is None else self.loss.clone()


@dataclass
class GraphedSteps:
    """Takes steps: the first ones of each player as they are, the others by replaying a graph."""

    capture: Capture = capture
    taken: Counter[str] = field(default_factory=Counter)
    captured: dict[str, CapturedStep] = field(default_factory=dict)

    def __call__(self, step: Step | CustomStep, optimizer: torch.optim.Optimizer) -> Tensor | None:
        self.taken[step.player] += 1
        if self.taken[step.player] <= WARM_UP:
            with side_stream():
                return step.take(optimizer)
        work = work_of(step)
        if step.player not in self.captured:
            self.captured[step.player] = self.captured_step(step, work, optimizer)
        return self.captured[step.player].take(work.args)

    def captured_step(
        self, step: Step | CustomStep, work: partial[Any], optimizer: torch.optim.Optimizer
    ) -> CapturedStep:
        own = tuple(a.clone() if isinstance(a, Tensor) else a for a in work.args)
        again = partial(work.func, *own, **work.keywords)
        copy = replace(step, loss=again) if isinstance(step, Step) else replace(step, update=again)
        replay, loss = self.capture(partial(copy.take, optimizer))
        return CapturedStep(own, replay, loss)


def work_of(step: Step | CustomStep) -> partial[Any]:
    """Return what a step of a capturable task calls, with its arguments."""
    work = step.loss if isinstance(step, Step) else step.update
    return work if isinstance(work, partial) else partial(work)
