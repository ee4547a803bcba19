"""The table at the end of a sweep."""

import json
import shlex
from pathlib import Path

import pandas as pd
import pytest

from experiments.config.compose import compose, expand
from experiments.products import sweep_table
from experiments.products.sweep_table import report_sweep, varied
from experiments.records.run import Run

MNIST = ["experiment=mnist_lr", "scale=smoke"]


@pytest.fixture
def asked(tmp_path):
    def asked(*words, points=()):
        """The runs of a sweep, with the overrides of each."""
        requests = expand([*words, f"results={tmp_path}"], points)
        return [(Run(compose(request)), request) for request in requests]

    return asked


def keep(run, status="finished", **metrics):
    """Write a record: each metric is a list of values, or one value for all steps."""
    run.folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"step": step, "metric": name, "value": value}
        for name, values in metrics.items()
        for step, value in enumerate(values if isinstance(values, list) else [values])
    ]
    table = pd.DataFrame(rows, columns=["step", "metric", "value"])
    table.to_csv(run.folder / "metrics.csv", index=False)
    (run.folder / "run.json").write_text(json.dumps({"status": status}))


def report(requests):
    """The printed lines, the rows of the printed table, and the csv."""
    lines = "\n".join(report_sweep(requests)).splitlines()
    path = next(line for line in lines if line.startswith("table:")).split()[1]
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return lines, cells, pd.read_csv(path)


def test_the_best_setting_is_first_and_seeds_are_averaged(asked):
    requests = asked(*MNIST, "optimizer=adam", "optimizer.lr=0.1,0.2,0.3", "seed=0,1")
    values = {0.1: (0.5, 0.7), 0.2: (0.9, 0.8), 0.3: (0.1, 0.2)}
    for run, _ in requests:
        value = values[run.config.optimizer["lr"]][run.config.seed]
        curve = [0.0] * 18 + [value - 0.05, value + 0.05]  # the last tenth counts
        keep(run, validation_accuracy=curve, test_loss=value)
    lines, cells, csv = report(requests)
    assert cells == [
        ["optimizer.lr", "seeds", "validation_accuracy", "test_loss"],
        ["0.2", "2", "0.85 ± 0.071", "0.85 ± 0.071"],
        ["0.1", "2", "0.6 ± 0.14", "0.6 ± 0.14"],
        ["0.3", "2", "0.15 ± 0.071", "0.15 ± 0.071"],
    ]
    assert csv["validation_accuracy"].tolist() == pytest.approx([0.85, 0.6, 0.15])
    assert csv["validation_accuracy sd"].iloc[0] == pytest.approx(pd.Series([0.9, 0.8]).std())
    assert "highest validation_accuracy first" in lines[1]
    best = next(line for line in lines if line.startswith("best:"))
    assert compose(shlex.split(best)[3:]).optimizer["lr"] == 0.2
    folder = next(line for line in lines if line.startswith("curves:")).split()[-1]
    assert Path(folder) == requests[2][0].folder.parent


def test_the_lowest_is_the_best_if_the_experiment_says_so(asked):
    requests = asked("experiment=ill_conditioned", "scale=smoke", "optimizer.lr=0.1,0.2,0.3")
    for (run, _), value in zip(requests, [3.0, 1.0, 2.0], strict=True):
        keep(run, expected_loss=value)
    lines, cells, _ = report(requests)
    assert [row[0] for row in cells[1:]] == ["0.2", "0.3", "0.1"]
    assert cells[1][2] == "1" and "lowest expected_loss first" in lines[1]  # one seed: no spread


def test_settings_with_diverged_and_failed_runs_are_last_with_their_status(asked):
    requests = asked(*MNIST, "optimizer.lr=0.1,0.2,0.3", "seed=0,1")
    states = ["failed", "finished", "finished", "diverged", "finished", "finished"]
    for (run, _), status in zip(requests, states, strict=True):
        keep(run, status, validation_accuracy=run.config.optimizer["lr"])
    _, cells, csv = report(requests)
    assert [(row[0], row[2], row[-1]) for row in cells[1:]] == [
        ("0.3", "0.3 ± 0", "finished"),
        ("0.2", "", "1 finished, 1 diverged"),
        ("0.1", "", "1 finished, 1 failed"),
    ]
    assert csv["validation_accuracy"].isna().tolist() == [False, True, True]


def test_a_sweep_of_which_every_run_failed_has_a_table_without_a_best(asked):
    requests = asked(*MNIST, "optimizer.lr=0.1,0.2")
    for run, _ in requests:
        keep(run, "failed")
    lines, cells, _ = report(requests)
    assert cells[1:] == [["0.1", "1", "failed"], ["0.2", "1", "failed"]]
    assert not any(line.startswith(("best:", "curves:")) for line in lines)


def test_an_experiment_without_a_best_is_not_ranked(asked):
    requests = asked("experiment=net_update_factor", "scale=smoke", "optimizer.lr=0.1,0.2")
    for (run, _), value in zip(requests, [2.0, 1.0], strict=True):
        keep(run, k_bias=value)
    lines, cells, _ = report(requests)
    assert [row[0] for row in cells[1:]] == ["0.1", "0.2"] and "not ranked" in lines[1]
    assert not any(line.startswith("best:") for line in lines)


def test_a_tie_is_reported(asked):
    requests = asked(*MNIST, "optimizer.lr=0.1,0.2,0.3")
    for (run, _), value in zip(requests, [1.0, 0.5, 1.0], strict=True):
        keep(run, validation_accuracy=value)
    assert "tie:    2 settings have the same validation_accuracy" in report(requests)[0]


def test_columns_are_the_overrides_that_differ(asked):
    """Not what follows from them: each optimizer has its own tuned learning rate."""
    words = ["optimizer=adam,adashift", "++optimizer.eps=1e-3,1e-4", "seed=0,1", "steps=30"]
    rows = varied(asked(*MNIST, *words))
    assert rows[0] == {"optimizer": "adam", "optimizer.eps": "0.001"}
    assert all(list(row) == ["optimizer", "optimizer.eps"] for row in rows)


def test_columns_of_points_and_of_overrides_that_remove(asked):
    points = ["optimizer.n=5 optimizer.m=1", "optimizer.n=9 optimizer.m=1", "~optimizer.n"]
    rows = varied(asked(*MNIST, "optimizer=adashift", points=points))
    assert [row["optimizer.n"] for row in rows] == ["5", "9", ""]
    assert [row["optimizer.m"] for row in rows] == ["1", "1", "null"]


def test_every_setting_of_an_overridden_node_is_a_column(asked):
    points = ["data.limit=100", "data.limit=200 optimizer.betas=[0.5,0.9]"]
    rows = varied(asked("experiment=resnet_cifar10", "optimizer=adam", points=points))
    assert [row["data.limit"] for row in rows] == ["100", "200"]
    assert rows[1]["optimizer.betas"] == "[0.5,0.9]"


def test_the_same_runs_have_the_same_file(asked):
    def path(*words):
        requests = asked(*MNIST, *words)
        for run, _ in requests:
            keep(run, validation_accuracy=1.0)
        return report(requests)[0][-1]

    first = path("optimizer.lr=0.1,0.2", "seed=0,1")
    assert path("seed=1,0", "tracking=off", "optimizer.lr=2e-1,1e-1") == first
    assert path("optimizer.lr=0.1,0.2", "seed=0") != first


def test_every_experiment_has_its_own_table(asked):
    requests = asked("experiment=mnist_lr,mnist_mlp", "scale=smoke", "optimizer.lr=0.1,0.2")
    for run, _ in requests:
        keep(run, validation_accuracy=run.config.optimizer["lr"])
    lines, cells, _ = report(requests)
    assert [line.split(",")[0] for line in lines if "settings" in line] == ["mnist_lr", "mnist_mlp"]
    assert [row[0] for row in cells] == ["optimizer.lr", "0.2", "0.1"] * 2


def test_on_a_terminal_the_metrics_that_fit_are_shown(asked, monkeypatch):
    requests = asked(*MNIST, "optimizer.lr=0.1,0.2")
    names = ["validation_accuracy", "validation_loss", "test_accuracy", "test_loss"]
    for run, _ in requests:
        keep(run, **dict.fromkeys(names, 0.5))
    assert report(requests)[1][0][2:] == names
    monkeypatch.setattr(sweep_table.sys.stdout, "isatty", lambda: True, raising=False)
    for width, count in ((200, 4), (75, 2), (20, 1)):
        monkeypatch.setenv("COLUMNS", str(width))
        _, cells, csv = report(requests)
        assert cells[0][2:] == names[:count] and {*names} <= {*csv}


def test_a_long_table_is_shortened_in_the_terminal_only(asked):
    requests = asked(*MNIST, "optimizer=adam", "optimizer.lr=range(1,26)")
    for run, _ in requests:
        keep(run, validation_accuracy=run.config.optimizer["lr"])
    lines, cells, csv = report(requests)
    assert len(cells) == 21 and "… and 5 more" in lines and len(csv) == 25
