"""`run.py -m`: what is trained, what is not trained again, and what a failure does to the rest."""

import shlex
import subprocess
import sys

import pytest
from hydra.core.utils import JobReturn, JobStatus

from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.config.paths import ROOT
from experiments.products.specs import load_spec
from experiments.products.status import lines_of
from experiments.records.files import WriteError, locked
from experiments.records.record import KILLED
from experiments.records.run import Run
from experiments.training.execute import execute
from hydra_plugins.listed_sweeper import ListedSweeper


class Engine:
    """A launcher that trains in this process and can be broken."""

    def __init__(self, train=lambda words: execute(Run(compose(words)), wait=False)):
        self.train, self.batches = train, []

    def launch(self, job_overrides, initial_job_idx):
        self.batches.append([word_of(words, "seed") for words in job_overrides])
        return [self.job(words) for words in job_overrides]

    def job(self, words):
        ended = JobReturn()
        try:
            ended.return_value, ended.status = self.train(words), JobStatus.COMPLETED
        except ConfigError as error:
            ended.return_value, ended.status = error, JobStatus.FAILED
        return ended


def word_of(words, key):
    return next(word.split("=")[1] for word in reversed(words) if word.startswith(key))


@pytest.fixture
def sweep(tmp_path):
    words = ["experiment=mnist_lr", "optimizer=adam", "scale=smoke", "tracking=off"]

    def sweep(engine, *more, points=()):
        sweeper = ListedSweeper({}, points)
        sweeper.launcher = engine
        sweeper.sweep([*words, f"results={tmp_path}", *more])

    sweep.runs = lambda seeds: [
        Run(compose([*words, f"results={tmp_path}", f"seed={seed}"])) for seed in seeds
    ]
    return sweep


def test_what_is_there_is_not_launched_again(sweep, capsys):
    sweep(Engine(), "seed=0,1")
    engine = Engine()
    sweep(engine, "seed=0,1,2")
    assert engine.batches == [["2"]]
    assert "3 runs, 2 are there already" in capsys.readouterr().out
    sweep(engine, "seed=0,1,2")
    assert len(engine.batches) == 1
    sweep(engine, "seed=0,1", "force=true")
    assert engine.batches[1:] == [["0", "1"]]


def test_points_are_pairs_and_the_command_line_makes_a_product_of_them(sweep):
    engine = Engine(train=lambda words: shlex.join(words))
    points = ["optimizer.lr=0.1 optimizer.eps=1", "optimizer.lr=0.2 optimizer.eps=2"]
    sweep(engine, "seed=0,1", points=points)
    assert engine.batches == [["0", "1", "0", "1"]]
    seen = []
    sweep(Engine(train=lambda words: seen.append(words) or "finished"), "seed=7", points=points)
    assert [(word_of(w, "optimizer.lr"), word_of(w, "optimizer.eps")) for w in seen] == [
        ("0.1", "1"),
        ("0.2", "2"),
    ]


def test_the_runs_of_figures_are_a_sweep(tmp_path):
    words = [f"results={tmp_path}", "scale=smoke", "tracking=off"]
    sweeper = ListedSweeper({}, [])
    jobs = sweeper.jobs([*words, "runs=figure-9,figure-13", "engine=joblib"])
    wanted = {
        run.folder
        for name in ("09", "13")
        for runs in load_spec("figure", name).expand(words).values()
        for run in runs
    }
    assert {job.run.folder for job in jobs} == wanted
    assert {Run(compose(job.words)).folder for job in jobs[::6]} <= wanted
    with pytest.raises(ConfigError, match=r"optimizer.lr=1 cannot be set here"):
        sweeper.jobs([*words, "runs=figure-9", "optimizer.lr=1"])
    with pytest.raises(ConfigError, match="figure 99"):
        sweeper.jobs([*words, "runs=figure-99"])


def test_a_slip_stops_a_sweep_before_anything_is_trained(sweep):
    engine = Engine()
    with pytest.raises(ConfigError, match=r"optimizer.lr=-1"):
        sweep(engine, "optimizer.lr=0.1,-1")
    assert engine.batches == []


def test_a_run_that_fails_does_not_stop_the_others(sweep, capsys):
    def train(words):
        if word_of(words, "seed") == "1":
            raise ConfigError("out of\nmemory")
        return execute(Run(compose(words)))

    with pytest.raises(ConfigError, match="1 of 3 runs failed, see above"):
        sweep(Engine(train), "seed=0,1,2")
    runs = sweep.runs([0, 1, 2])
    assert [run.status for run in runs] == ["finished", "failed", "finished"]
    shown = lines_of("sweep", runs)  # though it had not begun
    assert "1 failed of 3 runs" in shown[0] and "memory" in shown[1]
    assert shown[2].strip() == runs[1].command()
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "failed: ConfigError: memory"
    assert Run(compose(shlex.split(told[1])[2:])).config.seed == 1
    engine = Engine()
    sweep(engine, "seed=0,1,2")  # the same sweep tries it again
    assert engine.batches == [["1"]] and runs[1].status == "finished"


def test_a_process_that_is_killed_costs_its_own_run_alone(sweep, capsys):
    """An engine gives up all its jobs then; the one that did it is found by trying each alone."""

    def train(words):
        if word_of(words, "seed") == "1":
            (run,) = sweep.runs([1])
            run.folder.mkdir(parents=True, exist_ok=True)
            (run.folder / "run.json").write_text('{"status": "running"}')
            raise ChildProcessError("a worker was killed")
        return execute(Run(compose(words)))

    engine = Engine(train)
    with pytest.raises(ConfigError, match="1 of 4 runs failed"):
        sweep(engine, "seed=0,1,2,3")
    assert engine.batches == [["0", "1", "2", "3"], ["2", "3"], ["1"]]
    states = [run.status for run in sweep.runs(range(4))]
    assert states == ["finished", "killed", "finished", "finished"]
    assert f"failed: {KILLED}\n" in capsys.readouterr().err  # whatever the engine calls it


def test_with_force_a_record_from_before_does_not_hide_that_its_run_failed(sweep):
    sweep(Engine(), "seed=0,1,2")
    before = {run.folder: run.info["started"] for run in sweep.runs(range(3))}

    def train(words):
        if word_of(words, "seed") == "1":
            raise ChildProcessError("a worker was killed")
        return execute(Run(compose(words)))

    engine = Engine(train)
    with pytest.raises(ConfigError, match="1 of 3 runs failed"):
        sweep(engine, "seed=0,1,2", "force=true")
    assert engine.batches == [["0", "1", "2"], ["1"], ["2"]] and len(before) == 3


def test_a_full_disk_is_told_as_what_it_is(sweep, capsys):
    def train(words):
        (run,) = sweep.runs([0])
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / "run.json").write_text('{"status": "running"}')
        raise WriteError("metrics.csv cannot be written (No space left on device)")

    with pytest.raises(ConfigError, match="1 of 1 runs failed"):
        sweep(Engine(train), "seed=0")
    assert "No space left on device" in capsys.readouterr().err


def test_an_engine_that_does_not_start_is_told(sweep):
    def train(words):
        raise OSError("sbatch: not found")

    with pytest.raises(ConfigError, match="the engine does not start: sbatch: not found"):
        sweep(Engine(train), "seed=0,1")


def test_a_run_that_another_process_trains_is_waited_for_last(sweep):
    first, _ = sweep.runs([0, 1])
    elsewhere = locked(first.folder)
    elsewhere.__enter__()

    def train(words):
        end = execute(Run(compose(words)), wait=False)
        if word_of(words, "seed") == "1":
            elsewhere.__exit__(None, None, None)  # it was killed there before it was finished
        return end

    engine = Engine(train)
    sweep(engine, "seed=0,1")
    assert engine.batches == [["0", "1"], ["0"]]
    assert all(run.done for run in sweep.runs([0, 1]))


def test_run_py_goes_on_after_a_failure(tmp_path):
    words = ["experiment=mnist_lr", "optimizer=adashift", "scale=smoke", "tracking=off"]
    words += ["optimizer.n=2", "+optimizer.m=3,1", f"results={tmp_path}"]
    command = [sys.executable, str(ROOT / "run.py"), "-m", *words]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert out.returncode == 1 and "Traceback" not in out.stderr
    assert "failed: ConfigError: optimizer=adashift is refused" in out.stderr
    assert out.stderr.endswith("error: 1 of 2 runs failed, see above\n")
    assert len(list(tmp_path.glob("runs/*/*/*/metrics.csv"))) == 1
