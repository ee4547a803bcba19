"""Trajectories of an optimizer for given gradients, computed by linear filters over time.

If g_t does not depend on θ_t, every moving average in Adam and related optimizers is a linear
filter of the gradients, and θ is a cumulative sum: ten million steps take a fraction of a second
instead of an hour. Gradients may have leading axes (seeds, settings); time is the last axis. Each
filter keeps its state, so a long stream can be processed in chunks.

>>> import torch
>>> adam = torch.optim.Adam([torch.zeros(())], lr=0.1, betas=(0.0, 0.999))
>>> chain = chain_of(adam)
>>> chain.advance(np.array([1.0, -1.0])).update.round(6)
array([ 0.1, -0.1])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import singledispatch
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from scipy.signal import lfilter

from adashift.analysis.theory import Array
from adashift.baselines import AdamNC, SpatialOnly
from adashift.optimizer import AdaShift

NEGLIGIBLE = 2.0**-54  # 1 - NEGLIGIBLE == 1


class NotLinear(TypeError):
    """The optimizer, or one of its settings, has no linear filter form."""


class Moments(NamedTuple):
    """First and second moments and step sizes for a chunk of gradients; θ changes by −update."""

    m: Array
    v: Array
    step_size: Array

    @property
    def update(self) -> Array:
        return self.step_size * self.m


@dataclass
class Filter:
    """y = b(z)/a(z) · x along the last axis; the state is kept between chunks."""

    b: list[float]
    a: list[float]
    state: Array | None = None

    def __call__(self, x: Array) -> Array:
        order = max(len(self.a), len(self.b)) - 1
        if order == 0:
            return self.b[0] * x
        if self.state is None:
            self.state = np.zeros((*x.shape[:-1], order))
        y, self.state = lfilter(self.b, self.a, x, zi=self.state)
        return y


def moving_average(beta: float, delay: int = 0) -> Filter:
    """y_t = β y_{t−1} + (1−β) x_{t−delay}."""
    if beta == delay == 0:
        return Filter([1.0], [1.0])
    return Filter([0.0] * delay + [1 - beta], [1.0, -beta])


def window_average(beta: float, length: int) -> Filter:
    """The average of the newest `length` values with weights β^i (Eq. 18 of the paper)."""
    weights = np.power(float(beta), np.arange(length))
    return Filter(list(weights / weights.sum()), [1.0])


Times = Array
Normalize = Callable[[Array, Times], Array]


def bias_corrected(beta: float, delay: int = 0) -> Normalize:
    """Divide by 1 − β^(t−delay); values at t <= delay are 0 and stay 0."""

    memory = np.log(NEGLIGIBLE) / np.log(beta) if 0 < beta < 1 else 0.0

    def normalize(average: Array, t: Times) -> Array:
        early = int(np.searchsorted(t, memory + delay))  # the divisor is 1 after that
        seen = np.maximum(t[:early] - delay, 1)
        average[..., :early] /= 1 - np.power(float(beta), seen)
        return average

    return normalize


def running_maximum(inner: Normalize) -> Normalize:
    """AMSGrad as in torch: the maximum of the raw average, with bias correction afterwards."""
    largest: list[Array] = []

    def normalize(average: Array, t: Times) -> Array:
        if largest:
            np.maximum(average[..., 0], largest.pop(), out=average[..., 0])
        raised = np.maximum.accumulate(average, axis=-1)
        largest.append(raised[..., -1].copy())
        return inner(raised, t)

    return normalize


def unchanged(average: Array, t: Times) -> Array:
    return average


@dataclass
class Chain:
    """m_t, v_t and α/(√v_t + ε) of one optimizer over a gradient stream."""

    lr: float
    eps: float
    first: Filter
    second: Filter
    correct_first: Normalize = unchanged
    correct_second: Normalize = unchanged
    t: int = field(default=0, init=False)

    def advance(self, g: Array) -> Moments:
        """Process the next chunk of gradients, shape (…, time)."""
        t = np.arange(self.t + 1, self.t + g.shape[-1] + 1, dtype=np.float64)
        self.t += g.shape[-1]
        v = self.second_moment(g, t)
        return Moments(self.first_moment(g, t), v, self.step_sizes(v))

    def first_moment(self, g: Array, t: Times) -> Array:
        return self.correct_first(self.first(g), t)

    def second_moment(self, g: Array, t: Times) -> Array:
        return self.correct_second(self.second(g * g), t)

    def step_sizes(self, v: Array) -> Array:
        return self.lr / (np.sqrt(v) + self.eps)

    def net_update_factors(self, step_size: Array) -> Array:
        """Return k(g_t) of Eq. 8: the effect of g_t over all later steps in `step_size`.

        Valid for gradients after the bias correction of m has become negligible.
        """
        future = Filter(self.first.b, self.first.a)
        return future(step_size[..., ::-1])[..., ::-1]


class PlainChain(Chain):
    """SGD with or without momentum: v = 1 (Section 3.1)."""

    def __init__(self, lr: float, momentum: float, dampening: float) -> None:
        dampening = dampening if momentum else 0.0  # torch ignores it without momentum
        first = Filter([1 - dampening], [1.0, -momentum])
        super().__init__(lr, 0.0, first, Filter([1.0], [1.0]))
        self.dampening = dampening

    def first_moment(self, g: Array, t: Times) -> Array:
        if self.first.state is None:  # torch initializes the buffer with g_1, undamped
            self.first.state = self.dampening * g[..., :1]
        return self.first(g)

    def second_moment(self, g: Array, t: Times) -> Array:
        return np.ones_like(g)


class ShiftedChain(Chain):
    """AdaShift: no update while v is 0, as it is during the first n steps."""

    def step_sizes(self, v: Array) -> Array:
        return np.divide(self.lr, np.sqrt(v) + self.eps, out=np.zeros_like(v), where=v > 0)


class NesterovChain(Chain):
    """NAdam as in torch: β1 warms up, and the newest gradient enters m twice."""

    def __init__(
        self, beta1: float, momentum_decay: float, beta2: float, *, lr: float, eps: float
    ) -> None:
        super().__init__(
            lr,
            eps,
            first=moving_average(beta1),
            second=moving_average(beta2),
            correct_second=bias_corrected(beta2),
        )
        self.beta1, self.momentum_decay, self.mu_product = beta1, momentum_decay, 1.0

    def first_moment(self, g: Array, t: Times) -> Array:
        mu, mu_next = (
            self.beta1 * (1 - 0.5 * 0.96 ** (s * self.momentum_decay)) for s in (t, t + 1)
        )
        product = self.mu_product * np.cumprod(mu)
        self.mu_product = float(product[-1])
        old = mu_next / (1 - product * mu_next) * self.first(g)
        return (1 - mu) / (1 - product) * g + old

    def net_update_factors(self, step_size: Array) -> Array:
        raise NotLinear("NAdam's weights change at each step: k has no filter form")


def group_settings(optimizer: torch.optim.Optimizer, **required: object) -> dict:
    """Return the settings of the only group, if no enabled setting makes the update depend on θ."""
    if len(optimizer.param_groups) != 1:
        raise NotLinear(
            f"{type(optimizer).__name__} has {len(optimizer.param_groups)} groups, expected 1"
        )
    if optimizer.state:
        raise NotLinear(f"{type(optimizer).__name__} has already taken steps")
    group = optimizer.param_groups[0]
    for name, value in {"weight_decay": 0, "maximize": False, **required}.items():
        if group.get(name, value) != value:
            raise NotLinear(f"{type(optimizer).__name__} with {name}={group[name]!r}")
    return group


def scalar_settings(optimizer: torch.optim.Optimizer) -> dict:
    """The same for an optimizer with φ: for a scalar parameter every named φ is the identity."""
    group = group_settings(optimizer)
    if callable(group["phi"]) or [p.numel() for p in group["params"]] != [1]:
        raise NotLinear(f"{type(optimizer).__name__} with phi={group['phi']!r} over a block")
    return group


def chain_of(optimizer: torch.optim.Optimizer) -> Chain:
    """Return the filter chain of an optimizer with its settings."""
    if type(optimizer) not in chain_by_type.registry:  # a subclass may have another update
        raise NotLinear(f"{type(optimizer).__name__} has no filter form")
    return chain_by_type(optimizer)


@singledispatch
def chain_by_type(optimizer: torch.optim.Optimizer) -> Chain:
    raise AssertionError("chain_of passes only registered types")


@chain_by_type.register
def _(optimizer: torch.optim.SGD) -> Chain:
    s = group_settings(optimizer, nesterov=False)
    return PlainChain(s["lr"], s["momentum"], s["dampening"])


@chain_by_type.register
def _(optimizer: torch.optim.Adam) -> Chain:
    s = group_settings(optimizer)
    beta1, beta2 = s["betas"]
    correct = bias_corrected(beta2)
    return Chain(
        s["lr"],
        s["eps"],
        moving_average(beta1),
        moving_average(beta2),
        bias_corrected(beta1),
        running_maximum(correct) if s["amsgrad"] else correct,
    )


@chain_by_type.register
def _(optimizer: torch.optim.NAdam) -> Chain:
    s = group_settings(optimizer, decoupled_weight_decay=False)
    beta1, beta2 = s["betas"]
    return NesterovChain(beta1, s["momentum_decay"], beta2, lr=s["lr"], eps=s["eps"])


@chain_by_type.register
def _(optimizer: SpatialOnly) -> Chain:
    s = scalar_settings(optimizer)
    beta1, beta2 = s["betas"]
    return Chain(
        s["lr"],
        s["eps"],
        moving_average(beta1),
        moving_average(beta2),
        bias_corrected(beta1),
        bias_corrected(beta2),
    )


@chain_by_type.register
def _(optimizer: AdamNC) -> Chain:
    s = group_settings(optimizer)
    return Chain(
        s["lr"],
        s["eps"],
        moving_average(s["beta1"]),
        Filter([1.0], [1.0, -1.0]),
        bias_corrected(s["beta1"]),
        lambda total, t: total / t,
    )


@chain_by_type.register
def _(optimizer: AdaShift) -> Chain:
    s = scalar_settings(optimizer)
    beta1, beta2 = s["betas"]
    n, m = s["n"], s["m"] or s["n"]
    if m == inf and beta1 == 1:
        raise NotLinear("AdaShift with m=inf and betas[0]=1: the weights change at each step")
    return ShiftedChain(
        s["lr"],
        s["eps"],
        moving_average(beta1) if m == inf else window_average(beta1, m),
        moving_average(beta2, delay=n),
        bias_corrected(beta1) if m == inf else unchanged,
        bias_corrected(beta2, delay=n),
    )


def parameter_path(
    start: Array, updates: Array, bounds: tuple[float, float] | None = None
) -> Array:
    """Return θ after each update; with `bounds`, θ is clipped after every update."""
    if bounds is None:
        return start[..., None] - np.cumsum(updates, axis=-1)
    shift, low, high = -updates, np.full_like(updates, bounds[0]), np.full_like(updates, bounds[1])
    for reach in doublings(updates.shape[-1]):
        # Maps x → clip(x + shift, low, high) compose to a map of the same form, so a prefix scan
        # needs log T passes.
        old, new = np.s_[..., :-reach], np.s_[..., reach:]
        low[new], high[new] = (
            np.clip(bound[old] + shift[new], low[new], high[new]) for bound in (low, high)
        )
        shift[new] = shift[old] + shift[new]
    return np.clip(start[..., None] + shift, low, high)


def doublings(length: int) -> Iterator[int]:
    reach = 1
    while reach < length:
        yield reach
        reach *= 2
