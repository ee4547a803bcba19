"""The optimizer benchmark on small lists: it measures what it says; speed is not tested."""

import importlib.util

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
    measured = table[table["note"].isna()].drop(columns=["note", "state_per_parameter_byte"])
    assert len(measured) >= len(LISTS) * (len(NAMES) - 1)
    assert (measured > 0).all(axis=None)
    assert (measured["q25_ms"] <= measured["median_ms"]).all()
    assert (measured["median_ms"] <= measured["q75_ms"]).all()


def test_ratios_are_to_adam(table):
    for name in LISTS:
        assert table.loc[(name, bench.REFERENCE), "cycle_to_adam"] == 1
        assert table.loc[(name, bench.FUSED), "median_to_fused"] == 1


@pytest.mark.parametrize("name", LISTS)
def test_the_state_has_the_documented_size(table, name):
    state = table.loc[name]["state_per_parameter_byte"]
    assert state["Adam default"] == pytest.approx(2, abs=0.02)
    for n in (1, 10, 40):
        assert state[f"AdaShift default n={n} m=1"] < 0.02  # no gradient-sized buffer
    for m in (2, 10, 40):
        assert state[f"AdaShift default n={m} m={m}"] == pytest.approx(m + 1, abs=0.02)


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
    assert all(rounds % bench.CYCLE == 0 for _, rounds in lists.values())


def test_groups_stay_within_the_memory_budget_and_have_the_reference():
    parts = bench.memory_groups(bench.CONTENDERS, 25_000_000)
    names = [c.name for part in parts for c in part]
    assert set(names) == {c.name for c in bench.CONTENDERS if c.make}
    assert all(part[0].name == bench.REFERENCE and len(part) > 1 for part in parts)
    for part in parts:
        assert sum(4 * 25_000_000 * (2 + c.buffers) for c in part) <= bench.MEMORY_BUDGET


@pytest.mark.parametrize("m", [1, 2, 3, 10, 40])
def test_a_cycle_has_whole_windows_and_the_warm_up_is_longer_than_n(m):
    assert bench.CYCLE % m == 0 or m == 3
    contender = bench.adashift_contender(n=m)
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


@pytest.mark.parametrize("m", [2, 10, 40])
def test_the_expensive_step_counts_once_per_cycle_and_an_outlier_does_not(m):
    contender = bench.adashift_contender(n=m)
    steps = range(contender.warm_up + 1, contender.warm_up + 1 + 4 * bench.CYCLE)  # t, from 1
    t = pd.Series([1.0 + m * ((step - 1) % m == 0) for step in steps])
    assert bench.cycle_mean(t, contender) == pytest.approx(2)
    t[int(t.argmin())] = 1e6
    assert bench.cycle_mean(t, contender) == pytest.approx(2)
    assert bench.cycle_mean(t, bench.adam_contender("default")) == t.median()
