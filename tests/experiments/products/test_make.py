"""From a command to a file: figures, tables and claims at smoke scale, from the command line."""

import fnmatch
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from experiments import __main__ as cli
from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.config.paths import CONF, ROOT, choices_of
from experiments.config.schema import SCALES
from experiments.products import make, style
from experiments.products import specs as specs_module
from experiments.products.schema import Comparison
from experiments.products.specs import load_spec, specs
from experiments.records.record import hash_metrics
from experiments.records.run import Run
from experiments.training.execute import execute
from tests.experiments.command_line import run_py

FAST_FIGURES = ("01", "08")  # one for each way of drawing
TUNED = sorted((p.parent.name, p.stem) for p in (CONF / "tuned").glob("*/*.yaml"))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


def ask(results, *words):
    cli.main([*words, f"results={results}", "scale=smoke", "tracking=off"])


@pytest.mark.slow
@pytest.mark.parametrize(("experiment", "optimizer"), TUNED)
def test_every_tuned_pair_trains_and_records_the_declared_metrics(results, experiment, optimizer):
    pair = [f"experiment={experiment}", f"optimizer={optimizer}"]
    run = Run(compose([*pair, "scale=smoke", f"results={results}", "tracking=off"]))
    assert execute(run) == "finished"
    metrics = run.metrics()
    assert 1 <= metrics["step"].iloc[-1] <= (run.config.steps or 10)
    recorded, declared = {*metrics.columns} - {"step"}, run.config.metrics
    assert [m for m in recorded if not any(fnmatch.fnmatchcase(m, p) for p in declared)] == []
    assert [p for p in declared if not fnmatch.filter(recorded, p)] == []
    assert declared[0] in recorded, "the main metric is a name, not a pattern"


def test_every_experiment_has_a_tuned_pair():
    """So that the test above covers every file of conf/experiment."""
    assert {experiment for experiment, _ in TUNED} == {*choices_of("experiment")}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=() if path.stem in FAST_FIGURES else pytest.mark.slow)
        for path in specs("figure")
    ],
)
def test_a_figure_is_drawn_once(results, capsys, name):
    ask(results, "figure", name)
    first = capsys.readouterr().out
    stem = results / "figures" / f"figure-{name}-smoke"
    assert "drawn from" in first
    assert all(stem.with_suffix(s).stat().st_size > 400 for s in (".png", ".pdf", ".csv"))
    before = {p: p.stat().st_mtime_ns for p in results.rglob("*") if p.is_file()}
    ask(results, "figure", name)
    assert "are up to date with" in capsys.readouterr().out
    assert before == {p: p.stat().st_mtime_ns for p in results.rglob("*") if p.is_file()}


def test_the_csv_holds_what_is_plotted(results):
    ask(results, "figure", "1")
    table = pd.read_csv(results / "figures/figure-01-smoke.csv")
    spec = load_spec("figure", "01")
    groups = spec.expand([f"results={results}", "scale=smoke", "tracking=off"])
    ends = [run.metrics()["theta"].iloc[-1] for run in groups["adashift"]]
    row = table[table["curve"] == "AdaShift (0, 0.999), n = 1"].iloc[-1]
    assert row["mean"] == pytest.approx(sum(ends) / len(ends)) and row["n"] == len(ends) == 30
    assert row["sd"] == pytest.approx(pd.Series(ends).std())


def test_another_scale_does_not_replace_the_usual_product(results):
    config = compose(["experiment=counterexample_stochastic", f"results={results}"])
    names = {}
    for scale, cpu_scale in product(SCALES, ["paper", "laptop"]):
        run = Run(config.model_copy(update={"scale": scale, "cpu_scale": cpu_scale}))
        names[scale, cpu_scale] = make.place({"a": [run]}, "figures/figure-01").name
    assert names["paper", "paper"] == names["laptop", "laptop"] == "figure-01"
    assert names["laptop", "paper"] == "figure-01-laptop"
    assert names["smoke", "paper"] == "figure-01-smoke"
    assert names["desktop", "paper"] == names["desktop", "laptop"] == "figure-01-desktop"


def test_force_trains_the_runs_of_a_figure_again(results, capsys):
    ask(results, "figure", "8")
    capsys.readouterr()
    ask(results, "figure", "8", "force=true")
    assert "63 runs to train" in capsys.readouterr().out


def test_a_figure_is_drawn_again_when_a_run_behind_it_changes(results, capsys):
    ask(results, "figure", "1")
    run = load_spec("figure", "01").expand([f"results={results}", "scale=smoke", "tracking=off"])[
        "adam"
    ][0]
    file = run.folder / "metrics.csv"
    before = hash_metrics(run.folder)
    file.write_text(re.sub(r"theta,.*", "theta,1.5", file.read_text(), count=1))
    info = run.folder / "run.json"
    info.write_text(info.read_text().replace(before, hash_metrics(run.folder)))
    capsys.readouterr()
    ask(results, "figure", "1")
    assert "drawn from" in capsys.readouterr().out


def test_a_picture_that_is_not_at_paper_scale_looks_different(results, tmp_path):
    """The scale is printed on the figure, in a colour that nothing else has."""
    from experiments.products.figures import draw_figure

    ask(results, "figure", "1")
    with Image.open(results / "figures/figure-01-smoke.png") as image:
        corner = image.convert("RGB").crop((int(image.width * 0.85), 0, image.width, 40))
    assert any(r > 150 and g < 60 and b < 60 for _, (r, g, b) in corner.getcolors(10**6))
    spec = load_spec("figure", "01")
    groups = spec.expand([f"results={results}", "scale=smoke", "tracking=off"])
    assert draw_figure(spec, groups, tmp_path / "again")
    assert not draw_figure(spec, groups, tmp_path / "again")
    (tmp_path / "again.pdf").unlink()
    assert draw_figure(spec, groups, tmp_path / "again")


def test_claims_are_judged_and_written(results, capsys):
    ask(results, "claims")
    page = (results / "claims-smoke.md").read_text()
    wanted = {
        c.id
        for kind in ("claim", "figure")
        for p in specs(kind)
        for c in load_spec(kind, p.stem).claims
    }
    assert {
        line.split(" | ")[0].strip("| ") for line in page.splitlines() if line.startswith("| ")
    } >= wanted
    assert {"T1", "T8", "F1a", "F1j", "F8c"} <= wanted
    order = [
        line.split(" | ")[0].strip("| ")
        for line in page.splitlines()
        if re.match(r"\| [TF]\d", line)
    ]
    assert order == sorted(order, key=make.natural)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["figure", "99"], "figures 1 to 24"),
        (["figure", "one"], "figures 1 to 24, conf/figure also has s2, s3, s6"),
        (["figure"], "which figure"),
        (["table", "10"], "tables 1 to 9"),
        (["figure", "²"], "figures 1 to 24"),
        (["figure", "1", "seed=3"], "use run.py for other runs"),
        (["figure", "1", "steps=500"], "set only scale, records"),
        (["theory", "1"], "theory takes only key=value: drop 1"),
        (["publish", "figure-1", "table-2"], "takes only key=value: drop figure-1 table-2"),
        (["--extra", "adam", "figure", "3"], "figure 03 already has adam"),
        (["--extra", "lion,adam", "figure", "3"], "figure 03 already has adam"),
        (["--extra", "adam", "figure", "8"], "figure 08 has no panel of curves"),
        (["--extra", ",", "figure", "3"], "EXTRA= of make. is empty"),
        (["--extra", "", "figure", "3"], "EXTRA= of make. is empty"),
    ],
)
def test_an_invalid_request_is_reported(tmp_path, words, message):
    with pytest.raises(ConfigError, match=message):
        ask(tmp_path, *words)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["figure", "1"], ["claims"]])
def test_a_mistake_in_another_spec_is_reported_before_training(tmp_path, monkeypatch, words):
    conf = shutil.copytree(CONF, tmp_path / "conf")
    (conf / "table/09.yaml").write_text("title: x")
    monkeypatch.setattr(specs_module, "CONF", conf)
    with pytest.raises(ConfigError, match=r"^conf/table/09.yaml: "):
        ask(tmp_path / "results", *words)
    assert not (tmp_path / "results").exists()


def test_empty_names_of_extra_optimizers_are_dropped():
    assert cli.optimizers_in("lion,, adamw,") == ["lion", "adamw"]


TABLE = """
title: Table 1. Where θ ends
seeds: 3
base: [experiment=counterexample_stochastic]
runs: {adam: [optimizer=adam], adashift: [optimizer=adashift]}
rows:
  - {label: Adam, run: adam, metric: theta, paper: 0.5}
  - {label: AdaShift, run: adashift, metric: v, statistic: mean}
claims:
  - {id: C1, place: here, text: v is positive, metric: v, parts: [{left: adam, relation: above}]}
"""


def test_a_table_puts_the_papers_number_beside_ours(results, tmp_path, monkeypatch, capsys):
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "01.yaml").write_text(TABLE)
    monkeypatch.setattr(specs_module, "CONF", tmp_path)
    ask(results, "table", "1")
    table = pd.read_csv(results / "tables/table-01-smoke.csv")
    groups = load_spec("table", "01").expand([f"results={results}", "scale=smoke", "tracking=off"])
    ours = [run.metrics()["theta"].iloc[-1] for run in groups["adam"]]
    assert table["ours"].iloc[0] == pytest.approx(sum(ours) / 3)
    assert table["low"].iloc[0] < table["ours"].iloc[0] < table["high"].iloc[0]
    text = capsys.readouterr().out
    assert "| Adam |" in text and "| 0.5 |" in text and "C1" in text


# -- the command line itself -------------------------------------------------------------------


def command(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.betas=[1.2,0.9]"], "optimizer.betas=[1.2, 0.9] is invalid"),
        (["experiment=lemma_2", "optimizer=sgd"], "optimizer.lr has no value"),
        (["task.block=0"], "task.block=0"),
        (["experiment=lemma_2", "optimizer=adashift", "optimizer.lr=1"], "use optimizer=adam"),
        (["experiment=net_update_factor", "+optimizer.weight_decay=0.1"], "weight_decay"),
    ],
)
def test_run_py_reports_errors_in_one_line_and_writes_nothing(tmp_path, capfd, words, message):
    error = run_py(*words, f"results={tmp_path / 'results'}")
    assert error.startswith("error: ") and "\n" not in error and message in error
    assert capfd.readouterr() == ("", "") and not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["experiment=nonsense"], "experiment=nonsense is unknown"),
        (["optimizer.phi=median"], "phi is 'median'"),
        (["-m", "seed=-1,2"], "seed=-1 is invalid"),
    ],
)
def test_run_py_prints_the_error_to_stderr_and_exits_with_1(tmp_path, words, message):
    out = command("run.py", *words, f"results={tmp_path / 'results'}")
    assert out.returncode == 1 and out.stdout == ""
    assert out.stderr.count("\n") == 1 and message in out.stderr
    assert not (tmp_path / "results").exists()


def test_an_invalid_results_folder_is_reported_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    error = run_py("scale=smoke", f"results={tmp_path / 'file'}")
    assert error.startswith("error: ") and "\n" not in error and str(tmp_path / "file") in error


def test_run_py_works_from_anywhere(tmp_path):
    out = command(str(ROOT / "run.py"), "scale=smoke", "results=here", "tracking=off", cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert len(list(tmp_path.glob("here/runs/*/*/*/metrics.csv"))) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["here"]


def test_the_help_lists_the_choices():
    out = command("run.py", "--help").stdout
    assert "counterexample_stochastic" in out and "spatial_only" in out and "_style" not in out


@pytest.mark.slow
def test_run_py_sweeps(tmp_path):
    out = command(
        "run.py", "-m", f"results={tmp_path}", "scale=smoke", "tracking=offline",
        "optimizer=adam,adashift", "seed=range(0,2)",
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    assert len(list(tmp_path.glob("runs/*/*/seed=*/metrics.csv"))) == 4
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 4  # one W&B run for each job


def test_hydra_full_error_shows_the_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    out = command("run.py", f"results={tmp_path}", "experiment=nonsense")
    assert out.returncode == 1 and "Traceback" in out.stderr


def test_figures_are_redrawn_without_torch(results):
    """A machine that only draws needs neither torch nor W&B."""
    ask(results, "figure", "1")
    (results / "figures/figure-01-smoke.png").unlink()
    code = (
        "import sys\n"
        "from experiments.__main__ import main\n"
        f"main(['figure', '1', 'results={results}', 'scale=smoke', 'tracking=off'])\n"
        "assert not {'torch', 'wandb'} & sys.modules.keys()"
    )
    out = command("-c", code)
    assert out.returncode == 0, out.stderr
    assert (results / "figures/figure-01-smoke.png").exists()


def test_a_picture_is_drawn_again_when_its_style_changes(results, capsys, monkeypatch):
    ask(results, "figure", "1")
    picture = results / "figures/figure-01-smoke.png"
    first = picture.read_bytes()
    with monkeypatch.context() as m:
        m.setattr(style, "color_of", lambda optimizer: "#123456")
        ask(results, "figure", "1")
    assert picture.read_bytes() != first
    ask(results, "figure", "1")
    assert picture.read_bytes() == first


def test_a_changed_claim_is_judged_again(results, capsys, monkeypatch):
    """The picture is up to date, the verdict is not."""
    ask(results, "figure", "1")
    spec = load_spec("figure", "01")
    part = Comparison(left="adam", relation="below", right=-1e9)
    other = spec.claims[0].model_copy(update={"parts": [part]})
    changed = spec.model_copy(update={"claims": [other]})
    capsys.readouterr()
    with monkeypatch.context() as m:
        m.setattr(make, "load_spec", lambda kind, name: changed)
        ask(results, "figure", "1")
    out = capsys.readouterr().out
    assert "up to date" in out and "F1a          fails" in out
