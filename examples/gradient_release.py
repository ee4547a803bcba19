"""Gradient release: update each parameter during the backward pass and free its gradient at once.

    python examples/gradient_release.py

The gradients of all parameters never exist at the same time, which saves 4 bytes per parameter. In
return, they cannot be accumulated over several batches or clipped by their common norm.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from adashift import AdaShift

STEPS = 300


def release_gradients(
    model: nn.Module, make_optimizer: Callable[[list[Tensor]], Optimizer]
) -> dict[str, Optimizer]:
    """Let backward() update the model; return the optimizer of each parameter.

    A checkpoint is {name: optimizer.state_dict() for name, optimizer in optimizers.items()}.
    """
    optimizers = {name: make_optimizer([p]) for name, p in model.named_parameters()}
    owners: dict[Tensor, Optimizer] = {p: optimizers[name] for name, p in model.named_parameters()}

    def update(p: Tensor) -> None:
        owners[p].step()
        p.grad = None

    for p in owners:
        p.register_post_accumulate_grad_hook(update)
    return optimizers


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(4096, 20)
    y = nn.Linear(20, 5)(x).argmax(1)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

    optimizers = release_gradients(model, lambda params: AdaShift(params, lr=0.01))
    for step in range(STEPS):
        for optimizer in optimizers.values():  # a schedule
            optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / STEPS)
        loss = cross_entropy(model(x), y)
        loss.backward()  # updates the model; there is no optimizer.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
