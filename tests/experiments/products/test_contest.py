"""A contest: one optimizer against others, from runs of several specs."""

import pandas as pd
import pytest

from experiments.config.errors import ConfigError
from experiments.config.paths import ROOT
from experiments.products import contest, specs
from experiments.products.contest import duels, profile, totals, write_contest
from experiments.products.specs import load_spec
from experiments.records.run import Run
from experiments.training.execute import execute

FIGURE = """
title: Figure 2. Two optimizers
seeds: 2
base: [experiment=mnist_lr]
runs: {adam: [optimizer=adam], adashift: [optimizer=adashift]}
panels: [{title: (a) accuracy, metric: test_accuracy, runs: [adam, adashift]}]
"""
TABLE = """
title: Table S5. AdaShift or Adam?
seeds: 2
runs: {row: [experiment=mnist_lr, optimizer=adashift, optimizer.phi=row]}
contest:
  subject: AdaShift
  rival: Adam
  tasks:
    - label: accuracy
      metric: test_accuracy
      margin: 0.005
      paper: {AdaShift: figure-02/adashift, Adam: figure-02/adam, φ = row: row}
    - label: loss
      metric: classifier/loss
      margin: 0.01
      paper: {AdaShift: figure-02/adashift, Adam: figure-02/adam}
"""
SEARCH = """
title: Table 5. A search
seeds: 2
base: [experiment=mnist_lr]
search:
  adam:     {label: Adam, paper: [optimizer=adam], sweeps: [lr_1e-4_to_1e-2]}
  adashift: {label: AdaShift, paper: [optimizer=adashift], best: [], sweeps: [lr_1e-3_to_1e-1]}
rule: {seeds: 1, metric: test_accuracy, best: highest, settings: [lr], along: lr}
"""


@pytest.fixture
def spec(tmp_path, monkeypatch):
    for name, text in (("figure/02", FIGURE), ("table/s5", TABLE)):
        path = tmp_path / f"conf/{name}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.setattr(specs, "CONF", tmp_path / "conf")
    return load_spec("table", "s5")


@pytest.fixture
def groups(spec, tmp_path):
    """All runs but those of φ = row are finished."""
    groups = spec.expand([f"results={tmp_path}", "scale=smoke", "tracking=off"])
    for name in ("figure-02/adam", "figure-02/adashift"):
        for run in groups[name]:
            execute(run)
    return groups


def test_runs_of_other_specs_are_those_of_the_other_specs(spec):
    assert spec.runs["figure-02/adam"] == ["experiment=mnist_lr", "optimizer=adam"]
    lender = load_spec("figure", "02").expand(["scale=smoke"])
    ours = spec.expand(["scale=smoke"])
    assert [r.folder for r in ours["figure-02/adam"]] == [r.folder for r in lender["adam"]]


def test_a_borrowed_run_must_exist_and_have_the_same_seeds(spec, tmp_path):
    path = tmp_path / "conf/table/s5.yaml"
    path.write_text(TABLE.replace("figure-02/adam,", "figure-02/adan,"))
    with pytest.raises(ConfigError, match="names adan, which is unknown; the runs of figure-02"):
        load_spec("table", "s5")
    path.write_text(TABLE.replace("seeds: 2", "seeds: 3"))
    with pytest.raises(ConfigError, match="figure-02/adam, which has other seeds: use the same"):
        load_spec("table", "s5")


def test_the_best_run_of_an_unfinished_search_is_left_out(spec, tmp_path):
    (tmp_path / "conf/table/05.yaml").write_text(SEARCH)
    done = "      best: {AdaShift: figure-02/adashift, Adam: figure-02/adam}\n"
    more = "      best: {AdaShift: table-05/adashift best, Adam: table-05/adam best}\n"
    path = tmp_path / "conf/table/s5.yaml"
    path.write_text(TABLE.replace("    - label: loss", done + "    - label: loss") + more)
    spec = load_spec("table", "s5")
    assert "table-05/adam best" not in spec.runs and "table-05/adashift best" in spec.runs
    groups = spec.expand([f"results={tmp_path}", "scale=smoke", "tracking=off"])
    for name in ("figure-02/adam", "figure-02/adashift", "table-05/adashift best"):
        for run in groups[name]:
            execute(run)
    write_contest(spec, spec.contest, groups, tmp_path / "t", tmp_path / "p")
    page = (tmp_path / "t.md").read_text()
    assert "Not trained yet with the best learning rates: loss." in page
    assert set(profile(spec.contest, "best", groups)) == {"AdaShift", "Adam"}


def test_lower_is_better_for_a_loss(spec, groups):
    accuracy, loss = duels(spec.contest, groups)
    runs = {name: groups[f"figure-02/{name}"] for name in ("adam", "adashift")}
    for duel, metric, sign in ((accuracy, "test_accuracy", 1), (loss, "classifier/loss", -1)):
        ours, theirs = (
            [sign * run.metrics()[metric].iloc[-1] for run in runs[name]]
            for name in ("adashift", "adam")
        )
        assert duel.ours.tolist() == ours and duel.theirs.tolist() == theirs
        wins = [(a > b) + 0.5 * (a == b) for a in ours for b in theirs]
        assert duel.probability == sum(wins) / 4
        assert duel.row()["ours"] == pytest.approx(sign * sum(ours) / 2)
        assert duel.row()["low"] <= duel.row()["difference"] <= duel.row()["high"]


def test_runs_that_are_not_finished_are_left_out(spec, groups):
    found = [*duels(spec.contest, groups)]
    assert {duel.rival for duel in found} == {"Adam"}
    (row,) = totals(found).to_dict("records")
    assert row["problems"] == 2 and row["low"] <= row["probability"] <= row["high"]
    for run in groups["row"]:
        execute(run)
    assert {duel.rival for duel in duels(spec.contest, groups)} == {"Adam", "φ = row"}


def test_a_diverged_run_loses(spec, groups):
    for run in groups["figure-02/adashift"]:
        info = run.folder / "run.json"
        info.write_text(info.read_text().replace('"finished"', '"diverged"'))
    fresh = {name: [Run(run.config) for run in runs] for name, runs in groups.items()}
    outcomes = [duel.probability for duel in duels(spec.contest, fresh)]
    assert outcomes == [0, 0]


def test_the_share_of_runs_close_to_the_best_rises_to_one(spec, groups):
    shares = profile(spec.contest, "paper", groups)
    assert shares.keys() == {"AdaShift", "Adam"}, "not φ = row, which only one problem has"
    for share in shares.values():
        assert (share[1:] >= share[:-1]).all() and share[-1] == 1
    assert profile(spec.contest, "best", groups) == {}


def test_page_and_figure_are_written(spec, groups, tmp_path):
    write_contest(spec, spec.contest, groups, tmp_path / "t", tmp_path / "p")
    page = (tmp_path / "t.md").read_text()
    assert "# Table S5. AdaShift or Adam?" in page and "smoke scale; 2 seeds." in page
    assert "| accuracy | test_accuracy, higher is better |" in page
    assert "| loss | classifier/loss, lower is better |" in page
    assert "Not trained yet" not in page, "it has no runs with the best rates"
    table = pd.read_csv(tmp_path / "t.csv")
    assert list(table["problem"]) == ["accuracy", "loss"] and set(table["rival"]) == {"Adam"}
    assert (tmp_path / "p.png").stat().st_size > 10_000 and (tmp_path / "p.pdf").exists()


def test_a_page_without_results_is_written_too(spec, tmp_path):
    groups = spec.expand([f"results={tmp_path}", "scale=smoke", "tracking=off"])
    write_contest(spec, spec.contest, groups, tmp_path / "t", tmp_path / "p")
    page = (tmp_path / "t.md").read_text()
    assert "Not trained yet with the paper's learning rates: accuracy; loss." in page


def test_costs_are_those_of_the_published_measurement():
    costs = contest.read_costs(ROOT / "results/published/benchmarks/bench-optimizer.csv")
    assert list(costs["label"]) == list(contest.MEASURED.values())
    assert costs.set_index("label").loc["Adam", ["low", "high"]].tolist() == [1, 1]
