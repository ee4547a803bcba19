"""How the probe reads each optimizer: where its second moment is and what its step is made of."""

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.optim import (
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)

from adashift._base import ParamGroup, ParamState
from adashift._window import WEIGHT, total_weight
from adashift.baselines import AdamNC, SpatialOnly
from adashift.optimizer import AdaShift

Pick = Callable[[Tensor], Tensor]


class StepFormula(NamedTuple):
    """The formula of one update: θ −= size / (√divisor + eps) · Σ_j weight_j g_{t−j}.

    The weights are `gain` times an average, which is exponential (decay, entry) or over the newest
    `window` gradients with weights decay^j; the current gradient has the additional weight `now`.
    """

    size: float  # 0: no update of this form
    eps: float
    decay: float = 0.0
    entry: float = 1.0
    gain: float = 1.0
    now: float = 0.0
    window: int = 0


class OptimizerReader(NamedTuple):
    """Functions that return the second moment, the step formula and the divisor of an optimizer."""

    v: Callable[[ParamState, ParamGroup, Pick], Tensor]
    step: Callable[[ParamState, ParamGroup], StepFormula]
    divisor: Callable[[ParamState, ParamGroup, Pick, Tensor], Tensor] | None = (
        None  # where it is not v
    )


def adam_v(state: ParamState, group: ParamGroup, pick: Pick) -> Tensor:
    return pick(state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"])


def adam_step(state: ParamState, group: ParamGroup) -> StepFormula:
    t, (beta1, beta2) = float(state["step"]), map(float, group["betas"])
    root = math.sqrt(1 - beta2**t)
    return StepFormula(
        size=float(group["lr"]) * root,
        eps=group["eps"] * root,
        decay=beta1,
        entry=1 - beta1,
        gain=1 / (1 - beta1**t),
    )


def nadam_step(state: ParamState, group: ParamGroup) -> StepFormula:
    t, beta1, decay = float(state["step"]), float(group["betas"][0]), group["momentum_decay"]
    mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (i * decay)) for i in (t, t + 1))
    product = float(state["mu_product"])
    now, gain = (1 - mu) / (1 - product), mu_next / (1 - product * mu_next)
    return adam_step(state, group)._replace(now=now, gain=gain)


def radam_step(state: ParamState, group: ParamGroup) -> StepFormula:
    t, beta2 = float(state["step"]), float(group["betas"][1])
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * t * beta2**t / (1 - beta2**t)
    if length <= 5:  # the first steps are not divided by √v
        return adam_step(state, group)._replace(size=0.0)
    rectify = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    step = adam_step(state, group)
    return step._replace(size=step.size * math.sqrt(rectify), eps=group["eps"])


def adamax_step(state: ParamState, group: ParamGroup) -> StepFormula:
    return adam_step(state, group)._replace(size=float(group["lr"]), eps=0.0)


def adamnc_step(state: ParamState, group: ParamGroup) -> StepFormula:
    t, beta1 = float(state["step"]), group["beta1"]
    size, gain = float(group["lr"]), 1 / (1 - beta1**t)
    return StepFormula(size, group["eps"], decay=beta1, entry=1 - beta1, gain=gain)


def adashift_step(state: ParamState, group: ParamGroup) -> StepFormula:
    t, n, (beta1, beta2) = float(state["step"]), group["n"], map(float, group["betas"])
    m = group["m"] or n
    endless = m == math.inf
    root = math.sqrt(1 - beta2 ** (t - n)) if t > n else 0.0
    return StepFormula(
        size=float(group["lr"]) * root,
        eps=group["eps"] * root,
        decay=beta1,
        gain=1 / (float(state["number"][WEIGHT]) if endless else total_weight(beta1, m)),
        window=0 if endless else m,
    )


def rmsprop_v(state: ParamState, group: ParamGroup, pick: Pick) -> Tensor:
    v = pick(state["square_avg"])
    return v - pick(state["grad_avg"]).square() if group["centered"] else v


def plain_step(state: ParamState, group: ParamGroup) -> StepFormula:
    """No momentum, or momentum applied after the division as in RMSprop."""
    return StepFormula(float(group["lr"]), group["eps"])


def adagrad_step(state: ParamState, group: ParamGroup) -> StepFormula:
    slower = 1 + (float(state["step"]) - 1) * group["lr_decay"]
    return StepFormula(float(group["lr"]) / slower, group["eps"])


def adadelta_step(state: ParamState, group: ParamGroup) -> StepFormula:
    return StepFormula(float(group["lr"]), 0.0)


def adadelta_divisor(state: ParamState, group: ParamGroup, pick: Pick, s: Tensor) -> Tensor:
    """(v + ε) / (d + ε), where d is acc_delta before the step; it is ρd + (1−ρ)Δ² now."""
    rho, eps = group["rho"], group["eps"]
    v, after = pick(state["square_avg"]).to(s), pick(state["acc_delta"]).to(s)
    return (rho * (v + eps) + (1 - rho) * s) / (after + rho * eps)


def keyed(key: str) -> Callable[[ParamState, ParamGroup, Pick], Tensor]:
    return lambda state, group, pick: pick(state[key])


READERS: dict[type[Optimizer], OptimizerReader] = {
    AdaShift: OptimizerReader(keyed("v"), adashift_step),
    SpatialOnly: OptimizerReader(keyed("v"), adam_step),
    AdamNC: OptimizerReader(keyed("v"), adamnc_step),
    NAdam: OptimizerReader(adam_v, nadam_step),
    RAdam: OptimizerReader(adam_v, radam_step),
    Adam: OptimizerReader(adam_v, adam_step),  # and AdamW, a subclass
    Adamax: OptimizerReader(
        lambda state, group, pick: pick(state["exp_inf"]).square(), adamax_step
    ),
    RMSprop: OptimizerReader(rmsprop_v, plain_step),
    Adagrad: OptimizerReader(keyed("sum"), adagrad_step),
    Adadelta: OptimizerReader(keyed("square_avg"), adadelta_step, adadelta_divisor),
}


def reader_of(optimizer: Optimizer) -> OptimizerReader:
    """Return the reader of an optimizer; an unknown one must have Adam's state."""
    for known, reader in READERS.items():
        if isinstance(optimizer, known):
            return reader
    kept = [state for state in optimizer.state.values() if state]
    from_torch = type(optimizer).__module__.startswith("torch.optim")
    if from_torch or not all("exp_avg_sq" in state for state in kept):
        names = ", ".join(known.__name__ for known in READERS)
        raise TypeError(
            f"{type(optimizer).__name__} has no second moment that the probe supports; use one of "
            f"{names}, or an optimizer with Adam's state (exp_avg_sq, step) and options (lr, "
            "betas, eps)"
        )
    return READERS[Adam]


def coupled_weight_decay(optimizer: Optimizer) -> Callable[[ParamGroup], bool]:
    """Return a test for groups with decay in the gradient; unknown optimizers have none."""
    unknown = not isinstance(optimizer, tuple(READERS))
    return lambda group: (
        bool(group.get("weight_decay")) and not group.get("decoupled_weight_decay", unknown)
    )
