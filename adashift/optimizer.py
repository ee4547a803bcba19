"""AdaShift (Zhou et al., ICLR 2019) as a torch optimizer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from math import inf, nan
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from adashift.spatial import Phi, get_phi, zero_v


def window_weights(beta1: float, m: int) -> list[float]:
    """The weights of g_t, g_{t-1}, ..., g_{t-m+1} in m_t: β1^i over their sum.

    >>> window_weights(0.5, 2)
    [0.6666666666666666, 0.3333333333333333]
    """
    total = sum(beta1**i for i in range(m))
    return [beta1**i / total for i in range(m)]


def adashift_step(
    window: Sequence[Tensor],
    g_shifted: Tensor,
    v: Tensor,
    k: int,
    *,
    alpha: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    phi: Phi,
) -> tuple[Tensor, Tensor]:
    """One update of one block: returns θ_t - θ_{t+1} and v_t.

    window holds g_t, g_{t-1}, ... (newest first), g_shifted is g_{t-n} and k = t - n.
    """
    beta1, beta2 = betas
    weights = window_weights(beta1, len(window))
    # A weight of 0 must drop its gradient: 0 * inf is NaN.
    terms = (w * g for w, g in zip(weights, window, strict=True) if w > 0)
    m = sum(terms, start=torch.zeros_like(window[0]))
    v = beta2 * v + (1 - beta2) * get_phi(phi)(g_shifted**2)  # sees g_{t-n}, never g_t
    step = alpha * m / ((v / (1 - beta2**k)).sqrt() + eps)
    # Without a gradient scale, dividing by eps would give steps of lr * 1e8. NaN is not hidden.
    return torch.where(v == 0, 0.0, step), v


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
    deepcopy and torch.load(weights_only=True) lose nothing. State tensors are replaced, never
    written to: load_state_dict shares them with the dict that it loads.
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

    A parameter does not move during its first n gradients, nor where v_t is still 0.

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
        n = group["n"]
        if not state:
            state.update(step=0, n=n, v=zero_v(group["phi"], g))
        if state["n"] != n:
            raise RuntimeError(
                f"n was changed from {state['n']} to {n} during training; the stored gradients "
                "do not fit: build a new AdaShift, which starts with n steps without motion"
            )
        state["step"] = t = state["step"] + 1
        g_shifted = state.get(f"g{t % n}")  # ring of n slots: g_t takes the place of g_{t-n}
        state[f"g{t % n}"] = g.clone()
        if g_shifted is None:  # t <= n
            return
        step, state["v"] = adashift_step(
            [state[f"g{(t - i) % n}"] for i in range(group["m"] or n)],
            g_shifted,
            state["v"],
            k=t - n,
            alpha=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            phi=group["phi"],
        )
        p.sub_(step)
