"""A sweep on a real Slurm; `make test-slurm` starts one on this machine."""

import subprocess
import sys
import time
from importlib.util import find_spec
from shutil import which

import pytest

from experiments.config.compose import compose
from experiments.config.paths import ROOT
from experiments.records.run import Run
from experiments.training.pool import execute_all

SWEEP = ["experiment=mnist_lr", "scale=paper", "steps=4000", "checkpoint_every=1", "tracking=off"]
OPTIMIZERS, SEEDS = ("adam", "adashift"), (0, 1)
PATIENCE = 120  # seconds


def slurm_answers():
    return which("sinfo") and subprocess.run(["sinfo"], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not slurm_answers(), reason="no Slurm answers: run make test-slurm"),
    pytest.mark.skipif(not find_spec("submitit"), reason="run make setup-cluster"),
]


def runs_in(results):
    return [
        Run(compose([*SWEEP, f"optimizer={name}", f"seed={seed}", f"results={results}"]))
        for name in OPTIMIZERS
        for seed in SEEDS
    ]


def start_sweep(results, log):
    words = [*SWEEP, f"optimizer={','.join(OPTIMIZERS)}", f"seed={','.join(map(str, SEEDS))}"]
    command = [sys.executable, str(ROOT / "run.py"), "-m", "engine=slurm", *words]
    folder = f"hydra.launcher.submitit_folder={results}/slurm/%j"
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, f"results={results}", folder], stdout=output, stderr=output, cwd=results
        )


def slurm_jobs():
    """Return the ids of the jobs that are running: 12_0."""
    command = ["squeue", "--noheader", "--array", "--states=RUNNING", "--format=%i"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def wait_for(condition, sweep):
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert sweep.poll() is None, "the sweep ended before its time"
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.1)
    return found


def test_a_requeued_job_resumes_and_gives_the_same_records(tmp_path):
    log, there, here = tmp_path / "log", tmp_path / "slurm", tmp_path / "here"
    there.mkdir()
    runs = runs_in(there)
    sweep = start_sweep(there, log)
    job = wait_for(slurm_jobs, sweep)[0]
    wait_for(lambda: any(has_checkpoint(run) for run in runs), sweep)
    subprocess.run(["scontrol", "requeue", job], check=True)
    wait_for(lambda: "Reason=BeginTime" in about(job), sweep)  # Slurm holds it for two minutes
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)
    assert sweep.wait(PATIENCE) == 0, log.read_text()
    assert "Restarts=1" in about(job)
    expected = runs_in(here)
    execute_all(expected, "on this machine")
    for run, other in zip(runs, expected, strict=True):
        assert run.done
        assert (run.folder / "metrics.csv").read_bytes() == (
            other.folder / "metrics.csv"
        ).read_bytes()
    assert "sacct" not in log.read_text()
    assert "accounting" not in log.read_text()


def has_checkpoint(run):
    return any(run.folder.glob("checkpoint*"))


def about(job):
    return subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True).stdout


def test_a_killed_job_is_reported_and_does_not_hang_the_sweep(tmp_path):
    log = tmp_path / "log"
    sweep = start_sweep(tmp_path, log)
    runs = runs_in(tmp_path)
    job = wait_for(slurm_jobs, sweep)[0]
    wait_for(lambda: any(has_checkpoint(run) for run in runs), sweep)
    subprocess.run(["scancel", job], check=True)
    sweep.wait(PATIENCE)
    assert all(run.done for run in runs), log.read_text()
