"""Searches: the runs of a sweep file, the best setting, and the table."""

import math
import subprocess
import sys
from types import SimpleNamespace

import hydra
import pandas as pd
import pytest
from omegaconf import OmegaConf

from experiments import __main__ as cli
from experiments.config.compose import compose, config_source, expand, sweep_points
from experiments.config.errors import ConfigError
from experiments.config.paths import CONF, ROOT, choices_of
from experiments.products import search_tables, specs
from experiments.products.schema import SearchRule
from experiments.products.search_tables import judge_search, write_search_table
from experiments.products.specs import figures_using, load_spec
from experiments.records.run import Run
from experiments.training.execute import execute

RULE = {"metric": "score", "best": "highest", "settings": ["lr", "betas", "n"], "along": "lr"}
TABLE = """
title: Table 5. A search
seeds: 2
base: [experiment=mnist_lr]
search:
  sgd:  {label: SGD, paper: [optimizer=sgd], sweeps: [lr_1e-2_to_1]}
  adam: {label: Adam, paper: [optimizer=adam], sweeps: [lr_1e-4_to_1e-2]}
rule:
  metric: validation_accuracy
  statistic: tail_mean
  best: highest
  beside: [classifier/loss]
  settings: [lr, betas]
  along: lr
  panels: [{title: (a) accuracy, metric: validation_accuracy, axes: {xscale: log, ylim: [0, 0.6]}}]
"""


# -- the files of conf/sweep -------------------------------------------------------------------


def test_a_sweep_is_the_product_of_its_values():
    assert sweep_points("lr_1e-4_to_1e-2") == [
        [f"optimizer.lr={lr}"] for lr in (0.0001, 0.0005, 0.001, 0.005, 0.01)
    ]
    points = sweep_points("n10_betas_lr_5e-3_to_5e-2")
    assert len(points) == 6 and all(point[0] == "optimizer.n=10" for point in points)
    assert {point[1] for point in points} == {f"optimizer.betas=[{b},0.999]" for b in ("0", "0.9")}


def test_a_sweep_can_list_points():
    points = sweep_points("n_and_m_10_to_40")
    assert points[3:5] == [["optimizer.n=40"], ["optimizer.n=40", "optimizer.m=10"]]
    assert len(points) == 7  # and not the product of four and four


@pytest.mark.parametrize(
    ("sweep", "figure", "optimizer"),
    [
        ("lr_decades_1e-3_to_1e-1", "09", "adashift"),
        ("lr_decades_1e-4_to_1e-2", "09", "adam"),
        ("lr_decades_1e-3_to_1e-1", "10", "adashift"),
        ("lr_decades_1e-4_to_1e-2", "10", "adam"),
        ("betas", "11", "adashift"),
        ("betas", "12", "adashift"),
        ("n_5_to_30", "13", "adashift"),
        ("m_1_to_30", "14", "adashift"),
        ("n_and_m_10_to_40", "15", "adashift"),
    ],
)
def test_a_sensitivity_figure_has_the_runs_of_a_sweep(sweep, figure, optimizer):
    """To the run; Figures 11 and 12 have learning rates beside it, which a claim compares."""
    spec = load_spec("figure", figure)
    wanted = {
        run.folder
        for run in spec.settings(["scale=laptop"]).values()
        if run.config.optimizer_name == optimizer
        and (sweep != "betas" or run.config.optimizer["lr"] == 0.01)
    }
    common = [*spec.base, f"optimizer={optimizer}", "scale=laptop"]
    assert {Run(compose([*common, *point])).folder for point in sweep_points(sweep)} == wanted


def test_an_unknown_sweep_is_reported_with_the_choices():
    with pytest.raises(ConfigError, match="sweep=nonsense is unknown: expected a file of"):
        sweep_points("nonsense")


@pytest.mark.parametrize("name", choices_of("sweep"))
def test_every_sweep_opens_with_its_command_and_gives_its_sources(name):
    lines = (CONF / "sweep" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package hydra"
    assert lines[1].startswith(f"# python run.py -m sweep={name} experiment=")
    values = [line for line in lines if line.startswith("    ")]
    assert values and all("#" in line for line in values)


@pytest.mark.parametrize("name", choices_of("sweep"))
def test_a_sweep_does_not_change_the_config_and_is_read_as_hydra_does(name):
    with config_source():
        swept = hydra.compose("run", [f"sweep={name}"], return_hydra_config=True)
        plain = hydra.compose("run", [], return_hydra_config=True)
    sweeper = swept.hydra.sweeper
    params = [f"{key}={values}" for key, values in sweeper.params.items()]
    assert sweep_points(name) == expand(params, sweeper.points)
    OmegaConf.set_struct(swept, False), OmegaConf.set_struct(plain, False)
    del swept["hydra"], plain["hydra"]
    assert swept == plain


def test_run_py_and_a_table_make_the_same_runs(tmp_path):
    words = [f"results={tmp_path}", "scale=smoke", "tracking=off"]
    sweep = ["run.py", "-m", "sweep=lr_1e-4_to_1e-2", "experiment=mnist_lr", "optimizer=adam"]
    out = subprocess.run([sys.executable, *sweep, *words], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    table = load_spec("table", "05").expand(words)
    adam = {table[name][0].folder for name in load_spec("table", "05").search["adam"].runs("adam")}
    assert adam == {path.parent for path in tmp_path.glob("runs/*/*/*/run.json")} and len(adam) == 5


# -- what a table is made of -------------------------------------------------------------------


@pytest.mark.parametrize(("name", "steps"), [("05", 8580), ("06", 4295)])
def test_the_search_includes_the_papers_settings(name, steps):
    spec = load_spec("table", name)
    groups = spec.expand(["scale=paper"])
    assert {run.config.steps for runs in groups.values() for run in runs} == {steps}
    assert list(spec.search) == ["sgd", "adam", "amsgrad", "non_adashift", "adashift"]
    for optimizer, search in spec.search.items():
        assert search.paper == [f"optimizer={optimizer}"]
        points = [groups[key][0].config.digest() for key in search.runs(optimizer)]
        assert points[0] in points[1:], f"no sweep has the paper's {optimizer}"
    assert len({run.folder for runs in groups.values() for run in runs}) == 37 * 3 + 5 * 10


def test_table_9_shares_its_runs_with_the_figures():
    groups = load_spec("table", "09").expand(["scale=laptop"])
    mine = {run.folder for runs in groups.values() for run in runs}
    names = ("04", "05", "06", "09", "10")
    specs = [load_spec("figure", name).expand(["scale=laptop"]) for name in names]
    theirs = {run.folder for spec in specs for runs in spec.values() for run in runs}
    assert len(mine) == 34 * 3 + 8 * 10, "the search, and the best settings on other seeds"
    assert len(mine & theirs) == 4 * 10, "the best settings that a figure has too"


def test_the_tags_of_a_run_include_its_search_table():
    pair = ["experiment=mnist_lr", "optimizer=adam", "scale=paper"]
    assert figures_using(Run(compose([*pair, "optimizer.lr=0.0005"]))) == ["table-05"]
    assert figures_using(Run(compose([*pair, "optimizer.lr=0.0007"]))) == []


# -- the best by the rule ----------------------------------------------------------------------


def fake(lr, *scores, diverged=(), **settings):
    """Runs with one setting, a score for each seed."""
    optimizer = {"lr": lr, "betas": [0, 0.999], "n": 1} | settings
    config = SimpleNamespace(optimizer=optimizer, steps=9, digest=lambda: str(optimizer))

    def run(seed, score):
        metrics = pd.DataFrame({"step": [1], "score": [score], "cost": [-score]})
        status = "diverged" if seed in diverged else "finished"
        return SimpleNamespace(config=config, status=status, metrics=lambda: metrics)

    return [run(seed, score) for seed, score in enumerate(scores)]


def judged(*points, **changes):
    table = judge_search(points, SearchRule(**RULE | changes))
    assert table["best"].sum() == table["paper"].sum() == 1
    return table, table[table["best"]].iloc[0]


PAPER = fake(0.01, 0.5, 0.7)


@pytest.mark.parametrize(
    ("points", "direction", "lr", "edge"),
    [
        ([fake(0.1, 0.9, 0.8), fake(1, 0.1, 0.2)], "highest", 0.1, False),
        ([fake(0.1, 0.9, 0.8), fake(1, 0.1, 0.2)], "lowest", 1, True),
        ([fake(0.1, 0.9, 0.8), fake(0.001, 0.1, 0.2)], "highest", 0.1, True),
        ([fake(0.1, 1.0, 0.0), fake(1, 0.2, 0.2)], "highest", 0.01, True),
        ([fake(0.1, 1.0, 0.0), fake(0.001, 0.2, 0.2)], "highest", 0.01, False),
        ([fake(0.1, 0.7, 0.5)], "highest", 0.01, True),  # the paper's wins a tie
        ([fake(0.1, 0.7, 0.5)], "lowest", 0.01, True),
    ],
)
def test_the_best_setting_has_the_best_mean_and_edges_are_marked(points, direction, lr, edge):
    _, best = judged(PAPER, *points, best=direction)
    assert (best["lr"], best["edge"]) == (lr, edge)


def test_an_edge_is_the_end_of_its_own_line():
    """Learning rates that were tried with another n say nothing about this one."""
    longer = [fake(lr, score, score, n=10) for lr, score in ((0.02, 0.8), (0.03, 0.9))]
    around = [fake(0.001, 0.1, 0.1), PAPER, fake(1, 0.1, 0.1)]
    _, best = judged(PAPER, *longer, *around)
    assert (best["lr"], best["n"], best["edge"]) == (0.03, 10, True)
    _, best = judged(PAPER, *longer, *around, fake(0.04, 0.5, 0.5, n=10))
    assert (best["lr"], best["edge"]) == (0.03, False)


@pytest.mark.parametrize("direction", ["highest", "lowest"])
def test_settings_with_a_diverged_run_rank_last(direction):
    wild = fake(0.1, 5.0 if direction == "highest" else -5.0, 0.6, diverged={1})
    table, best = judged(PAPER, wild, best=direction)
    assert best["paper"]
    lost = table[table["lr"] == 0.1].iloc[0]
    assert lost["diverged"] == 1 and math.isnan(lost["score"]) and math.isnan(lost["score low"])
    _, best = judged(fake(0.01, 1, 1, diverged={0}), fake(0.1, 0, 0), best=direction)
    assert best["lr"] == 0.1 and math.isnan(best["score difference"])


def test_numbers_are_over_the_seeds_and_differences_are_paired():
    _, best = judged(PAPER, fake(0.1, 0.61, 0.79), beside=["cost"])
    assert best["score"] == pytest.approx(0.7) and best["score sd"] == pytest.approx(0.0162**0.5)
    assert best["score difference"] == pytest.approx(0.1)
    half = (
        12.706205 * 0.01
    )  # t with one degree of freedom, times the standard error of 0.11 and 0.09
    assert (best["score low"], best["score high"]) == pytest.approx((0.1 - half, 0.1 + half))
    assert best["cost difference"] == pytest.approx(-0.1)


def test_a_setting_of_two_sweeps_is_listed_once():
    table, _ = judged(PAPER, fake(0.1, 0.6, 0.8), fake(0.01, 0.5, 0.7), fake(0.1, 0.6, 0.8))
    assert list(table["lr"]) == [0.01, 0.1]


def test_the_row_of_an_optimizer_says_what_was_found():
    rule = SearchRule(**RULE)
    lost = judge_search([fake(0.01, 1, 1, diverged={0}), fake(0.1, 1, 1, diverged={0, 1})], rule)
    row = search_tables.chosen_row(lost, rule)
    assert row["our best"] == "none, all diverged" and row["diverged runs"] == "3 of 4"
    assert row["its score"] == "1 of 2 runs diverged"
    won = search_tables.chosen_row(judge_search([PAPER, fake(0.1, 0.1, 0.1)], rule), rule)
    assert won["our best"].startswith("the paper's") and won["difference"] == "none"
    other = search_tables.chosen_row(judge_search([PAPER, fake(0.1, 0.9, 0.8, n=10)], rule), rule)
    assert other["our best"] == "lr 0.1, betas (0, 0.999), n 10 (at the edge of the grid)"


# -- from the command to the files -------------------------------------------------------------


@pytest.fixture
def conf(tmp_path, monkeypatch):
    (tmp_path / "conf/table").mkdir(parents=True)
    (tmp_path / "conf/table/05.yaml").write_text(TABLE)
    monkeypatch.setattr(specs, "CONF", tmp_path / "conf")


def words(tmp_path):
    return [f"results={tmp_path}", "scale=smoke", "tracking=off"]


def test_a_table_of_a_search_is_made(tmp_path, conf, capsys):
    cli.main(["status", *words(tmp_path)])
    assert "table 05: 20 missing of 20 runs" in capsys.readouterr().out
    cli.main(["table", "5", *words(tmp_path)])
    page = (tmp_path / "tables/table-05-smoke.md").read_text()
    assert page in capsys.readouterr().out
    assert "smoke scale; 40 steps a run; 2 seeds." in page
    assert "highest validation_accuracy (tail_mean), mean over the seeds" in page
    table = pd.read_csv(tmp_path / "tables/table-05-smoke.csv")
    assert list(table.groupby("optimizer", sort=False)["lr"].agg(tuple)) == [
        (0.01, 0.05, 0.1, 0.5, 1), (0.0001, 0.0005, 0.001, 0.005, 0.01),
    ]  # fmt: skip
    assert list(table[table["paper"]]["lr"]) == [0.1, 0.001] and (table["runs"] == 2).all()
    for label, part in table.groupby("optimizer"):
        best = part[part["best"]].iloc[0]
        assert best["validation_accuracy"] == part["validation_accuracy"].max()
        assert f"| {label} | lr " in page and f"{best['validation_accuracy']:.4g} ±" in page
    pictures = [tmp_path / f"figures/table-05-smoke.{kind}" for kind in ("png", "pdf", "csv")]
    assert all(path.stat().st_size > 200 for path in pictures)
    cli.main(["table", "5", *words(tmp_path)])
    assert "to train" not in capsys.readouterr().out


def test_the_numbers_are_those_of_the_records(tmp_path, conf):
    cli.main(["table", "5", *words(tmp_path)])
    table = pd.read_csv(tmp_path / "tables/table-05-smoke.csv")
    pair = ["experiment=mnist_lr", "optimizer=sgd", "optimizer.lr=0.5", *words(tmp_path)]
    ends = [
        Run(compose([*pair, f"seed={seed}"])).metrics()["validation_accuracy"].iloc[-2:].mean()
        for seed in (0, 1)
    ]
    row = table[(table["optimizer"] == "SGD") & (table["lr"] == 0.5)].iloc[0]
    assert row["validation_accuracy"] == pytest.approx(sum(ends) / 2)


def test_missing_runs_are_listed_and_nothing_is_written(tmp_path, conf):
    spec = load_spec("table", "05")
    groups = spec.expand(words(tmp_path))
    execute(groups["adam"][0])
    with pytest.raises(ConfigError, match=r"runs are missing.*python run.py experiment=mnist_lr"):
        write_search_table(spec, spec.rule, groups, tmp_path / "tables/t", tmp_path / "figures/t")
    assert not (tmp_path / "tables").exists() and not (tmp_path / "figures").exists()


def test_a_run_that_diverged_is_drawn_and_counted(tmp_path, conf):
    spec = load_spec("table", "05")
    groups = spec.expand(words(tmp_path))
    for members in groups.values():
        for run in members:
            execute(run)
    info = groups["adam"][1].folder / "run.json"
    info.write_text(info.read_text().replace('"finished"', '"diverged"'))
    write_search_table(spec, spec.rule, groups, tmp_path / "t", tmp_path / "p")
    assert "| 1 of 10 |" in (tmp_path / "t.md").read_text()
    assert "1 of 2 runs diverged" in (tmp_path / "t.md").read_text()
    assert (tmp_path / "p.png").exists()


# -- the best settings on other seeds ----------------------------------------------------------


def test_the_best_setting_is_judged_on_other_seeds(tmp_path, conf):
    """A search with two seeds, the best setting of SGD with three others; Adam's is not known."""
    text = TABLE.replace("seeds: 2", "seeds: 3\nfirst_seed: 10")
    text = text.replace("rule:", "rule:\n  seeds: 2")
    text = text.replace("[optimizer=sgd],", "[optimizer=sgd], best: [optimizer.lr=0.01],")
    (tmp_path / "conf/table/05.yaml").write_text(text)
    spec = load_spec("table", "05")
    assert [*spec.seeds_of("sgd")] == [*spec.seeds_of("sgd optimizer.lr=0.5")] == [0, 1]
    assert [*spec.seeds_of("sgd best")] == [10, 11, 12]
    assert spec.awaited == {"adam best"} and "adam best" not in spec.runs
    cli.main(["table", "5", *words(tmp_path)])
    page = (tmp_path / "tables/table-05-smoke.md").read_text()
    assert "The best settings on 3 other seeds, from 10 on" in page
    fresh = page.split("claims are judged:")[1]
    assert "| SGD | lr 0.01 (the search now selects lr " in fresh, "an outdated `best` is reported"
    assert "Adam" not in fresh and "0 of 3" in fresh
