"""How a run compares with the published one: four answers, each with what a reader needs."""

import numpy as np
import pandas as pd
import pytest

from experiments.records.agreement import DIFFERENT, IDENTICAL, ROUNDING, SPREAD, compare_metrics

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


def test_the_same_bits_are_identical_and_nan_is_itself():
    broken = SEEDS[0].copy()
    broken.iloc[-1] = np.nan
    assert compare_metrics(SEEDS[0], SEEDS[0].copy(), SEEDS) == (IDENTICAL, "", 0.0)
    assert compare_metrics(broken, broken.copy(), SEEDS)[0] == IDENTICAL


def test_rounding_is_told_with_its_size():
    kind, detail, gap = compare_metrics(changed(1 + 3e-9), SEEDS[0], SEEDS)
    assert kind == ROUNDING and detail == "largest relative difference 3.0e-09"
    assert gap == pytest.approx(3e-9, rel=1e-3)
    tiny = SEEDS[0] * 1e-15  # errors of rounding themselves, twice as large elsewhere
    assert compare_metrics(2 * tiny, tiny, [tiny])[0] == ROUNDING


def test_a_training_that_rounding_drove_apart_is_within_the_spread():
    apart = SEEDS[0].copy()
    growth = np.minimum(1e-7 * 10.0 ** np.arange(10), 0.3)
    apart["loss"] += growth
    apart["accuracy"] -= growth / 10
    kind, detail, _ = compare_metrics(apart, SEEDS[0], SEEDS)
    assert kind == SPREAD and "accuracy at step 20 is 0.00" in detail
    assert compare_metrics(apart, SEEDS[0], SEEDS[:1])[0] == DIFFERENT, "one seed has no spread"


def test_one_altered_number_is_different_though_seeds_are_farther_apart():
    kind, detail, gap = compare_metrics(changed(1.01, [3]), SEEDS[0], SEEDS)
    was = SEEDS[0]["loss"].iloc[3]
    assert kind == DIFFERENT and gap == pytest.approx(0.01 / 1.01)
    assert detail == f"loss at step 40 is {1.01 * was:.7g}, published {was:.7g} (0.99 %)"


def test_another_training_is_different():
    kind, detail, _ = compare_metrics(changed(4.0, slice(2, None)), SEEDS[0], SEEDS)
    assert kind == DIFFERENT and "loss at step 30" in detail


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_or_inf_on_one_side_alone_is_different(value):
    spoilt = changed(1.0)
    spoilt.iloc[5, 0] = value
    assert compare_metrics(spoilt, SEEDS[0], SEEDS)[0] == DIFFERENT
    assert compare_metrics(SEEDS[0], spoilt, SEEDS)[0] == DIFFERENT


def test_a_metric_that_one_side_lacks_is_different():
    kind, detail, _ = compare_metrics(SEEDS[0].drop(columns="accuracy"), SEEDS[0], SEEDS)
    assert kind == DIFFERENT and detail == "only one of the two has accuracy"


def test_runs_of_other_seeds_would_be_told_apart_from_a_bias():
    """Exchangeable runs are near; the same curves with a bias of three spreads are not."""
    pairs = [(curve(seed), curve(seed + 50)) for seed in range(10, 30)]
    assert all(compare_metrics(a, b, SEEDS)[0] == SPREAD for a, b in pairs)
    assert all(compare_metrics(a + 6, b, SEEDS)[0] == DIFFERENT for a, b in pairs)
