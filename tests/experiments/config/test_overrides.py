"""Whatever is typed behind run.py is run, or refused in one line.

`make fuzz` tries 300 command lines that are new every time; here fewer, and always the same.
"""

import os
import signal
import sys
from functools import cache

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from experiments.config.compose import compose
from experiments.config.paths import choices_of
from experiments.config.schema import PARTS, leaves
from experiments.records.run import typed

with pytest.MonkeyPatch.context() as environment:  # it changes it, for itself alone
    environment.setenv("HYDRA_FULL_ERROR", "")
    import run as program

EXAMPLES = int(os.environ.get("OVERRIDES", "0"))  # 0: those of the tests
EXPERIMENTS = [
    "counterexample_stochastic", "final_theta_sequential", "ill_conditioned_linear",
    "mnist_correlation", "mnist_mlp", "nmt", "resnet_cifar10", "wgan_critic",
]  # fmt: skip
# Keys that a request may hold at the top, or that are none.
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
    """Every value that the config of an experiment has, as it is typed."""
    names = [f"experiment={experiment}", "optimizer=adam", "scale=smoke"]
    config = compose([*names, "++optimizer.lr=0.01"])
    named = {"results", "experiment", "optimizer_name", "scale"}
    return [typed(key) for key in leaves(config.model_dump(mode="json", exclude=named))]


values = st.sampled_from(NUMBERS) | st.sampled_from(WORDS) | st.text(max_size=5)


@st.composite
def requests(draw):
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


class Long(BaseException):
    """A run that was accepted and takes its time."""


def answer(words):
    """What the command line says: the status it leaves with, None or 0 for a run that was made."""
    GlobalHydra.instance().clear()
    sys.argv = ["run.py", *words]
    signal.setitimer(signal.ITIMER_REAL, 5)
    try:
        with program.clean_exit():
            program.main()
    except SystemExit as leaving:
        return leaving.code
    except Long:
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        GlobalHydra.instance().clear()
    return None


def leave(number, frame):
    raise Long


@pytest.fixture
def command_line(tmp_path, monkeypatch):
    """A folder where whatever is asked for may be written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    torch.use_deterministic_algorithms(False)  # what is imported when it is first used, must not
    torch.optim.SGD([torch.zeros(1)])  # be interrupted in the middle
    before = signal.signal(signal.SIGALRM, leave)
    small = ["scale=smoke", "tracking=off", f"results={tmp_path}", "++steps=2", "threads=1"]
    yield [*small, "log_every=1", "++optimizer.lr=0.01"]
    signal.signal(signal.SIGALRM, before)


@settings(
    max_examples=EXAMPLES or 50,
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(requests())
def test_a_request_is_run_or_refused_in_one_line(command_line, words):
    note(" ".join(map(repr, words)))
    code = answer([*command_line, *words])
    if code not in (None, 0):
        assert isinstance(code, str) and code.startswith("error: "), code
        assert "\n" not in code and len(code) < 600, code
