"""Appendix A: how β1, β2 and C change the direction of θ, over a grid of β1 × β2.

In Adam m_t depends only on β1 and the step size only on β2. So a grid of n × n settings needs only
2n filters, and the sum of all updates is one matrix product.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt
from threadpoolctl import threadpool_limits

from adashift.analysis import theory
from adashift.analysis.theory import Array
from adashift.analysis.trajectory import Chain, NotLinear, chain_of
from experiments.task import Measurement, Metrics
from experiments.tasks.counterexample import Problem, Sequential, numpy_generator


def required_chain(optimizer: torch.optim.Optimizer) -> Chain:
    """Return the optimizer's filter chain; raise a ValueError if it has none."""
    try:
        return chain_of(optimizer)
    except NotLinear as error:
        raise ValueError(
            f"this experiment needs an optimizer with a filter form, such as adam: {error}"
        ) from error


def chain_with(optimizer: torch.optim.Optimizer, beta1: float, beta2: float) -> Chain:
    """Return the optimizer's filter chain with other betas."""
    if "betas" not in optimizer.defaults:
        name = type(optimizer).__name__
        raise ValueError(f"this experiment varies betas; {name} has none: use optimizer=adam")
    twin = copy.deepcopy(optimizer)
    twin.param_groups[0]["betas"] = (beta1, beta2)
    return required_chain(twin)


def movement(optimizer: torch.optim.Optimizer, betas: Array, g: Array, skip: int = 0) -> Array:
    """Return the total movement of θ for every (β2, β1) of the grid, averaged over streams.

    g has the shape (streams, time); the first `skip` gradients only fill the moments.
    """
    t = np.arange(1.0, g.shape[-1] + 1)
    chains = [chain_with(optimizer, beta, beta) for beta in betas]
    m = [c.first_moment(g, t)[:, skip:].ravel() for c in chains]
    step_size = [c.step_sizes(c.second_moment(g, t))[:, skip:].ravel() for c in chains]
    # One thread: several can be 100 times slower on a busy machine, and the last bits of the sum
    # would depend on their number.
    with threadpool_limits(1):
        return -(np.stack(step_size) @ np.stack(m).T) / len(g)


def gradient_streams(
    problem: Problem, count: int, streams: PositiveInt, rng: np.random.Generator
) -> Array:
    return np.stack([problem.gradients(0, count, rng) for _ in range(streams)])


class BetaGrid(Measurement):
    """A grid of β1 × β2, from 0 up to but not including 1."""

    def __init__(self, betas: int, seed: int) -> None:
        if betas < 2:
            raise ValueError(f"betas is {betas}; a grid needs at least 2 values of each beta")
        self.betas, self.rng = np.arange(betas) / betas, numpy_generator(seed)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        chain_with(optimizer, 0.5, 0.5)

    def cells(self, **columns: Array) -> Iterator[Metrics]:
        """Yield one row per cell, without the columns that are NaN there."""
        beta2, beta1 = np.meshgrid(self.betas, self.betas, indexing="ij")
        table = {"beta1": beta1, "beta2": beta2, **columns}
        for values in zip(*(np.ravel(c).astype(float) for c in table.values()), strict=True):
            yield {k: v for k, v in zip(table, values, strict=True) if not np.isnan(v)}


class FinalTheta(BetaGrid):
    """Panels a and c of Figure 8: θ after a number of updates from 0, one row per cell."""

    def __init__(
        self,
        problem: Problem,
        updates: PositiveInt,
        streams: PositiveInt,
        betas: int,
        seed: int,
        device: torch.device,
    ) -> None:
        super().__init__(betas, seed)
        self.problem, self.updates, self.streams = problem, updates, streams

    def rows(self, optimizer: torch.optim.Optimizer) -> Iterator[Metrics]:
        g = gradient_streams(self.problem, self.updates, self.streams, self.rng)
        yield from self.cells(theta=movement(optimizer, self.betas, g))


class CriticalC(BetaGrid):
    """Panels b and d of Figure 8: the smallest C for which θ moves in the wrong direction.

    The first rows are one per C, with the share of cells that move in the wrong direction; then
    follows one row per cell.
    """

    def __init__(
        self,
        problem: Callable[[float], Problem],
        theory: Callable[[Array, Array], dict[str, Array]] | None,
        smallest: int,
        dense: int,
        largest: int,
        updates: PositiveInt,
        burn_in: NonNegativeInt,
        streams: PositiveInt,
        betas: int,
        seed: int,
        device: torch.device,
    ) -> None:
        super().__init__(betas, seed)
        self.problem, self.theory = problem, theory
        self.values = integers(smallest, dense, largest)
        self.updates, self.burn_in, self.streams = updates, burn_in, streams
        longest = problem(float(self.values[-1])).period
        if updates - burn_in < longest:
            raise ValueError(
                f"updates − burn_in is {updates - burn_in}; expected at least {longest}, the "
                "longest epoch: increase updates"
            )

    def rows(self, optimizer: torch.optim.Optimizer) -> Iterator[Metrics]:
        critical = np.full(2 * self.betas.shape, np.inf)
        for C in self.values:
            wrong = self.drift(optimizer, float(C)) > 0
            critical = np.minimum(critical, np.where(wrong, C, np.inf))
            yield {"C": float(C), "wrong_share": wrong.mean()}
        found = np.isfinite(critical)
        # A cell in which no C fails has a critical C above the largest one; 2 × largest marks it.
        censored = np.where(found, critical, 2.0 * self.values[-1])
        beta2, beta1 = np.meshgrid(self.betas, self.betas, indexing="ij")
        expected = self.theory(beta1, beta2) if self.theory else {}
        yield from self.cells(critical_c=censored, found=found, **expected)

    def drift(self, optimizer: torch.optim.Optimizer, C: float) -> Array:
        problem = self.problem(C)
        whole = (self.updates - self.burn_in) // problem.period * problem.period
        same_draws = copy.deepcopy(self.rng)  # so that runs differ only in C
        g = gradient_streams(problem, self.updates, self.streams, same_draws)
        return movement(optimizer, self.betas, g, skip=self.updates - whole)


def integers(smallest: int, dense: int, largest: int) -> NDArray[np.int64]:
    """Return every integer from `smallest` to `dense`, then steps of 4 % up to `largest`."""
    if not 2 <= smallest <= dense <= largest:
        raise ValueError(
            f"smallest is {smallest}, dense {dense}, largest {largest}; "
            "expected 2 ≤ smallest ≤ dense ≤ largest"
        )
    values = list(range(smallest, dense + 1))
    while values[-1] < largest:
        values.append(min(largest, max(values[-1] + 1, round(values[-1] * 1.04))))
    return np.array(values)


def diagonal(C: float) -> Sequential:
    """Return the problem with d = C, whose gradients add up to +1 per epoch (Appendix A)."""
    return Sequential(C, int(C))


def sequential_theory(beta1: Array, beta2: Array) -> dict[str, Array]:
    """Return the critical C along C = d: corrected closed form of Lemma 6, and exact limits."""
    return {
        "closed_form": theory.diagonal_critical_c(beta1, beta2),
        "exact": theory.smallest_failing_c(beta1, beta2).astype(float),
    }
