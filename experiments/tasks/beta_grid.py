"""Appendix A: what β1, β2 and C do to the direction of θ, over a grid of β1 × β2.

In Adam m_t depends on β1 alone and the step size on β2 alone. So a grid of n × n settings needs
2n filters, and the sum of all updates is one matrix product.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt
from threadpoolctl import threadpool_limits

from adashift.analysis import theory
from adashift.analysis.theory import Array
from adashift.analysis.trajectory import Chain, chain_of
from experiments.tasks.counterexample import Problem, Sequential
from experiments.tasks.rows import Row, RowTask


def chain_with(optimizer: torch.optim.Optimizer, beta1: float, beta2: float) -> Chain:
    """The optimizer's chain with other betas."""
    if "betas" not in optimizer.defaults:
        raise ValueError(f"{type(optimizer).__name__} has no betas, which this experiment varies")
    twin = copy.deepcopy(optimizer)
    twin.param_groups[0]["betas"] = (beta1, beta2)
    return chain_of(twin)


def movement(optimizer: torch.optim.Optimizer, betas: Array, g: Array, skip: int = 0) -> Array:
    """Total movement of θ for every (β2, β1) of the grid, mean over the streams of g.

    g has the shape (streams, time); the first `skip` gradients fill the moments only.
    """
    t = np.arange(1.0, g.shape[-1] + 1)
    chains = [chain_with(optimizer, beta, beta) for beta in betas]
    m = [c.first_moment(g, t)[:, skip:].ravel() for c in chains]
    step_size = [c.step_sizes(c.second_moment(g, t))[:, skip:].ravel() for c in chains]
    # One thread: several wait for each other on a busy machine (100 times slower was seen), and
    # their number would decide the last bits of the sum.
    with threadpool_limits(1):
        return -(np.stack(step_size) @ np.stack(m).T) / len(g)


def draw(problem: Problem, count: int, streams: PositiveInt, rng: np.random.Generator) -> Array:
    return np.stack([problem.gradients(0, count, rng) for _ in range(streams)])


class GridTask(RowTask):
    """Rows are cells of the grid, or values of C; after the last one the record ends."""

    ends = True

    def __init__(self, betas: int, seed: int) -> None:
        super().__init__(seed)
        if betas < 2:
            raise ValueError(f"betas is {betas}; a grid needs at least 2 values of each beta")
        self.betas = np.arange(betas) / betas
        self.pending: Iterator[Row] | None = None

    @abstractmethod
    def rows(self, optimizer: torch.optim.Optimizer) -> Iterator[Row]:
        """All rows, each computed when it is asked for."""

    def try_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        chain_with(optimizer, 0.5, 0.5)

    def next_row(self, optimizer: torch.optim.Optimizer) -> Row:
        if self.pending is None:
            self.pending = self.rows(optimizer)
        return next(self.pending)

    def cells(self, **columns: Array) -> Iterator[Row]:
        """A row per cell; a column has no value where it is NaN."""
        beta2, beta1 = np.meshgrid(self.betas, self.betas, indexing="ij")
        table = {"beta1": beta1, "beta2": beta2, **columns}
        for values in zip(*(np.ravel(c).astype(float) for c in table.values()), strict=True):
            yield {k: v for k, v in zip(table, values, strict=True) if not np.isnan(v)}


class FinalTheta(GridTask):
    """Panels a and c of Figure 8: where θ ends after a number of updates from 0."""

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
        self.count = betas**2

    def rows(self, optimizer: torch.optim.Optimizer) -> Iterator[Row]:
        g = draw(self.problem, self.updates, self.streams, self.rng)
        yield from self.cells(theta=movement(optimizer, self.betas, g))


class CriticalC(GridTask):
    """Panels b and d of Figure 8: the smallest C that turns θ the wrong way in the long run.

    First a row per C, with the share of the square that goes the wrong way; then a row per cell.
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
        self.count = len(self.values) + betas**2
        longest = problem(float(self.values[-1])).period
        if updates - burn_in < longest:
            raise ValueError(
                f"updates − burn_in is {updates - burn_in}; an epoch of {longest} needs more"
            )

    def rows(self, optimizer: torch.optim.Optimizer) -> Iterator[Row]:
        critical = np.full(2 * self.betas.shape, np.inf)
        for C in self.values:
            wrong = self.drift(optimizer, float(C)) > 0
            critical = np.minimum(critical, np.where(wrong, C, np.inf))
            yield {"C": float(C), "wrong_share": wrong.mean()}
        found = np.isfinite(critical)
        # Where no C up to the largest fails, the critical one is larger than all that were tried.
        censored = np.where(found, critical, 2.0 * self.values[-1])
        beta2, beta1 = np.meshgrid(self.betas, self.betas, indexing="ij")
        expected = self.theory(beta1, beta2) if self.theory else {}
        yield from self.cells(critical_c=censored, found=found, **expected)

    def drift(self, optimizer: torch.optim.Optimizer, C: float) -> Array:
        problem = self.problem(C)
        whole = (self.updates - self.burn_in) // problem.period * problem.period
        same_draws = copy.deepcopy(self.rng)  # for every C, so that C alone makes the difference
        g = draw(problem, self.updates, self.streams, same_draws)
        return movement(optimizer, self.betas, g, skip=self.updates - whole)


def integers(smallest: int, dense: int, largest: int) -> NDArray[np.int64]:
    """Every integer from `smallest` to `dense`, and then in steps of 4 % up to `largest`."""
    if not 2 <= smallest <= dense <= largest:
        raise ValueError(f"smallest {smallest}, dense {dense}, largest {largest}: 2 ≤ … ≤ … ≤ …")
    values = list(range(smallest, dense + 1))
    while values[-1] < largest:
        values.append(min(largest, max(values[-1] + 1, round(values[-1] * 1.04))))
    return np.array(values)


def diagonal(C: float) -> Sequential:
    """C = d, so that the gradients of an epoch add up to +1 (Appendix A)."""
    return Sequential(C, int(C))


def sequential_theory(beta1: Array, beta2: Array) -> dict[str, Array]:
    """Critical C along C = d: the corrected closed form of Lemma 6, and the exact limits."""
    return {
        "closed_form": theory.diagonal_critical_c(beta1, beta2),
        "exact": theory.smallest_failing_c(beta1, beta2).astype(float),
    }
