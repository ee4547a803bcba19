"""Tables: rows and columns from a spec, numbers from records, missing runs are listed."""

import pandas as pd
import pytest

from experiments import __main__ as cli
from experiments.config.errors import ConfigError
from experiments.products.claims import needed
from experiments.products.specs import load_spec, parse_spec
from experiments.products.tables import write_table

SMALL = ["scale=smoke", "tracking=off"]
CORRELATIONS = ["01", "02", "03", "04"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Tables 1 to 4 at smoke scale; all but the first find their runs."""
    folder = tmp_path_factory.mktemp("results")
    for name in CORRELATIONS:
        cli.main(["table", name, f"results={folder}", *SMALL])
    return folder


def groups_of(name, results):
    return load_spec("table", name).expand([f"results={results}", *SMALL])


def line(table, label, column):
    (found,) = table[(table.iloc[:, 0] == label) & (table["column"] == column)].to_dict("records")
    return found


@pytest.mark.parametrize(
    ("name", "label", "column", "run", "metric", "paper"),
    [
        ("01", "n = 1", "frozen", "frozen", "temporal/n=1", -0.000368929),
        ("01", "n = 7", "training", "training", "temporal/n=7", 0.000357474),
        ("02", "n = 10", "frozen", "frozen", "spatial/n=10", -0.000592037),
        ("03", "Adam", "as released", "frozen", "non/beta2=0.9/n=0", 0.435885276),
        ("03", "n = 1", "as released", "frozen", "non/beta2=0.999/n=1", -0.010897023),
        ("03", "n = 10", "training, β2 = 0.9", "training", "non/beta2=0.9/n=10", -0.010720019),
        ("04", "Adam", "frozen, β2 = 0.999", "frozen", "non/beta2=0.999/n=0", 0.435885276),
        ("04", "n = 2", "as released", "frozen", "max/beta2=0.999/n=2", -0.000794959),
    ],
)
def test_a_table_has_the_numbers_of_the_records(results, name, label, column, run, metric, paper):
    table = pd.read_csv(results / f"tables/table-{name}-smoke.csv")
    found = line(table, label, column)
    ours = [r.metrics()[metric].iloc[-1] for r in groups_of(name, results)[run]]
    assert len(ours) == found["n"] >= 3
    assert found["ours"] == pytest.approx(sum(ours) / len(ours))
    assert found["low"] < found["ours"] < found["high"]
    assert found["paper"] == paper


@pytest.mark.parametrize("name", CORRELATIONS)
def test_the_page_has_a_line_for_every_number_of_the_paper(results, name):
    page = (results / f"tables/table-{name}-smoke.md").read_text()
    lines = [text for text in page.splitlines() if text.startswith("|")]
    assert len({text.count("|") for text in lines}) == 1
    assert [f"| n = {n} |" in page for n in range(1, 11)] == [True] * 10
    assert ("| Adam | 0.435885 |" in page) == (name in ("03", "04"))
    assert "smoke scale" in page and load_spec("table", name).note in page


def test_the_claims_of_the_correlations_are_judged(results):
    verdicts = pd.read_csv(results / "claims-smoke.csv").set_index("id")["verdict"]
    wanted = {"C1", "C2", "C3", "C3.same_beta2", "C4", "C5", "C5.training", "T8.mnist"}
    assert wanted <= set(verdicts.index)
    assert set(verdicts[sorted(wanted)]) <= {"holds", "fails", "inconclusive"}


def test_both_sides_of_the_comparison_have_the_same_beta2():
    spec = load_spec("table", "03")
    claims = {claim.id: claim for claim in spec.claims}
    metrics = {part.metric or claims["C4"].metric for part in claims["C4"].parts}
    assert metrics == {"non/beta2=0.999/largest", "non/beta2=0.9/largest"}
    groups = spec.expand(SMALL)
    assert {r.config.task["frozen"] for r in needed(claims["C4"], groups)} == {True}
    assert {r.config.task["frozen"] for r in needed(claims["C3"], groups)} == {True, False}


def test_tables_share_their_runs(results, capsys):
    cli.main(["table", "2", f"results={results}", *SMALL])
    assert "runs to train" not in capsys.readouterr().out
    assert len(list(results.glob("runs/mnist_correlation/*/seed=*"))) == 20


def test_missing_runs_are_listed(tmp_path):
    spec, groups = load_spec("table", "01"), groups_of("01", tmp_path)
    with pytest.raises(ConfigError, match=r"20 runs are missing; run python run\.py .*seed=10"):
        write_table(spec, groups, tmp_path / "table-01")
    del groups["frozen"]
    with pytest.raises(
        ConfigError, match=r"10 runs are missing.* task\.frozen=false seed=12, … and 7"
    ):
        write_table(spec, groups, tmp_path / "table-01")
    assert not any(tmp_path.iterdir())


def test_status_lists_missing_runs(tmp_path, capsys):
    cli.main(["status", "table-1", f"results={tmp_path}", *SMALL])
    text = capsys.readouterr().out
    assert "table 01: 20 missing of 20 runs" in text
    assert "python run.py experiment=mnist_correlation optimizer=adashift" in text


# -- the form of a spec --------------------------------------------------------------------------

TABLE = """
title: Where θ ends
seeds: 2
base: [experiment=counterexample_stochastic]
runs: {adam: [optimizer=adam], adashift: [optimizer=adashift]}
rows: ROWS
"""


def made(tmp_path, rows):
    (tmp_path / "spec.yaml").write_text(TABLE.replace("ROWS", rows))
    spec = parse_spec(tmp_path / "spec.yaml", hash(rows))
    groups = spec.expand([f"results={tmp_path}", *SMALL])
    cli.train_missing(groups, "table")
    write_table(spec, groups, tmp_path / "table")
    return pd.read_csv(tmp_path / "table.csv"), (tmp_path / "table.md").read_text()


def test_a_row_with_one_number_needs_no_columns(tmp_path):
    table, page = made(tmp_path, "[{label: Adam, run: adam, metric: theta, paper: 0.5}]")
    assert list(table.columns)[1:] == ["ours", "low", "high", "n", "paper"]
    assert "|  | paper | ours |" in page and "| Adam | 0.5 | " in page


def test_over_makes_a_row_for_each_item(tmp_path):
    row = '{label: "{} of θ", over: [smallest, largest], run: adam, metric: theta, paper: [1, 2]}'
    table, _ = made(tmp_path, f"[{row}]")
    assert list(table.iloc[:, 0]) == ["smallest of θ", "largest of θ"]
    assert list(table["paper"]) == [1, 2]


def test_a_cell_without_a_number_stays_empty(tmp_path):
    rows = """
  - {label: a, columns: {x: {run: adam, metric: theta}, y: {run: adashift, metric: theta}}}
  - {label: b, columns: {y: {run: adashift, metric: theta}}}
"""
    table, page = made(tmp_path, rows)
    assert len(table) == 3 and "| b |  |  | " in page and "|  | paper | x | y |" in page


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            "[{label: a, over: [1, 2], run: adam, metric: theta, paper: [1]}]",
            "rows.0.: 1 paper values for 2",
        ),
        ("[{label: a, run: nobody, metric: theta}]", "rows.0. names nobody, which is unknown"),
        ("[{label: a, run: adam, metric: nothing}]", "rows.0. reads nothing, but conf/experiment"),
        ("[{label: a, colums: {}}]", "rows.0..colums is unknown; allowed are columns, "),
        ("[{label: a, run: adam}]", "rows.0.: a number is missing: set run and metric, or columns"),
    ],
)
def test_an_invalid_row_is_reported_before_training(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=message):
        made(tmp_path, rows)
    assert not (tmp_path / "table.csv").exists()
