"""One run in several processes, which torchrun has started: each takes its part of every batch.

All of them hold the same parameters, optimizers and random generators, so the first can write the
record and the checkpoint for all. How many they are is no part of what a run is: the curve is that
of one process, up to the order in which numbers are added.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def is_first() -> bool:
    """Whether this process writes and speaks; so does one that is alone."""
    # Other tools set RANK too.
    return not dist.is_torchelastic_launched() or int(os.environ["RANK"]) == 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def part(batch: Tensor) -> Tensor:
    """The rows of a batch that are this process's."""
    return batch.chunk(size())[dist.get_rank()] if size() > 1 else batch


def mean(loss: Tensor) -> Tensor:
    """Its value is the mean over all processes, its gradient the own, which `shared` averages."""
    if size() == 1:
        return loss
    everywhere = total(loss.detach()) / size()
    return loss + (everywhere - loss.detach())


def shared(net: nn.Module, device: torch.device) -> nn.Module:
    """The network whose gradients are averaged over the processes, and its batch statistics."""
    if size() == 1:
        return net
    if device.type == "cuda":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    else:  # torch has it for GPUs alone
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.__class__ = SharedBatchNorm
    return DistributedDataParallel(net, forward_sync_buffers=False)


def total(x: Tensor) -> Tensor:
    """The sum over all processes."""
    x = x.clone()
    dist.all_reduce(x)
    return x


class Total(torch.autograd.Function):
    """`total` with a gradient: what one process has goes into the sum of every one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return total(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return total(gradient)


class SharedBatchNorm(nn.BatchNorm2d):
    """Batch norm with the mean and variance of the whole batch, parts of which are elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        count = x.numel() // x.shape[1] * size()
        average: Tensor = Total.apply(x.sum((0, 2, 3), keepdim=True)) / count
        centred = x - average
        variance: Tensor = Total.apply(centred.square().sum((0, 2, 3), keepdim=True)) / count
        self.follow(average.detach().flatten(), variance.detach().flatten() * count / (count - 1))
        weight, bias = self.weight.view(-1, 1, 1), self.bias.view(-1, 1, 1)
        return centred * torch.rsqrt(variance + self.eps) * weight + bias

    def follow(self, average: Tensor, variance: Tensor) -> None:
        """The running statistics, which are for testing."""
        assert self.running_mean is not None and self.running_var is not None
        assert self.momentum is not None and self.num_batches_tracked is not None
        self.running_mean.lerp_(average, self.momentum)
        self.running_var.lerp_(variance, self.momentum)
        self.num_batches_tracked.add_(1)
