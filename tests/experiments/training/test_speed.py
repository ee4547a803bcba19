"""speed=fast: another run than the exact one, with the same numbers up to rounding."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks.gpu_check import gap_of
from benchmarks.kill_and_resume import record_of
from experiments.config.compose import compose
from experiments.products.make import place
from experiments.records.run import Run
from experiments.training import speed
from experiments.training.execute import execute, prepare
from experiments.training.pool import attempt
from tests.experiments.killing import run_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHORT = ["optimizer.n=2", "optimizer.m=null"]  # so that a smoke run moves its parameters


@pytest.fixture(autouse=True)
def torch_settings_are_restored(monkeypatch):
    # torch's own test harness, which other tests import, forbids it for the rest of a process
    settings = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(settings, "__allow_nonbracketed_mutation_flag", True)
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(False)


# Identity


def test_exact_is_the_default_and_fast_is_another_run(tmp_path):
    usual, exact, fast = (
        run_of(tmp_path, "resnet_cifar10", *words)
        for words in ([], ["speed=exact"], ["speed=fast"])
    )
    assert usual.folder == exact.folder != fast.folder
    assert "speed" not in usual.config.identity()
    assert "speed=fast" in fast.words() and "speed" not in exact.command()
    assert Run(compose([*fast.words(), f"results={tmp_path}"])).folder == fast.folder
    assert fast.twin is None


def test_runs_per_gpu_is_not_part_of_the_identity(tmp_path):
    a, b = (run_of(tmp_path, "mnist_lr", f"runs_per_gpu={count}") for count in ("auto", 3))
    assert a.folder == b.folder


def test_a_product_of_fast_runs_has_its_own_file(tmp_path):
    exact, fast = (
        place({"": [run_of(tmp_path, "mnist_lr", f"speed={value}")]}, "figures/figure-02")
        for value in ("exact", "fast")
    )
    assert (exact.name, fast.name) == ("figure-02-smoke", "figure-02-smoke-fast")


# What it changes


def test_a_gpu_computes_in_full_precision_unless_fast():
    """torch.compile reads both kinds of switches, and torch raises an error if they disagree."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    for fast in (True, False, True):
        speed.set_precision(fast, CUDA, deterministic=False)
        assert cuda.allow_tf32 is cudnn.allow_tf32 is cudnn.benchmark is fast
        found = {cuda.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision}
        assert ("tf32" in found) is fast and (found == {"tf32"} or not fast)
        assert torch.get_float32_matmul_precision() == ("high" if fast else "highest")
    speed.set_precision(True, CUDA, deterministic=True)
    assert torch.backends.cudnn.benchmark is False


def test_a_trainer_gets_the_settings_that_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: True)

    def changed(experiment, device):
        config = run_of(tmp_path, experiment, "speed=fast").config
        node, usual = speed.task_node(config, device), config.task
        assert {k: v for k, v in node.items() if k != "trainer"} == {
            k: v for k, v in usual.items() if k != "trainer"
        }
        trainer = node.get("trainer", {}).items()
        return {k for k, v in trainer if usual["trainer"].get(k) != v}

    assert changed("resnet_cifar10", CUDA) == {"channels_last", "compile", "autocast"}
    assert changed("resnet_cifar10", CPU) == {"channels_last", "compile", "autocast"} - {"autocast"}
    assert changed("wgan_critic", CUDA) == {"channels_last", "compile"}
    assert changed("nmt", CUDA) == {"compile"}
    assert changed("mnist_lr", CUDA) == set()
    exact = run_of(tmp_path, "resnet_cifar10").config
    assert speed.task_node(exact, CUDA) is exact.task


@pytest.mark.parametrize("experiment", ["resnet_cifar10", "wgan_critic"])
def test_the_memory_layout_changes_results_within_rounding(tmp_path, experiment):
    usual, other = (
        run_of(tmp_path, experiment, *SHORT, f"trainer.channels_last={value}")
        for value in ("false", "true")
    )
    assert execute(usual) == execute(other) == "finished"
    assert gap_of(usual, other) < 1e-4


def test_bfloat16_changes_results_a_little(tmp_path):
    """Products have 8 bits instead of 24; sums, parameters and the optimizer stay in float32."""
    exact, rounded = (
        run_of(tmp_path, "resnet_cifar10", *SHORT, f"trainer.autocast={value}")
        for value in ("false", "true")
    )
    assert execute(exact) == execute(rounded) == "finished"
    gap = (exact.metrics()["classifier/loss"] - rounded.metrics()["classifier/loss"]).abs()
    assert 0 < gap.max() < 0.05 * exact.metrics()["classifier/loss"].max()


# Many runs in one process

IN_ONE_PROCESS = ["resnet_cifar10", "nmt", "wgan_gp"]


def elsewhere(run):
    """Train the run in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(execute, run).result() == "finished"
    return record_of(run)


def second_seed(folder, experiment, *words):
    return run_of(folder, experiment, *words, "seed=1")


@pytest.mark.parametrize("experiment", IN_ONE_PROCESS)
def test_a_run_after_another_in_the_same_process_equals_a_run_alone(tmp_path, experiment):
    after, alone = (second_seed(tmp_path / name, experiment, *SHORT) for name in "ab")
    for run in (run_of(tmp_path, experiment, *SHORT), after):
        assert attempt(run, lambda run: []).status == "finished"
    assert record_of(after) == elsewhere(alone)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", IN_ONE_PROCESS)
def test_a_compiled_network_serves_the_next_seed_and_rounds_alike(tmp_path, experiment):
    second = second_seed(tmp_path / "one", experiment, *SHORT, "speed=fast")
    assert execute(run_of(tmp_path, experiment, *SHORT, "speed=fast")) == "finished"
    before = counters["stats"]["unique_graphs"]
    assert before > 0 and execute(second) == "finished"
    assert counters["stats"]["unique_graphs"] == before  # compiled once
    exact = second_seed(tmp_path, experiment, *SHORT)
    assert execute(exact) == "finished"
    assert gap_of(exact, second) < 1e-3
    assert record_of(second) == elsewhere(second_seed(tmp_path, experiment, *SHORT, "speed=fast"))


def test_a_fast_run_uses_the_hooks_of_its_task(tmp_path):
    """Without compiling: nothing is compiled before the first step."""
    task, _ = prepare(run_of(tmp_path, "nmt", "speed=fast").config, CPU)
    assert hasattr(task.net.step, "_torchdynamo_orig_callable")
    task, _ = prepare(run_of(tmp_path, "nmt").config, CPU)
    assert not hasattr(task.net.step, "_torchdynamo_orig_callable")
