"""Correlations of a perceptron's gradients on MNIST with each other and with v (Appendix C)."""

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

from adashift.analysis.correlation import CorrelationStudy, CorrelationSummary
from adashift.probe import DecorrelationProbe
from experiments.data.batches import generator
from experiments.task import Step
from experiments.tasks.mnist import LinearClassifier


@dataclass
class FrozenStep(Step):
    """A step that computes the gradient of one parameter and updates nothing."""

    parameter: Parameter

    def take(self, optimizer: torch.optim.Optimizer) -> Tensor:
        loss = self.loss()
        (self.parameter.grad,) = torch.autograd.grad(loss, [self.parameter])
        return loss.detach()


@dataclass
class WatchedStep(Step):
    """A step that calls `watch` with the optimizer first."""

    watch: Callable[[torch.optim.Optimizer], None]

    def take(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        self.watch(optimizer)
        return super().take(optimizer)


class GradientCorrelation(LinearClassifier):
    """Tables 1 to 4: train for `training` steps, then measure the gradients of later steps.

    The gradients are those of the weight between the two hidden layers. v is updated from the
    first step on. While measuring, the parameters stay fixed if `frozen`, else training continues.
    With `unit` every gradient is divided by its norm, so that its size carries no information; a
    gradient of exactly 0, of a batch that is classified with certainty, stays 0.
    """

    capturable = False  # steps change when the parameters are frozen

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
        source = generator(seed, "noise")
        shape = self.weight.shape
        self.study = CorrelationStudy(shape, lags, beta2s, pairs, source, device=device)

    def steps(self) -> Iterator[Step]:
        for step in super().steps():
            frozen = self.frozen and self.done >= self.training
            yield FrozenStep(step.player, step.loss, self.weight) if frozen else step

    def after_step(self) -> None:
        assert self.weight.grad is not None
        add = self.study.warm_up if self.done < self.training else self.study.update
        add(unit_norm(self.weight.grad) if self.unit else self.weight.grad)
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


def unit_norm(g: Tensor) -> Tensor:
    """Divide by the norm, after scaling: squares of small numbers would underflow to 0."""
    tiny = torch.finfo(g.dtype).tiny
    g = g / g.abs().max().clamp_min(tiny)
    return g / g.norm().clamp_min(tiny)


def between_hidden_layers(weights: list[Parameter]) -> Parameter:
    if len(weights) != 3:
        raise ValueError(
            f"hidden has {len(weights) - 1} widths; expected 2, because the weight between two "
            "hidden layers is measured: set for example task.hidden=[256,256]"
        )
    return weights[1]


def metrics(rows: list[CorrelationSummary]) -> dict[str, float]:
    """Return means and standard deviations over elements; `largest` is the largest |mean| of n > 0.

    non/beta2=0.9/n=0 is Adam's value: its v contains g_t.
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
    """Section 3.3 in a real training: the probe compares large gradients with small ones.

    The probe starts after `watch_after` steps, in which v rises from 0.
    """

    capturable = False  # the probe computes before and after each step

    probe: DecorrelationProbe | None = None
    found: dict[str, Any] | None = None  # the probe's state when the training was interrupted

    def __init__(self, watch_after: NonNegativeInt, **classifier: Any) -> None:
        super().__init__(**classifier)
        self.watch_after, self.done = watch_after, 0

    def steps(self) -> Iterator[Step]:
        for step in super().steps():
            first = self.done >= self.watch_after and self.probe is None
            self.done += 1
            yield WatchedStep(step.player, step.loss, self.watch) if first else step

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
        # NaN means that the probe has too few steps; it must not count as divergence.
        blocks = self.probe.results() if self.probe else {}
        blocks = {name: value for name, value in blocks.items() if not isnan(value)}
        for quantity in ("correlation", "k_ratio", "k_effect"):
            values = [x for name, x in blocks.items() if name.endswith(quantity)]
            found |= {quantity: fmean(values)} if values else {}
        return found | blocks
