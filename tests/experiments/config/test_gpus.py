"""How many runs share the GPUs of a machine, with an nvidia-smi that only prints."""

import pytest
from omegaconf import OmegaConf

from experiments.config import gpus
from experiments.config.compose import compose
from experiments.config.paths import CONF


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that sets GPUs, their MiB, and cores."""

    def with_gpus(count, mib=24_576, cores=64):
        lines = {"-L": [f"GPU {n}" for n in range(count)], "--query": [str(mib)] * count}
        script = "\n".join(
            f"case $1 in {flag}*) printf '%s\\n' {' '.join(map(repr, found))};; esac"
            for flag, found in lines.items()
        )
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr("os.cpu_count", lambda: cores)

    return with_gpus


@pytest.mark.parametrize(
    ("mib", "cores", "needed", "expected"),
    [
        (24_576, 64, 1, 4),  # at most 4
        (24_576, 64, 8, 2),
        (24_576, 64, 30, 1),  # it may still fit
        (81_920, 64, 8, 4),
        (81_920, 4, 8, 2),  # two cores for each GPU
        (81_920, 1, 8, 1),
    ],
)
def test_auto_depends_on_memory_and_cores(machine, mib, cores, needed, expected):
    machine(2, mib, cores)
    assert gpus.count_gpus() == 2 and gpus.memory_of_a_gpu() == mib / 1024
    assert gpus.runs_on_a_gpu("auto", needed) == expected
    assert gpus.jobs_at_once(1, "auto", needed) == 2 * expected
    assert gpus.gpus_of_a_job("auto", needed) == 1 / expected


def test_a_number_is_used_as_it_is(machine):
    machine(2)
    assert gpus.runs_on_a_gpu(9, 30) == 9 and gpus.jobs_at_once(1, 9, 30) == 18


def test_only_visible_gpus_count(machine, monkeypatch):
    machine(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert gpus.jobs_at_once(1, 1, 1.0) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.jobs_at_once(1, 1, 1.0) == 64 and gpus.gpus_of_a_job("auto", 1.0) == 0


def test_without_a_gpu_cores_decide(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert gpus.runs_on_a_gpu("auto", 1) == 1 and gpus.memory_of_a_gpu() == 0
    jobs = [gpus.jobs_at_once(threads, "auto", 1) for threads in (None, 1, 3, 9)]
    assert jobs == [8, 8, 2, 1]


def test_an_experiment_says_how_much_memory_its_runs_need():
    memory = {name: compose([f"experiment={name}"]).gpu_memory for name in ("mnist_lr", "nmt")}
    assert memory == {"mnist_lr": 1, "nmt": 8}


@pytest.mark.parametrize(
    ("words", "jobs", "part"),
    [
        ({}, 8, 0.25),
        ({"gpu_memory": 8}, 4, 0.5),
        ({"gpu_memory": 8, "runs_per_gpu": 3}, 6, 1 / 3),
    ],
)
def test_engines_start_as_many_runs_as_the_gpus_take(machine, words, jobs, part):
    machine(2)
    config = {"threads": None, "runs_per_gpu": "auto", **words}
    joblib, ray = (
        OmegaConf.merge(OmegaConf.load(CONF / "engine" / f"{name}.yaml"), config).hydra.launcher
        for name in ("joblib", "ray")
    )
    assert joblib.n_jobs == jobs
    assert ray.ray.remote.num_gpus == part
