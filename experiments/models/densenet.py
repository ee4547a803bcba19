"""The DenseNets of Sections 5.3 (CIFAR-10) and 5.4 (Tiny-ImageNet)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from experiments.models.layers import conv, glorot, he, initialise

Rate = Annotated[float, Field(ge=0, lt=1)]
MakeLayer = Callable[[int, int, int], nn.Module]  # channels in, channels out, kernel


class DenseNet(nn.Module):
    """Blocks of layers; each layer sees the outputs of all earlier layers of its block.

    The stem has 2 × growth filters and each layer adds `growth` channels, with `bottleneck` through
    4 × growth. A transition between two blocks halves the image; it keeps the width, halves it, or
    reduces it to `growth` channels. Dropout follows every convolution except the stem. `init` is
    for convolutions; the last layer uses Glorot. `norm_momentum` is 1 − TensorFlow's decay.

    | network | growth | blocks | bottleneck | transition | stem | parameters |
    |---|---|---|---|---|---|---|
    | released, CIFAR-10 | 24 | 6, 12, 48, 32 | yes | growth | 7×7, stride 2 | 6,365,962 |
    | released, Tiny-ImageNet | 12 | 8, 8, 8 | no | same | 3×3 | 553,280 |
    | DenseNet-BC-100, Huang et al. 2017 | 12 | 16, 16, 16 | yes | half | 3×3 | 769,162 |

    The paper calls its network on CIFAR-10 a 100-layer DenseNet, which usually means the last row.
    """

    def __init__(
        self,
        growth: PositiveInt,
        blocks: list[PositiveInt],
        classes: PositiveInt,
        bottleneck: bool,
        transition: Literal["same", "half", "growth"],
        stem_kernel: PositiveInt,
        stem_stride: PositiveInt,
        dropout: Rate,
        init: Literal["he", "glorot"],
        norm_momentum: PositiveFloat,
        norm_eps: PositiveFloat,
        channels: int = 3,
    ) -> None:
        super().__init__()
        norm = partial(nn.BatchNorm2d, momentum=norm_momentum, eps=norm_eps)
        part = partial(norm_relu_conv, norm=norm, dropout=dropout)
        width = 2 * growth
        self.stem = conv(channels, width, stem_kernel, stem_stride)
        self.blocks = nn.Sequential()
        for count in blocks:
            if self.blocks:
                narrow = {"same": width, "half": width // 2, "growth": growth}[transition]
                self.blocks.append(nn.Sequential(part(width, narrow, 1), nn.AvgPool2d(2)))
                width = narrow
            self.blocks.append(DenseBlock(part, width, growth, count, bottleneck))
            width += count * growth
        self.head = nn.Sequential(norm(width), nn.ReLU(inplace=True))
        self.linear = nn.Linear(width, classes)
        initialise(self, convolution={"he": he, "glorot": glorot}[init], linear=glorot)

    def forward(self, images: Tensor) -> Tensor:
        features = self.head(self.blocks(self.stem(images)))
        return self.linear(features.mean((2, 3)))


class DenseBlock(nn.ModuleList):
    """x ↦ x, layer₁(x), layer₂(x, layer₁(x)) …, concatenated."""

    def __init__(
        self, part: MakeLayer, width: int, growth: int, count: int, bottleneck: bool
    ) -> None:
        make = bottleneck_layer if bottleneck else plain_layer
        super().__init__(make(part, width + i * growth, growth) for i in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = torch.cat([x, layer(x)], 1)
        return x


def plain_layer(part: MakeLayer, width: int, growth: int) -> nn.Module:
    return part(width, growth, 3)


def bottleneck_layer(part: MakeLayer, width: int, growth: int) -> nn.Module:
    return nn.Sequential(part(width, 4 * growth, 1), part(4 * growth, growth, 3))


def norm_relu_conv(
    narrow: int, wide: int, kernel: int, norm: Callable[[int], nn.Module], dropout: float
) -> nn.Sequential:
    """Return the unit of which layers and transitions consist."""
    return nn.Sequential(
        norm(narrow), nn.ReLU(inplace=True), conv(narrow, wide, kernel), nn.Dropout(dropout)
    )
