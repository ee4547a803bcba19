"""The online problems on which Adam moves in the wrong direction: f_t(θ) = g_t θ, g_t given."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveInt

from adashift.analysis.theory import Array
from adashift.analysis.trajectory import Chain, Moments, NotLinear, chain_of, parameter_path
from experiments.task import CustomStep, Metrics, Task


@dataclass
class Sequential:
    """Eq. 6: C at the first step of every epoch of d steps, −1 otherwise."""

    C: float
    d: int

    def __post_init__(self) -> None:
        if self.d < 1:
            raise ValueError(f"d is {self.d}; expected an epoch of at least 1 step")
        if self.C <= 0:
            raise ValueError(f"C is {self.C}; expected a positive number")

    @property
    def period(self) -> int:
        return self.d

    def gradients(self, start: int, count: int, rng: np.random.Generator) -> Array:
        """Return g_t for t = start+1 … start+count."""
        t = np.arange(start, start + count)
        return np.where(t % self.d == 0, self.C, -1.0)


@dataclass
class Stochastic:
    """Eq. 7: C with probability (1+δ)/(C+1), −1 otherwise, so the mean gradient is δ."""

    C: float
    delta: float

    def __post_init__(self) -> None:
        if not 0 < self.delta < self.C:
            raise ValueError(f"delta is {self.delta}; expected a number between 0 and C = {self.C}")

    @property
    def period(self) -> int:
        return 1

    @property
    def p(self) -> float:
        return (1 + self.delta) / (self.C + 1)

    def gradients(self, start: int, count: int, rng: np.random.Generator) -> Array:
        return np.where(rng.random(count) < self.p, self.C, -1.0)


Problem = Sequential | Stochastic

WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__

SAVED = ("done", "loss_sum", "gradient_sum")  # in a checkpoint of a Trajectory


def numpy_generator(seed: int) -> np.random.Generator:
    """Return the generator of a seed; all optimizers get the same draws, for paired comparison."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))


class Trajectory(Task):
    """The path of θ from 0, in blocks of steps.

    An optimizer that is a chain of linear filters takes a block at once; any other optimizer takes
    its steps one by one. A resumed run draws its gradients again and repeats the filters, so that
    neither needs a checkpoint. The metrics of a block are the mean θ, the last θ, the mean v and
    the mean step size. On a bounded set they include the average regret so far (`regret`), its
    share of the worst θ's regret (`relative_regret`), its `excess` over the bound of Theorem 1.
    """

    def __init__(
        self,
        problem: Problem,
        block: PositiveInt,
        warm_up: NonNegativeInt,
        bounds: tuple[float, float] | None,
        seed: int,
        device: torch.device,
        length: PositiveInt | None = None,
    ) -> None:
        if bounds is not None and not bounds[0] <= 0 <= bounds[1]:
            raise ValueError(f"bounds are {list(bounds)}; expected an interval around the start, 0")
        self.problem, self.block, self.warm_up, self.bounds = problem, block, warm_up, bounds
        self.length = length
        self.rng = numpy_generator(seed)
        # On the CPU, whatever the device: one number, which every block or step reads.
        self.theta = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.t = self.done = 0  # gradients drawn; steps recorded, without the warm-up
        self.chain: Chain | None = None
        self.metrics: Metrics = {}
        self.loss_sum = self.gradient_sum = 0.0

    def players(self) -> dict[str, list[torch.nn.Parameter]]:
        return {"theta": [self.theta]}

    def steps(self) -> Iterator[CustomStep]:
        """Yield blocks; the last one is cut to the length of the run."""
        for start in itertools.count(self.done, self.block):
            left = self.block if self.length is None else min(self.block, self.length - start)
            yield CustomStep("theta", partial(self.take_block, count=left), left)

    def take_block(self, optimizer: torch.optim.Optimizer, count: int) -> None:
        if self.t == 0:
            self.chain = chain_or_none(optimizer)
            if self.chain is None:
                self.slow_because = "it has no filter form, so its steps are taken one by one"
            if self.done:
                self.repeat()
            elif self.warm_up:
                self.move(optimizer, self.draw(self.warm_up))
                self.theta.data.zero_()
        start = self.theta.item()
        g = self.draw(count)
        path, moments = self.move(optimizer, g)
        self.done += count
        self.summarize(start, path, g, moments)

    def repeat(self) -> None:
        """Draw the gradients before a checkpoint again, in the same blocks."""
        for count in (self.warm_up, *[self.block] * (self.done // self.block)):
            g = self.draw(count)
            if self.chain and count:
                self.chain.advance(g)

    def draw(self, count: int) -> Array:
        start, self.t = self.t, self.t + count
        return self.problem.gradients(start, count, self.rng)

    def move(self, optimizer: torch.optim.Optimizer, g: Array) -> tuple[Array, Moments | None]:
        """Return θ after each gradient, and the moments if the optimizer is a chain."""
        if self.chain is None:
            return self.take_steps(optimizer, g), None
        moments = self.chain.advance(g)
        path = parameter_path(self.theta.detach().numpy(), moments.update, self.bounds)
        self.theta.data.fill_(float(path[-1]))
        return path, moments

    @torch.no_grad()
    def take_steps(self, optimizer: torch.optim.Optimizer, g: Array) -> Array:
        """Return θ after each gradient; g_t is set directly, which is faster than backward()."""
        step, path = quick_step(optimizer), np.empty(len(g))
        for t, slope in enumerate(torch.tensor(g).unbind()):
            self.theta.grad = slope
            step()
            self.after_step()
            path[t] = self.theta.item()
        return path

    def after_step(self) -> None:
        if self.bounds is not None:
            self.theta.data.clamp_(*self.bounds)

    def summarize(self, start: float, path: Array, g: Array, moments: Moments | None) -> None:
        self.metrics = {"theta": path.mean(), "theta_last": path[-1]}
        if moments is not None:
            self.metrics |= {"v": moments.v.mean(), "step_size": moments.step_size.mean()}
        if self.bounds is not None:
            before = np.append(start, path[:-1])  # f_t is evaluated at θ_t, before g_t moves it
            self.loss_sum += float((g * before).sum())
            self.gradient_sum += float(g.sum())
            self.metrics |= self.regrets(self.bounds, moments)

    def regrets(self, bounds: tuple[float, float], moments: Moments | None) -> Metrics:
        best, worst = sorted(bound * self.gradient_sum for bound in bounds)
        regret = (self.loss_sum - best) / (self.t - self.warm_up)
        found = {"regret": regret}
        if worst > best:
            found["relative_regret"] = (self.loss_sum - best) / (worst - best)
        if moments is not None:
            epsilon2 = moments.step_size.max() * max(self.problem.C, 1.0) ** 2
            found["excess"] = regret - epsilon2
        return found

    def evaluate(self) -> Metrics:
        return dict(self.metrics)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SAVED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in SAVED:
            setattr(self, name, state[name])


def chain_or_none(optimizer: torch.optim.Optimizer) -> Chain | None:
    try:
        return chain_of(optimizer)
    except NotLinear:
        return None


def quick_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Return step() without torch's wrapper for profiler and hooks, if the optimizer has no hooks.

    The wrapper takes longer than an update of a single number.
    """
    step: Any = optimizer.step
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    wrapped = getattr(step, "__code__", None) is WRAPPER and not hooks
    return partial(step.__wrapped__, optimizer) if wrapped else step
