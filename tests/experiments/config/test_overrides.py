"""Every command line of run.py runs or fails with a one-line error.

`make fuzz` tries 300 random command lines; the test tries fewer, always the same.
"""

import os
import signal
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from experiments.config.compose import compose
from experiments.config.paths import choices_of
from experiments.config.schema import PARTS, leaves
from experiments.records.run import typed
from tests.experiments.command_line import run_py

EXAMPLES = int(os.environ.get("OVERRIDES", "0"))  # 0: the fixed examples of the test
EXPERIMENTS = [
    "counterexample_stochastic", "final_theta_sequential", "ill_conditioned_linear",
    "mnist_correlation", "mnist_mlp", "nmt", "resnet_cifar10", "wgan_critic",
]  # fmt: skip
# Top-level keys, and keys that do not exist.
NAMES = [
    "experiment", "optimizer", "scale", "tracking", "sweep", "tuned", "task", *PARTS, "schedule",
    "nope", "optimiser", "a.b.c", "optimizer.nope", "hydra.nope", "hydra/launcher", "optimizer@x",
    "task._target_", "optimizer._target_", "optimizer._partial_", "tracking.project", "_target_",
]  # fmt: skip
NUMBERS = [
    "-1", "0", "1", "2", "3", "100", "65537", "1000000000000", "4294967296", "-0.5", "0.5", "1.5",
    "0.999999999", "1e-320", "1e30", "1e308", "123456789012345678901234567890", "nan", "inf",
]  # fmt: skip
WORDS = [
    "", "null", "true", "abc", "''", "' '", "[]", "[1]", "[0.9,null]", "[100000,3]", "{}", "{a:1}",
    "{_target_:nowhere.Thing}", "{_target_:builtins.dict}", "${seed}", "${nope}", "${", "${nope:1}",
    "${optimizer}", "${at_scale:1}", "1,2", "range(3)", "choice(1,2)", "glob(*)", "float(x)", "a=b",
    "θ", "\u202e", "\x00", "\\", "'", '"', "1\n2", "../..", "a" * 300, "cuda:99", "mps", "adam",
]  # fmt: skip


@cache
def keys(experiment):
    """Every key in the config of an experiment, as typed on the command line."""
    names = [f"experiment={experiment}", "optimizer=adam", "scale=smoke"]
    config = compose([*names, "++optimizer.lr=0.01"])
    named = {"results", "experiment", "optimizer_name", "scale"}
    return [typed(key) for key in leaves(config.model_dump(mode="json", exclude=named))]


values = st.sampled_from(NUMBERS) | st.sampled_from(WORDS) | st.text(max_size=5)


@st.composite
def command_lines(draw):
    experiment = draw(st.sampled_from(EXPERIMENTS))
    words = [
        f"experiment={experiment}",
        f"optimizer={draw(st.sampled_from(choices_of('optimizer')))}",
    ]
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        key = draw(st.sampled_from(keys(experiment)) | st.sampled_from(NAMES))
        prefix = draw(st.sampled_from(["", "", "", "", "", "+", "++", "~"]))
        words.append(f"{prefix}{key}={draw(values)}")
    return words


class LongRun(BaseException):
    """A run that was accepted and takes longer than the test waits."""


def raise_long_run(number, frame):
    raise LongRun


def status_of(words):
    """The exit status of the command line; None for a run that takes longer than 5 seconds."""
    signal.setitimer(signal.ITIMER_REAL, 5)
    try:
        return run_py(*words)
    except LongRun:
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Overrides that make any run short, in a folder where it may write."""
    monkeypatch.chdir(tmp_path)
    torch.use_deterministic_algorithms(False)  # modules that torch imports on first use: the timer
    torch.optim.SGD([torch.zeros(1)])  # must not interrupt such an import
    before = signal.signal(signal.SIGALRM, raise_long_run)
    words = ["scale=smoke", "tracking=off", f"results={tmp_path}", "++steps=2", "threads=1"]
    yield [*words, "log_every=1", "++optimizer.lr=0.01"]
    signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES or 50,
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(command_lines())
def test_a_command_line_runs_or_fails_with_a_one_line_error(small, words):
    note(" ".join(map(repr, words)))
    status = status_of([*small, *words])
    if status not in (None, 0):
        assert isinstance(status, str) and status.startswith("error: "), status
        assert "\n" not in status and len(status) < 600, status
