"""The optimizer benchmark on small lists: it measures what it says; speed is not tested."""

import importlib.util
import math

import pandas as pd
import pytest
import torch
from PIL import Image

from adashift import AdaShift
from benchmarks import common
from benchmarks import optimizer as bench

LISTS = ["one tensor", "ResNet-18", "DenseNet-121"]
NAMES = [c.name for c in bench.CONTENDERS]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    bench.OPTIMIZER_BENCHMARK.main(["--quick", "--results", str(folder)])
    return folder


@pytest.fixture(scope="module")
def table(results):
    return pd.read_csv(results / "benchmarks" / "bench-optimizer.csv").set_index(
        ["list", "contender"]
    )


def test_every_contender_is_in_the_table(table):
    assert list(table.index) == [(name, contender) for name in LISTS for contender in NAMES]


def test_times_and_shares_are_positive(table):
    measured = table[table["note"].isna()].drop(columns=["note", "state_bytes"])
    assert len(measured) >= len(LISTS) * (len(NAMES) - 1)
    assert (measured > 0).all(axis=None)
    assert (measured["q25_ms"] <= measured["q75_ms"]).all()
    assert (measured["slowest_to_median"] >= 1).all()


def test_ratios_are_to_adam(table):
    for name in LISTS:
        assert table.loc[(name, bench.REFERENCE), "to_adam"] == 1
        assert table.loc[(name, bench.FUSED), "to_fused"] == 1


@pytest.mark.parametrize("name", LISTS)
def test_the_state_has_the_documented_size(table, name):
    state = table.loc[name]["state_bytes"]
    expected = {"n=10 m=1": 0, "n=44 m=inf": 4, "n=10 m=10 bf16 slots": 24}
    expected |= {f"n={m} m={m}": 4 * (m + 1) for m in (2, 10, 40, 100)}
    for options, size in expected.items():  # numbers of blocks add little to gradient-sized buffers
        assert state[f"AdaShift fused {options}"] == pytest.approx(size, abs=0.15)
    assert state["Adam default"] == pytest.approx(8, abs=0.02)


def test_the_page_names_the_environment(results):
    page = (results / "benchmarks" / "bench-optimizer.md").read_text(encoding="utf-8")
    assert torch.__version__ in page and f"threads: {torch.get_num_threads()}" in page
    assert "these numbers mean nothing" in page
    installed = importlib.util.find_spec(bench.PEER) is not None
    assert ("| not installed |" in page) != installed


def test_the_chart_is_drawn(results):
    with Image.open(results / "benchmarks" / "bench-optimizer.png") as image:
        assert image.size[0] > 1000
    assert (results / "benchmarks" / "bench-optimizer.pdf").stat().st_size > 1000


def test_the_full_lists_have_the_documented_sizes():
    lists = bench.parameter_lists(quick=False)
    assert bench.numel(lists["one tensor"][0]) == 25_000_000 and len(lists["one tensor"][0]) == 1
    assert bench.numel(lists["ResNet-18"][0]) == 11_689_512
    assert len(lists["DenseNet-121"][0]) > 300
    assert all(rounds >= 5 * bench.CYCLE for _, rounds in lists.values())


def test_groups_stay_within_the_memory_budget_and_have_the_reference():
    parts = bench.memory_groups(bench.CONTENDERS, 25_000_000)
    names = [c.name for part in parts for c in part]
    assert set(names) == {c.name for c in bench.CONTENDERS if c.make}
    assert all(part[0].name == bench.REFERENCE and len(part) > 1 for part in parts)
    windows = {f"AdaShift fused n={m} m={m}" for m in (2, 100)}  # compared by a goal
    assert any(windows <= {c.name for c in part} for part in parts)
    for part in parts:
        assert sum(4 * 25_000_000 * (2 + c.buffers) for c in part) <= bench.MEMORY_BUDGET


def test_goals_name_contenders():
    assert {goal.name for goal in bench.SPEED_GOALS} <= set(NAMES)
    assert {goal.reference for goal in bench.SPEED_GOALS} <= {*NAMES, bench.MEDIAN_STEP}


@pytest.mark.parametrize("m", [1, 2, 10, math.inf])
def test_parameters_move_after_the_warm_up(m):
    contender = bench.adashift_contender(n=44, m=m)
    optimizer = bench.warmed_up(contender, [(4,)])
    assert isinstance(optimizer, AdaShift)
    (p,) = optimizer.param_groups[0]["params"]
    before = p.detach().clone()
    optimizer.step()
    assert (p != before).all()


def test_each_round_times_every_workload_once_in_a_changing_order():
    calls = []

    class Workload:
        def __init__(self, name):
            self.name = name

        def step(self):
            calls.append(self.name)

    times = common.interleave({name: Workload(name) for name in "abc"}, rounds=6)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, 18, 3)]
    assert rounds == ["abc", "acb", "cab", "cba", "bca", "bac"]
    assert times.shape == (6, 3) and (times > 0).all(axis=None)


def test_an_expensive_step_of_each_cycle_counts_and_an_outlier_does_not():
    t = pd.Series([*[1.0] * (bench.CYCLE - 1), 11.0] * 8)
    t[0] = 1e6
    steps = bench.steps_of_a_cycle(t)
    assert steps.mean() == pytest.approx(2) and steps.max() == 11


def goals_of(**changes):
    """The goals if every contender were as fast as Adam fused, apart from `changes`."""
    index = pd.MultiIndex.from_product([LISTS, NAMES], names=["list", "contender"])
    table = pd.DataFrame({"to_fused": 1.0, "slowest_to_median": 1.0}, index=index)
    for column, values in changes.items():
        for name, ratios in values.items():
            table.loc[[(x, name) for x in LISTS], column] = ratios
    return bench.goal_rows(table.reset_index()).set_index("over")


@pytest.mark.parametrize(
    ("ratios", "met"),
    [([1.09, 0.9, 1.0], "yes"), ([1.09, 1.0, 1.0], "no"), ([1.2, 0.5, 0.5], "no")],
)
def test_a_goal_is_met_on_each_list_and_in_the_mean(ratios, met):
    goals = goals_of(to_fused={bench.ADASHIFT: ratios})
    row = goals[goals["time of"] == bench.ADASHIFT].loc[bench.FUSED]
    assert row["met"] == met and row["goal"] == "≤ 1.1, mean ≤ 1"
    assert list(row[LISTS]) == [f"{x:.2f}" for x in ratios]


def test_the_goals_of_a_slow_step_and_of_a_missing_contender():
    peer = "pytorch-optimizer AdaShift n=10"
    slow = {bench.ADASHIFT: [1.4, 1.6, 1.0]}
    goals = goals_of(slowest_to_median=slow, to_fused={peer: math.nan})
    assert goals.loc[bench.MEDIAN_STEP, "met"] == "no" and goals.loc[peer, "met"] == "–"
