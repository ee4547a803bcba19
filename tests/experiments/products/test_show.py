"""`python -m experiments show`: which runs, which metrics, in the terminal and as a picture."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from experiments import __main__ as cli
from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.config.paths import ROOT
from experiments.records import archive
from experiments.records.run import Run

WORDS = ["experiment=mnist_lr", "scale=smoke", "tracking=off"]


@pytest.fixture
def kept(tmp_path):
    def kept(*words, status="finished", **metrics):
        """A run with a record: each metric is a list of values."""
        run = Run(compose([*WORDS, f"results={tmp_path}/results", *words]))
        run.folder.mkdir(parents=True)
        table = pd.DataFrame(metrics or {"validation_accuracy": [0.1, 0.5, 0.4]})
        table = table.assign(step=10 * (table.index + 1)).melt("step", var_name="metric")
        table.to_csv(run.folder / "metrics.csv", index=False)
        config = run.config.model_dump(mode="json", exclude={"results", "published"})
        info = {"status": status, "config": config}
        (run.folder / "run.json").write_text(json.dumps(info))
        return run

    return kept


@pytest.fixture
def show(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")

    def show(*words):
        cli.main(["show", *map(str, words)])
        return capsys.readouterr().out.splitlines()

    show.words = [*WORDS, f"results={tmp_path}/results"]
    return show


def test_two_runs_are_drawn_over_each_other(show, kept):
    first = kept("optimizer=adam")
    second = kept("optimizer=sgd", validation_accuracy=[0.2, 0.3, 0.7])
    lines = show(first.folder, second.folder)
    assert lines[0] == "validation_accuracy"
    assert lines[1].lstrip().startswith("0.7 ┤") and lines[12].lstrip().startswith("0.1 ┤")
    assert any("*" in line and "o" in line for line in lines[1:13])
    assert lines[-2:] == [
        "  * Adam  last 0.4, best 0.5 at step 20",
        "  o SGD   last 0.7, best 0.7 at step 30",
    ]
    assert max(map(len, lines)) <= 60


def test_command_words_find_the_same_runs_as_folders(show, kept):
    runs = [kept("optimizer=adam"), kept("optimizer=sgd", validation_accuracy=[0.2, 0.3, 0.7])]
    assert show(*show.words, "optimizer=adam,sgd") == show(*(run.folder for run in runs))


def test_the_folder_of_a_setting_has_the_mean_of_its_seeds(show, kept):
    run = kept("optimizer=adam", validation_accuracy=[0.1, 0.2])
    kept("optimizer=adam", "seed=1", validation_accuracy=[0.3, 0.6])
    legend = "  * Adam  last 0.4, best 0.4 at step 20, mean of 2 seeds"
    assert show(run.folder.parent)[-1] == legend
    assert show(*show.words, "optimizer=adam", "seed=0,1")[-1] == legend


def test_labels_are_the_settings_that_differ(show, kept):
    for rate in ("0.1", "0.2"):
        kept("optimizer=adam", f"optimizer.lr={rate}", "optimizer.eps=1e-3")
    lines = show(*show.words, "optimizer=adam", "optimizer.eps=1e-3", "optimizer.lr=0.1,0.2")
    assert [line.split("  ")[1] for line in lines[-2:]] == ["* Adam, lr 0.1", "o Adam, lr 0.2"]


def test_a_copied_folder_is_shown(show, kept, tmp_path):
    run = kept("optimizer=adam")
    shutil.move(run.folder, tmp_path / "from the cluster")
    assert "Adam" in show(tmp_path / "from the cluster")[-1]


def test_metrics_of_the_experiment_are_shown_and_others_on_request(show, kept):
    values = {"test_loss": [1.0], "validation_accuracy": [0.5], "validation_loss": [1.0]}
    run = kept("optimizer=adam", **values, extra=[3.0])
    names = [*values, "extra"]
    assert [line for line in show(run.folder) if line in names] == [
        "validation_accuracy", "validation_loss", "test_loss",
    ]  # fmt: skip
    wanted = show(run.folder, "--metric", "extra,*_loss")
    assert [line for line in wanted if line in names] == ["extra", "test_loss", "validation_loss"]
    with pytest.raises(ConfigError, match="no metric acuracy: choose from validation_accuracy"):
        show("--metric", "acuracy", run.folder)


def test_experiments_are_compared_only_in_metrics_that_they_share(show, kept):
    first = kept("optimizer=adam", validation_accuracy=[0.5], test_loss=[1.0])
    second = kept("experiment=ill_conditioned", "optimizer=adam", test_loss=[1.0])
    assert show(first.folder, second.folder)[0] == "test_loss"
    third = kept("experiment=ill_conditioned", "optimizer=sgd", expected_loss=[1.0])
    with pytest.raises(ConfigError, match="mnist_lr and ill_conditioned have no metric in common"):
        show(first.folder, third.folder)


@pytest.mark.parametrize("status", ["diverged", "interrupted"])
def test_a_run_that_is_not_finished_says_so(show, kept, status):
    run = kept("optimizer=adam", status=status)
    assert show(run.folder)[-1].endswith(f", {status}")
    assert show(*show.words, "optimizer=adam")[-1].endswith(f", {status}")


def test_a_run_that_diverged_at_once_has_no_curve(show, kept, tmp_path):
    first = kept("optimizer=adam")
    second = kept("optimizer=sgd", status="diverged", step=[])
    assert show(first.folder, second.folder)[-1] == "  o SGD   diverged"
    out = tmp_path / "both.png"
    show(first.folder, second.folder, "--out", out)
    assert out.exists()


def test_a_missing_run_is_reported_with_the_command_that_trains_it(show, tmp_path):
    with pytest.raises(ConfigError, match=r"is missing: train it with (python run\.py .*)") as info:
        show(*show.words, "optimizer=adam")
    words = str(info.value).split("run.py ")[1].split()
    assert Run(compose([*words, f"results={tmp_path}/results"])).config.optimizer_name == "adam"


def test_published_runs_are_shown_if_requested(show, kept, tmp_path):
    run = kept("optimizer=adam")
    archive.save(tmp_path, "mnist_lr", {run.entry: archive.Published(run.info, run.metrics())})
    shown = show(run.folder)
    shutil.rmtree(tmp_path / "results")
    words = [*show.words, "optimizer=adam", f"published={tmp_path}"]
    with pytest.raises(ConfigError, match=r"is missing: .*; records=published shows the"):
        show(*words)
    assert show(*words, "records=published") == shown
    with pytest.raises(ConfigError, match=r"is not published: train it with python run\.py"):
        show(*words, "records=published", "seed=7")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "which runs"),
        (["results/none"], "results/none is not a folder"),
        ([str(ROOT / "conf")], "has no runs: expected a folder with run.json"),
        (["experiment=mnist_lr", "--out", "a.jpg"], "--out a.jpg is invalid: expected a name that"),
        (["experiment=mnist"], "experiment=mnist is unknown"),
        (["seed=range(0"], "cannot parse"),
    ],
)
def test_mistakes_are_reported_in_one_line(show, words, message):
    with pytest.raises(ConfigError, match=message) as info:
        show(*words)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("config", [{}, {"experiment": "mnist_lr"}, None, "text"])
def test_a_record_of_another_version_is_reported(show, tmp_path, config):
    (tmp_path / "run.json").write_text(json.dumps({"status": "finished", "config": config}))
    with pytest.raises(ConfigError, match=r"run\.json was written by an incompatible version"):
        show(tmp_path)


def test_only_show_has_its_options():
    with pytest.raises(ConfigError, match="status takes neither --metric nor --out"):
        cli.main(["status", "--out", "a.png"])


def test_a_picture_has_the_curves_of_both_runs(show, kept, tmp_path):
    runs = [kept("optimizer=adam"), kept("optimizer=sgd", validation_accuracy=[0.2, 0.3, 0.7])]
    out = tmp_path / "new/curves.png"
    assert show(*(run.folder for run in runs), "--out", out) == [str(out)]
    one, both = tmp_path / "one.png", np.asarray(Image.open(out).convert("RGB"))
    show(runs[0].folder, "--out", one)
    assert (both != np.asarray(Image.open(one).convert("RGB"))).any()
    show(*(run.folder for run in runs), "--out", out.with_suffix(".csv"))
    numbers = pd.read_csv(out.with_suffix(".csv")).set_index(["curve", "step"])["mean"]
    assert numbers["Adam"].tolist() == [0.1, 0.5, 0.4]
    assert numbers["SGD"].tolist() == [0.2, 0.3, 0.7]


def test_show_imports_neither_torch_nor_matplotlib_in_the_terminal(kept):
    run = kept("optimizer=adam")
    script = f"""
import sys
from experiments.__main__ import main
main(["show", {str(run.folder)!r}])
sys.exit(bool({{"torch", "matplotlib", "wandb"}} & {{*sys.modules}}))
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0
