"""Claims: from runs to verdicts, and the page of all of them."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from experiments.config.errors import ConfigError
from experiments.products import claims, summaries
from experiments.products.checks import check_seeds
from experiments.products.claims import Family, family_of, judge_spec, with_corrections
from experiments.products.comparison import judge_part, verdict_of
from experiments.products.names import RunName
from experiments.products.schema import Claim, Comparison, Spec


@dataclass
class FakeRun:
    """A finished run whose metric ends at a value."""

    value: float
    seed: int = 0
    done: bool = True
    folder: str = "somewhere"
    status: str = "finished"
    info: dict = field(default_factory=lambda: {"commit": "abc"})
    config: SimpleNamespace = field(init=False)

    def __post_init__(self):
        self.config = SimpleNamespace(
            seed=self.seed, shown_scale="paper", digest=lambda: f"{self.value}"
        )

    def metrics(self):
        return pd.DataFrame(
            {"step": [1, 2]} | {m: [0.0, self.value] for m in ("x", "loss", "classifier/loss")}
        )


def group(*values):
    return [FakeRun(v, seed) for seed, v in enumerate(values)]


def judge_claim(claim, groups):
    return claims.judge_claim(claim, groups, {name: RunName(name) for name in groups})


def claim(*parts, **changes):
    about = {"id": "F1", "place": "here", "text": "so it is", "metric": "x"}
    return Claim(**(about | changes), parts=[Comparison(**p) for p in parts])


def verdict(relation, left, right, margin=0.0):
    part = {"left": "a", "relation": relation, "right": "b", "margin": margin}
    return judge_claim(claim(part), {"a": group(*left), "b": group(*right)})["verdict"]


@pytest.mark.parametrize(
    ("relation", "left", "expected"),
    [
        ("below", [-3, -2, -2.5], "holds"),
        ("below", [3, 2, 2.5], "fails"),
        ("below", [-3, 2, 0.5], "inconclusive"),
        ("above", [3, 2, 2.5], "holds"),
        ("above", [-3, -2, -2.5], "fails"),
        ("above", [-3, 2, 0.5], "inconclusive"),
        ("near", [0.01, -0.01, 0.0], "holds"),
        ("near", [3, 2, 2.5], "fails"),
        ("near", [0.05, 0.15, 0.1], "inconclusive"),
    ],
)
def test_verdicts_over_seeds(relation, left, expected):
    assert verdict(relation, left, [0, 0, 0], margin=0.1 if relation == "near" else 0) == expected


def test_a_deterministic_run_is_judged_by_its_single_value():
    assert verdict_of("below", -1e-9, -1e-9, 0) == "holds"
    assert verdict_of("below", 0.0, 0.0, 0) == "fails"
    assert verdict_of("near", 0.0, 0.0, 0) == "holds"
    (row,) = judge_spec(spec(), {"a": group(-1)})
    assert row["verdict"] == "holds" and row["p"] == "" and row["numbers"] == "x, a: -1"


def test_a_diverged_run_counts_as_the_worst_one():
    """A loss that diverged is above every other; without a known direction nothing is decided."""
    for metric, expected in (("classifier/loss", "holds"), ("x", "inconclusive")):
        low, high = group(*np.linspace(1, 2, 10)), group(*np.linspace(3, 4, 10))
        high[2].status = "diverged"
        above = claim({"left": "high", "relation": "above", "right": "low"}, metric=metric)
        row = judge_claim(above, {"low": low, "high": high})
        assert row["verdict"] == expected and "median, diverged runs 1" in row["numbers"]
    for run in low[:4]:
        run.status = "diverged"
    row = judge_claim(above.model_copy(update={"metric": "loss"}), {"low": low, "high": high})
    assert row["verdict"] == "inconclusive", "the better side diverged in four of ten seeds"


def test_several_runs_are_judged_by_the_largest_difference_of_their_means():
    groups = {"a": group(1, 12, 30), "b": group(1.5, 12.1, 29.5), "c": group(1.2, 11.8, 30)}
    near = {"left": ["a", "b", "c"], "relation": "near", "margin": 2}
    row = judge_claim(claim(near), groups)
    assert row["verdict"] == "holds" and row["numbers"].startswith("x, range over a, b, c: 0.0333")
    assert judge_claim(claim(near | {"margin": 0.1}), groups)["verdict"] == "inconclusive"
    far = groups | {"c": group(3, 14.1, 31.9)}
    assert judge_claim(claim(near | {"margin": 0.1}), far)["verdict"] == "fails"
    less = {"left": ["a", "b"], "relation": "below", "right": ["a", "b", "c"]}
    row = judge_claim(claim(less), far)
    assert row["numbers"].startswith("x, (range over a, b) − (range over a, b, c): -")


def test_a_part_fails_a_claim_of_many_parts_only_after_a_correction():
    """p = 0.05 against one part is not enough if there are ten."""
    groups = {"a": group(-0.3, 0, 0.3, 0.6, 0.9, 1.2, 1.5), "b": group(-1, -1.1)}
    wrong, right = ({"left": name, "relation": "below"} for name in "ab")
    assert judge_claim(claim(wrong), groups)["verdict"] == "fails"
    row = judge_claim(claim(wrong, *[right] * 9), groups)
    assert row["verdict"] == "inconclusive" and float(row["p"]) == pytest.approx(0.5, abs=0.01)
    single = judge_part(claim(wrong), Comparison(**wrong), groups)
    assert row["seeds_needed"] == str(single.seeds_to_fail(10)), "to fail after the correction"


def test_an_inconclusive_claim_says_how_many_seeds_settle_it():
    groups = {"a": group(-3, 2, -2), "b": group(-5, 2, -2, -1), "sure": group(-1, -1.1, -1.2)}
    one, two, sure = ({"left": name, "relation": "below"} for name in groups)
    counts = [judge_claim(claim(part, sure), groups)["seeds_needed"] for part in (one, two)]
    assert counts == ["57", "32"]
    assert judge_claim(claim(one, two), groups)["seeds_needed"] == "76", "both parts must hold"
    against = judge_claim(claim(one, two | {"relation": "above"}), groups)
    assert against["seeds_needed"] == "38", "one part that fails is enough, after the correction"
    assert judge_claim(claim(sure), groups)["seeds_needed"] == ""


def test_random_runs_need_a_margin():
    with pytest.raises(ValueError, match="claim F1 compares a and b without a margin: set the sma"):
        spec(right="b", once=["a"])
    assert spec(right="b", once=["a", "b"]) and spec(right="b", once=[], margin=0.1)
    assert spec(right=0.0, once=[]), "the constant is the bound"


def test_the_margin_of_a_claim_is_that_of_its_parts():
    one = claim({"left": "a", "relation": "above"}, {"left": "a", "relation": "near", "margin": 0})
    one = one.model_copy(update={"margin": 0.5})
    assert [one.margin_of(part) for part in one.parts] == [0.5, 0]


def test_corrections_count_the_claims_that_were_tested():
    groups = {"a": group(-1, -1.1, -1.3)}
    usual = claim({"left": "a", "relation": "below"})
    row = judge_claim(usual, groups)
    rows = [row | {"id": f"F{i}", "main": "yes" if i < 2 else ""} for i in range(4)]
    exact, open_row = row | {"id": "T1", "p": ""}, {**row, "id": "F9", "p": "", "main": "yes"}
    corrected = with_corrections([*rows, exact, open_row], Family(main=2, all=4))
    assert [r["p_holm"] for r in corrected] == [f"{2 * float(row['p']):.6g}"] * 2 + [""] * 4
    assert [r["p_bh"] for r in corrected] == [row["p"]] * 4 + [""] * 2


def test_corrections_count_the_claims_that_are_not_run():
    groups = {"a": group(-1, -1.1, -1.3)}
    row = judge_claim(claim({"left": "a", "relation": "below"}, main=True), groups)
    (corrected,) = with_corrections([row], Family(main=3, all=10))
    p = float(row["p"])
    assert (float(corrected["p_holm"]), float(corrected["p_bh"])) == pytest.approx(
        (3 * p, 10 * p), rel=1e-4
    )
    random = spec(right="b", once=[], margin=0.1)
    assert family_of([spec(), random, random]) == (0, 2), "exact claims have no p value"


def test_the_whole_interval_must_exceed_the_margin():
    assert verdict("below", [-1.0, -1.1, -0.9], [0, 0, 0], margin=0.5) == "holds"
    assert verdict("below", [-1.0, -1.1, -0.9], [0, 0, 0], margin=1.0) == "inconclusive"
    assert verdict("below", [-1.0, -1.1, -0.9], [0, 0, 0], margin=2.0) == "fails"


def test_seeds_are_compared_in_pairs():
    """Large differences between seeds do not hide a small one within each of them."""
    noise = np.array([-50.0, 3.0, 70.0])
    assert verdict("below", noise - [1, 1.1, 0.9], noise) == "holds"


def test_a_claim_is_as_good_as_its_worst_part():
    groups = {"a": group(-1, -1.01), "b": group(1, 1.01)}
    good, bad = ({"left": name, "relation": "below"} for name in "ab")
    assert judge_claim(claim(good), groups)["verdict"] == "holds"
    row = judge_claim(claim(good, bad), groups)
    assert row["verdict"] == "fails"
    assert row["numbers"].count(";") == 1 and row["seeds"] == "2"


def test_a_deterministic_run_can_be_compared_with_several_seeds():
    groups = {"once": group(1.0), "a": group(2.0, 2.1, 2.2)}
    assert (
        judge_claim(claim({"left": "once", "relation": "below", "right": "a"}), groups)["seeds"]
        == "3"
    )
    near = {"left": ["once", "a"], "relation": "near", "margin": 2}
    assert judge_claim(claim(near), groups)["verdict"] == "holds"


def test_a_claim_on_a_spread_needs_all_its_runs():
    groups = {"a": group(1, 2), "b": group(1, 2)}
    part = {"left": ["a", "b"], "relation": "near", "margin": 1}
    spread = claim(part)
    assert claims.needed(spread, groups) == [*groups["a"], *groups["b"]]


def test_a_record_without_the_metric_is_reported():
    with pytest.raises(ConfigError, match="somewhere has no metric y: train it again with force"):
        judge_claim(claim({"left": "a", "relation": "below"}, metric="y"), {"a": group(1)})


def test_a_claim_on_one_seed_needs_once():
    with pytest.raises(ConfigError, match="claim F1 compares a with one seed: raise `seeds`"):
        check_seeds(spec().model_copy(update={"once": []}))
    check_seeds(spec())
    check_seeds(spec().model_copy(update={"once": [], "seeds": 2}))


def spec(right=0.0, once=("a",), margin=0.0):
    about = {"id": "F1", "place": "here", "text": "so it is", "metric": "x", "margin": margin}
    return Spec(
        title="t",
        seeds=1,
        once=[*once],
        runs={"a": ["optimizer=adam"], "b": ["optimizer=adam"]},
        claims=[about | {"parts": [{"left": "a", "relation": "below", "right": right}]}],
        labels={"a": "a", "b": "b"},
    )


def test_a_claim_without_its_runs_is_not_run():
    (row,) = judge_spec(spec(), {"a": [FakeRun(-1, done=False)]})
    assert row["verdict"] == "not run" and row["numbers"] == row["p"] == ""


def test_columns_that_a_file_lacks_are_empty(tmp_path):
    (tmp_path / "claims.csv").write_text("id,verdict\nF1,holds\n")
    row = claims.read_verdicts(tmp_path / "claims.csv")["F1"]
    assert row["verdict"] == "holds" and row["p"] == row["exploratory"] == ""


def test_verdicts_are_read_back_as_written(tmp_path):
    rows = judge_spec(spec(), {"a": group(-1)})
    claims.write_verdicts(rows, tmp_path / "claims", Family(0, 0))
    assert claims.read_verdicts(tmp_path / "claims.csv") == {"F1": rows[0]}
    page = (tmp_path / "claims.md").read_text()
    assert (
        "| F1 | here | so it is | **holds** |" in page and "1 claims of the paper: 1 holds" in page
    )


def grid(values):
    rows = [(i / 2, j / 2, v) for j, row in enumerate(values) for i, v in enumerate(row)]
    return pd.DataFrame(rows, columns=["beta1", "beta2", "x"]).assign(step=range(len(rows)))


def test_statistics():
    curve = pd.DataFrame({"step": [1, 2, 3], "x": [3.0, 5.0, np.nan], "exact": [3.0, 4.0, 1.0]})
    assert summaries.last(curve, "x") == 5 and summaries.mean(curve, "x") == 4
    assert summaries.largest(curve, "x") == 5 and summaries.smallest(curve, "x") == 3
    assert summaries.median(curve, "x") == 4
    assert summaries.trend(curve, "x") == pytest.approx(1)
    assert summaries.differs_from_exact(curve, "x") == 0.5


def test_a_rise_is_measured_from_the_lowest_earlier_value():
    curve = pd.DataFrame({"x": [1000.0, 10.0, np.nan, 100.0, 1.0, 5.0]})
    assert summaries.rise_log10(curve, "x") == pytest.approx(1)
    assert summaries.rise_log10(curve.iloc[:2], "x") == 0


def test_the_tail_is_the_last_tenth():
    curve = pd.DataFrame({"step": range(41), "x": [*[100.0] * 36, 1.0, 3.0, 1.0, 3.0, np.nan]})
    assert summaries.tail_mean(curve, "x") == 2 and summaries.tail_sd(curve, "x") == 1
    short = curve.iloc[36:39]
    assert summaries.tail_mean(short, "x") == 1 and summaries.tail_sd(short, "x") == 0


def test_falls_on_a_grid_are_counted_along_one_axis():
    rising = grid([[1, 2], [3, 4]])
    assert summaries.falls_along_beta1(rising, "x") == summaries.falls_along_beta2(rising, "x") == 0
    falls_with_beta2 = grid([[4, 5], [1, 5]])
    assert summaries.falls_along_beta1(falls_with_beta2, "x") == 0
    assert summaries.falls_along_beta2(falls_with_beta2, "x") == 0.5


@pytest.mark.parametrize(
    ("verdict", "scale", "words"),
    [
        ("fails", "desktop", "fails at desktop scale"),
        ("inconclusive", "laptop and paper", "inconclusive at laptop scale"),
        ("fails", "paper", "fails"),
        ("holds", "desktop", "holds at desktop scale"),
        ("not run", "laptop", "not run"),
    ],
)
def test_a_verdict_names_a_scale_that_may_be_too_small(verdict, scale, words):
    row = dict.fromkeys(claims.COLUMNS, "") | {"verdict": verdict, "scale": scale}
    assert claims.said(row) == words
