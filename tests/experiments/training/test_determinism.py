"""The same bits from run to run, and a record that says so."""

import pytest
import torch

from benchmarks.kill_and_resume import record_of
from experiments.training.device import noted_kernels
from experiments.training.execute import execute
from tests.experiments.killing import run_of


@pytest.fixture(autouse=True)
def torch_is_as_it_was():
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("experiment", ["wgan_gp", "nmt"])
def test_on_a_cpu_it_is_the_default_and_changes_no_bit(tmp_path, experiment):
    """So it is no part of what a run is. `make kill-and-resume` compares processes."""
    usual, free = (
        run_of(tmp_path / value, experiment, f"deterministic={value}")
        for value in ("null", "false")
    )
    assert usual.folder.name == free.folder.name
    assert execute(usual) == "finished" and torch.are_deterministic_algorithms_enabled()
    assert execute(free) == "finished" and not torch.are_deterministic_algorithms_enabled()
    assert record_of(usual) == record_of(free)
    assert (usual.info["deterministic"], usual.info["not_deterministic"]) == (True, [])
    assert free.info["deterministic"] is False


def test_a_kernel_that_has_no_such_form_is_named(tmp_path, monkeypatch, recwarn):
    from experiments.tasks.mnist import LinearClassifier

    evaluate = LinearClassifier.evaluate

    def with_such_a_kernel(self):
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
        return evaluate(self)

    monkeypatch.setattr(LinearClassifier, "evaluate", with_such_a_kernel)
    run = run_of(tmp_path, "mnist_lr")
    assert execute(run) == "finished"
    assert run.info["deterministic"] is False and run.info["not_deterministic"] == ["put_"]
    assert not [w for w in recwarn if "deterministic" in str(w.message)]


def test_other_warnings_come_through():
    import warnings

    with pytest.warns(UserWarning, match="mind the step"), noted_kernels() as names:
        warnings.warn("mind the step", stacklevel=1)
    assert names == []
