"""AdaShift (Zhou et al., ICLR 2019) as a torch optimizer."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from math import inf, nan
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from adashift.spatial import Phi, get_phi, phi_of_square, zero_v
from adashift.window import Terms, push


def check_number(name: str, x: Any, low: float, high: float, usual: float, end: str = ")") -> Any:
    """Return x as a plain number if it lies in [low, high) (or [low, high] for end="]")."""
    number = x if isinstance(x, Tensor) else float(x) if isinstance(x, Real) else nan
    if not (low <= number < high or (end == "]" and number == high)):
        raise ValueError(f"{name} is {x!r}; it must be in [{low}, {high}{end}, usually {usual}")
    return number


def check_betas(betas: Any, end: str = ")") -> tuple[float, float]:
    """Return betas as a tuple of two numbers; end="]" lets β1 be 1."""
    pair = tuple(betas) if isinstance(betas, Iterable) else ()
    if len(pair) != 2:
        raise ValueError(f"betas is {betas!r}; give two numbers, usually (0.9, 0.999)")
    beta1 = check_number("betas[0]", pair[0], 0, 1, 0.9, end)
    return beta1, check_number("betas[1]", pair[1], 0, 1, 0.999)


def check_count(name: str, x: Any, high: float, cure: str) -> int:
    """Return x as an int if it is a whole number in 1..high."""
    if not (isinstance(x, Integral) and 1 <= int(x) <= high):
        bound = "" if high == inf else f" <= {high}"
        raise ValueError(f"{name} is {x!r}; it must be a whole number, 1 <= {name}{bound}: {cure}")
    return int(x)


class PerParameter(Optimizer, ABC):
    """A rule that treats each parameter alone. Subclasses write `_check` and `_update`.

    All options live in param_groups and `state` holds ints and tensors only, so that pickle,
    deepcopy and torch.load(weights_only=True) lose nothing.
    """

    def __init__(self, params: ParamsT, options: dict[str, Any]) -> None:
        super().__init__(params, self._check(options))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(self._check({**self.defaults, **param_group}))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the closure's loss, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel() > 0:
                    self._refuse_unsupported(p.grad)
                    self._update(p, p.grad, self.state[p], group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint; every tensor is copied and keeps its dtype.

        torch would cast state to the parameter's dtype and share its memory with the dict.
        """
        super().load_state_dict(state_dict)
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(saved, own, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, Tensor):
                    self.state[p][key] = value.detach().to(p.device, copy=True)

    def _refuse_unsupported(self, g: Tensor) -> None:
        name = type(self).__name__
        if g.layout != torch.strided:
            raise RuntimeError(
                f"a gradient has layout {g.layout}; {name} needs dense gradients: "
                "build the embedding with sparse=False"
            )
        if g.dtype not in (torch.float32, torch.float64):
            raise RuntimeError(
                f"a parameter is {g.dtype}; {name} keeps its state in the parameter's type and "
                "needs float32 or float64: keep such parameters and compute under autocast"
            )

    @staticmethod
    @abstractmethod
    def _check(options: dict[str, Any]) -> dict[str, Any]:
        """The options in plain types, or a ValueError."""

    @abstractmethod
    def _update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Move p by the rule."""


class AdaShift(PerParameter):
    """Adam's step with v taken from old gradients, so that v_t and g_t are not correlated.

    For each block (one parameter tensor), t counting the gradients that it has had:

        m_t     = Σ_{i<m} β1^i g_{t-i} / Σ_{i<m} β1^i
        v_t     = β2 v_{t-1} + (1 - β2) φ(g_{t-n}²)
        θ_{t+1} = θ_t - lr m_t / (√(v_t / (1 - β2^(t-n))) + eps)

    A parameter does not move during its first n gradients, nor where v_t is still 0: without a
    scale of gradients, dividing by eps would give steps of lr · 1e8.

    Args:
        params: parameters or parameter groups; every option below can differ per group.
        lr: step size α; the paper's is about ten times Adam's for φ = max.
        betas: β1 in [0, 1] (0: m_t = g_t, 1: plain average) and β2 in [0, 1).
        eps: added outside the root.
        n: shift; v_t uses the gradient of n steps ago.
        m: window of the first moment, 1 <= m <= n; None means n.
        phi: "max", "mean", "none" (element-wise), or a function of g² whose result
            broadcasts to g. Only the names can be saved in a weights_only checkpoint.

    Example:
        >>> theta = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = AdaShift([theta], lr=0.1, n=2)
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     (theta**2).sum().backward()
        ...     optimizer.step()
        >>> theta
        Parameter containing:
        tensor([0.8053], requires_grad=True)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        n: int = 10,
        m: int | None = None,
        phi: Phi = "max",
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, n=n, m=m, phi=phi))

    @staticmethod
    def _check(options: dict[str, Any]) -> dict[str, Any]:
        get_phi(options["phi"])
        n = check_count("n", options["n"], inf, "v needs a past gradient, usually n=10")
        m = options["m"]
        return options | {
            "lr": check_number("lr", options["lr"], 0, inf, 0.01),
            "betas": check_betas(options["betas"], end="]"),
            "eps": check_number("eps", options["eps"], 0, inf, 1e-8),
            "n": n,
            "m": m if m is None else check_count("m", m, n, f"m=None means n={n}"),
        }

    def _update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        n, (beta1, beta2), phi = group["n"], group["betas"], group["phi"]
        if not state:
            state.update(step=0, n=n, v=zero_v(phi, g))
        if state["n"] != n:
            raise RuntimeError(
                f"n was changed from {state['n']} to {n} during training; the stored gradients "
                "do not fit: build a new AdaShift, which starts with n steps without motion"
            )
        state["step"] = t = state["step"] + 1
        terms = push(state, g, t, beta1, group["m"] or n)
        phi_old = state.get(f"phi{t % n}")  # φ(g_{t-n}²): all that v needs of an old gradient
        state[f"phi{t % n}"] = phi_of_square(phi, g)
        if phi_old is None:  # t <= n
            return
        state["v"] = v = beta2 * state["v"] + (1 - beta2) * phi_old  # sees g_{t-n}, never g_t
        correction = 1 - beta2 ** (t - n)
        if v.dim() == 0 and v.device.type == "cpu":
            v_hat = v.item() / correction
            if v_hat != 0:
                move(p, terms, float(group["lr"]) / (math.sqrt(v_hat) + group["eps"]))
        else:
            scale = group["lr"] / ((v / correction).sqrt() + group["eps"])
            m = sum(weight * buffer for buffer, weight in terms)
            p.sub_(torch.where(v == 0, 0.0, scale * m))  # NaN is not hidden


def move(p: Tensor, terms: Terms, step_size: float) -> None:
    """θ −= step size · m_t, without making m_t."""
    for buffer, weight in terms:
        p.add_(buffer, alpha=-step_size * weight)
