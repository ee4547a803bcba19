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
    """Return x as a float, or the Tensor itself, if it is in [low, high); end="]" allows high."""
    number = x if isinstance(x, Tensor) and x.numel() == 1 else nan
    number = float(x) if isinstance(x, Real) else number
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


def check_switch(name: str, x: Any, *allowed: Any) -> Any:
    """Return x if it is a bool or one of `allowed`."""
    if not (isinstance(x, bool) or any(x is other for other in allowed)):
        names = ["True", "False", *map(str, allowed)]
        raise ValueError(f"{name} is {x!r}; it must be {', '.join(names[:-1])} or {names[-1]}")
    return x


class PerParameter(Optimizer, ABC):
    """An optimizer that updates parameters separately; subclasses define `_check` and `_update`.

    All options are in param_groups and `state` contains only numbers and tensors, so that pickle,
    deepcopy and torch.load(weights_only=True) preserve everything.
    """

    own_options: tuple[str, ...]  # that every checkpoint of the class has
    foreign_options: tuple[str, ...] = ()  # that none has

    def __init__(self, params: ParamsT, options: dict[str, Any]) -> None:
        super().__init__(params, self._check(options))

    def add_param_group(self, param_group: ParamGroup) -> None:
        super().add_param_group(self._check({**self.defaults, **param_group}))
        for p in self.param_groups[-1]["params"]:
            if not (p.is_floating_point() or p.is_complex()):
                self.param_groups.pop()
                raise ValueError(
                    f"a parameter has dtype {p.dtype}; it must be floating-point or complex: "
                    "convert it with .float(), or register it as a buffer"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in self.defaults.keys() - {"differentiable"}:  # which torch adds
            for group in self.param_groups:  # they may be older than an option
                group.setdefault(name, self.defaults[name])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient and return the closure's loss, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [
            ([p for p in group["params"] if p.grad is not None and p.numel() > 0], group)
            for group in self.param_groups
        ]
        for params, group in groups:  # an error must leave every parameter as it was
            self._validate(params, group)
        for params, group in groups:
            self._update_group(params, group)
        return loss

    def _update_group(self, params: list[Tensor], group: ParamGroup) -> None:
        for p in params:
            self._update(*real_pair(p, group), self.state[p], group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint; every tensor is copied and keeps its dtype.

        Optimizer.load_state_dict casts state to the parameter's dtype and shares memory with the
        dict.
        """
        loaded: list[dict[str, Any]] = []  # the dict after all pre-hooks
        first = self.register_load_state_dict_pre_hook(
            lambda _, given: loaded.append(self._checkpoint(given))
        )
        last = self.register_load_state_dict_post_hook(
            lambda _: self._restore(loaded[-1]), prepend=True
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            first.remove()
            last.remove()

    def _checkpoint(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint, or raise ValueError if another optimizer has saved it."""
        name = type(self).__name__
        for group in state_dict["param_groups"]:
            wrong = [f"no {option}" for option in self.own_options if option not in group]
            if wrong := wrong or [option for option in self.foreign_options if option in group]:
                raise ValueError(
                    f"the checkpoint has {', '.join(wrong)}, so it is not of {name}: load it "
                    f"into the optimizer that saved it, or start with a new {name}"
                )
        return state_dict

    def _restore(self, state_dict: dict[str, Any]) -> None:
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(saved, own, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, Tensor):
                    self.state[p][key] = self._restored(key, value.detach(), p)

    def _restored(self, key: str, value: Tensor, p: Tensor) -> Tensor:
        return value.to(p.device, copy=True)

    def _validate(self, params: list[Tensor], group: ParamGroup) -> None:
        """Raise an error for what cannot be stepped."""
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


def real_view(p: Tensor) -> Tensor:
    """p as a real tensor; writing to it writes to p."""
    if not p.is_complex():
        return p
    return torch.view_as_real(p.conj() if p.is_conj() else p)


def real_gradient(p: Tensor) -> Tensor:
    g = p.grad
    assert g is not None
    if p.is_complex() and p.is_conj():  # memory holds conj(p), whose gradient is conj(g)
        g = g.conj()
    return torch.view_as_real(g.resolve_conj()) if g.is_complex() else g


def state_dtype_of(p: Tensor) -> torch.dtype:
    """The dtype of the state of a real parameter: at least single precision."""
    return torch.float32 if p.dtype in (torch.float16, torch.bfloat16) else p.dtype


def real_pair(p: Tensor, group: ParamGroup) -> tuple[Tensor, Tensor]:
    """Return p and the gradient to descend, in the dtype of the state, with coupled decay."""
    theta = real_view(p)
    g = real_gradient(p).to(state_dtype_of(theta))
    g = -g if group.get("maximize") else g
    if group.get("weight_decay") and not group["decoupled_weight_decay"]:
        g = g + group["weight_decay"] * theta
    return theta, g
