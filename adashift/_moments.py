"""Running first and second moments of a pair of values, and Pearson's correlation from them."""

from math import nan

import torch
from torch import Tensor


def pearson(xx: Tensor, yy: Tensor, xy: Tensor) -> Tensor:
    """Return Σdxdy / √(Σdx² Σdy²) from sums over deviations; NaN where x or y is constant.

    >>> pearson(torch.tensor([1.0, 0.0]), torch.tensor([4.0, 4.0]), torch.tensor([1.0, 0.0]))
    tensor([0.5000,    nan])
    """
    r = xy / (xx.sqrt() * yy.sqrt())
    return torch.where((xx > 0) & (yy > 0), r, nan)


def welford(moments: Tensor, x: Tensor, y: Tensor, count: int) -> None:
    """Add the count-th pair to moments, whose rows are x̄, ȳ, Σdx², Σdy² and Σdxdy."""
    mean_x, mean_y, xx, yy, xy = moments
    dx, dy = x - mean_x, y - mean_y
    mean_x.add_(dx, alpha=1 / count)
    mean_y.add_(dy, alpha=1 / count)
    share = 1 - 1 / count
    xx.addcmul_(dx, dx, value=share)
    yy.addcmul_(dy, dy, value=share)
    xy.addcmul_(dx, dy, value=share)


def copy_into(own: Tensor, saved: Tensor, name: str) -> None:
    """Load a saved tensor into an existing one of the same shape."""
    if own.shape != saved.shape:
        raise ValueError(
            f"{name} has shape {tuple(saved.shape)} in the checkpoint and {tuple(own.shape)} here; "
            "create the object with the arguments that it was saved with"
        )
    own.copy_(saved)
