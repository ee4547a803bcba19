"""What the networks share: convolutions and how their weights start."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


def conv(narrow: int, wide: int, kernel: int, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """A convolution that keeps the size of the image, or divides it by the stride."""
    # At stride 2 TF's "SAME" pads an even image less on the left and top, torch all sides alike:
    # what they see is shifted by one pixel.
    return nn.Conv2d(narrow, wide, kernel, stride, padding=kernel // 2, bias=bias)


def he(weight: Tensor) -> None:
    """Normal with variance 2 / fan-in, cut off at two standard deviations.

    As tf.contrib's variance_scaling_initializer: the factor 1.3 makes up for what is cut off.
    """
    std = (1.3 * 2 / weight[0].numel()) ** 0.5
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def glorot(weight: Tensor) -> None:
    """Uniform with variance 2 / (fan-in + fan-out): TF's default, and its Xavier."""
    nn.init.xavier_uniform_(weight)


def initialise(
    net: nn.Module, convolution: Callable[[Tensor], None], linear: Callable[[Tensor], None]
) -> None:
    """Draw every weight anew, from torch's global generator; biases are zero."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            draw = linear if isinstance(module, nn.Linear) else convolution
            draw(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
