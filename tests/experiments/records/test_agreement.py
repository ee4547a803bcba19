"""Comparison with a published run: four levels of agreement, each with its detail."""

import numpy as np
import pandas as pd
import pytest

from experiments.records.agreement import (
    DIFFERENT,
    IDENTICAL,
    ROUNDED,
    WITHIN_SPREAD,
    Agreement,
    compare_metrics,
)

STEPS = np.arange(10, 110, 10)


def curve(seed, noise=1.0):
    rng = np.random.default_rng(seed)
    table = {"loss": 5 - STEPS / 50 + noise * rng.normal(size=10), "accuracy": rng.random(10)}
    return pd.DataFrame(table, index=pd.Index(STEPS, name="step"))


SEEDS = [curve(seed) for seed in range(4)]


def changed(factor, rows=slice(None), column="loss"):
    table = SEEDS[0].copy()
    table.iloc[rows, table.columns.get_loc(column)] *= factor
    return table


def test_equal_metrics_are_identical_including_nan():
    broken = SEEDS[0].copy()
    broken.iloc[-1] = np.nan
    assert compare_metrics(SEEDS[0], SEEDS[0].copy(), SEEDS) == (IDENTICAL, "", 0.0)
    assert compare_metrics(broken, broken.copy(), SEEDS)[0] == IDENTICAL


def test_rounding_is_reported_with_the_largest_relative_difference():
    level, detail, gap = compare_metrics(changed(1 + 3e-9), SEEDS[0], SEEDS)
    assert level == ROUNDED and detail == "largest relative difference 3.0e-09"
    assert gap == pytest.approx(3e-9, rel=1e-3)


def test_differences_within_the_absolute_tolerance_are_reported_as_such():
    tiny = SEEDS[0] * 1e-15  # rounding errors, twice as large on the other machine
    level, detail, gap = compare_metrics(2 * tiny, tiny, [tiny])
    assert (level, gap) == (ROUNDED, 0.0)
    assert str(Agreement(None, level, detail, gap)) == (
        "equal up to rounding: absolute differences of at most 1e-12"
    )


def test_a_training_that_diverges_by_rounding_is_within_the_spread():
    apart = SEEDS[0].copy()
    growth = np.minimum(1e-7 * 10.0 ** np.arange(10), 0.3)
    apart["loss"] += growth
    apart["accuracy"] -= growth / 10
    level, detail, _ = compare_metrics(apart, SEEDS[0], SEEDS)
    assert level == WITHIN_SPREAD and "accuracy at step 20 is 0.00" in detail
    assert compare_metrics(apart, SEEDS[0], SEEDS[:1])[0] == DIFFERENT, "one seed has no spread"


def test_one_changed_value_is_different_even_if_seeds_differ_more():
    level, detail, gap = compare_metrics(changed(1.01, [3]), SEEDS[0], SEEDS)
    was = SEEDS[0]["loss"].iloc[3]
    assert level == DIFFERENT and gap == pytest.approx(0.01 / 1.01)
    assert detail == f"loss at step 40 is {1.01 * was:.7g}, published {was:.7g} (0.99 %)"


def test_another_training_is_different():
    level, detail, _ = compare_metrics(changed(4.0, slice(2, None)), SEEDS[0], SEEDS)
    assert level == DIFFERENT and "loss at step 30" in detail


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_or_inf_in_one_run_only_is_different(value):
    broken = changed(1.0)
    broken.iloc[5, 0] = value
    assert compare_metrics(broken, SEEDS[0], SEEDS)[0] == DIFFERENT
    assert compare_metrics(SEEDS[0], broken, SEEDS)[0] == DIFFERENT


def test_a_metric_that_only_one_run_has_is_different():
    level, detail, _ = compare_metrics(SEEDS[0].drop(columns="accuracy"), SEEDS[0], SEEDS)
    assert level == DIFFERENT and detail == "only one of the two has accuracy"


def test_a_bias_is_distinguished_from_another_seed():
    """Exchangeable runs are within the spread; a bias of three spreads is not."""
    pairs = [(curve(seed), curve(seed + 50)) for seed in range(10, 30)]
    assert all(compare_metrics(a, b, SEEDS)[0] == WITHIN_SPREAD for a, b in pairs)
    assert all(compare_metrics(a + 6, b, SEEDS)[0] == DIFFERENT for a, b in pairs)
