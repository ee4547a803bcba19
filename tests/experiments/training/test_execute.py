"""Runs side by side are the runs one after the other, to the byte."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from experiments.config.compose import compose
from experiments.records.run import Run
from experiments.training import device
from experiments.training.device import device_for
from experiments.training.execute import execute
from experiments.training.pool import execute_all, side_by_side


def runs(folder, *overrides, seeds=(0, 1, 2)):
    """Short runs on generated images, but of a scale whose runs are worth a worker."""
    always = ["experiment=mnist_lr", "scale=paper", "tracking=off", f"results={folder}"]
    always += ["data._target_=experiments.data.mnist.generate_digits", "steps=40", "log_every=2"]
    return [Run(compose([*always, *overrides, f"seed={seed}"])) for seed in seeds]


def test_workers_write_the_records_that_one_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "ALL_THREADS", 2)
    one_by_one, together = runs(tmp_path / "a"), runs(tmp_path / "b")
    for run in one_by_one:
        assert execute(run) == "finished"
    assert side_by_side(together) == 2
    execute_all(together, "three runs")
    for a, b in zip(one_by_one, together, strict=True):
        assert b.done and a.folder != b.folder
        content = (a.folder / "metrics.csv").read_bytes()
        assert content == (b.folder / "metrics.csv").read_bytes() and len(content) > 500


@pytest.mark.parametrize(
    ("cores", "threads", "expected"),
    [(1, "1", 1), (2, "1", 2), (8, "1", 3), (8, "4", 2), (8, "5", 1), (8, "null", 1)],
)
def test_as_many_at_once_as_the_cores_take(tmp_path, monkeypatch, cores, threads, expected):
    monkeypatch.setattr(device, "ALL_THREADS", cores)
    assert side_by_side(runs(tmp_path, f"threads={threads}")) == expected


def test_smoke_runs_need_no_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "ALL_THREADS", 2)
    assert side_by_side(runs(tmp_path, "scale=smoke")) == 1


def test_threads_are_set_for_each_run(tmp_path):
    before = torch.get_num_threads()
    try:
        (one,) = runs(tmp_path, "threads=1", seeds=[0])
        execute(one)
        assert torch.get_num_threads() == 1
        (all_of_them,) = runs(tmp_path, "threads=null", seeds=[1])
        execute(all_of_them)
        assert torch.get_num_threads() == device.ALL_THREADS
    finally:
        torch.set_num_threads(before)


def test_an_error_in_a_worker_reaches_the_caller(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "ALL_THREADS", 2)
    with pytest.raises(Exception, match=r"optimizer=adashift is refused with"):
        execute_all(runs(tmp_path, "optimizer.n=2", "optimizer.m=3"), "refused")
    assert not list(tmp_path.rglob("run.json"))


def test_an_experiment_says_how_many_threads_it_wants(tmp_path):
    assert runs(tmp_path)[0].config.threads == 1
    assert compose(["experiment=counterexample_sequential"]).threads is None


def test_threads_are_not_part_of_what_a_run_is(tmp_path):
    (a,), (b,) = (runs(tmp_path, f"threads={t}", seeds=[0]) for t in (1, 2))
    assert a.folder == b.folder


def test_a_run_flushes_denormal_numbers_to_zero(tmp_path):
    tiny = torch.tensor([1e-39])
    assert (tiny * 1).item() > 0
    execute(*runs(tmp_path, seeds=[0]))
    assert (tiny * 1).item() == 0


# GPUs


@pytest.fixture
def four_gpus(monkeypatch, tmp_path):
    """torch says so; nothing is computed on them."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda n: SimpleNamespace(uuid=f"GPU-{n}")
    )


def test_every_run_of_a_machine_has_a_gpu_of_its_own(four_gpus):
    with ExitStack() as held:
        taken = [held.enter_context(device_for("auto")).index for _ in range(4)]
        assert taken == [0, 1, 2, 3]
        with device_for("auto") as shared:
            assert shared == torch.device("cuda")  # there are more runs than GPUs
        with device_for("cuda:2") as asked_for:
            assert asked_for.index == 2
    with device_for("auto") as free_again:
        assert free_again.index == 0


def test_a_machine_without_a_gpu_computes_on_its_cores(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with device_for("auto") as device:
        assert device.type == "cpu"
