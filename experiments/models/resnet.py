"""The ResNet-18 of Section 5.3 (CIFAR-10), as released: pre-activation, half the usual width."""

from __future__ import annotations

from pydantic import PositiveInt
from torch import Tensor, nn

from experiments.models.layers import conv, he, initialise


class PreActBlock(nn.Module):
    """x + conv(BN-ReLU(conv(BN-ReLU(x)))); with a stride, x is replaced by a 1×1 convolution."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.BatchNorm2d(narrow),
            nn.ReLU(inplace=True),
            conv(narrow, wide, 3, stride, bias=True),
            nn.BatchNorm2d(wide),
            nn.ReLU(inplace=True),
            conv(wide, wide, 3, bias=True),
        )
        self.shortcut = nn.Identity() if stride == 1 else conv(narrow, wide, 1, stride, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.residual(x)


class PreActResNet(nn.Module):
    """Stages of basic blocks; each stage after the first halves the image and doubles the width.

    The released network has width 32 and blocks [2, 2, 2, 2]: 2,799,114 parameters at 10 classes.
    Its batch norm has decay 0.9 and ε = 1e-5, which are torch's defaults (momentum is 1 − decay).
    """

    def __init__(
        self, width: PositiveInt, blocks: list[PositiveInt], classes: PositiveInt, channels: int = 3
    ) -> None:
        super().__init__()
        self.stem = conv(channels, width, 3, bias=True)
        self.stages = nn.Sequential(stage(width, width, blocks[0], stride=1))
        for count in blocks[1:]:
            self.stages.append(stage(width, 2 * width, count, stride=2))
            width *= 2
        self.head = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.linear = nn.Linear(width, classes)
        initialise(self, convolution=he, linear=he)

    def forward(self, images: Tensor) -> Tensor:
        features = self.head(self.stages(self.stem(images)))
        return self.linear(features.mean((2, 3)))


def stage(narrow: int, wide: int, count: int, stride: int) -> nn.Sequential:
    rest = [PreActBlock(wide, wide, stride=1) for _ in range(count - 1)]
    return nn.Sequential(PreActBlock(narrow, wide, stride), *rest)
