"""Steps as CUDA graphs; without a GPU, a graph that calls its work again at every replay."""

from functools import partial

import pytest
import torch

from adashift import AdamNC, AdaShift
from experiments.config.build import build
from experiments.task import Step
from experiments.training import execute as execution
from experiments.training.execute import prepare
from experiments.training.graphs import (
    WARM_UP,
    GraphedSteps,
    can_be_captured,
    make_capturable,
)
from experiments.training.loop import train
from tests.experiments.killing import run_of

CPU = torch.device("cpu")
SCHEDULE = "+schedule={_target_:experiments.schedules.drops,_partial_:true,at:[0.5],factor:0.1}"


class Replays:
    """Stands for torch.cuda.graph: `work` runs at every replay, on the tensors of the capture."""

    count = 0

    def __call__(self, work):
        result = torch.zeros(()) if isinstance(work.func.__self__, Step) else None

        def replay():
            self.count += 1
            loss = work()
            if result is not None:
                result.copy_(loss)

        return replay, result


class Rows:
    def __init__(self):
        self.rows = []

    def log(self, step, metrics):
        self.rows.append((step, dict(metrics)))

    def keep(self, files):
        pass


def trained(folder, experiment, optimizer, take_step=None):
    config = run_of(folder, experiment, optimizer=optimizer).config
    _, loop = prepare(config, CPU)
    rows = Rows()
    status = loop(record=rows, **({"take_step": take_step} if take_step else {}))
    assert status == "finished"
    return rows.rows


@pytest.mark.parametrize("optimizer", ["adashift", "adam", "sgd"])
@pytest.mark.parametrize("experiment", ["mnist_lr", "mnist_mlp", "ill_conditioned"])
def test_replayed_steps_equal_steps(tmp_path, experiment, optimizer):
    replays = Replays()
    usual = trained(tmp_path, experiment, optimizer)
    assert trained(tmp_path, experiment, optimizer, GraphedSteps(replays)) == usual
    assert replays.count == usual[-1][0] - WARM_UP


def test_a_captured_step_refuses_other_work():
    theta = torch.nn.Parameter(torch.ones(()))
    take, optimizer = GraphedSteps(Replays()), torch.optim.SGD([theta], lr=0.1)

    def loss(power):
        return theta**power

    for _ in range(WARM_UP + 2):
        take(Step("net", partial(loss, 2)), optimizer)
    with pytest.raises(RuntimeError, match="a captured step got another float"):
        take(Step("net", partial(loss, 2.5)), optimizer)


def test_which_optimizers_can_be_captured():
    params = [torch.nn.Parameter(torch.ones(3))]
    good = [torch.optim.Adam, torch.optim.NAdam, torch.optim.SGD, AdaShift]
    assert all(can_be_captured(kind(params, lr=0.1)) for kind in good)
    assert not can_be_captured(AdamNC(params)) and not can_be_captured(torch.optim.Adagrad(params))
    optimizer = AdaShift(params, fused=True)
    make_capturable(optimizer)
    group = optimizer.param_groups[0]
    assert group["capturable"] is True and group["fused"] is None
    optimizer._check(group)


@pytest.mark.parametrize(
    ("experiment", "optimizer", "words", "expected"),
    [
        ("mnist_mlp", "adashift", ["speed=fast"], True),
        ("ill_conditioned", "adam", ["speed=fast"], True),
        ("mnist_mlp", "adashift", [], False),
        ("mnist_mlp", "adamnc", ["speed=fast", "optimizer.lr=0.1"], False),
        ("ill_conditioned", "adam", ["speed=fast", "task.sampled=50", "task.batch=5"], False),
        ("mnist_correlation", "adam", ["speed=fast", "optimizer.lr=0.1"], False),
        ("mnist_net_update", "adam", ["speed=fast", "optimizer.lr=0.1"], False),
        ("mnist_mlp", "adam", ["speed=fast", SCHEDULE], False),
    ],
)
def test_which_runs_use_graphs(tmp_path, experiment, optimizer, words, expected):
    config = run_of(tmp_path, experiment, *words, optimizer=optimizer).config
    task, _ = prepare(config, CPU)
    loop = execution.prepare_training(config, task, torch.device("cuda"))
    assert loop.func is train
    assert isinstance(loop.keywords.get("take_step"), GraphedSteps) is expected
    loop = execution.prepare_training(config, task, CPU)
    assert "take_step" not in loop.keywords


@pytest.mark.parametrize("experiment", ["mnist_lr", "mnist_mlp", "ill_conditioned"])
def test_a_step_that_is_captured_reads_nothing_on_the_host(tmp_path, experiment):
    """Reading a number of the meta device raises an error, as a capture does."""
    meta = torch.device("meta")
    node = run_of(tmp_path, experiment).config.task
    task = build(node, "task", seed=0, device=meta)
    assert task.capturable
    (params,) = task.players().values()
    optimizer = torch.optim.SGD(params, lr=0.1)
    for step, _ in zip(task.steps(), range(2), strict=False):
        step.take(optimizer)
    assert all(p.grad is not None and p.grad.device == meta for p in params)
