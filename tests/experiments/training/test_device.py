"""Device, threads and determinism of a run."""

import warnings
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from benchmarks.kill_and_resume import record_of
from experiments.config.compose import compose
from experiments.records.files import WriteError
from experiments.tasks.mnist import LinearClassifier
from experiments.training import device
from experiments.training.device import device_for, noted_kernels
from experiments.training.execute import execute
from tests.experiments.killing import run_of


@pytest.fixture(autouse=True)
def torch_settings_are_restored():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def test_threads_are_set_for_each_run(tmp_path):
    execute(run_of(tmp_path, "mnist_lr", "threads=1"))
    assert torch.get_num_threads() == 1
    execute(run_of(tmp_path, "mnist_lr", "threads=null", "seed=1"))
    assert torch.get_num_threads() == device.ALL_THREADS


def test_an_experiment_sets_its_number_of_threads():
    assert compose(["experiment=mnist_lr"]).threads == 1
    assert compose(["experiment=counterexample_sequential"]).threads is None


def test_threads_are_not_part_of_the_identity(tmp_path):
    a, b = (run_of(tmp_path, "mnist_lr", f"threads={threads}") for threads in (1, 2))
    assert a.folder == b.folder


def test_a_run_flushes_denormal_numbers_to_zero(tmp_path):
    tiny = torch.tensor([1e-39])
    assert (tiny * 1).item() > 0
    execute(run_of(tmp_path, "mnist_lr"))
    assert (tiny * 1).item() == 0


# Determinism


@pytest.mark.parametrize("experiment", ["wgan_gp", "nmt"])
def test_determinism_is_the_default_on_a_cpu_and_changes_no_bit(tmp_path, experiment):
    """So it is not part of the identity. benchmarks/kill_and_resume.py compares processes."""
    usual, free = (
        run_of(tmp_path / value, experiment, f"deterministic={value}")
        for value in ("null", "false")
    )
    assert usual.folder.name == free.folder.name
    assert execute(usual) == "finished" and torch.are_deterministic_algorithms_enabled()
    assert execute(free) == "finished" and not torch.are_deterministic_algorithms_enabled()
    assert record_of(usual) == record_of(free)
    assert (usual.info["deterministic"], usual.info["not_deterministic"]) == (True, [])
    assert usual.info["device"] == "cpu"
    assert free.info["deterministic"] is False


def test_the_record_names_non_deterministic_kernels(tmp_path, monkeypatch, recwarn):
    evaluate = LinearClassifier.evaluate

    def evaluate_with_such_a_kernel(self):
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
        return evaluate(self)

    monkeypatch.setattr(LinearClassifier, "evaluate", evaluate_with_such_a_kernel)
    run = run_of(tmp_path, "mnist_lr")
    assert execute(run) == "finished"
    assert run.info["deterministic"] is False and run.info["not_deterministic"] == ["put_"]
    assert not [w for w in recwarn if "deterministic" in str(w.message)]


def test_other_warnings_are_shown():
    with pytest.warns(UserWarning, match="mind the step"), noted_kernels() as names:
        warnings.warn("mind the step", stacklevel=1)
    assert names == []


# GPUs


@pytest.fixture
def four_gpus(monkeypatch, tmp_path):
    """torch reports four GPUs; nothing is computed on them."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda n: SimpleNamespace(uuid=f"GPU-{n}")
    )


def test_every_run_on_a_machine_has_its_own_gpu(four_gpus):
    with ExitStack() as held:
        taken = [held.enter_context(device_for("auto")).index for _ in range(4)]
        assert taken == [0, 1, 2, 3]
        with device_for("cuda:2") as chosen:
            assert chosen.index == 2
    with device_for("auto") as free_again:
        assert free_again.index == 0


def test_runs_that_share_gpus_are_spread_over_them(four_gpus):
    with ExitStack() as held:
        taken = [held.enter_context(device_for("auto", 2)).index for _ in range(8)]
        assert taken == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_run_waits_for_a_free_gpu(four_gpus, monkeypatch):
    first, others, said = ExitStack(), ExitStack(), []
    first.enter_context(device_for("auto"))
    for _ in range(3):
        others.enter_context(device_for("auto"))
    monkeypatch.setattr(device.time, "sleep", lambda seconds: first.close())
    with others, device_for("auto", 1, said.append) as free:
        assert free.index == 0
    (line,) = said
    assert line.startswith("waiting: 4 GPUs with 1 run each; set runs_per_gpu=2")


def test_a_temporary_folder_that_cannot_be_written_is_reported(four_gpus, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(WriteError, match=r"set another folder with TMPDIR=…,"), device_for("auto"):
        pass


def test_processes_of_torchrun_do_not_share_a_gpu(four_gpus, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_torchelastic_launched", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with device_for("auto", 3) as one, device_for("auto", 3) as again:  # does not wait
        assert one.index == again.index == 2


def test_a_machine_without_a_gpu_uses_its_cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with device_for("auto") as found:
        assert found.type == "cpu"
