"""Logistic regression and the multilayer perceptron on MNIST (Section 5.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor
from torch.nn import Parameter

from experiments.data.batches import Batches, generator
from experiments.data.mnist import MNIST_CLASSES, PIXELS, Mnist, Samples
from experiments.task import Step, Task


class LinearLayers:
    """Linear layers without activation: x ↦ (x W1 + b1) W2 + b2 …; every W is inputs × outputs.

    Weights and biases are normal with the given standard deviations, drawn layer by layer.
    """

    def __init__(
        self,
        widths: list[int],
        weight_std: float,
        bias_std: float,
        source: torch.Generator,
        device: torch.device,
    ) -> None:
        def normal(std: float, *shape: int) -> Parameter:
            return Parameter((torch.randn(shape, generator=source) * std).to(device))

        self.weights, self.biases = list[Parameter](), list[Parameter]()
        for wide, narrow in pairwise(widths):
            self.weights.append(normal(weight_std, wide, narrow))
            self.biases.append(normal(bias_std, narrow))

    def parameters(self) -> list[Parameter]:
        """W1, b1, W2, b2 …"""
        return [p for layer in zip(self.weights, self.biases, strict=True) for p in layer]

    def __call__(self, x: Tensor) -> Tensor:
        for w, b in zip(self.weights, self.biases, strict=True):
            x = torch.addmm(b, x, w)
        return x

    def as_one(self) -> tuple[Tensor, Tensor]:
        """Return the weight and bias of the single layer with the same output."""
        weight: Tensor = self.weights[-1]
        bias: Tensor = self.biases[-1]
        for w, b in zip(self.weights[-2::-1], self.biases[-2::-1], strict=True):
            weight, bias = w @ weight, b @ weight + bias
        return weight, bias


class LinearClassifier(Task):
    """Softmax cross-entropy of linear layers, without regularization or augmentation."""

    capturable = True

    def __init__(
        self,
        data: Callable[[torch.device], Mnist],
        hidden: list[PositiveInt],
        weight_std: NonNegativeFloat,
        bias_std: NonNegativeFloat,
        batch: PositiveInt,
        seed: int,
        device: torch.device,
    ) -> None:
        self.data = data(device)
        widths = [PIXELS, *hidden, MNIST_CLASSES]
        start = generator(seed, "initialisation")
        self.net = LinearLayers(widths, weight_std, bias_std, start, device)
        count = len(self.data.train.labels)
        self.batches = Batches(count, batch, generator(seed, "order"), device)

    def players(self) -> dict[str, list[Parameter]]:
        return {"classifier": self.net.parameters()}

    def steps(self) -> Iterator[Step]:
        for rows in self.batches:
            yield Step("classifier", partial(self.loss, rows))

    def loss(self, rows: Tensor) -> Tensor:
        train = self.data.train
        images, labels = train.images.index_select(0, rows), train.labels.index_select(0, rows)
        return F.cross_entropy(self.net(images), labels)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        weight, bias = self.net.as_one()  # 15,000 images go through one layer instead of three
        parts = [
            loss_and_accuracy(part, weight, bias) for part in (self.data.test, self.data.validation)
        ]
        names = ("test_loss", "test_accuracy", "validation_loss", "validation_accuracy")
        return dict(zip(names, torch.cat(parts).tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.load_state_dict(state["batches"])


def loss_and_accuracy(samples: Samples, weight: Tensor, bias: Tensor) -> Tensor:
    """Return loss and accuracy, on the device."""
    output = torch.addmm(bias, samples.images, weight)
    correct = output.argmax(1) == samples.labels
    return torch.stack([F.cross_entropy(output, samples.labels), correct.float().mean()])
