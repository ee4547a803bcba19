"""The ill-conditioned two-layer linear problem (Appendix L), after Rahimi and Recht's talk.

The network x ↦ W1 W2 x fits an ill-conditioned matrix A. Everything is in double precision, which
loses singular values below 1e-16 of the largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import ParamsT

from experiments.data.batches import Batches, generator
from experiments.task import CustomStep, Task

Spacing = Literal["linear", "geometric"]


@dataclass(frozen=True)
class Objective:
    """The mean of ‖W1 W2 x − A x‖² over x: tr(E C Eᵀ), with E = W1 W2 − A and C the mean of x xᵀ.

    For x ~ N(0, I), C is I and the loss is ‖W1 W2 − A‖²_F. The loss depends on samples only through
    C, so the cost of a step does not depend on their number.
    """

    w1: Parameter
    w2: Parameter
    target: Tensor
    moment: Tensor

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Set the gradients and return the loss: the closure of torch's optimizers.

        In closed form, because autograd takes four times as long for matrices of this size.
        """
        error = self.error()
        slope = torch.mm(error, self.moment).mul_(2)
        self.w1.grad = torch.mm(slope, self.w2.t())
        self.w2.grad = torch.mm(self.w1.t(), slope)
        return torch.linalg.vecdot(error.flatten(), slope.flatten()) / 2

    @torch.no_grad()
    def loss(self) -> float:
        error = self.error()
        return float((error @ self.moment * error).sum())

    def error(self) -> Tensor:
        return torch.addmm(self.target, self.w1, self.w2, beta=-1)

    @torch.no_grad()
    def residuals(self) -> Tensor:
        """Return r with r·r = loss: E R row by row, where R Rᵀ = C."""
        return (self.error() @ self.root()).flatten()

    @torch.no_grad()
    def jacobian(self) -> Tensor:
        """Return ∂r/∂(W1, W2), with the parameters row by row."""
        root = self.root()
        unit = torch.eye(len(self.target), dtype=root.dtype, device=root.device)
        by_w1 = torch.kron(unit, (self.w2 @ root).T.contiguous())
        return torch.hstack([by_w1, torch.kron(self.w1, root.T.contiguous())])

    def root(self) -> Tensor:
        return torch.linalg.cholesky(self.moment)


class LevenbergMarquardt(torch.optim.Optimizer):
    """Least squares: θ ← θ + lr δ, where δ minimises ‖r + J δ‖² + λ ‖δ‖².

    λ (`damping`) is divided by `factor` after a step that lowers the loss; any other step is
    undone, and λ is multiplied by `factor`.

    It has torch's interface, `step(closure)`, but takes residuals and Jacobian from the closure
    instead of gradients, so the training loop needs no special case.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1.0, damping: float = 1e-3, factor: float = 10.0
    ) -> None:
        if not (damping > 0 and factor > 1):
            raise ValueError(
                f"damping is {damping}, factor {factor}; expected damping > 0, factor > 1"
            )
        super().__init__(params, dict(lr=lr, damping=damping, factor=factor))

    @torch.no_grad()
    def step(self, closure: Objective) -> Tensor:  # type: ignore[override]
        """Try one step; return the loss before it."""
        (group,) = self.param_groups
        before, residuals = [p.clone() for p in group["params"]], closure.residuals()
        delta = damped_solution(closure.jacobian(), residuals, group["damping"])
        parts = delta.split([p.numel() for p in before])
        for p, part in zip(group["params"], parts, strict=True):
            p.add_(part.view_as(p), alpha=group["lr"])
        loss = residuals.square().sum()
        if closure.residuals().square().sum() < loss:
            group["damping"] /= group["factor"]
        else:
            group["damping"] *= group["factor"]
            for p, value in zip(group["params"], before, strict=True):
                p.copy_(value)
        return loss


def damped_solution(jacobian: Tensor, residuals: Tensor, damping: float) -> Tensor:
    """Return δ = −(JᵀJ + λI)⁻¹ Jᵀr by a QR of J: forming JᵀJ would lose half the digits."""
    count = jacobian.shape[1]
    below = math.sqrt(damping) * torch.eye(count, dtype=jacobian.dtype, device=jacobian.device)
    right = torch.cat([-residuals, residuals.new_zeros(count)])
    return torch.linalg.lstsq(torch.vstack([jacobian, below]), right.unsqueeze(1)).solution[:, 0]


class TwoLayerLinear(Task):
    """Fit W1 W2 to A by the expected loss, or by the loss of samples, full-batch or in batches.

    The seed determines A, samples and start: the paper gives no matrix, and no claim should depend
    on one.
    """

    gives_closure = True

    def __init__(
        self,
        inputs: PositiveInt,
        hidden: PositiveInt,
        outputs: PositiveInt,
        condition: Annotated[float, Field(ge=1)],
        spacing: Spacing,
        sampled: PositiveInt | None,
        batch: PositiveInt | None,
        weight_std: NonNegativeFloat,
        seed: int,
        device: torch.device,
    ) -> None:
        if batch is not None and sampled is None:
            raise ValueError(f"batch is {batch}, but there are no samples: set task.sampled=…")
        noise, start = generator(seed, "noise"), generator(seed, "initialisation")
        self.target = ill_conditioned(outputs, inputs, condition, spacing, noise).to(device)
        self.w1 = Parameter((weight_std * normal(start, outputs, hidden)).to(device))
        self.w2 = Parameter((weight_std * normal(start, hidden, inputs)).to(device))
        self.expected = self.objective(torch.eye(inputs, dtype=torch.float64, device=device))
        self.whole, self.batches = self.expected, None
        if sampled is not None:
            self.samples = normal(noise, sampled, inputs).to(device)
            self.whole = self.objective(second_moment(self.samples))
        if sampled is not None and batch is not None:
            self.batches = Batches(sampled, batch, generator(seed, "order"), device)
        self.capturable = self.batches is None

    def objective(self, moment: Tensor) -> Objective:
        return Objective(self.w1, self.w2, self.target, moment)

    def players(self) -> dict[str, list[Parameter]]:
        return {"net": [self.w1, self.w2]}

    def check_optimizers(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        if self.batches is not None and isinstance(optimizers["net"], LevenbergMarquardt):
            raise ValueError("its damping compares losses of the full problem: set task.batch=null")

    def steps(self) -> Iterator[CustomStep]:
        if self.batches is None:
            yield from repeat(CustomStep("net", partial(move, self.whole)))
            return
        for rows in self.batches:
            part = self.objective(second_moment(self.samples.index_select(0, rows)))
            yield CustomStep("net", partial(move, part))

    def evaluate(self) -> dict[str, float]:
        """Return the loss over all samples, if any, and the expected loss."""
        return {"loss": self.whole.loss(), "expected_loss": self.expected.loss()}

    def state_dict(self) -> dict[str, Any]:
        return {} if self.batches is None else {"batches": self.batches.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.batches is None:
            super().load_state_dict(state)
        else:
            self.batches.load_state_dict(state["batches"])


def move(objective: Objective, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step(objective)  # type: ignore[arg-type]  # a loss is a tensor


def second_moment(samples: Tensor) -> Tensor:
    return samples.T @ samples / len(samples)


def normal(source: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=source, dtype=torch.float64)


def ill_conditioned(
    rows: int, columns: int, condition: float, spacing: Spacing, source: torch.Generator
) -> Tensor:
    """Return a random matrix whose singular values go from 1 to 1/condition.

    The talk multiplies the rows of a random matrix by linspace(1, 1/condition) instead: for x ∈ R⁶
    and y ∈ R¹⁰ the condition is then about 20, for any given condition.
    """
    s = singular_values(min(rows, columns), condition, spacing)
    left, right = orthogonal(rows, source), orthogonal(columns, source)
    return left[:, : len(s)] * s @ right[:, : len(s)].T


def singular_values(count: int, condition: float, spacing: Spacing) -> Tensor:
    if spacing == "linear":
        return torch.linspace(1, 1 / condition, count, dtype=torch.float64)
    return torch.linspace(0, -math.log(condition), count, dtype=torch.float64).exp()


def orthogonal(size: int, source: torch.Generator) -> Tensor:
    """Draw a uniformly distributed orthogonal matrix; the signs make QR unique."""
    q, r = torch.linalg.qr(normal(source, size, size))
    return q * r.diagonal().sign()
