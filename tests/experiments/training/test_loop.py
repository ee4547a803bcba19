"""The training loop on a task with two players."""

import numpy as np
import pytest
import torch

from experiments.task import CustomStep, Step, Task
from experiments.training.loop import Training, random_states, set_random_states, train


class Log:
    """A record that keeps what is logged."""

    def __init__(self):
        self.rows = []

    def log(self, step, metrics):
        self.rows.append((step, metrics))

    def keep(self, files):
        assert files == {}


class RecordWithState(Log):
    """A record that can be saved; its state is empty."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


class TwoPlayers(Task):
    """a moves to 1 and b to −2, in turns; `bad` is the value that becomes NaN or inf."""

    def __init__(self, length=None, bad=None, at=0):
        self.a, self.b = (torch.nn.Parameter(torch.zeros(())) for _ in range(2))
        self.length, self.bad, self.at = length, bad, at
        self.done = 0

    def players(self):
        return {"a": [self.a], "b": [self.b]}

    def loss_of(self, theta, goal):
        wrong = self.bad == "loss" and self.done + 1 == self.at
        return (theta - goal) ** 2 * (torch.nan if wrong else 1.0)

    def steps(self):
        while self.length is None or self.done < self.length:
            if self.done % 2 == 0:
                yield Step("a", lambda: self.loss_of(self.a, 1.0))
            else:
                yield Step("b", lambda: self.loss_of(self.b, -2.0))

    def after_step(self):
        self.done += 1

    def evaluate(self):
        wrong = self.bad == "metric" and self.done >= self.at
        return {"done": torch.inf if wrong else self.done}


def trained(task, steps, log_every):
    """Return how the training ended and what was logged; SGD with lr 1/4 halves every distance."""
    log = Log()
    optimizers = {name: torch.optim.SGD(p, lr=0.25) for name, p in task.players().items()}
    return train(task, optimizers, log, steps=steps, log_every=log_every), log.rows


def test_each_player_logs_its_mean_loss_since_the_last_record():
    task = TwoPlayers()
    status, rows = trained(task, steps=7, log_every=3)  # a b a | b a b | a
    assert status == "finished"
    assert rows == [
        (3, {"done": 3, "a/loss": (1 + 1 / 4) / 2, "b/loss": 4}),
        (6, {"done": 6, "a/loss": 1 / 16, "b/loss": (1 + 1 / 4) / 2}),
        (7, {"done": 7, "a/loss": 1 / 64}),
    ]
    assert task.a.item() == 1 - 1 / 2**4 and task.b.item() == -2 + 2 / 2**3


@pytest.mark.parametrize(
    ("steps", "log_every", "logged"),
    [(6, 3, [3, 6]), (7, 3, [3, 6, 7]), (2, 5, [2]), (3, 1, [1, 2, 3]), (1, 1, [1])],
)
def test_the_last_step_is_always_logged_and_only_once(steps, log_every, logged):
    _, rows = trained(TwoPlayers(), steps, log_every)
    assert [step for step, _ in rows] == logged


def test_a_player_without_steps_has_no_loss():
    _, rows = trained(TwoPlayers(), steps=2, log_every=1)
    assert [set(metrics) for _, metrics in rows] == [
        {"done", "a/loss"},
        {"done", "b/loss"},
    ]


def test_a_nan_loss_is_detected_at_the_next_record():
    task = TwoPlayers(bad="loss", at=4)
    assert trained(task, steps=20, log_every=10)[0] == "diverged"
    assert task.done == 10


@pytest.mark.parametrize("bad", ["metric", "loss"])
def test_a_value_that_is_nan_or_inf_ends_the_run_and_is_recorded(bad):
    task = TwoPlayers(bad=bad, at=4)
    status, rows = trained(task, steps=20, log_every=2)
    assert status == "diverged"
    assert [step for step, _ in rows] == [2, 4]
    assert np.isfinite(list(rows[0][1].values())).all()
    assert not np.isfinite(rows[1][1]["done" if bad == "metric" else "b/loss"])
    assert task.done == 4


def test_a_run_that_diverges_at_its_last_step_is_not_finished():
    assert trained(TwoPlayers(bad="metric", at=4), steps=4, log_every=4)[0] == "diverged"


def test_too_few_steps_raise():
    with pytest.raises(RuntimeError, match=r"TwoPlayers.steps\(\) ended after 5 of 6 steps"):
        trained(TwoPlayers(length=5), steps=6, log_every=2)


def test_a_task_without_state_raises_for_a_state():
    task = TwoPlayers()
    task.load_state_dict(task.state_dict())
    with pytest.raises(ValueError, match=r"TwoPlayers has no state, but got \['order'\]"):
        task.load_state_dict({"order": 1})


def test_only_the_generator_of_the_run_s_gpu_is_saved(monkeypatch):
    set_to = {}
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda device: torch.tensor([device.index]))
    monkeypatch.setattr(
        "torch.cuda.set_rng_state", lambda state, device: set_to.update({device.index: state})
    )
    cpu, gpu = random_states(torch.device("cuda", 1))
    assert torch.equal(cpu, torch.get_rng_state()) and gpu.tolist() == [1]
    set_random_states([cpu, gpu], torch.device("cuda", 0))
    assert set_to == {0: gpu}
    assert len(random_states(torch.device("cpu"))) == 1


def test_pending_losses_are_restored_on_the_device_of_the_parameters():
    """A follower of torchrun gets the losses of the leader, which are on another GPU."""
    task = TwoPlayers()
    saved = Training(task, {}, RecordWithState()).state_dict()
    task.a = torch.nn.Parameter(torch.zeros((), device="meta"))
    training = Training(task, {}, RecordWithState())
    training.load_state_dict(saved | {"losses": {"a/loss": torch.ones(2)}})
    assert [loss.device.type for loss in training.losses["a/loss"]] == ["meta", "meta"]


class Jumps(Task):
    """θ rises by 1 per step, four steps at a time."""

    def __init__(self):
        self.theta = torch.nn.Parameter(torch.zeros(()))

    def players(self):
        return {"theta": [self.theta]}

    def steps(self):
        while True:
            yield CustomStep("theta", lambda optimizer: self.theta.data.add_(4), size=4)

    def evaluate(self):
        return {"theta": self.theta.item()}


@pytest.mark.parametrize(
    ("steps", "log_every", "logged"), [(8, 4, [4, 8]), (16, 7, [8, 16]), (10, 100, [12])]
)
def test_a_custom_step_counts_for_all_its_steps_and_has_no_loss(steps, log_every, logged):
    status, rows = trained(Jumps(), steps, log_every)
    assert status == "finished"
    assert rows == [(step, {"theta": step}) for step in logged]
