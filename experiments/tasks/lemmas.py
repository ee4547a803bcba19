"""The lemmas and theorems, checked on random or simulated cases."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import PositiveInt
from scipy.stats import spearmanr

from adashift.analysis import theory
from adashift.analysis.theory import Array
from adashift.analysis.trajectory import Chain, chain_of
from experiments.task import Measurement, Metrics
from experiments.tasks.beta_grid import chain_with, gradient_streams, required_chain
from experiments.tasks.counterexample import Sequential, Stochastic, numpy_generator


@dataclass(frozen=True)
class Case:
    """One sequential problem and one pair of betas."""

    beta1: float
    beta2: float
    C: float
    d: int


class RandomCases(Measurement):
    """A lemma on the sequential problem, checked on one random case per row."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.rng = numpy_generator(seed)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        require_adam(optimizer)
        chain_with(optimizer, 0.5, 0.5)

    def rows(self, optimizer: torch.optim.Optimizer) -> Iterator[Metrics]:
        while True:
            case = self.draw_case()
            chain = chain_with(optimizer, case.beta1, case.beta2)
            yield vars(case) | self.check(case, chain)

    def draw_case(self) -> Case:
        """Draw memories from one step to hundreds, epochs from 2 to 60 steps, C from 2 to 200."""
        beta1, beta2 = 1 - 10 ** self.rng.uniform(-2.5, 0, size=2)
        C = 10 ** self.rng.uniform(np.log10(2), np.log10(200))
        return Case(float(beta1), float(beta2), float(C), int(self.rng.integers(2, 61)))

    @abstractmethod
    def check(self, case: Case, chain: Chain) -> Metrics:
        """Compare what the lemma says about the case with a simulation."""


def forgotten(beta: float) -> int:
    """Return the steps after which a gradient's weight β^steps is below double precision."""
    return int(np.ceil(np.log(1e-17) / np.log(beta))) if beta > 0 else 1


def whole_epochs(steps: int, d: int) -> int:
    return -(-steps // d) * d


class Lemma2(RandomCases):
    """The limits of m and v over an epoch."""

    def check(self, case: Case, chain: Chain) -> Metrics:
        steps = whole_epochs(forgotten(max(case.beta1, case.beta2)), case.d) + case.d
        g = Sequential(case.C, case.d).gradients(0, steps, self.rng)
        m, v = chain.first(g)[-case.d :], chain.second(g * g)[-case.d :]
        m_limit = theory.limit_m(case.beta1, case.C, case.d)
        v_limit = theory.limit_v(case.beta2, case.C, case.d)
        return {
            "m_error": np.abs(m - m_limit).max() / np.abs(m_limit).max(),
            "v_error": np.abs(v / v_limit - 1).max(),
        }


class Lemma3(RandomCases):
    """Net update factors: k(C) is the smallest, and within an epoch they rise and then fall."""

    def check(self, case: Case, chain: Chain) -> Metrics:
        k = simulated_factors(case, chain)
        rises = np.diff(np.append(k, k[0])) > 1e-12 * k.max()
        falls = np.diff(np.append(k, k[0])) < -1e-12 * k.max()
        return {
            "violated": float(rises[falls.argmax() :].any()),  # the last difference is k_1 − k_d
            "error": np.abs(k / theory.net_update_factors(**vars(case)) - 1).max(),
            "difference_rises": float((np.diff(np.diff(k)) > 1e-12 * k.max()).any()),
        }


def simulated_factors(case: Case, chain: Chain) -> Array:
    """Return k(g_{nd+i}) of one late epoch, from the v of a simulation."""
    before = whole_epochs(forgotten(case.beta2), case.d)
    after = whole_epochs(forgotten(case.beta1), case.d)
    g = Sequential(case.C, case.d).gradients(0, before + case.d + after, np.random.default_rng())
    k = chain.net_update_factors(1 / np.sqrt(chain.second(g * g)))
    return k[before : before + case.d]


class Lemma6(RandomCases):
    """The critical condition, as printed and as corrected, compared with a numerical root."""

    def check(self, case: Case, chain: Chain) -> Metrics:
        betas = case.beta1, case.beta2, case.d
        root = float(theory.critical_c(*betas, large_v=True))
        corrected = float(theory.critical_c_closed_form(*betas))
        return {
            "corrected_error": abs(corrected - root) / abs(root),
            "printed_error": abs(printed_critical_c(*betas) - root) / abs(root),
        }


class InPhase(Measurement):
    """Why a larger β2 can mislead Adam: m and the step size 1/√v over an epoch, one row per β2.

    The mean of m has the right sign, so S = Σ m/√v has the wrong one if and only if the covariance
    of m and 1/√v outweighs the product of their means: if `covariance` < −1.
    """

    def __init__(
        self, problem: Sequential, betas: PositiveInt, seed: int, device: torch.device
    ) -> None:
        self.problem, self.beta2s = problem, np.arange(betas) / betas

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        require_adam(optimizer)

    def rows(self, optimizer: torch.optim.Optimizer) -> Iterator[Metrics]:
        for beta2 in self.beta2s.tolist():
            yield self.row(optimizer.defaults["betas"][0], beta2)

    def row(self, beta1: float, beta2: float) -> Metrics:
        C, d = self.problem.C, self.problem.d
        m = theory.limit_m(beta1, C, d)
        size = 1 / np.sqrt(theory.limit_v(beta2, C, d))
        product = m.mean() * size.mean()
        return {
            "beta2": beta2,
            "covariance": (m * size).mean() / product - 1,
            "S": float(theory.epoch_update(beta1, beta2, C, d)),
            "critical_c": float(theory.smallest_failing_c(beta1, beta2)),
        }


def require_adam(optimizer: torch.optim.Optimizer) -> None:
    if type(optimizer) is not torch.optim.Adam or optimizer.defaults["amsgrad"]:
        raise ValueError("the lemmas hold for Adam only: use optimizer=adam")


def printed_critical_c(beta1: float, beta2: float, d: int) -> float:
    """Return the critical C of Lemma 6 as printed in the paper (docs/errata.md, E1)."""
    s = np.sqrt(beta2)
    above = (1 - beta1**d) * (s**d - beta1**d) * (1 - s)
    below = (1 - beta1) * (s - beta1) * (1 - s**d)
    return float(above / below - 1)


class NetUpdateFactor(Measurement):
    """Lemma 4 and Theorem 5: how far large and small gradients move θ in the stochastic problem.

    A row is one simulation. `k_large` and `k_small` are the mean net update factors divided by α;
    `coupled_share` is how often k(C) < k(−1) when C replaces −1 and nothing else changes.
    """

    def __init__(
        self,
        problem: Stochastic,
        burn_in: PositiveInt,
        length: PositiveInt,
        couples: PositiveInt,
        seed: int,
        device: torch.device,
    ) -> None:
        self.problem, self.burn_in, self.length, self.couples = problem, burn_in, length, couples
        self.rng = numpy_generator(seed)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        required_chain(optimizer).net_update_factors(np.ones(1))

    def rows(self, optimizer: torch.optim.Optimizer) -> Iterator[Metrics]:
        while True:
            yield self.factors(chain_of(optimizer)) | self.coupling(optimizer)

    def factors(self, chain: Chain) -> Metrics:
        tail = reach(chain)
        g = self.problem.gradients(0, self.burn_in + self.length + tail, self.rng)
        k = chain.net_update_factors(chain.advance(g).step_size) / chain.lr
        g, k = (x[self.burn_in : -tail] for x in (g, k))
        large, small = k[g > 0].mean(), k[g < 0].mean()
        return {
            "k_large": large,
            "k_small": small,
            "k_bias": large / small - 1,
            "k_spread": k.max() / k.min() - 1,
            "rank_correlation": correlation(np.abs(g), k),
        }

    def coupling(self, optimizer: torch.optim.Optimizer) -> Metrics:
        tail = reach(chain_of(optimizer))
        g = gradient_streams(self.problem, self.burn_in + 1 + tail, self.couples, self.rng)
        k = []
        for value in (self.problem.C, -1.0):
            g[:, self.burn_in] = value
            chain = chain_of(optimizer)
            factors = chain.net_update_factors(chain.advance(g).step_size)
            k.append(factors[:, self.burn_in] / chain.lr)
        return {
            "coupled_share": float((k[0] < k[1]).mean()),
            "coupled_gap": np.abs(k[1] - k[0]).max(),
        }


def reach(chain: Chain) -> int:
    """Return the number of steps for which a gradient stays in m."""
    return max(len(chain.first.b), forgotten(-chain.first.a[-1]) if len(chain.first.a) > 1 else 1)


def correlation(x: Array, y: Array) -> float:
    """Return Spearman's rank correlation, or 0 if y is constant."""
    return float(spearmanr(x, y).statistic) if np.ptp(y) > 1e-9 * np.abs(y).max() else 0.0
