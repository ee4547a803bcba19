"""`run.py -m`: which runs a sweep has, and how Hydra's launchers train them."""

import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.config.paths import ROOT
from experiments.products.specs import load_spec
from experiments.products.status import status_lines
from experiments.products.summaries import score
from experiments.records.files import WriteError, locked
from experiments.records.record import KILLED
from experiments.records.run import Run
from experiments.records.status import Status
from experiments.training.execute import no_tags
from experiments.training.pool import attempt
from experiments.training.scheduler import UnfinishedRunError
from hydra_plugins import listed_sweeper
from hydra_plugins.listed_sweeper import ListedSweeper


def train_here(words):
    """Do what run.py does in a job."""
    run = Run(compose(words))
    outcome = attempt(run, no_tags)
    if not outcome.status.is_final:
        raise UnfinishedRunError(outcome)
    return score(run)


class Launcher:
    """Trains in this process, and can be broken: only some errors stay inside their job."""

    def __init__(self, train=train_here):
        self.train, self.batches = train, []

    def launch(self, job_overrides, initial_job_idx):
        self.batches.append([value_of(words, "seed") for words in job_overrides])
        return [self.job(words) for words in job_overrides]

    def job(self, words):
        ended = JobReturn()
        try:
            ended.return_value, ended.status = self.train(words), JobStatus.COMPLETED
        except (ConfigError, WriteError) as error:
            ended.return_value, ended.status = error, JobStatus.FAILED
        return ended


def value_of(words, key):
    return next(word.split("=")[1] for word in reversed(words) if word.startswith(key))


@pytest.fixture
def sweep(tmp_path):
    words = ["experiment=mnist_lr", "optimizer=adam", "scale=smoke", "tracking=off"]

    def sweep(launcher, *more, points=(), in_turn=False):
        sweeper = ListedSweeper({}, points)
        sweeper.launcher, sweeper.in_turn = launcher, in_turn
        sweeper.sweep([*words, f"results={tmp_path}", *more])

    sweep.runs = lambda seeds: [
        Run(compose([*words, f"results={tmp_path}", f"seed={seed}"])) for seed in seeds
    ]
    return sweep


def begin(run):
    """Leave what a process leaves that is killed after the run has begun."""
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "run.json").write_text('{"status": "running"}')


def test_finished_runs_are_not_launched_again(sweep, capsys):
    sweep(Launcher(), "seed=0,1")
    launcher = Launcher()
    sweep(launcher, "seed=0,1,2")
    assert launcher.batches == [["2"]]
    assert "sweep: 1 run to train at smoke scale" in (out := capsys.readouterr().out)
    assert "2 already finished" in out
    sweep(launcher, "seed=0,1,2")
    assert len(launcher.batches) == 1
    sweep(launcher, "seed=0,1", "force=true")
    assert launcher.batches[1:] == [["0", "1"]]


@pytest.mark.parametrize("seeds", ["range(0,0)", "range(3,0)"])
def test_a_sweep_without_runs_is_reported(sweep, seeds):
    with pytest.raises(ConfigError, match="the sweep has no runs: check its ranges"):
        sweep(Launcher(), f"seed={seeds}")


def test_runs_without_a_name_is_reported():
    with pytest.raises(ConfigError, match="runs= is empty: expected figure-4"):
        ListedSweeper({}, []).jobs(["runs="])


def test_points_are_combined_with_the_values_of_the_command_line(sweep):
    seen = []
    launcher = Launcher(train=lambda words: seen.append(words))
    points = ["optimizer.lr=0.1 optimizer.eps=1", "optimizer.lr=0.2 optimizer.eps=2"]
    sweep(launcher, "seed=0,1", points=points)
    assert launcher.batches == [["0", "1", "0", "1"]]
    pairs = [(value_of(w, "optimizer.lr"), value_of(w, "optimizer.eps")) for w in seen]
    assert pairs == [("0.1", "1"), ("0.1", "1"), ("0.2", "2"), ("0.2", "2")]


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


def test_a_job_has_the_mode_and_the_engine_of_its_sweep(tmp_path, monkeypatch):
    """Otherwise hydra.launcher.n_jobs=2 on the command line is an unknown key in the job.

    The mode may come from conf/sweep, which is not part of a job.
    """
    seen = []
    launcher = Launcher(lambda words: seen.append(words))
    monkeypatch.setattr(Plugins, "instantiate_launcher", lambda *_, **about: launcher)
    monkeypatch.setenv("PYTHONPATH", "")
    choices = {"hydra/launcher": "joblib", "engine": "joblib"}
    config = OmegaConf.create({"hydra": {"runtime": {"choices": choices}}})
    sweeper = ListedSweeper({}, [])
    sweeper.setup(hydra_context=None, task_function=None, config=config)
    sweeper.sweep(["experiment=mnist_lr", "seed=0", "engine=joblib", f"results={tmp_path}"])
    assert seen[0][-2:] == ["hydra.mode=MULTIRUN", "engine=joblib"]


@pytest.mark.parametrize(
    ("launcher", "settings", "at_once"),
    [("joblib", {"n_jobs": 3}, 3), ("joblib", {"n_jobs": -1}, None), ("basic", {}, 1),
     ("submitit_slurm", {"array_parallelism": 64}, 64), ("ray", {}, None)],
)  # fmt: skip
def test_a_forecast_uses_the_limit_of_the_launcher(monkeypatch, launcher, settings, at_once):
    monkeypatch.setattr(Plugins, "instantiate_launcher", lambda *_, **about: None)
    monkeypatch.setattr(listed_sweeper, "ask_squeue_without_accounting", lambda: None)
    monkeypatch.setenv("PYTHONPATH", "")
    choices = {"hydra/launcher": launcher, "engine": None}
    hydra = {"runtime": {"choices": choices}, "launcher": settings}
    sweeper = ListedSweeper({}, [])
    sweeper.setup(hydra_context=None, task_function=None, config=OmegaConf.create({"hydra": hydra}))
    assert sweeper.at_once == at_once


def test_an_invalid_setting_stops_a_sweep_before_anything_is_trained(sweep):
    launcher = Launcher()
    with pytest.raises(ConfigError, match=r"optimizer.lr=-1"):
        sweep(launcher, "optimizer.lr=0.1,-1")
    assert launcher.batches == []


@pytest.mark.parametrize("in_turn", [True, False])
def test_a_run_that_fails_does_not_stop_the_others(sweep, capsys, in_turn):
    def train(words):
        if value_of(words, "seed") == "1":
            raise ConfigError("out of\nmemory")
        return train_here(words)

    with pytest.raises(ConfigError, match="sweep: 1 of 3 runs failed, see above"):
        sweep(Launcher(train), "seed=0,1,2", in_turn=in_turn)
    runs = sweep.runs([0, 1, 2])
    assert [run.status for run in runs] == [Status.FINISHED, Status.FAILED, Status.FINISHED]
    shown = status_lines("sweep", runs)  # although it had not begun
    assert "1 failed of 3 runs" in shown[0] and "memory" in shown[1]
    assert shown[2].strip() == runs[1].command()
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "failed: memory"
    assert Run(compose(shlex.split(printed[1])[2:])).config.seed == 1
    again = Launcher()
    sweep(again, "seed=0,1,2")  # the same sweep tries the run again
    assert again.batches == [["1"]] and runs[1].status == Status.FINISHED


def test_a_killed_process_costs_only_its_own_run(sweep, capsys):
    """A launcher gives up all its jobs; runs that had begun are trained alone to find the cause."""

    def train(words):
        if value_of(words, "seed") == "1":
            begin(*sweep.runs([1]))
            raise ChildProcessError("a worker was killed")
        return train_here(words)

    launcher = Launcher(train)
    with pytest.raises(ConfigError, match="1 of 4 runs failed"):
        sweep(launcher, "seed=0,1,2,3")
    assert launcher.batches == [["0", "1", "2", "3"], ["2", "3"], ["1"]]
    states = [run.status for run in sweep.runs(range(4))]
    assert states == [Status.FINISHED, Status.KILLED, Status.FINISHED, Status.FINISHED]
    printed = capsys.readouterr()
    assert f"failed: {KILLED}\n" in printed.err  # whatever the launcher calls it
    assert "| 3 finished, 1 killed |" in printed.out  # the table of the sweep


def test_a_process_killed_before_its_run_begins_costs_only_its_own_run(sweep, capsys):
    """For example when the data do not fit into memory."""

    def train(words):
        if value_of(words, "seed") == "0":
            raise ChildProcessError("a worker was killed")
        return train_here(words)

    launcher = Launcher(train)
    with pytest.raises(ConfigError, match="1 of 3 runs failed"):
        sweep(launcher, "seed=0,1,2")
    assert launcher.batches == [["0", "1", "2"], ["0"], ["1"], ["2"]]
    states = [run.status for run in sweep.runs(range(3))]
    assert states == [Status.FAILED, Status.FINISHED, Status.FINISHED]
    assert "failed: a worker was killed\n" in capsys.readouterr().err


def test_with_force_an_earlier_record_does_not_hide_a_failure(sweep):
    sweep(Launcher(), "seed=0,1,2")

    def train(words):
        if value_of(words, "seed") == "1":
            raise ChildProcessError("a worker was killed")
        return train_here(words)

    launcher = Launcher(train)
    with pytest.raises(ConfigError, match="1 of 3 runs failed"):
        sweep(launcher, "seed=0,1,2", "force=true")
    assert launcher.batches == [["0", "1", "2"], ["1", "2"], ["1"], ["2"]]


@pytest.mark.parametrize(("in_turn", "batch"), [(True, ["0"]), (False, ["0", "1"])])
def test_a_full_disk_stops_a_sweep(sweep, in_turn, batch):
    def train(words):
        begin(*sweep.runs([value_of(words, "seed")]))
        raise WriteError("metrics.csv cannot be written (No space left on device)")

    launcher = Launcher(train)
    with pytest.raises(WriteError, match="No space left on device"):
        sweep(launcher, "seed=0,1", in_turn=in_turn)
    assert launcher.batches == [batch]


def test_the_error_of_a_launcher_that_does_not_start_is_printed_once(sweep, capsys):
    def train(words):
        raise OSError("sbatch: not found")

    with pytest.raises(ConfigError, match="2 of 2 runs failed"):
        sweep(Launcher(train), "seed=0,1")
    assert capsys.readouterr().err.count("failed: sbatch: not found") == 1


def test_a_run_that_another_process_trains_comes_last(sweep):
    first, _ = sweep.runs([0, 1])
    elsewhere = locked(first.folder)
    elsewhere.__enter__()

    def train(words):
        outcome = train_here(words)
        if value_of(words, "seed") == "1":
            elsewhere.__exit__(None, None, None)  # that process was killed before the end
        return outcome

    launcher = Launcher(train)
    sweep(launcher, "seed=0,1")
    assert launcher.batches == [["0", "1"], ["0"]]
    assert all(run.done for run in sweep.runs([0, 1]))


def test_run_py_continues_after_a_failure(tmp_path):
    words = ["experiment=mnist_lr", "optimizer=adashift", "scale=smoke", "tracking=off"]
    words += ["optimizer.n=2", "+optimizer.m=3,1", f"results={tmp_path}"]
    command = [sys.executable, str(ROOT / "run.py"), "-m", *words]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert out.returncode == 1 and "Traceback" not in out.stderr
    assert "failed: optimizer=adashift is invalid" in out.stderr
    assert out.stderr.endswith("error: sweep: 1 of 2 runs failed, see above\n")
    assert len(list(tmp_path.glob("runs/*/*/*/metrics.csv"))) == 1


def test_the_sweeper_does_not_import_torch():
    script = "import sys, hydra_plugins.listed_sweeper; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_stops_run_py_after_the_first_run(sweep, tmp_path):
    first, second = sweep.runs([0, 1])
    first.folder.mkdir(parents=True)
    (first.folder / ".metrics.csv").symlink_to("/dev/full")
    words = ["experiment=mnist_lr", "optimizer=adam", "scale=smoke", "tracking=off", "seed=0,1"]
    command = [sys.executable, str(ROOT / "run.py"), "-m", *words, f"results={tmp_path}"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert out.returncode == 1 and second.status == Status.MISSING
    assert out.stderr.startswith("error: ") and "No space left" in out.stderr
    assert out.stderr.count("\n") == 1


# -- other sweepers ----------------------------------------------------------------------------


TERNARY_SEARCH = """
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

class TernarySearch(Sweeper):
    def __init__(self, params, points):
        self.low, self.high = -4.0, 12.0

    def setup(self, **context):
        self.launcher = Plugins.instance().instantiate_launcher(**context)

    def value(self, exponent, arguments):
        jobs = self.launcher.launch([[*arguments, f"optimizer.lr={10**exponent}"]], 0)
        print("value", 10**exponent, jobs[0].return_value)
        return jobs[0].return_value

    def sweep(self, arguments):
        for _ in range(8):
            third = (self.high - self.low) / 3
            left, right = self.low + third, self.high - third
            if self.value(left, arguments) < self.value(right, arguments):
                self.high = right
            else:
                self.low = left
"""


def test_another_sweeper_optimizes_what_run_py_returns(tmp_path):
    """`best` of ill_conditioned is lowest; runs with a large learning rate diverge."""
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins/ternary_search.py").write_text(TERNARY_SEARCH)
    words = ["hydra.sweeper._target_=hydra_plugins.ternary_search.TernarySearch", "scale=smoke"]
    words += ["experiment=ill_conditioned", "optimizer=sgd", "tracking=off", "results=results"]
    command = [sys.executable, str(ROOT / "run.py"), "-m", *words]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert out.returncode == 0, out.stderr
    rows = [map(float, line.split()[1:]) for line in out.stdout.splitlines() if "value" in line]
    values = dict(rows)
    assert values[max(values)] == math.inf  # it diverged
    best = min(values, key=values.get)
    shared = [*words[1:], f"results={tmp_path}/results"]
    rates = [best / 10, best, best * 10]
    runs = [Run(compose([*shared, f"optimizer.lr={rate}"])) for rate in rates]
    for run in runs:
        attempt(run, no_tags)
    assert values[best] == score(runs[1]) == min(score(run) for run in runs)


def test_the_score_of_a_run_is_its_main_metric_over_the_last_tenth(sweep):
    (run,) = sweep.runs([0])
    attempt(run, no_tags)
    curve = run.metrics()["validation_accuracy"]
    assert len(curve) == 20 and score(run) == curve.iloc[-2:].mean()


@pytest.mark.parametrize(("best", "worst"), [("highest", -math.inf), ("lowest", math.inf)])
def test_a_run_that_diverged_has_the_worst_score(sweep, best, worst):
    (run,) = sweep.runs([0])
    begin(run)
    (run.folder / "run.json").write_text('{"status": "diverged"}')
    assert score(Run(run.config.model_copy(update={"best": best}))) == worst
    assert math.isnan(score(Run(run.config.model_copy(update={"best": None}))))
