"""AdaShift (Zhou et al., ICLR 2019) as a torch optimizer."""

from math import inf
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from adashift._base import (
    ParamGroup,
    ParamState,
    PerParameter,
    as_real,
    check_betas,
    check_count,
    check_number,
    gradient_of,
    raw_gradient,
)
from adashift._spatial import PHI, Phi, get_phi, zero_v
from adashift._steps import capturable as captured
from adashift._steps import cpu
from adashift._steps.foreach import Entry, step_foreach
from adashift._steps.single import step_single
from adashift._window import plan_window

PHI_NUMBER = {name: number for number, name in enumerate(PHI)}


class AdaShift(PerParameter):
    """Adam with v computed from gradients n steps old, so that v_t and g_t are decorrelated.

    For each block (one parameter tensor), where t counts its gradients:

        m_t     = Σ_{i<m} β1^i g_{t-i} / Σ_{i<m} β1^i
        v_t     = β2 v_{t-1} + (1 - β2) φ(g_{t-n}²)
        θ_{t+1} = θ_t - lr m_t / (√(v_t / (1 - β2^(t-n))) + eps)

    A parameter does not change during its first n steps, nor where v_t is still 0: dividing by eps
    alone would give steps of lr · 1e8.

    Args:
        params: parameters or parameter groups; every option below can differ per group.
        lr: learning rate α; about ten times Adam's for φ = max.
        betas: β1 in [0, 1] (0: m_t = g_t, 1: unweighted average) and β2 in [0, 1).
        eps: added outside the square root.
        n: shift; v_t uses the gradient from n steps ago.
        m: window of the first moment, 1 <= m <= n; None means n.
        phi: "max", "mean", "none" (element-wise), or a function of g² whose result
            broadcasts to g. Only names can be saved in a weights_only checkpoint.
        weight_decay: weight decay coefficient λ.
        decoupled_weight_decay: multiply θ by 1 − lr·λ at every step, as AdamW does; False adds λθ
            to the gradient, as Adam does.
        maximize: maximize the objective instead of minimizing it.
        foreach: use the foreach implementation; None uses it on a GPU, where it is faster.
        fused: use a fused kernel, one pass over memory. On a CPU it is C code that is compiled on
            first use and cached; on a GPU it needs Triton. Without a compiler or Triton, it issues
            a warning and uses the default implementation.
        capturable: read nothing on the host that changes with t, so that step() can be captured in
            a CUDA graph or compiled as a whole; its cost grows with m.

    All implementations give the same result up to rounding. They share checkpoints, except
    capturable, which counts steps in a tensor.

    Half-precision parameters keep their state in float32. A complex parameter is treated as pairs
    of real and imaginary parts.

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
        for group in self.param_groups:  # options that older checkpoints do not have
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
        chosen = [name for name in ("foreach", "fused", "capturable") if options[name]]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} are True; set at most one of them")
        return options | {
            "lr": check_number("lr", options["lr"], 0, inf, 0.01),
            "betas": check_betas(options["betas"], end="]"),
            "eps": check_number("eps", options["eps"], 0, inf, 1e-8),
            "weight_decay": check_number("weight_decay", options["weight_decay"], 0, inf, 0),
            "n": n,
            "m": m if m is None else check_count("m", m, n, f"m=None means n={n}"),
        }

    def add_param_group(self, param_group: ParamGroup) -> None:
        super().add_param_group(param_group)
        if self.param_groups[-1]["fused"]:  # compile now, so that a warning appears early
            for p in self.param_groups[-1]["params"]:
                cpu.supports(as_real(p), self.param_groups[-1]["phi"])

    def _update_group(self, params: list[Tensor], group: ParamGroup) -> None:
        if group["capturable"]:
            for p in params:
                step_captured(as_real(p), gradient_of(p, group), self.state[p], group)
        else:
            self._update_eagerly(params, group)

    @_disable_dynamo  # t is a Python int: torch.compile would recompile every step
    def _update_eagerly(self, params: list[Tensor], group: ParamGroup) -> None:
        if group["fused"] or (params and uses_foreach(params[0], group)):
            self._update_together(params, group)
        else:
            super()._update_group(params, group)

    def _update(self, p: Tensor, g: Tensor, state: ParamState, group: ParamGroup) -> None:
        t = advance_state(state, g, group)
        plan = plan_window(state, g, t, group["betas"][0], group["m"] or group["n"])
        step_single(p, g, state, plan, t, group)

    def _update_together(self, params: list[Tensor], group: ParamGroup) -> None:
        """Use the CPU kernel where it applies, else foreach, else one parameter at a time."""
        beta1, m = group["betas"][0], group["m"] or group["n"]
        entries, jobs = list[Entry](), cpu.Jobs(group)
        for p in params:
            theta, state = as_real(p), self.state[p]
            fused = group["fused"] and cpu.supports(theta, group["phi"])
            g = raw_gradient(p) if fused else gradient_of(p, group)  # the kernel does the rest
            t = advance_state(state, g, group)
            plan = plan_window(state, g, t, beta1, m)
            if fused and cpu.supports_layout(
                theta, g, plan, state["v"], state[f"phi{t % group['n']}"]
            ):
                jobs.add(theta, g, plan, state, t)
            elif uses_foreach(p, group):
                entries.append((theta, gradient_of(p, group), state, plan, t))
            else:
                step_single(theta, gradient_of(p, group), state, plan, t, group)
        jobs.run()
        step_foreach(entries, group)


def uses_foreach(p: Tensor, group: ParamGroup) -> bool:
    """Return whether to use foreach: by default on a GPU only."""
    return bool(group["foreach"] or (group["foreach"] is None and not p.is_cpu))


def advance_state(state: ParamState, g: Tensor, group: ParamGroup) -> int:
    """Create the state on the first gradient; return t, the number of the parameter's gradients."""
    n, m, phi = group["n"], group["m"] or group["n"], group["phi"]
    kind = -1 if callable(phi) else PHI_NUMBER[phi]
    if not state:
        v = zero_v(phi, g)  # create every key now: DCP loads only existing keys
        state.update(step=0, n=n, m=m, kind=kind, v=v)
        state.update({f"phi{k}": torch.zeros_like(v) for k in range(n)})
    if isinstance(state["step"], Tensor):
        raise changed_error("capturable", True, False)
    if (state["n"], state["m"], state["kind"]) != (n, m, kind):
        was = {**state, "phi": [*PHI, "a function"][state["kind"]]}
        now = {"n": n, "m": m, "phi": "a function" if kind < 0 else phi}
        name = next(name for name in now if was[name] != now[name])
        raise changed_error(name, was[name], now[name])
    state["step"] += 1
    return state["step"]


def changed_error(name: str, was: Any, now: Any) -> RuntimeError:
    return RuntimeError(
        f"{name} changed from {was} to {now} during training; the stored state needs {name}={was}: "
        "restore it, or create a new AdaShift, which starts with n steps without updates"
    )


def step_captured(p: Tensor, g: Tensor, state: ParamState, group: ParamGroup) -> None:
    if not state:
        state.update(captured.initial_state(g, group))
    if not isinstance(state["step"], Tensor):
        raise changed_error("capturable", False, True)
    captured.step_capturable(p, g, state, group)
