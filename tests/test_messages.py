"""Every mistake on a command line is one line that says what is expected: command → message."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adashift import AdaShift
from experiments.__main__ import COMMANDS, main
from experiments.config import paths
from experiments.config.build import import_target
from experiments.config.command_line import read_command_line
from experiments.config.compose import compose
from experiments.config.errors import ConfigError
from experiments.products.specs import ABOUT_THE_MACHINE
from experiments.training.execute import prepare
from tests.experiments.command_line import run_py

ROOT = Path(__file__).resolve().parents[1]
ADAM = (
    "adam takes lr, betas, eps, weight_decay, amsgrad, foreach, maximize, capturable, "
    "differentiable, fused, decoupled_weight_decay"
)
QUOTES = (
    "check its brackets and quotes; a value with special characters needs two kinds of quotes, as "
    "in \"results='/tmp/my runs'\""
)
ALLOWED = f"set only {', '.join(ABOUT_THE_MACHINE)}, or use "
SCALES = ", ".join(paths.choices_of("scale"))
FIGURES = "the paper has figures 1 to 24, conf/figure also has s2, s3, s6"

# what is typed after `python run.py` → the error
RUN_PY = {
    # words that are no setting
    "mnist_lr adam": "mnist_lr is not key=value: write settings as in experiment=mnist_lr",
    "optimizer.lr": "optimizer.lr is not key=value: write settings as in optimizer.lr=…",
    "what": "what is not key=value: write settings as in experiment=mnist_lr optimizer=adam",
    "=5": "=5 has no key: write settings as in experiment=mnist_lr optimizer=adam",
    "--experiment mnist_lr": "--experiment is not an option: write settings as key=value, as in "
    "experiment=mnist_lr optimizer=adam",
    "--cfg jobb": "argument --cfg/-c: invalid choice: 'jobb' (choose from 'job', 'hydra', 'all'); "
    "see run.py --hydra-help",
    "optimizer.betas=[0.9": f"cannot parse optimizer.betas=[0.9: {QUOTES}",
    "results=/tmp/größe": f"cannot parse results=/tmp/größe: {QUOTES}",
    # names of files in conf/
    "experiment=": "experiment= is empty: expected a file of conf/experiment; run.py --help "
    "describes all",
    "scale=": f"scale= is empty: choose one of {SCALES}",
    "scale=huge": f"scale=huge is unknown: choose one of {SCALES}",
    "experiment=resnet": "experiment=resnet is unknown: did you mean resnet_cifar10? run.py --help "
    "describes all",
    "experiment=mnist": "experiment=mnist is unknown: did you mean mnist_correlation or mnist_lr "
    "or mnist_mlp? run.py --help describes all",
    "experiment=../optimizer/adam": "experiment=../optimizer/adam is unknown: expected a file of "
    "conf/experiment; run.py --help describes all",
    "optimizer=ädäm": "optimizer=ädäm is unknown: expected a file of conf/optimizer; run.py "
    "--help describes all",
    f"optimizer={'a' * 5000}": f"optimizer={'a' * 80}… is unknown: expected a file of "
    "conf/optimizer; run.py --help describes all",
    "experiment=mnist_lr experiment=nmt": "experiment=mnist_lr and experiment=nmt exclude each "
    "other: drop one, or write -m experiment=mnist_lr,nmt for a sweep",
    "+experiment=mnist_lr": "+experiment=mnist_lr is invalid: write experiment=… without +",
    "~optimizer": "~optimizer is invalid: write optimizer=… without ~",
    "optimizer=null": "experiment, optimizer, scale and tracking cannot be null: expected the "
    "name of a file, as in optimizer=adam",
    # keys
    "optimizer=adam optimizer.n=5": f"optimizer.n is unknown: {ADAM}",
    "optimizer=adam optimizer.lrr=5": f"optimizer.lrr is unknown: did you mean lr? {ADAM}",
    "optimizer=adam optimizer.weight_decay=1": "optimizer.weight_decay is not set in the files of "
    "this run: add it with +optimizer.weight_decay=…",
    "sede=1": "sede is an unknown key: did you mean seed?",
    "lr=1": "lr is an unknown key: did you mean optimizer.lr?",
    "tracking.zzzz=1": "tracking.zzzz is unknown: tracking takes mode, project, entity",
    "data.limit=5": "data.limit is unknown: experiment=counterexample_stochastic has no data",
    "schedule.x=1": "schedule.x is unknown: experiment=counterexample_stochastic has no schedule",
    "experiment=mnist_lr task.data.limit=5": "task.data.limit is unknown: data is a top-level key, "
    "set data.limit=",
    # values
    "seed=": "seed= is invalid: expected an integer",
    "seed=1.5": "seed=1.5 is invalid: expected an integer",
    "force=maybe": "force=maybe is invalid: expected true or false",
    "records=mine": "records=mine is invalid: expected 'own', 'published' or 'all'",
    "device=tpu": "device=tpu is invalid: expected auto, cpu, cuda, cuda:1 (a number) or mps",
    "optimizer=adam optimizer.betas=[1.9,0.9]": "optimizer.betas=[1.9, 0.9] is invalid: expected "
    "a list of numbers with 0 <= beta < 1",
    "optimizer=adashift optimizer.betas=[1.9,0.9]": "optimizer.betas=[1.9, 0.9] is invalid: "
    "expected a list of numbers with 0 <= beta < 1, or beta1 = 1",
    "optimizer=custom": "optimizer._target_ has no value: set optimizer._target_=module.Class",
    "optimizer=custom optimizer._target_=Foo": "optimizer._target_=Foo is invalid: expected "
    "module.Class",
    "optimizer=custom optimizer._target_=no.Foo": "optimizer._target_=no.Foo cannot be imported: "
    "No module named 'no'",
    # sweeps
    "seed=1,2": "seed=1,2 is for more than one run: add -m, as in run.py -m seed=1,2",
    "sweep=betas": "sweep=betas is for more than one run: add -m, as in run.py -m sweep=betas",
    "runs=figure-1": "runs=figure-1 is for more than one run: add -m, as in run.py -m "
    "runs=figure-1",
    "engine=joblib": "engine=joblib is for more than one run: add -m, as in run.py -m "
    "engine=joblib",
    "-m sweep=betas runs=figure-9": "runs=figure-9 and sweep=betas exclude each other: each "
    "defines the runs of the sweep; drop one",
    "-m 'seed=range(3,0)'": "the sweep has no runs: check its ranges",
    "-m runs=": "runs= is empty: expected figure-4, table-5, figure-all …",
    "-m runs=figure-99": f"there is no figure 99: {FIGURES}",
    "-m runs=figure-9 optimizer.lr=0.1": f"optimizer.lr=0.1 cannot be set here: {ALLOWED}run.py "
    "for other runs",
    "-m optimizer=sgd,adam optimizer.momentum=0.5": f"optimizer.momentum is unknown: {ADAM}",
}

# what is typed after `python -m experiments` → the error
EXPERIMENTS = {
    "": "the following arguments are required: what, number|all|folder|key=value; see python -m "
    "experiments --help",
    "figures": "figures is unknown: did you mean figure? choose one of "
    + ", ".join(sorted([*COMMANDS, "show"])),
    "figure 1 --foo": "unrecognized arguments: --foo; see python -m experiments --help",
    "figure": "which figure? Give a number from 1 to 24, or all",
    "figure 99": f"there is no figure 99: {FIGURES}",
    "figure all 3": "all is every figure: drop 3",
    "figure 1 seed=3": f"seed=3 cannot be set here: {ALLOWED}run.py for other runs",
    "--extra , figure 3": "--extra (EXTRA= of make) is empty: expected files of conf/optimizer, as "
    "in lion,adamw",
    "--extra lion figure all": "--extra lion (EXTRA= of make) adds curves to one figure, as in "
    "make figure-3 EXTRA=lion: drop it",
    "--extra lion table 5": "--extra lion (EXTRA= of make) adds curves to one figure, as in "
    "make figure-3 EXTRA=lion: drop it",
    "status figure": "figure is unknown: expected figure-4, table-5, figure-all …",
    "claims 3": "claims takes only key=value: drop 3",
    "verify scale=smoke": "verify trains every run at its published scale: drop scale=smoke",
}

# what is typed after `make` → what make prints
MAKE = {
    "figre-1": "there is no target figre-1: make help lists all",
    "figure-99": f"there is no figure-99: {FIGURES.replace('s2, s3, s6', 's2 s3 s6')}",
    "table-99": "there is no table-99: the paper has tables 1 to 9, conf/table also has s4 s5",
    "sweep-betas": 'sweep-betas needs an experiment: add ARGS="experiment=… optimizer=…"',
}


@pytest.mark.parametrize("typed", RUN_PY, ids=lambda typed: typed[:40])
def test_run_py(typed):
    assert run_py(*shlex.split(typed)) == f"error: {RUN_PY[typed]}"


@pytest.mark.parametrize("typed", EXPERIMENTS)
def test_python_m_experiments(typed):
    with pytest.raises(ConfigError) as error:
        main(typed.split())
    assert str(error.value) == EXPERIMENTS[typed]


@pytest.mark.parametrize("typed", MAKE)
def test_make(typed):
    out = subprocess.run(["make", typed, "ARGS="], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 2 and out.stdout == ""
    assert re.sub(r"^Makefile:\d+: \*\*\* ", "", out.stderr) == f"{MAKE[typed]}.  Stop.\n"


def test_make_draws_any_figure_of_conf(tmp_path):
    """A user's figure needs no change of the Makefile."""
    (tmp_path / "conf/figure").mkdir(parents=True)
    (tmp_path / "conf/figure/valley.yaml").touch()
    command = ["make", "-f", ROOT / "Makefile", "-n", "figure-valley", f"VENV={ROOT}/.venv"]
    for name in ("requirements.lock", "pyproject.toml"):
        (tmp_path / name).touch()
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "-m experiments figure valley  scale=auto" in out.stdout, out.stderr


# -- what is printed otherwise -----------------------------------------------------------------


def test_the_version_is_that_of_the_package(capsys):
    from adashift import __version__

    assert run_py("--version") == 0
    assert capsys.readouterr().out == f"adashift {__version__}\n"


def test_the_help_describes_every_choice(capsys):
    assert run_py("--help") == 0
    lines = capsys.readouterr().out.splitlines()
    for group in ("experiment", "optimizer", "scale", "tracking", "sweep", "engine"):
        assert f"{group}=" in lines
        for name in paths.choices_of(group):
            line = rf"  {re.escape(name)}  +{re.escape(paths.description(group, name))}"
            assert any(re.fullmatch(line, found) for found in lines)
            assert 10 < len(paths.description(group, name)) < 150


def test_the_printed_config_has_values_only(capsys):
    assert not run_py("--cfg", "job", "experiment=mnist_lr", "scale=auto")
    shown = capsys.readouterr().out
    assert "\nscale: paper\n" in shown and "$" not in shown


def test_options_may_follow_settings():
    line = read_command_line(["optimizer=adam,sgd", "-m", "seed=1", "optimizer.lr=0.1"])
    assert line.for_hydra == ["-m", "optimizer=adam,sgd", "seed=1", "optimizer.lr=choice(0.1)"]


@pytest.mark.parametrize(
    "program", ["run.py --help", "-m experiments status", "run.py scale=smoke"]
)
def test_a_closed_pipe_is_no_error(program, tmp_path):
    more = "" if "--help" in program else f"results={tmp_path} tracking=off"
    command = f"{sys.executable} {program} {more} | head -1"
    out = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert out.stderr == "" and out.stdout.count("\n") == 1


@pytest.mark.slow
def test_torchrun_prints_a_mistake_once_and_in_its_summary():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "run.py"]
    out = subprocess.run(
        [*command, "experiment=resnet"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    line = f"error: {RUN_PY['experiment=resnet']}"
    assert out.returncode == 1
    assert [found for found in out.stderr.splitlines() if line in found] == [
        line, f"  traceback : {line}"
    ]  # fmt: skip


# -- what must not be accepted silently --------------------------------------------------------


def test_a_run_in_which_adashift_does_not_move_is_warned_of(tmp_path, capsys):
    words = ["scale=smoke", "tracking=off", f"results={tmp_path}", "steps=5"]
    assert not run_py("optimizer=adashift", "optimizer.n=5", "log_every=5", *words)
    assert capsys.readouterr().err.splitlines()[0] == (
        "warning: AdaShift does not move the parameters in this run: its first n=5 steps only "
        "fill the window, and the run has 5; set steps= or optimizer.n="
    )
    assert not run_py("optimizer=adashift", "optimizer.n=4", "log_every=5", *words)
    assert "warning" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adashift", "non_adashift", "adashift_ema"])
@pytest.mark.parametrize("experiment", paths.choices_of("experiment"))
def test_adashift_moves_in_every_smoke_run(experiment, name, capsys):
    words = [f"experiment={experiment}", f"optimizer={name}", "scale=smoke", "++optimizer.lr=1"]
    try:
        prepare(compose(words), torch.device("cpu"))
    except ConfigError as error:
        assert "use optimizer=adam" in str(error)  # a measurement of Adam
    assert "does not move" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fused": "yes"}, "fused is 'yes'; it must be True, False or None"),
        ({"n": 2.5}, "n is 2.5; it must be an integer"),
        ({"m": 1.5}, "m is 1.5; it must be an integer"),
    ],
)
def test_options_of_adashift(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        AdaShift([torch.zeros(1)], **options)


def test_adashift_does_not_load_the_state_of_adam():
    state = torch.optim.Adam([torch.zeros(1)]).state_dict()
    with pytest.raises(ValueError, match=r"the checkpoint has no n, .*so it is not of AdaShift"):
        AdaShift([torch.zeros(1)]).load_state_dict(state)


def test_parameters_of_an_integer_type_are_an_error():
    with pytest.raises(ValueError, match=r"a parameter has dtype torch.int64; it must be floating"):
        AdaShift([torch.zeros(1, dtype=torch.int64)])


@pytest.mark.parametrize("form", ["name.py", "name/__init__.py", "name/inner.py"])
def test_a_module_of_the_current_folder_hides_an_installed_one(tmp_path, monkeypatch, form):
    installed = tmp_path / "installed/some_optimizers"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("Mine = 'installed'\n")
    own = tmp_path / "here" / form.replace("name", "some_optimizers")
    own.parent.mkdir(parents=True)
    own.write_text("Mine = 'own'\n")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.chdir(tmp_path / "here")
    module = "some_optimizers.inner" if "inner" in form else "some_optimizers"
    try:
        assert import_target(f"{module}.Mine", "optimizer") == "own"
    finally:
        for name in ("some_optimizers", "some_optimizers.inner"):
            sys.modules.pop(name, None)


def test_an_experiment_file_without_its_package_line_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "more/experiment"
    folder.mkdir(parents=True)
    (folder / "valley.yaml").write_text("steps: 3\n")
    words = ["--config-dir", str(tmp_path / "more"), "experiment=valley", "optimizer.lr=1"]
    assert run_py(*words) == (
        "error: conf/experiment/valley.yaml has no package: its first line must be "
        "# @package _global_"
    )


def test_a_file_that_is_no_yaml_is_named_with_the_line(tmp_path):
    folder = tmp_path / "more/experiment"
    folder.mkdir(parents=True)
    (folder / "valley.yaml").write_text("# @package _global_\ntask: {a: b\nsteps: 3\n")
    error = run_py("--config-dir", str(tmp_path / "more"), "experiment=valley")
    assert error.startswith("error: more/experiment/valley.yaml: line 3 is not valid YAML: ")
