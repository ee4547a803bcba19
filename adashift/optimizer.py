"""AdaShift (Zhou et al., ICLR 2019) as a torch optimizer."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from math import inf, nan
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, ParamsT

from adashift import capturable as captured
from adashift import fused as kernel
from adashift import lists
from adashift.spatial import PHI, Phi, get_phi, phi_of_square, zero_v
from adashift.window import Move, State, Terms, absorb, plan

PHI_NUMBER = {name: number for number, name in enumerate(PHI)}


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
            ready = [p for p in group["params"] if p.grad is not None and p.numel() > 0]
            self._refuse_unsupported(ready)
            self._update_group(ready, group)
        return loss

    def _update_group(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for p in params:
            self._update(as_real(p), gradient_of(p, group), self.state[p], group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint; every tensor is copied and keeps its dtype.

        torch would cast state to the parameter's dtype and share its memory with the dict.
        """
        loaded: list[dict[str, Any]] = []  # what the pre-hooks made of it
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

    def _refuse_unsupported(self, params: list[Tensor]) -> None:
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
        """The options in plain types, or a ValueError."""

    @abstractmethod
    def _update(self, p: Tensor, g: Tensor, state: State, group: dict[str, Any]) -> None:
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
        weight_decay: λ; 0 is off.
        decoupled_weight_decay: shrink θ by lr·λ with every step, as AdamW does; False adds λθ to
            the gradient, as Adam does.
        maximize: climb instead of descending.
        foreach: work on lists of tensors; None: on a GPU, where it is faster, but not on a CPU.
        fused: one pass over memory. On a CPU this compiles a C file of 200 lines on first use and
            keeps the result; on a GPU it takes Triton. Without these: a warning, and the default.
        capturable: no number that changes with t is read on the host, so that step() can be
            captured in a CUDA graph or compiled as a whole; its cost grows with m.

    All of these compute the same, up to rounding, and share their checkpoints, but for capturable,
    which counts steps in a tensor.

    Parameters in half precision keep their state in float32. A complex parameter is treated as the
    pairs of its real and imaginary parts.

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
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = True,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        options = dict(lr=lr, betas=betas, eps=eps, n=n, m=m, phi=phi, weight_decay=weight_decay)
        options |= dict(decoupled_weight_decay=decoupled_weight_decay, maximize=maximize)
        options |= dict(foreach=foreach, fused=fused, capturable=capturable)
        super().__init__(params, options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # checkpoints from before these options existed
            group.setdefault("weight_decay", 0.0)
            group.setdefault("decoupled_weight_decay", True)
            group.setdefault("maximize", False)
            group.setdefault("foreach", None)
            group.setdefault("fused", None)
            group.setdefault("capturable", False)

    @staticmethod
    def _check(options: dict[str, Any]) -> dict[str, Any]:
        get_phi(options["phi"])
        n = check_count("n", options["n"], inf, "v needs a past gradient, usually n=10")
        m = options["m"]
        chosen = [way for way in ("foreach", "fused", "capturable") if options[way]]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} are both True; they exclude each other")
        return options | {
            "lr": check_number("lr", options["lr"], 0, inf, 0.01),
            "betas": check_betas(options["betas"], end="]"),
            "eps": check_number("eps", options["eps"], 0, inf, 1e-8),
            "weight_decay": check_number("weight_decay", options["weight_decay"], 0, inf, 0),
            "n": n,
            "m": m if m is None else check_count("m", m, n, f"m=None means n={n}"),
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.param_groups[-1]["fused"]:  # compile now, so that a warning comes at once
            for p in self.param_groups[-1]["params"]:
                kernel.takes(as_real(p), self.param_groups[-1]["phi"])

    def _update_group(self, params: list[Tensor], group: dict[str, Any]) -> None:
        if group["capturable"]:
            for p in params:
                update_captured(as_real(p), gradient_of(p, group), self.state[p], group)
        else:
            self._update_eagerly(params, group)

    @_disable_dynamo  # t is a number here: torch.compile would compile every step anew
    def _update_eagerly(self, params: list[Tensor], group: dict[str, Any]) -> None:
        if group["fused"] or (params and by_lists(params[0], group)):
            self._update_together(params, group)
        else:
            super()._update_group(params, group)

    def _update(self, p: Tensor, g: Tensor, state: State, group: dict[str, Any]) -> None:
        t = begin(state, g, group)
        move = plan(state, g, t, group["betas"][0], group["m"] or group["n"])
        update(p, g, state, move, t, group)

    def _update_together(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """By the kernel, else by lists; what neither takes goes its own way."""
        beta1, m = group["betas"][0], group["m"] or group["n"]
        entries, jobs = list[lists.Entry](), kernel.Jobs(group)
        for p in params:
            theta, state = as_real(p), self.state[p]
            fused = group["fused"] and kernel.takes(theta, group["phi"])
            g = raw_gradient(p) if fused else gradient_of(p, group)  # the kernel does the rest
            t = begin(state, g, group)
            move = plan(state, g, t, beta1, m)
            if fused and kernel.fits(theta, g, move, state["v"], state[f"phi{t % group['n']}"]):
                jobs.add(theta, g, move, state, t)
            elif by_lists(p, group):
                entries.append((theta, gradient_of(p, group), state, move, t))
            else:
                update(theta, gradient_of(p, group), state, move, t, group)
        jobs.run()
        lists.update(entries, group)


def by_lists(p: Tensor, group: dict[str, Any]) -> bool:
    """On a GPU unless it is refused, elsewhere if it is asked for."""
    return bool(group["foreach"] or (group["foreach"] is None and not p.is_cpu))


def begin(state: State, g: Tensor, group: dict[str, Any]) -> int:
    """Make the state on the first gradient; return t, which counts a parameter's gradients."""
    n, m, phi = group["n"], group["m"] or group["n"], group["phi"]
    kind = -1 if callable(phi) else PHI_NUMBER[phi]
    if not state:
        v = zero_v(phi, g)  # every key from the first step on: DCP loads only those it finds
        state.update(step=0, n=n, m=m, kind=kind, v=v)
        state.update({f"phi{k}": torch.zeros_like(v) for k in range(n)})
    if isinstance(state["step"], Tensor):
        raise changed("capturable", True, False)
    if (state["n"], state["m"], state["kind"]) != (n, m, kind):
        was = {**state, "phi": [*PHI, "a function"][state["kind"]]}
        now = {"n": n, "m": m, "phi": "a function" if kind < 0 else phi}
        name = next(name for name in now if was[name] != now[name])
        raise changed(name, was[name], now[name])
    state["step"] += 1
    return state["step"]


def changed(name: str, was: Any, now: Any) -> RuntimeError:
    return RuntimeError(
        f"{name} was changed from {was} to {now} during training; what is stored does not fit: "
        "build a new AdaShift, which starts with n steps without motion"
    )


def update(p: Tensor, g: Tensor, state: State, move: Move, t: int, group: dict[str, Any]) -> None:
    """One parameter's step by plain torch operations."""
    n, (beta1, beta2), phi = group["n"], group["betas"], group["phi"]
    terms = absorb(move, g, beta1, group["m"] or n)
    phi_old = state[f"phi{t % n}"]  # φ(g_{t-n}²): all that v needs of an old gradient
    state[f"phi{t % n}"] = phi_of_square(phi, g)
    if t > n:
        by = number_update if is_number(phi_old) else tensor_update
        by(p, terms, state, phi_old, 1 - beta2 ** (t - n), group)


def update_captured(p: Tensor, g: Tensor, state: State, group: dict[str, Any]) -> None:
    if not state:
        state.update(captured.begin(g, group))
    if not isinstance(state["step"], Tensor):
        raise changed("capturable", False, True)
    captured.update(p, g, state, group)


def is_number(x: Tensor) -> bool:
    """Whether reading x is cheap; on a GPU it would wait for all that is under way."""
    return x.dim() == 0 and x.device.type == "cpu"


def weighted(terms: Terms) -> Tensor:
    (buffer, weight), *others = terms
    m = weight * buffer
    for buffer, weight in others:
        m.add_(buffer, alpha=weight)
    return m


def number_update(
    p: Tensor, terms: Terms, state: State, phi_old: Tensor, correction: float, group: dict[str, Any]
) -> None:
    """θ −= α m_t / (√v̂ + ε) where v is one number: neither m_t nor the step is ever made."""
    alpha, beta2 = float(group["lr"]), group["betas"][1]
    v = beta2 * state["v"].item() + (1 - beta2) * phi_old.item()  # sees g_{t-n}, never g_t
    state["v"].fill_(v)
    if v == 0:  # no scale of gradients yet, and ε alone is none; NaN goes on
        return
    if group["weight_decay"] and group["decoupled_weight_decay"]:
        p.mul_(1 - alpha * group["weight_decay"])
    step_size = alpha / (math.sqrt(v / correction) + group["eps"])
    if p.dtype != terms[0][0].dtype:  # half precision: round once
        terms = [(weighted(terms), 1.0)]
    for buffer, weight in terms:
        p.add_(buffer, alpha=-step_size * weight)


def tensor_update(
    p: Tensor, terms: Terms, state: State, phi_old: Tensor, correction: float, group: dict[str, Any]
) -> None:
    """The same where v is a tensor of any shape, or where reading it would be dear."""
    alpha, beta2 = group["lr"], group["betas"][1]
    v = state["v"].mul_(beta2).add_(phi_old, alpha=1 - beta2)
    step = weighted(terms).div_((v / correction).sqrt_().add_(group["eps"])).mul_(alpha)
    if group["weight_decay"] and group["decoupled_weight_decay"]:
        step.add_(alpha * group["weight_decay"] * p)
    p.sub_(torch.where(v == 0, 0.0, step))


def as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.dtype.is_complex else x


def raw_gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return as_real(p.grad)


def gradient_of(p: Tensor, group: dict[str, Any]) -> Tensor:
    """The gradient as the rule sees it: real, of at least single precision, uphill turned down."""
    g = raw_gradient(p)
    g = g.float() if g.dtype in (torch.float16, torch.bfloat16) else g
    g = -g if group.get("maximize") else g
    if group.get("weight_decay") and not group["decoupled_weight_decay"]:
        g = g + group["weight_decay"] * as_real(p)
    return g
