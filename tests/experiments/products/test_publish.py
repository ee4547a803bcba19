"""Published and own records: which are used, what publishing changes, and how runs compare."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from experiments import __main__ as cli
from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.config.paths import ROOT
from experiments.products import publish, specs
from experiments.products.claims import read_verdicts
from experiments.products.specs import load_spec
from experiments.records import archive, provenance, record
from experiments.records.agreement import compare
from experiments.records.archive import Published
from experiments.records.run import Run, all_runs, cached_config
from tests.experiments.command_line import run_py

SMALL = "[experiment=counterexample_stochastic, steps=400, log_every=40, task.warm_up=10]"
FIGURE = f"""
title: Figure 1. A small one
seeds: 3
base: {SMALL}
runs: {{adam: [optimizer=adam], adashift: [optimizer=adashift]}}
panels:
  - {{title: (a) θ, draw: curves, metric: theta,
      runs: [adam, adashift]}}
claims:
  - {{id: F1a, place: here, text: It is one., metric: v, parts: [{{left: adam, relation: above}}]}}
"""
CLAIMS = f"""
title: Claims
seeds: 2
base: {SMALL}
runs: {{sgd: [optimizer=sgd]}}
claims:
  - {{id: T1, place: here, text: None., metric: theta, parts: [{{left: sgd, relation: below}}]}}
"""


@pytest.fixture
def lab(tmp_path, monkeypatch, capsys):
    """A project with one small figure and one file of claims; lab("figure", "1") runs make."""
    for kind, name, text in (("figure", "01", FIGURE), ("claim", "theory", CLAIMS)):
        (tmp_path / "conf" / kind).mkdir(parents=True)
        (tmp_path / "conf" / kind / f"{name}.yaml").write_text(text)
    monkeypatch.setattr(specs, "CONF", tmp_path / "conf")
    monkeypatch.setattr(provenance, "commit", lambda: "0123456789abcdef")
    words = [f"results={tmp_path / 'results'}", f"published={tmp_path / 'published'}"]

    def ask(*more):
        capsys.readouterr()
        cli.main([*more, *words, "tracking=off"])
        return capsys.readouterr().out

    ask.words, ask.results, ask.published = words, tmp_path / "results", tmp_path / "published"
    ask.runs = lambda *more: all_runs(load_spec("figure", "01").expand([*words, *more]))
    return ask


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def change_published(lab, run, column="theta", row=2, factor=1.01):
    """Change one published value, with a valid checksum."""
    experiment = run.config.experiment
    found = dict(archive.load(lab.published, experiment))
    table = found[run.entry].metrics.copy()
    table.loc[row, column] *= factor
    found[run.entry] = Published(found[run.entry].info, table)
    archive.save(lab.published, experiment, found)


# -- records= ----------------------------------------------------------------------------------


def test_published_runs_are_drawn_and_judged_without_training(lab):
    lab("figure", "1")
    lab("publish")
    own = (lab.results / "figures/figure-01.csv").read_bytes()
    for run in lab.runs():
        (run.folder / "run.json").unlink()
    out = lab("figure", "1", "records=published")
    assert "figure-01-published.png" in out and "to train" not in out and "F1a" in out
    assert (lab.results / "figures/figure-01-published.csv").read_bytes() == own
    assert (lab.published / "figures/figure-01.csv").read_bytes() == own
    assert "F1a          holds" in lab("claims", "records=published")
    assert "6 finished of 6 runs" in lab("status", "figure-1", "records=published")
    assert "6 missing of 6 runs" in lab("status", "figure-1")
    assert lab.results / "report-published.html" == lab.results.joinpath(
        lab("report", "records=published").strip().split("/")[-1]
    )


def test_records_published_never_trains(lab):
    with pytest.raises(ConfigError, match=r"6 of 6 runs are not published.*records=all"):
        lab("figure", "1", "records=published")
    assert not lab.results.exists()
    assert "T1           not run" in lab("claims", "records=published")


def test_records_all_uses_own_runs_then_published_ones_and_trains_the_rest(lab):
    lab("figure", "1")
    lab("publish")
    adam, *_, adashift = lab.runs()
    for run in lab.runs()[1:]:
        (run.folder / "run.json").unlink()
    lost = dict(archive.load(lab.published, adam.config.experiment))
    del lost[adashift.entry]
    archive.save(lab.published, adam.config.experiment, lost)
    out = lab("figure", "1", "records=all")
    assert "1 run to train" in out and "figure-01-all.png" in out
    here = [isinstance(run.source, Published) for run in lab.runs("records=all")]
    assert here == [False, True, True, True, True, False]


def test_a_single_run_can_use_published_records(lab, capsys):
    lab("figure", "1")
    lab("publish")
    words = [*lab.runs()[0].words(), *lab.words, "tracking=off"]
    away = [*words, f"results={lab.results}-2"]
    assert run_py(*away, "records=all") is None
    assert "already published" in capsys.readouterr().out
    assert run_py(*away) is None
    out = capsys.readouterr().out
    assert ": finished, " in out and "\npublished run  identical\n" in out
    error = run_py(*away, "records=published", "optimizer.lr=0.5")
    assert "is not published: use records=own" in error and "\n" not in error


# -- publish -----------------------------------------------------------------------------------


def test_publishing_twice_changes_nothing(lab):
    lab("figure", "1")
    assert "6 runs added" in lab("publish")
    first = contents(lab.published)
    names = {str(path) for path in first}
    assert {"README.md", "runs.csv", "claims.md", "figures/figure-01.pdf"} <= names
    assert "records/counterexample_stochastic.csv.xz" in names and len(names) == 8
    assert "0 runs added" in lab("publish") and contents(lab.published) == first
    for run in lab.runs():
        (run.folder / "run.json").unlink()
    lab("publish")
    assert contents(lab.published) == first, "published files depend on the records alone"


def test_a_published_run_is_kept_unless_force_replaces_it(lab):
    lab("figure", "1")
    lab("publish")
    first = contents(lab.published)
    change_published(lab, lab.runs()[0])
    changed = contents(lab.published)
    lab("publish")
    path = archive.path_of(lab.published, "counterexample_stochastic").relative_to(lab.published)
    assert contents(lab.published)[path] == changed[path] != first[path]
    lab("publish", "force=true")
    assert contents(lab.published)[path] == first[path]


def test_what_conf_no_longer_uses_is_removed(lab, tmp_path):
    lab("figure", "1")
    lab("publish")
    (lab.published / "figures/figure-99.png").touch()
    path = tmp_path / "conf/figure/01.yaml"
    path.write_text(FIGURE.replace("seeds: 3", "seeds: 2"))
    assert "2 unused runs removed" in lab("publish")
    assert len(archive.load(lab.published, "counterexample_stochastic")) == 4
    assert not (lab.published / "figures/figure-99.png").exists()


def test_results_stay_until_the_runs_of_new_seeds_are_published(lab, tmp_path):
    lab("figure", "1")
    lab("publish")
    before = contents(lab.published)
    path = tmp_path / "conf/figure/01.yaml"
    path.write_text(FIGURE.replace("seeds: 3", "seeds: 3\nfirst_seed: 10"))
    assert "0 unused runs removed" in lab("publish")
    row = read_verdicts(lab.published / "claims.csv")["F1a"]
    assert row["verdict"] == "holds" and row["seeds"] == "3" and row["earlier"] == "yes"
    assert "**holds †**" in (lab.published / "claims.md").read_text()
    after = contents(lab.published)
    assert {name for name in before if before[name] != after[name]} <= {
        Path(name) for name in ("claims.csv", "claims.md", "README.md")
    }
    lab("figure", "1")
    assert "6 unused runs removed" in lab("publish")
    assert read_verdicts(lab.published / "claims.csv")["F1a"]["earlier"] == ""


@pytest.mark.parametrize("commit", [None, "0123456789abcdef-dirty"])
def test_runs_of_uncommitted_code_are_not_published(lab, monkeypatch, commit):
    lab("figure", "1")
    lab("publish")
    before = contents(lab.published)
    with monkeypatch.context() as m:
        m.setattr(provenance, "commit", lambda: commit)
        lab("claims")  # trains the runs of the claims
        with pytest.raises(ConfigError, match="before you publish"):
            lab("publish")
    with pytest.raises(ConfigError, match="uncommitted changes were used to train 2 runs,"):
        lab("publish")
    assert contents(lab.published) == before


def test_a_publication_that_fails_changes_nothing(lab, monkeypatch):
    lab("figure", "1")
    lab("publish")
    before = contents(lab.published)
    lab("theory")
    with monkeypatch.context() as m:
        m.setattr(publish, "overview", lambda products: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lab("publish")
    assert contents(lab.published) == before
    assert "2 runs added" in lab("publish")


KILLED = """
import os, sys, time
from pathlib import Path
from experiments import __main__ as cli
from experiments.products import publish, specs
from experiments.records import files, provenance
specs.CONF = Path(sys.argv[1])
provenance.commit = lambda: "0123456789abcdef"
write = files.write_bytes
def slowly(path, content):
    write(path, content)
    print("wrote", flush=True)
    time.sleep(0.2)
files.write_bytes = slowly
cli.main(["publish", *sys.argv[2:]])
"""


@pytest.mark.slow
@pytest.mark.parametrize("writes", [1, 3])
def test_a_publication_that_is_killed_changes_nothing(lab, tmp_path, writes):
    lab("figure", "1")
    lab("publish")
    before = contents(lab.published)
    lab("theory")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "conf"), *lab.words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        lines = iter(process.stdout.readline, "")
        for _ in range(writes):
            assert any("wrote" in line for line in lines)
        os.kill(process.pid, signal.SIGKILL)
    assert contents(lab.published) == before
    lab("publish")
    assert contents(lab.published) != before
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith("-new")] == []


def test_two_folders_are_swapped_with_and_without_renameat2(tmp_path, monkeypatch):
    for broken in (False, True):
        new, old = tmp_path / f"new{broken}", tmp_path / f"old{broken}"
        for folder in (new, old):
            folder.mkdir()
            (folder / "name").write_text(folder.name)
        if broken:
            monkeypatch.setattr(publish.ctypes, "CDLL", lambda *_, **__: object())
        publish.exchange(new, old)
        assert (old / "name").read_text() == f"new{broken}"
        assert (new / "name").read_text() == f"old{broken}"


def record_rows(path):
    return pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")


# -- agreement ---------------------------------------------------------------------------------


def test_a_figure_is_compared_with_the_published_runs(lab):
    assert "compared with" not in lab("figure", "1")
    lab("publish")
    assert "compared with the published runs: 6 identical\n" in lab("figure", "1")
    run = lab.runs()[1]
    was = run.metrics()["theta"][2]
    change_published(lab, run)
    (line,) = [x for x in lab("figure", "1").splitlines() if x.startswith("compared")]
    assert line.startswith("compared with the published runs: 5 identical, 1 different (")
    assert (
        f"{run.name}: theta at step 120 is {was:.7g}, published {1.01 * was:.7g} (0.99 %)" in line
    )


def test_a_run_with_another_status_is_different(lab):
    lab("figure", "1")
    lab("publish")
    run = lab.runs()[0]
    info = json.loads((run.folder / "run.json").read_text())
    (run.folder / "run.json").write_text(json.dumps(info | {"status": "diverged"}))
    assert "1 different" in lab("figure", "1")


def test_verify_trains_the_cheapest_run_again_and_reports_differences(lab):
    with pytest.raises(ConfigError, match="no published records"):
        lab("verify")
    lab("figure", "1")
    lab("publish")
    out = lab("verify")
    heads, row = out.splitlines()[-2:]
    assert heads.split()[:2] == ["experiment", "run"] and row.endswith("  identical")
    entry = row.split()[1]
    (run,) = [run for run in lab.runs() if run.entry == entry]
    change_published(lab, run)
    with pytest.raises(ConfigError, match="differ from the published"):
        lab("verify")


def test_verify_reports_that_conf_has_changed(lab, monkeypatch):
    lab("figure", "1")
    lab("publish")
    plain = compose
    other = lambda words: plain([*words, "optimizer.lr=0.123"])  # noqa: E731
    monkeypatch.setattr("experiments.products.verify.compose", other)
    assert "not compared: conf/ has changed since it was published" in lab("verify")


def test_a_damaged_records_file_is_one_line(lab):
    lab("figure", "1")
    lab("publish")
    path = archive.path_of(lab.published, "counterexample_stochastic")
    path.write_bytes(path.read_bytes()[:-100])
    before = contents(lab.published)
    for words in (["figure", "1"], ["figure", "1", "records=published"], ["publish"], ["verify"]):
        with pytest.raises(OSError, match=r"counterexample_stochastic\.csv\.xz") as error:
            lab(*words)
        assert "\n" not in str(error.value)
    assert contents(lab.published) == before


def test_paper_scale_is_preferred_if_all_of_it_is_published(lab, tmp_path):
    path = tmp_path / "conf/figure/01.yaml"
    path.write_text(FIGURE.replace("task.warm_up=10", "task.warm_up=10, cpu_scale=laptop"))
    lab("figure", "1", "scale=laptop")
    lab("publish")
    rows = record_rows(lab.published / "runs.csv")
    assert {row["scale"] for row in rows if row["serves"] == "figure-01"} == {"laptop"}
    lab("figure", "1", "scale=paper")
    lab("publish")
    rows = record_rows(lab.published / "runs.csv")
    assert {row["scale"] for row in rows if row["serves"] == "figure-01"} == {"paper"}


def test_the_published_records_of_this_project_are_valid_and_small():
    """Every file loads, its runs are finished, and together the files stay small."""
    published = ROOT / "results/published"
    assert sum(p.stat().st_size for p in published.glob("records/*")) < 15e6
    names = archive.experiments(published)
    assert "counterexample_stochastic" in names
    for experiment in names:
        for name, found in archive.load(published, experiment).items():
            assert found.status.is_final and len(found.metrics) and found.info["command"]
            assert "dirty" not in found.info["commit"], name


def test_published_records_are_read_only_if_needed(lab, monkeypatch):
    """A run that is trained here reads no published record before it has finished."""
    lab("figure", "1")
    lab("publish")
    start = time.monotonic()
    monkeypatch.setattr(archive, "read_runs", lambda *_: pytest.fail("the archive was read"))
    assert all(run.done for run in lab.runs()) and time.monotonic() - start < 5
    assert Run(compose([*lab.words])).status == "missing"


# -- regressions -------------------------------------------------------------------------------


def test_publishing_on_a_gpu_keeps_what_a_cpu_has_published(lab, tmp_path, monkeypatch):
    path = tmp_path / "conf/figure/01.yaml"
    path.write_text(FIGURE.replace("task.warm_up=10", "task.warm_up=10, cpu_scale=laptop"))
    lab("figure", "1", "scale=laptop")
    lab("publish")
    first = contents(lab.published)
    cached_config.cache_clear()
    monkeypatch.setattr("experiments.config.compose.uses_gpu", lambda device: True)
    assert "0 runs added to the records\n0 unused" in lab("publish")
    assert contents(lab.published) == first
    cached_config.cache_clear()


def test_a_published_run_is_not_compared_with_itself(lab):
    lab("figure", "1")
    lab("publish")
    for run in lab.runs()[1:]:
        (run.folder / "run.json").unlink()
    out = lab("figure", "1", "records=all")
    assert "compared with the published runs: 1 identical\n" in out


def test_a_run_with_only_nan_or_without_rows_is_identical_to_itself(lab):
    lab("figure", "1")
    only_nan, empty = lab.runs()[:2]
    for run, rows in ((only_nan, "40,theta,nan\n40,v,1.0\n"), (empty, "")):
        (run.folder / "metrics.csv").write_text("step,metric,value\n" + rows)
        info = json.loads((run.folder / "run.json").read_text())
        info |= {"status": "diverged", "sha256": record.hash_metrics(run.folder)}
        (run.folder / "run.json").write_text(json.dumps(info))
    found = {run.entry: Published(publish.public(run), run.metrics()) for run in lab.runs()}
    archive.save(lab.published, "counterexample_stochastic", found)
    assert [str(compare(run)) for run in lab.runs()] == ["identical"] * 6


def test_figure_all_skips_figures_that_are_not_published(lab, tmp_path):
    lab("figure", "1")
    lab("publish")
    other = FIGURE.replace("F1a", "F2a").replace("steps=400", "steps=800")
    (tmp_path / "conf/figure/02.yaml").write_text(other)
    out = lab("figure", "all", "records=published")
    assert "figure-01-published.png" in out
    assert "skipped figure 02: 6 of 6 runs are not published" in out


def test_an_own_run_of_uncommitted_code_is_ignored_if_already_published(lab):
    lab("figure", "1")
    lab("publish")
    run = lab.runs()[0]
    info = json.loads((run.folder / "run.json").read_text())
    (run.folder / "run.json").write_text(json.dumps(info | {"commit": "abc-dirty"}))
    assert "0 runs added" in lab("publish")
    with pytest.raises(ConfigError, match="uncommitted changes"):
        lab("publish", "force=true")


def test_a_publication_killed_between_two_renames_is_repaired(lab):
    lab("figure", "1")
    lab("publish")
    first = contents(lab.published)
    lab.published.rename(publish.aside(lab.published))
    lab("publish")
    assert contents(lab.published) == first and not publish.aside(lab.published).exists()


def test_a_report_with_records_all_has_the_figures_made_from_them(lab):
    lab("figure", "1")
    lab("publish")
    for run in lab.runs():
        (run.folder / "run.json").unlink()
    (lab.results / "figures/figure-01.png").unlink()
    lab("figure", "1", "records=all")
    lab("report", "records=all")
    assert "data:image/webp" in (lab.results / "report-all.html").read_text()
