"""`make status` for finished, failed, killed, running and missing runs."""

import json
import shlex

import pytest

from experiments import __main__ as cli
from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.products.specs import load_spec
from experiments.records import estimate
from experiments.records.files import locked
from experiments.records.run import Run
from experiments.training.execute import execute
from experiments.training.pool import execute_all


@pytest.fixture
def ask(small_figure, tmp_path, capsys):
    """Return the lines of the status of a small figure; `ask.runs` are its runs."""
    words = [f"results={tmp_path / 'results'}", "scale=smoke", "tracking=off"]

    def ask(*names):
        estimate.timings.cache_clear()
        capsys.readouterr()
        cli.main(["status", *names, *words])
        return capsys.readouterr().out.splitlines()

    ask.runs = [run for group in load_spec("figure", "01").expand(words).values() for run in group]
    ask.words = words
    return ask


def change(run, **values):
    path = run.folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_missing_runs_are_counted_and_listed(ask, tmp_path):
    assert ask() == ["figure 01: 4 missing of 4 runs; 4 of unknown length"]
    _, *rest = ask("figure-1")
    assert rest[0] == f"    missing: {ask.runs[0].command()}"
    assert rest[-1] == "    … and 1 more" and len(rest) == 4
    assert not (tmp_path / "results").exists()


def test_every_status_is_counted(ask):
    for run in ask.runs[:3]:
        execute(run)
    change(ask.runs[1], status="diverged")
    change(ask.runs[2], status="running")
    with locked(ask.runs[2].folder):
        assert ask()[0].startswith("figure 01: 1 finished, 1 diverged, 1 running, 1 missing of 4")
    line, *rest = ask()
    assert line.startswith("figure 01: 1 finished, 1 diverged, 1 killed, 1 missing of 4 runs")
    assert rest[0].startswith("    killed: ") and "memory" in rest[0]
    assert rest[1] == f"        {ask.runs[2].command()}"


def test_a_failure_is_reported_with_the_command_that_reruns_it(ask, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("can't allocate\nmemory")

    with monkeypatch.context() as broken:
        broken.setattr("torch.optim.Adam.step", fail)
        with pytest.raises(ConfigError, match="2 of 4 runs failed"):
            execute_all(ask.runs, "figure 1")
    line, *rest = ask()
    assert line.startswith("figure 01: 2 finished, 2 failed of 4 runs; about ")
    assert rest[0] == """    failed: RuntimeError("can't allocate\\nmemory")"""
    words = shlex.split(rest[1])[2:]
    again = Run(compose([*words, *ask.words]))
    assert again.folder == ask.runs[0].folder and execute(again) == "finished"
    assert "3 finished, 1 failed" in ask()[0]


def test_the_time_left_is_estimated_from_similar_runs(ask, monkeypatch):
    adam, _, adashift, _ = ask.runs
    execute(adam)
    change(adam, seconds=300, machine={"system": "another"})
    # Only another machine is known: three runs of 300 s; smoke runs are trained one by one.
    assert ask()[0].endswith("; about 15 min left")
    execute(adashift)
    change(adashift, seconds=100)
    # This machine is preferred, even with another optimizer: 100 s each.
    assert ask()[0].endswith("; about 3.3 min left")
    change(adam, machine=json.loads((adashift.folder / "run.json").read_text())["machine"])
    # Both optimizers are known on this machine: 300 s and 100 s.
    assert ask()[0].endswith("; about 6.7 min left")


def test_runs_that_no_figure_uses_are_listed_too(ask):
    stray = Run(compose(["experiment=mnist_mlp", "optimizer=adam", "optimizer.lr=0.3", *ask.words]))
    execute(stray)
    assert ask()[-1] == "other runs: 1 finished"
    change(stray, status="failed", error="MemoryError()")
    assert ask()[-3:] == [
        "other runs: 1 failed",
        "    failed: MemoryError()",
        f"        {stray.command()}",
    ]


@pytest.mark.parametrize(("word", "message"), [("mnist", "mnist is unknown"), ("figure-99", "99")])
def test_an_unknown_name_is_an_error(ask, word, message):
    with pytest.raises(ConfigError, match=message):
        ask(word)
