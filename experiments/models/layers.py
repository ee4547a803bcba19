"""Convolutions and initializations that the networks share."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


def conv(narrow: int, wide: int, kernel: int, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """Return a convolution that keeps the size of the image, or divides it by the stride."""
    # At stride 2 TF's "SAME" pads an even image less on the left and top, torch pads all sides
    # equally: the outputs are shifted by one pixel.
    return nn.Conv2d(narrow, wide, kernel, stride, padding=kernel // 2, bias=bias)


def he(weight: Tensor) -> None:
    """Draw from a normal with variance 2 / fan-in, truncated at two standard deviations.

    As tf.contrib's variance_scaling_initializer: the factor 1.3 makes up for the truncation.
    """
    std = (1.3 * 2 / weight[0].numel()) ** 0.5
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def glorot(weight: Tensor) -> None:
    """Draw uniformly with variance 2 / (fan-in + fan-out): TF's default, and its Xavier."""
    nn.init.xavier_uniform_(weight)


def initialise(
    net: nn.Module, convolution: Callable[[Tensor], None], linear: Callable[[Tensor], None]
) -> None:
    """Draw every weight again, from torch's global generator; set biases to zero."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            draw = linear if isinstance(module, nn.Linear) else convolution
            draw(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
