"""One run in several processes started by torchrun: each computes a part of every batch.

All processes have the same parameters, optimizers and random generators, so the first writes record
and checkpoint for all. Their number is not part of a run's identity: the curve is that of one
process, up to the order of summation.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def is_first() -> bool:
    """Return whether this process writes and prints; a single process does."""
    # RANK alone is not enough: other tools set it too.
    return not dist.is_torchelastic_launched() or int(os.environ["RANK"]) == 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def part(batch: Tensor) -> Tensor:
    """Return this process's rows of a batch."""
    return batch.chunk(world_size())[dist.get_rank()] if world_size() > 1 else batch


def mean_over_processes(loss: Tensor) -> Tensor:
    """Return the mean over all processes; its gradient is local, since `shared` averages it."""
    if world_size() == 1:
        return loss
    everywhere = total(loss.detach()) / world_size()
    return loss + (everywhere - loss.detach())


def shared(net: nn.Module, device: torch.device) -> nn.Module:
    """Return the network with gradients and batch statistics averaged over all processes."""
    if world_size() == 1:
        return net
    if device.type == "cuda":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    else:  # torch has SyncBatchNorm only for GPUs
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.__class__ = SharedBatchNorm
    return DistributedDataParallel(net, forward_sync_buffers=False)


def total(x: Tensor) -> Tensor:
    """Return the sum over all processes."""
    x = x.clone()
    dist.all_reduce(x)
    return x


class Total(torch.autograd.Function):
    """`total` with a gradient: each input contributes to the sum in every process."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return total(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return total(gradient)


class SharedBatchNorm(nn.BatchNorm2d):
    """Batch norm with the mean and variance of the full batch, over all processes."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        count = x.numel() // x.shape[1] * world_size()
        average: Tensor = Total.apply(x.sum((0, 2, 3), keepdim=True)) / count
        centred = x - average
        variance: Tensor = Total.apply(centred.square().sum((0, 2, 3), keepdim=True)) / count
        self.update_running(
            average.detach().flatten(), variance.detach().flatten() * count / (count - 1)
        )
        weight, bias = self.weight.view(-1, 1, 1), self.bias.view(-1, 1, 1)
        return centred * torch.rsqrt(variance + self.eps) * weight + bias

    def update_running(self, average: Tensor, variance: Tensor) -> None:
        """Update the running statistics, which evaluation uses."""
        assert self.running_mean is not None and self.running_var is not None
        assert self.momentum is not None and self.num_batches_tracked is not None
        self.running_mean.lerp_(average, self.momentum)
        self.running_var.lerp_(variance, self.momentum)
        self.num_batches_tracked.add_(1)
