"""The residual critic and generator of Section 5.5 (WGAN-GP on CIFAR-10), as released."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

GAIN = 1.414  # makes up for ReLU, which halves the second moment
RAW_STD = 0.01  # of the trained weights, before scaling


@dataclass(frozen=True)
class Networks:
    """Both networks: `layers` residual layers of `width` channels at each of `sizes` image sizes.

    The released ones have width 128, 2 layers, 4 sizes (32, 16, 8 and 4 pixels) and noise of 100
    dimensions: 1,629,057 parameters in the critic, 1,833,731 in the generator, no normalization.
    """

    width: PositiveInt
    layers: PositiveInt
    sizes: PositiveInt
    noise: PositiveInt

    def pair(self, size: int, channels: int = 3) -> Pair:
        """Return the networks for images of `size` × `size` pixels."""
        return Pair(self.critic(size, channels), self.generator(size, channels))

    def critic(self, size: int, channels: int = 3) -> Critic:
        stem, score = Conv(channels, self.width), Score(self.width * self.smallest(size) ** 2)
        return Critic(stem, *self.body(Down), score)

    def generator(self, size: int, channels: int = 3) -> Generator:
        start = Start(self.noise, self.width, self.smallest(size))
        # The released last layer is a transposed convolution; at stride 1 they are equivalent.
        return Generator(start, *self.body(Up), Conv(self.width, channels))

    def smallest(self, size: int) -> int:
        halved = 2 ** (self.sizes - 1)
        if size % halved:
            raise ValueError(
                f"sizes is {self.sizes}; {size} pixels cannot be halved {self.sizes - 1} times"
            )
        return size // halved

    def body(self, change: type[Conv]) -> Iterator[Conv]:
        """Yield the residual layers of each size, with a `change` between two sizes."""
        for number in range(self.sizes):
            if number:
                yield change(self.width, self.width)
            yield from (Residual(self.width) for _ in range(self.layers))


class Conv(nn.Conv2d):
    """3 × 3 convolution with weights scaled to variance gain² / fan-in in the forward pass.

    The unscaled weights are trained, so the effective learning rate is `scale` times as large.
    """

    def __init__(self, narrow: int, wide: int, gain: float = 1.0) -> None:
        super().__init__(narrow, wide, 3, padding=1)
        self.scale = equalised(self, gain)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.scale, self.bias, padding=1)

    def back(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Return the gradient at the input x, from the gradient at the output."""
        return F.conv_transpose2d(gradient, self.weight * self.scale, padding=1)


class Residual(Conv):
    """x + conv(ReLU(x))."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, GAIN)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(F.relu(x))

    def back(self, gradient: Tensor, x: Tensor) -> Tensor:
        return gradient + super().back(gradient, x) * (x > 0)


class Down(Conv):
    """conv(mean of 2 × 2 pixels)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.avg_pool2d(x, 2))

    def back(self, gradient: Tensor, x: Tensor) -> Tensor:
        return F.interpolate(super().back(gradient, x) / 4, scale_factor=2)


class Up(Conv):
    """conv(nearest-neighbour upsampling by 2)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.interpolate(x, scale_factor=2))


class Linear(nn.Linear):
    """A linear layer with the same scaling of weights as the convolutions."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__(wide, narrow)
        self.scale = equalised(self, gain=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale, self.bias)


class Start(Linear):
    """Maps noise to the smallest image."""

    def __init__(self, noise: int, width: int, size: int) -> None:
        super().__init__(noise, width * size**2)
        self.shape = (width, size, size)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(1, self.shape)


class Score(Linear):
    """Maps the smallest image to a number."""

    def __init__(self, wide: int) -> None:
        super().__init__(wide, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1)).squeeze(1)

    def back(self, gradient: Tensor, x: Tensor) -> Tensor:
        return (gradient[:, None] * self.weight * self.scale).view(x.shape)


class Critic(nn.Sequential):
    """Maps each image to a number."""

    def __init__(self, *layers: Conv | Score) -> None:
        super().__init__(*layers)
        self.layers = layers

    def gradient(self, images: Tensor) -> Tensor:
        """Return ∂D/∂images, differentiable with respect to the weights.

        Autograd could do it by differentiating twice. But ReLU has no second derivative: the mask
        of positive inputs is constant, so the gradient is a linear network, the same one backwards.
        An ordinary backward pass through it takes half the time.
        """
        inputs, x = [], images
        with torch.no_grad():
            for layer in self.layers:
                inputs.append(x)
                x = layer(x)
        gradient = torch.ones_like(x)
        for layer in reversed(self.layers):
            gradient = layer.back(gradient, inputs.pop())
        return gradient


class Generator(nn.Sequential):
    """Maps noise on the unit sphere to images with unbounded values."""


class Pair(nn.Module):
    def __init__(self, critic: Critic, generator: Generator) -> None:
        super().__init__()
        self.critic, self.generator = critic, generator


def equalised(layer: Conv | Linear, gain: float) -> float:
    """Initialize the unscaled weights and return their scale."""
    nn.init.uniform_(layer.weight, -(3**0.5) * RAW_STD, 3**0.5 * RAW_STD)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return float(gain / (layer.weight[0].numel() ** 0.5 * RAW_STD))
