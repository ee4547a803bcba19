"""Each rule of docs/statistics.md on simulated runs with known truth."""

from dataclasses import replace
from math import inf, isnan

import numpy as np
import pytest
from scipy import stats

from experiments.products import inference
from experiments.products.comparison import compare, verdict_of
from experiments.products.inference import (
    ALPHA,
    POWER,
    SMALLEST_P,
    benjamini_hochberg,
    difference_interval,
    holm,
    interval,
    mean_interval,
    mean_of_bounds,
    median_interval,
    range_interval,
    seeds_needed,
    superiority,
    superiority_interval,
)

MANY = 20_000
# Standard deviations and correlation of two settings over the seeds: nearly independent as on
# ResNet, unequal, and nearly identical as in logistic regression.
PAIRS = {"independent": (1.0, 1.0, 0.04), "unequal": (1.0, 5.0, 0.2), "alike": (1.0, 1.0, 0.999)}


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def paired(rng, kind, seeds, effect, count=MANY):
    """Differences of two settings, a row for each simulated experiment."""
    a, b, correlation = PAIRS[kind]
    covariance = [[a * a, correlation * a * b], [correlation * a * b, b * b]]
    runs = rng.multivariate_normal([effect, 0], covariance, (count, seeds))
    return runs[..., 0] - runs[..., 1]


def verdicts(differences, relation, margin):
    low, high = mean_interval(differences)
    return [verdict_of(relation, *ends, margin) for ends in zip(low, high, strict=True)]


# -- intervals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [3, 10, 30])
@pytest.mark.parametrize("kind", PAIRS)
def test_intervals_of_two_runs_cover_the_truth_in_95_percent(rng, kind, seeds):
    low, high = mean_interval(paired(rng, kind, seeds, effect=0.3))
    assert 0.94 < ((low <= 0.3) & (high >= 0.3)).mean() < 0.96


@pytest.mark.parametrize("seeds", [10, 30])
def test_intervals_of_skewed_values_cover_nearly_as_often(rng, seeds):
    """Differences of two losses with the same log-normal distribution."""
    losses = rng.lognormal(0, 0.5, (2, MANY, seeds))
    low, high = mean_interval(losses[0] - losses[1])
    assert 0.93 < ((low <= 0) & (high >= 0)).mean() < 0.97


def test_intervals_against_a_constant_cover_the_truth_in_95_percent(rng):
    runs = rng.normal(2, 1, (4000, 1, 10))
    ends = np.array([difference_interval(run, 1.5) for run in runs])
    assert 0.94 < ((ends[:, 0] <= 0.5) & (ends[:, 1] >= 0.5)).mean() < 0.96


@pytest.mark.parametrize("means", [(0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 2, 4)])
def test_intervals_of_a_range_cover_the_range_of_the_true_means(rng, means):
    tables = rng.normal(0, 1, (1500, 4, 10)) + np.array(means)[:, None]
    ends = np.array([range_interval(table) for table in tables])
    assert ((ends[:, 0] <= np.ptp(means)) & (np.ptp(means) <= ends[:, 1])).mean() > 0.97


def test_the_intervals_of_a_single_pair_of_a_range_are_students_t(rng):
    """With two settings the correction vanishes, except that the lower end is of both signs."""
    table = rng.normal(0, 1, (2, 10))
    table[0] += 5
    low, high = range_interval(table)
    assert high == interval(table[0] - table[1])[1]
    assert low == interval(table[0] - table[1], ALPHA / 2)[0]


def test_a_range_is_not_biased_by_noise(rng):
    """The range over four equal settings in each seed is 2.06 standard deviations on average."""
    tables = rng.normal(0, 1, (300, 4, 10))
    assert np.ptp(tables, axis=1).mean() == pytest.approx(2.06, abs=0.05)
    lower_ends = [range_interval(table)[0] for table in tables]
    assert np.median(lower_ends) == 0


def test_intervals_of_two_ranges_cover_the_true_difference(rng):
    tables = rng.normal(0, 1, (500, 5, 10)) + np.array([0, 0, 1, 0, 3])[:, None]
    ends = np.array([difference_interval(table[:3], table[2:]) for table in tables])
    assert ((ends[:, 0] <= 1 - 3) & (ends[:, 1] >= 1 - 3)).mean() > 0.95


def test_students_t_by_hand():
    assert interval(np.array([1.0, 2.0, 3.0])) == pytest.approx(
        (2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), rel=1e-6
    )
    assert interval(np.array([2.0])) == (2.0, 2.0), "exact"


def test_equal_values_have_the_resolution_as_interval():
    same = np.full(10, 0.7)
    assert interval(same, resolution=0.002) == pytest.approx((0.698, 0.702))
    low, high = interval(same)
    assert low < 0.7 < high and high - low < 1e-14, "rounding of float64"
    assert compare(same[None], 0.7, "near", 0.001, resolution=0.002).p_holds == 1
    part = compare(same[None], 0.0, "above", 0.5)
    assert part.p_holds == pytest.approx(2 * 0.5**10), "a sign test of ten seeds"
    assert isnan(part.detectable), "rounding is not noise"
    assert interval(same[:3]) == (-inf, inf), "three seeds are too few for 95 %"


# -- diverged runs -----------------------------------------------------------------------------


def test_diverged_runs_keep_the_error_rate(rng):
    """A tenth of the runs of each side diverges; the median of the differences is still 0."""
    runs = rng.normal(0, 1, (2, 4000, 10))
    runs[rng.random(runs.shape) < 0.1] = inf
    ends = np.array([interval(inference.subtract(a, b)) for a, b in zip(*runs, strict=True)])
    covered = (ends[:, 0] <= 0) & (ends[:, 1] >= 0)
    assert covered.mean() > 0.95


def test_runs_that_diverge_together_keep_the_error_rate(rng):
    """In three of ten seeds both runs diverge, which counts as equal; else the effect is 1."""
    runs = rng.normal(0, 1, (4000, 2, 10)) + np.array([1, 0])[:, None]
    runs[np.broadcast_to(rng.random((4000, 1, 10)) < 0.3, runs.shape)] = inf
    truth = np.median(inference.subtract(*np.swapaxes(runs, 0, 1)))
    ends = np.array([difference_interval(pair[:1], pair[1:]) for pair in runs])
    assert ((ends[:, 0] <= truth) & (ends[:, 1] >= truth)).mean() > 0.95
    part = compare(runs[0][:1], runs[0][1:], "above", 0.1)
    assert np.isinf(runs[0]).any() and isnan(part.detectable), "judged by the median"


def test_nothing_is_known_of_two_settings_that_always_diverge():
    lost = np.full((1, 10), inf)
    for relation in ("above", "below", "near"):
        assert compare(lost, lost, relation, 1.0).is_open


def test_a_median_needs_six_seeds():
    assert median_interval(np.arange(5.0)) == (-inf, inf)
    assert median_interval(np.arange(6.0)) == (0, 5)
    assert median_interval(np.arange(10.0)) == (1, 8), "leaves out two of ten values"
    expected = stats.binom.cdf(1, 10, 0.5) * 2
    assert expected == pytest.approx(0.0215, abs=1e-4)


def test_one_diverged_run_of_ten_may_be_an_accident_two_are_not():
    """Test accuracy: a diverged run has −inf."""
    good, usual = np.linspace(0.8, 0.9, 10), np.linspace(0.5, 0.55, 10)
    for diverged, verdict in ((0, "holds"), (1, "holds"), (2, "inconclusive"), (9, "fails")):
        runs = good.copy()
        runs[:diverged] = -inf
        part = compare(runs[None], usual[None], "above", 0.005)
        assert verdict_of("above", part.low, part.high, 0.005) == verdict
        assert isnan(part.detectable) == bool(diverged), "a median has no standard deviation"


def test_two_diverged_runs_are_equally_bad():
    left, right = np.array([inf, -inf, inf]), np.array([inf, -inf, 1])
    assert inference.subtract(left, right).tolist() == [0, 0, inf]


# -- verdicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [3, 10])
@pytest.mark.parametrize("kind", PAIRS)
def test_a_truth_at_the_margin_holds_or_fails_in_at_most_5_percent(rng, kind, seeds):
    for relation, truth in (("above", 0.5), ("below", -0.5), ("near", 0.5), ("near", -0.5)):
        found = verdicts(paired(rng, kind, seeds, truth, 5000), relation, margin=0.5)
        assert found.count("holds") / 5000 < 0.032  # 2.5 % and three standard errors
        # Not alike, in either direction: 5 % if the noise is far larger than the margin.
        assert found.count("fails") / 5000 < (0.06 if relation == "near" else 0.032)


def test_no_difference_is_an_answer(rng):
    """Equal settings: with enough seeds, neither is better and they are alike."""
    differences = paired(rng, "independent", 30, effect=0, count=500)
    assert verdicts(differences, "above", 1).count("fails") > 400
    assert verdicts(differences, "near", 1).count("holds") > 400
    assert verdicts(differences, "above", 0).count("fails") < 25, "not without a margin"


def test_alike_settings_at_the_margin_hold_in_at_most_5_percent(rng):
    tables = rng.normal(0, 1, (1500, 3, 10)) + np.array([0, 0.5, 1])[:, None]
    ends = [range_interval(table) for table in tables]
    assert sum(verdict_of("near", *e, 1) == "holds" for e in ends) / 1500 < 0.05
    assert sum(verdict_of("near", *e, 1) == "fails" for e in ends) / 1500 < 0.05


def test_p_values_are_those_of_the_t_test(rng):
    left, right = rng.normal(0.8, 1, (1, 10)), rng.normal(0, 1, (1, 10))
    part = compare(left, right, "above", 0.1)
    test = stats.ttest_rel(left[0] - 0.1, right[0])
    assert part.p_holds == pytest.approx(test.pvalue, rel=1e-6) and part.p_fails == 1
    near = compare(left, right, "near", 3.0)
    one_sided = stats.ttest_rel(left[0] - 3, right[0], alternative="less").pvalue
    assert near.p_holds == pytest.approx(2 * one_sided, rel=1e-6), "TOST at 2.5 %"


def test_a_verdict_is_reached_exactly_if_p_is_at_most_alpha(rng):
    for _ in range(100):
        left, right = rng.normal(0.7, 1, (1, 5)), rng.normal(0, 1, (1, 5))
        relation = rng.choice(["above", "below", "near"])
        part = compare(left, right, relation, 0.5)
        found = verdict_of(relation, part.low, part.high, 0.5)
        assert (found == "holds") == (part.p_holds <= ALPHA)
        assert (found == "fails") == (part.p_fails <= ALPHA)


def test_exact_values_have_no_doubt():
    part = compare(np.array([[1.0]]), 0.9, "above", 0.0)
    assert (part.p_holds, part.p_fails) == (SMALLEST_P, 1) and not part.is_open
    part = compare(np.array([[0.0]]), 0.0, "near", 0.0)
    assert part.p_holds == SMALLEST_P


# -- many claims -------------------------------------------------------------------------------


def test_several_parts_hold_together_in_at_most_5_percent(rng):
    """One part is at its margin, the others are far beyond."""
    p = stats.norm.sf(rng.normal(0, 1, 4000)) * 2
    assert np.mean([inference.all_hold([each, 1e-8, 1e-8]) <= ALPHA for each in p]) < 0.06


def test_several_true_parts_fail_in_at_most_5_percent(rng):
    p_fails = rng.random((4000, 12))
    assert np.mean([inference.any_fails(row.tolist()) <= ALPHA for row in p_fails]) < 0.06
    assert np.mean(p_fails.min(1) <= ALPHA) > 0.4, "without the correction"


def test_holm_makes_an_error_in_at_most_5_percent_of_all_lists(rng):
    p = rng.random((4000, 8))
    p[:, :3] *= 1e-6  # three claims with an effect
    wrong = [min(holm(row.tolist())[3:]) <= ALPHA for row in p]
    assert 0.03 < np.mean(wrong) < 0.06
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    assert holm([0.01, 0.04], size=6) == pytest.approx(holm([0.01, 0.04, 1, 1, 1, 1])[:2])


def test_benjamini_hochberg_keeps_the_share_of_errors_below_5_percent(rng):
    p = rng.random((2000, 40))
    p[:, :20] *= 1e-4
    shares = []
    for row in p:
        found = np.array(benjamini_hochberg(row.tolist())) <= ALPHA
        shares.append(found[20:].sum() / max(1, found.sum()))
    assert 0.015 < np.mean(shares) < 0.03  # half of the claims have no effect: 2.5 %
    assert benjamini_hochberg([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.04, 0.04])
    among_five = benjamini_hochberg([0.01, 0.04, 1, 1, 1])[:2]
    assert benjamini_hochberg([0.01, 0.04], size=5) == pytest.approx(among_five)


def test_corrections_agree_with_scipy(rng):
    p = rng.random(30) ** 3
    assert benjamini_hochberg(p.tolist()) == pytest.approx(stats.false_discovery_control(p))


# -- power -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [3, 10, 30])
def test_a_detectable_effect_is_found_in_80_percent(rng, seeds):
    effect = 0.5 + inference.detectable(sd=2**0.5, n=seeds)
    runs = rng.normal(0, 1, (2, MANY, seeds))
    found = verdicts(effect + runs[0] - runs[1], "above", margin=0.5)
    assert found.count("holds") / MANY == pytest.approx(POWER, abs=0.01)


def test_the_forecast_of_seeds_settles_80_percent(rng):
    needed = seeds_needed(sd=1.0, distance=0.5)
    assert needed == 34
    found = verdicts(rng.normal(0.5, 1, (5000, needed)), "above", margin=0)
    assert found.count("holds") / 5000 == pytest.approx(POWER, abs=0.02)
    assert seeds_needed(sd=1.0, distance=1e-6) == inference.MOST_SEEDS + 1


@pytest.mark.parametrize("settings", [1, 4])
def test_forecasts_of_alike_settings_are_at_least_80_percent(rng, settings):
    """A difference of 0 from a constant, or the range over four equal settings."""
    first = compare(rng.normal(0, 1, (settings, 10)), 0.0, "near", 0.5)
    known = replace(first, noise=replace(first.noise, sd=1.0 if settings == 1 else 2**0.5))
    seeds = replace(known, distance=0.5).seeds_to_hold()
    tables = rng.normal(0, 1, (1000, settings, seeds))
    found = [verdict_of("near", *difference_interval(table, 0.0), 0.5) for table in tables]
    assert found.count("holds") / 1000 > POWER - 0.03
    tables = rng.normal(0, 1, (1000, settings, 10))
    ends = [difference_interval(table, 0.0) for table in tables]
    found = [verdict_of("near", *each, known.detectable) for each in ends]
    assert found.count("holds") / 1000 > POWER - 0.03


def test_forecasts_of_a_range_use_the_level_of_the_end_that_decides(rng):
    """Its lower end has Bonferroni's correction, its upper end has none."""
    table = rng.normal(0, 1, (4, 10))
    for relation, ends in {"near": (ALPHA, ALPHA / 12), "above": (ALPHA / 12, ALPHA)}.items():
        noise = compare(table, 0.0, relation, 0.5).noise
        assert (noise.alpha, noise.strict, noise.tests) == (*ends, 12)
    two = compare(table, table[:2], "below", 0.5).noise
    assert two.alpha == two.strict == ALPHA / 24


def test_the_forecast_of_several_parts_is_that_of_all_of_them(rng):
    part = compare(rng.normal(0, 1, (1, 10)), 0.0, "above", 0.5)
    known = replace(part, noise=replace(part.noise, sd=1.0), distance=0.5)
    low, _ = mean_interval(rng.normal(1, 1, (2000, 4, known.seeds_to_hold(4))))
    assert (low > 0.5).all(1).mean() > POWER - 0.02, "all four parts hold"
    _, high = mean_interval(rng.normal(0, 1, (2000, known.seeds_to_fail(12))), ALPHA / 12)
    assert (high < 0.5).mean() > POWER - 0.02, "one of twelve parts fails, after the correction"


def test_an_open_part_says_how_many_seeds_settle_it():
    values = np.array([1.0, -0.5, 1.5, 0.2])
    part = compare(values[None], 0.0, "above", 0.0)
    assert part.is_open and part.seeds_to_hold() == seeds_needed(values.std(ddof=1), 0.55) == 23
    assert not compare(np.array([[1.0, 1.1, 1.2]]), 0.0, "above", 0.0).is_open


# -- probability of being better ---------------------------------------------------------------


@pytest.mark.parametrize("effect", [0.0, 1.0, 3.0])
def test_intervals_of_a_probability_cover_the_truth(rng, effect):
    truth = stats.norm.cdf(effect / 2**0.5)
    shares = [superiority(*rng.normal([[effect], [0]], 1, (2, 10))) for _ in range(3000)]
    ends = np.array([superiority_interval(share, 10, 10) for share in shares])
    assert 0.93 < ((ends[:, 0] <= truth) & (truth <= ends[:, 1])).mean() < 0.99
    assert np.mean(shares) == pytest.approx(truth, abs=0.01)


def test_a_probability_of_one_is_not_certain():
    assert superiority(np.array([3.0, 4.0]), np.array([1.0, -inf])) == 1
    assert superiority(np.array([inf, 1.0]), np.array([inf, 1.0])) == 0.5, "equal ones count half"
    low, high = superiority_interval(1.0, 10, 10)
    assert low == pytest.approx(0.80, abs=0.005) and high == 1, "as in docs/statistics.md"


def test_intervals_of_a_mean_probability_cover_the_truth(rng):
    effects = np.array([0, 0.5, 1, 2, -1])
    truth = stats.norm.cdf(effects / 2**0.5).mean()
    hits = 0
    for _ in range(800):
        shares = [superiority(*rng.normal([[e], [0]], 1, (2, 10))) for e in effects]
        bounds = [superiority_interval(share, 10, 10) for share in shares]
        _, (low, high) = mean_of_bounds(shares, bounds)
        hits += low <= truth <= high
    assert 0.93 < hits / 800 < 0.99
