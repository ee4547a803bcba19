"""What the gradients of the perceptron on MNIST have to do with each other, and with v (App. C)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isnan
from statistics import fmean
from typing import Any

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor
from torch.nn import Parameter

from adashift.correlation import CorrelationStudy, Row
from adashift.probe import DecorrelationProbe
from experiments.data.batches import generator
from experiments.task import Step
from experiments.tasks.mnist import LinearClassifier


@dataclass
class FrozenStep(Step):
    """A step at which the parameters stay: the gradient of one of them, and no update."""

    parameter: Parameter

    def take(self, optimizer: torch.optim.Optimizer) -> Tensor:
        loss = self.loss()
        (self.parameter.grad,) = torch.autograd.grad(loss, [self.parameter])
        return loss.detach()


@dataclass
class FirstWatched(Step):
    """A step before which a watch is set on the optimizer."""

    watch: Callable[[torch.optim.Optimizer], None]

    def take(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        self.watch(optimizer)
        return super().take(optimizer)


class GradientCorrelation(LinearClassifier):
    """Tables 1 to 4: trains for some steps, then measures on the gradients of those that follow.

    The gradients are those of the weight between the two hidden layers. While training, v already
    runs; with `frozen` the parameters then stay, else training goes on. With `unit` every gradient
    is divided by its norm before it is looked at, so that its size can tell nothing. Where all
    images of a batch are beyond doubt it is exactly 0, and stays so.
    """

    def __init__(
        self,
        training: NonNegativeInt,
        frozen: bool,
        lags: PositiveInt,
        beta2s: list[float],
        pairs: PositiveInt,
        seed: int,
        device: torch.device,
        unit: bool = False,
        **classifier: Any,
    ) -> None:
        super().__init__(seed=seed, device=device, **classifier)
        self.training, self.frozen, self.unit, self.done = training, frozen, unit, 0
        self.weight = between_hidden_layers(self.net.weights)
        draw = generator(seed, "noise")
        self.study = CorrelationStudy(self.weight.shape, lags, beta2s, pairs, draw, device=device)

    def steps(self) -> Iterator[Step]:
        for step in super().steps():
            stays = self.frozen and self.done >= self.training
            yield FrozenStep(step.player, step.loss, self.weight) if stays else step

    def after_step(self) -> None:
        assert self.weight.grad is not None
        show = self.study.warm_up if self.done < self.training else self.study.update
        show(of_size_1(self.weight.grad) if self.unit else self.weight.grad)
        self.done += 1

    def evaluate(self) -> dict[str, float]:
        known = self.study.count > self.study.lags + 1  # two pairs of the longest lag
        return super().evaluate() | (metrics(self.study.results()) if known else {})

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"done": self.done, "study": self.study.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.done = state["done"]
        self.study.load_state_dict(state["study"])


def of_size_1(g: Tensor) -> Tensor:
    """Divided by its norm, in two steps: the squares of small numbers would be 0."""
    tiny = torch.finfo(g.dtype).tiny
    g = g / g.abs().max().clamp_min(tiny)
    return g / g.norm().clamp_min(tiny)


def between_hidden_layers(weights: list[Parameter]) -> Parameter:
    if len(weights) != 3:
        raise ValueError(
            f"hidden has {len(weights) - 1} widths; the gradients are those of the weight between "
            "two hidden layers: give 2, as in hidden=[256,256]"
        )
    return weights[1]


def metrics(rows: list[Row]) -> dict[str, float]:
    """Every mean and spread over elements; `largest` is the largest size of a mean over the lags.

    non/beta2=0.9/n=0 is Adam's number: its v contains g_t.
    """
    found, sizes = dict[str, float](), dict[str, float]()
    for row in rows:
        kind = row.kind if row.beta2 is None else f"{row.kind}/beta2={row.beta2:g}"
        found[f"{kind}/n={row.n}"] = row.mean
        found[f"{kind}/n={row.n}/std"] = row.std
        if row.n > 0:
            sizes[kind] = max(sizes.get(kind, 0.0), abs(row.mean))
    return found | {f"{kind}/largest": size for kind, size in sizes.items()}


class MnistNetUpdate(LinearClassifier):
    """Section 3.3 in a real training: what the probe says of large gradients against small ones.

    `watch_after` steps pass first, in which v rises from 0.
    """

    probe: DecorrelationProbe | None = None
    found: dict[str, Any] | None = None  # by the probe, before the training was interrupted

    def __init__(self, watch_after: NonNegativeInt, **classifier: Any) -> None:
        super().__init__(**classifier)
        self.watch_after, self.done = watch_after, 0

    def steps(self) -> Iterator[Step]:
        for step in super().steps():
            first = self.done >= self.watch_after and self.probe is None
            self.done += 1
            yield FirstWatched(step.player, step.loss, self.watch) if first else step

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        layers = range(1, len(self.net.weights) + 1)
        names = [f"{kind}{layer}" for layer in layers for kind in "Wb"]
        self.probe = DecorrelationProbe(optimizer, names=names)
        if self.found is not None:
            self.probe.load_state_dict(self.found)

    def state_dict(self) -> dict[str, Any]:
        found = self.probe.state_dict() if self.probe else None
        return super().state_dict() | {"done": self.done, "found": found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.done, self.found = state["done"], state["found"]

    def evaluate(self) -> dict[str, float]:
        found = super().evaluate()
        # What is not known yet is no divergence, which the losses would show.
        blocks = self.probe.results() if self.probe else {}
        blocks = {name: value for name, value in blocks.items() if not isnan(value)}
        for quantity in ("correlation", "k_ratio", "k_effect"):
            values = [x for name, x in blocks.items() if name.endswith(quantity)]
            found |= {quantity: fmean(values)} if values else {}
        return found | blocks
