"""How many runs share the GPUs of a machine, with an nvidia-smi that only prints."""

import pytest
import yaml
from omegaconf import OmegaConf

from experiments.config import gpus
from experiments.config.compose import compose
from experiments.config.errors import ConfigError, one_line_errors
from experiments.config.gpus import cores  # the fixture one_core replaces it
from experiments.config.paths import CONF

PAIR = ["experiment=mnist_lr", "optimizer=adam"]


def launcher(engine, **words):
    config = {"device": "auto", "threads": None, "runs_per_gpu": "auto", **words}
    files = OmegaConf.load(CONF / "engine" / f"{engine}.yaml")
    return OmegaConf.merge(files, config).hydra.launcher


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that sets GPUs, their MiB, cores, and the exit code of nvidia-smi."""

    def with_gpus(count, mib=24_576, cores=64, code=0):
        lines = {"-L": [f"GPU {n}" for n in range(count)], "--query": [str(mib)] * count}
        script = "\n".join(
            f"case $1 in {flag}*) printf '%s\\n' {' '.join(map(repr, found))};; esac"
            for flag, found in lines.items()
        )
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho called >> {tmp_path}/calls\n{script}\nexit {code}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr(gpus, "cores", lambda: cores)

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
    assert gpus.jobs_at_once("auto", 1, "auto", needed) == 2 * expected
    assert gpus.gpus_of_a_job("auto", "auto", needed) == 1 / expected


def test_a_number_is_used_as_it_is(machine):
    machine(2)
    assert gpus.runs_on_a_gpu(9, 30) == 9 and gpus.jobs_at_once("auto", 1, 9, 30) == 18


def test_only_visible_gpus_count(machine, monkeypatch):
    machine(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert gpus.jobs_at_once("auto", 1, 1, 1.0) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.jobs_at_once("auto", 1, 1, 1.0) == 64
    assert gpus.gpus_of_a_job("auto", "auto", 1.0) == 0


def test_without_a_gpu_cores_decide(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(gpus, "cores", lambda: 8)
    assert gpus.runs_on_a_gpu("auto", 1) == 1 and gpus.memory_of_a_gpu() == 0
    jobs = [gpus.jobs_at_once("auto", threads, "auto", 1) for threads in (None, 1, 3, 9)]
    assert jobs == [8, 8, 2, 1]


def test_device_cpu_ignores_the_gpus(machine):
    machine(2, cores=8)
    assert gpus.jobs_at_once("cpu", 2, "auto", 1) == 4
    assert gpus.gpus_of_a_job("cpu", "auto", 1) == 0
    words = ["experiment=resnet_cifar10", "threads=4"]
    on_gpu, on_cpu = (compose([*words, f"device={device}"]) for device in ("auto", "cpu"))
    assert (on_gpu.scale, on_cpu.scale) == ("paper", "laptop")
    assert (gpus.runs_at_once([on_gpu]), gpus.runs_at_once([on_cpu])) == (8, 2)
    assert gpus.runs_at_once([on_gpu, on_cpu]) == 2  # of both kinds


def test_nvidia_smi_is_called_once_for_each_question(machine, tmp_path):
    machine(2)
    for _ in range(3):
        assert gpus.has_gpu() and gpus.runs_on_a_gpu("auto", 1) == 4
    assert (tmp_path / "calls").read_text().count("called") == 2


def test_a_failing_nvidia_smi_means_no_gpu(machine):
    machine(2, code=9)  # it may print a message on stdout
    assert not gpus.has_gpu() and gpus.count_gpus() == 0


def test_only_the_cores_that_this_process_may_use_count(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert cores() == 2
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    assert cores() == 7


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_an_invalid_number_of_runs_per_gpu_is_an_error(machine, value):
    machine(1)
    expected = f"runs_per_gpu={value} is invalid: expected auto or a whole number that is 1 or more"
    with pytest.raises(ConfigError, match=f"^{expected}$"):
        compose([*PAIR, f"runs_per_gpu={value}"])
    for engine in ("joblib", "ray"):
        with pytest.raises(ConfigError, match=f"^{expected}$"), one_line_errors():
            OmegaConf.resolve(launcher(engine, runs_per_gpu=yaml.safe_load(value)))


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
    assert launcher("joblib", **words).n_jobs == jobs
    assert launcher("ray", **words).ray.remote.num_gpus == part
    assert launcher("ray", **words, device="cpu").ray.remote.num_gpus == 0
