"""AdaShift (Zhou et al., ICLR 2019) as a torch optimizer."""

import warnings
from math import ceil, inf, log
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from adashift._base import (
    ParamGroup,
    ParamState,
    PerParameter,
    check_betas,
    check_count,
    check_number,
    check_switch,
    real_view,
)
from adashift._spatial import Phi, get_phi
from adashift._state import check_parameter, check_state, is_plain, new_state, restored
from adashift._steps import fits_kernels, gpu
from adashift._steps.cpu import CpuTable
from adashift._steps.foreach import FlatTable
from adashift._steps.gpu import GpuTable
from adashift._steps.single import step_capturable, step_single

SHARED_WEIGHT = 0.01  # of gradients that v_t has seen, in the m_t of an endless window
OPTIONS_OF_A_PLAN = ("fused", "foreach", "capturable", "phi", "n", "m", "state_dtype")
SWITCHES = ("decoupled_weight_decay", "maximize", "capturable", "stochastic_rounding")


class StepPlan(NamedTuple):
    """Which parameters of a group are stepped together, and which one by one."""

    facts: list[Any]  # what it depends on
    tables: list[CpuTable | FlatTable | GpuTable]
    rest: list[Tensor]


class AdaShift(PerParameter):
    """Adam with v computed from gradients n steps old, so that v_t and g_t are decorrelated.

    For each block (one parameter tensor), where t counts its gradients:

        m_t     = Σ_{i<m} β1^i g_{t-i} / Σ_{i<m} β1^i
        v_t     = β2 v_{t-1} + (1 - β2) φ(g_{t-n}²)
        θ_{t+1} = θ_t - lr m_t / (√(v_t / (1 - β2^(t-n))) + eps)

    A parameter does not change during its first n steps, nor where v_t is still 0: dividing by eps
    alone would give steps of lr · 1e8.

    Try ``lr`` from Adam's to ten times as much, with ``betas=(0.9, 0.999)`` and ``n=10``.
    ``phi="row"`` suits embeddings, ``n=44, m=math.inf`` needs half of Adam's memory. Unlike in
    Adam, ``decoupled_weight_decay`` is True by default. Other implementations call n ``keep_num``
    and φ ``reduce_func``: torch.max is ``phi="max"``, None is ``phi="none"``.

    Args:
        params: parameters or parameter groups; every option below can differ per group.
        lr: learning rate α; about ten times Adam's for φ = max.
        betas: β1 in [0, 1] (0: m_t = g_t, 1: unweighted average) and β2 in [0, 1).
        eps: added outside the square root.
        n: shift; v_t uses the gradient from n steps ago.
        m: window of the first moment, 1 <= m <= n; None means n. math.inf is the bias-corrected
            exponential average of all gradients, which needs one buffer instead of m + 1; take
            n >= ln 0.01 / ln β1 (44 for β1 = 0.9), so that v_t and m_t share little.
        phi: "max", "mean", "row" (a maximum for each index of the first dimension), "none"
            (element-wise), or a function of g² whose result broadcasts to g. Only names can be
            saved in a weights_only checkpoint.
        weight_decay: weight decay coefficient λ.
        decoupled_weight_decay: multiply θ by 1 − lr·λ at every update, as AdamW does; False adds λθ
            to the gradient, as Adam does.
        maximize: maximize the objective instead of minimizing it.
        foreach: use the foreach implementation; None uses it on a GPU without Triton.
        fused: use a fused kernel, one pass over memory. On a CPU it is C code that is compiled on
            first use and cached; on a GPU it is Triton, and None uses it. Without a compiler or
            Triton, True issues a warning and uses the default implementation.
        capturable: read nothing on the host that changes with t, so that step() can be captured in
            a CUDA graph or compiled as a whole; without Triton its cost grows with m.
        stochastic_rounding: round bfloat16 parameters up or down at random, with the right mean.
        state_dtype: torch.bfloat16 stores the gradients of the window in 2 bytes instead of 4.

    All implementations give the same result up to rounding and share checkpoints. Half-precision
    parameters keep their state in float32, apart from ``state_dtype``. A complex parameter is
    treated as pairs of real and imaginary parts.

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

    own_options = ("n", "m", "phi")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        n: int = 10,
        m: int | float | None = None,  # int keeps pydantic from turning 10 into 10.0
        phi: Phi = "max",
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = True,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        stochastic_rounding: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        given = dict(locals()).items()  # a debugger adds new names to the dict itself
        super().__init__(
            params, {k: x for k, x in given if k not in ("self", "params", "__class__")}
        )

    @staticmethod
    def _check(options: dict[str, Any]) -> dict[str, Any]:
        get_phi(options["phi"])
        n = check_count("n", options["n"], inf, "v needs a past gradient, usually n=10")
        m, betas = options["m"], check_betas(options["betas"], end="]")
        chosen = [name for name in ("foreach", "fused", "capturable") if options[name]]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} are True; set at most one of them")
        if options["state_dtype"] not in (None, torch.bfloat16):
            dtype = options["state_dtype"]
            raise ValueError(f"state_dtype is {dtype}; it must be None or torch.bfloat16")
        return options | {
            "lr": check_number("lr", options["lr"], 0, inf, 0.01),
            "betas": betas,
            "eps": float(check_number("eps", options["eps"], 0, inf, 1e-8)),
            "weight_decay": float(check_number("weight_decay", options["weight_decay"], 0, inf, 0)),
            "n": n,
            "m": m if m in (None, inf) else check_count("m", m, n, f"m=None means n={n}"),
            **{name: check_switch(name, options[name]) for name in SWITCHES},
            **{name: check_switch(name, options[name], None) for name in ("foreach", "fused")},
        }

    def add_param_group(self, param_group: ParamGroup) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["m"] == inf:
            warn_of_shared_gradients(float(group["betas"][0]), group["n"])
        for p in group["params"] if group["fused"] else ():
            CpuTable.takes(p, group)  # compile now, so that a warning appears early

    @property
    def _plans(self) -> dict[int, StepPlan]:
        """One for each group; neither copied nor saved with the optimizer."""
        plans: dict[int, StepPlan] = self.__dict__.setdefault("_kept_plans", {})
        return plans

    def _restore(self, state_dict: dict[str, Any]) -> None:
        self._plans.clear()  # they hold the old state, under the ids of old groups
        super()._restore(state_dict)

    def _restored(self, key: str, value: Tensor, p: Tensor) -> Tensor:
        return restored(real_view(p), key, value)

    def _validate(self, params: list[Tensor], group: ParamGroup) -> None:
        super()._validate(params, group)
        if torch.compiler.is_compiling() and group["capturable"]:
            for p in params:
                self._state_of(p, group)
        else:
            self._make_plan(params, group)

    @_disable_dynamo
    def _make_plan(self, params: list[Tensor], group: ParamGroup) -> None:
        """Decide who goes which way, unless nothing has changed since the last step."""
        facts = [group[name] for name in OPTIONS_OF_A_PLAN] + self._facts_of(params)
        plan = self._plans.get(id(group))
        if plan is not None and plan.facts == facts:
            return  # state and parameters are those of the last step
        taken: dict[Any, list[Tensor]] = {}  # table and what its parameters have in common
        for p in params:
            taken.setdefault(self._table_of(p, group), []).append(p)
        rest = taken.pop(None, [])
        flat = {p for key, ps in taken.items() if key[0] is FlatTable for p in ps}
        for table in plan.tables if plan else ():
            if isinstance(table, FlatTable):
                table.release(flat)
        tables = [key[0](ps, [self.state[p] for p in ps], group) for key, ps in taken.items()]
        facts[len(OPTIONS_OF_A_PLAN) :] = self._facts_of(params)  # states may be new
        self._plans[id(group)] = StepPlan(facts, tables, rest)

    def _table_of(self, p: Tensor, group: ParamGroup) -> Any:
        """What steps p together with all that share the key; None if it goes alone."""
        state = self._state_of(p, group)
        slots = state["slots"].dtype if "slots" in state else None
        if may_use_kernels(p, group) and fits_kernels(p, state, group):
            for table in (GpuTable, CpuTable):
                if table.takes(p, group):
                    return table, p.device, p.dtype, slots
        if FlatTable.takes(p, group):
            return FlatTable, p.device, p.dtype, slots, state["number"].dtype, int(state["step"])
        return None

    def _facts_of(self, params: list[Tensor]) -> list[Any]:
        return [facts_of(p, self.state[p]) for p in params]

    def _state_of(self, p: Tensor, group: ParamGroup) -> ParamState:
        """The state of a parameter, made with its first gradient; both must fit."""
        theta, state = real_view(p), self.state[p]
        check_parameter(p, group)
        if not state:
            state.update(new_state(theta, group))
        check_state(theta, state, group)
        return state

    def _update_group(self, params: list[Tensor], group: ParamGroup) -> None:
        if torch.compiler.is_compiling() and group["capturable"]:
            super()._update_group(params, group)
        else:
            self._update_eagerly(group)

    @_disable_dynamo  # t is a Python int: torch.compile would recompile every step
    def _update_eagerly(self, group: ParamGroup) -> None:
        plan = self._plans[id(group)]
        for table in plan.tables:
            table.step(group)
        super()._update_group(plan.rest, group)

    def _update(self, p: Tensor, g: Tensor, state: ParamState, group: ParamGroup) -> None:
        step = step_capturable if group["capturable"] else step_single
        step(p, g, state, group)


def warn_of_shared_gradients(beta1: float, n: int) -> None:
    if beta1**n > SHARED_WEIGHT * 1.0001:  # 0.1**2 is rounded up
        enough = ceil(log(SHARED_WEIGHT) / log(beta1)) if beta1 < 1 else None
        fix = f"use n={enough} or more" if enough else "use betas[0] < 1"
        warnings.warn(
            f"m=inf with betas[0]={beta1} and n={n}: gradients that v_t has seen have a weight of "
            f"{beta1**n:.2g} in m_t, so that the two are correlated; {fix}",
            stacklevel=6,
        )


def may_use_kernels(p: Tensor, group: ParamGroup) -> bool:
    """By default on a GPU alone: Triton comes with torch, while a CPU needs a C compiler."""
    if group["fused"] is None:
        return p.device.type in gpu.DEVICES and not group["foreach"]
    return bool(group["fused"])


def facts_of(p: Tensor, state: ParamState) -> tuple[Any, ...]:
    """What may change between two steps and decides where and how memory is read."""
    if not is_plain(p):
        return (id(p),)
    g = p.grad
    assert g is not None
    own = p.data_ptr(), p.shape, p.stride(), p.dtype
    return *own, g.shape, g.stride(), g.dtype, g.device, g.is_neg(), *map(id, state.values())
