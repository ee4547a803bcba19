"""Compares the runs of one part of a claim: the effect, its interval, its p values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from math import nan
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from experiments.config.errors import ConfigError
from experiments.config.paths import CONF
from experiments.products import inference
from experiments.products.inference import ALPHA, Values
from experiments.products.schema import Claim, Comparison
from experiments.products.summaries import STATISTICS
from experiments.records.run import Groups, Run
from experiments.records.status import Status


@dataclass(frozen=True)
class Noise:
    """What a forecast needs: the largest noise of the pairs that are compared, and their number."""

    sd: float  # over the seeds; 0 if nothing varies, NaN if a run diverged
    alpha: float  # of the interval that must lie beyond the margin for the part to hold
    strict: float  # of the one for it to fail
    tests: int  # one-sided ones that must all succeed for the part to hold


@dataclass(frozen=True)
class PartResult:
    """The result of a comparison: the effect, its 95 % interval, and p values of both verdicts."""

    effect: float
    low: float
    high: float
    n: int
    p_holds: float
    p_fails: float
    noise: Noise
    distance: float  # from the effect to the margin
    diverged: int = 0

    @property
    def is_exact(self) -> bool:
        return self.n == 1

    @property
    def is_open(self) -> bool:
        return min(self.p_holds, self.p_fails) > ALPHA

    @property
    def detectable(self) -> float:
        """NaN without a standard deviation."""
        noise, power = self.noise, inference.power_of(self.noise.tests)
        return inference.detectable(noise.sd, self.n, noise.alpha, power) if noise.sd > 0 else nan

    def seeds_to_hold(self, parts: int = 1) -> int:
        """The seeds with which this and as many other open parts hold together."""
        power = inference.power_of(self.noise.tests * parts)
        return inference.seeds_needed(self.noise.sd, self.distance, self.noise.alpha, power)

    def seeds_to_fail(self, parts: int = 1) -> int:
        """The seeds with which it fails, as one of so many parts of a claim."""
        return inference.seeds_needed(self.noise.sd, self.distance, self.noise.strict / parts)

    def __str__(self) -> str:
        words = [with_interval(self.effect, self.low, self.high)]
        if not np.isnan(self.detectable):
            words.append(f"detectable {self.detectable:.2g}")
        if self.diverged:
            words.append(f"median, diverged runs {self.diverged}")
        return ", ".join(words)


@np.errstate(divide="ignore", invalid="ignore")  # log10 of 0
def judge_part(claim: Claim, part: Comparison, groups: Groups) -> PartResult:
    metric, statistic = claim.metric_of(part), claim.statistic_of(part)
    left = side(part.left, groups, metric, statistic)
    bound = part.right
    right = bound if isinstance(bound, float) else side(bound, groups, metric, statistic)
    runs = [run for name in dict.fromkeys(part.runs()) for run in groups[name]]
    diverged = sum(run.status == Status.DIVERGED for run in runs)
    margin, resolution = claim.margin_of(part), about_metric("resolution", metric, 0.0)
    return compare(left, right, part.relation, margin, resolution, diverged)


def compare(
    left: Values,
    right: Values | float,
    relation: str,
    margin: float,
    resolution: float = 0.0,
    diverged: int = 0,
) -> PartResult:
    """Compare two sides, each with a row for each run and a column for each seed."""

    def p_value(verdict: str) -> float:
        def is_reached(alpha: float) -> bool:
            ends = inference.difference_interval(left, right, alpha, resolution)
            return verdict_of(relation, *ends, margin) == verdict

        return inference.smallest_alpha(is_reached)

    low, high = inference.difference_interval(left, right, ALPHA, resolution)
    n = max(side.shape[1] for side in (left, right) if not isinstance(side, float))
    effect, noise = effect_of(left, right), noise_of(left, right, relation)
    away = distance(relation, effect, margin)
    p_holds, p_fails = p_value("holds"), p_value("fails")
    return PartResult(effect, low, high, n, p_holds, p_fails, noise, away, diverged)


def effect_of(left: Values, right: Values | float) -> float:
    by_median = inference.has_diverged(left, right)
    ours = inference.widest_pair(left, by_median)
    if isinstance(right, float):
        return inference.center(ours, by_median) - right
    theirs = inference.widest_pair(right, by_median)
    return inference.center(inference.subtract(ours, theirs), by_median)


def noise_of(left: Values, right: Values | float, relation: str) -> Noise:
    """Two ranges have an interval and a standard deviation each, which are added.

    The lower end of a range has Bonferroni's correction; its upper end needs none.
    """
    both = 2 if relation == "near" else 1
    if isinstance(right, float):
        pairs = [inference.pairs_of(left)]
    elif len(left) == len(right) == 1:
        pairs = [[inference.subtract(left[0], right[0])]]
    else:
        pairs = [inference.pairs_of(left), inference.pairs_of(right)]
    sd = nan if inference.has_diverged(left, right) else sum(max(map(sd_of, p)) for p in pairs)
    count = max(map(len, pairs))
    if len(pairs) == count == 1 and len(left) == 1:
        return Noise(sd, ALPHA, ALPHA, both)
    low = ALPHA / (2 * count * len(pairs))
    high = ALPHA if len(pairs) == 1 else low
    ends = (low, high) if relation == "above" else (high, low)
    return Noise(sd, *ends, 2 * sum(map(len, pairs)))


def sd_of(numbers: Values) -> float:
    """0 for a single value."""
    varies = len(numbers) > 1 and not inference.is_constant(numbers)
    return float(numbers.std(ddof=1)) if varies else 0.0


def distance(relation: str, effect: float, margin: float) -> float:
    """From the effect to the margin."""
    return abs((abs(effect) if relation == "near" else directed(relation, effect)) - margin)


def directed(relation: str, effect: float) -> float:
    """The effect, positive in the direction of the claim."""
    return -effect if relation == "below" else effect


def verdict_of(relation: str, low: float, high: float, margin: float) -> str:
    """holds if all of the interval is on the claimed side of the margin, fails if none of it is."""
    if np.isnan([low, high]).any():
        return "inconclusive"
    if relation == "below":
        low, high = -high, -low
    if relation == "near":
        inside, outside = max(-low, high) <= margin, low > margin or high < -margin
    else:
        inside, outside = low > margin, high <= margin
    return "holds" if inside else "fails" if outside else "inconclusive"


def with_interval(middle: float, low: float, high: float) -> str:
    """-0.0012 [-0.0014, -0.001]; no brackets if nothing varies."""
    ends = f"{low:.4g}", f"{high:.4g}"
    return f"{middle:.4g}" + ("" if ends[0] == ends[1] else f" [{', '.join(ends)}]")


# -- the numbers of runs -----------------------------------------------------------------------


def side(names: str | list[str], groups: Groups, metric: str, statistic: str) -> Values:
    """A row for each named run with a number per seed; a diverged run has the worst number."""
    rows = [
        with_worst(groups[name], values(groups[name], metric, statistic), metric)
        for name in ([names] if isinstance(names, str) else names)
    ]
    return np.array(np.broadcast_arrays(*rows))


def with_worst(runs: Sequence[Run], numbers: Values, metric: str) -> Values:
    diverged = [run.status == Status.DIVERGED for run in runs]
    return np.where(diverged, about_metric("worst", metric, nan), numbers)


@cache
def declared() -> dict[str, Any]:
    loaded: Any = OmegaConf.to_container(OmegaConf.load(CONF / "claim" / "_metrics.yaml"))
    return dict(loaded)


def about_metric(what: str, metric: str, usual: float) -> float:
    """What conf/claim/_metrics.yaml declares for a metric: `worst` or `resolution`."""
    found = (float(v) for pattern, v in declared()[what].items() if fnmatchcase(metric, pattern))
    return next(found, usual)


def values(runs: Sequence[Run], metric: str, statistic: str) -> Values:
    """The statistic of every run; NaN for a diverged one."""
    function = STATISTICS[statistic]
    try:
        return np.array(
            [np.nan if r.status == Status.DIVERGED else function(r.metrics(), metric) for r in runs]
        )
    except KeyError as error:
        raise ConfigError(
            f"{runs[0].folder} has no metric {metric}: train it again with force=true"
        ) from error
