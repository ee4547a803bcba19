"""Kills a run in this process at a chosen checkpoint."""

import os
import signal

from adashift import AdaShift
from experiments.config.compose import compose
from experiments.records.run import Run
from experiments.training.checkpoint import Checkpoint


class Killed(BaseException):
    """Not an Exception: like a power failure, no code of the project catches it."""


def run_of(results, experiment, *words, optimizer="adashift"):
    names = [f"experiment={experiment}", f"optimizer={optimizer}", "scale=smoke", "tracking=off"]
    return Run(compose([*names, *words, f"results={results}"]))


def die_after(monkeypatch, saves):
    """Raise Killed right after checkpoint number `saves` + 1."""
    count = iter(range(saves))
    save = Checkpoint.save

    def save_and_die(self, state):
        save(self, state)
        if next(count, None) is None:
            raise Killed

    monkeypatch.setattr(Checkpoint, "save", save_and_die)


class Lethal(AdaShift):
    """Kills its process at the first step, as the system does when memory runs out."""

    def step(self, closure=None):
        os.kill(os.getpid(), signal.SIGKILL)
