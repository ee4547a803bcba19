"""What every optimizer of this package shares: option checks, the step loop and checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from math import inf, nan
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

ParamState = dict[str, Any]
ParamGroup = dict[str, Any]


def check_number(name: str, x: Any, low: float, high: float, usual: float, end: str = ")") -> Any:
    """Return x as a plain number if it lies in [low, high) (or [low, high] for end="]")."""
    number = x if isinstance(x, Tensor) else float(x) if isinstance(x, Real) else nan
    if not (low <= number < high or (end == "]" and number == high)):
        raise ValueError(f"{name} is {x!r}; it must be in [{low}, {high}{end}, usually {usual}")
    return number


def check_betas(betas: Any, end: str = ")") -> tuple[float, float]:
    """Return betas as a tuple of two numbers; end="]" allows β1 = 1."""
    pair = tuple(betas) if isinstance(betas, Iterable) else ()
    if len(pair) != 2:
        raise ValueError(f"betas is {betas!r}; it must be two numbers, usually (0.9, 0.999)")
    beta1 = check_number("betas[0]", pair[0], 0, 1, 0.9, end)
    return beta1, check_number("betas[1]", pair[1], 0, 1, 0.999)


def check_count(name: str, x: Any, high: float, hint: str) -> int:
    """Return x as an int if it is an integer in 1..high."""
    if not (isinstance(x, Integral) and 1 <= int(x) <= high):
        bound = "" if high == inf else f" <= {high}"
        raise ValueError(f"{name} is {x!r}; it must be an integer, 1 <= {name}{bound}: {hint}")
    return int(x)


class PerParameter(Optimizer, ABC):
    """An optimizer that updates parameters separately; subclasses define `_check` and `_update`.

    All options are in param_groups and `state` contains only ints, floats and tensors, so that
    pickle, deepcopy and torch.load(weights_only=True) preserve everything.
    """

    def __init__(self, params: ParamsT, options: dict[str, Any]) -> None:
        super().__init__(params, self._check(options))

    def add_param_group(self, param_group: ParamGroup) -> None:
        super().add_param_group(self._check({**self.defaults, **param_group}))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient and return the closure's loss, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            ready = [p for p in group["params"] if p.grad is not None and p.numel() > 0]
            self._reject_sparse(ready)
            self._update_group(ready, group)
        return loss

    def _update_group(self, params: list[Tensor], group: ParamGroup) -> None:
        for p in params:
            self._update(as_real(p), gradient_of(p, group), self.state[p], group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint; every tensor is copied and keeps its dtype.

        Optimizer.load_state_dict casts state to the parameter's dtype and shares memory with the
        dict.
        """
        loaded: list[dict[str, Any]] = []  # the dict after all pre-hooks
        first = self.register_load_state_dict_pre_hook(lambda _, given: loaded.append(given))
        last = self.register_load_state_dict_post_hook(
            lambda _: self._restore(loaded[-1]), prepend=True
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            first.remove()
            last.remove()

    def _restore(self, state_dict: dict[str, Any]) -> None:
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(saved, own, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, Tensor):
                    self.state[p][key] = value.detach().to(p.device, copy=True)

    def _reject_sparse(self, params: list[Tensor]) -> None:
        for p in params:
            if p.grad.layout is not torch.strided:  # type: ignore[union-attr]
                raise RuntimeError(
                    f"a gradient has layout {p.grad.layout}; "  # type: ignore[union-attr]
                    f"{type(self).__name__} needs dense gradients: "
                    "build the embedding with sparse=False"
                )

    @staticmethod
    @abstractmethod
    def _check(options: dict[str, Any]) -> dict[str, Any]:
        """Return the options converted to plain types, or raise ValueError."""

    @abstractmethod
    def _update(self, p: Tensor, g: Tensor, state: ParamState, group: ParamGroup) -> None:
        """Update p in place."""


def as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.dtype.is_complex else x


def raw_gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return as_real(p.grad)


def gradient_of(p: Tensor, group: ParamGroup) -> Tensor:
    """Return the gradient to descend: real, at least float32, with maximize and coupled decay."""
    g = raw_gradient(p)
    g = g.float() if g.dtype in (torch.float16, torch.bfloat16) else g
    g = -g if group.get("maximize") else g
    if group.get("weight_decay") and not group["decoupled_weight_decay"]:
        g = g + group["weight_decay"] * as_real(p)
    return g
